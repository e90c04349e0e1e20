"""Named ranges around what happens to a step, for a profiler that shows them (``device/nvtx.py``).

Put around the engine's parts from outside, so that nothing is paid for where they are not wanted.
"""

from collections.abc import Generator
from typing import Any, Protocol

from aserve.core import events
from aserve.core.actions import Action
from aserve.core.ids import StepNumber
from aserve.core.plan import BatchPlan, BatchResult
from aserve.core.scheduler import Scheduler
from aserve.engine.ports import Flight, Runner, RunnerInfo


class Ranges(Protocol):
    """Where ranges go."""

    def push(self, name: str) -> None:
        """Begin a range of this thread; they nest."""
        ...

    def pop(self) -> None:
        """End this thread's innermost range."""
        ...

    def start(self, name: str) -> int:
        """Begin a range that nests in nothing."""
        ...

    def end(self, range_id: int) -> None: ...


class RangedRunner:
    """A ``ports.Runner`` around another: "launch" while it launches, "step" from there to the step's landing.

    Both name what the step holds. A graph replayed inside of "launch" is shown under that name on the GPU.
    """

    def __init__(self, runner: Runner, ranges: Ranges) -> None:
        self._runner = runner
        self._ranges = ranges

    @property
    def info(self) -> RunnerInfo:
        return self._runner.info

    def launch(self, plan: BatchPlan) -> Flight:
        content = _content(plan)
        self._ranges.push(f"launch {content}")
        try:
            flight = self._runner.launch(plan)
        finally:
            self._ranges.pop()
        return _RangedFlight(flight, self._ranges, f"step {content}")

    def go_on(self) -> None:
        self._runner.go_on()

    def statistics(self) -> dict[str, float]:
        return self._runner.statistics()

    async def aclose(self) -> None:
        await self._runner.aclose()


class _RangedFlight:
    """Ends its range with the first await that has an outcome: the lander's."""

    def __init__(self, flight: Flight, ranges: Ranges, name: str) -> None:
        self.step: StepNumber = flight.step
        self._flight = flight
        self._ranges = ranges
        self._range_id: int | None = ranges.start(name)

    def __await__(self) -> Generator[Any, None, BatchResult]:
        try:
            result: BatchResult = yield from self._flight.__await__()
            return result
        finally:
            if self._range_id is not None and self._flight.done():
                self._ranges.end(self._range_id)
                self._range_id = None

    def done(self) -> bool:
        return self._flight.done()


def mark_scheduler(scheduler: Scheduler, ranges: Ranges) -> None:
    """From here on "compose" is a range around each look for a step, and "land" around each landing's commit."""
    handle = scheduler.handle

    def handle_in_range(event: events.Event, now: float) -> list[Action]:
        if isinstance(event, events.LaunchPossible):
            ranges.push("compose")
        elif isinstance(event, events.StepLanded):
            ranges.push(f"land {event.result.step}")
        elif isinstance(event, events.StepFailed):
            ranges.push(f"land {event.step}, failed")
        else:
            return handle(event, now)
        try:
            return handle(event, now)
        finally:
            ranges.pop()

    scheduler.handle = handle_in_range  # type: ignore[method-assign]  # its events are one method, on purpose


def _content(plan: BatchPlan) -> str:
    num_rows = len(plan.rows)
    return f"{plan.step}: decode {num_rows}, prefill {plan.num_tokens - num_rows}"
