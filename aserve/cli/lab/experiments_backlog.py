"""Experiments 1 to 4: requests that are there from the start, in batches of one, and 5: a prefill between decodes."""

from typing import Final

import numpy as np

from aserve.cli.lab import study
from aserve.cli.lab.findings import Cell, Claim, Experiment, Panel, Table
from aserve.cli.lab.laboratory import STUDY_COLUMNS, UNBOUNDED, Lab, setup_of, study_row
from aserve.cli.lab.running import Arrival, Run
from aserve.testing import HostCosts, StepCosts

TOLERANCE: Final = 0.10
"""The study's own figures do not fit one model better than that."""

_THREADS: Final = (
    " With three threads what comes after a step runs beside the loop, and nothing bounds the steps in flight."
)


def one_at_a_time(lab: Lab) -> Experiment:
    return _backlog(lab, 1, study.PROTOTYPE)


def device_bound(lab: Lab) -> Experiment:
    return _backlog(lab, 2, study.DEVICE_BOUND)


def cpu_bound(lab: Lab) -> Experiment:
    return _backlog(lab, 3, study.CPU_BOUND)


def matched(lab: Lab) -> Experiment:
    return _backlog(lab, 4, study.MATCHED)


def _backlog(lab: Lab, number: int, case: study.Backlog) -> Experiment:
    wanted = [key for key in case.figures if key[0] in lab.policies]
    if "late" in lab.policies:
        wanted.append(("late", 1))
    runs: dict[str, Run] = {}
    rows: list[tuple[Cell, ...]] = []
    claims: list[Claim] = []
    for policy, num_threads in wanted:
        setup = setup_of(
            policy,
            case.costs(),
            case.host(num_threads),
            num_threads=num_threads,
            max_num_batched_tokens=1,
            max_inflight=UNBOUNDED,
        )
        run = runs[setup.name] = lab.run(setup, [Arrival()] * case.num_requests, with_timeline=True)
        figures = case.figures.get((policy, num_threads))
        rows.append(
            (
                *study_row(setup.name, [run], figures),
                round(run.latency_ms - run.queue_ms),
                None if figures is None else figures.service_ms,
            )
        )
        if figures is not None:
            claims.append(
                Claim.of(
                    f"{setup.name}: the study's {figures.total_s:.3f} s within {TOLERANCE:.0%}",
                    abs(run.total_s / figures.total_s - 1) <= TOLERANCE,
                    f"{run.total_s:.3f} s, {run.total_s / figures.total_s - 1:+.1%}",
                )
            )
    for (policy, num_threads), figures in case.figures.items():
        names = [name if num_threads == 1 else f"{name}, {num_threads} threads" for name in ("plain", policy)]
        if policy == "plain" or not set(names) <= set(runs):
            continue
        plain, other = (runs[name].total_s for name in names)
        study_gain = case.figures["plain", num_threads].total_s / figures.total_s - 1
        claims.append(
            Claim.of(
                f"{names[1]}: faster than {names[0]} (in the study by {study_gain:.1%})",
                plain > other,
                f"by {plain / other - 1:.1%}",
            )
        )
    return Experiment(
        number=number,
        title=case.title[:1].upper() + case.title[1:],
        about=(
            f"{case.num_requests} requests at once, a step each, batches of one. Processor {case.before_s * 1e3:.0f} "
            f"ms before and {case.after_s * 1e3:.0f} ms after a step of {case.step_s * 1e3:.0f} ms."
            + (_THREADS if any(num_threads > 1 for _, num_threads in case.figures) else "")
        ),
        tables=(Table(title="", columns=(*STUDY_COLUMNS, "service ms", "study"), rows=tuple(rows)),),
        claims=tuple(claims),
        panels=(
            Panel(
                title="total", unit="s", x=("",),
                series={name: (run.total_s,) for name, run in runs.items()},
            ),
            Panel(
                title="latency", unit="ms", x=("",),
                series={name: (run.latency_ms,) for name, run in runs.items()},
            ),
            Panel(
                title="device idle", unit="%", x=("",),
                series={name: (run.idle * 100,) for name, run in runs.items()},
            ),
        ),
        timelines=tuple(run.timeline for run in runs.values() if run.timeline is not None),
    )  # fmt: skip


_NUM_PHASES: Final = 8
_PROMPT: Final = 100
_LONG_S: Final = study.DEVICE_BOUND.step_s
_SHORT_S: Final = study.PROTOTYPE.step_s
_SAME: Final = 0.10


def prefill_between_decodes(lab: Lab) -> Experiment:
    """A stream decodes; a long prompt arrives in the middle of a step, at each of eight phases of the plain cycle."""
    costs = StepCosts(fixed_s=_SHORT_S, prefill_token_s=(_LONG_S - _SHORT_S) / _PROMPT)
    host = HostCosts(before_s=study.PROTOTYPE.before_s, after_s=study.PROTOTYPE.after_s)
    cycle_s = host.before_s + _SHORT_S + host.after_s
    runs: dict[str, list[Run]] = {}
    for policy in (name for name in lab.policies if name != "eager"):
        setup = setup_of(policy, costs, host, prefill="split")
        for phase in range(_NUM_PHASES):
            prompt_s = cycle_s * (10 + phase / _NUM_PHASES)
            arrivals = [Arrival(num_output_tokens=40), Arrival(at_s=prompt_s, num_prompt_tokens=_PROMPT)]
            runs.setdefault(policy, []).append(lab.run(setup, arrivals, with_timeline=phase == 0))

    def ttft_ms(policy: str) -> float:
        return float(np.mean([run.requests[1].ttft_s for run in runs[policy]])) * 1e3

    def idle(policy: str) -> float:
        return float(np.mean([run.idle for run in runs[policy]]))

    def gaps_ms(policy: str) -> tuple[float, float]:
        gaps = [gap for run in runs[policy] for gap in run.requests[0].gaps_s]
        return float(np.median(gaps)) * 1e3, float(np.max(gaps)) * 1e3

    rows = tuple(
        (
            policy,
            round(ttft_ms(policy), 1),
            round(gaps_ms(policy)[0], 1),
            round(gaps_ms(policy)[1], 1),
            round(100 * idle(policy), 1),
        )
        for policy in runs
    )
    claims = []
    if {"plain", "overlap"} <= set(runs):
        ratio = ttft_ms("overlap") / ttft_ms("plain")
        claims.append(
            Claim.of(
                f"overlap leaves the prefill's time to the first token as it is (within {_SAME:.0%})",
                abs(ratio - 1) <= _SAME,
                f"{ratio:.3f} of plain's: what is saved on the processor's side is spent behind the step queued ahead",
            )
        )
        claims.append(
            Claim.of(
                "the device idles between steps in plain mode, and less with overlap",
                idle("plain") > idle("overlap"),
                f"{idle('plain'):.1%} against {idle('overlap'):.1%}",
            )
        )
    if {"plain", "late"} <= set(runs):
        ratio = ttft_ms("late") / ttft_ms("plain")
        claims.append(
            Claim.of(
                "late launching does not delay the prefill (1.02 of plain's)", ratio <= 1.02, f"{ratio:.3f} of plain's"
            )
        )
    return Experiment(
        number=5,
        title="Prefill between decodes",
        about=(
            f"One stream decodes in steps of {_SHORT_S * 1e3:.0f} ms (the prototype's, with its processor times); a "
            f"prompt whose step takes {_LONG_S * 1e3:.0f} ms (the device-bound backlog's) arrives at eight phases of a "
            "cycle; prefill = split, so that the device sees short, long, short. The study gives no figures here, but "
            "the direction: the prefill's TTFT does not change, and the device idles."
        ),
        tables=(
            Table(
                title="",
                columns=("policy", "TTFT of the prompt ms", "the stream's gap ms p50", "max", "device idle %"),
                rows=rows,
            ),
        ),
        claims=tuple(claims),
        panels=(
            Panel(title="TTFT of the prompt", unit="ms", x=("",), series={p: (ttft_ms(p),) for p in runs}),
            Panel(title="longest gap of the stream", unit="ms", x=("",), series={p: (gaps_ms(p)[1],) for p in runs}),
            Panel(title="device idle", unit="%", x=("",), series={p: (idle(p) * 100,) for p in runs}),
        ),
        timelines=tuple(run.timeline for runs_ in runs.values() for run in runs_ if run.timeline is not None),
    )
