"""The only file that waits for the device: a step ends there, the loop learns of it here, and nothing blocks the loop.

Work of other threads rings the loop's bell: one pipe that the loop reads, rung once however many flights land before
the loop gets to it. Measured on uvloop with 1 ms of work each, from the landing to the awaiting coroutine: 9 µs at p50
against 29 µs through ``call_soon_threadsafe``, and 3 µs of the landing thread's time against 14.

A GPU's steps are events that somebody has to look at. A watcher does, and calls back in the order of launches:
``TimerWatcher`` sleeps until just before the predicted end and then looks from the loop, ``ThreadWatcher`` lets a
thread block on the event and rings the bell, ``PollWatcher`` looks in every tick of the loop.
"""

import asyncio
import contextlib
import os
import time
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Hashable
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from threading import Lock, Thread
from types import TracebackType
from typing import ClassVar, Final, Generic, Literal, Protocol, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from aserve.device import alarm
from aserve.device.prediction import StepTimes
from aserve.errors import DeviceLost

T = TypeVar("T")


class Bell:
    """Wakes one event loop from any thread. Made on that loop, closed on it or after it."""

    __slots__ = ("_loop", "_read_fd", "_rung", "_visitors", "_write_fd")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        os.set_blocking(self._write_fd, False)
        self._rung = False
        self._visitors: deque[Callable[[], None]] = deque()
        loop.add_reader(self._read_fd, self._answer)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    def ring(self, visitor: Callable[[], None]) -> None:
        """Have ``visitor`` called on the loop. From any thread; a loop that is closed meanwhile never calls it."""
        self._visitors.append(visitor)
        if not self._rung:
            self._rung = True
            with contextlib.suppress(OSError):  # closed meanwhile
                os.write(self._write_fd, b"\0")

    def _answer(self) -> None:
        os.read(self._read_fd, 64)
        # Cleared before the visitors are taken: whoever comes later rings again, whoever came earlier is served now.
        self._rung = False
        self._serve()

    def _serve(self) -> None:
        try:
            while self._visitors:
                self._visitors.popleft()()
        finally:
            if self._visitors:  # one raised, which is for the loop's exception handler; the others must not wait
                self._loop.call_soon(self._serve)

    def close(self) -> None:
        """Idempotent. Only once nobody rings any more: the descriptors may then be others'."""
        if self._read_fd < 0:
            return
        if not self._loop.is_closed():
            self._loop.remove_reader(self._read_fd)
        os.close(self._read_fd)
        os.close(self._write_fd)
        self._read_fd = self._write_fd = -1


class Flight(Generic[T]):
    """Work that is out. Awaiting it gives the result or raises the fault, any number of times.

    ``land`` or ``fail`` is called once; all of this belongs to one loop. Cancelling an await leaves the work alone; a
    fault that nobody awaits is nobody's (no "never retrieved" warning).
    """

    __slots__ = ("_done", "_error", "_result", "_traceback", "_waiters")

    def __init__(self) -> None:
        self._done = False
        self._result: T | None = None
        self._error: BaseException | None = None
        self._traceback: TracebackType | None = None
        self._waiters: list[asyncio.Future[None]] = []

    def done(self) -> bool:
        """Whether awaiting would return at once."""
        return self._done

    def land(self, result: T) -> None:
        self._result = result
        self._done = True
        self._tell()

    def fail(self, error: BaseException) -> None:
        """End in a fault. Its frames let go of their tensors; the lines of the traceback stay."""
        traceback.clear_frames(error.__traceback__)
        self._error, self._traceback = error, error.__traceback__
        self._done = True
        self._tell()

    def _tell(self) -> None:
        self._wake()

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def __await__(self) -> Generator[object, None, T]:
        if not self._done:
            # Between this look and the append the loop does nothing else, and _wake runs only on the loop.
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            yield from waiter
        if self._error is not None:
            raise self._error.with_traceback(self._traceback)  # or each raise would lengthen it
        return cast("T", self._result)


class CpuFlight(Flight[T]):
    """A flight that another thread lands: ``land`` and ``fail`` may come from any, the rest is for the bell's loop."""

    __slots__ = ("_bell",)

    def __init__(self, bell: Bell) -> None:
        super().__init__()
        self._bell = bell

    def _tell(self) -> None:
        self._bell.ring(self._wake)


# --- events


class DeviceEvent(Protocol):
    """A point in the device's work. ``torch.cuda.Event`` is one."""

    def query(self) -> bool:
        """Whether it has been reached. Never blocks; raises what the device broke on."""
        ...

    def synchronize(self) -> None:
        """Block the thread until it has been reached; raises as ``query``."""
        ...


STEP_SHIFT: Final = 32
"""A result word carries its step's number, modulo 2**32, in the bits from here on."""

_STEP_MASK: Final = (1 << 32) - 1
_LOOKS_A_FENCE: Final = 16
_WORD_SLEEP_S: Final = 50e-6


class WordEvent:
    """A step whose result words have come: reads pinned memory (0.1 µs) where a CUDA event's query takes 0.5.

    words: int64 [n], the step's own part of the ring, ring[step % R, :n]. It must not be given to a later step before
    this one has been seen. fence: the step's event, looked at now and then: a device that broke writes no words.
    """

    __slots__ = ("_fence", "_num_looks", "_step", "_words")

    def __init__(self, words: NDArray[np.int64], step: int, *, fence: DeviceEvent | None = None) -> None:
        self._words = words
        self._step = step & _STEP_MASK
        self._fence = fence
        self._num_looks = 0

    def query(self) -> bool:
        """Whether every word has come. Raises DeviceLost if the fence was passed and one is missing."""
        if self._is_written():
            return True
        self._num_looks += 1
        if self._fence is not None and self._num_looks % _LOOKS_A_FENCE == 0 and self._fence.query():
            if not self._is_written():
                raise DeviceLost(f"Step {self._step} has ended without its result words.")
            return True
        return False

    def _is_written(self) -> bool:
        if (self._words.item(-1) >> STEP_SHIFT) & _STEP_MASK != self._step:
            return False
        return bool((((self._words >> STEP_SHIFT) & _STEP_MASK) == self._step).all())  # they come in any order

    def synchronize(self) -> None:
        """Block until every word has come; looks every 50 µs, so that the loop keeps the interpreter."""
        while not self.query():
            time.sleep(_WORD_SLEEP_S)


# --- watchers


@dataclass(slots=True, eq=False)
class _Watched:
    """One event that is out. Times are the clock's.

    due_s: when the first look was to be, None while none is planned. pending_s: the newest look that found it pending.
    """

    event: DeviceEvent
    on_done: Callable[[], None]
    on_error: Callable[[DeviceLost], None]
    key: Hashable
    launched_s: float = 0.0
    due_s: float | None = None
    pending_s: float | None = None


class Watcher(ABC):
    """Tells the loop when events have been reached, oldest first. Made on the running loop and used on it alone.

    A fault of any event is sticky: it goes, as one DeviceLost, to everything that is out and to whatever is watched
    later. What a callback raises goes to the loop's exception handler and holds up nobody else.
    """

    wants_blocking_events: ClassVar[bool] = False
    """Whether events should be made so that ``synchronize`` sleeps instead of spinning."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._out: deque[_Watched] = deque()
        self._lost: DeviceLost | None = None
        self._is_closed = False
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._num_landed = 0
        self._num_looks = 0

    def __len__(self) -> int:
        """Events that are out."""
        return len(self._out)

    def watch(
        self,
        event: DeviceEvent,
        on_done: Callable[[], None],
        on_error: Callable[[DeviceLost], None],
        *,
        key: Hashable = None,
        expected_s: float | None = None,
    ) -> None:
        """Call ``on_done()`` on the loop once ``event`` and all watched before it have been reached, else ``on_error``.

        Never calls back before it returns. key: kind of step, for the prediction of its end; from a bounded set.
        expected_s: its duration, if known, for a kind that was never seen. Raises DeviceLost after ``close``.
        """
        if self._is_closed:
            raise DeviceLost("The device is closed.")
        if self._lost is not None:
            self.loop.call_soon(on_error, self._lost)
            return
        watched = _Watched(event, on_done, on_error, key)
        self._out.append(watched)
        self._is_idle.clear()
        self._begin(watched, expected_s)

    @abstractmethod
    def _begin(self, watched: _Watched, expected_s: float | None) -> None:
        """The newest event has come."""

    def _land_oldest(self) -> None:
        watched = self._out.popleft()
        self._num_landed += 1
        if not self._out:
            self._is_idle.set()
        watched.on_done()

    def _lose(self, error: Exception) -> None:
        if not isinstance(error, DeviceLost):
            lost = DeviceLost(f"The device is lost: {type(error).__name__}: {error}")
            lost.__cause__ = error
            error = lost
        self._lost = error
        self._fail_all(error)

    def _fail_all(self, error: DeviceLost) -> None:
        self._is_idle.set()
        while self._out:
            self.loop.call_soon(self._out.popleft().on_error, error)

    def statistics(self) -> dict[str, float]:
        """Totals: events that were reached, and looks at one (of the watchers that look)."""
        return {"events_out": len(self._out), "events_landed": self._num_landed, "event_looks": self._num_looks}

    def close(self) -> None:
        """Stop watching; what is out fails with DeviceLost, even if the release raises. Idempotent, never blocks."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._release()
        finally:
            if self.loop.is_closed():
                self._out.clear()
            else:
                self._fail_all(DeviceLost("The device is closed."))

    @abstractmethod
    def _release(self) -> None:
        """Give back what the watcher holds."""

    async def aclose(self) -> None:
        """Wait until nothing is out, then close. If cancelled, closes at once."""
        try:
            await self._is_idle.wait()
        finally:
            self.close()


class PollWatcher(Watcher):
    """Looks at the oldest event in every tick of the loop: a whole core while anything is out."""

    def __init__(self) -> None:
        super().__init__()
        self._is_planned = False
        self._tick: asyncio.Handle | None = None

    def _begin(self, watched: _Watched, expected_s: float | None) -> None:
        if not self._is_planned:
            self._is_planned = True
            self._plan_look()

    def _look(self) -> None:
        """Land what has been reached, oldest first, and plan the next look if anything is left."""
        try:
            while self._out and self._is_reached(self._out[0]):
                self._land_oldest()
        finally:
            self._is_planned = len(self._out) > 0
            if self._is_planned:
                self._plan_look()

    def _is_reached(self, watched: _Watched) -> bool:
        self._num_looks += 1
        try:
            return watched.event.query()
        except Exception as error:
            self._lose(error)
            return False

    def _plan_look(self) -> None:
        self._tick = self.loop.call_soon(self._look)

    def _release(self) -> None:
        if self._tick is not None:
            self._tick.cancel()


class AlarmClock(Protocol):
    """What ``TimerWatcher`` sleeps by; ``alarm.Alarm`` is one."""

    def set(self, delay_s: float) -> None: ...

    def close(self) -> None: ...


LEAD_S: Final = 100e-6
"""How long before the predicted end the looking begins: an alarm rings 11-50 µs late at p50 (H200's host, uvloop)."""

SLEEP_S_MIN: Final = 30e-6
"""A shorter sleep costs more than the looks that it saves."""

SLEEP_S_MAX: Final = 1e-3
LATENESS: Final = 1 / 16
"""A step of unknown length is looked at when it is older by this share: its end is seen so much too late at most."""


class TimerWatcher(PollWatcher):
    """Sleeps by a timerfd until just before the oldest step's predicted end, then looks in every tick of the loop.

    A step starts at its launch or at the end of the one before, whichever is later. A step that takes much longer than
    predicted is looked at ever more rarely.
    """

    def __init__(
        self,
        *,
        lead_s: float = LEAD_S,
        clock: Callable[[], float] = time.monotonic,
        make_alarm: Callable[[asyncio.AbstractEventLoop, Callable[[], None]], AlarmClock] = alarm.Alarm,
    ) -> None:
        super().__init__()
        self._lead_s = lead_s
        self._clock = clock
        self._alarm = make_alarm(self.loop, self._look)
        self._times = StepTimes()
        self._newest_end_s = 0.0
        self._num_sleeps = 0

    def _begin(self, watched: _Watched, expected_s: float | None) -> None:
        watched.launched_s = self._clock()
        if expected_s is not None:
            self._times.suggest(watched.key, expected_s)
        super()._begin(watched, expected_s)

    def _is_reached(self, watched: _Watched) -> bool:
        now_s = self._clock()
        is_reached = super()._is_reached(watched)
        if is_reached:
            self._learn(watched, now_s)
        else:
            watched.pending_s = now_s
        return is_reached

    def _learn(self, watched: _Watched, seen_s: float) -> None:
        end_s = seen_s
        if watched.pending_s is not None:
            end_s = (watched.pending_s + seen_s) / 2
            self._times.saw(watched.key, end_s - max(watched.launched_s, self._newest_end_s))
        elif watched.due_s is not None and seen_s - watched.due_s <= self._lead_s:  # and not for the loop's lateness
            self._times.missed(watched.key)
        self._newest_end_s = end_s

    def _plan_look(self) -> None:
        watched = self._out[0]
        now_s = self._clock()
        delay_s = self._delay_s(watched.key, now_s - max(watched.launched_s, self._newest_end_s))
        if watched.due_s is None:
            watched.due_s = now_s + delay_s
        if delay_s < SLEEP_S_MIN:
            super()._plan_look()
        else:
            self._num_sleeps += 1
            self._alarm.set(delay_s)

    def _delay_s(self, key: Hashable, age_s: float) -> float:
        """How long a step that has run for ``age_s`` is left alone."""
        estimate = self._times.get(key)
        if estimate is not None:
            margin_s = self._lead_s + 2 * estimate.spread_s
            if age_s < estimate.mean_s - margin_s:
                return estimate.mean_s - margin_s - age_s
            if age_s < estimate.mean_s + margin_s:
                return 0.0
        return min(age_s * LATENESS, SLEEP_S_MAX)

    def statistics(self) -> dict[str, float]:
        return super().statistics() | {"event_sleeps": self._num_sleeps}

    def _release(self) -> None:
        super()._release()
        self._alarm.close()


class ThreadWatcher(Watcher):
    """A thread blocks on the oldest event and rings the loop's bell."""

    wants_blocking_events: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self._bell = Bell(self.loop)
        self._bell_lock = Lock()  # held to ring and to close: the thread must not ring a descriptor that is another's
        self._jobs: SimpleQueue[_Watched | None] = SimpleQueue()
        # A daemon that nobody joins: a device that hangs holds it for ever.
        Thread(target=self._work, name="aserve-wait", daemon=True).start()

    def _begin(self, watched: _Watched, expected_s: float | None) -> None:
        self._jobs.put(watched)

    def _work(self) -> None:
        while (watched := self._jobs.get()) is not None:
            error: Exception | None = None
            try:
                watched.event.synchronize()
            except Exception as raised:
                error = raised
            with self._bell_lock:
                if self._is_closed:
                    return
                self._bell.ring(partial(self._settle, error))
            del watched, error  # or the last step's tensors stay until the next one comes

    def _settle(self, error: Exception | None) -> None:
        if self._is_closed or self._lost is not None:
            return
        if error is None:
            self._land_oldest()
        else:
            self._lose(error)

    def _release(self) -> None:
        self._jobs.put(None)
        with self._bell_lock:
            self._bell.close()


WatcherName = Literal["auto", "timer", "thread", "poll"]


def make_watcher(name: WatcherName) -> Watcher:
    """A watcher for the running loop. "auto" is the timer where there is one, else the thread."""
    if name == "auto":
        name = "timer" if alarm.is_supported() else "thread"
    makers: dict[str, Callable[[], Watcher]] = {"timer": TimerWatcher, "thread": ThreadWatcher, "poll": PollWatcher}
    return makers[name]()
