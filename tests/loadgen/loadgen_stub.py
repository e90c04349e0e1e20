"""Servers whose timing is a script: one on virtual time without sockets, one on loopback for what only sockets show.

Virtual time passes only when nothing is left to do: a loop's wait for its next timer moves the clock there at once. So
a scripted run of minutes takes milliseconds and its latencies are exact.
"""

import asyncio
import json
import selectors
from array import array
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from loadgen.alarm import LoopAlarm
from loadgen.arrivals import Arrivals, ClosedLoop
from loadgen.client import Connection, Target, parse_target
from loadgen.driver import Driver
from loadgen.lengths import Fixed
from loadgen.options import RunOptions
from loadgen.result import DriverResult, RunResult
from loadgen.sample import Answer, ErrorKind, Sample
from loadgen.work import BodyTemplate, RandomWords

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
CLOSE = b""
"""In a script: the server closes the connection."""

DEFAULT_TARGET = parse_target("http://127.0.0.1:8000", "chat", api_key=None, headers={})


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(payload: Any) -> bytes:
    """One server-sent event with a payload in JSON, or as it is."""
    return b"data: %b\n\n" % (payload if isinstance(payload, bytes) else json.dumps(payload).encode())


def content(text: str = "word ", **extra: Any) -> bytes:
    """A chat chunk's event with some text."""
    return event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]} | extra)


def finish(*, prompt_tokens: int = 0, completion_tokens: int = 0) -> bytes:
    """The events that end a stream, with usage."""
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return (
        event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
        + event({"choices": [], "usage": usage})
        + event(b"[DONE]")
    )


Script = Iterable[tuple[float, bytes]]
"""What a server writes, each with its time in seconds from the request's arrival."""


def stream(times_s: Iterable[float], *, prompt_tokens: int = 7) -> Script:
    """The script of an answer with one token at each time."""
    times = list(times_s)
    yield 0.0, HEAD
    yield from ((at_s, chunk(content())) for at_s in times)
    usage = finish(prompt_tokens=prompt_tokens, completion_tokens=len(times))
    yield times[-1] if times else 0.0, chunk(usage) + END


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that skips every wait."""

    def __init__(self) -> None:
        self._skipping = _SkippingSelector()
        super().__init__(self._skipping)

    def time(self) -> float:
        return self._skipping.now_s


class _SkippingSelector(selectors.DefaultSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1000.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "everything waits and nothing is due"
            self.now_s += timeout
        return ready


class ScriptedServer:
    """Answers on virtual time. ``answer`` gives the script of a request by its number and its arrival time."""

    def __init__(self, answer: Callable[[int, float], Script]) -> None:
        self._answer = answer
        self.arrivals_s: list[float] = []
        self.bodies: list[dict[str, Any]] = []
        self.num_connections = 0
        self.num_out = 0
        self.num_out_max = 0

    async def connect(
        self, protocol_factory: Callable[[], Connection], /, *, is_slow: bool = False
    ) -> tuple[Any, Connection]:
        self.num_connections += 1
        protocol = protocol_factory()
        transport = _MemoryTransport(self, protocol)
        protocol.connection_made(transport)
        return transport, protocol

    def take(self, transport: "_MemoryTransport", request: bytes) -> None:
        loop = asyncio.get_running_loop()
        self.bodies.append(json.loads(request.partition(b"\r\n\r\n")[2]))
        self.arrivals_s.append(loop.time())
        self.num_out += 1
        self.num_out_max = max(self.num_out, self.num_out_max)
        self._play(iter(self._answer(len(self.arrivals_s) - 1, loop.time())), loop.time(), transport)

    def _play(self, script: Iterator[tuple[float, bytes]], began_s: float, transport: "_MemoryTransport") -> None:
        # One step schedules the next: timers of the same time come in no particular order.
        step = next(script, None)
        if step is not None:
            at_s, data = step

            def deliver() -> None:
                transport.deliver(data)
                self._play(script, began_s, transport)

            asyncio.get_running_loop().call_at(began_s + at_s, deliver)


class _MemoryTransport(asyncio.Transport):
    def __init__(self, server: ScriptedServer, protocol: Connection) -> None:
        super().__init__()
        self._server = server
        self._protocol = protocol
        self._is_closing = False

    def write(self, data: Any) -> None:
        self._server.take(self, data)

    def deliver(self, data: bytes) -> None:
        if self._is_closing:
            return
        if data == CLOSE or data.endswith(END):
            self._server.num_out -= 1
        if data == CLOSE:
            self.abort()
        else:
            self._protocol.data_received(data)

    def is_closing(self) -> bool:
        return self._is_closing

    def abort(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            asyncio.get_running_loop().call_soon(self._protocol.connection_lost, None)


def options(arrivals: Arrivals | None = None, *, target: Target = DEFAULT_TARGET, **fields: Any) -> RunOptions:
    """Options of a run of ten requests, one after another, unless told otherwise."""
    template = BodyTemplate(model="stub", endpoint="chat", max_tokens=8, temperature=0.0, extra={})
    if "num_requests" not in fields and "duration_s" not in fields:
        fields["num_requests"] = 10
    return RunOptions(
        target=target,
        template=fields.pop("template", template),
        source=fields.pop("source", RandomWords(lengths=Fixed(value=4))),
        arrivals=arrivals or ClosedLoop(concurrency=1),
        **fields,
    )


def run_virtual(
    run: RunOptions, server: ScriptedServer, *, process: int = 0, interrupt_after_s: float | None = None
) -> RunResult:
    """Make one process's share of a run on virtual time."""

    async def main() -> DriverResult:
        loop = asyncio.get_running_loop()

        async def agree_start() -> float:
            if interrupt_after_s is not None:
                loop.call_later(interrupt_after_s, driver.interrupt)
            return loop.time()

        driver = Driver(
            run,
            process,
            agree_start=agree_start,
            clock=loop.time,
            connect=server.connect,
            alarm=lambda clock: LoopAlarm(),
        )
        return await driver.run()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return result_of(run, [runner.run(main())])


def result_of(run: RunOptions, drivers: list[DriverResult]) -> RunResult:
    """Put drivers' results together."""
    samples = sorted((s for d in drivers for s in d.samples), key=lambda s: (s.index, s.turn))
    return RunResult(options=run, started_at=0.0, loop_name="virtual", samples=samples, drivers=drivers)


def driver_result(samples: list[Sample], **fields: Any) -> DriverResult:
    """What an untroubled process would leave."""
    untroubled = DriverResult(
        process=0,
        samples=samples,
        num_held_back=0,
        wall_s=1.0,
        cpu_s=0.1,
        loop_lag_s=array("d", [0.001]),
        cpu_shares=array("d"),
    )
    return replace(untroubled, **fields)


def answer(event_ms: Iterable[float] = (), *, event_tokens: Iterable[int] = (), **fields: Any) -> Answer:
    """An answer with content events at the given times after the send."""
    times = array("q", [round(ms * 1e6) for ms in event_ms])
    first = times[0] if times else None
    return Answer(event_ns=times, event_tokens=array("q", event_tokens), **({"first_byte_ns": first} | fields))


def sample(
    read: Answer | None = None,
    *,
    intended_s: float = 0.0,
    sent_s: float | None = 0.0,
    end_s: float = 1.0,
    error: ErrorKind | None = None,
    **fields: Any,
) -> Sample:
    """A request's record, of one that succeeded unless told otherwise."""
    return Sample(
        **(
            {"index": 0, "turn": 0, "process": 0, "part": "", "lag_s": 0.0, "connect_s": None}
            | {"is_resent": False, "is_aborted": False, "status": 200, "detail": ""}
            | fields
        ),
        intended_s=intended_s,
        sent_s=sent_s,
        end_s=end_s,
        error=error,
        answer=read or answer(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopbackServer:
    """A running server on 127.0.0.1 and what it was asked."""

    port: int
    heads: list[bytes]
    bodies: list[dict[str, Any]]

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


Handler = Callable[[asyncio.StreamWriter], Coroutine[Any, Any, None]]


@asynccontextmanager
async def loopback_server(handler: Handler) -> Any:
    """Serve requests on loopback; after each, ``handler`` writes the answer and may close the connection."""
    heads: list[bytes] = []
    bodies: list[dict[str, Any]] = []

    serving: set[asyncio.Task[None] | None] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.add(asyncio.current_task())
        try:
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
                if head.startswith(b"GET"):  # the look at /metrics
                    writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
                    continue
                heads.append(head)
                bodies.append(json.loads(await reader.readexactly(length)))
                await handler(writer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()
            serving.discard(asyncio.current_task())

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield LoopbackServer(port=server.sockets[0].getsockname()[1], heads=heads, bodies=bodies)
        # A handler that waits for ever would keep the server open: from 3.12 on its end waits for every connection's.
        for task in list(serving):
            assert task is not None
            task.cancel()


async def answer_well(writer: asyncio.StreamWriter) -> None:
    """Write four tokens and the end."""
    for _, data in stream([0.0] * 4):
        writer.write(data)
    await writer.drain()
