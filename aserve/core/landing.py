"""A step lands, or fails: what it brought is committed, delivered, and whoever it ended is finished.

What a step brought counts as soon as it lands. What it held back, blocks and slots behind their fences, goes when every
step before it has landed too, on any stream.
"""

from bisect import bisect_left
from itertools import compress

from aserve.core.actions import Action, DeliverPromptLogprobs, DeliverTokens, Finish
from aserve.core.ids import StepNumber
from aserve.core.inflight import InflightStep
from aserve.core.invariants import check, check_reads
from aserve.core.leaving import finish, let_go
from aserve.core.plan import BatchResult, Chunk, Logprobs
from aserve.core.request import FinishReason
from aserve.core.sequence import Sequence
from aserve.core.state import State
from aserve.core.transitions import SequenceState
from aserve.core.verdicts import judge, may_end


def land(state: State, result: BatchResult, now: float, actions: list[Action]) -> None:
    """Commit what the oldest step in flight of a stream brought."""
    step = _pop_landed(state, result.step)
    for index, logprobs in result.prompt_logprobs:
        _deliver_prompt_logprobs(state, step.chunks[index], step.plan.chunks[index], logprobs, actions)
    for sequence, chunk in zip(step.chunks, step.plan.chunks, strict=True):
        if not sequence.is_over:
            state.sharing.publish(sequence, chunk.start + len(chunk.tokens))
            if chunk.last and sequence.state is SequenceState.DECODING:
                state.slots.decoding[chunk.slot] = True
    for end in _accept_tokens(state, step, result, actions):
        finish(state, state.sequences[end.sequence], end.reason, actions, end.stop_token, end.detail)
    _after_landing(state, now, actions)


def land_failed(state: State, number: StepNumber, detail: str, now: float, actions: list[Action]) -> None:
    """The step takes its place in the order of landings; whoever it lists ends in ERROR."""
    step = _pop_landed(state, number)
    state.counters.num_failed_steps += 1
    if not step.lost:
        fail(state, step, detail, actions)
    _after_landing(state, now, actions)


def fail(state: State, step: InflightStep, detail: str, actions: list[Action]) -> None:
    """End every sequence that the step lists in ERROR."""
    for sequence in step.sequences():
        if not sequence.is_over:
            finish(state, sequence, FinishReason.ERROR, actions, detail=detail)


def _pop_landed(state: State, number: StepNumber) -> InflightStep:
    step = state.inflight.pop(number)
    if step.reads is not None:
        check_reads(state, step)
    landed = state.inflight.landed
    state.ledger.advance(landed)
    state.slots.advance(landed)
    return step


def _after_landing(state: State, now: float, actions: list[Action]) -> None:
    let_go(state, now, actions)
    every = state.options.check_invariants_every
    if every and (state.landed % every == 0 or state.is_idle):
        check(state)


def _accept_tokens(state: State, step: InflightStep, result: BatchResult, actions: list[Action]) -> list[Finish]:
    """Commit one token a row, skipping rows whose sequence is over. Returns who ended, by the one rule there is."""
    if not len(step.rows):
        return []
    book, slots, positions, tokens = state.slots, step.rows.slots, step.positions, result.tokens[:, 0]
    # Lists, since a numpy scalar costs more to look at than all else that most rows need.
    rows, idents = list(range(len(slots))), step.rows.idents.copy()
    values, flags = tokens.tolist(), result.flags.tolist()
    kept = [True] * len(rows) if step.rows.is_fresh else step.rows.owned().tolist()
    state.counters.num_wasted_rows += kept.count(False)

    ends: list[Finish] = []
    for row in sorted({*step.edges, *may_end(values, flags, book.stop_ids.keys(), state.vocab_size)}):
        if not kept[row]:
            continue
        sequence, position = book.owner[slots[row]], int(positions[row])
        end = judge(sequence, position, values[row], flags[row], state.vocab_size)
        if end is not None:
            ends.append(end)
            kept[row] = end.reason is not FinishReason.ERROR and sequence.spec.params.max_tokens > 0
        if kept[row]:
            state.sharing.publish(sequence, position)
    if not all(kept):
        rows, idents, values = (list(compress(column, kept)) for column in (rows, idents, values))
        slots, positions, tokens = slots[kept], positions[kept], tokens[kept]
    if not rows:
        return ends
    book.length[slots] = positions + 1
    book.tokens[slots, positions] = tokens
    state.counters.num_generated_tokens += len(rows)
    num_decoded = bisect_left(rows, len(step.plan.rows))
    actions.append(DeliverTokens(result.step, idents, values, rows, num_decoded, result.logprobs))
    return ends


def _deliver_prompt_logprobs(
    state: State, sequence: Sequence, chunk: Chunk, logprobs: Logprobs, actions: list[Action]
) -> None:
    """Only what was not delivered before (a preempted prompt is computed again), and nothing beyond the prompt."""
    first = chunk.start + 1
    skip = max(0, sequence.num_prompt_logprobs + 1 - first)
    count = min(len(logprobs.token_logprobs), sequence.num_prompt - first)
    if sequence.is_over or skip >= count:
        return
    part = Logprobs(
        token_logprobs=logprobs.token_logprobs[skip:count],
        ranks=logprobs.ranks[skip:count],
        top_ids=logprobs.top_ids[skip:count],
        top_logprobs=logprobs.top_logprobs[skip:count],
    )
    sequence.num_prompt_logprobs = first + count - 1
    actions.append(DeliverPromptLogprobs(sequence.id, first + skip, part))
