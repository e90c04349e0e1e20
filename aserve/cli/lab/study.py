"""The white-box study whose experiments the laboratory repeats: its figures, and the parameters that follow from them.

In plain mode a cycle is C + G (C: processor time before and after, G: the device's step); with overlap n requests take
C + nG where G is the longer, nC + G where C is. Where only C is known it is halved, but for dynamic batching, where
the study's own launches and queue times say that nearly all of it comes before a step (``experiments_batching``).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from aserve.testing import HostCosts, StepCosts


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What the study measured in one setup; None where it says nothing. service_ms: latency without the queue."""

    total_s: float
    latency_ms: float | None = None
    queue_ms: float | None = None
    service_ms: float | None = None
    num_launches: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """num_requests at once in batches of one. figures: by (policy, processor threads)."""

    title: str
    num_requests: int
    before_s: float
    after_s: float
    step_s: float
    figures: Mapping[tuple[str, int], Figures]

    def costs(self) -> StepCosts:
        return StepCosts(fixed_s=self.step_s)

    def host(self, num_threads: int) -> HostCosts:
        return HostCosts(before_s=self.before_s, after_s=self.after_s, num_threads=num_threads)


PROTOTYPE: Final = Backlog(
    title="one request at a time",
    num_requests=10,
    before_s=0.030,
    after_s=0.020,
    step_s=0.074,
    figures={("plain", 1): Figures(total_s=1.2408), ("overlap", 1): Figures(total_s=0.8476)},
)
DEVICE_BOUND: Final = Backlog(
    title="device-bound backlog",
    num_requests=5,
    before_s=0.115,
    after_s=0.115,
    step_s=0.467,
    figures={
        ("plain", 1): Figures(total_s=3.486, latency_ms=2126, queue_ms=1429),
        ("overlap", 1): Figures(total_s=2.565, latency_ms=1618, queue_ms=713),
    },
)
CPU_BOUND: Final = Backlog(
    title="CPU-bound backlog",
    num_requests=5,
    before_s=0.111,
    after_s=0.111,
    step_s=0.187,
    figures={
        ("plain", 1): Figures(total_s=2.045, latency_ms=1214, queue_ms=805),
        ("overlap", 1): Figures(total_s=1.297, latency_ms=876, queue_ms=412),
        ("plain", 3): Figures(total_s=2.017),
        ("eager", 3): Figures(total_s=1.142, latency_ms=774, queue_ms=250),
    },
)
MATCHED: Final = Backlog(
    title="CPU and device matched",
    num_requests=5,
    before_s=0.119,
    after_s=0.119,
    step_s=0.238,
    figures={
        ("plain", 1): Figures(total_s=2.384, service_ms=477),
        ("overlap", 1): Figures(total_s=1.415, service_ms=498),
    },
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    """num_requests at ``rate`` a second, batches of whatever waits. The step of b requests takes fixed_s + b * "
    "row_s."""

    title: str
    num_requests: int
    rate: float
    fixed_s: float
    row_s: float
    host_s: float
    figures: Mapping[str, Figures]

    def costs(self, noise: float = 0.0) -> StepCosts:
        """A request is a prompt of one token, so that what it adds to a step is a prompt token's time."""
        return StepCosts(fixed_s=self.fixed_s, prefill_token_s=self.row_s, noise=noise)


FIRST_BATCHING: Final = Batching(
    title="first run",
    num_requests=100,
    rate=50.0,
    fixed_s=0.158,
    row_s=0.005,
    host_s=0.028,  # a cycle of 10 rows is 236 ms, of which 208 are the step
    figures={
        "plain": Figures(total_s=2.359, num_launches=10, latency_ms=366, queue_ms=123),
        "overlap": Figures(total_s=2.423, num_launches=12, latency_ms=510, queue_ms=99),
        "eager": Figures(total_s=10.96, num_launches=66, latency_ms=4621, queue_ms=14),
    },
)
SECOND_BATCHING: Final = Batching(
    title="second run, with late launching",
    num_requests=100,
    rate=50.0,
    fixed_s=0.136,
    row_s=0.0015,
    host_s=0.036,
    figures={
        "plain": Figures(total_s=2.221, num_launches=12, latency_ms=277, queue_ms=96),
        "overlap": Figures(total_s=2.369, num_launches=17, latency_ms=351, queue_ms=70),
        "eager": Figures(total_s=7.399, num_launches=53, latency_ms=4554, queue_ms=16),
        "late": Figures(total_s=2.059, num_launches=14, latency_ms=272, queue_ms=16),
    },
)

DEPTH_LOSS: Final = 0.25
"""A second study (7B on an A10, 16 streams): max_inflight from 4 to 1 cost a quarter of the throughput."""
BEST_CHUNKS: Final = (512, 1024)
"""... and chunks of this size were best."""
