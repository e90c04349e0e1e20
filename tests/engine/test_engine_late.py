"""The engine under the policy ``late``, on a virtual clock: what is launched when, and that no wake-up is ever lost.

A program that waits for a launch that never comes raises ``NothingWillHappen`` on the virtual loop.
"""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from engine_builders import end, read, request, text, tokens
from hypothesis import given, settings
from hypothesis import strategies as st

from aserve.core.invariants import check
from aserve.core.options import SchedulerOptions
from aserve.core.request import FinishReason
from aserve.engine.engine import Engine
from aserve.engine.loop import LoopAlarm
from aserve.engine.ports import NullObserver, StepLanding, StepLaunch
from aserve.errors import ConfigError
from aserve.testing import (
    ByteTokenizer,
    HostCosts,
    ScriptedRunner,
    StepCosts,
    VirtualAlarm,
    VirtualDevice,
    run_virtual,
)

STEP_S = 0.010
LAUNCH_S = 0.0003
POLICIES = ["sync", "overlap", "eager", "late"]
LATE = 1.001e-3
"""More than any lead here: what a launch costs, and the margin."""


class Recorder(NullObserver):
    def __init__(self) -> None:
        self.launches: list[StepLaunch] = []
        self.landings: list[StepLanding] = []

    def step_launched(self, launch: StepLaunch) -> None:
        self.launches.append(launch)

    def step_landed(self, landing: StepLanding) -> None:
        self.landings.append(landing)


class CountedAlarm(VirtualAlarm):
    """Counts what is asked of all alarms."""

    num_made = 0
    num_set = 0

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        CountedAlarm.num_made += 1

    def set(self, delay_s: float) -> None:
        CountedAlarm.num_set += 1
        super().set(delay_s)


class World:
    """An engine over a virtual device, and what was seen of it."""

    def __init__(self, device: VirtualDevice, engine: Engine, seen: Recorder) -> None:
        self.device, self.engine, self.seen = device, engine, seen
        self.loop = asyncio.get_running_loop()

    async def warm_up(self) -> None:
        """Show the policy some steps of one row, and of a chunk."""
        for _ in range(3):
            await read(self.engine.submit_nowait(request("hello", max_tokens=30)))
        self.seen.launches.clear()
        self.seen.landings.clear()

    async def until(self, moment_s: float) -> None:
        await asyncio.sleep(moment_s - self.loop.time())


@asynccontextmanager
async def virtual(
    policy: str = "late",
    *,
    costs: StepCosts | None = None,
    host: HostCosts | None = None,
    make_alarm: Any = VirtualAlarm,
    **options: Any,
) -> AsyncIterator[World]:
    """Steps of 10 ms and launches of 0.3 ms, unless said otherwise; afterwards everything is given back."""
    loop = asyncio.get_running_loop()
    device = VirtualDevice(costs or StepCosts(fixed_s=STEP_S), host or HostCosts(launch_s=LAUNCH_S), max_num_seqs=16)
    seen = Recorder()
    engine = Engine(
        device,
        device.tokenizer(),
        SchedulerOptions(
            **{"max_num_seqs": 16, "block_size": 16, "policy": policy, "check_invariants_every": 1} | options
        ),
        observer=seen,
        clock=loop.time,
        make_alarm=make_alarm,
    )
    await engine.start()
    try:
        yield World(device, engine, seen)
    finally:
        await engine.aclose()
    check(engine.scheduler)
    assert engine.scheduler.is_idle


def test_the_next_step_is_launched_just_before_the_end() -> None:
    """One step is out for most of the time; its successor is composed within a lead of its end, and never idle time."""

    async def main() -> None:
        async with virtual() as world:
            await world.warm_up()
            await read(world.engine.submit_nowait(request(max_tokens=40)))
            ends_s = {landing.step: landing.landed_s for landing in world.seen.landings}
            late = [launch for launch in world.seen.launches if launch.reason == "lead"]

            assert len(late) >= 38
            assert all(0.0 < ends_s[launch.step - 1] - launch.composed_s < LATE for launch in late)
            assert all(launch.num_inflight == 2 and launch.bubble_s == 0.0 for launch in late)
            leads_s = [ends_s[launch.step - 1] - launch.composed_s for launch in late]
            assert [launch.lead_s for launch in late] == pytest.approx(leads_s, abs=1e-5)
            predicted_ends_s = [launch.predicted_end_s for launch in late]
            assert predicted_ends_s == pytest.approx([ends_s[launch.step] for launch in late], abs=1e-5)

    run_virtual(main())


def test_a_newcomer_is_in_the_step_that_follows_the_running_one() -> None:
    """It wakes the loop and is launched no sooner for it; all who come during a step share the next one."""

    async def main() -> None:
        async with virtual() as world:
            await world.warm_up()
            running = asyncio.ensure_future(read(world.engine.submit_nowait(request(max_tokens=40))))
            await asyncio.sleep(0.095)
            start_s = world.seen.landings[-1].landed_s
            newcomers = []
            for fraction in (0.2, 0.4, 0.6):
                await world.until(start_s + fraction * STEP_S)
                num_launches = len(world.seen.launches)
                newcomers.append(world.engine.submit_nowait(request(max_tokens=2)))
                await asyncio.sleep(0)
                assert len(world.seen.launches) == num_launches
            firsts = [await stream.next() for stream in newcomers]
            first_s = world.loop.time()
            await asyncio.gather(running, *map(read, newcomers))

            assert all(firsts)
            assert first_s == pytest.approx(start_s + 2 * STEP_S, abs=1e-3)
            assert [launch.num_chunks for launch in world.seen.launches if launch.num_chunks] == [1, 3]

    run_virtual(main())


def test_an_idle_device_is_given_work_at_once() -> None:
    """In the tick of the submit, without an alarm."""

    async def main() -> None:
        async with virtual() as world:
            await world.warm_up()
            await world.until(5.0)
            stream = world.engine.submit_nowait(request(max_tokens=1))
            await stream.next()

            (launch,) = world.seen.launches
            assert (launch.composed_s, launch.reason) == (5.0, "idle")
            assert world.loop.time() == pytest.approx(5.0 + LAUNCH_S + STEP_S)

    run_virtual(main())


def test_an_abort_during_the_wait_is_never_launched() -> None:
    """Its alarm rings for nobody; the one that still runs is not disturbed."""

    async def main() -> None:
        async with virtual() as world:
            await world.warm_up()
            running = asyncio.ensure_future(read(world.engine.submit_nowait(request(max_tokens=20))))
            await asyncio.sleep(0.051)
            gone = world.engine.submit_nowait(request(max_tokens=20))
            await asyncio.sleep(0.002)
            world.engine.abort(gone.request_id)
            deltas = await running

            assert end(await read(gone)).finish == FinishReason.ABORT
            assert len(tokens(deltas)) == 20
            assert [launch.num_chunks for launch in world.seen.launches if launch.num_chunks] == [1]

    run_virtual(main())


def test_the_last_abort_leaves_an_alarm_that_harms_nobody() -> None:
    """Nothing is open when it rings, and the engine is closed before another would."""

    async def main() -> None:
        async with virtual() as world:
            await world.warm_up()
            stream = world.engine.submit_nowait(request(max_tokens=50))
            await asyncio.sleep(0.055)
            stream.close()
            num_launches = len(world.seen.launches)
            await asyncio.sleep(0.1)

            assert len(world.seen.launches) == num_launches

    run_virtual(main())


def test_one_permit_is_sync() -> None:
    """With max_inflight = 1 a step is launched when the one before has landed."""

    async def main() -> None:
        async with virtual(max_inflight=1) as world:
            await read(world.engine.submit_nowait(request(max_tokens=60)))

            assert {launch.num_inflight for launch in world.seen.launches} == {1}
            assert world.engine.statistics().bubble_s == pytest.approx(59 * LAUNCH_S)

    run_virtual(main())


@pytest.mark.parametrize("policy", ["sync", "overlap", "eager"])
def test_other_policies_make_no_alarm(policy: str) -> None:
    """Nor do they predict anything."""

    async def main() -> None:
        CountedAlarm.num_made = 0
        async with virtual(policy, make_alarm=CountedAlarm) as world:
            await read(world.engine.submit_nowait(request(max_tokens=30)))

            assert CountedAlarm.num_made == 0
            assert {launch.predicted_end_s for launch in world.seen.launches} == {None}
            assert {landing.predicted_s for landing in world.seen.landings} == {None}

    run_virtual(main())


def test_a_long_step_is_waited_for_by_one_alarm() -> None:
    """Whoever arrives meanwhile: the alarm stays as it is set."""

    async def main() -> None:
        CountedAlarm.num_set = 0
        async with virtual(costs=StepCosts(fixed_s=1.0), make_alarm=CountedAlarm) as world:
            streams = [world.engine.submit_nowait(request(max_tokens=100))]
            for _ in range(300):
                await asyncio.sleep(0.33)
                streams.append(world.engine.submit_nowait(request(max_tokens=1)))
            await asyncio.gather(*map(read, streams))

            assert CountedAlarm.num_set <= len(world.seen.launches)

    run_virtual(main())


def test_a_short_step_has_the_next_behind_it_at_once() -> None:
    """Steps of 0.4 ms under alarms that come 1 ms late: two are out, as with overlap, and the device never waits."""

    async def main() -> None:
        async with virtual(
            costs=StepCosts(fixed_s=0.0004),
            host=HostCosts(launch_s=0.0001),
            make_alarm=partial(VirtualAlarm, late_s=0.001),
        ) as world:
            await read(world.engine.submit_nowait(request(max_tokens=300)))

            depths = [launch.num_inflight for launch in world.seen.launches[200:-10]]
            assert set(depths) == {2}
            assert sum(launch.bubble_s for launch in world.seen.launches[200:]) == 0.0

    run_virtual(main())


async def _outputs(policy: str, seed: int, num: int, **options: Any) -> list[tuple[str, FinishReason | None]]:
    """What Poisson arrivals of all lengths get, some of which leave early."""
    chance = random.Random(seed)
    costs = StepCosts(fixed_s=chance.choice((0.0005, 0.004, 0.05)), prefill_token_s=2e-5, noise=0.05)
    host = HostCosts(launch_s=0.0003, after_s=0.0002, after_row_s=2e-5)
    late = partial(VirtualAlarm, late_s=chance.choice((0.0, 0.0002, 0.003)))
    rate = chance.choice((10.0, 100.0, 1000.0))
    async with virtual(policy, costs=costs, host=host, make_alarm=late, **options) as world:
        streams = []
        for index in range(num):
            await asyncio.sleep(chance.expovariate(rate))
            prompt = "x" * chance.randrange(1, 60)
            streams.append(world.engine.submit_nowait(request(prompt, max_tokens=chance.randrange(1, 20), seed=index)))
        deltas = await asyncio.gather(*map(read, streams))
        return [(text(each), end(each).finish) for each in deltas]


@settings(max_examples=6, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1000), max_inflight=st.integers(1, 4))
def test_outputs_are_the_same_under_every_policy(seed: int, max_inflight: int) -> None:
    """Whatever the device, the loop and the load: only the times differ. And every request ends: no wake-up is lost."""
    options = {"max_inflight": max_inflight, "max_num_batched_tokens": 48, "check_invariants_every": 0}
    outputs = [run_virtual(_outputs(policy, seed, 30, **options)) for policy in POLICIES]

    assert outputs[1:] == outputs[:1] * 3


def test_a_step_that_fails_during_the_wait() -> None:
    """The engine goes on, and the next request is served."""

    async def main() -> None:
        async with virtual() as world:
            await world.warm_up()
            newest = world.seen.launches or world.device.history
            world.device.fail_step(newest[-1].step + 5, MemoryError("out of memory"))
            world.device.fail_launch(newest[-1].step + 12, MemoryError("no launch"))
            streams = [world.engine.submit_nowait(request(max_tokens=30)) for _ in range(2)]
            failed = [end(await read(stream)).finish for stream in streams]
            ends = [end(await read(world.engine.submit_nowait(request(max_tokens=30)))).finish for _ in range(2)]

            assert failed == [FinishReason.ERROR] * 2
            assert ends == [FinishReason.ERROR, FinishReason.LENGTH]
            assert [landing.failed for landing in world.seen.landings].count(True) == 2

    run_virtual(main())


def test_figures_of_the_policy() -> None:
    """Rows left out, bubbles and what the policy has learnt are in the statistics."""

    async def main() -> None:
        figures = {}
        for policy in ("sync", "overlap", "late"):
            async with virtual(policy) as world:
                chance = random.Random(1)
                streams = []
                for _ in range(50):
                    await asyncio.sleep(chance.expovariate(50.0))
                    streams.append(world.engine.submit_nowait(request(max_tokens=10)))
                await asyncio.gather(*map(read, streams))
                figures[policy] = world.engine.statistics()

        share = {name: each.num_left_out_rows / each.num_eligible_rows for name, each in figures.items()}
        assert share["sync"] == 0.0
        assert share["late"] < 0.25 * share["overlap"]
        assert figures["sync"].bubble_s > 0.02
        assert figures["late"].bubble_s < 0.1 * figures["sync"].bubble_s
        assert figures["late"].policy["prediction_error_p50"] < 0.01
        assert figures["late"].policy["launch_cost_ms_p90"] == pytest.approx(0.3)
        assert figures["overlap"].policy == {}

    run_virtual(main())


# --- the loop's own alarm


def test_the_loops_own_alarm_is_never_early_and_rings_once() -> None:
    """In whole milliseconds, rounded up; set anew it forgets what it was set to; closed it is silent."""

    async def main() -> None:
        loop, rings = asyncio.get_running_loop(), []
        alarm = LoopAlarm(loop, lambda: rings.append(loop.time()))
        alarm.set(0.0004)
        await asyncio.sleep(0.01)
        alarm.set(0.5)
        alarm.set(0.0021)
        await asyncio.sleep(1.0)
        alarm.set(0.1)
        alarm.close()
        alarm.close()
        await asyncio.sleep(1.0)

        assert rings == pytest.approx([0.001, 0.013])

    run_virtual(main())


async def test_late_in_real_time() -> None:
    """Over the loop's own timers, which are a millisecond coarse: the outputs are right."""
    options = SchedulerOptions(max_num_seqs=16, block_size=16, policy="late")
    engine = Engine(ScriptedRunner(b"abcdefgh", step_time_s=0.002), ByteTokenizer(), options)
    await engine.start()
    try:
        streams = [engine.submit_nowait(request(max_tokens=8 * (index + 1))) for index in range(4)]
        outputs = [text(await read(stream)) for stream in streams]
    finally:
        await engine.aclose()

    assert outputs == ["abcdefgh" * (index + 1) for index in range(4)]


@pytest.mark.parametrize("prefill", ["mixed", "split", "streams"])
def test_nobody_is_left_out_of_a_step_that_could_not_hold_them(prefill: str) -> None:
    """Running rows are not missed in a step of chunks, nor prompts in one of rows."""

    async def main() -> None:
        async with virtual("sync", prefill=prefill, max_inflight=2) as world:
            reading = [asyncio.create_task(read(world.engine.submit_nowait(request(max_tokens=20))))]
            await asyncio.sleep(5.5 * STEP_S)
            reading.append(asyncio.create_task(read(world.engine.submit_nowait(request(max_tokens=20)))))
            await asyncio.gather(*reading)

            figures = world.engine.statistics()
            assert (figures.num_left_out_rows, figures.num_eligible_rows) == (0, 40)

    run_virtual(main())


def test_with_one_step_in_flight_no_alarm_is_set() -> None:
    """There is nothing that it could launch."""

    async def main() -> None:
        CountedAlarm.num_set = 0
        async with virtual(max_inflight=1, make_alarm=CountedAlarm) as world:
            await read(world.engine.submit_nowait(request(max_tokens=60)))

        assert CountedAlarm.num_set == 0

    run_virtual(main())


def test_options_that_are_left_open_are_the_devices() -> None:
    """As many sequences and tokens as the runner was made for."""
    runner = ScriptedRunner(max_num_seqs=16)
    runner._info = replace(runner.info, max_num_batched_tokens=300)
    options = Engine(runner, ByteTokenizer(), SchedulerOptions(block_size=16)).scheduler.options

    assert (options.max_num_seqs, options.max_num_batched_tokens) == (16, 300)


@pytest.mark.parametrize("option", ["max_num_seqs", "max_num_batched_tokens"])
def test_options_beyond_the_device_are_refused(option: str) -> None:
    """At the start, in a sentence, and not at the first step that has so many."""
    runner = ScriptedRunner(max_num_seqs=16)
    runner._info = replace(runner.info, max_num_batched_tokens=64)
    with pytest.raises(ConfigError, match=f"scheduler.{option} is 128, the runner was made for"):
        Engine(runner, ByteTokenizer(), SchedulerOptions(block_size=16, **{"max_num_seqs": 16} | {option: 128}))
