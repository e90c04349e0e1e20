"""The scheduler: one event in, actions out, and the only writer of core state, through the stages that it calls.

It never awaits, reads a clock or touches a tensor; the engine feeds it events and carries out what it returns. Two
moments matter: ``LaunchPossible`` composes a step (``composing``: rows, chunks, admissions, preemptions), and a landing
commits what the oldest step in flight brought (``landing``).
"""

from collections.abc import Callable
from typing import Any

from aserve.core import events
from aserve.core.actions import Action, Launch, LaunchReason
from aserve.core.composing import compose
from aserve.core.ids import Slot
from aserve.core.landing import fail, land, land_failed
from aserve.core.leaving import finish, mark, park
from aserve.core.options import SchedulerOptions
from aserve.core.plan import MAIN_STREAM
from aserve.core.policy import POLICIES
from aserve.core.prefix import DigestChain
from aserve.core.request import FinishReason, SequenceSpec
from aserve.core.sequence import Sequence
from aserve.core.state import State
from aserve.core.transitions import SequenceMove, SequenceState


class Scheduler(State):
    """The state and its events. Identity: compare with ``is``.

    Raises IllegalTransition or AssertionError only on a fault of ours; what clients do is answered by actions.
    """

    def __init__(self, options: SchedulerOptions, *, num_blocks: int, max_model_len: int, vocab_size: int) -> None:
        super().__init__(options, num_blocks=num_blocks, max_model_len=max_model_len, vocab_size=vocab_size)
        self._is_due = POLICIES[options.policy]
        self._handlers: dict[type, Callable[[Any, float, list[Action]], None]] = {
            events.SequenceSubmitted: self._on_submitted,
            events.SequenceEnded: self._on_ended,
            events.StopMatched: self._on_stop_matched,
            events.ReaderStalled: self._on_reader_stalled,
            events.ReaderCaughtUp: self._on_reader_caught_up,
            events.LaunchPossible: self._on_launch_possible,
            events.StepLaunched: self._on_step_launched,
            events.AlarmRang: self._on_alarm_rang,
            events.LaunchFailed: self._on_launch_failed,
            events.StepLanded: self._on_step_landed,
            events.StepFailed: self._on_step_failed,
            events.CacheFlushed: self._on_cache_flushed,
        }

    def handle(self, event: events.Event, now: float) -> list[Action]:
        """Apply one event. ``now`` is the engine's clock in seconds. The actions are to be carried out in order."""
        actions: list[Action] = []
        self._handlers[type(event)](event, now, actions)
        return actions

    # --- looking

    def num_uncached(self, spec: SequenceSpec) -> int:
        """Prompt tokens that the prefix cache does not hold just now. Changes nothing."""
        return self._num_uncached(self._new_sequence(spec))

    def _num_uncached(self, sequence: Sequence) -> int:
        return sequence.num_prompt - len(self.sharing.match(sequence)) * self.options.block_size

    # --- arrivals and ends from outside

    def _new_sequence(self, spec: SequenceSpec) -> Sequence:
        is_public = self.options.enable_prefix_caching
        salt = spec.cache_salt if is_public else f"group of {spec.leader or spec.id}"
        return Sequence(
            spec=spec,
            order=(spec.priority if self.options.queue_order == "priority" else 0, spec.id),
            chain=DigestChain(salt),
            salt=salt,
            shares_prefix=is_public or spec.leads or spec.leader is not None,
        )

    def _on_submitted(self, event: events.SequenceSubmitted, now: float, actions: list[Action]) -> None:
        spec = event.spec
        assert spec.id not in self.sequences, f"sequence {spec.id} was submitted twice"
        sequence = self._new_sequence(spec)
        sequence.num_uncached_at_door = self._num_uncached(sequence)
        self.sequences[spec.id] = sequence
        self.waiting.push(sequence)

    def _on_ended(self, event: events.SequenceEnded, now: float, actions: list[Action]) -> None:
        sequence = self.sequences.get(event.sequence)
        if sequence is not None and not sequence.is_over:
            finish(self, sequence, event.reason, actions, detail=event.detail)

    def _on_stop_matched(self, event: events.StopMatched, now: float, actions: list[Action]) -> None:
        sequence = self.sequences.get(event.sequence)
        if sequence is not None and not sequence.is_over:
            self.counters.num_wasted_rows += len(sequence.output) - 1 - event.token_index
            finish(self, sequence, FinishReason.STOP, actions)

    def _on_reader_stalled(self, event: events.ReaderStalled, now: float, actions: list[Action]) -> None:
        sequence = self.sequences.get(event.sequence)
        if sequence is None or sequence.is_over or sequence.is_stalled:
            return
        sequence.is_stalled = True
        if sequence.state is SequenceState.WAITING:
            self.waiting.remove(sequence)
            park(self, sequence)
        elif sequence.state is not SequenceState.PREEMPTING:
            mark(self, sequence)

    def _on_reader_caught_up(self, event: events.ReaderCaughtUp, now: float, actions: list[Action]) -> None:
        sequence = self.sequences.get(event.sequence)
        if sequence is None or sequence.is_over:
            return
        sequence.is_stalled = False
        if sequence.state is SequenceState.PARKED:
            sequence.move(SequenceMove.UNPARK, self.story)
            del self.parked[sequence.id]
            self.waiting.push(sequence)

    def _on_cache_flushed(self, event: events.CacheFlushed, now: float, actions: list[Action]) -> None:
        self.ledger.flush()

    # --- steps

    def _on_launch_possible(self, event: events.LaunchPossible, now: float, actions: list[Action]) -> None:
        streams = [stream for stream in self.streams if self._is_due_on(stream)]
        if streams:
            reason: LaunchReason = "landing" if event.has_landed else "depth" if len(self.inflight) else "idle"
            plan = compose(self, streams, now, actions)
            if plan is not None:
                actions.append(Launch(plan, reason))

    def _is_due_on(self, stream: int) -> bool:
        """Whether the policy, which sees the steps of one stream, wants another one there. Streams share the permits
        evenly, and both want the only one there may be."""
        most = self.options.max_inflight
        share = most if len(self.streams) == 1 else max(1, (most + (stream == MAIN_STREAM)) // 2)
        return len(self.inflight) < most and self._is_due(self.inflight.num_on(stream), share)

    def _on_step_launched(self, event: events.StepLaunched, now: float, actions: list[Action]) -> None: ...

    def _on_alarm_rang(self, event: events.AlarmRang, now: float, actions: list[Action]) -> None: ...

    def _on_step_landed(self, event: events.StepLanded, now: float, actions: list[Action]) -> None:
        land(self, event.result, actions)

    def _on_step_failed(self, event: events.StepFailed, now: float, actions: list[Action]) -> None:
        land_failed(self, event.step, event.detail, actions)

    def _on_launch_failed(self, event: events.LaunchFailed, now: float, actions: list[Action]) -> None:
        # The device never saw the plan: not its joins and tables (their sequences end here), and not its leaves.
        step = self.inflight.get(event.step)
        step.lost = True
        self.leaves += [Slot(slot) for slot in step.plan.leaves.tolist()]
        fail(self, step, event.detail, actions)
