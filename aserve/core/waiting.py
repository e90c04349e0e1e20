"""Stage 2: admitted sequences that own no blocks and no slot, in policy order."""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator

from aserve.core.sequence import Sequence, by_order

_DEPARTURES = 64


class WaitingQueue:
    """Ordered by ``Sequence.order``; a preempted sequence comes back to its old place. Bounded by admission.

    num_tokens: uncached prompt tokens, as counted at the door.
    """

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []
        self._departures_s: deque[float] = deque(maxlen=_DEPARTURES)
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def push(self, sequence: Sequence) -> None:
        insort(self._sequences, sequence, key=by_order)
        self.num_tokens += sequence.num_uncached_at_door

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence that ended while it waited."""
        index = bisect_left(self._sequences, sequence.order, key=by_order)
        assert self._sequences[index] is sequence
        del self._sequences[index]
        self.num_tokens -= sequence.num_uncached_at_door

    def depart(self, sequence: Sequence, now: float) -> None:
        """Take out a sequence that starts to run; its time counts for the rate at which the queue moves."""
        self.remove(sequence)
        self._departures_s.append(now)

    def departures_per_second(self, now: float) -> float | None:
        """How fast the queue has moved lately, or None before two departures."""
        if len(self._departures_s) < 2:
            return None
        # Up to now, not to the last departure: a queue that stands still has a falling rate.
        return (len(self._departures_s) - 1) / max(now - self._departures_s[0], 1e-3)
