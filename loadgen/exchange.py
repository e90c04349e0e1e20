"""One request from its send to its end: bytes and times in, a ``Sample`` out. Pure: the socket's owner tells the time.

An exchange ends for the measurement at [DONE], at a fault, or when its owner says so. For the connection it is over
when the body's last byte has come, and only then can the connection carry another.
"""

from dataclasses import dataclass

from loadgen import codec
from loadgen.answer import AnswerReader, message_of
from loadgen.errors import WireError
from loadgen.http_parser import ResponseParser
from loadgen.sample import ErrorKind, Sample
from loadgen.sse_parser import SseParser
from loadgen.work import Endpoint

REFUSAL_BYTES_MAX = 64 << 10
"""So much of a refusal's body is kept for its message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """What is known of a request before it is sent; times as in Sample."""

    index: int
    process: int
    intended_s: float
    lag_s: float


class Exchange:
    """Reads one answer. Times are absolute seconds of the owner's clock; ``origin_s`` is the start of the run on it."""

    __slots__ = (
        "_connect_s",
        "_detail",
        "_end_s",
        "_error",
        "_events",
        "_first_byte_ns",
        "_http",
        "_is_resent",
        "_num_bytes",
        "_origin_s",
        "_reader",
        "_refusal",
        "_sent_s",
        "_ticket",
        "is_over",
    )

    def __init__(self, ticket: Ticket, endpoint: Endpoint, *, origin_s: float, is_resent: bool = False) -> None:
        self.is_over = False
        self._ticket = ticket
        self._origin_s = origin_s
        self._is_resent = is_resent
        self._connect_s: float | None = None
        self._sent_s: float | None = None
        self._end_s: float | None = None
        self._error: ErrorKind | None = None
        self._detail = ""
        self._http = ResponseParser()
        self._events = SseParser()
        self._reader = AnswerReader(endpoint)
        self._refusal = b""
        self._first_byte_ns: int | None = None
        self._num_bytes = 0

    @property
    def can_reuse_connection(self) -> bool:
        """Whether the connection stands at the beginning of the next answer."""
        return self._http.is_complete and self._http.keep_alive and self._error in (None, ErrorKind.HTTP)

    @property
    def is_ended(self) -> bool:
        """Whether the request has ended for the measurement."""
        return self._end_s is not None

    def begin(self, now_s: float, *, connect_s: float | None) -> None:
        """Note that the request's bytes are written now."""
        self._sent_s = now_s
        self._connect_s = connect_s

    def feed(self, data: bytes, now_s: float) -> None:
        """Take bytes of the answer that were read at ``now_s``."""
        assert self._sent_s is not None, "bytes before the request was sent"
        if self.is_over:
            return
        self._num_bytes += len(data)
        try:
            body = self._http.feed(data)
            if self._http.status == 200:
                self._feed_stream(body, now_s, round((now_s - self._sent_s) * 1e9))
            else:
                self._refusal += body[: REFUSAL_BYTES_MAX - len(self._refusal)]
        except WireError as error:
            self.fail(ErrorKind.PROTOCOL, str(error), now_s)
            return
        if self._http.is_complete:
            self._finish_body(now_s)

    def feed_eof(self, now_s: float, reason: str = "") -> None:
        """Note that the connection has ended."""
        if self.is_over:
            return
        if self._http.ends_with_connection:
            self._finish_body(now_s)
        elif self._num_bytes == 0:
            self.fail(ErrorKind.DISCONNECT, reason or "closed before an answer", now_s)
        else:
            self.fail(ErrorKind.CUT, reason or "the connection ended inside the answer", now_s)

    def fail(self, kind: ErrorKind, detail: str, now_s: float) -> None:
        """End the request, unless it has already ended, and with it the use of its connection."""
        if self._end_s is None:
            self._error = kind
            self._detail = detail
            self._end_s = now_s
        self.is_over = True

    def sample(self) -> Sample:
        """Return the record of a request that has ended."""
        assert self._end_s is not None, "the request has not ended"
        return Sample(
            index=self._ticket.index,
            process=self._ticket.process,
            intended_s=self._ticket.intended_s,
            lag_s=self._ticket.lag_s,
            connect_s=self._connect_s,
            is_resent=self._is_resent,
            sent_s=None if self._sent_s is None else self._sent_s - self._origin_s,
            end_s=self._end_s - self._origin_s,
            status=self._http.status,
            error=self._error,
            detail=self._detail,
            answer=self._reader.answer(first_byte_ns=self._first_byte_ns, num_bytes=self._num_bytes),
        )

    def _feed_stream(self, body: bytes, now_s: float, at_ns: int) -> None:
        if not body:
            return
        if self._first_byte_ns is None:
            self._first_byte_ns = at_ns
            kind = self._http.headers.get("content-type", "")
            if not kind.startswith("text/event-stream"):
                raise WireError(f"an answer of type {kind or 'unknown'}, not an event stream")
        if self._end_s is not None:
            return
        reader = self._reader
        for event in self._events.feed(body):
            reader.read(event, at_ns)
            if reader.fault is not None:
                self.fail(ErrorKind.ERROR_EVENT, reader.fault, now_s)
                return
            if reader.is_done:
                self._end_s = now_s
                return

    def _finish_body(self, now_s: float) -> None:
        if self._http.status == 200:
            if self._end_s is None:
                self.fail(ErrorKind.CUT, "the body ended without [DONE]", now_s)
            self.is_over = True
            return
        try:
            detail = message_of(codec.loads(self._refusal))
        except ValueError:
            detail = self._refusal[:500].decode("utf-8", "replace")
        self.fail(ErrorKind.HTTP, detail, now_s)
