"""Answers of the Responses API, pure: deltas in, the response and its events out.

SSE and the websocket send the same events and differ in the frame around each, so the encoder takes the frame as a
function. Almost every event is a text delta: its bytes before and after the text are made once.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

import orjson

from aserve.core.request import FinishReason
from aserve.engine.generation import Delta, Usage
from aserve.errors import AserveError
from aserve.server.logprobs import TokenBytes, chat_logprobs
from aserve.server.problems import error_object
from aserve.server.sse import escape_line_breaks, json_text

Frame = Callable[[str, bytes], bytes]
"""An event's type and its JSON to the bytes on the wire."""

MAX_INLINE_LOGPROBS: Final = 1000
"""Entries of logprobs, alternatives included, that are written on the loop. The last events repeat all of them four
times, at about 0.5 us an entry and time."""

_MARK: Final = "\0"


def sse_frame(event_type: str, json: bytes) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event_type.encode(), json)


class ResponseStatus(StrEnum):
    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    INCOMPLETE = "incomplete"
    FAILED = "failed"
    CANCELLED = "cancelled"


TERMINAL_EVENT: Final = {
    ResponseStatus.COMPLETED: "response.completed",
    ResponseStatus.INCOMPLETE: "response.incomplete",
    ResponseStatus.CANCELLED: "response.incomplete",  # the API has no event of its own for it
    ResponseStatus.FAILED: "response.failed",
}


@dataclass(slots=True, kw_only=True)
class ResponseState:
    """One response on its way to its end. Written by ``take``, ``cancel`` and ``fail`` only.

    echo: what the object repeats of the request. usage: the stream's own, right once it has ended.
    cache_block_size: tokens of a block of the prefix cache, None without one. generates: False for a response that only
    warms the cache: it completes without output. num_top_logprobs: None is off.
    """

    id: str
    item_id: str
    created_at: int
    model: str
    echo: Mapping[str, Any]
    usage: Usage
    cache_block_size: int | None
    token_bytes: TokenBytes
    generates: bool = True
    num_top_logprobs: int | None = None
    clock: Callable[[], float] = time.time
    status: ResponseStatus = ResponseStatus.IN_PROGRESS
    is_cancelled: bool = False
    texts: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    has_item: bool = False
    completed_at: int | None = None
    reason: str | None = None
    error: AserveError | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def has_ended(self) -> bool:
        return self.status is not ResponseStatus.IN_PROGRESS

    def take(self, delta: Delta) -> None:
        """One delta of the stream's only choice. Its finish must be an end, or the abort of a cancelled response."""
        if self.generates:
            self.has_item = True
            if delta.text:
                self.texts.append(delta.text)
            if self.num_top_logprobs is not None and delta.logprobs:
                self.logprobs += chat_logprobs(delta.logprobs, self.token_bytes, self.num_top_logprobs)
        match delta.finish:
            case None:
                return
            case FinishReason.ABORT:
                self.status, self.reason = ResponseStatus.CANCELLED, "cancelled"
            case FinishReason.LENGTH if self.generates:
                self.status, self.reason = ResponseStatus.INCOMPLETE, "max_output_tokens"
            case _:
                self.status, self.completed_at = ResponseStatus.COMPLETED, int(self.clock())

    def fail(self, error: AserveError) -> None:
        self.status, self.error = ResponseStatus.FAILED, error
        self.completed_at = self.reason = None

    # --- as JSON

    def resource(self) -> dict[str, Any]:
        """The response object at this moment."""
        error = None
        if self.error is not None:
            whole = error_object(self.error)["error"]
            error = {"code": whole["code"] or whole["type"], "message": whole["message"]}
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created_at,
            "completed_at": self.completed_at,
            "status": self.status,
            "error": error,
            "incomplete_details": None if self.reason is None else {"reason": self.reason},
            "model": self.model,
            "output": [self.item()] if self.has_item else [],
            "usage": self._usage() if self.has_ended else None,
            **self.echo,
        }

    def item(self) -> dict[str, Any]:
        """The one output item, a message."""
        match self.status:
            case ResponseStatus.IN_PROGRESS | ResponseStatus.COMPLETED:
                status: str = self.status
            case _:
                status = ResponseStatus.INCOMPLETE
        content = [self.part()] if self.texts or self.has_ended else []
        return {"type": "message", "id": self.item_id, "status": status, "role": "assistant", "content": content}

    def part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs}

    @property
    def is_large(self) -> bool:
        """Whether the object takes long enough to write that it should not be done on the loop."""
        return len(self.logprobs) * (1 + (self.num_top_logprobs or 0)) > MAX_INLINE_LOGPROBS

    def _usage(self) -> dict[str, Any]:
        usage = self.usage
        # A hit covers whole blocks, and so does what the prompt leaves behind for others.
        size = self.cache_block_size
        cacheable = 0 if size is None else usage.prompt_tokens - usage.prompt_tokens % size
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.cached_tokens,
                "cache_write_tokens": max(0, cacheable - usage.cached_tokens),
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }


class ResponseEvents:
    """One response's events in order, with their sequence numbers, framed. Feeds its state."""

    def __init__(self, state: ResponseState, frame: Frame, *, stream_id: str | None = None) -> None:
        """stream_id: repeated in every event where the client gave one."""
        self.state = state
        self._frame = frame
        self._lane = {} if stream_id is None else {"stream_id": stream_id}
        self._place = {"item_id": state.item_id, "output_index": 0, "content_index": 0}
        self._number = 0
        self._is_open = False
        self._has_item = False
        self._num_sent_logprobs = 0
        delta = {"type": "response.output_text.delta", **self._place, **self._lane, "logprobs": [], "delta": _MARK}
        # The mark comes last, so that one in a stream_id would not be taken for it.
        self._prefix, _, self._suffix = orjson.dumps(delta).rpartition(orjson.dumps(_MARK))
        self._suffix = b',"sequence_number":%d' + self._suffix

    def opening(self) -> bytes:
        """created and in_progress; nothing when they have been sent."""
        if self._is_open:
            return b""
        self._is_open = True
        resource = self.state.resource()
        return self._event("response.created", response=resource) + self._event(
            "response.in_progress", response=resource
        )

    def encode(self, delta: Delta) -> bytes:
        """The events of one delta, possibly none: text that is still held back makes no event."""
        state = self.state
        if self._has_item and delta.finish is None and state.num_top_logprobs is None:
            state.take(delta)
            return self._text_delta(delta.text) if delta.text else b""
        out = [self.opening()]
        if state.generates and not self._has_item and (delta.text or delta.tokens or delta.finish is not None):
            out.append(self._item_opening())
        state.take(delta)
        if state.generates and delta.text:
            out.append(self._detailed_delta(delta.text))
        if delta.finish is not None:
            out.append(self._ending())
        return b"".join(out)

    def fail(self, error: AserveError) -> bytes:
        """The last event of a response that was cut."""
        opening = self.opening()
        self.state.fail(error)
        return opening + self._event("response.failed", response=self.state.resource())

    def _item_opening(self) -> bytes:
        self._has_item = True
        state = self.state
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return self._event("response.output_item.added", output_index=0, item=state.item()) + self._event(
            "response.content_part.added", **self._place, part=part
        )

    def _text_delta(self, text: str) -> bytes:
        number, self._number = self._number, self._number + 1
        return self._frame("response.output_text.delta", self._prefix + json_text(text) + self._suffix % number)

    def _detailed_delta(self, text: str) -> bytes:
        if self.state.num_top_logprobs is None:
            return self._text_delta(text)
        logprobs = self.state.logprobs[self._num_sent_logprobs :]
        self._num_sent_logprobs = len(self.state.logprobs)
        return self._event("response.output_text.delta", **self._place, delta=text, logprobs=logprobs)

    def _ending(self) -> bytes:
        state = self.state
        out = []
        if state.generates:
            part = state.part()
            out = [
                self._event("response.output_text.done", **self._place, text=part["text"], logprobs=part["logprobs"]),
                self._event("response.content_part.done", **self._place, part=part),
                self._event("response.output_item.done", output_index=0, item=state.item()),
            ]
        out.append(self._event(TERMINAL_EVENT[state.status], response=state.resource()))
        return b"".join(out)

    def _event(self, event_type: str, **fields: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        event = {"type": event_type, "sequence_number": number, **fields, **self._lane}
        return self._frame(event_type, escape_line_breaks(orjson.dumps(event)))
