"""How long steps take, learnt from steps: when to look for the end of the next one."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final

MEAN_GAIN: Final = 1 / 8
SPREAD_GAIN: Final = 1 / 4
"""Of the estimator of round trips (Jacobson, Congestion Avoidance and Control, SIGCOMM 1988)."""

FIRST_SPREAD: Final = 1 / 16
"""Spread of a step that was seen once, as a share of it."""

SHRINK: Final = 15 / 16
"""What is left of a mean whose step had ended before anybody looked: how much earlier is not known."""


@dataclass(slots=True)
class Estimate:
    """A step's duration and its mean absolute deviation, in seconds."""

    mean_s: float
    spread_s: float


class StepTimes:
    """One estimate a kind of step. ``key``: what its duration depends on, from a bounded set (a graph's bucket)."""

    def __init__(self) -> None:
        self._estimates: dict[Hashable, Estimate] = {}

    def get(self, key: Hashable) -> Estimate | None:
        return self._estimates.get(key)

    def suggest(self, key: Hashable, seconds: float) -> None:
        """What the caller believes of a step that was never seen."""
        self._estimates.setdefault(key, Estimate(seconds, seconds * FIRST_SPREAD))

    def saw(self, key: Hashable, seconds: float) -> None:
        """A step's end was seen as it came."""
        estimate = self._estimates.get(key)
        if estimate is None:
            self._estimates[key] = Estimate(seconds, seconds * FIRST_SPREAD)
            return
        error_s = seconds - estimate.mean_s
        estimate.mean_s += error_s * MEAN_GAIN
        estimate.spread_s += (abs(error_s) - estimate.spread_s) * SPREAD_GAIN

    def missed(self, key: Hashable) -> None:
        """The first look, made when it was due, came after the step's end."""
        estimate = self._estimates.get(key)
        if estimate is not None:
            estimate.mean_s *= SHRINK
