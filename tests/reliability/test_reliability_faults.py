"""Faults under a running server: steps, rows, landings, workers, pools, clocks, collections.

Each says how the requests end that it hits, and that the others, and the next one, are served.
"""

import asyncio
import gc
import random
import threading
import time
from typing import Any

import numpy as np
import pytest
from whole_builders import (
    CHAT,
    TEXT,
    Answer,
    ByteTokenizer,
    MemoryRunner,
    ScriptedRunner,
    Whole,
    chat,
    completion,
    says,
    turn,
    whole,
)
from wire_builders import until

from aserve import faults
from aserve.engine.group import child_seed
from aserve.errors import DeviceLost
from aserve.testing import expected_tokens

X = says("x", then=ord("x"))


def device(**wanted: Any) -> ScriptedRunner:
    return ScriptedRunner(X, **{"num_blocks": 64, "max_num_seqs": 8, **wanted})


async def together(stack: Whole, count: int, **wanted: Any) -> list[asyncio.Task[Answer]]:
    """Requests that are all in the engine before it goes on."""
    before = stack.figures.num_accepted
    tasks = [asyncio.create_task(stack.complete(**wanted)) for _ in range(count)]
    await until(lambda: stack.figures.num_accepted == before + count)
    return tasks


# --- F3: the step


@pytest.mark.parametrize("error", [MemoryError("out of memory"), ValueError("bad"), AssertionError("bug")], ids=repr)
@pytest.mark.parametrize("where", ["launch", "step"])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_failed_step_costs_its_own_batch_only(error: Exception, where: str, stream: bool) -> None:
    """Six in the batch end in an error event or a 500; the two that waited are served, and so is the next one."""
    runner = device(max_num_seqs=6)
    (runner.fail_launch if where == "launch" else runner.fail_step)(4, error)
    async with whole(runner, policy="sync", max_num_batched_tokens=64) as stack:
        runner.hold()
        running = await together(stack, 6, stream=stream, max_tokens=20)
        waiting = await together(stack, 2, stream=stream, max_tokens=3)
        runner.resume()
        failed, served = await asyncio.gather(*running), await asyncio.gather(*waiting)

        if stream:
            assert {answer.finish for answer in failed} == {"generation_failed"}
        else:
            assert {(answer.status, answer.error["code"]) for answer in failed} == {(500, "generation_failed")}
        assert [answer.text for answer in served] == ["xxx"] * 2
        assert stack.ends == {"error": 6, "length": 2}
        assert (await stack.get("/ready")).status == 200


@pytest.mark.parametrize("row", [0, 3, 5])
async def test_an_invalid_row_costs_its_own_request_only(row: int) -> None:
    """NaN, all -inf or an id outside the vocabulary: one error, and the neighbours' texts are untouched."""
    runner = device(max_num_seqs=6)
    runner.invalidate(3, row)
    async with whole(runner, policy="sync", max_num_batched_tokens=64) as stack:
        runner.hold()
        tasks = await together(stack, 6, max_tokens=5)
        runner.resume()
        answers = await asyncio.gather(*tasks)

    assert sorted(answer.status for answer in answers) == [200] * 5 + [500]
    assert {answer.text for answer in answers if answer.status == 200} == {"xxxxx"}


async def test_a_lost_device_tells_everybody() -> None:
    """Running and waiting requests get an error at once, later ones a 503, readiness and health say so."""
    runner = device(max_num_seqs=2)
    runner.fail_step(3, DeviceLost("an illegal memory access"))
    async with whole(runner, policy="sync", max_num_batched_tokens=64) as stack:
        runner.hold()
        tasks = await together(stack, 5, stream=True, max_tokens=20)
        runner.resume()
        answers = await asyncio.gather(*tasks)
        later = await stack.complete()
        probes = [(await stack.get(path)).status for path in ("/health", "/ready")]

        assert sorted(answer.status for answer in answers) == [200, 200, 500, 500, 500]
        assert {answer.finish for answer in answers if answer.status == 200} == {"generation_failed"}
        assert (later.status, later.error["code"], probes) == (503, "engine_dead", [503, 503])


# --- F4: the landing


async def test_a_step_that_never_lands_ends_everything() -> None:
    """The watchdog calls the device lost; nobody waits for ever."""
    runner = device()
    async with whole(runner, watchdog_s=0.05) as stack:
        runner.hold()
        answer = await stack.complete()

        assert (answer.status, (await stack.get("/health")).status) == (500, 503)
        assert "hangs" in stack.engine.health().reason


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
async def test_steps_that_complete_out_of_order_while_an_abort_is_handled(order: tuple[int, ...]) -> None:
    """Three steps list both requests; one leaves; whatever completes first, the other gets its tokens in order."""
    alphabet = ScriptedRunner(says("abcdefghij"), num_blocks=64, max_num_seqs=4)
    async with whole(alphabet, policy="eager", max_inflight=3, max_num_batched_tokens=64) as stack:
        alphabet.hold()
        staying, leaving = await stack.visit(), await stack.visit()
        for visitor in (staying, leaving):
            visitor.post(TEXT, completion(stream=True, max_tokens=10))
        await until(lambda: stack.figures.num_streams == 2 and alphabet.num_inflight)
        alphabet.release()
        await until(lambda: alphabet.num_inflight == 3)
        steps = [flying.flight.step for flying in alphabet._flying]
        leaving.reset()
        alphabet.release_step(steps[order[0]])
        await until(lambda: stack.ends.get("abort"))
        for index in order[1:]:
            alphabet.release_step(steps[index])
            await turn()
        alphabet.resume()

        assert (await staying.answer()).text == "abcdefghij"


async def test_probes_need_no_free_slot() -> None:
    """A long step, every slot taken and somebody waiting: alive and ready all the same, and at once."""
    runner = device(max_num_seqs=1)
    async with whole(runner, max_num_batched_tokens=64) as stack:
        runner.hold()
        tasks = await together(stack, 2)
        await until(lambda: runner.num_inflight)
        probes = [(await stack.get(path)).status for path in ("/health", "/ready", "/v1/models")]
        assert not any(task.done() for task in tasks)
        runner.resume()
        await asyncio.gather(*tasks)

    assert probes == [200] * 3


# --- F5: aborts


async def test_aborts_of_every_kind_of_id() -> None:
    """Unknown, empty and finished ids are 404 or 400, a queued and a running one end, each once."""
    runner = device(max_num_seqs=1)
    async with whole(runner, max_num_batched_tokens=64) as stack:
        await stack.complete()
        runner.hold()
        tasks = await together(stack, 3, max_tokens=50)
        running, queued, staying = stack.request_ids
        statuses = [
            (await stack.ask("DELETE", f"/v1/requests/{name}")).status
            for name in ("", "nobody", "..%2f", running[:-1], queued, queued, running, running)
        ]
        runner.resume()
        answers = await asyncio.gather(*tasks)

        assert statuses == [400, 404, 404, 404, 200, 404, 200, 404]
        assert sorted(answer.status for answer in answers) == [200, 499, 499]
        assert staying and stack.ends == {"length": 2, "abort": 2}


@pytest.mark.parametrize("when", ["tick of the landing", "tick of submission", "after the landing"])
async def test_an_abort_in_the_tick_of_an_end_or_a_start(when: str) -> None:
    """Exactly one end, whichever comes first."""
    runner = device()
    async with whole(runner, policy="sync") as stack:
        runner.hold()
        (task,) = await together(stack, 1, max_tokens=1)
        (ident,) = stack.request_ids
        if when == "tick of submission":
            assert stack.engine.abort(ident)
        else:
            await until(lambda: runner.num_inflight)
            runner.release()
            if when == "after the landing":
                await until(lambda: stack.figures.generation_tokens)
            stack.engine.abort(ident)
        runner.resume()
        await task

        assert sum(stack.ends.values()) == 1


# --- F6: workers


class BadTokenizer(ByteTokenizer):
    """Encodes until it is told what else to do with texts that contain a bang."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.fault: BaseException | None = None

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]:
        if "!" in text:
            if self.fault is not None:
                raise self.fault
            assert self.gate.wait(10)
        return super().encode(text, add_special_tokens=add_special_tokens, parse_special=parse_special)


class Panic(BaseException):
    """What a native library's panic becomes in Python: no Exception."""


@pytest.mark.parametrize("fault", [RuntimeError("no"), MemoryError(), Panic("native code panicked")], ids=repr)
@pytest.mark.parametrize("where", ["on the loop", "in a worker"])
async def test_a_tokenizer_that_fails_costs_its_own_request_only(where: str, fault: BaseException) -> None:
    """A 500 that says nothing of the cause, a log line that does, and the next request is served."""
    tokenizer = BadTokenizer()
    tokenizer.fault = fault
    async with whole(
        device(), tokenizer=tokenizer, may_fail=True, offload_bytes=4096 if "loop" in where else 1
    ) as stack:
        answer = await stack.complete("boom!")
        as_chat = await stack.post(CHAT, chat("boom!"))

        assert (answer.status, answer.error["code"], as_chat.status) == (500, "internal_error", 500)
        assert str(fault) == "" or str(fault) not in answer.body.decode()
        assert len(stack.lines("request.failed")) == 2
        assert (await stack.complete("fine")).status == 200


class BadDecoder:
    """Turns tokens into x until it meets a bang. Holds a bracket until the end, and fails at it then."""

    def __init__(self, fault: BaseException) -> None:
        self._fault = fault
        self._is_holding = False

    def push(self, token: int) -> str:
        if token == ord("!"):
            raise self._fault
        self._is_holding = token == ord("(")
        return "" if self._is_holding else "x"

    def finish(self) -> str:
        if self._is_holding:
            raise self._fault
        return ""


@pytest.mark.parametrize("fault", [RuntimeError("no"), Panic("native code panicked")], ids=repr)
@pytest.mark.parametrize(
    ("token", "at", "text"), [("!", 3, "xxx"), ("(", 8, "xxxxxxxx")], ids=["at once", "at the end"]
)
async def test_a_decoder_that_fails_costs_its_own_request_only(
    fault: BaseException, token: str, at: int, text: str
) -> None:
    """The one whose token has no text ends in error, what it had said is sent, its neighbour goes on."""
    tokenizer = ByteTokenizer()
    tokenizer.decoder = lambda **_: BadDecoder(fault)  # type: ignore[method-assign]
    runner = ScriptedRunner(lambda context, index: ord(token) if context[1] == 1 and index == at else 97, num_blocks=64)
    async with whole(runner, tokenizer=tokenizer) as stack:
        failed, fine = await asyncio.gather(
            stack.complete([1, 1], stream=True, max_tokens=9), stack.complete([1, 2], stream=True, max_tokens=9)
        )

        assert (failed.text, failed.finish) == (text, "generation_failed")
        assert (fine.text, fine.finish) == ("x" * 9, "length")
        assert stack.ends == {"error": 1, "length": 1}


async def test_a_panic_in_the_engine_s_own_tasks_is_its_death() -> None:
    """Even what is no Exception: open streams are told, later requests refused, health says no."""
    async with whole(device()) as stack:
        with faults.armed("deliver.push", error=Panic("native code panicked")):
            failed = await stack.complete(max_tokens=50)
        later = await stack.complete()

        assert (failed.status, later.status, later.error["code"]) == (500, 503, "engine_dead")
        assert (await stack.get("/health")).status == 503


async def test_a_tokenizer_that_hangs_holds_up_only_what_needs_a_worker() -> None:
    """Small requests go on, the line before the workers is bounded, and who leaves the line leaves nothing."""
    tokenizer = BadTokenizer()
    options = {"num_workers": 1, "max_pending_work": 2, "offload_bytes": 1000}
    async with whole(device(num_blocks=512), tokenizer=tokenizer, **options) as stack:
        try:
            hanging, behind = await stack.visit(), await stack.visit()
            hanging.post(TEXT, completion("!" * 1000, max_tokens=2))
            await until(lambda: stack.server._workers._num_pending == 1)
            behind.post(TEXT, completion("!" * 1000, max_tokens=2))
            await until(lambda: stack.server._workers._num_pending == 2)
            refused = await stack.complete("!" * 1000, max_tokens=2)
            small = await stack.complete("small", max_tokens=2)
            behind.close()
            await until(lambda: stack.server._workers._num_pending == 1)
        finally:
            tokenizer.gate.set()
        answer = await hanging.answer()
        await stack.rest()

        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        assert (small.text, answer.text) == ("xx", "xx")
        assert stack.ends == {"length": 2}


async def test_places_are_given_back_on_every_way_out() -> None:
    """A key with two places fails its submit three times and more; its next request has a place all the same."""
    auth = {"headers": "Authorization: Bearer k\r\n"}
    async with whole(device(), api_keys=("k",), max_requests_per_key=2, may_fail=True) as stack:
        with faults.armed("engine.submit", times=None):
            failed = [(await stack.post(TEXT, completion(), **auth)).status for _ in range(5)]
        refused = [(await stack.post(TEXT, completion(max_tokens=10**6), **auth)).status for _ in range(5)]
        answer = await stack.post(TEXT, completion(), **auth)

    assert (failed, refused, answer.status) == ([500] * 5, [400] * 5, 200)


# --- F7, F8: pressure, through everything, on the device on which every stale read shows


PRESSURES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sync": ({}, {"policy": "sync"}),
    "deep": ({}, {"policy": "eager", "max_inflight": 8}),
    "the host samples": ({}, {"policy": "eager", "sampler": "host"}),
    "hashes of one bit": ({}, {"policy": "eager", "hash_bits": 1}),
    "preempted at every third step": ({}, {"policy": "eager", "force_preempt_every": 3}),
    "eight blocks": ({"num_blocks": 8}, {"policy": "eager"}),
    "chunks of a block": ({}, {"policy": "overlap", "max_num_batched_tokens": 24}),
    "rows and chunks in turn": ({}, {"prefill": "split", "max_num_batched_tokens": 24}),
    "rows and chunks in two streams": ({}, {"prefill": "streams", "max_num_batched_tokens": 24}),
}


@pytest.mark.parametrize("name", PRESSURES)
@pytest.mark.asyncio(loop_factories=["uvloop"])
async def test_every_answer_is_the_one_it_would_be_alone(name: str) -> None:
    """I6, I7: sixty requests with common prefixes, seeds and penalties, some of which leave; not one token differs."""
    of_device, of_scheduler = PRESSURES[name]
    choose = random.Random(5)
    runner = MemoryRunner(
        **{"num_blocks": 48, "block_size": 16, "max_num_seqs": 8, "max_model_len": 128, "vocab_size": 256, **of_device}
    )
    documents = [[choose.randrange(256) for _ in range(64)] for _ in range(3)]
    async with whole(
        runner, **{"max_num_batched_tokens": 64, "watermark": 0.0, "max_queue_tokens": 10_000, **of_scheduler}
    ) as stack:

        async def client(number: int) -> bool:
            prompt = documents[number % 3][: choose.choice([15, 16, 17, 31, 32, 33, 48, 64])]
            prompt = prompt + [number % 256] * choose.randint(0, 3)
            wanted = {"max_tokens": choose.randint(1, 40), "seed": number, "return_token_ids": True}
            penalty = {"presence_penalty": 0.5} if number % 5 == 0 else {}
            if number % 6 == 0:
                visitor = await stack.visit()
                visitor.post(TEXT, completion(prompt, stream=True, **wanted))
                await turn(choose.randint(0, 100))
                visitor.reset()
                return True
            answer = await stack.complete(prompt, **wanted, **penalty)
            return answer.choices[0]["token_ids"] == expected_tokens(
                np.array(prompt),
                wanted["max_tokens"],
                vocab_size=256,
                seed=child_seed(number, 0),
                needs_history=bool(penalty),
            )

        assert all(await asyncio.gather(*(client(number) for number in range(60))))
        if "preempted" in name or "eight" in name:
            assert stack.figures.num_preemptions > 0


async def test_a_flush_under_a_shared_prefix_changes_nothing() -> None:
    """Four streams on the same blocks while the cache is flushed: what they read stays, and their texts are right."""
    runner = MemoryRunner(vocab_size=256, max_num_seqs=4, max_model_len=256)
    prompt = list(range(80))
    async with whole(runner, max_num_batched_tokens=64) as stack:
        await stack.complete(prompt, max_tokens=1)
        tasks = await together(stack, 4, prompt=prompt, max_tokens=40, seed=1, return_token_ids=True)
        flushed = await stack.ask("POST", "/reset_prefix_cache")
        answers = await asyncio.gather(*tasks)

    expected = expected_tokens(np.array(prompt), 40, vocab_size=256, seed=child_seed(1, 0))
    assert flushed.status == 200
    assert [answer.choices[0]["token_ids"] for answer in answers] == [expected] * 4


async def test_what_can_never_fit_is_refused_and_what_is_behind_it_served() -> None:
    """Larger than the pool, longer than the context: 400 at once, with both numbers, never at the head of the queue."""
    async with whole(device(num_blocks=50, max_model_len=2048)) as stack:
        too_large = await stack.complete([1] * 57 * 16, max_tokens=1)
        too_long = await stack.complete([1] * 792, max_tokens=9)
        exact = await stack.complete([1] * 792, max_tokens=8)
        answer = await stack.complete()

    assert (too_large.status, too_large.error["code"]) == (400, "context_length_exceeded")
    assert "912" in too_large.error["message"] and "800" in too_large.error["message"]
    assert (too_long.status, exact.text, answer.status) == (400, "x" * 8, 200)


# --- F10: clocks (descriptors: test_reliability_process.py)


async def test_a_wall_clock_that_jumps_changes_no_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time limits run on the monotonic clock."""
    now = time.time
    async with whole(device(step_time_s=0.001)) as stack:
        tasks = await together(stack, 2, max_tokens=30, timeout=20)
        monkeypatch.setattr(time, "time", lambda: now() + 86_400)
        await stack.complete(max_tokens=2)
        monkeypatch.setattr(time, "time", lambda: now() - 86_400)
        answers = await asyncio.gather(*tasks)

    assert [answer.finish for answer in answers] == ["length"] * 2


# --- F12: collections


async def test_collections_at_every_turn_lose_no_task() -> None:
    """Every task and timer is held by somebody."""
    gc.freeze()  # what other tests have loaded holds none of them, and would make each collection a thousandfold longer
    try:
        async with whole(device(step_time_s=0.001)) as stack:
            tasks = await together(stack, 6, stream=True, max_tokens=10)
            while not all(task.done() for task in tasks):
                gc.collect()
                await asyncio.sleep(0)
    finally:
        gc.unfreeze()

    assert [task.result().text for task in tasks] == ["x" * 10] * 6
