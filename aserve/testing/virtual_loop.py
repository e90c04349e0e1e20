"""An event loop whose time is virtual: it jumps to the next timer, and host work is seconds that somebody says.

    result = run_virtual(main())

``loop.time()`` stands still while callbacks run, jumps to the next timer when none is ready, and moves by
``loop.work(seconds)`` when the program says that it has been busy for so long: then timers of that span run late, as
they do on a real loop that is held up. Nothing ever sleeps, so an hour of waiting takes as long as its callbacks.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final, TypeVar

from aserve.testing.manual import ManualClock

T = TypeVar("T")

LIMIT_S: Final = 7 * 86_400.0
"""A program that is not done after a week of virtual time waits for what never comes, beside timers that recur."""


class NothingWillHappen(RuntimeError):
    """The loop has nothing ready and no timer, or nothing but timers that recur: what it waits for never comes."""


class _JumpingSelector(selectors.BaseSelector):
    """A selector that moves the clock by the time that it was to wait. Descriptors work, and take no time."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self._real = selectors.DefaultSelector()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = self._real.select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None or self._clock() > LIMIT_S:
            raise NothingWillHappen("nothing is ready, and no timer brings what the program waits for")
        self._clock.advance(max(0.0, timeout))
        return ready

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._real.unregister(fileobj)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.modify(fileobj, events, data)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._real.get_map()

    def close(self) -> None:
        self._real.close()


class VirtualLoop(asyncio.SelectorEventLoop):
    """asyncio's own loop on a virtual clock, which starts at 0. Threads and processes do not fit: they take real time.

    Raises NothingWillHappen out of ``run_until_complete`` where a real loop would wait for ever.
    """

    def __init__(self) -> None:
        self._virtual_clock = ManualClock()
        super().__init__(_JumpingSelector(self._virtual_clock))

    def time(self) -> float:
        return self._virtual_clock()

    def work(self, seconds: float) -> None:
        """The running callback has held the loop for ``seconds``."""
        self._virtual_clock.advance(seconds)


class VirtualAlarm:
    """``engine.ports.AlarmClock`` on a VirtualLoop: to the moment, or ``late_s`` after it as timers of a kernel are."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_ring: Callable[[], None], *, late_s: float = 0.0) -> None:
        self._loop = loop
        self._on_ring = on_ring
        self._late_s = late_s
        self._handle: asyncio.TimerHandle | None = None

    def set(self, delay_s: float) -> None:
        self.close()
        self._handle = self._loop.call_later(delay_s + self._late_s, self._on_ring)

    def close(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None


def running_virtual_loop() -> VirtualLoop:
    """The running loop. Raises RuntimeError on a loop in real time, where virtual work means nothing."""
    loop = asyncio.get_running_loop()
    if not isinstance(loop, VirtualLoop):
        raise RuntimeError("this needs a VirtualLoop: start the program with aserve.testing.run_virtual")
    return loop


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end on a new VirtualLoop, as ``asyncio.run`` does on a real one."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
