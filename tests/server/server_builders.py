"""Builders for the server's tests: a server on a loopback port over the fake engine, and requests over raw sockets."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import aiohttp
import wire_builders
from fake_engine import FakeEngine
from wire_builders import Answer, until

from aserve.core.request import SamplingParams
from aserve.errors import InvalidRequest
from aserve.obs.metrics import Metrics
from aserve.server.app import Server
from aserve.server.options import LimitOptions, ServerOptions
from aserve.server.ports import Trace

MODEL = "fake-model"
HELLO = [{"role": "user", "content": "hi"}]


class FakeRenderer:
    """A byte is a token; a chat is "role:content" lines and, where asked for, an "assistant:" at the end."""

    def encode_prompt(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(text.encode())

    def encode_chat(self, messages: list[dict[str, Any]], **choices: Any) -> list[int]:
        return list(self.render_chat(messages, **choices).encode())

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        template_kwargs: dict[str, Any],
    ) -> str:
        if template_kwargs.get("refuse"):
            raise InvalidRequest("The model's chat template refuses these messages: no.", param="messages")
        lines = [f"{message['role']}:{message['content']}" for message in messages]
        return "\n".join([*lines, "assistant:"] if add_generation_prompt else lines)


@dataclass
class RecordingLog:
    """Keeps what was logged, as (level, event, fields)."""

    records: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)

    def debug(self, event: str, /, **fields: Any) -> None:
        self.records.append(("debug", event, fields))

    def info(self, event: str, /, **fields: Any) -> None:
        self.records.append(("info", event, fields))

    def warning(self, event: str, /, **fields: Any) -> None:
        self.records.append(("warning", event, fields))

    def error(self, event: str, /, **fields: Any) -> None:
        self.records.append(("error", event, fields))

    def fields_of(self, event: str) -> list[dict[str, Any]]:
        return [fields for _, name, fields in self.records if name == event]


@dataclass
class Served:
    engine: FakeEngine
    server: Server
    host: str
    port: int
    session: aiohttp.ClientSession
    log: RecordingLog
    metrics: Metrics

    @property
    def num_connections(self) -> int:
        return self.server.statistics()["connections"]["open"]

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    async def get(self, path: str, **kwargs: Any) -> Answer:
        return await self.request("GET", path, **kwargs)

    async def post(self, path: str, json: Any = None, **kwargs: Any) -> Answer:
        return await self.request("POST", path, json=json, **kwargs)

    async def request(self, method: str, path: str, **kwargs: Any) -> Answer:
        async with self.session.request(method, self.url + path, **kwargs) as response:
            return Answer(response.status, response.headers, await response.read())

    async def connect(self, **kwargs: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self.host, self.port, **kwargs)

    async def raw(self, sent: bytes) -> bytes:
        """All that comes back until the server closes the connection."""
        reader, writer = await self.connect()
        try:
            writer.write(sent)
            return await reader.read()
        finally:
            writer.close()


@asynccontextmanager
async def serving(
    engine: FakeEngine | None = None,
    *,
    trace: Trace | None = None,
    sampling_defaults: SamplingParams | None = None,
    **options: Any,
) -> AsyncIterator[Served]:
    """A server with ``options`` of either section, of which nothing may be left afterwards."""
    engine = engine or FakeEngine()
    tasks_before = asyncio.all_tasks()
    server_fields = {entry.name for entry in fields(ServerOptions)}
    of_server = {name: options.pop(name) for name in list(options) if name in server_fields}
    log, metrics = RecordingLog(), Metrics(MODEL, process=False)
    server = Server(
        engine=engine,
        renderer=FakeRenderer(),
        model_names=(MODEL, "alias"),
        options=ServerOptions(**{"port": 0, **of_server}),
        limits=LimitOptions(**options),
        log=log,
        metrics=metrics,
        trace=trace,
        sampling_defaults=sampling_defaults,
    )
    host, port = await server.start()
    try:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            yield Served(engine, server, host, port, session, log, metrics)
    finally:
        await server.aclose()
    assert all(call.is_closed for call in engine.calls)
    assert server.statistics()["requests_open"] == 0
    assert server.statistics()["connections"]["open"] == 0
    # Some turns later: the loop closes generators that a client's library dropped in tasks of its own.
    await until(lambda: asyncio.all_tasks() - tasks_before <= {asyncio.current_task()})


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": HELLO, **fields}


def http(method: str, path: str, body: Any = None, *, headers: str = "", close: bool = True) -> bytes:
    """One request as bytes, by default the last one of its connection."""
    return wire_builders.http(method, path, body, headers=headers, close=close)


def unchunked(raw: bytes) -> tuple[bytes, bytes]:
    """Head and body of one answer in chunked coding."""
    head, _, rest = raw.partition(b"\r\n\r\n")
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        body, rest = body + rest[:length], rest[length + 2 :]
    return head, body
