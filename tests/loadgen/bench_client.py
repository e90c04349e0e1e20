"""How many streamed tokens a second one process of loadgen takes: ``python tests/loadgen/bench_client.py``.

A stub server in a process of its own writes one event a token and one write an event, in ticks over all its streams, as
an engine's steps do. It keeps to a pace, so that the network joins as few events as it would with a real server, and
counts its writes. The figure that carries over is the client's CPU time an event; where that times the pace stays below
one core and the lags stay low, the client keeps up.
"""

import argparse
import asyncio
import multiprocessing
import sys
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from time import perf_counter, process_time

sys.path.insert(0, str(Path(__file__).parents[2]))

import uvloop

from loadgen import metrics, report, runner, ws_parser
from loadgen.arrivals import ClosedLoop
from loadgen.client import parse_target
from loadgen.lengths import Fixed
from loadgen.options import RunOptions
from loadgen.work import BodyTemplate, RandomWords

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
TEMPLATE = (
    b'{"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1700000000,"model":"stub",'
    b'"choices":[{"index":0,"delta":%b,"logprobs":null,"finish_reason":%b}],"usage":%b}'
)


def chunk(payload: bytes) -> bytes:
    """One event as one HTTP chunk."""
    event = b"data: %b\n\n" % payload
    return b"%x\r\n%b\r\n" % (len(event), event)


TOKEN = chunk(TEMPLATE % (b'{"content":" token"}', b"null", b"null"))
FIRST = HEAD + chunk(TEMPLATE % (b'{"role":"assistant","content":""}', b"null", b"null")) + TOKEN


def last(num_tokens: int) -> bytes:
    """What ends a stream of so many tokens."""
    usage = b'{"prompt_tokens":16,"completion_tokens":%d,"total_tokens":%d}' % (num_tokens, num_tokens + 16)
    finish = chunk(TEMPLATE % (b"{}", b'"length"', b"null"))
    return finish + chunk(TEMPLATE % (b"{}", b"null", usage)) + chunk(b"[DONE]") + b"0\r\n\r\n"


def frame(payload: bytes) -> bytes:
    """One message of a websocket."""
    return ws_parser.server_frame(ws_parser.Opcode.TEXT, payload)


WS_TOKEN = frame(
    b'{"type":"response.output_text.delta","sequence_number":123,"item_id":"msg_0123456789abcdef","output_index":0,'
    b'"content_index":0,"delta":" token","logprobs":[]}'
)
WS_FIRST = frame(b'{"type":"response.created","response":{"id":"resp_1","status":"in_progress"}}') + WS_TOKEN


def ws_last(num_tokens: int) -> bytes:
    """What ends an answer of so many tokens on a websocket."""
    usage = b'{"input_tokens":16,"output_tokens":%d,"total_tokens":%d}' % (num_tokens, num_tokens + 16)
    return frame(b'{"type":"response.completed","response":{"status":"completed","usage":%b}}' % usage)


class Streams(asyncio.Protocol):
    """A connection that streams an answer to whatever comes."""

    def __init__(self, active: "dict[asyncio.Transport, int]") -> None:
        self._active = active
        self._is_websocket = False

    def connection_made(self, transport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._is_websocket or data.startswith(b"POST"):
            self._active[self._transport] = 0
        elif b"Sec-WebSocket-Key: " in data:
            self._is_websocket = True
            accept = ws_parser.accept_of(data.partition(b"Sec-WebSocket-Key: ")[2].partition(b"\r\n")[0])
            head = f"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: {accept}\r\n\r\n"
            self._transport.write(b"HTTP/1.1 101 Switching Protocols\r\n" + head.encode())
        else:  # the look at /metrics
            self._transport.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")

    def connection_lost(self, exc: Exception | None) -> None:
        self._active.pop(self._transport, None)


def serve(pipe: Pipe, num_tokens: int, tick_s: float, is_websocket: bool) -> None:
    """Write a token to each stream at each tick until the pipe says to stop; then send CPU and wall time."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        active: dict[asyncio.Transport, int] = {}
        server = await loop.create_server(lambda: Streams(active), "127.0.0.1", 0)
        pipe.send(server.sockets[0].getsockname()[1])
        due_s = perf_counter()
        token, first = (WS_TOKEN, WS_FIRST) if is_websocket else (TOKEN, FIRST)
        ending = ws_last(num_tokens) if is_websocket else last(num_tokens)
        while not pipe.poll():
            for transport, count in list(active.items()):
                transport.write(token if count else first)
                active[transport] = count + 1
                if count + 1 == num_tokens:
                    del active[transport]
                    transport.write(ending)
            due_s = max(due_s + tick_s, perf_counter())
            await asyncio.sleep(max(0.0, due_s - perf_counter()))

    uvloop.run(main())
    pipe.send(process_time())


def main() -> None:
    """Measure one pace."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--pace", type=float, default=50_000.0, help="tokens a second; 0 is as fast as the server can")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--endpoint", choices=("chat", "responses-ws"), default="chat")
    arguments = parser.parse_args()

    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    tick_s = arguments.streams / arguments.pace if arguments.pace else 0.0
    stub = context.Process(
        target=serve, args=(theirs, arguments.max_tokens, tick_s, arguments.endpoint == "responses-ws"), daemon=True
    )
    stub.start()
    options = RunOptions(
        target=parse_target(f"http://127.0.0.1:{ours.recv()}", arguments.endpoint, api_key=None, headers={}),
        template=BodyTemplate(model="stub", endpoint=arguments.endpoint, max_tokens=arguments.max_tokens),
        source=RandomWords(lengths=Fixed(value=16)),
        arrivals=ClosedLoop(concurrency=arguments.streams),
        duration_s=arguments.seconds,
        num_processes=arguments.processes,
    )
    result = runner.run(options)
    ours.send("stop")
    stub_cpu_s = ours.recv()
    stub.join()

    summary = metrics.summarise(result)
    num_events = sum(len(s.answer.event_ns) for s in result.samples)
    cpu_s = sum(d.cpu_s for d in result.drivers)
    wall_s = max(d.wall_s for d in result.drivers)
    # Events of one read carry the time of that read.
    num_reads = sum(len(set(s.answer.event_ns)) for s in result.samples)
    sys.stdout.write(report.table(result, summary, is_colored=False))
    sys.stdout.write(
        f"\n{num_events / wall_s:,.0f} events/s, {cpu_s / num_events * 1e6:.2f} µs of client CPU an event"
        f" ({num_events / num_reads:.2f} events a read), so {num_events / cpu_s:,.0f} events/s a core;"
        f" the stub used {stub_cpu_s / wall_s:.0%} of a core\n"
    )


if __name__ == "__main__":
    main()
