"""A step is composed: decode rows first, then chunks of prompts, and newcomers for both.

With ``prefill = "mixed"`` a step holds both. Otherwise it holds one kind, and the kinds take turns while both are
wanted: rows first, and then whichever the newest step did not hold. So a running sequence waits for one step of chunks
between two tokens, a prompt for one step of rows between two chunks, and neither for more, however many come.

With ``"streams"`` the steps of either kind are on a stream of their own, and nothing orders a step of one behind one of
the other but its landing. So a sequence's first decode row is launched after its last chunk has landed. (Were it
launched before, with an event to wait for, all rows of that step would wait for the chunk with it.) A prefix hit takes
blocks that have landed by definition. Slots and blocks change hands behind the fence, which both streams have to pass;
a slot's leave waits for it too, and goes the way that the next join will come.
"""

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from aserve.core.actions import Action
from aserve.core.entry import admit
from aserve.core.ids import BlockId, Slot, StepNumber
from aserve.core.inflight import InflightStep
from aserve.core.leaving import preempt, preempt_last
from aserve.core.plan import MAIN_STREAM, PREFILL_STREAM, BatchPlan, Chunk, Join
from aserve.core.sequence import Sequence, by_order
from aserve.core.slots import Rows
from aserve.core.state import State, slot_of
from aserve.core.transitions import SequenceMove, SequenceState, SlotState

_EMPTY = np.empty(0, np.int32)
_NO_SLOTS = np.empty(0, np.intp)
_NO_WRITES = np.empty((0, 3), np.int32)


def compose(state: State, streams: Collection[int], now: float, actions: list[Action]) -> BatchPlan | None:
    """The next step's plan, which is in flight from here on; None if there is nothing to compute. Admits newcomers.

    streams: on which of them a step is due.
    """
    step = StepNumber(state.newest_step + 1)
    if state.options.force_preempt_every and step % state.options.force_preempt_every == 0:
        preempt_last(state, now, actions)
    table_writes: list[tuple[int, int, int]] = []
    rows, picked = _pick(state, streams, now, table_writes, actions)
    if not len(rows) and not picked:
        return None
    state.prefill_is_next = not picked

    decode_rows = _take_rows(state, rows, step)
    joins: list[Join] = []
    chunks = [_take_chunk(state, sequence, count, step, joins, table_writes) for sequence, count in picked]
    if last := [chunk.slot for chunk in chunks if chunk.last]:
        rows = state.slots.rows(np.concatenate((rows.slots, last)))
    positions = state.slots.position[rows.slots]
    leaves = _take_leaves(state, is_prefill=bool(picked))
    on_host = state.options.sampler == "host"
    plan = BatchPlan(
        step=step,
        stream=_stream_of(state, is_prefill=bool(picked)),
        leaves=np.array(leaves, np.int32) if leaves else _EMPTY,
        joins=tuple(joins),
        table_writes=np.array(table_writes, np.int32) if table_writes else _NO_WRITES,
        token_writes=_token_writes(state, decode_rows) if on_host else _NO_WRITES,
        rows=decode_rows,
        chunks=tuple(chunks),
        deferred=np.full(len(rows), True) if on_host else np.zeros(len(rows), np.bool_),
        logprobs_k=int(state.slots.logprobs_k[rows.slots].max(initial=-1)) if state.slots.num_with_logprobs else -1,
    )
    state.newest_step = step
    record = InflightStep(
        plan=plan,
        rows=rows,
        positions=positions,
        edges=(positions >= state.slots.room[rows.slots]).nonzero()[0].tolist(),
        chunks=[sequence for sequence, _ in picked],
    )
    if state.options.check_invariants_every:
        blocks = np.array(sorted({block for s in record.sequences() for block in s.blocks}), np.int64)
        record.reads = (blocks, state.ledger.generation[blocks])
    state.inflight.push(record)
    state.counters.num_steps += 1
    state.counters.num_rows += len(rows)
    state.counters.num_prefill_tokens += plan.num_tokens - len(decode_rows)
    return plan


def _stream_of(state: State, *, is_prefill: bool) -> int:
    return PREFILL_STREAM if is_prefill and state.options.prefill == "streams" else MAIN_STREAM


def _take_leaves(state: State, *, is_prefill: bool) -> list[Slot]:
    """Leaves for this step's plan; the others wait for a later one."""
    leaves, state.leaves = state.leaves, []
    if state.options.prefill != "streams":
        return leaves
    taken: list[Slot] = []
    for slot in leaves:
        is_free = is_prefill and state.slots.state[slot] is not SlotState.RETIRING
        (taken if is_free else state.leaves).append(slot)
    return taken


def _pick(
    state: State, streams: Collection[int], now: float, table_writes: list[tuple[int, int, int]], actions: list[Action]
) -> tuple[Rows, list[tuple[Sequence, int]]]:
    """The next step's decode rows, and prompt tokens: (sequence, count)."""
    budget = state.options.max_num_batched_tokens
    if state.options.prefill == "mixed":
        rows = _pick_rows(state, table_writes, now, actions)
        return rows, _pick_chunks(state, budget - len(rows), now, actions)
    for is_prefill in (state.prefill_is_next, not state.prefill_is_next):
        if _stream_of(state, is_prefill=is_prefill) not in streams:
            continue
        if not is_prefill and len(rows := _pick_rows(state, table_writes, now, actions)):
            return rows, []
        if is_prefill and (picked := _pick_chunks(state, budget, now, actions)):
            return state.slots.rows(_NO_SLOTS), picked
    return state.slots.rows(_NO_SLOTS), []


def _pick_rows(state: State, table_writes: list[tuple[int, int, int]], now: float, actions: list[Action]) -> Rows:
    """Decode rows of this step, each with a block for it; others sit out for want of one."""
    starved = state.ready.starved()
    if len(starved):
        _grow(state, starved, table_writes, now, actions)
    return state.ready.decode_rows()


def _grow(
    state: State,
    starved: NDArray[np.intp],
    table_writes: list[tuple[int, int, int]],
    now: float,
    actions: list[Action],
) -> None:
    """One more block for each starved slot, in policy order, while there are any."""
    sequences = sorted(state.slots.owner[starved].tolist(), key=by_order)
    enough = state.ledger.allocate(len(sequences))
    if enough is not None:  # as nearly always
        for sequence, block in zip(sequences, enough, strict=True):
            _add_block(state, sequence, block, table_writes)
        return
    num_sat_out = 0
    for sequence in sequences:
        if sequence.state is not SequenceState.DECODING:
            continue  # preempted for one ahead of it
        blocks = state.ledger.allocate(1)
        # Blocks that come anyway are waited for; only what they do not cover is taken from somebody behind.
        while blocks is None and _num_coming(state) <= num_sat_out:
            victim = state.ready.last_behind(sequence.order)
            if victim is None:
                break
            preempt(state, victim, now, actions)
            blocks = state.ledger.allocate(1)
        if blocks is None:
            num_sat_out += 1
        else:
            _add_block(state, sequence, blocks[0], table_writes)


def _add_block(state: State, sequence: Sequence, block: BlockId, table_writes: list[tuple[int, int, int]]) -> None:
    slot = slot_of(sequence)
    table_writes.append((slot, len(sequence.blocks), block))
    sequence.blocks.append(block)
    state.slots.give_room(slot, len(sequence.blocks) * state.options.block_size)


def _num_coming(state: State) -> int:
    """Blocks that landings will bring: fenced ones, and those that only a marked victim still holds."""
    held = sum(state.ledger.references(block) <= 1 for victim in state.marked for block in victim.blocks)
    return state.ledger.num_coming + held


def _pick_chunks(state: State, budget: int, now: float, actions: list[Action]) -> list[tuple[Sequence, int]]:
    """Prompt tokens for this step, newcomers' too: (sequence, count), never more than ``budget`` in all."""
    admit(state, budget, now, actions)
    picked: list[tuple[Sequence, int]] = []
    for sequence in state.ready.prefill_order():
        if budget <= 0:
            sequence.num_passed_over += 1
            continue
        count = min(state.ready.num_prefill_left(sequence), budget)
        sequence.num_passed_over = 0
        picked.append((sequence, count))
        budget -= count
    return picked


def _take_rows(state: State, rows: Rows, step: StepNumber) -> NDArray[np.int32]:
    """As in the plan: int32 [n, 2] of (slot, position)."""
    book, slots = state.slots, rows.slots
    taken = np.empty((len(rows), 2), np.int32)
    taken[:, 0] = slots
    taken[:, 1] = positions = book.position[slots]
    book.position[slots] = positions + 1
    book.last_step[slots] = step
    return taken


def _token_writes(state: State, decode_rows: NDArray[np.int32]) -> NDArray[np.int32]:
    slots, positions = decode_rows.T
    return np.column_stack((decode_rows, state.slots.tokens[slots, positions]))


def _take_chunk(
    state: State,
    sequence: Sequence,
    count: int,
    step: StepNumber,
    joins: list[Join],
    table_writes: list[tuple[int, int, int]],
) -> Chunk:
    book, slot, params = state.slots, slot_of(sequence), sequence.spec.params
    start = int(book.position[slot])
    end = start + count
    if sequence.join_due:
        sequence.join_due = False
        joins.append(
            Join(
                slot=slot,
                epoch=book.epoch_of(slot),
                position=start,
                params=params,
                seed=sequence.spec.seed,
                stop_ids=params.stop_token_ids,
                min_length=sequence.num_prompt + params.min_tokens,
                max_length=sequence.max_length,
                num_prompt_tokens=sequence.num_prompt,
                history=sequence.history if params.needs_history else _EMPTY,
            )
        )
        table_writes += [(slot, index, block) for index, block in enumerate(sequence.blocks)]
    last = end == sequence.goal
    wants_logprobs = params.prompt_logprobs is not None and sequence.num_prompt_logprobs < sequence.num_prompt - 1
    book.position[slot] = end
    book.last_step[slot] = step
    if last:
        sequence.move(SequenceMove.PREFILL_LAUNCHED, state.story)
        book.decoding[slot] = state.options.prefill != "streams"
    return Chunk(
        slot=slot,
        start=start,
        tokens=sequence.history[start:end],
        last=last,
        prompt_logprobs_k=params.prompt_logprobs if wants_logprobs else None,
        next_token=-1 if last else int(sequence.history[end]),
    )
