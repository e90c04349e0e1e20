"""A step lands, or fails: what it brought is committed, delivered, and whoever it ended is finished.

What a step brought counts as soon as it lands. What it held back, blocks and slots behind their fences, goes when every
step before it has landed too, on any stream.
"""

from bisect import bisect_left

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
from aserve.core.verdicts import judge


def land(state: State, result: BatchResult, now: float, actions: list[Action]) -> None:
    """Commit what the oldest step in flight of a stream brought."""
    step = _pop_landed(state, result.step)
    for index, logprobs in result.prompt_logprobs:
        _deliver_prompt_logprobs(state, step.chunks[index], step.plan.chunks[index], logprobs, actions)
    for sequence, chunk in zip(step.chunks, step.plan.chunks, strict=True):
        if not sequence.is_over:
            state.slots.num_computed[chunk.slot] = chunk.start + len(chunk.tokens)
            state.sharing.publish(sequence)
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
    state.ledger.advance(state.inflight.landed)
    state.slots.advance(state.inflight.landed)
    return step


def _after_landing(state: State, now: float, actions: list[Action]) -> None:
    let_go(state, now, actions)
    every = state.options.check_invariants_every
    if every and (state.landed % every == 0 or state.is_idle):
        check(state)


def _accept_tokens(state: State, step: InflightStep, result: BatchResult, actions: list[Action]) -> list[Finish]:
    """Commit one token a row, skipping rows whose sequence is over. Returns who ended, by the one rule there is."""
    book, slots, tokens = state.slots, step.row_slots, result.tokens[:, 0]
    alive = book.live[slots] & (book.epoch[slots] == step.row_epochs)
    book.num_unlanded[slots[alive]] -= 1
    decode = alive[: len(step.plan.rows)]
    book.num_computed[step.plan.rows[decode, 0]] = step.plan.rows[decode, 1] + 1
    verdicts = judge(book, slots, result, state.vocab_size)
    state.counters.num_wasted_rows += len(slots) - int(alive.sum())

    ends: list[Finish] = []
    # nonzero, not flatnonzero, whose wrappers cost eight times as much where there are few rows.
    for row in (alive & verdicts.is_last).nonzero()[0].tolist():
        sequence = step.rows[row]
        end = verdicts.finish(row, sequence, int(tokens[row]))
        ends.append(end)
        if end.reason is FinishReason.ERROR or not sequence.spec.params.max_tokens:
            alive[row] = False  # its token does not count
    accepted = alive.nonzero()[0]
    if not len(accepted):
        return ends
    slots, tokens = slots[accepted], tokens[accepted]
    book.length[slots] += 1
    book.last_token[slots] = tokens
    # Lists, since a numpy scalar costs more to look at than all else that most rows need.
    rows, values = accepted.tolist(), tokens.tolist()
    for row, token in zip(rows, values, strict=True):
        step.rows[row].output.append(token)
    for row in accepted[book.num_computed[slots] % state.options.block_size == 0].tolist():
        state.sharing.publish(step.rows[row])
    state.counters.num_generated_tokens += len(rows)
    num_decoded = bisect_left(rows, len(step.plan.rows))
    actions.append(DeliverTokens(result.step, book.ident[slots].tolist(), values, rows, num_decoded, result.logprobs))
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
