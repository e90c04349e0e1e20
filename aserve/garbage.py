"""Python's garbage collector, kept out of what must not be held up."""

import gc
from threading import Lock
from types import TracebackType
from typing import ClassVar


class NoCollection:
    """``with NoCollection():`` no collection begins in this block, which is short. One that comes due begins behind it.

    For the whole process, and only where collections are on. May be nested, and entered by several threads: collections
    are on again when the last block has ended.
    """

    __slots__ = ()

    _lock: ClassVar[Lock] = Lock()
    _num_blocks: ClassVar[int] = 0
    _was_on: ClassVar[bool] = False

    def __enter__(self) -> None:
        cls = NoCollection
        with cls._lock:
            if not cls._num_blocks:
                cls._was_on = gc.isenabled()
                gc.disable()
            cls._num_blocks += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        cls = NoCollection
        with cls._lock:
            cls._num_blocks -= 1
            if not cls._num_blocks and cls._was_on:
                gc.enable()
