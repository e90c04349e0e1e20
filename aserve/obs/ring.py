"""A bounded ring of records: pushing is cheap and never fails; the oldest make room and are counted."""

from collections import deque
from itertools import count
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")


class Ring(Generic[T]):
    """Any thread pushes; one thread takes, and reads the counts.

    pushed == taken + dropped + len(ring), exactly whenever no push is under way; during one, ``dropped`` may be too
    small by one, never too large. Both halves of a push are single calls into C, atomic under the interpreter's lock.
    ``+= 1`` is not, and a lock of our own could hold up the event loop while the thread that has it waits for a core.

    Whoever takes may sleep until there is something. A push looks after its append whether somebody sleeps, and the
    sleeper looks for records after saying that it will: whichever comes second sees the other, so no wake-up is lost.
    """

    __slots__ = ("_bell", "_is_awaited", "_items", "_num_reads", "_numbers", "capacity", "taken")

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError("a ring holds at least one record")
        self.capacity = capacity
        self.taken = 0
        self._items: deque[T] = deque(maxlen=capacity)
        self._numbers = count()
        self._num_reads = 0
        self._bell: SimpleQueue[None] = SimpleQueue()  # its put takes no lock
        self._is_awaited = False  # both sides write it: a ring too many wakes for nothing, once

    def push(self, item: T) -> None:
        """O(1). A full ring loses its oldest record. Wakes who waits, and only then makes a system call."""
        self._items.append(item)
        next(self._numbers)
        if self._is_awaited:
            self.wake()

    def wait(self) -> None:
        """Block the one thread that takes until there may be something to take, or ``wake``."""
        self._is_awaited = True
        if not self._items:
            self._bell.get()
        self._is_awaited = False

    def wake(self) -> None:
        """End the present ``wait``, or else the next one that finds nothing. From any thread; never blocks."""
        self._is_awaited = False  # the pushes that follow need not ring again
        self._bell.put(None)

    def take(self, limit: int) -> list[T]:
        """Remove and return up to ``limit`` of the oldest records."""
        pop = self._items.popleft
        items: list[T] = []
        try:
            while len(items) < limit:
                items.append(pop())
        except IndexError:  # not asked beforehand: a push that drops may come between
            pass
        self.taken += len(items)
        return items

    def __len__(self) -> int:
        return len(self._items)

    @property
    def pushed(self) -> int:
        """Records ever pushed. A read uses up a number of the counter and takes it off again."""
        pushed = next(self._numbers) - self._num_reads
        self._num_reads += 1
        return pushed

    @property
    def dropped(self) -> int:
        """Records that made room before they were taken."""
        return self.pushed - self.taken - len(self._items)
