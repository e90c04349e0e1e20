"""When requests are due: computed before the run, from the seed alone, so that a run can be repeated. Pure.

An open arrival (``Poisson``) is a schedule of due times that does not wait for the server. A closed one
(``ClosedLoop``) has no schedule: each of its slots sends its next request when the last one ended. Both say which of
the run's requests a process owns; the shares of all processes together are exactly the run of one process.
"""

import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from math import log

SCHEDULE_LENGTH_MAX = 10_000_000
"""80 MB of due times; a longer schedule is a mistyped rate or duration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedLoop:
    """``concurrency`` users, each with one request out at any time."""

    concurrency: int

    def slots(self, process: int, num_processes: int) -> list[int]:
        """Return the users that ``process`` plays."""
        return list(range(process, self.concurrency, num_processes))

    def indices(self, slots: list[int], num_requests: int | None) -> Iterator[int]:
        """Yield in order the requests that belong to ``slots``; without end where ``num_requests`` is None.

        A process takes requests in proportion to its users, so that all processes end together.
        """
        for start in count(0, self.concurrency):
            for slot in slots:
                index = start + slot
                if num_requests is not None and index >= num_requests:
                    return
                yield index


@dataclass(frozen=True, slots=True, kw_only=True)
class Poisson:
    """Independent users: exponential gaps at ``rate`` requests a second."""

    rate: float

    def due_s(self, *, seed: int, num_requests: int | None, duration_s: float | None) -> "array[float]":
        """Return the ascending due times in seconds from the start, up to the first of the two bounds."""
        rng = random.Random(f"arrivals/{seed}")
        due: array[float] = array("d")
        now = 0.0
        while (num_requests is None or len(due) < num_requests) and len(due) < SCHEDULE_LENGTH_MAX:
            # Written out, since the library's expovariate promises no sequence across versions.
            now -= log(1.0 - rng.random()) / self.rate
            if duration_s is not None and now >= duration_s:
                break
            due.append(now)
        return due


Arrivals = ClosedLoop | Poisson


def share(due_s: "array[float]", process: int, num_processes: int) -> list[tuple[int, float]]:
    """Return the (index, due time) pairs of ``process``: every ``num_processes``-th, so that the load is even."""
    return [(index, due_s[index]) for index in range(process, len(due_s), num_processes)]
