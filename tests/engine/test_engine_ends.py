"""Every accepted request ends exactly once, and gives everything back (the ``running`` builder looks)."""

import asyncio
import random
import time

import pytest
from engine_builders import end, read, request, running, settle, text, tokens

from aserve.core.options import SchedulerOptions
from aserve.core.request import FinishReason
from aserve.engine.engine import Engine
from aserve.errors import ContextLengthExceeded, DeviceLost, Draining, EngineDead, InvalidRequest, Overloaded
from aserve.testing import ByteTokenizer, ScriptedRunner


async def turn(times: int = 20) -> None:
    """Let the loop turn a few times."""
    for _ in range(times):
        await asyncio.sleep(0)


@pytest.mark.parametrize("phase", ["waiting", "prefilling", "decoding"])
@pytest.mark.parametrize("how", ["abort", "close"])
async def test_an_aborted_request_is_in_no_later_step(phase: str, how: str) -> None:
    """Whatever it was doing, no plan composed afterwards lists its slot's sequence."""
    runner = ScriptedRunner(max_num_seqs=1 if phase == "waiting" else 4)
    async with running(runner, max_num_batched_tokens=32, policy="overlap") as engine:
        first = engine.submit_nowait(request(max_tokens=40)) if phase == "waiting" else None
        runner.hold()
        stream = engine.submit_nowait(request("p" * (200 if phase == "prefilling" else 5), max_tokens=500))
        await turn()
        if phase == "decoding":
            runner.release(2)
            await turn()
        num_steps = engine.statistics().num_steps
        if how == "abort":
            assert engine.abort(stream.request_id)
        else:
            stream.close()
        await turn()
        runner.resume()
        if first is not None:
            await read(first)
        await settle(engine)

        later = list(runner.log)[num_steps:]
        assert all(len(chunk.tokens) < 32 for plan in later for chunk in plan.chunks)
        if first is None:
            assert later == []
        if how == "abort":
            assert end(await read(stream)).finish == FinishReason.ABORT


async def test_aborting_twice_or_unknown_is_harmless() -> None:
    """Unknown, empty and finished ids are False and change nothing."""
    async with running() as engine:
        stream = engine.submit_nowait(request(request_id="mine"))
        await read(stream)

        assert [engine.abort(name) for name in ("mine", "", "nobody")] == [False, False, False]


async def test_only_its_owner_aborts_a_request() -> None:
    """Another owner's abort finds nothing."""
    async with running() as engine:
        stream = engine.submit_nowait(request(owner="alice", max_tokens=100))

        assert not engine.abort(stream.request_id, owner="bob")
        assert engine.abort(stream.request_id, owner="alice")
        assert end(await read(stream)).finish == FinishReason.ABORT


async def test_closing_a_group_ends_all_its_children() -> None:
    """Four children, gone at once when the reader leaves."""
    async with running() as engine:
        stream = engine.submit_nowait(request(n=4, max_tokens=500))
        await stream.next()
        stream.close()

        assert engine.statistics().num_finished["abort"] == 4


async def test_a_deadline_ends_in_timeout_wherever_the_request_is() -> None:
    """The limit counts while waiting as well as while running."""
    runner = ScriptedRunner(max_num_seqs=1)
    async with running(runner, max_num_batched_tokens=32) as engine:
        runner.hold()
        streams = [engine.submit_nowait(request(deadline_s=0.01, max_tokens=50)) for _ in range(2)]
        deltas = [await read(stream) for stream in streams]
        runner.resume()

    assert [end(each).finish for each in deltas] == [FinishReason.TIMEOUT] * 2


async def test_a_failed_step_fails_its_sequences_only() -> None:
    """Those that it lists end in error with a sentence; one that arrives later is served."""
    runner = ScriptedRunner()
    runner.fail_step(3, MemoryError("out of memory"))
    async with running(runner, policy="sync") as engine:
        streams = [engine.submit_nowait(request(max_tokens=8)) for _ in range(3)]
        failed = [end(await read(stream)) for stream in streams]
        served = end(await read(engine.submit_nowait(request(max_tokens=8))))

    assert [(each.finish, "out of memory" in (each.error or "")) for each in failed] == [(FinishReason.ERROR, True)] * 3
    assert served.finish == FinishReason.LENGTH


async def test_tokens_before_the_failed_step_are_delivered() -> None:
    """An error does not take back what landed before it."""
    runner = ScriptedRunner(b"abcdefgh")
    runner.fail_step(4, ValueError("bad"))
    async with running(runner, policy="overlap") as engine:
        deltas = await read(engine.submit_nowait(request(max_tokens=8)))

    assert (text(deltas), end(deltas).finish) == ("abc", FinishReason.ERROR)


async def test_a_failed_launch_fails_its_sequences_only() -> None:
    """A step that never reached the device takes its place in the order of landings all the same."""
    runner = ScriptedRunner()
    runner.fail_launch(2, RuntimeError("no launch"))
    async with running(runner) as engine:
        failed = end(await read(engine.submit_nowait(request(max_tokens=8))))
        served = end(await read(engine.submit_nowait(request(max_tokens=8))))

    assert (failed.finish, served.finish) == (FinishReason.ERROR, FinishReason.LENGTH)


async def test_an_invalid_row_fails_alone() -> None:
    """One row of NaN ends one sequence; its neighbours go on."""
    runner = ScriptedRunner()
    runner.invalidate(2, 1)
    async with running(runner, policy="sync") as engine:
        streams = [engine.submit_nowait(request(max_tokens=4)) for _ in range(3)]
        reasons = [end(await read(stream)).finish for stream in streams]

    assert reasons == [FinishReason.LENGTH, FinishReason.ERROR, FinishReason.LENGTH]


async def test_a_lost_device_ends_everything_and_refuses_the_rest() -> None:
    """Every open stream ends in error, later submits raise, health says so and wait_dead returns."""
    runner = ScriptedRunner()
    runner.fail_step(2, DeviceLost("the device is gone"))
    async with running(runner) as engine:
        streams = [engine.submit_nowait(request(max_tokens=50)) for _ in range(3)]
        reasons = [end(await read(stream)).finish for stream in streams]
        death = await engine.wait_dead()
        with pytest.raises(EngineDead):
            engine.submit_nowait(request())

        assert reasons == [FinishReason.ERROR] * 3
        assert isinstance(death, DeviceLost)
        assert (engine.health().alive, engine.health().ready) == (False, False)


async def test_a_device_that_hangs_is_lost() -> None:
    """A step overdue for longer than the watchdog's limit ends the engine."""
    runner = ScriptedRunner()
    async with running(runner, watchdog_s=0.02) as engine:
        runner.hold()
        reason = end(await read(engine.submit_nowait(request()))).finish

        assert reason == FinishReason.ERROR
        assert "hangs" in engine.health().reason


async def test_deltas_of_a_lagging_reader_are_joined() -> None:
    """A mailbox of four holds four deltas of any size; joined they are all there."""
    async with running(mailbox_events=4, park_after_s=60.0, stall_timeout_s=60.0) as engine:
        stream = engine.submit_nowait(request(max_tokens=600))
        await settle(engine)
        await turn(50)
        deltas = await read(stream)

    assert len(deltas) == 4
    assert (text(deltas), len(tokens(deltas))) == ("ok " * 200, 600)


async def test_a_stalled_reader_is_aborted_while_the_model_goes_on() -> None:
    """The stall timer runs from the moment the mailbox is full."""
    runner = ScriptedRunner(step_time_s=0.001)
    async with running(runner, mailbox_events=2, park_after_s=0.01, stall_timeout_s=0.02) as engine:
        stream = engine.submit_nowait(request(max_tokens=2000))
        await engine.drain(10.0)  # until it has ended
        deltas = await read(stream)

    assert (end(deltas).finish, end(deltas).error) == (FinishReason.ABORT, "The reader did not keep up.")


async def test_a_stalled_reader_is_parked_and_gets_every_token_once_it_reads() -> None:
    """While its mailbox is full the request owns nothing on the device; reading resumes it where it was."""
    runner = ScriptedRunner(b"abcdefgh", step_time_s=0.0005)
    async with running(runner, mailbox_events=4, park_after_s=0.01, num_blocks=64) as engine:
        stream = engine.submit_nowait(request(max_tokens=300))
        other = engine.submit_nowait(request(max_tokens=200))
        reading = asyncio.create_task(read(other))
        async with asyncio.timeout(5):
            while not engine.statistics().num_parked:  # noqa: ASYNC110  # a state that nobody announces
                await asyncio.sleep(0.001)
        others = await reading
        parked = engine.statistics()
        deltas = await read(stream)

    assert (parked.num_running, parked.num_parked, parked.kv_cache_usage) == (0, 1, 0.0)
    assert (end(others).finish, end(deltas).finish) == (FinishReason.LENGTH, FinishReason.LENGTH)
    assert text(deltas) == ("abcdefgh" * 38)[:300]


async def test_readers_that_never_read_do_not_stop_a_newcomer() -> None:
    """Half as many again as there are slots stall; whoever comes next is served at once."""
    runner = ScriptedRunner(b"ok ", max_num_seqs=4, step_time_s=0.0005)
    async with running(runner, max_num_batched_tokens=64, mailbox_events=2, park_after_s=0.01) as engine:
        stalled = [engine.submit_nowait(request(max_tokens=1500)) for _ in range(6)]
        async with asyncio.timeout(5):
            while engine.statistics().num_parked < 6:  # noqa: ASYNC110  # a state that nobody announces
                await asyncio.sleep(0.001)
        deltas = await read(engine.submit_nowait(request(max_tokens=5)))
        for stream in stalled:
            stream.close()

    assert (text(deltas), end(deltas).finish) == ("ok ok", FinishReason.LENGTH)


async def test_a_reader_that_lags_is_parked_sooner_where_somebody_waits() -> None:
    """After a tenth of the time; alone it keeps its place, and gets every token either way."""
    runner = ScriptedRunner(b"abcdefgh", max_num_seqs=1, step_time_s=0.0005)
    async with running(runner, mailbox_events=4, park_after_s=2.0, stall_timeout_s=60.0) as engine:
        stream = engine.submit_nowait(request(max_tokens=800))
        async with asyncio.timeout(10):
            while not stream.is_lagging:  # noqa: ASYNC110  # a state that nobody announces
                await asyncio.sleep(0.001)
        lags_since_s = time.monotonic()
        num_running = engine.statistics().num_running
        newcomer = await read(engine.submit_nowait(request(max_tokens=5)))
        waited_s = time.monotonic() - lags_since_s
        parked = engine.statistics().num_parked
        deltas = await read(stream)

    assert (num_running, parked) == (1, 1)
    assert waited_s < 1.0
    assert text(newcomer) == "abcde"
    assert text(deltas) == "abcdefgh" * 100


async def test_draining_lets_the_running_finish_and_takes_nothing_new() -> None:
    """The flag stops admission only."""
    async with running() as engine:
        stream = engine.submit_nowait(request(max_tokens=50))
        await stream.next()
        drained = asyncio.create_task(engine.drain(5.0))
        await asyncio.sleep(0)
        with pytest.raises(Draining):
            engine.submit_nowait(request())
        deltas = await read(stream)
        await drained

    assert end(deltas).finish == FinishReason.LENGTH


async def test_a_drain_that_takes_too_long_ends_the_rest_with_a_last_event() -> None:
    """What is left after the limit ends in abort and is told so."""
    runner = ScriptedRunner()
    async with running(runner) as engine:
        runner.hold()
        stream = engine.submit_nowait(request(max_tokens=50))
        await engine.drain(0.01)
        deltas = await read(stream)
        runner.resume()

    assert (end(deltas).finish, end(deltas).error) == (FinishReason.ABORT, "The server is shutting down.")


async def test_a_full_queue_refuses_with_an_honest_delay() -> None:
    """Bounded by requests and by tokens; refused requests hold nothing."""
    runner = ScriptedRunner(max_num_seqs=1)
    async with running(runner, max_num_batched_tokens=32, max_queue_requests=2) as engine:
        runner.hold()
        streams = [engine.submit_nowait(request(max_tokens=4))]
        await turn()
        streams += [engine.submit_nowait(request(max_tokens=4)) for _ in range(2)]
        with pytest.raises(Overloaded) as refused:
            engine.submit_nowait(request(max_tokens=4))
        assert engine.health().ready is False
        runner.resume()
        reasons = [end(await read(stream)).finish for stream in streams]

    assert (refused.value.retry_after_s or 0) >= 1
    assert reasons == [FinishReason.LENGTH] * 3


async def test_waiting_prompt_tokens_are_bounded_too() -> None:
    """A few long prompts fill the queue as well as many short ones."""
    runner = ScriptedRunner(max_num_seqs=1)
    async with running(runner, max_num_batched_tokens=32, max_queue_tokens=150) as engine:
        runner.hold()
        engine.submit_nowait(request(max_tokens=4))
        await turn()
        engine.submit_nowait(request("a" * 100, max_tokens=4))
        with pytest.raises(Overloaded):
            engine.submit_nowait(request("b" * 100, max_tokens=4))
        runner.resume()


async def test_what_can_never_run_is_refused_at_the_door() -> None:
    """Prompt and length beyond the context or the pool, an empty prompt, an id that is open already."""
    async with running(ScriptedRunner(num_blocks=8, max_model_len=2048)) as engine:
        with pytest.raises(ContextLengthExceeded, match="128"):
            engine.submit_nowait(request("p" * 100, max_tokens=29))
        with pytest.raises(InvalidRequest, match="empty"):
            engine.submit_nowait(request(""))
        stream = engine.submit_nowait(request(request_id="twice"))
        with pytest.raises(InvalidRequest, match="open already"):
            engine.submit_nowait(request(request_id="twice"))
        await read(stream)

        assert engine.fit(100, None) == 28
        assert engine.fit(100, None, default=16) == 16


async def test_cancelling_a_reader_loses_no_delta() -> None:
    """A read that is cancelled while it waits leaves everything for the next one."""
    runner = ScriptedRunner(b"abcdefgh")
    async with running(runner) as engine:
        runner.hold()
        stream = engine.submit_nowait(request())
        for _ in range(5):
            reader = asyncio.create_task(stream.next())
            await turn(3)
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
        runner.resume()
        deltas = await read(stream)

    assert text(deltas) == "abcdefgh"


async def test_two_thousand_requests_with_a_fifth_aborted_in_all_phases() -> None:
    """Each ends once, whoever is left alone gets all of its tokens, and at idle everything is back."""
    choose = random.Random(7)
    runner = ScriptedRunner(b"abc", max_num_seqs=32, num_blocks=64, max_model_len=256)
    async with running(
        runner, max_num_batched_tokens=96, policy="eager", max_queue_requests=4000, check_invariants_every=50
    ) as engine:

        async def client(number: int) -> bool:
            wanted = request("p" * choose.randint(1, 120), max_tokens=choose.randint(1, 40), ignore_eos=True)
            for _ in range(choose.randint(0, 400)):
                await asyncio.sleep(0)
            stream = engine.submit_nowait(wanted)
            if choose.random() < 0.2:
                for _ in range(choose.randint(0, 60)):
                    await asyncio.sleep(0)
                stream.close()
                return True
            deltas = await read(stream)
            return len(tokens(deltas)) == wanted.params.max_tokens and end(deltas).finish == FinishReason.LENGTH

        outcomes = await asyncio.gather(*(client(number) for number in range(2000)))

        assert all(outcomes)
        assert engine.statistics().num_preemptions > 0


async def test_a_close_that_is_cancelled_closes_the_device_all_the_same() -> None:
    """Whoever stops waiting for the engine's tasks to end leaves no device open behind him, and no reader waiting."""
    runner = ScriptedRunner()
    options = SchedulerOptions(max_num_seqs=runner.info.max_num_seqs, block_size=runner.info.block_size)
    engine = Engine(runner, ByteTokenizer(), options)
    await engine.start()
    closed: list[bool] = []

    async def note() -> None:
        closed.append(True)

    runner.aclose = note  # type: ignore[method-assign]
    stream = engine.submit_nowait(request(max_tokens=100))
    await asyncio.sleep(0)
    closing = asyncio.create_task(engine.aclose())
    await asyncio.sleep(0)
    closing.cancel()

    with pytest.raises(asyncio.CancelledError):
        await closing
    assert closed == [True]
    assert end(await read(stream)).finish is FinishReason.ABORT


async def test_a_close_whose_deliverer_is_broken_ends_everything_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was queued is lost then, and said to be; readers get their end and the device its close."""
    runner = ScriptedRunner()
    options = SchedulerOptions(max_num_seqs=runner.info.max_num_seqs, block_size=runner.info.block_size)
    engine = Engine(runner, ByteTokenizer(), options)
    await engine.start()
    stream = engine.submit_nowait(request(max_tokens=100))
    await asyncio.sleep(0)
    monkeypatch.setattr(engine._deliverer, "deliver_rest", lambda: 1 / 0)
    await engine.aclose()

    assert end(await read(stream)).finish is FinishReason.ABORT
    assert runner.closed
