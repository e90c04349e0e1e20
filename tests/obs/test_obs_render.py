"""Lines are plain, bounded, and free of secrets and of what clients wrote."""

import logging
import re
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aserve import faults
from aserve.core.request import FinishReason
from aserve.obs.render import MAX_STRING, json_renderer, pretty_renderer

render_json = json_renderer()
render_pretty = pretty_renderer(colors=False)


def record(**fields: Any) -> dict[str, Any]:
    return {**fields, "t": 1_700_000_000.25, "level": "info", "event": "request.finished"}


def rendered(**fields: Any) -> dict[str, Any]:
    """The JSON line's fields, without time, level and event."""
    line = orjson.loads(render_json(record(**fields)))
    return {key: value for key, value in line.items() if key not in ("timestamp", "level", "event")}


def stdlib(message: str, *args: object, error: Exception | None = None) -> logging.LogRecord:
    exc_info = (type(error), error, error.__traceback__) if error else None
    return logging.LogRecord("asyncio", logging.ERROR, "f.py", 1, message, args, exc_info)


def test_json_line() -> None:
    """Time, level and event lead; the fields follow in their order; one line feed ends it."""
    line = render_json(record(request_id="a", num_tokens=3))

    assert line == (
        b'{"timestamp":"2023-11-14T22:13:20.250Z","level":"info","event":"request.finished",'
        b'"request_id":"a","num_tokens":3}\n'
    )


def test_pretty_line() -> None:
    """A line for people names time, level, event and fields."""
    line = render_pretty(record(request_id="a", num_tokens=3)).decode()

    assert re.fullmatch(r"\d\d:\d\d:\d\d\.250 \[info +\] request\.finished +num_tokens=3 request_id=a\n", line)


@dataclass
class Request:
    prompt: str
    num_tokens: int


class Body(msgspec.Struct):
    messages: list[str]
    n: int


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (True, True),
        (1.5, 1.5),
        (2**64 - 1, 2**64 - 1),
        (2**64, "18446744073709551616"),
        pytest.param(10**5000, "<a huge integer>", id="huge"),
        (float("nan"), None),
        (FinishReason.STOP, "stop"),
        (np.int64(4), 4),
        (np.float32(0.5), 0.5),
        (b"abc", "<3 bytes>"),
        (ValueError("bad"), "ValueError: bad"),
        ({3: (1, 2)}, {"3": [1, 2]}),
        (list(range(70)), [*range(64), "<6 more>"]),
        ([[[[[1]]]]], [[[["<list of 1>"]]]]),
        ("\ud800", "\\ud800"),
        ("x" * 5000, "x" * MAX_STRING + "<904 more>"),
        (Request("secret story", 3), {"prompt": "[redacted]", "num_tokens": 3}),
        (Body(["secret story"], 2), {"messages": "[redacted]", "n": 2}),
    ],
)
def test_values_become_plain(value: Any, expected: Any) -> None:
    """Every kind of value has a bounded form that JSON can hold."""
    assert rendered(value=value) == {"value": expected}


def test_unshowable_value() -> None:
    """A value whose repr raises is named by its type."""

    class Unfriendly:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    assert rendered(value=Unfriendly()) == {"value": "<Unfriendly that cannot be shown>"}


def test_cyclic_value() -> None:
    """A value that holds itself is cut at the depth limit."""
    cycle: list[Any] = []
    cycle.append(cycle)

    assert rendered(value=cycle) == {"value": [[[["<list of 1>"]]]]}


@pytest.mark.parametrize(
    "fields",
    [
        {"api_key": "sesame"},
        {"Authorization": "Bearer sesame"},
        {"headers": {"Proxy-Authorization": "sesame", "cookie": "a=sesame"}},
        {"prompt": "sesame"},
        {"messages": [{"role": "user", "content": "sesame"}]},
        {"choices": [{"text": "sesame"}]},
        {"tokens": ["sesame"]},
        {"note": "got Authorization: Bearer sesame-1"},
        {"note": "GET /v1/models?api_key=sesame&x=1"},
        {"note": 'body {"api_key": "sesame"}'},
        {"note": "key sk-sesame1234 refused"},
        {"error": ValueError("Bearer sesame1")},
        {"exc_info": ValueError("Bearer sesame1")},
        {"a": {"b": {"c": {"d": {"e": {"f": "sesame"}}}}}},
    ],
)
def test_secrets_and_texts_are_redacted(fields: dict[str, Any]) -> None:
    """Neither renderer lets through what a field's name or a string's form gives away."""
    assert b"sesame" not in render_json(record(**fields))
    assert b"sesame" not in render_pretty(record(**fields))


def test_counts_under_content_names_are_shown() -> None:
    """A number is no text, whatever its field is called; under a secret's name it is hidden still."""
    assert rendered(tokens=5, prompt=7, password=9) == {"tokens": 5, "prompt": 7, "password": "[redacted]"}


def test_traceback() -> None:
    """``exc_info`` shows the traceback under "exception"."""
    try:
        raise ValueError("bad")
    except ValueError as error:
        fields = rendered(exc_info=error)

    assert fields["exception"].startswith("Traceback")
    assert fields["exception"].endswith("ValueError: bad")


def test_stdlib_record() -> None:
    """A record of ``logging`` is formatted here, its logger named, its credentials taken out."""
    line = orjson.loads(render_json(stdlib("refused %s", "Bearer sesame")))

    assert line["event"] == "refused Bearer [redacted]"
    assert (line["level"], line["logger"]) == ("error", "asyncio")


def test_stdlib_record_with_wrong_arguments() -> None:
    """A format that does not fit its arguments still gives a line."""
    assert orjson.loads(render_json(stdlib("%d rows", "many")))["event"] == "%d rows ('many',)"


def test_stdlib_traceback() -> None:
    """``logger.exception`` brings its traceback."""
    assert "ValueError: bad" in orjson.loads(render_json(stdlib("a", error=ValueError("bad"))))["exception"]


def test_terminal_cannot_be_driven_by_fields() -> None:
    """Control characters in values, names, events and tracebacks are escaped; each record without one is one line."""
    fields = {"value": "a\x1b[2Jb\rc\nd", "na\x1bme": 1, "nested": {"x": ["\x9b1m"]}}
    line = render_pretty({**record(**fields), "event": "e\x1b]0;title\x07"}).decode()

    assert re.findall(r"[\x00-\x1f\x7f-\x9f]", line) == ["\n"]
    assert "\x1b" not in render_pretty(record(exc_info=ValueError("\x1b[2J"))).decode()


def test_fault_in_rendering_gives_a_line_all_the_same() -> None:
    """When rendering itself fails, the line says so and keeps the event."""
    with faults.armed("log.render", error=TypeError("unserialisable")):
        line = orjson.loads(render_json(record(value=1)))

    assert line == {
        "level": "error",
        "event": "log.unrenderable",
        "original": "'request.finished'",
        "error": "TypeError('unserialisable')",
    }


nasty_text = st.text(st.sampled_from('aZ =:"\\\n\x00\x1b\x9b\u2028\ud800é🙂'))
json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | nasty_text | st.binary(),
    lambda children: st.lists(children) | st.dictionaries(nasty_text | st.integers(), children),
    max_leaves=20,
)


@given(st.dictionaries(nasty_text, json_like, max_size=6))
def test_any_record_is_one_json_line(fields: dict[str, Any]) -> None:
    """Whatever the fields are, the line is one line of valid JSON with the event in it."""
    line = render_json(record(**fields))

    assert line.count(b"\n") == 1
    assert orjson.loads(line)["event"] == "request.finished"
    assert render_pretty(record(**fields)).endswith(b"\n")
