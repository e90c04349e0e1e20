"""A timer that is late by tens of microseconds, where the loop's own counts whole milliseconds (uvloop).

Linux only: one timerfd that the loop reads. Python has the calls from 3.13 on, libc at any version.
"""

import asyncio
import contextlib
import ctypes
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Final

_NONBLOCK_CLOEXEC: Final = os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0)  # TFD_NONBLOCK and TFD_CLOEXEC have their values
_NS_PER_S: Final = 1_000_000_000


class _TimeSpec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


class _TimerSpec(ctypes.Structure):
    _fields_ = (("it_interval", _TimeSpec), ("it_value", _TimeSpec))


def is_supported() -> bool:
    """Whether an Alarm can be made here."""
    return sys.platform == "linux" and _opener() is not None


def _opener() -> Callable[[], tuple[int, Callable[[int], None]]] | None:
    """What makes a timer: its descriptor, and the function that sets it off in so many ns (0 never)."""
    if hasattr(os, "timerfd_create"):
        return _open_with_os
    # Not CDLL: that lets go of the interpreter around each call, which is longer than the call.
    library = ctypes.PyDLL(None, use_errno=True)
    return (lambda: _open_with_libc(library)) if hasattr(library, "timerfd_create") else None


def _open_with_os() -> tuple[int, Callable[[int], None]]:
    calls: Any = os  # the checker knows an older Python
    descriptor: int = calls.timerfd_create(time.CLOCK_MONOTONIC, flags=_NONBLOCK_CLOEXEC)
    return descriptor, lambda delay_ns: calls.timerfd_settime_ns(descriptor, initial=delay_ns)


def _open_with_libc(library: ctypes.PyDLL) -> tuple[int, Callable[[int], None]]:
    descriptor: int = library.timerfd_create(time.CLOCK_MONOTONIC, _NONBLOCK_CLOEXEC)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), "timerfd_create")
    spec = _TimerSpec()
    moment, pointer, settime = spec.it_value, ctypes.byref(spec), library.timerfd_settime

    def set_off(delay_ns: int) -> None:
        moment.tv_sec, moment.tv_nsec = divmod(delay_ns, _NS_PER_S)
        if settime(descriptor, 0, pointer, None) < 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    return descriptor, set_off


class Alarm:
    """Calls ``on_ring`` on ``loop`` once for each ``set``. Made and used on that loop; closed on it or after it."""

    __slots__ = ("_descriptor", "_loop", "_on_ring", "_set_off")

    def __init__(self, loop: asyncio.AbstractEventLoop, on_ring: Callable[[], None]) -> None:
        opener = _opener()
        if opener is None:
            raise OSError("this system has no timerfd")
        self._loop = loop
        self._on_ring = on_ring
        self._descriptor, self._set_off = opener()
        loop.add_reader(self._descriptor, self._answer)

    def set(self, delay_s: float) -> None:
        """Ring once, in ``delay_s``; an earlier setting that has not rung is forgotten."""
        self._set_off(max(1, int(delay_s * _NS_PER_S)))

    def _answer(self) -> None:
        with contextlib.suppress(BlockingIOError):  # set anew between the loop's look and this call
            os.read(self._descriptor, 8)
            self._on_ring()

    def close(self) -> None:
        """Never ring again. Idempotent."""
        if self._descriptor < 0:
            return
        if not self._loop.is_closed():
            self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)
        self._descriptor = -1
