"""One websocket on a connection that aiohttp has upgraded: messages in, frames out, heartbeat and close.

Frames of one turn of the loop leave in one write. The connection's own clock ends a peer that does not read, and its
handler is cancelled when the peer has left.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final, cast

from aiohttp import web

from aserve.engine.generation import Delta
from aserve.server.connection import Connection
from aserve.server.websocket import (
    CloseCode,
    Closing,
    FrameParser,
    Message,
    Opcode,
    accept_headers,
    encode_close,
    encode_frame,
)

CLOSE_TIMEOUT_S: Final = 2.0
"""How long a peer may take to close its side after our close frame."""
MAX_INBOX_MESSAGES: Final = 16
"""Messages that lie unread before the socket is not read any further."""
MAX_OWED_PONGS: Final = 64
"""Pongs that are written behind a full send buffer; further pings go unanswered until it has drained."""


def text_frame(event_type: str, json: bytes) -> bytes:
    """The frame of ``response_events`` for a websocket: the event names its type itself."""
    return encode_frame(Opcode.TEXT, json)


class WebSocket:
    """``accept``, then ``receive`` until it gives None, then ``close``; one reader, any number of writers."""

    def __init__(self, request: web.BaseRequest, *, max_message_bytes: int, heartbeat_s: float) -> None:
        """heartbeat_s: silence after which the peer is pinged; half as long again without a byte, and it is cut."""
        self._request = request
        self._connection = cast(Connection, request.protocol)
        self._loop = asyncio.get_running_loop()
        self._parser = FrameParser(max_message_bytes)
        self._max_inbox_bytes = max_message_bytes
        self._heartbeat_s = heartbeat_s
        self._heartbeat: asyncio.TimerHandle | None = None
        self._last_received_s = 0.0
        self._has_pinged = False
        self._inbox: deque[bytes] = deque()
        self._inbox_bytes = 0
        self._is_reading_paused = False
        self._reader: asyncio.Future[None] | None = None
        self._out: list[bytes] = []
        self._num_owed_pongs = 0
        self._closing: Closing | None = None  # the peer's side
        self._ending: tuple[int, str] | None = None  # ours
        self.close_code = 1006

    async def accept(self, headers: Mapping[str, str]) -> web.StreamResponse:
        """Send the 101. The headers of the request were checked by ``websocket.check_upgrade``."""
        response = web.StreamResponse(status=101, headers={**headers, **accept_headers(self._request.headers)})
        response.force_close()
        await response.prepare(self._request)
        self._last_received_s = self._loop.time()
        self._heartbeat = self._loop.call_later(self._heartbeat_s, self._beat)
        self._connection.take_over(self)
        return response

    # --- what aiohttp's connection calls: it takes this for its websocket parser

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        self._last_received_s = self._loop.time()
        self._has_pinged = False
        for event in self._parser.feed(data):
            self._on_event(event)
        return False, b""

    def feed_eof(self) -> None:
        """The handler is cancelled besides."""

    def _on_event(self, event: Message | Closing) -> None:
        if isinstance(event, Closing):
            self._closing = event
            self._wake_reader()
        elif event.opcode is Opcode.PING:
            self._answer_ping(event.payload)
        elif event.opcode is Opcode.BINARY:
            self.end(CloseCode.UNSUPPORTED_DATA, "This socket takes texts only.")
        elif event.opcode is Opcode.TEXT and self._ending is None:
            self._inbox.append(event.payload)
            self._inbox_bytes += len(event.payload)
            self._wake_reader()
            if not self._is_reading_paused and self._is_inbox_full():
                self._is_reading_paused = True
                self._connection.pause_reading()

    def _is_inbox_full(self) -> bool:
        return len(self._inbox) >= MAX_INBOX_MESSAGES or self._inbox_bytes >= self._max_inbox_bytes

    def _answer_ping(self, payload: bytes) -> None:
        self._num_owed_pongs = self._num_owed_pongs + 1 if self.is_paused else 0
        if self._num_owed_pongs <= MAX_OWED_PONGS and self._ending is None:
            self._write(encode_frame(Opcode.PONG, payload))

    def _beat(self) -> None:
        """The timer is not moved at each byte: it looks at the last one when it fires, and goes on from there."""
        silence_s = self._loop.time() - self._last_received_s
        if self._is_reading_paused or silence_s < self._heartbeat_s:
            due_s = self._heartbeat_s - (0.0 if self._is_reading_paused else silence_s)
        elif not self._has_pinged:
            self._has_pinged = True
            self._write(encode_frame(Opcode.PING, b""))
            due_s = self._heartbeat_s / 2
        else:
            self._connection.abort()
            return
        self._heartbeat = self._loop.call_later(due_s, self._beat)

    # --- reading

    async def receive(self) -> bytes | None:
        """The next text, valid UTF-8; None once either side is closing, also where texts are left."""
        while self._closing is None and self._ending is None:
            if self._inbox:
                text = self._inbox.popleft()
                self._inbox_bytes -= len(text)
                if self._is_reading_paused and not self._is_inbox_full():
                    self._is_reading_paused = False
                    self._connection.resume_reading()
                return text
            self._reader = self._loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        return None

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    # --- writing

    def try_write(self, encode: Callable[[Delta], bytes], delta: Delta) -> bool:
        """Write one delta's event now, or leave it to the reader: False while the buffer is full, or on any fault."""
        if self.is_paused:
            return False
        try:
            self.write_nowait(encode(delta))
        except Exception:  # the reader meets the same fault, and has an answer to it
            return False
        return True

    def write_nowait(self, frames: bytes) -> None:
        """Frames leave together at the end of this turn of the loop. Raises ConnectionResetError if the peer has
        left."""
        transport = self._connection.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("The client has left.")
        if frames:
            self._write(frames)

    def _write(self, frames: bytes) -> None:
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(frames)

    def _flush(self) -> None:
        out, self._out = self._out, []
        transport = self._connection.transport
        if out and transport is not None and not transport.is_closing():
            transport.write(b"".join(out))

    @property
    def is_paused(self) -> bool:
        return self._connection.writing_paused

    async def drain(self) -> None:
        """Wait while the send buffer is full."""
        if self.is_paused:
            await self._request.writer.drain()

    # --- closing

    def end(self, code: int, reason: str) -> None:
        """Let ``receive`` give None, so that the owner closes with this code. The first call counts."""
        if self._ending is None:
            self._ending = (code, reason)
            self._wake_reader()

    async def close(self) -> None:
        """Send the close frame behind what was written, and wait until the peer has closed its side, but not for long.

        The socket is shut for writing and read on: what the peer is still sending would otherwise cause a reset, which
        overtakes the close frame. The peer's leaving cancels the caller; on return it has not left.
        """
        assert self._heartbeat is not None
        self._heartbeat.cancel()
        code, reason = self._close_frame()
        self.close_code = code
        self._flush()
        transport = self._connection.transport
        if transport is None or transport.is_closing():
            return
        transport.write(encode_close(code, reason))
        if self._is_reading_paused:
            self._connection.resume_reading()
        transport.write_eof()
        await asyncio.sleep(CLOSE_TIMEOUT_S)

    def _close_frame(self) -> tuple[int, str]:
        if self._ending is not None:
            return self._ending
        if self._closing is None:
            return CloseCode.OK, ""
        if self._closing.is_fault:
            return self._closing.code, self._closing.reason
        return (CloseCode.OK if self._closing.code == 1005 else self._closing.code), ""

    def stop_clocks(self) -> None:
        """For an owner that is cancelled before it could close."""
        if self._heartbeat is not None:
            self._heartbeat.cancel()
