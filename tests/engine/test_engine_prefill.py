"""Steps of prompt chunks on a stream of their own: what is out there holds up nobody else."""

import asyncio

import pytest
from engine_builders import end, read, request, running, settle, tokens

from aserve.core.plan import MAIN_STREAM, PREFILL_STREAM, BatchPlan
from aserve.core.request import FinishReason
from aserve.errors import DeviceLost
from aserve.testing import ScriptedRunner


async def turn(times: int = 20) -> None:
    """Let the loop turn a few times."""
    for _ in range(times):
        await asyncio.sleep(0)


def an_hour_for_chunks_of(num_tokens: int) -> ScriptedRunner:
    """A device that lands everything in the loop's next tick but chunks that are so long."""

    def step_time_s(plan: BatchPlan) -> float:
        return 3600.0 if any(len(chunk.tokens) >= num_tokens for chunk in plan.chunks) else 0.0

    return ScriptedRunner(step_time_s=step_time_s)


async def test_a_stream_goes_on_while_a_prompt_is_computed() -> None:
    """Its tokens are launched, landed and delivered to the last, with a step out that takes an hour."""
    runner = an_hour_for_chunks_of(64)
    async with running(runner, prefill="streams", max_num_batched_tokens=64, max_num_seqs=4) as engine:
        short = engine.submit_nowait(request("hello", max_tokens=40))
        await short.next()
        long = engine.submit_nowait(request("p" * 64, max_tokens=1))
        deltas = await read(short)

        assert (end(deltas).finish, end(deltas).num_output) == (FinishReason.LENGTH, 40)
        assert runner.num_inflight == 1
        assert {plan.stream for plan in runner.log} == {MAIN_STREAM, PREFILL_STREAM}
        runner.release()
        assert len(tokens(await read(long))) == 1
        await settle(engine)


async def test_a_device_lost_on_either_stream_ends_the_engine() -> None:
    """Who decodes is told of what happened to a prompt's step."""
    runner = ScriptedRunner()
    async with running(runner, prefill="streams", max_num_batched_tokens=64, max_num_seqs=4) as engine:
        runner.hold()
        short = engine.submit_nowait(request("hello", max_tokens=40))
        await turn()
        runner.release()
        await turn()
        runner.fail_step(4, DeviceLost("gone"))
        engine.submit_nowait(request("p" * 64, max_tokens=1))
        await turn()
        runner.release_step(4)
        deltas = await read(short)

        assert [plan.stream for plan in runner.log] == [PREFILL_STREAM, MAIN_STREAM, MAIN_STREAM, PREFILL_STREAM]
        assert end(deltas).finish == FinishReason.ERROR
        assert not engine.health().alive


@pytest.mark.parametrize("prefill", ["mixed", "split", "streams"])
async def test_a_failed_step_fails_whom_it_lists(prefill: str) -> None:
    """A prompt's step fails, with or without rows beside it; whoever is in no such step is served."""
    runner = ScriptedRunner()
    async with running(runner, prefill=prefill, max_num_batched_tokens=64, max_num_seqs=4) as engine:
        runner.fail_step(1, MemoryError("planted"))
        first = engine.submit_nowait(request("hello"))
        assert end(await read(first)).finish == FinishReason.ERROR
        second = engine.submit_nowait(request("hello"))

        assert end(await read(second)).finish == FinishReason.LENGTH
