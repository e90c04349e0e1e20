"""What a run leaves behind: plain values, sent between processes and read by metrics and report."""

from array import array
from dataclasses import dataclass

from loadgen.options import RunOptions
from loadgen.sample import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverResult:
    """What one process did and what it cost.

    ``loop_lag_s`` are the latenesses of a regular timer, ``cpu_shares`` the CPU seconds used in each second.
    """

    process: int
    samples: list[Sample]
    num_held_back: int  # requests of a schedule that waited for others to end (max_inflight)
    wall_s: float
    cpu_s: float
    loop_lag_s: "array[float]"
    cpu_shares: "array[float]"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """Everything that was measured. ``started_at`` is Unix time; ``samples`` are in the order of their indices."""

    options: RunOptions
    started_at: float
    loop_name: str
    samples: list[Sample]
    drivers: list[DriverResult]
