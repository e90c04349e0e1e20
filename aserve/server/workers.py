"""Threads for what would hold the loop: parsing, templating and tokenising large bodies."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from aserve.errors import Overloaded

T = TypeVar("T")


class Workers:
    """A few threads and a bounded line before them."""

    def __init__(self, num_workers: int, max_pending: int) -> None:
        self._pool = ThreadPoolExecutor(num_workers, thread_name_prefix="aserve-prepare")
        self._max_pending = max_pending
        self._num_pending = 0  # on the loop only

    async def run(self, function: Callable[[], T]) -> T:
        """What ``function`` returns or raises. Raises Overloaded if too much waits already. A cancelled call that has
        not begun never begins; one that has runs to its end for nothing."""
        if self._num_pending >= self._max_pending:
            raise Overloaded("Too many large requests wait to be read.", retry_after_s=1.0)
        self._num_pending += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, function)
        finally:
            self._num_pending -= 1

    def close(self) -> None:
        """Take no more; what runs is left to end by itself."""
        self._pool.shutdown(wait=False, cancel_futures=True)
