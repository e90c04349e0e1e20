"""From a record of the ring to a line of text: made plain, redacted, bounded, then rendered by structlog.

Runs in the drain's thread only. Secrets (keys, passwords, cookies) and what clients wrote or were answered never reach
a line: a field is redacted by its name, and strings are searched for the usual forms of credentials.
"""

import logging
import re
import traceback
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from itertools import islice
from numbers import Integral, Real
from typing import Any, Final

import orjson
import structlog

from aserve import faults
from aserve.obs.log import Record

Renderer = Callable[[Record], bytes]
"""One record to one line, newline included. Never raises."""

SECRET_KEYS: Final = frozenset(
    "api_key api_keys apikey authorization proxy_authorization cookie set_cookie password passwd secret credentials "
    "access_token auth_token bearer_token refresh_token hf_token owner cache_salt".split()
)
"""Redacted whatever the value is."""

CONTENT_KEYS: Final = frozenset(
    "prompt prompts messages message_content text texts content input inputs output outputs output_text completion "
    "instructions arguments body stop tokens token_ids prompt_token_ids chat_template".split()
)
"""Redacted unless the value is a number: what clients wrote or were answered, but counts may be shown."""

REDACTED: Final = "[redacted]"

MAX_STRING: Final = 4096
MAX_ITEMS: Final = 64
MAX_DEPTH: Final = 4
MAX_TRACEBACK: Final = 16384
"""Bounds of a line: with them the largest ring of ordinary records renders in a fraction of a second."""

_NEVER, _NUMBER, _ALWAYS = range(3)

_CREDENTIALS: Final = re.compile(
    r"(?i)\b(?P<kind>bearer|basic)\s+[\w.~+/=-]{4,}"
    r"|(?P<name>\b(?:api[_-]?key|access_token|password|secret)[\"']?\s*[=:]\s*[\"']?)[^\s&\"',;]+"
    r"|\b(?:sk-[\w-]{8,}|hf_\w{16,})"
)
_SUSPECT: Final = re.compile(r"[ =:]|sk-|hf_")
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]|\n|\t")
_CONTROL_BUT_LINES: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def json_renderer() -> Renderer:
    """JSON lines: "timestamp" (UTC), "level", "event", then the fields in the order in which they were given."""
    render = structlog.processors.JSONRenderer(serializer=_dumps)

    def line(fields: dict[str, Any]) -> bytes:
        moment = datetime.fromtimestamp(fields.pop("t"), UTC)
        stamp = moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
        rendered = render(None, fields["level"], {"timestamp": stamp, **_in_order(fields)})
        return (rendered if isinstance(rendered, bytes) else rendered.encode()) + b"\n"

    return _guarded(line)


def pretty_renderer(*, colors: bool) -> Renderer:
    """Lines for people, in local time. Control characters are escaped, so that no field can drive the terminal."""
    render = structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=structlog.dev.plain_traceback)

    def line(fields: dict[str, Any]) -> bytes:
        moment = datetime.fromtimestamp(fields.pop("t")).astimezone()
        exception = fields.pop("exception", None)
        shown = {"timestamp": moment.strftime("%H:%M:%S.%f")[:-3], **_escaped(_in_order(fields))}
        if exception is not None:
            shown["exception"] = _CONTROL_BUT_LINES.sub(_escape, exception)
        return render(None, fields["level"], shown).encode("utf-8", "backslashreplace") + b"\n"

    return _guarded(line)


def _guarded(line: Callable[[dict[str, Any]], bytes]) -> Renderer:
    def render(record: Record) -> bytes:
        try:
            faults.hit("log.render")
            return line(_fields(record))
        except Exception as error:
            return _last_resort(record, error)

    return render


def _last_resort(record: Record, error: Exception) -> bytes:
    event = record.get("event") if isinstance(record, dict) else record.msg
    shown = {
        "level": "error",
        "event": "log.unrenderable",
        "original": _ascii(event),
        "error": _ascii(error),
    }
    return orjson.dumps(shown) + b"\n"


def _fields(record: Record) -> dict[str, Any]:
    if isinstance(record, logging.LogRecord):
        return _fields_of_stdlib(record)
    exc_info = record.get("exc_info")
    if not isinstance(exc_info, BaseException):
        return _plain_mapping(record, 0)
    fields = _plain_mapping({key: value for key, value in record.items() if key != "exc_info"}, 0)
    fields["exception"] = _traceback(exc_info)
    return fields


def _fields_of_stdlib(record: logging.LogRecord) -> dict[str, Any]:
    try:
        message = record.getMessage()
    except Exception:  # wrong arguments for the format: the caller's mistake must not cost the line
        message = f"{record.msg} {_repr(record.args)}"
    fields = {
        "t": record.created,
        "level": record.levelname.lower(),
        "event": _plain_string(message),
        "logger": record.name,
    }
    if record.exc_info and record.exc_info[1] is not None:
        fields["exception"] = _traceback(record.exc_info[1])
    return fields


def _in_order(fields: dict[str, Any]) -> dict[str, Any]:
    return {"level": fields["level"], "event": fields["event"], **fields}


def _plain(value: Any, depth: int) -> Any:
    kind = type(value)
    if value is None or kind is bool or kind is float:
        return value
    if kind is int:
        return value if -(2**63) <= value < 2**64 else str(value) if value.bit_length() < 4096 else "<a huge integer>"
    if isinstance(value, str):
        return _plain_string(str(value))
    if isinstance(value, bytes | bytearray | memoryview):
        return f"<{len(value)} bytes>"
    if isinstance(value, BaseException):
        return _plain_string(f"{type(value).__name__}: {_str(value)}")
    if isinstance(value, list | tuple | set | frozenset):
        if depth == MAX_DEPTH:
            return f"<{kind.__name__} of {len(value)}>"
        items = [_plain(item, depth + 1) for item in islice(value, MAX_ITEMS)]
        return items if len(value) <= MAX_ITEMS else [*items, f"<{len(value) - MAX_ITEMS} more>"]
    mapping = value if isinstance(value, Mapping) else _attributes(value)
    if mapping is not None:
        return f"<{kind.__name__}>" if depth == MAX_DEPTH else _plain_mapping(mapping, depth + 1)
    if isinstance(value, Integral):  # numpy's integers too
        return _plain(int(value), depth)
    if isinstance(value, Real):
        return float(value)
    return _plain_string(_repr(value))


def _attributes(value: Any) -> dict[str, Any] | None:
    """The fields of a dataclass or of a msgspec struct, whose repr would show a prompt among them."""
    names = getattr(type(value), "__dataclass_fields__", None) or getattr(type(value), "__struct_fields__", None)
    return None if names is None else {name: getattr(value, name, None) for name in names}


def _plain_mapping(mapping: Mapping[Any, Any], depth: int) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for key, value in islice(mapping.items(), MAX_ITEMS):
        name, shown_if = _name(key if isinstance(key, str) else _repr(key))
        shown = shown_if is _ALWAYS or (shown_if is _NUMBER and (value is None or isinstance(value, Real)))
        plain[name] = _plain(value, depth) if shown else REDACTED
    if len(mapping) > MAX_ITEMS:
        plain["..."] = f"<{len(mapping) - MAX_ITEMS} more>"
        for key in ("t", "level", "event"):
            if depth == 0 and key in mapping:
                plain[key] = _plain(mapping[key], depth)
    return plain


@lru_cache(maxsize=1024)
def _name(key: str) -> tuple[str, int]:
    """A field's name as it is shown, and whether its value is."""
    plain_key = key.lower().replace("-", "_")
    shown = _NEVER if plain_key in SECRET_KEYS else _NUMBER if plain_key in CONTENT_KEYS else _ALWAYS
    return (key if key.isidentifier() else _plain_string(key)), shown


def _plain_string(text: str) -> str:
    if len(text) > MAX_STRING:
        text = f"{text[:MAX_STRING]}<{len(text) - MAX_STRING} more>"
    if not text.isascii():
        text = text.encode("utf-8", "backslashreplace").decode()  # lone surrogates have no UTF-8
    return _without_credentials(text)


def _without_credentials(text: str) -> str:
    if len(text) < 8 or not _SUSPECT.search(text):  # 0.2 us in place of 5 for what most strings are
        return text
    return _CREDENTIALS.sub(_redact, text)


def _redact(match: re.Match[str]) -> str:
    kind, name = match["kind"], match["name"]
    return f"{kind} {REDACTED}" if kind else f"{name}{REDACTED}" if name else REDACTED


def _escaped(value: Any) -> Any:
    if isinstance(value, str):
        return _CONTROL.sub(_escape, value)
    if isinstance(value, dict):
        return {_escaped(key): _escaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    return value


def _escape(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()


def _traceback(error: BaseException) -> str:
    text = "".join(traceback.format_exception(error)).rstrip()
    if len(text) > MAX_TRACEBACK:  # the end says what happened
        text = f"<{len(text) - MAX_TRACEBACK} more>{text[-MAX_TRACEBACK:]}"
    return _without_credentials(text.encode("utf-8", "backslashreplace").decode())


def _repr(value: Any) -> str:
    try:
        return repr(value)[: MAX_STRING + 1]
    except Exception:
        return f"<{type(value).__name__} that cannot be shown>"


def _ascii(value: Any) -> str:
    return _without_credentials(_repr(value).encode("ascii", "backslashreplace").decode())


def _str(value: Any) -> str:
    try:
        return str(value)
    except Exception:
        return "<cannot be shown>"


def _dumps(fields: dict[str, Any], **_options: Any) -> bytes:
    return orjson.dumps(fields)
