"""Python's garbage collector, kept out of what must not be held up."""

import gc
from types import TracebackType


class NoCollection:
    """``with NoCollection():`` no collection begins in this block, which is short. One that comes due begins behind it.

    For the whole process, and only where collections are on. May be nested.
    """

    __slots__ = ("_was_on",)

    def __enter__(self) -> None:
        self._was_on = gc.isenabled()
        gc.disable()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._was_on:
            gc.enable()
