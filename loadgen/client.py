"""The sockets: kept connections, one request at a time on each, read by callbacks without a task in between.

A read costs one call of ``Connection.data_received``; the task that sent the request sleeps until its exchange is over.
The clock and the way to connect are parameters, so that tests run on scripted time without a network.
"""

import asyncio
import os
import socket
import ssl
from base64 import b64encode
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

from loadgen import __version__, ws_parser
from loadgen.errors import UsageError, WireError
from loadgen.exchange import Exchange, HttpExchange, SocketExchange, Ticket
from loadgen.http_parser import ResponseParser
from loadgen.sample import ErrorKind
from loadgen.work import Endpoint
from loadgen.ws_parser import FrameParser, Opcode

Clock = Callable[[], float]

BODY_END_TIMEOUT_S = 1.0
"""After the last event the body must end within this, or the connection is not used again."""
LEAVE_AT_ONCE_S = 0.005
"""What leaves just after the send gives the server so long to have read the request."""
SLOW_BUFFER_BYTES = 4096
"""Of a slow reader's socket: what it does not read soon waits at the server."""

_PATHS: dict[Endpoint, str] = {
    "chat": "/chat/completions",
    "completions": "/completions",
    "responses": "/responses",
    "responses-ws": "/responses",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where and how requests go. ``path`` is the endpoint's; ``headers`` may hold a key, so they are not shown."""

    host: str
    port: int
    is_tls: bool
    path: str
    headers: Mapping[str, str] = field(repr=False)

    @property
    def authority(self) -> str:
        """Host and port as in a URL."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def origin(self) -> str:
        """The URL up to the path."""
        return f"{'https' if self.is_tls else 'http'}://{self.authority}"

    @property
    def base_path(self) -> str:
        """The path up to and with its ``/v1``."""
        return self.path[: self.path.rindex("/v1") + 3]

    def request(self, body: bytes) -> bytes:
        """Return the bytes of a POST of ``body``."""
        fields = {"Accept": "text/event-stream, application/json", "Content-Type": "application/json"}
        return self._head("POST", fields) + b"Content-Length: %d\r\n\r\n" % len(body) + body

    def upgrade(self, key: bytes) -> bytes:
        """Return the bytes of a websocket's opening handshake."""
        fields = {
            "Connection": "Upgrade",
            "Upgrade": "websocket",
            "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Key": key.decode(),
        }
        return self._head("GET", fields) + b"\r\n"

    def _head(self, method: str, more: Mapping[str, str]) -> bytes:
        fields = {"Host": self.authority, "User-Agent": f"loadgen/{__version__}", **more, **self.headers}
        lines = [f"{method} {self.path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
        return ("\r\n".join(lines) + "\r\n").encode("latin-1")


def parse_target(base_url: str, endpoint: Endpoint, *, api_key: str | None, headers: Mapping[str, str]) -> Target:
    """Make a Target of a base URL with or without its ``/v1``. Raises UsageError."""
    try:
        parts = urlsplit(base_url)
        port = parts.port
    except ValueError as error:
        raise UsageError(f"{base_url} is not a URL: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise UsageError(f"{base_url} is not a base URL such as http://127.0.0.1:8000")
    is_tls = parts.scheme == "https"
    path = parts.path.rstrip("/")
    if not path.endswith("/v1"):
        path += "/v1"
    authorization = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    fields = authorization | dict(headers)
    if any(c in "\r\n\0" or ord(c) > 255 for item in fields.items() for text in item for c in text):
        raise UsageError("a header or the key holds a character that a header cannot carry")
    return Target(
        host=parts.hostname,
        port=port or (443 if is_tls else 80),
        is_tls=is_tls,
        path=path + _PATHS[endpoint],
        headers=fields,
    )


class Connection(asyncio.Protocol):
    """One socket. It owns its transport and, while a request is out, the exchange that reads the answer."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._over: asyncio.Future[None] | None = None
        self._body_end_timer: asyncio.TimerHandle | None = None
        self._pause_timer: asyncio.TimerHandle | None = None

    @property
    def is_open(self) -> bool:
        """Whether a request can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    @property
    def exchange(self) -> Exchange | None:
        """The request that is out."""
        return self._exchange

    async def send(self, request: bytes, exchange: Exchange, *, connect_s: float | None, timeout_s: float) -> None:
        """Send ``request`` and return when ``exchange`` is over, which is within ``timeout_s`` and a second.

        A cancellation ends the exchange as interrupted and closes the connection.
        """
        assert self._transport is not None and self._exchange is None, "one request at a time, on an open connection"
        loop = asyncio.get_running_loop()
        self._exchange = exchange
        self._over = loop.create_future()
        timers = [loop.call_later(timeout_s, self.fail, ErrorKind.TIMEOUT, f"not ended after {timeout_s:g} s")]
        if exchange.ticket.behaviour.abort_after_tokens == 0:
            timers.append(loop.call_later(LEAVE_AT_ONCE_S, self._leave))
        try:
            exchange.begin(self._clock(), connect_s=connect_s)
            self._transport.write(self._encode(request))
            await self._over
        finally:
            for timer in (*timers, self._body_end_timer, self._pause_timer):
                if timer is not None:
                    timer.cancel()
            self._body_end_timer = self._pause_timer = None
            if not exchange.is_over:
                exchange.fail(ErrorKind.INTERRUPTED, "interrupted", self._clock())
            self._exchange = None
            if not exchange.can_reuse_connection or exchange.ticket.behaviour.is_on_new_connection:
                self._transport.abort()

    def fail(self, kind: ErrorKind, detail: str) -> None:
        """End the request that is out, if there is one."""
        if self._exchange is not None and not self._exchange.is_over:
            self._exchange.fail(kind, detail, self._clock())
            self._wake()

    def close(self) -> None:
        """Close the socket at once."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket is connected."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Bytes have come; the time is taken first."""
        now_s = self._clock()
        exchange = self._exchange
        if exchange is None:
            self.close()  # bytes that nobody asked for: this connection is out of step
            return
        exchange.feed(data, now_s)
        if exchange.is_over:
            self._wake()
        elif exchange.is_ended and self._body_end_timer is None:
            self._body_end_timer = asyncio.get_running_loop().call_later(
                BODY_END_TIMEOUT_S, self.fail, ErrorKind.CUT, "the body did not end after its last event"
            )
        elif exchange.ticket.behaviour.read_bytes_per_s is not None:
            self._rest(len(data) / exchange.ticket.behaviour.read_bytes_per_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """The socket is gone."""
        if self._exchange is not None:
            self._exchange.feed_eof(self._clock(), str(exc) if exc else "")
            self._wake()

    def _encode(self, request: bytes) -> bytes:
        return request

    def _leave(self) -> None:
        if self._exchange is not None:
            self._exchange.leave(self._clock())
            self._wake()

    def _rest(self, seconds: float) -> None:
        assert self._transport is not None
        self._transport.pause_reading()
        self._pause_timer = asyncio.get_running_loop().call_later(seconds, self._transport.resume_reading)

    def _wake(self) -> None:
        if self._over is not None and not self._over.done():
            self._over.set_result(None)


class SocketConnection(Connection):
    """A websocket: an opening handshake, then frames both ways. Pings are answered, also between requests."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self._key = b64encode(os.urandom(16))
        self._handshake: ResponseParser | None = ResponseParser(accepts_upgrade=True)
        self._opened: asyncio.Future[None] | None = None
        self._frames = FrameParser()

    async def open(self, target: Target) -> None:
        """Make the handshake. Raises HandshakeError where the server refuses it, OSError where it goes away."""
        assert self._transport is not None
        self._opened = asyncio.get_running_loop().create_future()
        self._transport.write(target.upgrade(self._key))
        await self._opened

    def data_received(self, data: bytes) -> None:
        """Bytes have come; the time is taken first."""
        now_s = self._clock()
        if self._handshake is not None:
            data = self._shake(self._handshake, data)
        try:
            messages = self._frames.feed(data)
        except WireError as error:
            self.fail(ErrorKind.PROTOCOL, str(error))
            self.close()
            return
        exchange = self._exchange
        for opcode, payload in messages:
            if opcode is Opcode.TEXT or opcode is Opcode.BINARY:
                if exchange is not None:  # else of a request that was given up
                    exchange.feed(payload, now_s)
                    if exchange.is_over:
                        self._wake()
                        exchange = None
            elif opcode is Opcode.PING:
                self._write_frame(Opcode.PONG, payload)
            elif opcode is Opcode.CLOSE:
                reason = payload[2:].decode("utf-8", "replace")
                code = int.from_bytes(payload[:2]) if payload else 1005
                self.fail(ErrorKind.CUT, f"the server closed the websocket: {code} {reason}".rstrip())
                self.close()
                return
        if exchange is not None and messages and exchange.ticket.behaviour.read_bytes_per_s is not None:
            self._rest(len(data) / exchange.ticket.behaviour.read_bytes_per_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """The socket is gone."""
        if self._opened is not None and not self._opened.done():
            self._opened.set_exception(exc or ConnectionResetError("closed during the websocket's handshake"))
        super().connection_lost(exc)

    def _shake(self, handshake: ResponseParser, data: bytes) -> bytes:
        """Read the answer to the handshake and return the bytes after it."""
        assert self._opened is not None and not self._opened.done()
        try:
            rest = handshake.feed(data)
        except WireError as error:
            self._opened.set_exception(HandshakeError(0, str(error)))
            self.close()
            return b""
        if handshake.status == 0:
            return b""
        if handshake.status != 101:
            self._opened.set_exception(HandshakeError(handshake.status, rest[:500].decode("utf-8", "replace")))
            self.close()
            return b""
        if handshake.headers.get("sec-websocket-accept") != ws_parser.accept_of(self._key):
            self._opened.set_exception(HandshakeError(101, "the server's Sec-WebSocket-Accept is not our key's"))
            self.close()
            return b""
        self._handshake = None
        self._opened.set_result(None)
        return rest

    def _encode(self, request: bytes) -> bytes:
        return ws_parser.client_frame(Opcode.TEXT, request, os.urandom(4))

    def _write_frame(self, opcode: Opcode, payload: bytes) -> None:
        assert self._transport is not None
        self._transport.write(ws_parser.client_frame(opcode, payload, os.urandom(4)))


class HandshakeError(Exception):
    """The server answered the websocket's handshake with another status than 101."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(f"the websocket's handshake was answered with {status}: {detail}".rstrip(": "))
        self.status = status


class Connect(Protocol):
    """Opens a socket for the protocol that the factory makes; raises OSError where it cannot."""

    def __call__(
        self, protocol_factory: Callable[[], Connection], /, *, is_slow: bool = False
    ) -> Coroutine[Any, Any, tuple[Any, Connection]]: ...


def connector(target: Target) -> Connect:
    """Return the way to a target's TCP port, through TLS where its URL says https.

    A slow reader's socket gets a small receive buffer, which has to be set before it connects.
    """
    context = ssl.create_default_context() if target.is_tls else None

    async def connect(
        protocol_factory: Callable[[], Connection], /, *, is_slow: bool = False
    ) -> tuple[Any, Connection]:
        loop = asyncio.get_running_loop()
        if not is_slow:
            return await loop.create_connection(protocol_factory, target.host, target.port, ssl=context)
        family, kind, protocol, _, address = (
            await loop.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
        )[0]
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SLOW_BUFFER_BYTES)
            await loop.sock_connect(sock, address)
            name = target.host if context is not None else None
            return await loop.create_connection(protocol_factory, sock=sock, ssl=context, server_hostname=name)
        except BaseException:
            sock.close()
            raise

    return connect


class Client:
    """Sends requests on kept connections, last used first.

    It opens a connection only when none is idle, so there are never more of them than requests were out at once: its
    caller bounds those.
    """

    def __init__(
        self,
        target: Target,
        endpoint: Endpoint,
        *,
        timeout_s: float,
        connect_timeout_s: float,
        clock: Clock = perf_counter,
        connect: Connect | None = None,
    ) -> None:
        self._target = target
        self._endpoint = endpoint
        self._is_websocket = endpoint == "responses-ws"
        self._timeout_s = timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._clock = clock
        self._connect = connect or connector(target)
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()
        self._is_interrupted = False

    @property
    def num_events_out(self) -> int:
        """Content events so far of the requests that are out."""
        return sum(c.exchange.num_events for c in self._busy if c.exchange is not None)

    async def send(self, body: bytes, ticket: Ticket, *, origin_s: float) -> Exchange:
        """Send one request and return its exchange when it is over; that also records every failure of the server or
        the network.

        A request whose kept connection the server was just closing never reached it; it is sent once more, on a new
        connection, and its record says so.
        """
        behaviour = ticket.behaviour
        request = body if self._is_websocket else self._target.request(body)
        needs_new = behaviour.is_on_new_connection or behaviour.read_bytes_per_s is not None
        connection = None if needs_new else self._take_idle()
        if connection is not None:
            exchange = self._new_exchange(ticket, origin_s, is_resent=False)
            await self._exchange(connection, request, exchange, connect_s=None)
            if not exchange.was_disconnected:
                return exchange
        exchange = self._new_exchange(ticket, origin_s, is_resent=connection is not None)
        began_s = self._clock()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                connection = await self._open(is_slow=behaviour.read_bytes_per_s is not None)
        except TimeoutError:
            exchange.fail(ErrorKind.CONNECT, f"not connected after {self._connect_timeout_s:g} s", self._clock())
        except OSError as error:
            exchange.fail(ErrorKind.CONNECT, error.strerror or str(error), self._clock())
        except HandshakeError as error:
            exchange.fail(ErrorKind.HANDSHAKE, str(error), self._clock())
        else:
            await self._exchange(connection, request, exchange, connect_s=self._clock() - began_s)
        return exchange

    def interrupt(self) -> None:
        """End every request that is out or still connecting, as interrupted, and every later one."""
        self._is_interrupted = True
        for connection in list(self._busy):
            connection.fail(ErrorKind.INTERRUPTED, "interrupted")

    async def aclose(self) -> None:
        """Close all connections and let the loop forget them."""
        for connection in [*self._idle, *self._busy]:
            connection.close()
        self._idle.clear()
        await asyncio.sleep(0)

    def _new_exchange(self, ticket: Ticket, origin_s: float, *, is_resent: bool) -> Exchange:
        kind = SocketExchange if self._is_websocket else HttpExchange
        return kind(ticket, self._endpoint, origin_s=origin_s, is_resent=is_resent)

    async def _open(self, *, is_slow: bool) -> Connection:
        if not self._is_websocket:
            return (await self._connect(lambda: Connection(self._clock), is_slow=is_slow))[1]
        socket_connection = SocketConnection(self._clock)
        await self._connect(lambda: socket_connection, is_slow=is_slow)
        try:
            await socket_connection.open(self._target)
        except BaseException:
            socket_connection.close()
            raise
        return socket_connection

    async def _exchange(
        self, connection: Connection, request: bytes, exchange: Exchange, *, connect_s: float | None
    ) -> None:
        self._busy.add(connection)
        try:
            if self._is_interrupted:
                exchange.fail(ErrorKind.INTERRUPTED, "interrupted", self._clock())
            else:
                await connection.send(request, exchange, connect_s=connect_s, timeout_s=self._timeout_s)
        finally:
            self._busy.discard(connection)
            if connection.is_open:
                self._idle.append(connection)

    def _take_idle(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        return None
