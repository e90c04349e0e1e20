"""Time and completions that a test moves by hand."""

import asyncio
from collections.abc import Generator
from typing import Any, cast

from aserve.core.ids import NO_STEP, StepNumber
from aserve.core.plan import BatchResult


class ManualClock:
    """Seconds that pass only when told to. Call it for the time."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def __call__(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError("a monotonic clock does not go back")
        self._now_s += seconds


class ManualEvent:
    """The flight of a step that completes when, and in the order in which, somebody says so.

    Awaiting it any number of times gives the same result or raises the same fault; cancelling an await leaves it alone.
    """

    def __init__(self, step: StepNumber = NO_STEP) -> None:
        self.step = step
        self._done = False
        self._result: BatchResult | None = None
        self._error: BaseException | None = None
        self._waiters: list[asyncio.Future[None]] = []

    def done(self) -> bool:
        return self._done

    def set(self, result: BatchResult | None = None) -> None:
        """Complete; wakes whoever awaits. Completing twice is a fault of the test."""
        self._complete(result, None)

    def fail(self, error: BaseException) -> None:
        """Complete with a fault that every await raises."""
        self._complete(None, error)

    def result(self) -> BatchResult:
        """The outcome without waiting: the result, or the fault raised."""
        assert self._done, f"step {self.step} has not completed"
        if self._error is not None:
            raise self._error
        return cast(BatchResult, self._result)

    def __await__(self) -> Generator[Any, None, BatchResult]:
        if not self._done:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            try:
                yield from waiter
            finally:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)
        return self.result()

    def _complete(self, result: BatchResult | None, error: BaseException | None) -> None:
        assert not self._done, f"step {self.step} completed twice"
        self._done, self._result, self._error = True, result, error
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()
