"""Experiment 7: a server with little to do, in which a step that is queued too early is all that delays a newcomer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from aserve.cli.lab.findings import Claim, Experiment, Interval, Panel, Table, interval
from aserve.cli.lab.laboratory import Lab, head, poisson, serving_setup
from aserve.cli.lab.running import Arrival, Run
from aserve.cli.lab.shapes import SHAPES, Machine, h200

LOADS: Final = (0.05, 0.20)
TTFT_AT_MOST: Final = 1.02
_PROMPT: Final = 512
_ANSWER: Final = 24
_NUM_REQUESTS: Final = 40
_NUM_WARM_UP: Final = 8
_NUM_BACKLOG: Final = 128
_BASE: Final = "plain"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Point:
    """One policy at one load: a run for each seed, and for each of them what the TTFT is of plain's."""

    machine: Machine
    load: float
    policy: str
    runs: Sequence[Run]
    ratio: Interval

    def mean(self, name: str) -> float:
        return float(np.mean([getattr(run, name) for run in self.runs]))

    @property
    def gap_ms(self) -> float:
        return float(np.mean([run.gap_ms_at(0.5) for run in self.runs]))

    @property
    def prediction_error_percent(self) -> float | None:
        """Mean over the runs of the steps' median, where the policy predicts."""
        errors = [100 * run.prediction_error for run in self.runs if run.prediction_error is not None]
        return round(float(np.mean(errors)), 1) if errors else None


def capacity(lab: Lab, machine: Machine) -> float:
    """Requests a second of a backlog, with overlap: 100 % load."""
    request = Arrival(num_prompt_tokens=_PROMPT, num_output_tokens=_ANSWER)
    setup = serving_setup("overlap", machine)
    return lab.run(setup, [request] * _NUM_BACKLOG, warm_up=[request] * _NUM_WARM_UP).requests_per_s


def _measure(lab: Lab, machine: Machine, full_rate: float, load: float) -> list[_Point]:
    lengths = {"num_prompt_tokens": _PROMPT, "num_output_tokens": _ANSWER}
    runs = {
        policy: [
            lab.run(
                serving_setup(policy, machine),
                poisson(load * full_rate, _NUM_REQUESTS, seed, **lengths),
                warm_up=poisson(load * full_rate, _NUM_WARM_UP, 1000 + seed, **lengths),
                seed=seed,
                with_timeline=seed == 0 and load == LOADS[-1] and machine.shape == lab.shape,
            )
            for seed in range(lab.num_seeds)
        ]
        for policy in lab.policies
    }
    return [
        _Point(
            machine=machine,
            load=load,
            policy=policy,
            runs=each,
            ratio=interval([a.ttft_ms / b.ttft_ms for a, b in zip(each, runs.get(_BASE, each), strict=True)]),
        )
        for policy, each in runs.items()
    ]


def low_load(lab: Lab) -> Experiment:
    machines = [h200(shape) for shape in SHAPES] if lab.bench.is_virtual else [h200(lab.shape)]
    rates = {machine.name: capacity(lab, machine) for machine in machines}
    points = [
        point for machine in machines for load in LOADS for point in _measure(lab, machine, rates[machine.name], load)
    ]
    return Experiment(
        number=7,
        title="Low load",
        about=(
            f"Prompts of {_PROMPT} tokens, answers of {_ANSWER}, at 5 and 20 % of what a backlog gets ("
            + ", ".join(f"{name}: {rate:.1f} requests/s" for name, rate in rates.items())
            + f"); {_NUM_REQUESTS} requests a run, {lab.num_seeds} seeds. The TTFT of each policy as a share of "
            "plain's with the same arrivals, and its 95 % interval over the seeds."
        ),
        tables=(
            Table(
                title="",
                columns=(
                    "model", "load", "policy", "TTFT ms", "of plain's", "gap ms p50", "device idle %",
                    "prediction error %",
                ),
                rows=tuple(
                    (
                        point.machine.name, f"{point.load:.0%}", point.policy, round(point.mean("ttft_ms"), 2),
                        str(point.ratio), round(point.gap_ms, 2), round(100 * point.mean("idle"), 1),
                        point.prediction_error_percent,
                    )
                    for point in points
                ),
            ),
        ),
        claims=tuple(claim for point in points if (claim := _claim(point)) is not None),
        panels=tuple(panel for machine in machines for panel in _panels(lab, machine, points)),
        timelines=tuple(head(run) for point in points for run in point.runs if run.timeline is not None),
    )  # fmt: skip


def _claim(point: _Point) -> Claim | None:
    where = f"{point.machine.name} at {point.load:.0%} load"
    if point.policy == "late":
        return Claim.of(
            f"{where}: late's TTFT is at most {TTFT_AT_MOST} of plain's, its whole interval",
            point.ratio.high <= TTFT_AT_MOST,
            f"{point.ratio} of plain's",
            reason="the mean is, but so few seeds do not tell" if point.ratio.mean <= TTFT_AT_MOST else "",
        )
    if point.policy == "overlap":
        return Claim.of(
            f"{where}: overlap's TTFT is above plain's",
            point.ratio.low > 1,
            f"{point.ratio} of plain's",
            reason="a newcomer seldom meets a step that is queued ahead of it",
        )
    return None


def _panels(lab: Lab, machine: Machine, points: Sequence[_Point]) -> list[Panel]:
    def of(policy: str) -> list[_Point]:
        return [point for point in points if point.policy == policy and point.machine is machine]

    x = tuple(f"{load:.0%} load" for load in LOADS)
    return [
        Panel(
            title=f"TTFT, {machine.name}", unit="of plain's", x=x,
            series={policy: [point.ratio.mean for point in of(policy)] for policy in lab.policies},
        ),
        Panel(
            title="gap p50", unit="ms", x=x,
            series={policy: [point.gap_ms for point in of(policy)] for policy in lab.policies},
        ),
        Panel(
            title="device idle", unit="%", x=x,
            series={policy: [100 * point.mean("idle") for point in of(policy)] for policy in lab.policies},
        ),
    ]  # fmt: skip
