"""The whole stack in one process, without torch: scripted device, engine and server on a loopback port, and clients.

``whole()`` starts it and, at the end of its ``with`` block, asserts what must hold after every test: the recount of all
core state (I1), one end for each accepted sequence (I2), and that slots, permits, tables, mailboxes, tasks and file
descriptors are back where they were (I4).
"""

import asyncio
import codecs
import contextlib
import os
import socket
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import aiohttp
import wire_builders
from wire_builders import events, http, until

from aserve.core.invariants import check
from aserve.core.options import SchedulerOptions
from aserve.engine.engine import Engine
from aserve.engine.observe import MetricsObserver
from aserve.engine.options import EngineOptions
from aserve.engine.ports import Tokenizer
from aserve.obs.log import Logger, Record
from aserve.obs.metrics import Metrics
from aserve.obs.ring import Ring
from aserve.server.app import Server
from aserve.server.options import LimitOptions, ServerOptions
from aserve.testing import ByteTokenizer, MemoryRunner, ScriptedRunner
from aserve.text.chat_template import ChatTemplate, PromptRenderer

MODEL = "scripted"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'system' and not loop.first %}"
    "{{ raise_exception('The system message comes first.') }}{% endif %}"
    "{{ message.role }}:{{ message.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)

Runner = ScriptedRunner | MemoryRunner


class PieceTokenizer(ByteTokenizer):
    """Bytes, and one further token for each of ``pieces``, which may be any bytes: ids count up from 258."""

    def __init__(self, *pieces: str | bytes) -> None:
        self._pieces = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
        self.ids = list(range(258, 258 + len(pieces)))

    @property
    def vocab_size(self) -> int:
        return 258 + len(self._pieces)

    def token_bytes(self, token: int) -> bytes:
        return self._pieces[token - 258] if 258 <= token < self.vocab_size else super().token_bytes(token)

    def decoder(self, *, skip_special_tokens: bool = True) -> "_PieceDecoder":  # type: ignore[override]
        return _PieceDecoder(self)


class _PieceDecoder:
    def __init__(self, tokenizer: PieceTokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        data = b"" if token in (ByteTokenizer.BOS, ByteTokenizer.EOS) else self._tokenizer.token_bytes(token)
        return self._utf8.decode(data)

    def finish(self) -> str:
        return self._utf8.decode(b"", True)


class Answer(wire_builders.Answer):
    """Of a completion, plain or streamed."""

    @property
    def text(self) -> str:
        return self.texts[0]

    @property
    def texts(self) -> list[str]:
        """By choice; a stream's deltas joined."""
        joined: dict[int, str] = {}
        for choice in self.choices:
            joined[choice["index"]] = joined.get(choice["index"], "") + choice["text"]
        return [joined[index] for index in sorted(joined)]

    @property
    def choices(self) -> list[dict[str, Any]]:
        if not self.is_stream:
            return self.json["choices"]
        return [choice for event in self.events if "choices" in event for choice in event["choices"]]

    @property
    def is_stream(self) -> bool:
        return self.headers.get("content-type", "").startswith("text/event-stream")

    @property
    def events(self) -> list[Any]:
        """A stream's payloads. I3: it ends with [DONE] after a finish chunk, or with an error and without it."""
        payloads = [payload for payload in events(self.body) if payload != "[DONE]"]
        is_done = self.body.endswith(b"data: [DONE]\n\n")
        assert is_done != any("error" in payload for payload in payloads), "neither a whole answer nor an error"
        assert not is_done or any(choice["finish_reason"] for payload in payloads for choice in payload["choices"])
        return payloads

    @property
    def finish(self) -> str | None:
        """Of the only choice: finish_reason, or the code of a stream's last error."""
        if self.is_stream and "error" in self.events[-1]:
            return self.events[-1]["error"]["code"]
        return self.choices[-1]["finish_reason"]


class Visitor:
    """A client on a socket of its own: what it sends, reads and leaves unread is the test's choice."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @property
    def socket(self) -> socket.socket:
        return self.writer.get_extra_info("socket")

    def ask(self, method: str, path: str, body: Any = None, **more: Any) -> None:
        self.writer.write(http(method, path, body, **more))

    def post(self, path: str, body: Any, **more: Any) -> None:
        self.ask("POST", path, body, **more)

    async def answer(self) -> Answer:
        """The next whole answer on this connection."""
        status, headers = await self.head()
        if headers.get("transfer-encoding") == "chunked":
            body = b"".join([chunk async for chunk in self.chunks()])
        elif "content-length" in headers:
            body = await self.reader.readexactly(int(headers["content-length"]))
        else:
            body = await self.reader.read()
        return Answer(status, headers, body)

    async def head(self) -> tuple[int, dict[str, str]]:
        """Status and headers; their names in lower case."""
        first, *lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")[:-2]
        pairs = (line.partition(": ") for line in lines)
        return int(first.split()[1]), {name.lower(): value for name, _, value in pairs}

    async def chunks(self) -> AsyncIterator[bytes]:
        """Of a body in chunked coding, as they come."""
        while size := int(await self.reader.readuntil(b"\r\n"), 16):
            yield (await self.reader.readexactly(size + 2))[:-2]
        await self.reader.readexactly(2)

    async def rest(self) -> bytes:
        """All until the server closes; a reset counts as a close."""
        received = b""
        try:
            while part := await self.reader.read(65536):
                received += part
        except ConnectionError:
            pass
        return received

    def reset(self) -> None:
        """Leave with RST."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    def close(self) -> None:
        self.writer.close()


@dataclass
class Whole:
    engine: Engine
    server: Server
    runner: Any
    host: str
    port: int
    session: aiohttp.ClientSession
    ring: Ring[Record]
    metrics: Metrics
    visitors: list[Visitor] = field(default_factory=list)

    # --- clients

    async def visit(self, *, receive_buffer: int = 0) -> Visitor:
        """Connect. receive_buffer: bytes that the client's kernel may hold for it, where that must be few."""
        sock = socket.socket()
        if receive_buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(sock, (self.host, self.port))
            visitor = Visitor(*await asyncio.open_connection(sock=sock, limit=receive_buffer or 1 << 20))
        except BaseException:
            sock.close()
            raise
        self.visitors.append(visitor)
        return visitor

    async def post(self, path: str, body: Any, **more: Any) -> Answer:
        return await self.ask("POST", path, body, **more)

    async def get(self, path: str, **more: Any) -> Answer:
        return await self.ask("GET", path, **more)

    async def ask(self, method: str, path: str, body: Any = None, **more: Any) -> Answer:
        """One request on a connection of its own."""
        visitor = await self.visit()
        visitor.ask(method, path, body, **more)
        try:
            return await visitor.answer()
        finally:
            visitor.close()
            self.visitors.remove(visitor)

    async def complete(self, prompt: Any = "hi", **wanted: Any) -> Answer:
        """POST /v1/completions, greedy and eight tokens long unless told otherwise."""
        return await self.post(TEXT, completion(prompt, **wanted))

    # --- looking

    @property
    def figures(self) -> Any:
        return self.engine.statistics()

    @property
    def ends(self) -> dict[str, int]:
        """How many sequences ended for each reason; reasons without any left out."""
        return {reason: count for reason, count in self.figures.num_finished.items() if count}

    @property
    def connections(self) -> dict[str, int]:
        return self.server.statistics()["connections"]

    def lines(self, event: str) -> list[dict[str, Any]]:
        """Log records of this name so far."""
        return [record for record in self.ring._items if isinstance(record, dict) and record["event"] == event]

    @property
    def request_ids(self) -> list[str]:
        """Our own ids of the open calls, the oldest first."""
        return list(self.engine._calls)

    @property
    def is_at_rest(self) -> bool:
        """Nothing open, nothing running, nothing left to deliver."""
        deliverer = self.engine._deliverer
        is_still = self.engine.scheduler.is_idle and not deliverer.num_queued
        return (is_still or not self.engine.health().alive) and not self.figures.num_streams and not deliverer.choices

    async def rest(self) -> None:
        """Let the visitors go, and the loop turn until everything has ended and every connection is closed."""
        for visitor in self.visitors:
            visitor.close()
        await until(lambda: self.is_at_rest and not self.connections["open"])


@asynccontextmanager
async def whole(
    runner: Runner | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    server_type: type[Server] = Server,
    send_buffer: int = 0,
    template: str = TEMPLATE,
    may_fail: bool = False,
    **options: Any,
) -> AsyncIterator[Whole]:
    """The stack with ``options`` of any section, found to have given everything back at the end.

    send_buffer: bytes that the kernel may hold for a peer, where that must be few. may_fail: an exception of ours in a
    handler is part of the test; otherwise the log must not tell of one.
    """
    runner = runner if runner is not None else ScriptedRunner(num_blocks=512)
    tokenizer = tokenizer or ByteTokenizer()
    tasks_before, num_files_before = asyncio.all_tasks(), num_files()

    def of(section: Any, **defaults: Any) -> Any:
        names = {entry.name for entry in fields(section)}
        return section(**{**defaults, **{name: options.pop(name) for name in list(options) if name in names}})

    server_options, limits, engine_options = of(ServerOptions, port=0), of(LimitOptions), of(EngineOptions)
    info = runner.info
    scheduler_options = of(
        SchedulerOptions, max_num_seqs=info.max_num_seqs, block_size=info.block_size, check_invariants_every=16
    )
    assert not options, f"no section has {sorted(options)}"

    ring: Ring[Record] = Ring(1 << 16)
    log = Logger(ring, "debug")
    metrics = Metrics(MODEL, process=False)
    engine = Engine(
        runner, tokenizer, scheduler_options, engine_options, observer=MetricsObserver(metrics), log=log.bind()
    )
    server = server_type(
        engine=engine,
        renderer=PromptRenderer(tokenizer, ChatTemplate(template)),
        model_names=(MODEL,),
        options=server_options,
        limits=limits,
        log=log.bind(),
        metrics=metrics,
    )
    await engine.start()
    host, port = await server.start()
    if send_buffer:
        assert server._listener is not None
        with socket.socket(fileno=os.dup(server._listener.sockets[0].fileno())) as listening:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)  # accepted sockets inherit it
    try:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            stack = Whole(engine, server, runner, host, port, session, ring, metrics)
            try:
                yield stack
            finally:
                for visitor in stack.visitors:
                    visitor.close()
        await stack.rest()
    finally:
        await server.aclose()
        await engine.aclose()
    check(engine.scheduler)
    figures = engine.statistics()
    assert stack.is_at_rest
    assert figures.num_accepted == sum(figures.num_finished.values())
    assert engine._permits.statistics().num_taken == 0 or not engine.health().alive
    assert server.statistics()["requests_open"] == 0
    assert may_fail or not [*stack.lines("request.failed"), *stack.lines("connection_fault")]
    await until(lambda: asyncio.all_tasks() <= tasks_before | {asyncio.current_task()})
    await until(lambda: num_files() <= num_files_before)


def num_files() -> int:
    """Open file descriptors of this process. /dev/null is left out: libuv keeps one in reserve from its first listener
    on."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor that listed the folder
            count += os.readlink(f"/proc/self/fd/{name}") != "/dev/null"
    return count


async def turn(times: int = 20) -> None:
    """Let the loop turn a few times."""
    for _ in range(times):
        await asyncio.sleep(0)


def completion(prompt: Any = "hi", **wanted: Any) -> dict[str, Any]:
    return {"prompt": prompt, "temperature": 0, "max_tokens": 8, **wanted}


def chat(content: Any = "hi", **wanted: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 8, **wanted}


def says(*tokens: int | bytes | str, then: int | None = ByteTokenizer.EOS) -> Callable[[Any, int], int]:
    """A script that emits these tokens (of text its bytes), and then end-of-sequence for ever, or ``then``."""
    ids: list[int] = []
    for token in tokens:
        ids += [token] if isinstance(token, int) else token.encode() if isinstance(token, str) else token
    last = ids[-1] if then is None else then
    return lambda context, index: ids[index] if index < len(ids) else last


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]
