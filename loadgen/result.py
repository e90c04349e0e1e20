"""What a run leaves behind: plain values, sent between processes and read by metrics and report."""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field

from loadgen.options import RunOptions
from loadgen.sample import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverResult:
    """What one process did and what it cost.

    ``loop_lag_s`` are the latenesses of a regular timer, ``cpu_shares`` the CPU seconds used in each second.
    """

    process: int
    samples: list[Sample]
    num_held_back: int  # requests that waited for others to end (max_inflight)
    wall_s: float
    cpu_s: float
    loop_lag_s: "array[float]"
    cpu_shares: "array[float]"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """Everything that was measured. ``started_at`` is Unix time; ``samples`` are in the order of index and turn.

    ``server_queue`` is what the server's own metrics said of its queue in this time, empty where they say nothing.
    """

    options: RunOptions
    started_at: float
    loop_name: str
    samples: list[Sample]
    drivers: list[DriverResult]
    server_queue: Mapping[str, float] = field(default_factory=dict)
