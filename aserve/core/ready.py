"""Stage 3: sequences that own blocks and a slot, prefilling chunk by chunk or decoding."""

from bisect import bisect_left, insort
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from aserve.core.options import SchedulerOptions
from aserve.core.sequence import Sequence
from aserve.core.slots import SlotBook
from aserve.core.transitions import SequenceState

_PREEMPTIBLE = (SequenceState.PREFILLING, SequenceState.DECODING)


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.order


class ReadyQueue:
    """In policy order. Picks candidates; what becomes of them is the scheduler's to write."""

    def __init__(self, slots: SlotBook, options: SchedulerOptions, rows_ahead: int) -> None:
        self._slots = slots
        self._options = options
        self._rows_ahead = rows_ahead
        self._sequences: list[Sequence] = []
        self._newcomers: list[Sequence] = []  # pushed, and not seen to have gone on from prefilling since

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def push(self, sequence: Sequence) -> None:
        insort(self._sequences, sequence, key=_order)
        self._newcomers.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        index = bisect_left(self._sequences, sequence.order, key=_order)
        assert self._sequences[index] is sequence
        del self._sequences[index]

    def decode_slots(self) -> NDArray[np.intp]:
        """Slots that may have a decode row now: fewer rows unlanded than allowed ahead, and not at a length end."""
        book = self._slots
        eligible = book.decoding & (book.num_unlanded < self._rows_ahead) & (book.position < book.end_position)
        return eligible.nonzero()[0]

    def num_prefill_left(self, sequence: Sequence) -> int:
        return sequence.goal - int(self._slots.position[sequence.slot])

    def prefilling(self) -> list[Sequence]:
        """In any order."""
        if self._newcomers:
            self._newcomers = [each for each in self._newcomers if each.state is SequenceState.PREFILLING]
        return self._newcomers

    def is_long(self, num_tokens: int) -> bool:
        return num_tokens > self._options.long_prefill_threshold

    def prefill_order(self) -> list[Sequence]:
        """Who gets prompt tokens first: those passed over for long, then short prompts, then long ones."""

        def rank(sequence: Sequence) -> tuple[bool, bool, tuple[int, int]]:
            young = sequence.num_passed_over < self._options.prefill_ageing_steps
            return young, young and self.is_long(self.num_prefill_left(sequence)), sequence.order

        return sorted(self.prefilling(), key=rank)

    def last_behind(self, order: tuple[int, int]) -> Sequence | None:
        """The victim of a preemption for the sequence at ``order``: the last in policy order that is behind it."""
        for sequence in reversed(self._sequences):
            if sequence.order <= order:
                return None
            if sequence.state in _PREEMPTIBLE:
                return sequence
        return None
