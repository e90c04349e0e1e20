"""Stage 3: sequences that own blocks and a slot, prefilling chunk by chunk or decoding."""

from bisect import bisect_left, insort
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from aserve.core.options import SchedulerOptions
from aserve.core.sequence import Sequence, by_order
from aserve.core.slots import Rows, SlotBook
from aserve.core.transitions import SequenceState

_PREEMPTIBLE = (SequenceState.PREFILLING, SequenceState.DECODING)


class ReadyQueue:
    """In policy order. Picks candidates; what becomes of them is the scheduler's to write."""

    def __init__(self, slots: SlotBook, options: SchedulerOptions) -> None:
        self._slots = slots
        self._options = options
        self._needs_token = options.sampler == "host"  # before the next row: one of a sequence in flight at a time
        self._decode_rows = slots.rows(np.empty(0, np.intp))
        self._decode_mask = b""
        self._sequences: list[Sequence] = []
        self._newcomers: list[Sequence] = []  # pushed, and not seen to have gone on from prefilling since

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def push(self, sequence: Sequence) -> None:
        insort(self._sequences, sequence, key=by_order)
        self._newcomers.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        index = bisect_left(self._sequences, sequence.order, key=by_order)
        assert self._sequences[index] is sequence
        del self._sequences[index]

    def decode_rows(self) -> Rows:
        """Of all who may have a decode row now: the very same as last time while they are the same ones."""
        book = self._slots
        mask = book.decoding & (book.position < book.room)
        if self._needs_token:
            mask &= book.position < book.length
        content = mask.tobytes()
        if content != self._decode_mask or not self._decode_rows.is_fresh:
            self._decode_mask = content
            self._decode_rows = book.rows(mask.nonzero()[0])
        return self._decode_rows

    def starved(self) -> NDArray[np.intp]:
        """Slots that could have a decode row now, had they a block for it."""
        book = self._slots
        slots = book.starved()
        return slots[book.position[slots] < book.length[slots]] if self._needs_token else slots

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
