"""What all experiments share: the bench, the policies by the names that people use, workloads and table rows."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from aserve.cli.lab.findings import Cell
from aserve.cli.lab.running import Arrival, Bench, Run, Setup, VirtualBench
from aserve.cli.lab.shapes import ALARM_LATE_S, Machine
from aserve.cli.lab.study import Figures
from aserve.obs.trace import Timeline
from aserve.testing import HostCosts, StepCosts

POLICIES: Final = {"plain": "sync", "overlap": "overlap", "eager": "eager", "late": "late"}
"""The laboratory's names of the scheduler's policies; the study calls launching after each landing plain."""

UNBOUNDED: Final = 128
"""Steps in flight of the eager pipeline, which had no bound in the study."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lab:
    """num_seeds: repetitions of what is random. shape: "8b" or "1b", whose costs experiments 7 to 10 take."""

    bench: Bench = field(default_factory=VirtualBench)
    policies: tuple[str, ...] = tuple(POLICIES)
    num_seeds: int = 10
    shape: str = "8b"

    def run(self, setup: Setup, arrivals: Sequence[Arrival], **more: Any) -> Run:
        return self.bench.run(setup, arrivals, **more)


def setup_of(
    policy: str, costs: StepCosts, host: HostCosts, *, name: str = "", num_threads: int = 1, **more: Any
) -> Setup:
    """A setup of the policy that the laboratory calls so. Eager launching is bounded by nothing unless told."""
    depth = UNBOUNDED if policy == "eager" else 4
    return Setup(
        name=name or (policy if num_threads == 1 else f"{policy}, {num_threads} threads"),
        policy=POLICIES[policy],
        costs=costs,
        host=host,
        **{"max_inflight": depth} | more,
    )


def poisson(
    rate: float, count: int, seed: int, *, num_prompt_tokens: int = 1, num_output_tokens: int = 1
) -> list[Arrival]:
    """So many requests, independent of each other, ``rate`` a second on average; the first comes at once."""
    gaps_s = np.random.default_rng(seed).exponential(1.0 / rate, count - 1)
    return [
        Arrival(at_s=at_s, num_prompt_tokens=num_prompt_tokens, num_output_tokens=num_output_tokens)
        for at_s in itertools.accumulate(gaps_s.tolist(), initial=0.0)
    ]


STUDY_COLUMNS: Final = (
    "setup", "total s", "study", "difference %", "latency ms", "study", "queue ms", "study", "launches", "study",
    "sequences a step", "device idle %",
)  # fmt: skip


def study_row(name: str, runs: Sequence[Run], figures: Figures | None) -> tuple[Cell, ...]:
    """Means over the runs beside the study's figures."""

    def mean(values: Iterator[float]) -> float:
        return float(np.mean(list(values)))

    total_s = mean(run.total_s for run in runs)
    return (
        name,
        round(total_s, 3),
        None if figures is None else figures.total_s,
        None if figures is None else round(100 * (total_s / figures.total_s - 1), 1),
        round(mean(run.latency_ms for run in runs)),
        None if figures is None else figures.latency_ms,
        round(mean(run.queue_ms for run in runs)),
        None if figures is None else figures.queue_ms,
        round(mean(float(run.num_launches) for run in runs), 1),
        None if figures is None else figures.num_launches,
        round(mean(float(np.mean(run.batch_sizes)) for run in runs), 1),
        round(100 * mean(run.idle for run in runs), 1),
    )


def serving_setup(policy: str, machine: Machine, **more: Any) -> Setup:
    """A policy on a machine as it serves: four steps in flight at most, alarms as late as timers are."""
    return setup_of(policy, machine.costs, machine.host, **{"max_inflight": 4, "alarm_late_s": ALARM_LATE_S} | more)


TIMELINE_S: Final = 0.25
"""What a timeline of a model's steps shows: some fifty of them are enough to look at."""


def window(run: Run, start_s: float, seconds: float = TIMELINE_S) -> Timeline:
    """A part of a run that was made with a timeline."""
    assert run.timeline is not None, "the run was made without a timeline"
    return replace(run.timeline, start_s=start_s, end_s=min(run.timeline.end_s, start_s + seconds))


def head(run: Run, seconds: float = TIMELINE_S) -> Timeline:
    """Its first part."""
    return window(run, run.began_s, seconds)
