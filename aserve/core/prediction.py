"""How long the device takes for a step, learnt online from steps alone, by what is in them.

Two estimators, each robust where the other is not. A line through all shapes, by recursive least squares with
restricted forgetting (Kulhavy, Restricted exponential forgetting in real-time identification, Automatica 23, 1987):
what steps have shown lately replaces what they showed before, and what they do not show is kept. It says what a new
shape takes, and by its own variance whether it can say so at all. Then, for each neighbourhood of shapes, the median of
what the last few steps there took beside the line: the device's stairs (graphs by size, tiles) and any change of pace,
after a few steps of the new one. Outliers are cut to a few spreads before the line sees them (Huber, Robust Estimation
of a Location Parameter, 1964), and do not move a median.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import mul
from typing import Final

from aserve.core.plan import BatchPlan

KEPT: Final = 0.97
"""Weight of the past at each step, in the directions that the step shows: a memory of some 33 steps."""
NOISE: Final = 0.05
"""Spread of step times around what is true, as a share, that variances are counted in."""
UNSURE: Final = 0.25
"""A predicted spread, as a share of the step, from which on nothing is predicted."""
FIRST_STEPS: Final = 4
"""Steps before anything is predicted: one of them, often the first, is odd."""
CUT: Final = 3.0
"""Spreads beyond which an error is cut."""
SPREAD_GAIN: Final = 1 / 16
SPREAD_MIN: Final = 0.01
LOCAL_STEPS: Final = 7
"""Steps of a neighbourhood whose median counts. Two that agree with the line are assumed until there are so many."""
WINDOW: Final = 256
"""Errors that the report looks back on."""

KNOWN_STEPS: Final = 3
"""Steps of a neighbourhood that outweigh those two."""
STREAK: Final = 3
"""Cut errors in a row, all on one side, after which the device is another one, and everything is learnt anew, in
``FIRST_STEPS`` steps. In a row among all steps, or among those of a neighbourhood that was known."""

# (1, decode rows, prompt tokens, KV tokens read, pairs of prompt token and KV token). By how much each has to grow for
# a step that may, as far as is known beforehand, take twice as long.
_SCALES: Final = (1.0, 16.0, 64.0, 16384.0, 262144.0)

# Lists, not arrays: of five numbers each, they cost a third of numpy's calls.
_Features = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class StepShape:
    """num_kv_tokens: read by decode rows and chunks. num_pairs: (prompt token, KV token that it attends to)."""

    num_rows: int
    num_prefill_tokens: int
    num_kv_tokens: int
    num_pairs: int

    @property
    def neighbourhood(self) -> tuple[int, int]:
        """Rows and prompt tokens, each to a quarter of an octave: some hundred values in all."""
        return _quarter_octave(self.num_rows), _quarter_octave(self.num_prefill_tokens)


def _quarter_octave(number: int) -> int:
    shift = max(number.bit_length() - 3, 0)
    return (shift << 3) + (number >> shift)


def shape_of(plan: BatchPlan) -> StepShape:
    num_kv_tokens = num_pairs = num_prefill_tokens = 0
    for chunk in plan.chunks:
        num = len(chunk.tokens)
        num_prefill_tokens += num
        num_kv_tokens += chunk.start + num
        num_pairs += num * chunk.start + num * (num + 1) // 2
    if num_rows := len(plan.rows):
        num_kv_tokens += int(plan.rows[:, 1].sum()) + num_rows
    return StepShape(num_rows, num_prefill_tokens, num_kv_tokens, num_pairs)


class RecentValues:
    """The newest values, by rank."""

    __slots__ = ("_newest", "_size", "_sorted")

    def __init__(self, size: int) -> None:
        self._size = size
        self._newest: deque[float] = deque()
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._newest)

    def add(self, value: float) -> None:
        if len(self._newest) == self._size:
            self.forget()
        self._newest.append(value)
        insort(self._sorted, value)

    def forget(self) -> None:
        """Drop the oldest, if there is one."""
        if self._newest:
            del self._sorted[bisect_left(self._sorted, self._newest.popleft())]

    def quantile(self, share: float) -> float:
        """The value below which ``share`` of them lie, rounded down: one alone of a few counts as odd. 0 of none."""
        return self._sorted[int(share * (len(self._sorted) - 1))] if self._sorted else 0.0


@dataclass(slots=True, eq=False)
class _Neighbours:
    """Its newest steps, and its ``STREAK`` so far."""

    steps: deque[tuple[_Features, float]] = field(default_factory=lambda: deque(maxlen=LOCAL_STEPS))
    streak: int = 0


class StepTimePredictor:
    """``predict`` for a shape, ``learn`` from a step that ended. Some 10 us each."""

    def __init__(self) -> None:
        self._errors = RecentValues(WINDOW)
        self.num_resets = 0  # how often the device turned out to be another one
        self._forget_all()

    def _forget_all(self) -> None:
        self._num_steps = 0
        self._weights = [0.0] * len(_SCALES)
        self._covariance: list[list[float]] = []  # of the weights, in units of NOISE
        self._neighbours: dict[tuple[int, int], _Neighbours] = {}
        self._spread = UNSURE
        self._streak = 0

    def predict(self, shape: StepShape) -> float | None:
        """Seconds on the device, or None for a shape too far from all that was seen."""
        if self._num_steps < FIRST_STEPS:
            return None
        features = _features(shape)
        line_s = _dot(self._weights, features)
        if line_s <= 0.0:
            return None
        variance = _dot(features, [_dot(row, features) for row in self._covariance])
        if variance * NOISE**2 > (UNSURE * line_s) ** 2:
            return None
        neighbours = self._neighbours.get(shape.neighbourhood)
        return line_s * self._ratio(neighbours.steps) if neighbours is not None else line_s

    def learn(self, shape: StepShape, seconds: float, predicted_s: float | None) -> None:
        """A step of that shape took so long, more than 0. predicted_s: what ``predict`` had said of it,
        None if that was before a reset."""
        neighbours = self._neighbours.get(shape.neighbourhood)
        if predicted_s is not None:
            error = seconds / predicted_s - 1.0
            self._errors.add(abs(error) / (1.0 + error))
            if self._is_new_pace(neighbours, error):
                self.num_resets += 1
                self._forget_all()
                neighbours = predicted_s = None
        features = _features(shape)
        if not self._num_steps:
            diagonal = [(seconds / (NOISE * scale)) ** 2 for scale in _SCALES]
            self._covariance = [[d if i == j else 0.0 for j in range(len(_SCALES))] for i, d in enumerate(diagonal)]
        self._num_steps += 1
        self._draw_line(features, seconds, predicted_s)
        if neighbours is None:
            neighbours = self._neighbours[shape.neighbourhood] = _Neighbours()
        neighbours.steps.append((features, seconds))

    def error(self, share: float) -> float:
        """A quantile of |predicted - actual| / actual over the last ``WINDOW`` steps that were predicted."""
        return self._errors.quantile(share)

    def _is_new_pace(self, neighbours: _Neighbours | None, error: float) -> bool:
        side = 0 if abs(error) <= CUT * self._spread else 1 if error > 0.0 else -1
        self._streak = _longer(self._streak, side)
        if neighbours is not None:
            neighbours.streak = _longer(neighbours.streak, side) if len(neighbours.steps) >= KNOWN_STEPS else 0
        return STREAK in (abs(self._streak), abs(neighbours.streak) if neighbours is not None else 0)

    def _draw_line(self, features: _Features, seconds: float, predicted_s: float | None) -> None:
        # In shares of the step, so that a long one counts as much as a short one.
        scale_s = seconds if predicted_s is None else predicted_s
        shares = [feature / scale_s for feature in features]
        error = seconds / scale_s - _dot(self._weights, shares)
        if predicted_s is not None:
            limit = CUT * self._spread
            error = min(max(error, -limit), limit)
            whole_error = min(abs(seconds / predicted_s - 1.0), limit)
            self._spread = max(self._spread + SPREAD_GAIN * (whole_error - self._spread), SPREAD_MIN)
        gains = [_dot(row, shares) for row in self._covariance]
        variance = _dot(shares, gains)
        if variance <= 0.0:  # by rounding: this direction is known to the last digit
            return
        step = error / (1.0 + variance)
        self._weights = [weight + gain * step for weight, gain in zip(self._weights, gains, strict=True)]
        # Along this step's direction the variance becomes variance / (KEPT * (1 + variance)), and no other changes.
        shrink = (KEPT - (1.0 - KEPT) / variance) / (KEPT * (1.0 + variance))
        self._covariance = [
            [entry - shrunk * other for entry, other in zip(row, gains, strict=True)]
            for row, shrunk in zip(self._covariance, [gain * shrink for gain in gains], strict=True)
        ]

    def _ratio(self, steps: deque[tuple[_Features, float]]) -> float:
        """What the last steps like this one took, beside what the line says of them."""
        ratios = [1.0, 1.0] if len(steps) < LOCAL_STEPS else []
        for features, seconds in steps:
            line_s = _dot(self._weights, features)
            ratios.append(seconds / line_s if line_s > 0.0 else 1.0)
        ratios.sort()
        lower, upper = ratios[(len(ratios) - 1) // 2], ratios[len(ratios) // 2]
        return min(max(1.0, lower), upper)  # of an even number, what is nearest to the line


def _longer(streak: int, side: int) -> int:
    """A streak of errors after one more. Below 0 on the side of steps that took less than predicted; 0 is no error."""
    return streak + side if streak * side > 0 else side


def _features(shape: StepShape) -> _Features:
    return 1.0, shape.num_rows, shape.num_prefill_tokens, shape.num_kv_tokens, shape.num_pairs


def _dot(a: Iterable[float], b: Iterable[float]) -> float:
    total: float = sum(map(mul, a, b))
    return total
