"""Stage 5: finished sequences of which rows may still be in flight. (Their readers wait in ``engine/stream``.)"""

import heapq

from aserve.core.ids import StepNumber
from aserve.core.sequence import Sequence


class DoneQueue:
    """A heap by the newest step of each."""

    def __init__(self) -> None:
        self._heap: list[tuple[StepNumber, int, Sequence]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, sequence: Sequence) -> None:
        heapq.heappush(self._heap, (sequence.last_step, sequence.id, sequence))

    def pop_landed(self, landed: StepNumber) -> list[Sequence]:
        """Take out those whose newest step has landed."""
        popped = []
        while self._heap and self._heap[0][0] <= landed:
            popped.append(heapq.heappop(self._heap)[2])
        return popped
