"""The scheduler: one event in, actions out, and the only writer of core state, through the stages that it calls.

It never awaits, reads a clock or touches a tensor; the engine feeds it events and carries out what it returns. Two
moments matter: ``LaunchPossible`` composes a step (``composing``: rows, chunks, admissions, preemptions), and a landing
commits what the oldest step in flight brought (``landing``).
"""

import math
from collections.abc import Callable
from typing import Any, Final

from aserve.core import events
from aserve.core.actions import Action, Launch, LaunchReason, WakeAt
from aserve.core.composing import compose
from aserve.core.ids import Slot, StepNumber
from aserve.core.landing import fail, land, land_failed
from aserve.core.leaving import finish, mark, park
from aserve.core.options import SchedulerOptions
from aserve.core.plan import MAIN_STREAM, BatchPlan
from aserve.core.policy import POLICIES, Forecast
from aserve.core.prefix import DigestChain
from aserve.core.request import FinishReason, SequenceSpec
from aserve.core.sequence import Sequence
from aserve.core.state import State
from aserve.core.transitions import SequenceMove, SequenceState

PUNCTUAL_S: Final = 20e-6
"""A step that is due so soon is composed now: an alarm takes longer."""


class Scheduler(State):
    """The state and its events. Identity: compare with ``is``.

    Raises IllegalTransition or AssertionError only on a fault of ours; what clients do is answered by actions.
    """

    def __init__(self, options: SchedulerOptions, *, num_blocks: int, max_model_len: int, vocab_size: int) -> None:
        super().__init__(options, num_blocks=num_blocks, max_model_len=max_model_len, vocab_size=vocab_size)
        make_policy = POLICIES[self.options.policy]
        self.policies = {stream: make_policy(self._share(stream), self.options) for stream in self.streams}
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
            num_output = self.length_of(sequence) - sequence.num_prompt
            self.counters.num_wasted_rows += num_output - 1 - event.token_index
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
            mark(self, sequence, now, actions)

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

    def _share(self, stream: int) -> int:
        """Most steps out on the stream. Streams share the permits evenly, and both want the only one there may be."""
        most = self.options.max_inflight
        return most if len(self.streams) == 1 else max(1, (most + (stream == MAIN_STREAM)) // 2)

    def _on_launch_possible(self, event: events.LaunchPossible, now: float, actions: list[Action]) -> None:
        if len(self.inflight) == self.options.max_inflight:
            return
        due, wake_s = [], math.inf
        for stream, policy in self.policies.items():
            due_s = policy.due_s(now)
            if due_s <= now + PUNCTUAL_S:
                due.append(stream)
            else:
                wake_s = min(wake_s, due_s)
        if due:
            plan = compose(self, due, now, actions)
            if plan is not None:
                forecast = self.policies[plan.stream].composed(plan, now)
                num_before = self.inflight.num_on(plan.stream) - 1
                actions.append(_launch(plan, forecast, num_before, has_landed=event.has_landed))
                return
        if wake_s < math.inf:
            actions.append(WakeAt(wake_s))

    def _on_step_launched(self, event: events.StepLaunched, now: float, actions: list[Action]) -> None:
        wake_s = self.policies[self.inflight.get(event.step).plan.stream].launched(event.step, now)
        if wake_s is not None:
            actions.append(WakeAt(wake_s))

    def _on_alarm_rang(self, event: events.AlarmRang, now: float, actions: list[Action]) -> None:
        for policy in self.policies.values():
            policy.woken(event.asked_s, now)

    def _on_step_landed(self, event: events.StepLanded, now: float, actions: list[Action]) -> None:
        self._tell_landed(event.result.step, now, failed=False)
        land(self, event.result, now, actions)

    def _on_step_failed(self, event: events.StepFailed, now: float, actions: list[Action]) -> None:
        self._tell_landed(event.step, now, failed=True)
        land_failed(self, event.step, event.detail, now, actions)

    def _tell_landed(self, step: StepNumber, now: float, *, failed: bool) -> None:
        self.policies[self.inflight.get(step).plan.stream].landed(step, now, failed=failed)

    def _on_launch_failed(self, event: events.LaunchFailed, now: float, actions: list[Action]) -> None:
        # The device never saw the plan: not its joins and tables (their sequences end here), and not its leaves.
        step = self.inflight.get(event.step)
        step.lost = True
        self.policies[step.plan.stream].lost(event.step)
        self.leaves += [Slot(slot) for slot in step.plan.leaves.tolist()]
        fail(self, step, event.detail, actions)


def _launch(plan: BatchPlan, forecast: Forecast | None, num_before: int, *, has_landed: bool) -> Launch:
    """num_before: steps out on its stream."""
    if forecast is None or not num_before:
        reason: LaunchReason = "landing" if has_landed else "depth" if num_before else "idle"
    else:
        reason = "lead"
    if forecast is None:
        return Launch(plan, reason)
    return Launch(plan, reason, forecast.lead_s, forecast.predicted_s)
