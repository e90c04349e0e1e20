"""One request from its send to its end: bytes and times in, a ``Sample`` out. Pure: the socket's owner tells the time.

An exchange ends for the measurement at the stream's last event, at a fault, or when its owner says so. For the
connection it is over when the body's last byte has come, and only then can the connection carry another.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from loadgen import codec
from loadgen.answer import READERS, message_of
from loadgen.errors import WireError
from loadgen.http_parser import ResponseParser
from loadgen.sample import ErrorKind, Sample
from loadgen.sse_parser import SseParser
from loadgen.work import READS_ALL, Behaviour, Endpoint

REFUSAL_BYTES_MAX = 64 << 10
"""So much of a refusal's body is kept for its message."""

_SERVER_TIMING_QUEUE = re.compile(r"\bqueue\b[^,]*?;\s*dur=([0-9.]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """What is known of a request before it is sent; times as in Sample."""

    index: int
    process: int
    intended_s: float
    lag_s: float
    turn: int = 0
    part: str = ""
    behaviour: Behaviour = READS_ALL
    is_streamed: bool = True
    keeps_text: bool = False


class Exchange:
    """What every wire has in common. Times are absolute seconds of the owner's clock; ``origin_s`` is the start of the
    run on it."""

    __slots__ = (
        "_connect_s",
        "_detail",
        "_end_s",
        "_error",
        "_first_byte_ns",
        "_is_aborted",
        "_is_resent",
        "_num_bytes",
        "_num_events_max",
        "_origin_s",
        "_reader",
        "_sent_s",
        "is_over",
        "ticket",
    )

    def __init__(self, ticket: Ticket, endpoint: Endpoint, *, origin_s: float, is_resent: bool = False) -> None:
        self.is_over = False
        self.ticket = ticket
        self._origin_s = origin_s
        self._is_resent = is_resent
        self._is_aborted = False
        self._connect_s: float | None = None
        self._sent_s: float | None = None
        self._end_s: float | None = None
        self._error: ErrorKind | None = None
        self._detail = ""
        self._reader = READERS[endpoint](keeps_text=ticket.keeps_text)
        self._num_events_max = ticket.behaviour.abort_after_tokens or None
        self._first_byte_ns: int | None = None
        self._num_bytes = 0

    @property
    def can_reuse_connection(self) -> bool:
        """Whether the connection stands at the beginning of the next answer."""
        raise NotImplementedError

    @property
    def is_ended(self) -> bool:
        """Whether the request has ended for the measurement."""
        return self._end_s is not None

    @property
    def was_disconnected(self) -> bool:
        """Whether the connection ended before a byte of the answer."""
        return self._error is ErrorKind.DISCONNECT

    @property
    def num_events(self) -> int:
        """Content events so far."""
        return self._reader.num_events

    def begin(self, now_s: float, *, connect_s: float | None) -> None:
        """Note that the request's bytes are written now."""
        self._sent_s = now_s
        self._connect_s = connect_s

    def feed(self, data: bytes, now_s: float) -> None:
        """Take bytes of the answer that were read at ``now_s``."""
        raise NotImplementedError

    def feed_eof(self, now_s: float, reason: str = "") -> None:
        """Note that the connection has ended."""
        if self.is_over:
            return
        if self._num_bytes == 0:
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

    def leave(self, now_s: float) -> None:
        """End the request in the middle, as its behaviour asks; its connection is of no more use."""
        if self._end_s is None:
            self._is_aborted = True
            self._end_s = now_s
        self.is_over = True

    def text(self) -> str:
        """Return the text of the answer, where the ticket asks to keep it."""
        return self._reader.text()

    def sample(self) -> Sample:
        """Return the record of a request that has ended."""
        assert self._end_s is not None, "the request has not ended"
        ticket = self.ticket
        return Sample(
            index=ticket.index,
            turn=ticket.turn,
            process=ticket.process,
            part=ticket.part,
            intended_s=ticket.intended_s,
            lag_s=ticket.lag_s,
            connect_s=self._connect_s,
            is_resent=self._is_resent,
            is_aborted=self._is_aborted,
            sent_s=None if self._sent_s is None else self._sent_s - self._origin_s,
            end_s=self._end_s - self._origin_s,
            status=self._status(),
            error=self._error,
            detail=self._detail,
            answer=self._reader.answer(
                first_byte_ns=self._first_byte_ns, num_bytes=self._num_bytes, queue_ms=self._queue_ms()
            ),
        )

    def _status(self) -> int:
        raise NotImplementedError

    def _queue_ms(self) -> float | None:
        return None

    def _read(self, events: Iterable[bytes], now_s: float, at_ns: int) -> None:
        reader = self._reader
        for event in events:
            reader.read(event, at_ns)
            if reader.fault is not None:
                self.fail(ErrorKind.ERROR_EVENT, reader.fault, now_s)
                return
            if reader.is_done:
                self._end_s = now_s
                return
            if self._num_events_max is not None and reader.num_events >= self._num_events_max:
                self.leave(now_s)
                return


class HttpExchange(Exchange):
    """A POST whose answer is an event stream, or one JSON object where the ticket asks for no stream."""

    __slots__ = ("_body", "_events", "_http")

    def __init__(self, ticket: Ticket, endpoint: Endpoint, *, origin_s: float, is_resent: bool = False) -> None:
        super().__init__(ticket, endpoint, origin_s=origin_s, is_resent=is_resent)
        self._http = ResponseParser()
        self._events = SseParser()
        self._body = b""  # of a refusal, or of an answer that is not streamed

    @property
    def can_reuse_connection(self) -> bool:
        """Whether the connection stands at the beginning of the next answer."""
        return (
            self._http.is_complete
            and self._http.keep_alive
            and self._error in (None, ErrorKind.HTTP)
            and not self._is_aborted
        )

    def feed(self, data: bytes, now_s: float) -> None:
        """Take bytes of the answer that were read at ``now_s``."""
        sent_s = self._sent_s
        assert sent_s is not None, "bytes before the request was sent"
        if self.is_over:
            return
        http = self._http
        self._num_bytes += len(data)
        try:
            body = http.feed(data)
            if http.status != 200:
                self._body += body[: REFUSAL_BYTES_MAX - len(self._body)]
            elif body:
                self._feed_answer(body, now_s, round((now_s - sent_s) * 1e9))
        except WireError as error:
            self.fail(ErrorKind.PROTOCOL, str(error), now_s)
            return
        if http.is_complete:
            self._finish_body(now_s)

    def feed_eof(self, now_s: float, reason: str = "") -> None:
        """Note that the connection has ended."""
        if not self.is_over and self._http.ends_with_connection:
            self._finish_body(now_s)
        else:
            super().feed_eof(now_s, reason)

    def _feed_answer(self, body: bytes, now_s: float, at_ns: int) -> None:
        if self._first_byte_ns is None:
            self._begin_answer(now_s, at_ns)
        if self._end_s is not None:
            return
        if self.ticket.is_streamed:
            self._read(self._events.feed(body), now_s, at_ns)
        else:
            self._body += body

    def _begin_answer(self, now_s: float, at_ns: int) -> None:
        self._first_byte_ns = at_ns
        expected = self.ticket.behaviour.expect_status
        if expected != 200:
            self.fail(ErrorKind.HTTP, f"answered 200 where {expected} was expected", now_s)
            return
        kind = self._http.headers.get("content-type", "")
        if not kind.startswith("text/event-stream" if self.ticket.is_streamed else "application/json"):
            wanted = "an event stream" if self.ticket.is_streamed else "JSON"
            raise WireError(f"an answer of type {kind or 'unknown'}, not {wanted}")

    def _finish_body(self, now_s: float) -> None:
        status = self._http.status
        if status == 200:
            if self._end_s is None and not self.ticket.is_streamed:
                self._read_whole(now_s)
            elif self._end_s is None and self._reader.has_finished and not self._http.ends_with_connection:
                self._end_s = now_s
            if self._end_s is None:
                self.fail(ErrorKind.CUT, "the body ended without its last event", now_s)
            self.is_over = True
            return
        if status == self.ticket.behaviour.expect_status:
            self._end_s = now_s
            self.is_over = True
            return
        try:
            detail = message_of(codec.loads(self._body))
        except ValueError:
            detail = self._body[:500].decode("utf-8", "replace")
        self.fail(ErrorKind.HTTP, detail, now_s)

    def _read_whole(self, now_s: float) -> None:
        assert self._sent_s is not None
        try:
            self._reader.read_whole(self._body, round((now_s - self._sent_s) * 1e9))
        except WireError as error:
            self.fail(ErrorKind.PROTOCOL, str(error), now_s)
            return
        if self._reader.fault is not None:
            self.fail(ErrorKind.ERROR_EVENT, self._reader.fault, now_s)
        else:
            self._end_s = now_s

    def _status(self) -> int:
        return self._http.status

    def _queue_ms(self) -> float | None:
        return queue_ms(self._http.headers)


class SocketExchange(Exchange):
    """A ``response.create`` on a websocket; it is fed whole messages."""

    __slots__ = ()

    @property
    def can_reuse_connection(self) -> bool:
        """Whether the socket is free for the next request."""
        return self._end_s is not None and not self._is_aborted and self._error in (None, ErrorKind.ERROR_EVENT)

    def feed(self, data: bytes, now_s: float) -> None:
        """Take a message that was read at ``now_s``."""
        sent_s = self._sent_s
        assert sent_s is not None, "a message before the request was sent"
        if self.is_over:
            return
        at_ns = round((now_s - sent_s) * 1e9)
        self._num_bytes += len(data)
        if self._first_byte_ns is None:
            self._first_byte_ns = at_ns
        try:
            self._read((data,), now_s, at_ns)
        except WireError as error:
            self.fail(ErrorKind.PROTOCOL, str(error), now_s)
        if self._end_s is not None:
            self.is_over = True

    def _status(self) -> int:
        return 0 if self._first_byte_ns is None else 200


def queue_ms(headers: Mapping[str, str]) -> float | None:
    """Return the time in the server's queue by the headers in which servers say it, or None.

    Known are ``Server-Timing: queue;dur=MS``, ``X-Queue-Time-Ms`` and ``X-Queue-Time`` (in ms, as TGI does).
    """
    found = _SERVER_TIMING_QUEUE.search(headers.get("server-timing", ""))
    text = found[1] if found else headers.get("x-queue-time-ms") or headers.get("x-queue-time")
    try:
        return None if text is None else float(text)
    except ValueError:
        return None
