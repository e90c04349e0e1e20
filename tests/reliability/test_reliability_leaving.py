"""Clients that leave: in every way, in every phase, at every await; and what is served beside and after them.

``whole()`` looks that everything came back; these tests say how each request ended and who was computed.
"""

import asyncio
import contextlib
import random
import socket
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from whole_builders import TEXT, ScriptedRunner, Server, Visitor, Whole, completion, says, turn, whole
from wire_builders import http, until

from aserve.core.request import SamplingParams
from aserve.engine.generation import GenerationRequest

STALL_S = 0.1
TIGHT = {"send_buffer": 4096, "write_buffer_bytes": 1024, "write_stall_s": STALL_S}
"""So little room below the server that a few hundred events fill it."""
X = says("x", then=ord("x"))


def endless(**wanted: Any) -> ScriptedRunner:
    """A device that says x, for 60,000 tokens where it is asked to."""
    return ScriptedRunner(X, max_model_len=60_000, block_size=512, num_blocks=128, **{"max_num_seqs": 8, **wanted})


async def start(stack: Whole, visitor: Visitor, phase: str, *, stream: bool, max_tokens: int = 50_000) -> None:
    """Bring a request into ``phase`` and hold the device there, a step in flight."""
    runner = stack.runner
    if phase == "waiting":
        neighbour = await stack.visit()
        runner.hold()
        neighbour.post(TEXT, completion("neighbour", max_tokens=3))
        await until(lambda: stack.figures.num_running == 1)
    runner.hold()
    num_prompt = 30 if phase == "waiting" else 1500
    body = completion([7] * num_prompt, stream=stream, max_tokens=max_tokens, ignore_eos=True)
    visitor.post(TEXT, body)
    await until(lambda: stack.figures.num_streams == (2 if phase == "waiting" else 1))
    if phase != "waiting":
        await until(lambda: runner.num_inflight)
        runner.release()
        await until(lambda: runner.num_inflight)
    if phase == "decoding":
        while not stack.figures.generation_tokens:
            runner.release()
            await turn(5)
        if stream:
            await visitor.reader.readuntil(b'"text"')


async def leave(visitor: Visitor, how: str) -> None:
    """Leave. Whoever never reads stays until the server cuts it off."""
    match how:
        case "fin":
            visitor.close()
        case "rst":
            visitor.reset()
        case "half":
            visitor.writer.write_eof()
        case "unread":
            visitor.writer.transport.pause_reading()
            await turn(50)
            visitor.close()
        case "never":
            visitor.writer.transport.pause_reading()


@pytest.mark.parametrize("phase", ["waiting", "prefilling", "decoding"])
@pytest.mark.parametrize(
    ("how", "stream"),
    [
        *((how, True) for how in ("fin", "rst", "half", "unread", "never")),
        ("fin", False),
        ("rst", False),
        ("half", False),
    ],
)
async def test_every_way_of_leaving_in_every_phase(how: str, stream: bool, phase: str) -> None:
    """One end, in abort; nothing of it is composed afterwards, and a neighbour and a newcomer get all of theirs."""
    runner = endless(max_num_seqs=1)
    async with whole(runner, max_num_batched_tokens=513, keepalive_comment_s=0.01, **TIGHT) as stack:
        visitor = await stack.visit(receive_buffer=4096)
        await start(stack, visitor, phase, stream=stream)
        await leave(visitor, how)
        if how == "never":
            runner.resume()
            await until(lambda: stack.ends.get("abort"))
            assert stack.connections["write_stalls"] == 1
        else:
            await until(lambda: stack.ends.get("abort"))
            num_steps = stack.figures.num_steps
            runner.resume()
            await until(lambda: stack.engine.scheduler.is_idle)
            later = [plan for plan in runner.log if plan.step > num_steps]
            assert all(7 not in chunk.tokens for plan in later for chunk in plan.chunks)
            assert len(later) <= (4 if phase == "waiting" else 0)  # the neighbour's
        newcomer = await stack.complete("next", max_tokens=3)
        await stack.rest()

        assert newcomer.text == "xxx"
        assert stack.ends == {"abort": 1, "length": 2 if phase == "waiting" else 1}
        assert [line["status"] for line in stack.lines("request.finished")].count(499) == 1


async def test_a_reader_of_a_byte_now_and_then_is_cut_off() -> None:
    """One byte after another frees no room worth the name: the clock of the full buffer runs on."""
    async with whole(endless(), **TIGHT) as stack:
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect((stack.host, stack.port))
            sock.sendall(http("POST", TEXT, completion(stream=True, max_tokens=50_000)))
            sock.setblocking(False)
            while not stack.ends:
                with contextlib.suppress(OSError):  # nothing there yet, or cut off
                    sock.recv(1)
                await asyncio.sleep(0.01)

        assert stack.ends == {"abort": 1}
        assert stack.connections["write_stalls"] == 1


async def test_a_client_that_leaves_while_it_waits_is_never_computed() -> None:
    """Only the one that left is ended: the running one has no gap, and the slot goes to the next that lives."""
    runner = ScriptedRunner(X, max_num_seqs=1)
    async with whole(runner, max_num_batched_tokens=64, max_inflight=1) as stack:
        running, leaving, staying = [await stack.visit() for _ in range(3)]
        runner.hold()
        for visitor, prompt in ((running, "aa"), (leaving, "bb"), (staying, "cc")):
            visitor.post(TEXT, completion(prompt, max_tokens=400, stream=True))
            await until(lambda: stack.figures.num_streams == len(stack.request_ids))
            await turn(30)
        await until(lambda: stack.figures.num_waiting == 2)
        leaving.close()
        await until(lambda: stack.figures.num_waiting == 1)
        runner.resume()
        answers = [await running.answer(), await staying.answer()]

        assert [(answer.text, answer.finish) for answer in answers] == [("x" * 400, "length")] * 2
        prompts = [bytes(chunk.tokens[1:].tolist()) for plan in runner.log for chunk in plan.chunks]
        assert prompts == [b"aa", b"cc"]
        assert stack.ends == {"abort": 1, "length": 2}


async def test_leaving_in_a_prefill_computes_at_most_one_more_chunk() -> None:
    """The next client waits for a chunk and not for the whole prompt of the one that left."""
    runner = ScriptedRunner(X, max_num_seqs=2, max_model_len=4096)
    async with whole(runner, max_num_batched_tokens=64, policy="sync") as stack:
        runner.hold()
        leaving = await stack.visit()
        leaving.post(TEXT, completion([7] * 64 * 30, stream=True))
        for _ in range(3):
            await until(lambda: runner.num_inflight)
            runner.release()
        await until(lambda: runner.num_inflight)
        leaving.close()
        await until(lambda: stack.ends.get("abort"))
        runner.resume()
        answer = await stack.complete("hi", max_tokens=1)

        assert answer.text == "x"
        assert [len(chunk.tokens) for plan in runner.log for chunk in plan.chunks] == [64, 64, 64, 64, 3]


async def test_streams_left_after_three_events_do_not_add_up() -> None:
    """A hundred of them, four at a time; models and a new request answer at once, and every gauge is back at zero."""
    async with whole(ScriptedRunner(X, max_num_seqs=4), max_num_batched_tokens=64) as stack:

        async def client(number: int) -> None:
            visitor = await stack.visit()
            visitor.post(TEXT, completion(stream=True, max_tokens=2000, ignore_eos=True))
            for _ in range(3):
                await visitor.reader.readuntil(b"\n\n")
            visitor.close() if number % 2 else visitor.reset()

        for number in range(0, 100, 4):
            await asyncio.gather(*(client(number + each) for each in range(4)))
            await until(lambda: stack.is_at_rest)
        statuses = [(await stack.get(path)).status for path in ("/v1/models", "/ready")]
        answer = await stack.complete(max_tokens=2)
        page = (await stack.get("/metrics")).body.decode()

        assert (statuses, answer.text, stack.ends["abort"]) == ([200, 200], "xx", 100)
        assert "\naserve_num_requests_running 0.0\n" in page
        assert (stack.figures.num_blocks_free + stack.figures.num_blocks_cached) == stack.figures.num_blocks


async def test_streams_reset_at_random_bytes_are_all_aborts() -> None:
    """Sixty-four streams through a wire that resets a quarter of them somewhere: as many aborts as resets."""
    choose = random.Random(3)
    async with whole(ScriptedRunner(X, step_time_s=0.0005)) as stack:

        async def client(is_reset: bool) -> None:
            visitor = await stack.visit()
            visitor.post(TEXT, completion(stream=True, max_tokens=100, ignore_eos=True))
            if is_reset:
                await visitor.reader.readexactly(choose.randint(1, 4000))
                visitor.reset()
            else:
                assert (await visitor.answer()).text == "x" * 100

        await asyncio.gather(*(client(number % 4 == 0) for number in range(64)))
        await stack.rest()

        assert stack.ends == {"abort": 16, "length": 48}


async def test_a_group_that_loses_its_reader_is_gone_whole() -> None:
    """Four children of one request: four aborts, and no record of any of them."""
    async with whole(ScriptedRunner(X)) as stack:
        visitor = await stack.visit()
        visitor.post(TEXT, completion(n=4, stream=True, max_tokens=500, ignore_eos=True))
        for _ in range(10):
            await visitor.reader.readuntil(b"\n\n")
        visitor.close()
        await until(lambda: stack.is_at_rest)

        assert stack.ends == {"abort": 4}
        assert stack.engine.scheduler.sequences == {}


@pytest.mark.parametrize(("logprobs", "num_deltas"), [(None, 51), (20, 4)])
async def test_the_mailbox_counts_what_logprobs_take_on_the_wire(logprobs: int | None, num_deltas: int) -> None:
    """Tiny text with large logprobs fills it: what a reader has not taken is bounded in bytes, and nothing is lost."""
    params = SamplingParams(temperature=0.0, max_tokens=50, logprobs=logprobs)
    call = GenerationRequest(request_id="mine", prompts=(np.zeros(3, np.int32),), params=params)
    async with whole(ScriptedRunner(X, num_blocks=64), mailbox_bytes=5000) as stack:
        stream = stack.engine.submit_nowait(call)
        await until(lambda: stack.figures.num_finished["length"])
        deltas = stream.next_nowait()

    assert len(deltas) == num_deltas
    assert sum(len(delta.tokens) for delta in deltas) == 50
    assert logprobs is None or sum(len(delta.logprobs or ()) for delta in deltas) == 50


# --- F1: a cancel at every await of the request's way


class CutServer(Server):
    """Cancels the handler of a path at its n-th await, as a disconnect does; 0 only counts them."""

    cut_at = 0
    num_awaits = 0

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path != TEXT:
            return await super()._handle(request)
        return await _Stepped(super()._handle(request), self)


class _Stepped:
    """Awaits a coroutine and counts how often it waits for something."""

    def __init__(self, coroutine: Any, server: CutServer) -> None:
        self._coroutine, self._server = coroutine, server

    def __await__(self) -> Any:
        send, value = self._coroutine.send, None
        while True:
            try:
                waits_for = send(value)
            except StopIteration as end:
                return end.value
            self._server.num_awaits += 1
            if self._server.num_awaits == self._server.cut_at:
                task = asyncio.current_task()
                assert task is not None
                asyncio.get_running_loop().call_soon(task.cancel)
            try:
                value = yield waits_for
                send = self._coroutine.send
            except BaseException as error:
                send, value = self._coroutine.throw, error


@pytest.mark.parametrize("shape", [{}, {"stream": True}, {"stream": True, "n": 2}], ids=str)
@pytest.mark.parametrize("where", ["at once", "worker"])
async def test_a_cancel_at_every_await_leaves_nothing(where: str, shape: dict[str, Any]) -> None:
    """Count the awaits of a request whose body comes in halves, then cancel each; the next request works."""
    body, num_choices = completion("p" * 100, max_tokens=6, **shape), shape.get("n", 1)
    offload = {"offload_bytes": 10} if where == "worker" else {}

    async def once(cut_at: int) -> tuple[int, dict[str, int]]:
        runner = ScriptedRunner(X)
        async with whole(runner, server_type=CutServer, max_num_batched_tokens=272, policy="sync", **offload) as stack:
            server: Any = stack.server
            runner.hold()
            server.cut_at, server.num_awaits = cut_at, 0
            visitor = await stack.visit()
            sent = http("POST", TEXT, body, close=True)
            visitor.writer.write(sent[:-10])
            await until(lambda: server.num_awaits)
            visitor.writer.write(sent[-10:])
            while not visitor.reader.at_eof() and (stack.connections["open"] or not server.num_awaits):
                if runner.num_inflight:
                    runner.release()
                await turn(3)
            num_awaits, server.cut_at = server.num_awaits, 0
            runner.resume()
            assert (await stack.complete(max_tokens=2)).text == "xx"
            await stack.rest()
            return num_awaits, stack.ends

    total, ends = await once(0)
    assert (total >= 2 + (where == "worker"), ends) == (True, {"length": num_choices + 1})
    for cut_at in range(1, total + 1):
        _, ends = await once(cut_at)
        rest = ends["length"] - 1 + ends.get("abort", 0)
        assert rest in (0, num_choices) and ends.keys() <= {"length", "abort"}, f"cancelled at await {cut_at}"
