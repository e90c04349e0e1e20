"""Builders for the tests of the Responses API: bodies, a websocket client, and the published types as a judge."""

import asyncio
import base64
import json
import os
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import openresponses_types.types as published
from fake_engine import FakeCall
from pydantic import BaseModel
from server_builders import MODEL, Served

RESPONSES = "/v1/responses"
UPGRADE = (
    "GET /v1/responses HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n\r\n"
)

_EVENT_TYPES: dict[str, type[BaseModel]] = {
    next(iter(model.model_fields["type"].annotation)).value: model
    for name, model in vars(published).items()
    if name.endswith("StreamingEvent")
}


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": "hi", **fields}


def create(**fields: Any) -> dict[str, Any]:
    return {"type": "response.create", **body(**fields)}


def validated(event: dict[str, Any]) -> dict[str, Any]:
    """The event, which is what its published type says: a strict superset may carry more fields, never fewer."""
    model = published.WebSocketErrorEvent if event["type"] == "error" else _EVENT_TYPES[event["type"]]
    model.model_validate(event)
    return event


def sse_events(raw: bytes) -> list[dict[str, Any]]:
    """A stream's events, comments left out, each validated; the event line repeats the type."""
    events = []
    for block in raw.decode().split("\n\n")[:-1]:
        if block.startswith(":"):
            continue
        event_line, data_line = block.split("\n")
        event = json.loads(data_line.removeprefix("data: "))
        assert event_line == f"event: {event['type']}"
        events.append(validated(event))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def types(events: list[dict[str, Any]]) -> list[str]:
    """The events' types without their common prefix; deltas in a row once."""
    names = [event["type"].removeprefix("response.") for event in events]
    return [name for i, name in enumerate(names) if i == 0 or name != names[i - 1]]


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")


@dataclass
class Socket:
    """A client's websocket whose every received event is validated."""

    ws: aiohttp.ClientWebSocketResponse

    async def send(self, *events: dict[str, Any]) -> None:
        for event in events:
            await self.ws.send_str(json.dumps(event))

    async def receive(self) -> dict[str, Any]:
        event = json.loads(await self.ws.receive_str(timeout=10))
        return event if event["type"].startswith("aserve:") else validated(event)

    async def until(self, *ends: str) -> list[dict[str, Any]]:
        """Events up to the first of one of these types (without "response.")."""
        events = [await self.receive()]
        while events[-1]["type"].removeprefix("response.") not in ends:
            events.append(await self.receive())
        return events

    async def whole(self) -> list[dict[str, Any]]:
        """Events of one response or error, when nothing else is under way."""
        return await self.until("completed", "incomplete", "failed", "error")

    async def closed(self) -> tuple[int | None, str | None]:
        """Code and reason, behind whatever still comes."""
        while True:
            message = await self.ws.receive(timeout=10)
            if message.type is aiohttp.WSMsgType.CLOSE:
                return message.data, message.extra
            assert message.type is aiohttp.WSMsgType.TEXT, message


@asynccontextmanager
async def socket_of(served: Served, **kwargs: Any) -> AsyncIterator[Socket]:
    async with served.session.ws_connect(served.url + RESPONSES, **kwargs) as ws:
        yield Socket(ws)


# --- raw frames


@dataclass
class RawSocket:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def send(self, *frames: bytes) -> None:
        self.writer.write(b"".join(frames))

    async def receive(self) -> tuple[int, bytes]:
        """Opcode and payload of the next frame, which is unmasked and whole."""
        first, second = await self.reader.readexactly(2)
        assert first & 0xF0 == 0x80 and not second & 0x80
        size = second
        if size == 126:
            size = int.from_bytes(await self.reader.readexactly(2))
        elif size == 127:
            size = int.from_bytes(await self.reader.readexactly(8))
        return first & 0x0F, await self.reader.readexactly(size)

    async def closed(self) -> int:
        """The code of the close frame, the last thing that comes."""
        opcode, payload = await self.receive()
        assert opcode == 8, payload
        assert await self.reader.read() == b""
        return int.from_bytes(payload[:2])


@asynccontextmanager
async def raw_socket(served: Served) -> AsyncIterator[RawSocket]:
    reader, writer = await served.connect()
    writer.write(UPGRADE.format(key=base64.b64encode(os.urandom(16)).decode()).encode())
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")
    try:
        yield RawSocket(reader, writer)
    finally:
        writer.close()


def client_frame(payload: bytes, *, opcode: int = 1, is_last: bool = True, mask: bytes | None = b"\1\2\3\4") -> bytes:
    """One frame as a client sends it; ``mask`` None leaves it unmasked, as no client may."""
    head = bytes([(0x80 if is_last else 0) | opcode])
    bit = 0 if mask is None else 0x80
    size = len(payload)
    if size < 126:
        head += bytes([bit | size])
    elif size < 65536:
        head += struct.pack("!BH", bit | 126, size)
    else:
        head += struct.pack("!BQ", bit | 127, size)
    if mask is None:
        return head + payload
    return head + mask + bytes(byte ^ mask[i % 4] for i, byte in enumerate(payload))


async def running(served: Served, ws: Socket, **fields: Any) -> FakeCall:
    """The call of a response that has been sent and begun; its opening events are taken."""
    index = len(served.engine.calls)
    await ws.send(create(**fields))
    call = await served.engine.call(index)
    await ws.until("in_progress")
    return call
