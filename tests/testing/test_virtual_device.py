"""The virtual device: its time line by hand, then under a whole engine."""

import asyncio
from typing import Any

import pytest
from virtual_builders import engine_on, generate, milliseconds, prompt_step, rows_step

from aserve.core.plan import BatchPlan
from aserve.testing import HostCosts, ScriptedRunner, StepCosts, VirtualDevice, idle_share, run_virtual

STEP = StepCosts(fixed_s=0.010)


def device(costs: StepCosts = STEP, host: HostCosts | None = None, **more: Any) -> VirtualDevice:
    return VirtualDevice(costs, host, **{"max_num_seqs": 16, "num_blocks": 512} | more)


def play(runner: VirtualDevice, *plans: BatchPlan) -> list[float]:
    """Launch all plans at once; when each landed, in milliseconds."""

    async def main() -> list[float]:
        flights = [runner.launch(plan) for plan in plans]
        for flight in flights:
            await flight
        return milliseconds(step.landed_s for step in runner.history)

    return run_virtual(main())


# --- the time line


def test_steps_of_a_stream_run_one_after_another() -> None:
    """Launched together, they end a step's time apart."""
    assert play(device(), prompt_step(1), rows_step(2, [1]), rows_step(3, [2])) == [10, 20, 30]


def test_two_streams_share_the_device() -> None:
    """Each runs at the shared rate while both have a step, and alone at full speed afterwards."""
    costs = StepCosts(fixed_s=0.010, prefill_token_s=0.010)
    runner = device(costs, shared_rate=0.75)
    landed = play(runner, prompt_step(1, 1, slot=0), prompt_step(2, 3, slot=1, stream=1))

    # 20 ms of work at 0.75 end at 26.7; 40 - 20 ms are left to the other, alone.
    assert landed == [pytest.approx(26.667), pytest.approx(46.667)]


def test_the_device_goes_on_while_the_loop_is_busy() -> None:
    """Steps end at their own time, however late the loop sees it."""
    runner = device()

    async def main() -> None:
        flights = [runner.launch(prompt_step(1)), runner.launch(rows_step(2, [1]))]
        asyncio.get_running_loop().work(1.0)  # type: ignore[attr-defined]
        for flight in flights:
            await flight

    run_virtual(main())

    assert milliseconds(step.ended_s for step in runner.history) == [10, 20]
    assert milliseconds(step.landed_s for step in runner.history) == [1000, 1000]


def test_a_launch_holds_the_loop() -> None:
    """Host work before a step delays it and everything else; the device waits."""
    runner = device(host=HostCosts(before_s=0.003, before_row_s=0.001, launch_s=0.001))
    landed = play(runner, prompt_step(1), rows_step(2, [1]))

    assert milliseconds(step.launched_s for step in runner.history) == [5, 10]
    assert landed == [15, 25]
    assert idle_share(runner.history) == pytest.approx(5 / 25)


def test_workers_take_what_comes_after_a_step() -> None:
    """With three threads the landing waits for one of two workers, the next step does not."""
    runner = device(host=HostCosts(after_s=0.030, num_threads=3))

    assert play(runner, prompt_step(1), rows_step(2, [1]), rows_step(3, [2])) == [40, 50, 70]


def test_rows_that_the_host_samples_take_its_time() -> None:
    """A step of deferred rows lands when their tokens are drawn; others at once."""
    runner = device(host=HostCosts(sample_row_s=0.004))

    assert play(runner, prompt_step(1), rows_step(2, [1], deferred=True)) == [10, 24]


def test_noise_comes_from_the_seed() -> None:
    """The same seed gives the same times, another seed others."""
    plans = [prompt_step(1), rows_step(2, [1]), rows_step(3, [2])]
    noisy = StepCosts(fixed_s=0.010, noise=0.2)
    first, again, other = (play(device(noisy, seed=seed), *plans) for seed in (1, 1, 2))

    assert first == again != other


def test_tokens_are_the_script_s() -> None:
    """What comes out is what ``ScriptedRunner`` makes of the same plans."""

    async def main(runner: ScriptedRunner) -> list[list[int]]:
        flights = [runner.launch(plan) for plan in (prompt_step(1), rows_step(2, [1]), rows_step(3, [2]))]
        return [(await flight).tokens[:, 0].tolist() for flight in flights]

    assert run_virtual(main(device())) == run_virtual(main(ScriptedRunner(max_num_seqs=16, num_blocks=512)))


# --- gates and faults


def test_a_test_decides_the_order_of_completions() -> None:
    """Held, nothing lands by itself; released, whatever the test says, in its order; resumed, what is overdue."""
    runner = device()

    async def main() -> list[list[int]]:
        runner.hold()
        flights = [runner.launch(plan) for plan in (prompt_step(1), rows_step(2, [1]), rows_step(3, [2]))]
        seen = []

        def done() -> list[int]:
            return [int(flight.step) for flight in flights if flight.done()]

        await asyncio.sleep(0.025)  # two of them are overdue
        seen.append(done())
        runner.release_step(3)
        seen.append(done())
        runner.release()
        seen.append(done())
        runner.resume()
        seen.append(done())
        await asyncio.sleep(1)  # the third one's time comes, and finds it landed
        return seen

    assert run_virtual(main()) == [[], [3], [1, 3], [1, 2, 3]]
    assert runner.num_inflight == 0


def test_a_planted_fault_comes_at_the_step_s_own_time() -> None:
    """The faults of the scripted device work here, too."""
    runner = device()
    runner.fail_step(1, MemoryError("no room"))

    async def main() -> float:
        with pytest.raises(MemoryError):
            await runner.launch(prompt_step(1))
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == pytest.approx(0.010)


async def test_it_needs_a_virtual_loop() -> None:
    """On a loop in real time a launch says what is missing."""
    with pytest.raises(RuntimeError, match="run_virtual"):
        device().launch(prompt_step(1))


# --- under the engine


@pytest.mark.parametrize(
    ("policy", "threads", "g_ms", "expected_ms"),
    [
        ("sync", 1, 467, 5 * (230 + 467)),
        ("overlap", 1, 467, 230 + 5 * 467),
        ("eager", 3, 187, 115 + 5 * 187 + 115),
    ],
)
def test_a_backlog_takes_what_arithmetic_says(policy: str, threads: int, g_ms: float, expected_ms: float) -> None:
    """Five requests of a step each, batches of one: C + G a cycle without overlap, C + nG with."""
    runner = device(StepCosts(fixed_s=g_ms / 1e3), HostCosts(before_s=0.115, after_s=0.115, num_threads=threads))

    async def main() -> float:
        async with engine_on(runner, policy=policy, max_num_batched_tokens=1, max_inflight=8) as engine:
            return max([read_s[0] for read_s in await asyncio.gather(*(generate(engine) for _ in range(5)))])

    assert run_virtual(main()) * 1e3 == pytest.approx(expected_ms)


@pytest.mark.parametrize("policy", ["sync", "overlap", "eager"])
def test_two_runs_with_one_seed_are_one_run(policy: str) -> None:
    """Every time of every step, noise and all."""

    async def main(runner: VirtualDevice) -> list[list[float]]:
        async with engine_on(runner, policy=policy) as engine:
            return await asyncio.gather(*(generate(engine, 1 + n, 20) for n in range(12)))

    costs = StepCosts(fixed_s=0.004, row_s=1e-4, prefill_token_s=1e-4, noise=0.1)
    host = HostCosts(before_s=1e-4, launch_s=2e-4, after_row_s=1e-5)
    runs = [(runner := device(costs, host, seed=7), run_virtual(main(runner))) for _ in range(2)]

    assert runs[0][1] == runs[1][1]
    assert [step.landed_s for step in runs[0][0].history] == [step.landed_s for step in runs[1][0].history]


def test_text_costs_host_time_before_it_is_seen() -> None:
    """Tokens are read after the host's work on them; the next step does not wait for rows that decode."""
    runner = device(host=HostCosts(after_s=0.002))

    async def main() -> list[float]:
        async with engine_on(runner, policy="sync") as engine:
            return await generate(engine, 1, 3)

    # The first token is made into text before the next launch, the others beside the next step.
    assert milliseconds(run_virtual(main())) == [12, 24, 34]
