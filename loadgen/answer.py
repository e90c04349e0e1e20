"""Reads what the events of a stream say, and parses JSON only where it must. Pure.

At 50,000 events a second there are 20 µs for each, of which decoding JSON would take a good part. What makes an event
count is that it carries text, and that shows in its bytes: inside a JSON string every quote is escaped, so that
``"content":"`` can only be a key with a string. Usage, finish reasons and faults are rare, are found the same way, and
are then decoded properly. A token whose text is itself such a word costs one decoding more and changes nothing.
"""

import re
from array import array
from collections.abc import Mapping
from typing import Any

from loadgen import codec
from loadgen.errors import WireError
from loadgen.sample import Answer
from loadgen.work import Endpoint

DONE = b"[DONE]"

# Any of the fields in which servers put generated text, holding at least one character.
_TEXT = re.compile(rb'"(?:content|text|reasoning_content|reasoning|refusal|arguments|name)"\s*:\s*"(?!")')
_USAGE = re.compile(rb'"usage"\s*:\s*\{')
_FINISH = re.compile(rb'"finish_reason"\s*:\s*"')
_TYPE = re.compile(rb'"type"\s*:\s*"(response\.[a-z_.]+|error)"')
_DELTA = re.compile(rb'"delta"\s*:\s*"(?!")')

_DELTA_TYPES = frozenset(
    (
        b"response.output_text.delta",
        b"response.reasoning_text.delta",
        b"response.reasoning_summary_text.delta",
        b"response.refusal.delta",
        b"response.function_call_arguments.delta",
    )
)


class AnswerReader:
    """Takes the events of one chat or completions stream with their times; ``answer`` gives what was learnt so far.

    ``is_done`` turns true at [DONE]; ``fault`` is the message of an error event. Both end the reading: the owner gives
    it nothing more. ``num_events`` counts those with text; with ``keeps_text`` they are kept for ``text``.
    """

    __slots__ = (
        "_cached_tokens",
        "_completion_tokens",
        "_empty_text",
        "_event_ns",
        "_event_tokens",
        "_finish_reason",
        "_kept",
        "_prompt_tokens",
        "_some_text",
        "fault",
        "is_done",
    )

    _SOME_TEXT = b'"content":"'
    _EMPTY_TEXT = b'"content":""'

    def __init__(self, *, keeps_text: bool = False) -> None:
        self.is_done = False
        self.fault: str | None = None
        self._kept: list[bytes] | None = [] if keeps_text else None
        self._event_ns = array("q")
        self._event_tokens = array("q")
        self._prompt_tokens: int | None = None
        self._cached_tokens: int | None = None
        self._completion_tokens: int | None = None
        self._finish_reason: str | None = None

    @property
    def has_finished(self) -> bool:
        """Whether a finish reason came: such a stream is whole even where its server sends no [DONE]."""
        return self._finish_reason is not None

    @property
    def num_events(self) -> int:
        """Content events so far."""
        return len(self._event_ns)

    def read(self, event: bytes, at_ns: int) -> None:
        """Take the next event, ``at_ns`` after the send. Raises WireError where it has to be JSON and is not."""
        has_text = (self._SOME_TEXT in event and self._EMPTY_TEXT not in event) or _TEXT.search(event) is not None
        if (
            (b'"usage"' in event and _USAGE.search(event))
            or (b'"finish_reason"' in event and _FINISH.search(event))
            or b'"error"' in event
        ):
            self._decode(event)
        elif event == DONE:
            self.is_done = True
            return
        if has_text and self.fault is None:
            self._count(event, at_ns)

    def read_whole(self, body: bytes, at_ns: int) -> None:
        """Take an answer that was not streamed: one event with all of the text."""
        self._decode(body)
        if self.fault is None:
            self._count(body, at_ns)
            self.is_done = True

    def answer(self, *, first_byte_ns: int | None, num_bytes: int, queue_ms: float | None = None) -> Answer:
        """Return what the stream said until now."""
        is_counted = len(self._event_tokens) == len(self._event_ns)
        return Answer(
            first_byte_ns=first_byte_ns,
            event_ns=self._event_ns,
            event_tokens=self._event_tokens if is_counted else array("q"),
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            completion_tokens=self._completion_tokens,
            finish_reason=self._finish_reason,
            queue_ms=queue_ms,
            num_bytes=num_bytes,
        )

    def text(self) -> str:
        """Return the text of all events, without reasoning and calls. Meaningful only where it was kept."""
        return "".join(self._text_of(codec.loads(event)) for event in self._kept or ())

    def _count(self, event: bytes, at_ns: int) -> None:
        self._event_ns.append(at_ns)
        if self._completion_tokens is not None:
            self._event_tokens.append(self._completion_tokens)
        if self._kept is not None:
            self._kept.append(event)

    def _text_of(self, fields: Any) -> str:
        match fields:
            case {"choices": [{"delta": {"content": str(text)}}, *_]}:
                return text
            case {"choices": [{"message": {"content": str(text)}}, *_]}:
                return text
            case {"choices": [{"text": str(text)}, *_]}:
                return text
        return ""

    def _decode(self, event: bytes) -> None:
        fields = _loads(event)
        match fields:
            case {"error": fault} if fault:
                self.fault = message_of(fields)
            case {"object": "error"}:
                self.fault = message_of(fields)
            case {"usage": {**usage}}:
                self._read_usage(usage)
        match fields:
            case {"choices": [{"finish_reason": str(reason)}, *_]}:
                self._finish_reason = reason

    def _read_usage(self, usage: Mapping[Any, Any]) -> None:
        match usage:
            case {"prompt_tokens": int(count)} | {"input_tokens": int(count)}:
                self._prompt_tokens = count
        match usage:
            case {"completion_tokens": int(count)} | {"output_tokens": int(count)}:
                self._completion_tokens = count
        match usage:
            case {"prompt_tokens_details": {"cached_tokens": int(count)}} | {
                "input_tokens_details": {"cached_tokens": int(count)}
            }:
                self._cached_tokens = count


class CompletionsReader(AnswerReader):
    """The same for the completions endpoint, whose text has another key."""

    __slots__ = ()

    _SOME_TEXT = b'"text":"'
    _EMPTY_TEXT = b'"text":""'


class ResponsesReader(AnswerReader):
    """The same for the typed events of the Responses endpoint, over SSE and over the websocket."""

    __slots__ = ()

    def read(self, event: bytes, at_ns: int) -> None:
        """Take the next event, ``at_ns`` after the send. Raises WireError where it has to be JSON and is not."""
        found = _TYPE.search(event)
        if found is None:
            if event == DONE:
                self.is_done = True
            return
        kind = found[1]
        if kind in _DELTA_TYPES:
            if b'"delta":"' in event or _DELTA.search(event):
                if b'"delta":""' not in event:
                    self._count(event, at_ns)
        elif kind in (b"response.completed", b"response.incomplete", b"response.failed", b"error"):
            self._decode(event)

    def _text_of(self, fields: Any) -> str:
        match fields:
            case {"type": "response.output_text.delta", "delta": str(text)}:
                return text
            case {"output": [*items]}:
                parts = [part for item in items for part in item.get("content", ())]
                return "".join(part["text"] for part in parts if part.get("type") == "output_text")
        return ""

    def _decode(self, event: bytes) -> None:
        fields = _loads(event)
        match fields:
            case {"type": "error" | "response.failed"} | {"object": "response", "status": "failed"}:
                self.fault = message_of(fields.get("response", fields))
                return
        response = fields.get("response", fields)
        match response:
            case {"usage": {**usage}}:
                self._read_usage(usage)
        match response:
            case {"incomplete_details": {"reason": str(reason)}}:
                self._finish_reason = reason
            case {"status": str(status)}:
                self._finish_reason = status
        self.is_done = True


READERS: Mapping[Endpoint, type[AnswerReader]] = {
    "chat": AnswerReader,
    "completions": CompletionsReader,
    "responses": ResponsesReader,
    "responses-ws": ResponsesReader,
}


def _loads(event: bytes) -> Any:
    try:
        fields = codec.loads(event)
    except ValueError as error:
        raise WireError(f"an event that is not JSON: {event[:80]!r}") from error
    if not isinstance(fields, dict):
        raise WireError(f"an event that is not a JSON object: {event[:80]!r}")
    return fields


def message_of(fields: Any) -> str:
    """Return the message of an error body or event in any of the usual shapes, or else a piece of it."""
    match fields:
        case {"error": {"message": str(message)}} | {"error": str(message)} | {"message": str(message)}:
            return message[:500]
        case {"detail": str(message)}:
            return message[:500]
    return repr(fields)[:500]
