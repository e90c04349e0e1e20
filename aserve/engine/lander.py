"""One task: awaits the flights in launch order and commits each landing in one synchronous call."""

import asyncio
from collections import deque
from collections.abc import Callable

from aserve.core import events
from aserve.core.ids import StepNumber
from aserve.core.plan import BatchPlan, BatchResult
from aserve.engine.ports import Flight
from aserve.errors import DeviceLost
from aserve.faults import hit


class LostFlight:
    """Stands for a step that never reached the device, so that its failure takes its place in the order of landings."""

    def __init__(self, step: StepNumber, error: Exception) -> None:
        self.step = step
        self._error = error

    async def _outcome(self) -> BatchResult:
        raise self._error

    def __await__(self):  # type: ignore[no-untyped-def]  # the generator of a coroutine has no public type
        return self._outcome().__await__()

    def done(self) -> bool:
        return True


class Lander:
    """commit(event, plan, seconds in flight) applies one landing; it may push further flights."""

    def __init__(
        self,
        commit: Callable[[events.StepLanded | events.StepFailed, BatchPlan, float], None],
        clock: Callable[[], float],
    ) -> None:
        self._commit = commit
        self._clock = clock
        self._flights: deque[tuple[Flight, BatchPlan, float]] = deque()  # bounded by the permits
        self._has_flights = asyncio.Event()

    def __len__(self) -> int:
        return len(self._flights)

    def push(self, flight: Flight, plan: BatchPlan) -> None:
        self._flights.append((flight, plan, self._clock()))
        self._has_flights.set()

    def oldest_age_s(self) -> float:
        """How long the step that lands next has been in flight, 0 if none is."""
        return self._clock() - self._flights[0][2] if self._flights else 0.0

    async def run(self) -> None:
        """Land for ever. Raises DeviceLost, which no later step can survive; any other fault fails its step only."""
        while True:
            await self._has_flights.wait()
            flight, plan, launched_s = self._flights[0]
            event: events.StepLanded | events.StepFailed
            try:
                hit("lander.await")
                event = events.StepLanded(await flight)
            except DeviceLost:
                raise
            except Exception as error:
                event = events.StepFailed(plan.step, f"{type(error).__name__}: {error}")
            self._flights.popleft()
            if not self._flights:
                self._has_flights.clear()
            hit("lander.commit")
            self._commit(event, plan, self._clock() - launched_s)
