"""What is known of one request when it has ended: the run's only raw data, kept whole and written to the JSON file."""

from array import array
from dataclasses import dataclass
from enum import StrEnum


class ErrorKind(StrEnum):
    """Why a request failed. A refusal is told apart further by its status (see ``Sample.error_name``)."""

    CONNECT = "connect"  # no connection within the connect timeout
    HANDSHAKE = "handshake"  # a websocket was refused
    DISCONNECT = "disconnect"  # the connection ended before a byte of the answer
    HTTP = "http"  # another status than was expected
    PROTOCOL = "protocol"  # bytes that are not HTTP/1.1, not a websocket's frames, or not an event stream
    ERROR_EVENT = "error_event"  # a fault reported inside the stream
    CUT = "cut"  # the stream ended without its last event
    TIMEOUT = "timeout"
    INTERRUPTED = "interrupted"  # by the user


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the stream said. ``event_ns`` are the times of the content events, each counted from the send.

    ``event_tokens`` holds, for each content event, how many tokens the server had counted by then; it is empty unless
    the server says so with every event (``continuous_usage_stats``). Token counts are None where the server gave none.
    """

    first_byte_ns: int | None = None  # of the body, from the send: a head may come long before any work is done
    event_ns: "array[int]"
    event_tokens: "array[int]"
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    finish_reason: str | None = None
    queue_ms: float | None = None  # spent in the server's queue, where its headers say so
    num_bytes: int = 0

    @property
    def num_output_tokens(self) -> int:
        """Tokens by the server's own count, or else content events."""
        return len(self.event_ns) if self.completion_tokens is None else self.completion_tokens

    @property
    def is_token_per_event(self) -> bool:
        """Whether each content event is known to carry one token (one at the end may have no text of its own)."""
        return self.completion_tokens is not None and 0 <= self.completion_tokens - len(self.event_ns) <= 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One request: turn ``turn`` of arrival ``index``. Times in seconds count from the start of the run, so that
    processes compare.

    ``intended_s`` is when it was due: by the schedule, in a closed loop when its user became free, or in a session when
    the user had thought. ``lag_s`` is how much later this program woke for it, ``connect_s`` what a new connection took
    (None on a kept one). ``part`` names its part of a mixture; ``is_aborted`` says that we left, as we were told to.
    ``sent_s`` is when its bytes were written, None if it came to none of that. ``is_resent`` marks a request that was
    sent twice, since the server was closing the kept connection that it first went to; ``sent_s`` is the second time.
    """

    index: int
    turn: int
    process: int
    part: str
    intended_s: float
    lag_s: float
    connect_s: float | None
    is_resent: bool
    is_aborted: bool
    sent_s: float | None
    end_s: float
    status: int
    error: ErrorKind | None
    detail: str  # of the error, for people
    answer: Answer

    @property
    def is_ok(self) -> bool:
        """Whether the answer came whole, or as far as it was wanted."""
        return self.error is None

    @property
    def error_name(self) -> str:
        """The kind of error, with the status of a refusal; empty if none."""
        if self.error is ErrorKind.HTTP:
            return f"http_{self.status}"
        return self.error.value if self.error else ""
