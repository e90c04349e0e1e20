"""When the next step is launched. Sees launches, landings and alarms only, never what a step costs.

``sync``, ``overlap`` and ``eager`` keep so many steps out, whatever they take. ``late`` composes a step when what the
device has left to do falls to the time that launching takes: whoever arrives before that is in the step.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from aserve.core.ids import StepNumber
from aserve.core.options import SchedulerOptions
from aserve.core.plan import BatchPlan
from aserve.core.prediction import RecentValues, StepShape, StepTimePredictor, shape_of

OVERLAP_DEPTH: Final = 2
"""One step running and one queued behind it hide all steady host work; deeper added nothing without jitter."""

LATENESS_SHARE: Final = 0.95
COST_SHARE: Final = 0.9
EARLY_SHARE: Final = 0.75
"""Quantiles that a launch is in time for: of how late the loop wakes up, of what a launch costs, and of how much
sooner than predicted a step ends. On virtual devices, more of the first made short steps on a busy loop wait behind
each other, and idle no less; more of the last was better nowhere, and worse where steps vary by 30 %."""

WINDOW: Final = 128
"""Alarms, launches and landings that they are taken from."""

PROBED_LAUNCHES: Final = 16
"""Launches without an alarm after which one is set only to measure how late it is."""

PAUSE_S: Final = 1e-4
"""After so long with neither a launch nor a landing the loop has looked around: what it sees then is new."""

BELIEVED: Final = 1 / 4
"""Of what a landing came later than predicted, where a busy loop may be the reason."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """As in ``actions.Launch``: work of the device before the step, and what the step takes."""

    lead_s: float
    predicted_s: float | None


class Policy(Protocol):
    """Of one stream. Told of each of its steps in order: composed, then launched or lost, then landed. Times are the
    engine's clock."""

    def due_s(self, now: float) -> float:
        """When the next step may be composed: at once where that is not after ``now``, not before a landing if inf."""
        ...

    def composed(self, plan: BatchPlan, now: float) -> Forecast | None:
        """A step leaves for the device. None where nothing is known of what is before it."""
        ...

    def launched(self, step: StepNumber, now: float) -> float | None:
        """``Runner.launch`` has returned. When the policy wants to be woken, to learn how late that is; or None."""
        ...

    def lost(self, step: StepNumber) -> None:
        """It never reached the device, and lands in its turn."""
        ...

    def landed(self, step: StepNumber, now: float, *, failed: bool) -> None: ...

    def woken(self, asked_s: float, now: float) -> None:
        """An alarm rang, this policy's or another's."""
        ...

    def statistics(self) -> dict[str, float]:
        """Plain figures for ``/v1/stats``."""
        ...


class FixedDepth:
    """Whenever fewer than ``depth`` steps are out."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._num_out = 0

    def due_s(self, now: float) -> float:
        return -math.inf if self._num_out < self._depth else math.inf

    def composed(self, plan: BatchPlan, now: float) -> None:
        self._num_out += 1

    def launched(self, step: StepNumber, now: float) -> None: ...

    def lost(self, step: StepNumber) -> None: ...

    def landed(self, step: StepNumber, now: float, *, failed: bool) -> None:
        self._num_out -= 1

    def woken(self, asked_s: float, now: float) -> None: ...

    def statistics(self) -> dict[str, float]:
        return {}


@dataclass(slots=True, eq=False)
class _Step:
    """One that is out. shape: None where it never reached the device. launched_s: until it is known, when composed.

    model: the predictor's ``num_resets`` when the prediction was made.
    """

    number: StepNumber
    shape: StepShape | None
    predicted_s: float | None
    launched_s: float
    model: int


@dataclass(frozen=True, slots=True)
class _Work:
    """What is out: when the oldest step ends, what those behind it take, and what all take. Predicted."""

    oldest_end_s: float = -math.inf
    behind_s: float = 0.0
    total_s: float = 0.0

    def left_s(self, now: float) -> float:
        """Of an oldest step that is overdue nothing is left, as far as anybody can tell."""
        return max(self.oldest_end_s - now, 0.0) + self.behind_s


class Late:
    """At once while nothing is out. Else when the predicted work left falls to the lead: what a launch costs, how late
    the loop wakes up at worst, how much sooner than predicted the work may end, and a margin for what nobody can see.

    So a long step has none behind it until its very end, and a short one has the next at once, as in ``overlap``; so
    too where a step that is out has no prediction. An alarm is for the end of a step that is out alone; behind more,
    landings come soon enough to ask again, and an alarm a step would be dearer than what it saves.

    A step's time on the device is taken from its launch, or the end before it, to its end. Its landing is seen no
    earlier than that, and later where the loop is busy or wakes up late: of such a delay a part is believed, so that
    ends follow the lower edge of what is seen. Where steps are too short for alarms, one is set now and then all the
    same, lest the lateness of one bad moment count for ever.
    """

    def __init__(self, max_inflight: int, margin_s: float) -> None:
        self._max_inflight = max_inflight
        self._margin_s = margin_s
        self._steps: deque[_Step] = deque()
        self._free_s = -math.inf  # when the device was done with what has landed
        self._predictor = StepTimePredictor()
        self._lateness_s = RecentValues(WINDOW)
        self._costs_s = RecentValues(WINDOW)
        self._early = RecentValues(WINDOW)  # (predicted - taken) / predicted
        self._num_unmeasured = 0  # launches since an alarm rang
        self._busy_since_s = self._busy_until_s = -math.inf  # with launches and landings, one right after the other

    def due_s(self, now: float) -> float:
        if not self._steps:
            return -math.inf
        if len(self._steps) >= self._max_inflight:
            return math.inf
        work = self._work()
        if work is None:
            return -math.inf if len(self._steps) < OVERLAP_DEPTH else math.inf
        lead_s = self._lead_s(work)
        if work.left_s(now) <= lead_s:
            return -math.inf
        return work.oldest_end_s - lead_s if len(self._steps) == 1 else math.inf

    def _work(self) -> _Work | None:
        """None if any step has no prediction."""
        total_s = 0.0
        for step in self._steps:
            if step.predicted_s is None:
                return None
            total_s += step.predicted_s
        if not self._steps:
            return _Work()
        oldest = self._steps[0]
        oldest_s = oldest.predicted_s or 0.0
        return _Work(max(oldest.launched_s, self._free_s) + oldest_s, total_s - oldest_s, total_s)

    def _lead_s(self, work: _Work) -> float:
        return (
            self._costs_s.quantile(COST_SHARE)
            + self._lateness_s.quantile(LATENESS_SHARE)
            + max(self._early.quantile(EARLY_SHARE), 0.0) * work.total_s
            + self._margin_s
        )

    def composed(self, plan: BatchPlan, now: float) -> Forecast | None:
        self._go_on(now)
        work = self._work()
        shape = shape_of(plan)
        predicted_s = self._predictor.predict(shape)
        self._steps.append(_Step(plan.step, shape, predicted_s, now, self._predictor.num_resets))
        if work is None:
            return None
        return Forecast(work.left_s(now), predicted_s)

    def launched(self, step: StepNumber, now: float) -> float | None:
        newest = self._steps[-1]
        assert newest.number == step, f"step {step} was launched, step {newest.number} was composed"
        self._costs_s.add(now - newest.launched_s)
        newest.launched_s = self._busy_until_s = now
        if self._max_inflight == 1:
            return None  # nothing is ever launched by an alarm
        self._num_unmeasured += 1
        work = self._work() if self._num_unmeasured >= PROBED_LAUNCHES else None
        if work is None:
            return None
        if work.oldest_end_s <= now:
            return None
        self._num_unmeasured = 0
        # When an alarm would matter: right after a landing the loop is busier than it is before the next one.
        launch_s = self._costs_s.quantile(COST_SHARE) + self._margin_s
        return max(work.oldest_end_s - launch_s, (now + work.oldest_end_s) / 2)

    def lost(self, step: StepNumber) -> None:
        newest = self._steps[-1]
        assert newest.number == step, f"step {step} was lost, step {newest.number} was composed"
        newest.shape, newest.predicted_s = None, 0.0

    def landed(self, step: StepNumber, now: float, *, failed: bool) -> None:
        oldest = self._steps.popleft()
        assert oldest.number == step, f"step {step} landed before step {oldest.number}"
        started_s = max(oldest.launched_s, self._free_s)
        self._go_on(now)
        if oldest.predicted_s is not None and self._busy_since_s < started_s + oldest.predicted_s < now:
            self._free_s = started_s + oldest.predicted_s
            return  # it has ended, and when can only be guessed
        self._free_s = max(self._ended_s(started_s, oldest.predicted_s, now), started_s)
        taken_s = self._free_s - started_s
        if failed or oldest.shape is None or taken_s <= 0.0:
            return
        if oldest.predicted_s:
            self._early.add(1.0 - taken_s / oldest.predicted_s)
        is_forgotten = oldest.model != self._predictor.num_resets
        self._predictor.learn(oldest.shape, taken_s, None if is_forgotten else oldest.predicted_s)

    def _go_on(self, now: float) -> None:
        """What the loop did until ``now`` came right after what it did before, or after a time without steps."""
        if now - self._busy_until_s > PAUSE_S:
            self._busy_since_s = now
        self._busy_until_s = now

    def _ended_s(self, started_s: float, predicted_s: float | None, seen_s: float) -> float:
        """When a step ended whose landing was seen at ``seen_s``."""
        if predicted_s is None:
            return seen_s
        delay_s = seen_s - started_s - predicted_s
        is_usual = 0.0 < delay_s <= self._lateness_s.quantile(LATENESS_SHARE)
        return seen_s - (1.0 - BELIEVED) * delay_s if is_usual else seen_s

    def woken(self, asked_s: float, now: float) -> None:
        self._lateness_s.add(max(now - asked_s, 0.0))
        self._num_unmeasured = 0

    def statistics(self) -> dict[str, float]:
        return {
            "launch_cost_ms_p90": self._costs_s.quantile(COST_SHARE) * 1000,
            "lateness_ms_p95": self._lateness_s.quantile(LATENESS_SHARE) * 1000,
            "early_share_p75": self._early.quantile(EARLY_SHARE),
            "prediction_error_p50": self._predictor.error(0.5),
            "prediction_error_p99": self._predictor.error(0.99),
        }


POLICIES: Final[dict[str, Callable[[int, SchedulerOptions], Policy]]] = {
    # After each landing: the host works while the device idles. The baseline, and what the others are held against.
    "sync": lambda max_inflight, options: FixedDepth(1),
    "overlap": lambda max_inflight, options: FixedDepth(min(OVERLAP_DEPTH, max_inflight)),
    # Whenever there is a permit. Fragments batches; for tests of depth and for the laboratory.
    "eager": lambda max_inflight, options: FixedDepth(max_inflight),
    # As deep as overlap: four steps of 256 rows out made a busy loop's lateness longer still, and rows of newcomers
    # scatter over them (one H200, 1B: 44,000 tokens/s where overlap had 71,000).
    "late": lambda max_inflight, options: Late(min(OVERLAP_DEPTH, max_inflight), options.late_margin_ms / 1000),
}
"""(most steps out on the stream, the options) -> the stream's policy."""
