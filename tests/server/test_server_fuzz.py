"""No bad input gives a 5xx: mutated bodies of every posting endpoint, mutated requests, and the next request works."""

import asyncio
import json
from typing import Any

import pytest
import uvloop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server_builders import HELLO, Served, chat, http, serving

from aserve.server.schema import IGNORED, UNSUPPORTED, ApplyTemplateRequest, ChatRequest, CompletionRequest

FIELDS = sorted(
    {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__, *ApplyTemplateRequest.__struct_fields__}
    | set(IGNORED)
    | set(UNSUPPORTED)
    | {"tokens", "content", "return_token_strs", "unknown"}
)
PATHS = ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "/apply-template"]

atoms = (
    st.none()
    | st.booleans()
    | st.sampled_from([0, 1, -1, 257, 258, 2**31, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 0.0, -0.0, 1.0, 1e308, 5e-324])
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(["", "a", "user", "text", "auto", "none", "\u2028", "\0", "<|eos|>"])
)
values = st.recursive(
    atoms,
    lambda children: (
        st.lists(children, max_size=4)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "5", "include_usage", "x"]), children, max_size=4
        )
    ),
    max_leaves=8,
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant"])},
        optional={"content": st.text(max_size=8) | values, "name": values, "tool_calls": values},
    ),
    max_size=3,
)
bodies = st.dictionaries(st.sampled_from(FIELDS), values, max_size=5).flatmap(
    lambda extra: st.sampled_from(
        [
            {**chat(), "prompt": "a", "tokens": [97], **extra},
            {"messages": HELLO, "prompt": [1, 2], **extra},
            {"prompt": ["a", "b"], "stream": True, **extra},
            extra,
        ]
    )
)


@pytest.fixture(scope="module")
def answering() -> Any:
    """Sends bytes to one server that lives for the whole module, and returns its statuses."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        server = serving()
        served: Served = runner.run(server.__aenter__())
        yield lambda sent: runner.run(_statuses(served, sent))
        runner.run(server.__aexit__(None, None, None))


async def _statuses(served: Served, sent: bytes) -> list[int]:
    """Of the request, and of a good one on a fresh connection after it."""
    raw = await served.raw(sent)
    assert "request.failed" not in [event for _, event, _ in served.log.records]
    served.log.records.clear()
    served.engine.calls.clear()
    good = await served.post("/v1/chat/completions", chat(max_tokens=1))
    statuses = [good.status]
    if raw:
        statuses.append(int(raw.split()[1]))
        if raw.startswith(b"HTTP/1.1 2") and b"text/event-stream" in raw:
            assert b"data: [DONE]\n\n" in raw
    return statuses


def _is_well(statuses: list[int]) -> bool:
    good, *others = statuses
    return good == 200 and all(200 <= status < 500 for status in others)


slow_is_fine = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])


@slow_is_fine
@given(path=st.sampled_from(PATHS), body=bodies | messages.map(lambda some: {"messages": some}))
def test_no_body_gives_a_5xx(answering: Any, path: str, body: dict[str, Any]) -> None:
    """Any JSON object, from nearly right to wild: an answer or a fault of the client's."""
    assert _is_well(answering(http("POST", path, body)))


@slow_is_fine
@given(
    path=st.sampled_from(PATHS),
    at=st.integers(0, 200),
    junk=st.binary(max_size=4) | st.sampled_from([b"\\ud83d", b"\xff", b"[" * 70, b"1e400", b"NaN", b'"', b"\0"]),
    cut=st.integers(0, 3),
)
def test_no_broken_json_gives_a_5xx(answering: Any, path: str, at: int, junk: bytes, cut: int) -> None:
    """Bytes put in or taken out anywhere in a good body."""
    good = json.dumps({**chat(), "prompt": "a", "tokens": [97]}).encode()
    at %= len(good)

    assert _is_well(answering(http("POST", path, good[:at] + junk + good[at + cut :])))


@slow_is_fine
@given(
    method=st.sampled_from(["GET", "POST", "DELETE", "HEAD", "OPTIONS", "PUT", "BREW", "get"]),
    path=st.sampled_from(["/", "*", "http://x/health", "/v1/models/", "/v1/requests/", "/health?", "//", "/%"]),
    tail=st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=8),
    header=st.sampled_from(["Host", "Origin", "Authorization", "X-Request-ID", "Content-Type", "Expect", "Connection"]),
    value=st.text(st.characters(min_codepoint=32, max_codepoint=255, exclude_characters="\x7f"), max_size=12),
)
def test_no_request_line_or_header_gives_a_5xx(
    answering: Any, method: str, path: str, tail: str, header: str, value: str
) -> None:
    """Any method, target and header value that a socket can carry."""
    assert _is_well(answering(http(method, path + tail, headers=f"{header}: {value}\r\n")))
