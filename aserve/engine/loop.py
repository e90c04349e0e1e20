"""The one place where steps are launched, and the coroutine that is woken when there may be something to launch."""

import asyncio
from collections.abc import Callable

from aserve.core import events
from aserve.core.actions import Action, Launch
from aserve.core.scheduler import Scheduler
from aserve.engine.lander import Lander, LostFlight
from aserve.engine.permits import Permits
from aserve.engine.ports import Runner
from aserve.errors import DeviceLost
from aserve.faults import hit


class LaunchLoop:
    """Composes through the scheduler and launches through the runner, while there are permits and the policy says so.

    carry_out(actions): the engine's, for everything but Launch.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        permits: Permits,
        lander: Lander,
        *,
        carry_out: Callable[[list[Action]], None],
        clock: Callable[[], float],
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._permits = permits
        self._lander = lander
        self._carry_out = carry_out
        self._clock = clock
        self._wake = asyncio.Event()

    def wake(self) -> None:
        """Something arrived. What else arrives in this tick of the loop is composed into the same step."""
        self._wake.set()

    async def run(self) -> None:
        """Launch whenever woken, for ever. Landings launch by themselves, without the detour over this coroutine."""
        while True:
            await self._wake.wait()
            await self._permits.wait()
            self._wake.clear()
            self.launch_due()

    def launch_due(self) -> None:
        """Launch as many steps as are due now. Synchronous; raises DeviceLost only."""
        while self._permits.acquire_nowait():
            actions = self._scheduler.handle(events.LaunchPossible(), self._clock())
            plan = actions[-1].plan if actions and isinstance(actions[-1], Launch) else None
            self._carry_out(actions if plan is None else actions[:-1])
            if plan is None:
                self._permits.release()
                return
            try:
                hit("loop.launch")
                self._lander.push(self._runner.launch(plan), plan)
            except DeviceLost:
                raise
            except Exception as error:
                sentence = f"{type(error).__name__}: {error}"
                self._carry_out(self._scheduler.handle(events.LaunchFailed(plan.step, sentence), self._clock()))
                self._lander.push(LostFlight(plan.step, error), plan)
