"""The host's side of the slot table: who owns which row, and what a step needs to know of each, as arrays.

A sequence's figures that every step reads live here, by slot, so that composing and landing a step of decode rows is
a handful of numpy calls; what changes rarely lives on the sequence.
"""

import heapq

import numpy as np

from aserve.core.ids import NO_STEP, Epoch, Slot, StepNumber
from aserve.core.request import MAX_STOP_IDS
from aserve.core.sequence import Sequence
from aserve.core.transitions import SLOT, SlotMove, SlotState, Story, move


class SlotBook:
    """Slots 0 .. max_num_seqs - 1; every array is indexed by slot. The scheduler is the only writer.

    position: the next position to launch. num_computed: tokens whose K/V a landed step has written; while decoding one
    less than length. last_step: the newest step that lists the slot. capacity: tokens that its blocks hold.
    num_unlanded: sampling rows in flight. length: accepted tokens, prompt included. end_position: the first position
    that must not be launched, since the row before it samples the last allowed token. decoding: whether decode rows may
    be launched; where chunks have a stream of their own, not before the last one has landed. live: bound and not
    finished. ident: the owner's id. stop_ids: [stop id, slot], -1 beyond the slot's own; rows from ``num_stop_rows`` on
    are empty. num_with_logprobs: bound slots that want logprobs.
    """

    def __init__(self, max_num_seqs: int, story: Story) -> None:
        self.max_num_seqs = max_num_seqs
        self.owner: list[Sequence | None] = [None] * max_num_seqs
        self.state = [SlotState.FREE] * max_num_seqs
        self._story = story
        self._free = list(range(max_num_seqs))  # a heap: low slots first keeps the table dense
        self._retiring: list[tuple[StepNumber, Slot]] = []
        self.epoch = np.zeros(max_num_seqs, np.int64)
        self.live = np.zeros(max_num_seqs, np.bool_)
        self.decoding = np.zeros(max_num_seqs, np.bool_)
        self.position = np.zeros(max_num_seqs, np.int32)
        self.num_computed = np.zeros(max_num_seqs, np.int32)
        self.last_step = np.zeros(max_num_seqs, np.int64)
        self.capacity = np.zeros(max_num_seqs, np.int32)
        self.end_position = np.zeros(max_num_seqs, np.int32)
        self.num_unlanded = np.zeros(max_num_seqs, np.int32)
        self.length = np.zeros(max_num_seqs, np.int32)
        self.min_length = np.zeros(max_num_seqs, np.int32)
        self.max_length = np.zeros(max_num_seqs, np.int32)
        self.last_token = np.zeros(max_num_seqs, np.int32)
        self.logprobs_k = np.full(max_num_seqs, -1, np.int32)
        self.ident = np.zeros(max_num_seqs, np.int64)
        self.num_with_logprobs = 0
        # The short axis first: a landing compares along the long one, and only the rows that somebody filled.
        self.stop_ids = np.full((MAX_STOP_IDS, max_num_seqs), -1, np.int32)
        self.num_stop_rows = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_retiring(self) -> int:
        return len(self._retiring)

    @property
    def num_starved(self) -> int:
        """Slots whose next decode row needs a block that they do not have."""
        wants = self.decoding & (self.position >= self.capacity) & (self.position < self.end_position)
        return int(np.count_nonzero(wants))

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
        self.num_unlanded[slot] = 0
        self.last_step[slot] = NO_STEP
        self.length[slot] = len(sequence)
        self.min_length[slot] = sequence.num_prompt + params.min_tokens
        self.max_length[slot] = sequence.max_length
        self.end_position[slot] = sequence.max_length - 1
        self.ident[slot] = sequence.id
        self.logprobs_k[slot] = -1 if params.logprobs is None else params.logprobs
        self.num_with_logprobs += params.logprobs is not None
        self.stop_ids[:, slot] = -1
        self.stop_ids[: len(params.stop_token_ids), slot] = params.stop_token_ids
        self.num_stop_rows = max(self.num_stop_rows, len(params.stop_token_ids))
        return slot

    def epoch_of(self, slot: Slot) -> Epoch:
        return Epoch(int(self.epoch[slot]))

    def retire(self, slot: Slot, landed: StepNumber) -> StepNumber:
        """bound -> retiring, and on to free if the newest step that lists it has landed already. Returns that step."""
        self._move(slot, SlotMove.RETIRE)
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
