"""Waking on time: loops count their timers in whole milliseconds, which is much of a short latency.

Where Linux has it, one ``timerfd`` for all sleepers of a loop wakes within tens of microseconds and costs nothing while
it waits; elsewhere the loop's own timers have to do.
"""

import asyncio
import ctypes
import os
import sys
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Protocol

_CLOCK_MONOTONIC = 1
_NONBLOCK_CLOEXEC = os.O_NONBLOCK | os.O_CLOEXEC if sys.platform == "linux" else 0


class Alarm(Protocol):
    """Wakes whoever sleeps."""

    async def sleep(self, delay_s: float) -> None:
        """Return after ``delay_s``, or earlier where all are woken. A cancellation ends the sleep."""
        ...

    def wake_all(self) -> None:
        """End every sleep now."""
        ...

    def close(self) -> None:
        """Give back what the alarm holds. Nobody may sleep any more."""
        ...


class LoopAlarm:
    """The loop's own timers."""

    def __init__(self) -> None:
        self._sleepers: set[asyncio.Future[None]] = set()

    async def sleep(self, delay_s: float) -> None:
        """Return after ``delay_s``, but no sooner than in a millisecond: loops make nothing of less and would spin."""
        loop = asyncio.get_running_loop()
        woken: asyncio.Future[None] = loop.create_future()
        timer = loop.call_later(max(delay_s, 0.001), _wake, woken)
        self._sleepers.add(woken)
        try:
            await woken
        finally:
            self._sleepers.discard(woken)
            timer.cancel()

    def wake_all(self) -> None:
        """End every sleep now."""
        for woken in self._sleepers:
            _wake(woken)

    def close(self) -> None:
        """Hold nothing: every timer is its sleeper's own."""


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("it_interval", _Timespec), ("it_value", _Timespec))


class TimerfdAlarm:
    """One timer of the kernel, set to whoever is due first. Raises OSError where there is none to be had."""

    def __init__(self, clock: Callable[[], float]) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        try:
            create, self._settime = libc.timerfd_create, libc.timerfd_settime
        except AttributeError as error:
            raise OSError("no timerfd here") from error
        self._clock = clock
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers = count()
        self._descriptor: int = create(_CLOCK_MONOTONIC, _NONBLOCK_CLOEXEC)
        if self._descriptor < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        asyncio.get_running_loop().add_reader(self._descriptor, self._ring)

    async def sleep(self, delay_s: float) -> None:
        """Return just after ``delay_s``, or earlier where all are woken. A cancellation ends the sleep."""
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        due_s = self._clock() + delay_s
        heappush(self._sleepers, (due_s, next(self._numbers), woken))
        if self._sleepers[0][2] is woken:
            self._set(delay_s)
        await woken

    def wake_all(self) -> None:
        """End every sleep now."""
        for _, _, woken in self._sleepers:
            _wake(woken)

    def close(self) -> None:
        """Give the timer back."""
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)

    def _set(self, delay_s: float) -> None:
        value_ns = max(1, round(delay_s * 1e9))  # 0 would switch the timer off
        spec = _Itimerspec(_Timespec(0, 0), _Timespec(*divmod(value_ns, 1_000_000_000)))
        self._settime(self._descriptor, 0, ctypes.byref(spec), None)

    def _ring(self) -> None:
        try:
            os.read(self._descriptor, 8)
        except BlockingIOError:
            return  # it was set anew meanwhile
        now_s = self._clock()
        sleepers = self._sleepers
        while sleepers and (sleepers[0][0] <= now_s or sleepers[0][2].done()):
            _wake(heappop(sleepers)[2])
        if sleepers:
            self._set(sleepers[0][0] - now_s)


def _wake(woken: "asyncio.Future[None]") -> None:
    if not woken.done():
        woken.set_result(None)


def best_alarm(clock: Callable[[], float]) -> Alarm:
    """Return the most exact alarm that this system has, for the running loop."""
    if sys.platform == "linux":
        try:
            return TimerfdAlarm(clock)
        except OSError:
            pass
    return LoopAlarm()
