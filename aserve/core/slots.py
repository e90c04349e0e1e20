"""The host's side of the slot table: who owns which row, and what a step needs to know of each, as arrays.

A sequence's figures that every step reads live here, by slot, so that composing and landing a step of decode rows is
a handful of numpy calls; what changes rarely lives on the sequence.
"""

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aserve.core.ids import NO_STEP, Epoch, SequenceId, Slot, StepNumber
from aserve.core.sequence import Sequence
from aserve.core.transitions import SLOT, SlotMove, SlotState, Story, move


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Rows:
    """Slots with a row in a step, and whose they were at its composing. R of them.

    slots: intp [R]. epochs: int64 [R]. num_retired: the book's then. While that has not changed, all are theirs still.
    """

    book: "SlotBook"
    slots: NDArray[np.intp]
    epochs: NDArray[np.int64]
    idents: list[SequenceId]
    num_retired: int

    def __len__(self) -> int:
        return len(self.idents)

    @property
    def is_fresh(self) -> bool:
        """Whether nobody at all has left a slot since."""
        return self.num_retired == self.book.num_retired

    def owned(self) -> NDArray[np.bool_]:
        """Which of them are theirs still."""
        same: NDArray[np.bool_] = self.book.epoch[self.slots] == self.epochs
        return same & self.book.live[self.slots]

    def sequences(self) -> list[Sequence]:
        """The owners of those that are theirs still."""
        owners: list[Sequence] = self.book.owner[self.slots[self.owned()]].tolist()
        return owners


class SlotBook:
    """Slots 0 .. max_num_seqs - 1; every array is indexed by slot. The scheduler is the only writer.

    position: the next position to launch. length: accepted tokens, prompt included; while decoding, K/V of all but the
    last have been computed by landed steps. tokens: int32 [slot, position], of which ``length`` count. last_step: the
    newest step that lists the slot. end_position: the first position that must not be launched, since the row before it
    samples the last allowed token. room: that, or the first position that its blocks do not hold, whichever comes
    first: the row before it samples the last allowed token or fills a block. decoding: whether decode rows may be
    launched; where chunks have a stream of their own, not before the last one has landed. live: bound and not finished.
    ident: the owner's id. num_with_logprobs: bound slots that want logprobs. stop_ids: of bound slots, each with the
    number of times it was named. num_retired: slots left so far.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, story: Story) -> None:
        self.max_num_seqs = max_num_seqs
        self.owner = np.full(max_num_seqs, None, np.object_)  # an array, for the owners of many slots at once
        self.state = [SlotState.FREE] * max_num_seqs
        self._story = story
        self._free = list(range(max_num_seqs))  # a heap: low slots first keeps the table dense
        self._retiring: list[tuple[StepNumber, Slot]] = []
        self.epoch = np.zeros(max_num_seqs, np.int64)
        self.live = np.zeros(max_num_seqs, np.bool_)
        self.decoding = np.zeros(max_num_seqs, np.bool_)
        self.position = np.zeros(max_num_seqs, np.int32)
        self.length = np.zeros(max_num_seqs, np.int32)
        self.last_step = np.zeros(max_num_seqs, np.int64)
        self.end_position = np.zeros(max_num_seqs, np.int32)
        self.room = np.zeros(max_num_seqs, np.int32)
        # Zeros cost no memory before somebody writes there.
        self.tokens = np.zeros((max_num_seqs, max_model_len), np.int32)
        self.ident = np.zeros(max_num_seqs, np.int64)
        self.logprobs_k = np.full(max_num_seqs, -1, np.int32)
        self.num_with_logprobs = 0
        self.stop_ids: dict[int, int] = {}
        self.num_retired = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_retiring(self) -> int:
        return len(self._retiring)

    def starved(self) -> NDArray[np.intp]:
        """Slots whose next decode row needs a block that they do not have."""
        wants = self.decoding & (self.position >= self.room) & (self.position < self.end_position)
        return wants.nonzero()[0]

    def rows(self, slots: NDArray[np.intp]) -> Rows:
        """A row each of bound slots."""
        return Rows(
            book=self,
            slots=slots,
            epochs=self.epoch[slots],
            idents=self.ident[slots].tolist(),
            num_retired=self.num_retired,
        )

    def _move(self, slot: int, step: SlotMove) -> None:
        self.state[slot] = move(SLOT, "slot", slot, self.state[slot], step, self._story)

    def bind(self, sequence: Sequence) -> Slot:
        """free -> bound, with a new epoch. The caller made sure that a slot is free."""
        slot = Slot(self._free[0])
        self._move(slot, SlotMove.BIND)
        heapq.heappop(self._free)
        params = sequence.spec.params
        self.owner[slot] = sequence
        self.epoch[slot] += 1
        self.live[slot] = True
        self.decoding[slot] = False
        self.last_step[slot] = NO_STEP
        self.length[slot] = length = len(sequence.history)
        self.tokens[slot, :length] = sequence.history
        self.end_position[slot] = sequence.max_length - 1
        self.ident[slot] = sequence.id
        self.logprobs_k[slot] = -1 if params.logprobs is None else params.logprobs
        self.num_with_logprobs += params.logprobs is not None
        for token in params.stop_token_ids:
            self.stop_ids[token] = self.stop_ids.get(token, 0) + 1
        return slot

    def history(self, slot: int) -> NDArray[np.int32]:
        """A copy of the slot's tokens."""
        return self.tokens[slot, : self.length[slot]].copy()

    def give_room(self, slot: int, num_tokens: int) -> None:
        """Its blocks hold ``num_tokens``."""
        self.room[slot] = min(num_tokens, self.end_position[slot])

    def epoch_of(self, slot: Slot) -> Epoch:
        return Epoch(int(self.epoch[slot]))

    def retire(self, slot: Slot, landed: StepNumber) -> StepNumber:
        """bound -> retiring, and on to free if the newest step that lists it has landed already. Returns that step."""
        self._move(slot, SlotMove.RETIRE)
        self.num_retired += 1
        for token in self.owner[slot].spec.params.stop_token_ids:
            self.stop_ids[token] -= 1
            if not self.stop_ids[token]:
                del self.stop_ids[token]
        self.owner[slot] = None
        self.num_with_logprobs -= bool(self.logprobs_k[slot] >= 0)
        self.live[slot] = False
        self.decoding[slot] = False
        last_step = StepNumber(int(self.last_step[slot]))
        if last_step <= landed:
            self._reclaim(slot)
        else:
            heapq.heappush(self._retiring, (last_step, slot))
        return last_step

    def advance(self, landed: StepNumber) -> None:
        while self._retiring and self._retiring[0][0] <= landed:
            self._reclaim(heapq.heappop(self._retiring)[1])

    def _reclaim(self, slot: Slot) -> None:
        self._move(slot, SlotMove.RECLAIM)
        heapq.heappush(self._free, slot)
