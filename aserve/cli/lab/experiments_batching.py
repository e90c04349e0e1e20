"""Experiment 6: batches of whatever waits, and how the policy decides what that is."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from aserve.cli.lab import study
from aserve.cli.lab.findings import Claim, Experiment, Interval, Panel, Table, interval
from aserve.cli.lab.laboratory import (
    STUDY_COLUMNS,
    UNBOUNDED,
    Lab,
    head,
    poisson,
    serving_setup,
    setup_of,
    study_row,
)
from aserve.cli.lab.running import Arrival, Run, Setup
from aserve.cli.lab.shapes import h200
from aserve.obs.trace import Timeline
from aserve.testing import HostCosts

EAGER_THREADS: Final = 3
WARM_UP: Final = 60
"""Requests before those that count: some eight steps, in which the predictor has seen the device."""
WARM_UP_SEED: Final = 1000
AT_LEAST: Final = 0.99
LAUNCHES_AT_MOST: Final = 1.5
_TIMELINE_S: Final = 1.0
NEAR: Final = 0.20
"""What counts as the study's figure, where arrivals are random and the study had one run of them."""


def host_costs(case: study.Batching, *, share_before: float, num_threads: int = 1) -> HostCosts:
    return HostCosts(
        before_s=case.host_s * share_before, after_s=case.host_s * (1 - share_before), num_threads=num_threads
    )


def batching_setup(policy: str, case: study.Batching, *, share_before: float = 1.0) -> Setup:
    num_threads = EAGER_THREADS if policy == "eager" else 1
    return setup_of(
        policy,
        case.costs(),
        host_costs(case, share_before=share_before, num_threads=num_threads),
        num_threads=num_threads,
        max_num_seqs=128,
    )


def _runs(lab: Lab, case: study.Batching, share_before: float) -> dict[str, list[Run]]:
    """By policy, a run for each seed; a seed's arrivals are the same for all policies."""
    return {
        policy: [
            lab.run(
                batching_setup(policy, case, share_before=share_before),
                poisson(case.rate, case.num_requests, seed),
                warm_up=poisson(case.rate, WARM_UP, WARM_UP_SEED + seed),
                seed=seed,
                with_timeline=case is study.SECOND_BATCHING and seed == 0 and share_before == 1.0,
            )
            for seed in range(lab.num_seeds)
        ]
        for policy in lab.policies
    }


def _mean(runs: Sequence[Run], name: str) -> float:
    return float(np.mean([getattr(run, name) for run in runs]))


def dynamic_batching(lab: Lab) -> Experiment:
    return _on_the_study_s_device(lab) if lab.bench.is_virtual else _on_a_real_device(lab)


def _on_the_study_s_device(lab: Lab) -> Experiment:
    tables: list[Table] = []
    claims: list[Claim] = []
    panels: list[Panel] = []
    timelines: list[Timeline] = []
    for case in (study.FIRST_BATCHING, study.SECOND_BATCHING):
        runs = _runs(lab, case, 1.0)
        tables.append(_table(f"{case.title}: all of the processor's work before a step", runs, case.figures))
        claims += [*_eager_claims(case, runs), *_overlap_claims(case, runs), *_late_claims(case.title, runs)]
        panels += _panels(f", {case.title.partition(',')[0]}", runs, case.figures)
        timelines += [head(run, _TIMELINE_S) for each in runs.values() for run in each if run.timeline is not None]
        half = _runs(lab, case, 0.5)
        tables.append(_table(f"{case.title}: half of it after", half, {}))
        claims += _late_claims(f"{case.title}, half after", half)
    if "late" in lab.policies:
        claims.append(_queue_claim(study.SECOND_BATCHING, runs["late"]))
    return Experiment(
        number=6,
        title="Dynamic batching",
        about=(
            "100 requests at 50/s on average, independent of each other (the study says the rate alone), a step each, "
            f"in batches of whatever waits; means over {lab.num_seeds} seeds. The first run's step of b requests takes "
            "158 + 5 b ms and the processor 28 ms a step, the second one's 136 + 1.5 b and 36. The study does not say "
            "how much of that comes before the step; but its eager pipeline's launches (66 and 53) and queue times (14 "
            "and 16 ms, half of 28 and 36) are those of a launcher that is busy with all of it, so it is taken to come "
            "before, and the half-and-half split is shown as well. The eager pipeline launches as often as its "
            "launcher can, with three threads and no bound on the steps in flight."
        ),
        tables=tuple(tables),
        claims=tuple(claims),
        panels=tuple(panels),
        timelines=tuple(timelines),
    )


_ARRIVALS_A_CYCLE: Final = 9.55
"""The study's first run: 50/s in 191 ms, the processor's and the device's time for one request."""
_NUM_ALONE: Final = 10
_MAX_NUM_SEQS: Final = 128


def _on_a_real_device(lab: Lab) -> Experiment:
    """The study's arrivals at the device's own pace: as many come while one request is served as there."""
    machine = h200(lab.shape)
    seconds = 1.0
    for _ in range(2):  # the first time warms it up
        alone = [Arrival(at_s=index * 0.1) for index in range(_NUM_ALONE)]
        seconds = lab.run(serving_setup("plain", machine, max_num_seqs=_MAX_NUM_SEQS), alone).latency_ms / 1e3
    rate = _ARRIVALS_A_CYCLE / seconds
    runs = {
        policy: [
            lab.run(
                serving_setup(
                    policy, machine, max_num_seqs=_MAX_NUM_SEQS, max_inflight=UNBOUNDED if policy == "eager" else 4
                ),
                poisson(rate, 100, seed),
                warm_up=poisson(rate, WARM_UP, WARM_UP_SEED + seed),
                seed=seed,
                with_timeline=seed == 0,
            )
            for seed in range(lab.num_seeds)
        ]
        for policy in lab.policies
    }
    return Experiment(
        number=6,
        title="Dynamic batching",
        about=(
            f"100 requests of one token in and one out at {rate:,.0f}/s: {_ARRIVALS_A_CYCLE} in the "
            f"{seconds * 1e3:.2f} ms that one request takes alone, as in the study's first run. The runner bounds the "
            "steps in flight at 8, the eager pipeline's too, and one thread does all."
        ),
        tables=(_table("", runs, {}),),
        claims=tuple(_late_claims("here", runs)),
        panels=tuple(_panels("", runs, {})),
        timelines=tuple(head(run) for each in runs.values() for run in each if run.timeline is not None),
    )


def _table(title: str, runs: Mapping[str, Sequence[Run]], figures: Mapping[str, study.Figures]) -> Table:
    return Table(
        title=title,
        columns=STUDY_COLUMNS,
        rows=tuple(study_row(each[0].setup.name, each, figures.get(policy)) for policy, each in runs.items()),
    )


def _eager_claims(case: study.Batching, runs: Mapping[str, Sequence[Run]]) -> Iterator[Claim]:
    figures = case.figures["eager"]
    if "eager" in runs and figures.num_launches is not None:
        launches, total_s = _mean(runs["eager"], "num_launches"), _mean(runs["eager"], "total_s")
        yield Claim.of(
            f"{case.title}: the eager pipeline breaks batches into {figures.num_launches} launches (within {NEAR:.0%})",
            abs(launches / figures.num_launches - 1) <= NEAR,
            f"{launches:.0f} launches",
        )
        yield Claim.of(
            f"{case.title}: which take it {figures.total_s:.2f} s (within {NEAR:.0%})",
            abs(total_s / figures.total_s - 1) <= NEAR,
            f"{total_s:.2f} s",
        )
        latency_ms = _mean(runs["eager"], "latency_ms")
        arrival_s = case.num_requests / case.rate
        yield Claim.of(
            f"{case.title}: and its requests {figures.latency_ms:.0f} ms each (within {NEAR:.0%})",
            figures.latency_ms is not None and abs(latency_ms / figures.latency_ms - 1) <= NEAR,
            f"{latency_ms:.0f} ms",
            reason=(
                f"requests that come evenly in {arrival_s:.0f} s and go evenly in {figures.total_s:.1f} take "
                f"{(figures.total_s - arrival_s) / 2:.1f} s on average: the study's figure does not fit its own total"
            ),
        )


def _overlap_claims(case: study.Batching, runs: Mapping[str, Sequence[Run]]) -> Iterator[Claim]:
    if not {"plain", "overlap"} <= set(runs):
        return
    plain, overlap = case.figures["plain"], case.figures["overlap"]
    launches = _mean(runs["overlap"], "num_launches"), _mean(runs["plain"], "num_launches")
    yield Claim.of(
        f"{case.title}: overlap launches more often than plain ({overlap.num_launches} and {plain.num_launches})",
        launches[0] > launches[1],
        f"{launches[0]:.1f} and {launches[1]:.1f}",
    )
    latency_ms = _mean(runs["overlap"], "latency_ms"), _mean(runs["plain"], "latency_ms")
    yield Claim.of(
        f"{case.title}: overlap's latency is above plain's ({overlap.latency_ms:.0f} and {plain.latency_ms:.0f} ms)",
        latency_ms[0] > latency_ms[1],
        f"{latency_ms[0]:.0f} and {latency_ms[1]:.0f} ms",
    )


def _late_claims(title: str, runs: Mapping[str, Sequence[Run]]) -> Iterator[Claim]:
    others = [policy for policy in runs if policy != "late"]
    if "late" not in runs or not others:
        return
    best = max(others, key=lambda policy: _mean(runs[policy], "requests_per_s"))
    share = _paired(runs["late"], runs[best], "requests_per_s")
    yield Claim.of(
        f"{title}: late has at least {AT_LEAST} of the best other policy's throughput",
        share.mean >= AT_LEAST,
        f"{share} of {best}'s",
    )
    best = min(others, key=lambda policy: _mean(runs[policy], "latency_ms"))
    share = _paired(runs["late"], runs[best], "latency_ms")
    yield Claim.of(
        f"{title}: late has at most 1 / {AT_LEAST} of the best other policy's latency",
        share.mean <= 1 / AT_LEAST,
        f"{share} of {best}'s",
    )
    if "plain" in runs:
        launches = _mean(runs["late"], "num_launches") / _mean(runs["plain"], "num_launches")
        yield Claim.of(
            f"{title}: late launches at most {LAUNCHES_AT_MOST} times as often as plain",
            launches <= LAUNCHES_AT_MOST,
            f"{launches:.2f} times",
        )


def _queue_claim(case: study.Batching, runs: Sequence[Run]) -> Claim:
    figures, queue_ms = case.figures["late"], _mean(runs, "queue_ms")
    return Claim.of(
        f"{case.title}: with late launching a request waits {figures.queue_ms:.0f} ms in the queue (within {NEAR:.0%})",
        figures.queue_ms is not None and abs(queue_ms / figures.queue_ms - 1) <= NEAR,
        f"{queue_ms:.0f} ms",
        reason=(
            "who comes while a step of some 145 ms runs waits for its end, half a step on average; 16 ms are half of "
            "the launcher's own 36, as in the eager pipeline, so the study seems to count to the launcher and not to "
            "the step"
        ),
    )


def _paired(runs: Sequence[Run], others: Sequence[Run], name: str) -> Interval:
    """Of the ratio, seed by seed: both had the same arrivals."""
    return interval([getattr(a, name) / getattr(b, name) for a, b in zip(runs, others, strict=True)])


def _panels(suffix: str, runs: Mapping[str, Sequence[Run]], figures: Mapping[str, study.Figures]) -> list[Panel]:
    def panel(title: str, unit: str, name: str, figure: str) -> Panel:
        policies = list(runs)
        series = {"here": [_mean(runs[policy], name) for policy in policies]}
        if figures:
            known = [getattr(figures.get(policy), figure, None) for policy in policies]
            series["study"] = [float("nan") if value is None else float(value) for value in known]
        return Panel(title=f"{title}{suffix}", unit=unit, x=tuple(policies), series=series)

    return [
        panel("total", "s", "total_s", "total_s"),
        panel("latency", "ms", "latency_ms", "latency_ms"),
        panel("queue", "ms", "queue_ms", "queue_ms"),
        panel("launches", "", "num_launches", "num_launches"),
        panel("sequences a step", "", "mean_batch_size", ""),
        panel("device idle", "%", "idle_percent", ""),
    ]
