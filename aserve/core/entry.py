"""From stage 2 to stage 3: waiting sequences get a slot and blocks."""

import itertools
from typing import Final

from aserve.core.actions import Action, StartPrefill
from aserve.core.ids import NO_SEQUENCE
from aserve.core.prefix import ROOT, PrefixEntry
from aserve.core.sequence import Sequence
from aserve.core.sharing import waits_for
from aserve.core.state import State
from aserve.core.transitions import SequenceMove

MAX_PREEMPTIONS: Final = 3
"""After so many preemptions a sequence is admitted only where it can run to its end."""


def admit(state: State, budget: int, now: float, actions: list[Action]) -> None:
    """Take sequences from the waiting queue while slots, blocks and this step's budget allow.

    The blocks that running rows want next stay theirs. Policy order, with three exceptions: one that waits for blocks
    that another is writing lets others pass; so does a long prompt while enough long ones prefill; and one too large
    for the blocks at hand, until it has been passed over for ``prefill_ageing_steps`` steps.
    """
    if not len(state.waiting) or not state.slots.num_free:
        return
    size = state.options.block_size
    writers = [sequence for sequence in state.ready if sequence.num_published < sequence.goal // size]
    lefts = [state.ready.num_prefill_left(sequence) for sequence in state.ready.prefilling()]
    budget -= sum(left for left in lefts if not state.ready.is_long(left))
    num_long = sum(state.ready.is_long(left) for left in lefts)
    kept = state.watermark + len(state.slots.starved())
    too_large: list[Sequence] = []
    # A bound on the scan: beyond it nothing could be admitted in this step anyway, but for a queue of waiters.
    for sequence in list(itertools.islice(state.waiting, 4 * state.options.max_num_seqs)):
        if budget <= 0 or not state.slots.num_free:
            break
        if waits_for(state.sequences.get(sequence.spec.leader or NO_SEQUENCE), sequence, size):
            continue
        hits = state.sharing.match(sequence)
        left = len(sequence.history) - len(hits) * size
        if state.sharing.is_being_written(sequence, len(hits), writers):
            continue
        if state.ready.is_long(left) and num_long >= state.options.max_long_partial_prefills:
            continue
        if not _fits(state, sequence, hits, kept):
            if sequence.num_passed_over >= state.options.prefill_ageing_steps:
                break
            too_large.append(sequence)
            continue
        _start(state, sequence, hits, now, actions)
        writers.append(sequence)
        num_long += state.ready.is_long(left)
        if not state.ready.is_long(left):
            budget -= left
        for other in too_large:
            other.num_passed_over += 1


def _num_blocks_to_start(state: State, sequence: Sequence) -> int:
    """Blocks for all its tokens and the next one, unless that one is never computed."""
    length = len(sequence.history)
    return _num_blocks(state, max(length, min(length + 1, sequence.max_length)))


def _num_blocks(state: State, num_tokens: int) -> int:
    return -(-num_tokens // state.options.block_size)


def _fits(state: State, sequence: Sequence, hits: list[PrefixEntry], kept: int) -> bool:
    """Whether there are blocks for it, and ``kept`` more for those that run."""
    # Hits that are cached count as available until they are taken.
    available = state.ledger.num_available - sum(state.ledger.is_evictable(entry.block) for entry in hits)
    needed = _num_blocks_to_start(state, sequence) - len(hits)
    if not len(state.ready):
        return needed <= available  # alone, it may have those that are kept too
    if sequence.num_preemptions >= MAX_PREEMPTIONS:
        needed = _num_blocks(state, sequence.max_length) - len(hits)
        needed += sum(_num_blocks(state, other.max_length) - len(other.blocks) for other in state.ready)
    return needed + kept <= available


def _start(state: State, sequence: Sequence, hits: list[PrefixEntry], now: float, actions: list[Action]) -> None:
    state.waiting.depart(sequence, now)
    sequence.move(SequenceMove.ADMIT, state.story)
    for entry in hits:
        state.ledger.acquire(entry.block)
    fresh = state.ledger.allocate(_num_blocks_to_start(state, sequence) - len(hits))
    assert fresh is not None, "admitted without the blocks that were counted"
    slot = state.slots.bind(sequence)
    num_cached = len(hits) * state.options.block_size
    sequence.slot = slot
    sequence.blocks = [entry.block for entry in hits] + fresh
    sequence.goal = len(sequence.history)
    sequence.num_published = len(hits)
    sequence.prefix_tip = hits[-1].prefix_id if hits else ROOT
    sequence.join_due = True
    sequence.num_passed_over = 0
    sequence.num_admissions += 1
    state.slots.position[slot] = num_cached
    state.slots.give_room(slot, len(sequence.blocks) * state.options.block_size)
    state.ready.push(sequence)
    if sequence.num_admissions == 1:
        state.counters.num_prompt_tokens += sequence.num_prompt
    state.counters.num_prefix_queries += sequence.goal
    state.counters.num_prefix_hits += num_cached
    actions.append(StartPrefill(sequence.id, num_cached, sequence.num_admissions > 1, now))
