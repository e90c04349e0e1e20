"""The semaphore of steps in flight."""

import asyncio
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PermitStatistics:
    num_permits: int
    num_taken: int


class Permits:
    """Counts steps launched and not landed. One task waits on it, the scheduling coroutine, so no wake-up can get lost
    between waiters. Core's own count is the truth; this one only waits, and both are asserted equal at each landing.
    """

    def __init__(self, num_permits: int) -> None:
        self._num_permits = num_permits
        self._num_taken = 0
        self._has_free = asyncio.Event()
        self._has_free.set()

    def acquire_nowait(self) -> bool:
        """Take one if there is one."""
        if self._num_taken == self._num_permits:
            return False
        self._num_taken += 1
        if self._num_taken == self._num_permits:
            self._has_free.clear()
        return True

    def release(self) -> None:
        assert self._num_taken, "a permit was given back twice"
        self._num_taken -= 1
        self._has_free.set()

    async def wait(self) -> None:
        """Until one is free, without taking it. Cancelling leaves everything as it is."""
        await self._has_free.wait()

    def statistics(self) -> PermitStatistics:
        return PermitStatistics(self._num_permits, self._num_taken)
