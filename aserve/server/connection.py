"""aiohttp's connection with the timers that it lacks, and its errors in our shape.

aiohttp waits for ever for headers, for a peer that never reads, and for a closing socket to flush. Each connection here
has a clock for each of the three. A half-closed socket counts as a disconnect: its handler is cancelled.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

from aiohttp import StreamReader, web

from aserve.server.options import LimitOptions
from aserve.server.ports import Logger

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
FaultHandler = Callable[[web.BaseRequest, int, BaseException | None], web.Response]

_TOO_MANY_BODY = (
    b'{"error":{"message":"Too many connections.","type":"server_error","param":null,"code":"server_overloaded"}}'
)
_TOO_MANY = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\nConnection: close\r\n"
    b"X-Request-ID: req-%%b\r\nContent-Length: %d\r\n\r\n%b" % (len(_TOO_MANY_BODY), _TOO_MANY_BODY)
)


class ByteParser(Protocol):
    """What reads a connection after an upgrade."""

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        """Take what has come. Returns (whether to close, what was left): (False, b"") in our protocols."""
        ...

    def feed_eof(self) -> None:
        """The peer has left."""
        ...


@dataclass(slots=True)
class ConnectionCounts:
    """Since start, but for ``open``. Written by the connections only."""

    open: int = 0
    refused: int = 0
    slow_headers: int = 0
    write_stalls: int = 0


class Connection(web.RequestHandler):
    """One client's connection: HTTP/1.1 with keep-alive, at most 32 pipelined requests, answered one after another."""

    __slots__ = (
        "_abort_timer",
        "_body",
        "_counts",
        "_fault_handler",
        "_head_expected",
        "_head_timer",
        "_is_taken_over",
        "_limits",
        "_log",
        "_socket",
        "_stall_timer",
        "_task",
    )

    def __init__(
        self, server: "HttpServer", *, limits: LimitOptions, fault_handler: FaultHandler, log: Logger, **kwargs: Any
    ) -> None:
        super().__init__(server, **kwargs)
        self._log = log
        self._limits = limits
        self._counts = server.counts
        self._fault_handler = fault_handler
        self._socket: asyncio.Transport | None = None  # kept until it is lost; aiohttp forgets its own on closing
        self._body: StreamReader | None = None  # of the request that is being answered
        self._head_expected = True
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._abort_timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[Any] | None = None
        self._is_taken_over = False

    # --- the life of the socket

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._counts.open += 1
        self._socket = cast(asyncio.Transport, transport)
        self._socket.set_write_buffer_limits(high=self._limits.write_buffer_bytes)
        if self._limits.max_connections and self._counts.open > self._limits.max_connections:
            self._counts.refused += 1
            self._socket.write(_TOO_MANY % secrets.token_hex(16).encode())
            self._close_socket_soon()
            return
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._counts.open -= 1
        self._socket = None
        for timer in (self._head_timer, self._stall_timer, self._abort_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    async def start(self) -> None:
        """The connection's task. However it ends, the socket closes; unsent bytes may not hold it open for ever."""
        self._task = asyncio.current_task()
        try:
            await super().start()
        finally:
            self._close_socket_soon()

    @property
    def task(self) -> asyncio.Task[Any] | None:
        """What answers this connection's requests; None before its first turn."""
        return self._task

    def abort(self) -> None:
        """Cut the connection now; its handler is cancelled in the next tick."""
        if self._socket is not None:
            self._socket.abort()

    def _close_socket_soon(self) -> None:
        if self._socket is not None and self._abort_timer is None:
            self._socket.close()
            self._abort_timer = self._loop.call_later(self._limits.write_stall_s, self.abort)

    # --- headers

    def data_received(self, data: bytes) -> None:
        if self._head_expected and self._head_timer is None:
            self._head_timer = self._loop.call_later(self._limits.headers_timeout_s, self._head_timed_out)
        super().data_received(data)
        # Something to answer behind a body that has not ended is the parser's complaint about that body: aiohttp would
        # leave whoever reads it waiting.
        if self._messages and self._body is not None and not self._body.is_eof():
            self._body.set_exception(web.RequestPayloadError("its transfer coding is broken"))

    def request_began(self, body: StreamReader) -> None:
        """The headers are complete: their clock stops until the answer is out."""
        self._body = body
        self._head_expected = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def request_ended(self) -> None:
        self._body = None
        self._head_expected = True

    def _head_timed_out(self) -> None:
        self._counts.slow_headers += 1
        self.abort()

    # --- a connection that is not HTTP any more

    def take_over(self, parser: "ByteParser") -> None:
        """Hand every further byte to ``parser``. Only after a 101 was sent."""
        self._is_taken_over = True
        self.keep_alive(False)
        self.set_parser(cast(Any, parser))

    def close(self) -> None:
        """Read no further request; what was taken over goes on reading, and its handler is told to end by others."""
        if not self._is_taken_over:
            super().close()

    # --- a peer that does not read

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall_timer = self._loop.call_later(self._limits.write_stall_s, self._stalled)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _stalled(self) -> None:
        self._counts.write_stalls += 1
        self.abort()

    # --- faults below the handler: bytes that are not HTTP

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        if request.writer.output_size > 0:
            raise ConnectionError("The answer has begun; no other one can follow.")
        response = self._fault_handler(request, status, exc)
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kwargs: Any) -> None:
        error = kwargs.get("exc_info")
        if not isinstance(
            error, web.RequestPayloadError
        ):  # that one was answered; aiohttp meets it again on its way out
            self._log.error("connection.fault", error=repr(error))


class HttpServer(web.Server):
    """Makes a Connection for each accepted socket, and knows those that are open."""

    def __init__(self, handler: Handler, *, limits: LimitOptions, fault_handler: FaultHandler, log: Logger) -> None:
        super().__init__(handler, handler_cancellation=True)
        self.counts = ConnectionCounts()
        self._limits = limits
        self._fault_handler = fault_handler
        self._log = log

    def __call__(self) -> Connection:
        return Connection(
            self,
            loop=self._loop,
            limits=self._limits,
            fault_handler=self._fault_handler,
            log=self._log,
            keepalive_timeout=self._limits.idle_timeout_s,
            access_log=None,
            auto_decompress=False,  # a small compressed body could stall the loop for 150 ms; it is refused with 415
        )

    async def cut_all(self) -> None:
        """Abort every connection and wait until their handlers, which that cancels, have ended."""
        connections = [cast(Connection, connection) for connection in self.connections]
        tasks = [connection.task for connection in connections if connection.task is not None]
        for connection in connections:
            connection.abort()
        if tasks:
            await asyncio.wait(tasks)
