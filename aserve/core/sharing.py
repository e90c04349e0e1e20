"""Who shares which blocks: prefix hits, waiting for blocks that another is writing, and publishing full ones."""

from aserve.core.blocks import BlockLedger
from aserve.core.prefix import ROOT, PrefixEntry
from aserve.core.sequence import Sequence
from aserve.core.slots import SlotBook

SHARED_PREFIX_BLOCKS = 4
"""A sequence waits for another that is just writing so many of its next blocks or more, and takes them as hits."""


def waits_for(leader: Sequence | None, sequence: Sequence, block_size: int) -> bool:
    """A group's siblings wait until the full blocks of their prompt are readable, or their leader is gone."""
    if leader is None or leader.is_over or len(leader.history) > leader.num_prompt:
        return False  # it is over, or was preempted when it had prefilled: what is left of it is in the cache
    return leader.num_published < (sequence.num_prompt - 1) // block_size


class PrefixSharing:
    """The scheduler's view of the prefix table. Only ``publish`` changes anything."""

    def __init__(self, ledger: BlockLedger, slots: SlotBook, block_size: int) -> None:
        self._ledger = ledger
        self._slots = slots
        self._block_size = block_size

    def may_hit(self, sequence: Sequence) -> bool:
        """Not while it still owes logprobs of its prompt: those need every position computed."""
        params = sequence.spec.params
        return sequence.shares_prefix and (
            params.prompt_logprobs is None or sequence.num_prompt_logprobs >= sequence.num_prompt - 1
        )

    def match(self, sequence: Sequence) -> list[PrefixEntry]:
        """The longest cached prefix in whole blocks, without the last token: that one is computed for its logits."""
        hits: list[PrefixEntry] = []
        if not self.may_hit(sequence):
            return hits
        parent = ROOT
        for index in range((len(sequence.history) - 1) // self._block_size):
            start = index * self._block_size
            content = sequence.history[start : start + self._block_size].tobytes()
            digest = sequence.chain.digest(index, content)
            entry = self._ledger.prefix.find(digest, parent, content, sequence.salt)
            if entry is None:
                break
            hits.append(entry)
            parent = entry.prefix_id
        return hits

    def is_being_written(self, sequence: Sequence, num_hits: int, writers: list[Sequence]) -> bool:
        """Whether one of ``writers`` is about to publish the next blocks of just this content."""
        end = (num_hits + SHARED_PREFIX_BLOCKS) * self._block_size
        if end >= len(sequence.history) or not self.may_hit(sequence):
            return False
        content = sequence.history[:end].tobytes()
        return any(
            other.shares_prefix
            and other.salt == sequence.salt
            and other.goal >= end
            and other.num_published <= num_hits
            and other.prefix_tip is not None
            and other.history[:end].tobytes() == content
            for other in writers
        )

    def publish(self, sequence: Sequence, num_computed: int) -> None:
        """writing -> readonly for each block that landed steps have filled, hashed if its content is new.

        num_computed: its leading tokens whose K/V such steps have written.
        """
        for index in range(sequence.num_published, num_computed // self._block_size):
            block = sequence.blocks[index]
            self._ledger.publish(block)
            sequence.num_published += 1
            if not sequence.shares_prefix or sequence.prefix_tip is None:
                continue
            start = index * self._block_size
            content = self._slots.tokens[sequence.slot, start : start + self._block_size].tobytes()
            digest = sequence.chain.digest(index, content)
            entry = self._ledger.prefix.enter(digest, sequence.prefix_tip, content, sequence.salt, block)
            sequence.prefix_tip = entry.prefix_id if entry is not None else None
