"""How a sequence leaves its slot and blocks: preempted, parked while its reader stalls, or for good."""

from aserve.core.actions import Action, Finish, NoteRequeue
from aserve.core.prefix import ROOT
from aserve.core.request import FinishReason
from aserve.core.sequence import Sequence
from aserve.core.state import State, slot_of
from aserve.core.transitions import SequenceMove, SequenceState


def preempt_last(state: State, now: float, actions: list[Action]) -> None:
    first = next(iter(state.ready), None)
    victim = state.ready.last_behind(first.order) if first is not None else None
    if victim is not None:
        preempt(state, victim, now, actions)


def preempt(state: State, sequence: Sequence, now: float, actions: list[Action]) -> None:
    sequence.num_preemptions += 1
    state.counters.num_preemptions += 1
    mark(state, sequence, now, actions)


def mark(state: State, sequence: Sequence, now: float, actions: list[Action]) -> None:
    """No more rows; its tokens in flight are kept, its slot and blocks go when its newest step has landed."""
    sequence.move(SequenceMove.MARK, state.story)
    state.slots.decoding[sequence.slot] = False
    if state.slots.last_step[sequence.slot] <= state.landed:
        _requeue(state, sequence, now, actions)
    else:
        state.marked.append(sequence)


def _requeue(state: State, sequence: Sequence, now: float, actions: list[Action]) -> None:
    """Back to its old place in the waiting queue, or aside while its reader stalls.

    Full blocks stay in the prefix cache, from which it takes them as hits when it resumes, unless somebody needed
    them meanwhile. So a parked sequence keeps what nobody misses, and ``max_num_seqs`` readers that never read
    cannot stop the others.
    """
    sequence.history = state.slots.history(slot_of(sequence))
    _vacate(state, sequence)
    if sequence.is_stalled:
        park(state, sequence)
    else:
        sequence.move(SequenceMove.REQUEUE, state.story)
        state.waiting.push(sequence)
        actions.append(NoteRequeue(sequence.id, now))


def park(state: State, sequence: Sequence) -> None:
    sequence.move(SequenceMove.PARK, state.story)
    state.parked[sequence.id] = sequence


def _vacate(state: State, sequence: Sequence) -> None:
    """Give back slot and blocks, behind the fence of its newest step."""
    state.ready.remove(sequence)
    slot = slot_of(sequence)
    sequence.last_step = state.slots.retire(slot, state.landed)
    state.leaves.append(slot)
    # From the last to the first, so that a cached prefix is evicted from its end.
    for block in reversed(sequence.blocks):
        state.ledger.release(block, sequence.last_step)
    sequence.slot = None
    sequence.blocks = []
    sequence.num_published = 0
    sequence.prefix_tip = ROOT
    sequence.join_due = False


def finish(
    state: State,
    sequence: Sequence,
    reason: FinishReason,
    actions: list[Action],
    stop_token: int | None = None,
    detail: str = "",
) -> None:
    """The one way to end: from any live state, once, giving everything back."""
    before = sequence.state
    sequence.move(SequenceMove.FINISH, state.story)
    if before is SequenceState.WAITING:
        state.waiting.remove(sequence)
    elif before is SequenceState.PARKED:
        del state.parked[sequence.id]
    else:
        if before is SequenceState.PREEMPTING:
            state.marked.remove(sequence)
        _vacate(state, sequence)
    actions.append(Finish(sequence.id, reason, stop_token, detail))
    if sequence.last_step <= state.landed:
        _release(state, sequence)
    else:
        state.done.push(sequence)


def _release(state: State, sequence: Sequence) -> None:
    sequence.move(SequenceMove.RELEASE, state.story)
    del state.sequences[sequence.id]


def let_go(state: State, now: float, actions: list[Action]) -> None:
    """After a landing: move on whom only it held back, the marked ones and those that are over."""
    for sequence in [s for s in state.marked if state.slots.last_step[s.slot] <= state.landed]:
        state.marked.remove(sequence)
        _requeue(state, sequence, now, actions)
    for sequence in state.done.pop_landed(state.landed):
        _release(state, sequence)
