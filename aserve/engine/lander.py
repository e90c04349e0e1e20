"""One task a stream: awaits its flights in launch order and commits each landing in one synchronous call."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from aserve.core import events
from aserve.core.actions import Launch
from aserve.core.ids import StepNumber
from aserve.core.plan import MAIN_STREAM, BatchPlan, BatchResult
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


@dataclass(slots=True, eq=False)
class Flying:
    """A step on its way. started_s, num_eligible: as in ``ports.StepLanding``, from when it is its stream's oldest."""

    flight: Flight
    launch: Launch
    launched_s: float
    started_s: float | None = None
    num_eligible: int = 0


class _Lane:
    """What is out on one stream."""

    def __init__(self) -> None:
        self.flying: deque[Flying] = deque()  # bounded by the permits
        self.has_flights = asyncio.Event()


class Lander:
    """commit(event, step, landed_s) applies one landing; it may push further flights.

    count_eligible(plan): sequences that could have a place in such a step just now.
    """

    def __init__(
        self,
        commit: Callable[[events.StepLanded | events.StepFailed, Flying, float], None],
        count_eligible: Callable[[BatchPlan], int],
        clock: Callable[[], float],
        *,
        num_streams: int = 1,
    ) -> None:
        self._commit = commit
        self._count_eligible = count_eligible
        self._clock = clock
        self._lanes = [_Lane() for _ in range(num_streams)]

    def __len__(self) -> int:
        return sum(len(lane.flying) for lane in self._lanes)

    def push(self, flight: Flight, launch: Launch, launched_s: float) -> None:
        lane = self._lanes[launch.plan.stream]
        lane.flying.append(Flying(flight, launch, launched_s))
        if len(lane.flying) == 1:  # any other starts at the landing before it
            self._start_oldest(lane, launched_s)
        lane.has_flights.set()

    def lands_rows_next(self) -> bool:
        """Whether a step is out, the oldest of its stream, that holds no chunks."""
        return any(lane.flying and not lane.flying[0].launch.plan.chunks for lane in self._lanes)

    def oldest_age_s(self) -> float:
        """How long the oldest step has been in flight, 0 if none is."""
        oldest_s = [lane.flying[0].launched_s for lane in self._lanes if lane.flying]
        return self._clock() - min(oldest_s) if oldest_s else 0.0

    def _start_oldest(self, lane: _Lane, now: float) -> None:
        if lane.flying and lane.flying[0].started_s is None:
            lane.flying[0].started_s = now
            lane.flying[0].num_eligible = self._count_eligible(lane.flying[0].launch.plan)

    async def run(self, stream: int = MAIN_STREAM) -> None:
        """Land the stream's steps for ever. Raises DeviceLost, which no later step can survive; any other fault fails
        its step only."""
        lane = self._lanes[stream]
        while True:
            await lane.has_flights.wait()
            oldest = lane.flying[0]
            event: events.StepLanded | events.StepFailed
            try:
                hit("lander.await")
                event = events.StepLanded(await oldest.flight)
            except DeviceLost:
                raise
            except Exception as error:
                event = events.StepFailed(oldest.launch.plan.step, f"{type(error).__name__}: {error}")
            landed_s = self._clock()
            lane.flying.popleft()
            if not lane.flying:
                lane.has_flights.clear()
            hit("lander.commit")
            self._commit(event, oldest, landed_s)
            self._start_oldest(lane, landed_s)
