"""Many connections at once, without a model: idle ones and slow streams side by side, over loopback.

    python tests/bench/connections.py [--idle 10000] [--streams 2000] [--tokens-per-s 2] [--seconds 20]

Starts ``scripted_server.py`` and is its client. Every idle connection has had one answer and is kept alive; every
stream gets a token a step. Prints one JSON object: lateness of the server's loop, memory a connection (the growth of
its resident set), the gaps that the streams saw, the server's CPU while only idle connections are open, and what went
wrong.
"""

import argparse
import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, Final, cast

import uvloop

ROOT = Path(__file__).parents[2]
OPENING: Final = 128
"""Connections that are being opened at a time."""
OPENING_TIMEOUT_S: Final = 60.0


class Connection(asyncio.Protocol):
    """Sends one request and counts what comes back. Never asks again."""

    def __init__(self, request: bytes, errors: Counter[str], *, lasts: bool) -> None:
        """lasts: the answer has no end while the bench runs, so that its end is an error."""
        self._request = request
        self._errors = errors
        self._lasts = lasts
        self._last_s = 0.0
        self.answered = asyncio.get_running_loop().create_future()
        self.num_tokens = 0
        self.gaps_s: list[float] = []
        self.is_over = False
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self.answered.done():
            if not data.startswith(b"HTTP/1.1 200"):
                self._errors[data.split(b"\r\n", 1)[0].decode("latin-1")] += 1
            self.answered.set_result(None)
        if num_tokens := data.count(b'"content":"') - data.count(b'"content":""'):
            now = time.perf_counter()
            if self.num_tokens:
                self.gaps_s.append(now - self._last_s)
            self._last_s = now
            self.num_tokens += num_tokens
        if self._lasts and b"data: [DONE]" in data:
            self._errors["a stream ended"] += 1

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.is_over:
            self._errors[f"closed by the server: {exc}"] += 1
        if not self.answered.done():
            self.answered.set_result(None)


class Server:
    """``scripted_server.py`` in a process of its own."""

    def __init__(self, *flags: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, ROOT / "tests/bench/scripted_server.py", "--no-sampler", *flags],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline().rpartition(":")[2])

    def resident_bytes(self) -> int:
        pages = Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]
        return int(pages) * resource.getpagesize()

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    async def statistics(self) -> dict[str, Any]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(b"GET /v1/stats HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        answer = await reader.read()
        writer.close()
        return dict(json.loads(answer.partition(b"\r\n\r\n")[2]))

    def close(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()


async def open_all(port: int, request: bytes, num: int, errors: Counter[str], *, lasts: bool) -> list[Connection]:
    """Open so many, each answered before its place is taken by the next."""
    places = asyncio.Semaphore(OPENING)
    loop = asyncio.get_running_loop()

    async def open_one() -> Connection:
        async with places:
            _, connection = await loop.create_connection(
                lambda: Connection(request, errors, lasts=lasts), "127.0.0.1", port
            )
            if not lasts:
                await connection.answered
        return connection

    async with asyncio.timeout(OPENING_TIMEOUT_S):
        connections = await asyncio.gather(*(open_one() for _ in range(num)))
        await asyncio.gather(*(connection.answered for connection in connections))
    return connections


def chat_request(max_tokens: int) -> bytes:
    body = json.dumps(
        {
            "messages": [{"role": "user", "content": "Count as far as you can."}],
            "stream": True,
            "max_tokens": max_tokens,
            "ignore_eos": True,
        }
    ).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"Content-Type: application/json\r\n\r\n" + body


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


async def measure(arguments: argparse.Namespace, server: Server) -> dict[str, Any]:
    errors: Counter[str] = Counter()
    base = server.resident_bytes()
    health = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    start_s = time.perf_counter()
    idle = await open_all(server.port, health, arguments.idle, errors, lasts=False)
    opening_s = time.perf_counter() - start_s
    await asyncio.sleep(2)
    with_idle = server.resident_bytes()
    idle_cpu_s, start_s = server.cpu_s(), time.perf_counter()
    await asyncio.sleep(5)
    idle_share = (server.cpu_s() - idle_cpu_s) / (time.perf_counter() - start_s)

    streams = await open_all(server.port, chat_request(7000), arguments.streams, errors, lasts=True)
    for stream in streams:
        stream.gaps_s.clear()
    num_before, cpu_before_s, start_s = (
        sum(stream.num_tokens for stream in streams),
        server.cpu_s(),
        time.perf_counter(),
    )
    await asyncio.sleep(arguments.seconds)
    seconds = time.perf_counter() - start_s
    num_tokens = sum(stream.num_tokens for stream in streams) - num_before
    streaming_share = (server.cpu_s() - cpu_before_s) / seconds
    statistics = await server.statistics()
    with_streams = server.resident_bytes()
    gaps_s = [gap_s for stream in streams for gap_s in stream.gaps_s]
    silent = sum(not stream.gaps_s for stream in streams)
    if silent:
        errors["streams without a token"] += silent
    for connection in (*idle, *streams):
        connection.is_over = True
        if connection.transport is not None:
            connection.transport.abort()
    return {
        "num_idle": arguments.idle,
        "num_streams": arguments.streams,
        "opening_s": round(opening_s, 2),
        "kib_an_idle_connection": round((with_idle - base) / max(arguments.idle, 1) / 1024, 1),
        "kib_a_stream": round((with_streams - with_idle) / max(arguments.streams, 1) / 1024, 1),
        "resident_mib": round(with_streams / 2**20),
        "cpu_share_idle": round(idle_share, 4),
        "cpu_share_streaming": round(streaming_share, 4),
        "tokens_per_s": round(num_tokens / seconds, 1),
        "gap_ms": {name: round(percentile(gaps_s, share) * 1000, 1) for name, share in (("p50", 0.5), ("p99", 0.99))}
        | {"max": round(max(gaps_s, default=0.0) * 1000, 1)},
        "loop_lag_ms": statistics["loop"],
        "connections": statistics["server"]["connections"],
        "errors": dict(errors),
    }


def raise_file_limit(num: int) -> None:
    """As far as this user may; the server, a child, inherits it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = num + 512
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))
    if hard < wanted:
        raise SystemExit(f"{wanted} files have to be open at once; the hard limit here is {hard} (ulimit -Hn).")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--idle", type=int, default=10_000)
    parser.add_argument("--streams", type=int, default=2_000)
    parser.add_argument("--tokens-per-s", type=float, default=2.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    arguments = parser.parse_args()
    raise_file_limit(arguments.idle + arguments.streams)
    server = Server("--step-ms", str(1000 / arguments.tokens_per_s), "--max-num-seqs", str(max(arguments.streams, 1)))
    try:
        report = uvloop.run(measure(arguments, server))
    finally:
        server.close()
    sys.stdout.write(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
