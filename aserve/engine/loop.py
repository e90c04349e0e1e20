"""The one place where steps are launched, and the coroutine that is woken when there may be something to launch."""

import asyncio
import math
from collections.abc import Callable
from typing import Final

from aserve.core import events
from aserve.core.actions import Action, Launch, WakeAt
from aserve.core.scheduler import Scheduler
from aserve.engine.lander import Lander, LostFlight
from aserve.engine.permits import Permits
from aserve.engine.ports import AlarmClock, Observer, Runner, StepLaunch
from aserve.errors import DeviceLost
from aserve.faults import hit
from aserve.garbage import NoCollection

MakeAlarm = Callable[[asyncio.AbstractEventLoop, Callable[[], None]], AlarmClock]
"""(the loop, what to call when it rings) -> an alarm; made at the first wait, which most policies never ask for."""

ALARM_GRAIN_S: Final = 20e-6
"""An alarm stays as it is set where the new time differs by less: that is what alarms are late by."""


class LoopAlarm:
    """``AlarmClock`` by the loop's own timers, in whole milliseconds as uvloop has them, rounded up: it never rings
    early, which would have it set again and again for what is left of the millisecond."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_ring: Callable[[], None]) -> None:
        self._loop = loop
        self._on_ring = on_ring
        self._handle: asyncio.TimerHandle | None = None

    def set(self, delay_s: float) -> None:
        self.close()
        self._handle = self._loop.call_later(math.ceil(delay_s * 1000) / 1000, self._on_ring)

    def close(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None


class LaunchLoop:
    """Composes through the scheduler and launches through the runner, while there are permits and the policy says so.

    carry_out(actions): the engine's, for everything but Launch and WakeAt.
    bubble_s: how long in all the device has stood idle beside work.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        permits: Permits,
        lander: Lander,
        observer: Observer,
        *,
        carry_out: Callable[[list[Action]], None],
        clock: Callable[[], float],
        make_alarm: MakeAlarm = LoopAlarm,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._permits = permits
        self._lander = lander
        self._observer = observer
        self._carry_out = carry_out
        self._clock = clock
        self._make_alarm = make_alarm
        self._wake = asyncio.Event()
        self._alarm: AlarmClock | None = None
        self._alarm_s = -math.inf  # when it rings; in the past where it has rung or was never set
        self._idle_since_s: float | None = None  # the device, beside work
        self.bubble_s = 0.0

    def wake(self) -> None:
        """Something arrived. What else arrives in this tick of the loop is composed into the same step."""
        self._wake.set()
        self._runner.go_on()  # where much arrives in one tick, the device may have done what it was given before

    async def run(self) -> None:
        """Launch whenever woken, for ever. Landings launch by themselves, without the detour over this coroutine."""
        while True:
            await self._wake.wait()
            await self._permits.wait()
            self._wake.clear()
            self.launch_due()

    def close(self) -> None:
        """No alarm rings from here on. Idempotent."""
        if self._alarm is not None:
            self._alarm.close()
            self._alarm = None

    def launch_due(self, landed_s: float | None = None) -> None:
        """Launch as many steps as are due now. Synchronous; raises DeviceLost only.

        landed_s: when the step landed, where one has just done so.
        """
        with NoCollection():  # not while the device may be waiting, but when it has work again
            self._launch_due(landed_s)

    def _launch_due(self, landed_s: float | None) -> None:
        has_landed = landed_s is not None
        if has_landed and not len(self._lander):
            self._idle_since_s = landed_s
        while self._permits.acquire_nowait():
            composed_s = self._clock()
            actions = self._scheduler.handle(events.LaunchPossible(has_landed), composed_s)
            last = actions[-1] if actions else None
            if isinstance(last, Launch):
                self._launch(last, composed_s, actions[:-1])
                continue
            self._permits.release()
            if isinstance(last, WakeAt):
                self._carry_out(actions[:-1])
                self._wake_at(last.when_s, composed_s)
                return
            self._carry_out(actions)
            if not len(self._lander):
                self._idle_since_s = None  # for want of work
            return

    def _launch(self, launch: Launch, composed_s: float, beside: list[Action]) -> None:
        """beside: what else the composing asked for. After the launch: what newcomers cost is not the device's time."""
        plan = launch.plan
        handed_s = self._clock()
        try:
            hit("loop.launch")
            flight = self._runner.launch(plan)
        except DeviceLost:
            raise
        except Exception as error:
            self._carry_out(beside)
            sentence = f"{type(error).__name__}: {error}"
            now = self._clock()
            self._carry_out(self._scheduler.handle(events.LaunchFailed(plan.step, sentence), now))
            self._lander.push(LostFlight(plan.step, error), launch, now)
            return
        launched_s = self._clock()
        self._carry_out(beside)
        bubble_s = 0.0
        if not len(self._lander) and self._idle_since_s is not None:
            bubble_s = launched_s - self._idle_since_s
            self.bubble_s += bubble_s
        for action in self._scheduler.handle(events.StepLaunched(plan.step), launched_s):
            assert isinstance(action, WakeAt)
            self._wake_at(action.when_s, launched_s)
        self._lander.push(flight, launch, launched_s)
        predicted_end_s = None
        if launch.lead_s is not None and launch.predicted_s is not None:
            predicted_end_s = max(composed_s + launch.lead_s, launched_s) + launch.predicted_s
        self._observer.step_launched(
            StepLaunch(
                step=plan.step,
                stream=plan.stream,
                composed_s=composed_s,
                handed_s=handed_s,
                launched_s=launched_s,
                num_rows=len(plan.rows),
                num_chunks=len(plan.chunks),
                num_prefill_tokens=plan.num_tokens - len(plan.rows),
                num_inflight=len(self._lander),
                reason=launch.reason,
                lead_s=launch.lead_s,
                predicted_end_s=predicted_end_s,
                bubble_s=bubble_s,
            )
        )

    def _wake_at(self, when_s: float, now: float) -> None:
        if abs(when_s - self._alarm_s) < ALARM_GRAIN_S:
            return
        if -math.inf < self._alarm_s < now:
            # Overdue, and now it will not ring any more: it would have been late by at least so much.
            self._scheduler.handle(events.AlarmRang(self._alarm_s), now)
        if self._alarm is None:
            self._alarm = self._make_alarm(asyncio.get_running_loop(), self._on_ring)
        self._alarm_s = when_s
        self._alarm.set(max(when_s - now, 0.0))

    def _on_ring(self) -> None:
        # Here and not in the coroutine, which may be waiting for a permit: how late the loop is, is measured.
        self._scheduler.handle(events.AlarmRang(self._alarm_s), self._clock())
        self._alarm_s = -math.inf
        self._wake.set()
