"""The sockets: kept connections, one request at a time on each, read by callbacks without a task in between.

A read costs one call of ``Connection.data_received``; the task that sent the request sleeps until its exchange is over.
The clock and the way to connect are parameters, so that tests run on scripted time without a network.
"""

import asyncio
import ssl
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

from loadgen import __version__
from loadgen.errors import UsageError
from loadgen.exchange import Exchange, Ticket
from loadgen.sample import ErrorKind, Sample
from loadgen.work import Endpoint

Clock = Callable[[], float]

BODY_END_TIMEOUT_S = 1.0
"""After [DONE] the body must end within this, or the connection is not used again."""

_PATHS: dict[Endpoint, str] = {"chat": "/chat/completions", "completions": "/completions"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where and how requests go. ``path`` is the endpoint's; ``headers`` may hold a key, so they are not shown."""

    host: str
    port: int
    is_tls: bool
    path: str
    headers: Mapping[str, str] = field(repr=False)

    def request(self, body: bytes) -> bytes:
        """Return the bytes of a POST of ``body``."""
        return self._head() + b"Content-Length: %d\r\n\r\n" % len(body) + body

    def _head(self) -> bytes:
        host = f"[{self.host}]" if ":" in self.host else self.host
        fields = {
            "Host": f"{host}:{self.port}",
            "User-Agent": f"loadgen/{__version__}",
            "Accept": "text/event-stream",
            "Content-Type": "application/json",
            **self.headers,
        }
        lines = [f"POST {self.path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
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

    @property
    def is_open(self) -> bool:
        """Whether a request can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    async def send(self, request: bytes, exchange: Exchange, *, connect_s: float | None, timeout_s: float) -> None:
        """Send ``request`` and return when ``exchange`` is over, which is within ``timeout_s`` and a second.

        A cancellation ends the exchange as interrupted and closes the connection.
        """
        assert self._transport is not None and self._exchange is None, "one request at a time, on an open connection"
        loop = asyncio.get_running_loop()
        self._exchange = exchange
        self._over = loop.create_future()
        timer = loop.call_later(timeout_s, self.fail, ErrorKind.TIMEOUT, f"not ended after {timeout_s:g} s")
        try:
            exchange.begin(self._clock(), connect_s=connect_s)
            self._transport.write(request)
            await self._over
        finally:
            timer.cancel()
            if self._body_end_timer is not None:
                self._body_end_timer.cancel()
                self._body_end_timer = None
            if not exchange.is_over:
                exchange.fail(ErrorKind.INTERRUPTED, "interrupted", self._clock())
            self._exchange = None
            if not exchange.can_reuse_connection:
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
                BODY_END_TIMEOUT_S, self.fail, ErrorKind.CUT, "the body did not end after [DONE]"
            )

    def connection_lost(self, exc: Exception | None) -> None:
        """The socket is gone."""
        if self._exchange is not None:
            self._exchange.feed_eof(self._clock(), str(exc) if exc else "")
            self._wake()

    def _wake(self) -> None:
        if self._over is not None and not self._over.done():
            self._over.set_result(None)


class Connect(Protocol):
    """Opens a socket for the protocol that the factory makes; raises OSError where it cannot."""

    def __call__(
        self, protocol_factory: Callable[[], Connection], /
    ) -> Coroutine[Any, Any, tuple[Any, Connection]]: ...


def connector(target: Target) -> Connect:
    """Return the way to a target's TCP port, through TLS where its URL says https."""
    context = ssl.create_default_context() if target.is_tls else None

    def connect(protocol_factory: Callable[[], Connection], /) -> Coroutine[Any, Any, tuple[Any, Connection]]:
        loop = asyncio.get_running_loop()
        return loop.create_connection(protocol_factory, target.host, target.port, ssl=context)

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
        self._timeout_s = timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._clock = clock
        self._connect = connect or connector(target)
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()
        self._is_interrupted = False

    async def send(self, body: bytes, ticket: Ticket, *, origin_s: float) -> Sample:
        """Send one request and return its record, which also holds every failure of the server or the network.

        A request whose kept connection the server was just closing never reached it; it is sent once more, on a new
        connection, and its record says so.
        """
        request = self._target.request(body)
        connection = self._take_idle()
        if connection is not None:
            exchange = Exchange(ticket, self._endpoint, origin_s=origin_s)
            await self._exchange(connection, request, exchange, connect_s=None)
            sample = exchange.sample()
            if sample.error is not ErrorKind.DISCONNECT:
                return sample
        exchange = Exchange(ticket, self._endpoint, origin_s=origin_s, is_resent=connection is not None)
        began_s = self._clock()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await self._connect(lambda: Connection(self._clock))
        except TimeoutError:
            exchange.fail(ErrorKind.CONNECT, f"not connected after {self._connect_timeout_s:g} s", self._clock())
        except OSError as error:
            exchange.fail(ErrorKind.CONNECT, error.strerror or str(error), self._clock())
        else:
            await self._exchange(connection, request, exchange, connect_s=self._clock() - began_s)
        return exchange.sample()

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

    def _take_idle(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        return None
