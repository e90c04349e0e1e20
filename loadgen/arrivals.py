"""When requests are due: computed before the run, from the seed alone, so that a run can be repeated. Pure.

An open arrival is a schedule of due times that does not wait for the server. A closed one (``ClosedLoop``) has no
schedule: each of its users sends its next request when the last one ended. Both say which of the run's arrivals a
process owns; the shares of all processes together are exactly the run of one process.

Every law is written out over ``random.Random.random``, the one generator whose sequence Python promises to keep.
"""

import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from math import cos, log, pi, sqrt
from typing import ClassVar, Protocol

SCHEDULE_LENGTH_MAX = 10_000_000
"""80 MB of due times; a longer schedule is a mistyped rate or duration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedLoop:
    """``concurrency`` users, each with one request out at any time; they begin evenly over the first ``ramp_s``."""

    kind: ClassVar[str] = "closed"
    concurrency: int
    ramp_s: float = 0.0

    def slots(self, process: int, num_processes: int) -> list[int]:
        """Return the users that ``process`` plays."""
        return list(range(process, self.concurrency, num_processes))

    def begin_s(self, slot: int) -> float:
        """Return when a user sends its first request."""
        return self.ramp_s * slot / self.concurrency

    def indices(self, slots: list[int], num_requests: int | None) -> Iterator[int]:
        """Yield in order the arrivals that belong to ``slots``; without end where ``num_requests`` is None.

        A process takes arrivals in proportion to its users, so that all processes end together.
        """
        for start in count(0, self.concurrency):
            for slot in slots:
                index = start + slot
                if num_requests is not None and index >= num_requests:
                    return
                yield index

    def __str__(self) -> str:
        ramp = f", begun over {self.ramp_s:g} s" if self.ramp_s else ""
        return f"closed loop, {self.concurrency} at once{ramp}"


class Open(Protocol):
    """A schedule: times between arrivals that know nothing of the server."""

    kind: ClassVar[str]

    def times_s(self, rng: random.Random) -> Iterator[float]:
        """Yield ascending due times in seconds from the start, without end unless the schedule is recorded."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """Evenly spaced, ``rate`` a second."""

    kind: ClassVar[str] = "constant"
    rate: float

    def times_s(self, rng: random.Random) -> Iterator[float]:
        """Yield multiples of the period, the first at 0."""
        return (number / self.rate for number in count())

    def __str__(self) -> str:
        return f"constant arrivals, {self.rate:g} requests/s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Poisson:
    """Independent users: exponential gaps at ``rate`` a second."""

    kind: ClassVar[str] = "poisson"
    rate: float

    def times_s(self, rng: random.Random) -> Iterator[float]:
        """Yield sums of exponential gaps."""
        now = 0.0
        while True:
            now -= log(1.0 - rng.random()) / self.rate
            yield now

    def __str__(self) -> str:
        return f"Poisson arrivals, {self.rate:g} requests/s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gamma:
    """Gamma-distributed gaps of mean 1 / ``rate`` and shape ``burstiness``.

    1 is Poisson, below 1 comes in bursts, above 1 is more even: the meaning that vLLM's benchmark gives the word.
    """

    kind: ClassVar[str] = "gamma"
    rate: float
    burstiness: float

    def times_s(self, rng: random.Random) -> Iterator[float]:
        """Yield sums of gamma gaps."""
        now = 0.0
        while True:
            now += _gamma(rng, self.burstiness) / (self.rate * self.burstiness)
            yield now

    def __str__(self) -> str:
        return f"gamma arrivals of burstiness {self.burstiness:g}, {self.rate:g} requests/s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ramp:
    """Poisson arrivals whose rate goes in a straight line from one value to another, and stays there."""

    kind: ClassVar[str] = "ramp"
    rate_from: float
    rate_to: float
    over_s: float

    def times_s(self, rng: random.Random) -> Iterator[float]:
        """Yield the times at which the integral of the rate passes the points of a unit Poisson process."""
        slope = (self.rate_to - self.rate_from) / self.over_s
        num_in_ramp = (self.rate_from + self.rate_to) / 2 * self.over_s
        passed = 0.0
        while True:
            passed -= log(1.0 - rng.random())
            if passed >= num_in_ramp:
                yield self.over_s + (passed - num_in_ramp) / self.rate_to
            else:  # rate_from t + slope t² / 2 = passed, in the form that does not cancel for a small slope
                root = sqrt(self.rate_from**2 + 2 * slope * passed)
                yield 2 * passed / (self.rate_from + root)

    def __str__(self) -> str:
        return f"Poisson arrivals, {self.rate_from:g} to {self.rate_to:g} requests/s over {self.over_s:g} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bursts:
    """``size`` at the same moment, every ``every_s`` seconds."""

    kind: ClassVar[str] = "bursts"
    size: int
    every_s: float

    def times_s(self, rng: random.Random) -> Iterator[float]:
        """Yield each burst's time ``size`` times, the first at 0."""
        return (number // self.size * self.every_s for number in count())

    def __str__(self) -> str:
        return f"bursts of {self.size} every {self.every_s:g} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """The due times of a trace; it ends with them."""

    kind: ClassVar[str] = "trace"
    recorded_s: "array[float]"

    def times_s(self, rng: random.Random) -> Iterator[float]:
        """Yield the recorded times."""
        return iter(self.recorded_s)

    def __str__(self) -> str:
        return f"recorded arrivals, {len(self.recorded_s)} over {self.recorded_s[-1]:,.1f} s"


Schedule = Constant | Poisson | Gamma | Ramp | Bursts | Recorded
Arrivals = ClosedLoop | Schedule


def due_s(
    arrivals: Schedule, *, seed: int, num_requests: int | None = None, duration_s: float | None = None
) -> "array[float]":
    """Return the ascending due times in seconds from the start, up to the first bound that is reached."""
    times: array[float] = array("d")
    for at_s in arrivals.times_s(random.Random(f"arrivals/{seed}")):
        if duration_s is not None and at_s >= duration_s:
            break
        if len(times) >= (SCHEDULE_LENGTH_MAX if num_requests is None else num_requests):
            break
        times.append(at_s)
    return times


def share(times_s: "array[float]", process: int, num_processes: int) -> list[tuple[int, float]]:
    """Return the (index, due time) pairs of ``process``: every ``num_processes``-th, so that the load is even."""
    return [(index, times_s[index]) for index in range(process, len(times_s), num_processes)]


def normal(rng: random.Random) -> float:
    """Return a standard normal value (Box and Muller)."""
    return sqrt(-2.0 * log(1.0 - rng.random())) * cos(2.0 * pi * rng.random())


def _gamma(rng: random.Random, shape: float) -> float:
    """Return a gamma value of scale 1 (Marsaglia and Tsang 2000, with their boost for shapes below 1)."""
    if shape < 1.0:
        boost: float = (1.0 - rng.random()) ** (1.0 / shape)
        return _gamma(rng, shape + 1.0) * boost
    d = shape - 1.0 / 3.0
    while True:
        x = normal(rng)
        v = (1.0 + x / sqrt(9.0 * d)) ** 3
        if v > 0.0 and log(1.0 - rng.random()) < 0.5 * x * x + d - d * v + d * log(v):
            return d * v
