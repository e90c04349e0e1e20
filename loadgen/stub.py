"""A server whose timing is a script, to try this program on: what it measures can be held against what was played.

It answers chat, completions and Responses over SSE and over the websocket, lists a model and counts a token a word. The
script of an answer is drawn by its number. It has as many slots as it is told: what comes beyond them waits its turn,
as in a server's queue. In the stall nothing moves, neither tokens nor the queue; it happens once.
"""

import asyncio
import random
import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from heapq import heapreplace
from itertools import accumulate
from math import exp
from pathlib import Path
from time import perf_counter
from typing import Any, cast

from loadgen import codec, ws_parser
from loadgen.alarm import Alarm, best_alarm
from loadgen.arrivals import normal
from loadgen.errors import LoadgenError
from loadgen.runner import loop_factory
from loadgen.ws_parser import FrameParser, Opcode

MODEL = "stub"
NUM_TOKENS = 16
"""Where the request does not say."""
NUM_TOKENS_MAX = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """Medians of the laws and ``jitter``, their sigma. The stall begins ``stall_at_s`` after the first request."""

    ttft_ms: float
    gap_ms: float
    jitter: float = 0.0
    num_slots: int | None = None
    stall_at_s: float | None = None
    stall_s: float = 0.0
    seed: int = 0

    def draw(self, number: int, num_tokens: int) -> list[float]:
        """Return the seconds of work before each token of answer ``number``, the first one's from its start."""
        rng = random.Random(f"stub/{self.seed}/{number}")
        medians_ms = [self.ttft_ms, *[self.gap_ms] * (num_tokens - 1)]
        return [median / 1e3 * exp(self.jitter * normal(rng)) for median in medians_ms]

    def worked(self, at_s: float) -> float:
        """Return how much of the time until ``at_s`` was no stall."""
        if self.stall_at_s is None or at_s < self.stall_at_s:
            return at_s
        return max(self.stall_at_s, at_s - self.stall_s)

    def when(self, worked_s: float) -> float:
        """Return when so much work is done: the inverse of ``worked``."""
        is_after = self.stall_at_s is not None and worked_s >= self.stall_at_s
        return worked_s + self.stall_s if is_after else worked_s


@dataclass(slots=True, kw_only=True)
class Played:
    """What one answer was to be, and how late its tokens really went out; times from the first request, in s."""

    number: int
    arrived_s: float
    started_s: float
    due_s: list[float]
    late_s_max: float = 0.0


HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
    b"Cache-Control: no-cache\r\nTransfer-Encoding: chunked\r\n\r\n"
)


class Stub:
    """The state of all connections: the clock since the first request, the slots, what was played.

    Everything about an answer is known when its request arrives: it starts when the slot that is free first is free.
    """

    def __init__(self, script: Script, alarm: Alarm) -> None:
        self.script = script
        self.played: list[Played] = []
        self._alarm = alarm
        self._free_work_s = [0.0] * (script.num_slots or 0)  # when each slot is free, in work; a heap
        self._origin_s: float | None = None

    def now(self) -> float:
        """Seconds since the first request."""
        if self._origin_s is None:
            self._origin_s = perf_counter()
        return perf_counter() - self._origin_s

    async def play(self, num_tokens: int, answer: "Answer") -> None:
        """Play an answer by its script and note how well that went."""
        arrived_s, number = self.now(), len(self.played)
        work_s = self.script.worked(arrived_s)
        durations_s = self.script.draw(number, num_tokens)
        if self._free_work_s:
            work_s = max(work_s, self._free_work_s[0])
            heapreplace(self._free_work_s, work_s + sum(durations_s))
        due_s = [self.script.when(at_s) for at_s in accumulate(durations_s, initial=work_s)]
        played = Played(number=number, arrived_s=arrived_s, started_s=due_s[0], due_s=due_s[1:])
        self.played.append(played)
        for count, at_s in enumerate(played.due_s, 1):
            wait_s = at_s - self.now()
            if wait_s > 0:
                await self._alarm.sleep(wait_s)
            played.late_s_max = max(played.late_s_max, self.now() - at_s)
            answer.token(count, num_tokens)

    def truth(self) -> dict[str, Any]:
        """Return the script of every answer, in ms from its arrival."""
        return {
            "script": asdict(self.script),
            "late_ms_max": max((p.late_s_max for p in self.played), default=0.0) * 1e3,
            "answers": [
                {
                    "arrived_s": p.arrived_s,
                    "queue_ms": (p.started_s - p.arrived_s) * 1e3,
                    "event_ms": [(at_s - p.arrived_s) * 1e3 for at_s in p.due_s],
                }
                for p in self.played
            ],
        }


class Answer:
    """Writes the events of one answer to a connection."""

    def __init__(self, wire: "Wire", kind: str, num_prompt_tokens: int, *, is_streamed: bool) -> None:
        self._wire = wire
        self._kind = kind
        self._num_prompt_tokens = num_prompt_tokens
        self._is_streamed = is_streamed
        self._words: list[str] = []

    def token(self, count: int, num_tokens: int) -> None:
        """Write token ``count`` of ``num_tokens``, and with the last one the end."""
        word = f"word{count} "
        self._words.append(word)
        wire = self._wire
        if self._is_streamed:
            if count == 1:
                wire.begin()
            wire.event(self._delta(word))
        if count == num_tokens:
            if self._is_streamed:
                for event in self._ending(num_tokens):
                    wire.event(event)
                wire.end(says_done=self._kind != "responses")
            else:
                wire.whole(self._whole(num_tokens))

    def _delta(self, word: str) -> dict[str, Any]:
        if self._kind == "responses":
            return {"type": "response.output_text.delta", "delta": word, "output_index": 0}
        choice = {"delta": {"content": word}} if self._kind == "chat" else {"text": word}
        return self._head(is_chunk=True) | {"choices": [{"index": 0, **choice, "finish_reason": None}], "usage": None}

    def _ending(self, num_tokens: int) -> list[dict[str, Any]]:
        if self._kind == "responses":
            return [{"type": "response.completed", "response": self._whole(num_tokens)}]
        choice: dict[str, Any] = {"delta": {}} if self._kind == "chat" else {"text": ""}
        head = self._head(is_chunk=True)
        finish = head | {"choices": [{"index": 0, **choice, "finish_reason": "length"}], "usage": None}
        return [finish, head | {"choices": [], "usage": self._usage(num_tokens)}]

    def _whole(self, num_tokens: int) -> dict[str, Any]:
        text = "".join(self._words)
        usage = self._usage(num_tokens)
        if self._kind == "responses":
            message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}
            return {"object": "response", "status": "completed", "model": MODEL, "output": [message], "usage": usage}
        choice = {"message": {"role": "assistant", "content": text}} if self._kind == "chat" else {"text": text}
        head = self._head(is_chunk=False)
        return head | {"choices": [{"index": 0, **choice, "finish_reason": "length"}], "usage": usage}

    def _head(self, *, is_chunk: bool) -> dict[str, Any]:
        kind = "text_completion" if self._kind == "completions" else f"chat.completion{'.chunk' if is_chunk else ''}"
        return {"id": "stub", "object": kind, "created": 0, "model": MODEL}

    def _usage(self, num_tokens: int) -> dict[str, int]:
        names = (
            ("input_tokens", "output_tokens") if self._kind == "responses" else ("prompt_tokens", "completion_tokens")
        )
        return {
            names[0]: self._num_prompt_tokens,
            names[1]: num_tokens,
            "total_tokens": self._num_prompt_tokens + num_tokens,
        }


class Wire(asyncio.Protocol):
    """A connection: HTTP/1.1 until an upgrade, one request at a time."""

    def __init__(self, stub: Stub) -> None:
        self._stub = stub
        self._transport: asyncio.Transport | None = None
        self._buffer = b""
        self._frames: FrameParser | None = None
        self._playing: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket is connected."""
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone: so is the rest of its answer."""
        for task in self._playing:
            task.cancel()

    def data_received(self, data: bytes) -> None:
        """Take the next bytes."""
        if self._frames is not None:
            self._feed_frames(data)
            return
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            request_line, *lines = self._buffer[:end].decode("latin-1").split("\r\n")
            fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            length = int(fields.get("content-length", 0))
            if len(self._buffer) < end + 4 + length:
                return
            body, self._buffer = self._buffer[end + 4 : end + 4 + length], self._buffer[end + 4 + length :]
            method, path, _ = request_line.split(" ", 2)
            if "upgrade" in fields:
                self._upgrade(fields["sec-websocket-key"])
                return
            self._answer(method, path, body)

    def begin(self) -> None:
        """Write the head of a stream."""
        if self._frames is None:
            self._write(HEAD)

    def event(self, fields: Mapping[str, Any]) -> None:
        """Write one event."""
        if self._frames is not None:
            self._write(ws_parser.server_frame(Opcode.TEXT, codec.dumps(fields)))
        else:
            self._chunk(b"data: %b\n\n" % codec.dumps(fields))

    def end(self, *, says_done: bool) -> None:
        """Write the end of a stream."""
        if self._frames is None:
            if says_done:
                self._chunk(b"data: [DONE]\n\n")
            self._write(b"0\r\n\r\n")

    def whole(self, fields: Mapping[str, Any], status: str = "200 OK") -> None:
        """Write an answer that is no stream."""
        body = codec.dumps(fields)
        head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        self._write(head.encode() + body)

    def _answer(self, method: str, path: str, body: bytes) -> None:
        kind = {"/v1/chat/completions": "chat", "/v1/completions": "completions", "/v1/responses": "responses"}.get(
            path
        )
        if kind is not None and method == "POST":
            try:
                self._play(kind, codec.loads(body))
            except ValueError:
                self.whole({"error": {"message": "The body is not JSON."}}, "400 Bad Request")
        elif path == "/v1/models":
            self.whole({"object": "list", "data": [{"id": MODEL, "object": "model"}]})
        else:
            self.whole({"error": {"message": f"There is no {path} here."}}, "404 Not Found")

    def _play(self, kind: str, body: Mapping[str, Any]) -> None:
        wanted = (body.get(key) for key in ("max_completion_tokens", "max_tokens", "max_output_tokens"))
        num_tokens = min(next((n for n in wanted if isinstance(n, int)), NUM_TOKENS), NUM_TOKENS_MAX)
        prompt = body.get("messages") or body.get("input") or body.get("prompt") or ""
        is_streamed = self._frames is not None or bool(body.get("stream"))
        answer = Answer(self, kind, len(str(prompt).split()), is_streamed=is_streamed)
        task = asyncio.get_running_loop().create_task(self._stub.play(max(1, num_tokens), answer))
        self._playing.add(task)
        task.add_done_callback(self._playing.discard)

    def _upgrade(self, key: str) -> None:
        self._frames = FrameParser(is_server=True)
        accept = ws_parser.accept_of(key.encode())
        head = f"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: {accept}\r\n\r\n"
        self._write(b"HTTP/1.1 101 Switching Protocols\r\n" + head.encode())

    def _feed_frames(self, data: bytes) -> None:
        assert self._frames is not None and self._transport is not None
        for opcode, payload in self._frames.feed(data):
            if opcode is Opcode.TEXT:
                self._play("responses", codec.loads(payload))
            elif opcode is Opcode.CLOSE:
                self._transport.close()

    def _chunk(self, data: bytes) -> None:
        self._write(b"%x\r\n%b\r\n" % (len(data), data))

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)


def main(script: Script, *, port: int, truth: str | None) -> int:
    """Serve until SIGINT or SIGTERM, then write the truth where that is wanted. Returns the exit status."""

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        alarm = best_alarm(perf_counter)
        stub = Stub(script, alarm)
        try:
            server = await loop.create_server(lambda: Wire(stub), "127.0.0.1", port)
        except OSError as error:
            raise LoadgenError(f"port {port} cannot be served on: {error}") from error
        ended = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, ended.set)
        address = server.sockets[0].getsockname()
        sys.stdout.write(f"http://127.0.0.1:{address[1]}\n")
        sys.stdout.flush()
        await ended.wait()
        server.close()
        alarm.close()
        if truth is not None:
            await asyncio.to_thread(Path(truth).write_bytes, codec.dumps(stub.truth()))

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(serve())
    return 0
