"""A profiler sees each step composed, launched, in flight and landed; whoever asks for no ranges pays for none."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from engine_builders import read, request, running

from aserve.engine.ranges import RangedRunner, mark_scheduler
from aserve.errors import DeviceLost
from aserve.testing import ScriptedRunner


@dataclass
class RecordedRanges:
    """What was begun and ended: names, the innermost last; ``log`` in the order of events."""

    log: list[str] = field(default_factory=list)
    stack: list[str] = field(default_factory=list)
    open: dict[int, str] = field(default_factory=dict)

    def push(self, name: str) -> None:
        self.stack.append(name)
        self.log.append(f"({name}")

    def pop(self) -> None:
        self.log.append(f"{self.stack.pop()})")

    def start(self, name: str) -> int:
        self.open[len(self.log)] = name
        self.log.append(f"[{name}")
        return len(self.log) - 1

    def end(self, range_id: int) -> None:
        self.log.append(f"{self.open.pop(range_id)}]")


async def test_a_step_in_ranges() -> None:
    """Composed, launched inside of no other range, in flight until it lands."""
    ranges = RecordedRanges()
    runner = ScriptedRunner()
    async with running(RangedRunner(runner, ranges), policy="sync") as engine:  # type: ignore[arg-type]
        mark_scheduler(engine.scheduler, ranges)
        await read(engine.submit_nowait(request("hello", max_tokens=2)))

    assert [entry for entry in ranges.log if entry not in ("(compose", "compose)")] == [
        "(launch 1: decode 0, prefill 5",
        "launch 1: decode 0, prefill 5)",
        "[step 1: decode 0, prefill 5",
        "step 1: decode 0, prefill 5]",
        "(land 1",
        "land 1)",
        "(launch 2: decode 1, prefill 0",
        "launch 2: decode 1, prefill 0)",
        "[step 2: decode 1, prefill 0",
        "step 2: decode 1, prefill 0]",
        "(land 2",
        "land 2)",
    ]
    assert ranges.log[:2] == ["(compose", "compose)"]


@pytest.mark.parametrize("depth", [1, 4])
async def test_every_range_ends(depth: int) -> None:
    """At any depth, with steps that fail among them."""

    def script(context: Any, index: int) -> int:
        if index == 5:
            raise ValueError("no")
        return 97

    ranges = RecordedRanges()
    async with running(RangedRunner(ScriptedRunner(script), ranges), policy="eager", max_inflight=depth) as engine:  # type: ignore[arg-type]
        mark_scheduler(engine.scheduler, ranges)
        for stream in [engine.submit_nowait(request(max_tokens=num)) for num in (3, 8, 4)]:
            await read(stream)

    assert (ranges.stack, ranges.open) == ([], {})
    assert any(entry.endswith(", failed)") for entry in ranges.log)


async def test_a_launch_that_raises_ends_its_range() -> None:
    """And has no step in flight."""

    class Broken(ScriptedRunner):
        def launch(self, plan: Any) -> Any:
            raise DeviceLost("gone")

    ranges = RecordedRanges()
    async with running(RangedRunner(Broken(), ranges)) as engine:  # type: ignore[arg-type]
        await read(engine.submit_nowait(request()))

    assert (ranges.stack, ranges.open) == ([], {})
    assert ranges.log == ["(launch 1: decode 0, prefill 5", "launch 1: decode 0, prefill 5)"]


async def test_a_ranged_runner_is_the_runner() -> None:
    """Its facts, its figures and its end are those of the one inside."""
    runner = ScriptedRunner()
    ranged = RangedRunner(runner, RecordedRanges())

    assert ranged.info is runner.info
    assert ranged.statistics() == runner.statistics()
    await ranged.aclose()
    assert runner.closed


def test_what_a_launch_left_goes_on_behind_ranges() -> None:
    """Whoever wraps a runner passes that on."""
    went_on = []

    class Runner(ScriptedRunner):
        def go_on(self) -> None:
            went_on.append(1)

    RangedRunner(Runner(), RecordedRanges()).go_on()  # type: ignore[arg-type]

    assert went_on == [1]
