"""Everything that a run is told, as one value that travels to every process."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from loadgen.arrivals import Arrivals, ClosedLoop
from loadgen.client import Target
from loadgen.errors import UsageError
from loadgen.lengths import Calibration
from loadgen.work import BodyTemplate, History, Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """What a request has to keep to be a good one; limits that are None do not bind.

    TTFT and E2E count from the intended time: a user waits in the queue too.
    """

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    def __bool__(self) -> bool:
        return not (self.ttft_ms is self.tpot_ms is self.e2e_ms is None)


NO_SLO = Slo()


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """What a figure of the run has to keep, or the command fails; ``figure`` is a name of ``figures.flat``."""

    figure: str
    relation: Literal["<", ">"]
    bound: float

    def is_kept_by(self, value: float) -> bool:
        """Whether a value is on the right side."""
        return value < self.bound if self.relation == "<" else value > self.bound

    def __str__(self) -> str:
        return f"{self.figure} {self.relation} {self.bound:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What to send where, when, how often, and what counts. Made whole or not at all: raises UsageError."""

    target: Target
    template: BodyTemplate
    source: Source = field(repr=False)
    arrivals: Arrivals
    name: str = ""  # of the scenario
    history: History = "served"
    unmeasured_parts: frozenset[str] = frozenset()  # of a mixture; they are in no figure but their own
    calibrations: Mapping[str, Calibration] = field(default_factory=dict)  # measured, by language
    num_requests: int | None = None  # arrivals; at least one of the two bounds is set, the first one reached ends them
    duration_s: float | None = None
    num_warmup_requests: int = 0  # sent and ended before the start, in no figure
    warmup_s: float = 0.0  # from the start; what is due in it is in no latency figure
    cooldown_s: float = 0.0  # before the last end; likewise
    timeout_s: float = 300.0
    connect_timeout_s: float = 10.0
    max_inflight: int = 1024  # requests out at once, over all processes
    num_processes: int = 1
    seed: int = 0
    slo: Slo = NO_SLO
    limits: tuple[Limit, ...] = ()
    labels: Mapping[str, Any] = field(default_factory=dict)  # written into the JSON as they are

    def __post_init__(self) -> None:
        if self.num_requests is None and self.duration_s is None:
            raise UsageError("a run needs a number of requests or a duration")
        if isinstance(self.arrivals, ClosedLoop):
            if self.arrivals.concurrency < self.num_processes:
                raise UsageError(
                    f"{self.num_processes} processes cannot share a concurrency of {self.arrivals.concurrency}"
                )
            if self.arrivals.concurrency > self.max_inflight:
                raise UsageError(
                    f"a concurrency of {self.arrivals.concurrency} exceeds --max-inflight {self.max_inflight}"
                )
        if self.max_inflight < self.num_processes:
            raise UsageError(f"{self.num_processes} processes cannot share --max-inflight {self.max_inflight}")
