"""Everything that a run is told, as one value that travels to every process."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from loadgen.arrivals import Arrivals, ClosedLoop
from loadgen.client import Target
from loadgen.errors import UsageError
from loadgen.work import BodyTemplate, PromptSource


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What to send where, when, how often, and what counts. Made whole or not at all: raises UsageError."""

    target: Target
    template: BodyTemplate
    prompts: PromptSource = field(repr=False)
    arrivals: Arrivals
    num_requests: int | None = None  # at least one of the two bounds is set; the first one reached ends the sending
    duration_s: float | None = None
    num_warmup_requests: int = 0  # sent and ended before the start, in no figure
    warmup_s: float = 0.0  # from the start; what is due in it is in no latency figure
    cooldown_s: float = 0.0  # before the last end; likewise
    timeout_s: float = 300.0
    connect_timeout_s: float = 10.0
    max_inflight: int = 1024  # requests out at once, over all processes
    num_processes: int = 1
    seed: int = 0
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
