"""One thread that computes for the loop, which is told of what lands through a bell."""

import asyncio
from collections.abc import Callable
from contextlib import ExitStack, suppress
from queue import SimpleQueue
from threading import Thread
from typing import TypeVar, cast

from aserve.device import threads
from aserve.device.event import Bell
from aserve.errors import DeviceLost

T = TypeVar("T")


class DeviceThread:
    """One thread that does what it is given, in that order. Nice to the loop; ends with the process at the latest.

    is_hurried: its closing was cancelled, so a job that has not begun may leave its work undone.
    """

    def __init__(self, name: str, *, setup: Callable[[], None] | None = None) -> None:
        self.is_hurried = False
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._closed = False
        self._bell: Bell | None = None
        self._old_bells: list[Bell] = []
        self._thread = Thread(target=self._work, args=(setup,), name=name, daemon=True)
        self._thread.start()

    def _work(self, setup: Callable[[], None] | None) -> None:
        try:
            threads.lower_priority()
            if setup is not None:
                setup()
            while (job := self._jobs.get()) is not None:
                job()
                del job  # or the last step's tensors stay until the next one comes
        finally:
            self._closed = True  # a job that raised ends the thread, and later ones are refused

    def bell(self) -> Bell:
        """The running loop's bell. A thread that outlives a loop gets a new bell on the next one."""
        loop = asyncio.get_running_loop()
        if self._bell is None or self._bell.loop is not loop:
            if self._bell is not None:
                self._old_bells.append(self._bell)
            self._bell = Bell(loop)
        return self._bell

    def submit(self, job: Callable[[], None]) -> None:
        """Queue ``job``, which must not raise, and return at once (some µs). Raises DeviceLost after ``close``."""
        if self._closed:
            raise DeviceLost("The device is closed.")
        self._jobs.put(job)

    def call(self, work: Callable[[], T]) -> T:
        """Do ``work`` in the thread and wait for it: blocks the caller, so never on the loop. Raises what it raises."""
        outcome: SimpleQueue[tuple[T | None, BaseException | None]] = SimpleQueue()

        def job() -> None:
            try:
                outcome.put((work(), None))
            except BaseException as error:
                outcome.put((None, error))

        self.submit(job)
        result, error = outcome.get()
        if error is not None:
            raise error
        return cast("T", result)

    def close(self) -> None:
        """Finish what is queued and end the thread. Blocks; idempotent."""
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
        self._thread.join()

    async def end(self) -> None:
        """``close`` without blocking the loop. A cancellation hurries the thread, and is raised once it has ended."""
        ending = asyncio.get_running_loop().run_in_executor(None, self.close)
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            self.is_hurried = True
            while not ending.done():  # until then jobs may ring the bells, which must not be closed under them
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([ending])
            raise

    async def aclose(self) -> None:
        """``end``, then ``close_bells`` even if that failed or was cancelled."""
        try:
            await self.end()
        finally:
            self.close_bells()

    def close_bells(self) -> None:
        """Once nobody lands anything any more. Each is closed even if another's closing fails. Idempotent."""
        with ExitStack() as stack:
            for bell in (*self._old_bells, *([self._bell] if self._bell else [])):
                stack.callback(bell.close)
            self._bell, self._old_bells = None, []
