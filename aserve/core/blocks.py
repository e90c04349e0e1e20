"""The KV ledger: the state, references and fence of every block. Ids only; the tensors live on the device.

``landed`` is the highest step k such that every step up to k has completed. Giving up a block stamps it with the newest
step that may touch it; the block is free again once that step has landed.
"""

import heapq
from collections import deque

import numpy as np

from aserve.core.ids import NO_STEP, BlockId, StepNumber
from aserve.core.prefix import EvictionOrder, PrefixTable
from aserve.core.transitions import BLOCK, BlockMove, BlockState, Story, move


class BlockLedger:
    """Blocks 1 .. num_blocks. The scheduler is the only caller that changes anything."""

    def __init__(self, num_blocks: int, prefix: PrefixTable, story: Story) -> None:
        self.num_blocks = num_blocks
        self.prefix = prefix
        self.landed = NO_STEP
        self._story = story
        self._state = [BlockState.FREE] * (num_blocks + 1)
        self._references = [0] * (num_blocks + 1)
        self._fence = [NO_STEP] * (num_blocks + 1)
        # Numpy, since debug builds compare whole lists of (block, generation) at each landing.
        self.generation = np.zeros(num_blocks + 1, np.int64)
        self._free = deque(BlockId(block) for block in range(1, num_blocks + 1))
        self._pending: list[tuple[StepNumber, BlockId]] = []  # a heap, the earliest fence first
        self._cached = EvictionOrder()

    # --- looking

    def state(self, block: BlockId) -> BlockState:
        return self._state[block]

    def references(self, block: BlockId) -> int:
        return self._references[block]

    def fence(self, block: BlockId) -> StepNumber:
        return self._fence[block]

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    @property
    def num_cached(self) -> int:
        return self._cached.num_evictable + self._cached.num_fenced

    @property
    def num_available(self) -> int:
        """Blocks that ``allocate`` could hand out now: free, or cached with their fences passed."""
        return len(self._free) + self._cached.num_evictable

    @property
    def num_coming(self) -> int:
        """Blocks that become available by landings alone, with nobody preempted."""
        return len(self._pending) + self._cached.num_fenced

    def is_evictable(self, block: BlockId) -> bool:
        """Whether the block counts in ``num_available`` though a prefix hit could still take it."""
        return self._state[block] is BlockState.CACHED and self._fence[block] <= self.landed

    # --- moving

    def _move(self, block: BlockId, step: BlockMove) -> None:
        self._state[block] = move(BLOCK, "block", block, self._state[block], step, self._story)

    def allocate(self, count: int) -> list[BlockId] | None:
        """free -> writing, evicting cached blocks whose fences have passed; None, and nothing changed, if too few."""
        if self.num_available < count:
            return None
        while len(self._free) < count:
            self._evict(self._cached.oldest())
        blocks = [self._free.popleft() for _ in range(count)]
        for block in blocks:
            self._move(block, BlockMove.ALLOCATE)
            self.generation[block] += 1
        return blocks

    def publish(self, block: BlockId) -> None:
        """writing -> readonly: the block is full, its last writer has landed. The caller hashes it."""
        self._move(block, BlockMove.PUBLISH)
        self._references[block] = 1

    def acquire(self, block: BlockId) -> None:
        """One more reference to a block of the prefix table; a cached one becomes readonly, whatever its fence."""
        if self._state[block] is BlockState.CACHED:
            self._move(block, BlockMove.HIT)
            self._cached.discard(block)
        else:
            self._move(block, BlockMove.SHARE)
        self._references[block] += 1

    def release(self, block: BlockId, last_step: StepNumber) -> None:
        """An owner whose newest launched step is ``last_step`` gives the block up."""
        if self._state[block] is BlockState.WRITING:
            step = BlockMove.ABANDON
        elif self._references[block] > 1:
            step = BlockMove.UNSHARE
        else:
            step = BlockMove.CACHE if self.prefix.has(block) else BlockMove.DROP
        self._move(block, step)
        self._fence[block] = max(self._fence[block], last_step)
        if step is not BlockMove.ABANDON:
            self._references[block] -= 1
        if step is BlockMove.CACHE:
            self._cached.add(block, self._fence[block], self.landed)
        elif step is not BlockMove.UNSHARE:
            self._await_fence(block)

    def flush(self) -> int:
        """Forget every cached prefix. Blocks in use stay with their users, unhashed. Returns the blocks let go."""
        flushed = 0
        for block in self.prefix.blocks():
            if self._state[block] is BlockState.CACHED:
                self._evict(block)
                flushed += 1
            else:
                self.prefix.remove(block)
        return flushed

    def advance(self, landed: StepNumber) -> None:
        """Steps up to ``landed`` have completed: fences that they held fall."""
        self.landed = landed
        while self._pending and self._pending[0][0] <= landed:
            _, block = heapq.heappop(self._pending)
            self._reclaim(block)
        self._cached.advance(landed)

    def _evict(self, block: BlockId) -> None:
        # The hash goes in the same call: nobody can be handed a block that is on its way out.
        self._move(block, BlockMove.EVICT)
        self.prefix.remove(block)
        self._cached.discard(block)
        self._await_fence(block)

    def _await_fence(self, block: BlockId) -> None:
        if self._fence[block] <= self.landed:
            self._reclaim(block)
        else:
            heapq.heappush(self._pending, (self._fence[block], block))

    def _reclaim(self, block: BlockId) -> None:
        self._move(block, BlockMove.RECLAIM)
        self._free.append(block)
