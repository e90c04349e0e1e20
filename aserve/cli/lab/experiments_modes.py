"""Experiments 9 and 10: where tokens are sampled, and how prompts are computed beside streams that run."""

import statistics
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Final

import numpy as np

from aserve.cli.lab.findings import Claim, Experiment, Panel, Table
from aserve.cli.lab.laboratory import Lab, serving_setup, window
from aserve.cli.lab.running import Arrival, Run
from aserve.cli.lab.shapes import DRAWN_ROW_S, GREEDY_ROW_S, Machine, h200

# --- 9


_SAMPLER_STREAMS: Final = (1, 16, 64)
_SAMPLER_PANELS: Final[tuple[tuple[str, str, Callable[[Run], float]], ...]] = (
    ("throughput", "tokens/s", lambda run: run.tokens_per_s),
    ("TPOT p50", "ms", lambda run: run.tpot_ms_at(0.5)),
    ("device idle", "%", lambda run: run.idle * 100),
)


def samplers(lab: Lab) -> Experiment:
    machine = h200(lab.shape)
    ways = {"device": ("device", 0.0), "host, greedy": ("host", GREEDY_ROW_S), "host, drawn": ("host", DRAWN_ROW_S)}
    if not lab.bench.is_virtual:
        del ways["host, drawn"]
    runs = {}
    for name, (sampler, row_s) in ways.items():
        for streams in _SAMPLER_STREAMS:
            host = replace(machine.host, sample_row_s=row_s)
            setup = replace(
                serving_setup("overlap", machine, max_num_seqs=streams), host=host, sampler=sampler, name=name
            )
            runs[name, streams] = lab.run(
                setup, [Arrival(num_prompt_tokens=64, num_output_tokens=96)] * streams, seed=1
            )
    rows = tuple(
        (name, streams, round(run.tokens_per_s, 1), round(run.tokens_per_s / runs["device", streams].tokens_per_s, 3),
         round(run.tpot_ms_at(0.5), 2), round(100 * run.idle, 1))
        for (name, streams), run in runs.items()
    )  # fmt: skip
    claims = [
        Claim.of(
            f"{name}: less throughput than on the device at {streams} streams (the study's callbacks cost 20 %)",
            run.tokens_per_s < runs["device", streams].tokens_per_s,
            f"{run.tokens_per_s / runs['device', streams].tokens_per_s - 1:+.1%}",
        )
        for (name, streams), run in runs.items()
        if name != "device"
    ]
    return Experiment(
        number=9,
        title="Sampler on the host and on the device",
        about=(
            f"{machine.name}, so many streams that decode, overlap. On the host a sequence has one row in flight, "
            f"since its next row needs the token, and one thread samples{_sampling_costs(lab)}."
        ),
        tables=(
            Table(
                title="",
                columns=("sampler", "streams", "tokens/s", "of the device's", "TPOT ms p50", "device idle %"),
                rows=rows,
            ),
        ),
        claims=tuple(claims),
        panels=tuple(
            Panel(
                title=title, unit=unit, x=tuple(f"{streams} streams" for streams in _SAMPLER_STREAMS),
                series={name: [value(runs[name, streams]) for streams in _SAMPLER_STREAMS] for name in ways},
            )
            for title, unit, value in _SAMPLER_PANELS
        ),
    )  # fmt: skip


def _sampling_costs(lab: Lab) -> str:
    if not lab.bench.is_virtual:
        return ""
    return (
        f", {GREEDY_ROW_S * 1e6:.0f} µs a greedy row and {DRAWN_ROW_S * 1e3:.2f} ms one drawn with a temperature; "
        "copying the logits is left out"
    )


# --- 10


SHARED_RATES: Final = (0.5, 0.6, 0.75)
"""How fast each of two streams runs beside the other; what a real device does has to be measured there."""
_SHARING: Final = (
    " Two streams share the virtual device at a rate that is assumed: each runs at 0.5 (nothing gained), 0.6 or 0.75 "
    "of its speed alone while both have work."
)
_LONG_PROMPT: Final = 8192
_NUM_LONG: Final = 4
_RUNNING: Final = 32
_CHUNK: Final = 1024
_BEFORE_S: Final = 0.01


def prefill_modes(lab: Lab) -> Experiment:
    machine = h200(lab.shape)
    prefill_s = machine.costs.prefill_token_s + machine.costs.matrix_token_s
    period_s = 1.6 * _LONG_PROMPT * prefill_s
    running = [Arrival(num_prompt_tokens=64, num_output_tokens=_num_tokens(machine, period_s))] * _RUNNING
    longs = [
        Arrival(at_s=period_s * (0.5 + index), num_prompt_tokens=_LONG_PROMPT, num_output_tokens=8)
        for index in range(_NUM_LONG)
    ]
    ways = [("mixed", 0.5), ("split", 0.5), *(("streams", rate) for rate in SHARED_RATES)]
    if not lab.bench.is_virtual:
        ways = [("mixed", 0.5), ("split", 0.5), *([("streams", 0.5)] if lab.bench.has_streams else [])]
    policy = "late" if "late" in lab.policies else "overlap"
    runs: dict[str, Run] = {}
    for prefill, rate in ways:
        name = prefill if prefill != "streams" or not lab.bench.is_virtual else f"streams at {rate:g}"
        setup = replace(
            serving_setup(policy, machine, max_num_batched_tokens=_CHUNK, max_num_seqs=64),
            prefill=prefill, shared_rate=rate, name=name,
        )  # fmt: skip
        runs[name] = lab.run(setup, [*running, *longs], seed=1, with_timeline=True)
    first_s, until_s = longs[0].at_s, longs[-1].at_s + period_s

    def gaps_ms(run: Run) -> list[float]:
        """Of the running streams, while the prompts come."""
        return [
            (b - a) * 1e3
            for request in run.requests[:_RUNNING]
            for a, b in pairwise(request.read_s)
            if first_s <= b - run.began_s <= until_s
        ]

    def ttft_ms(run: Run) -> float:
        return statistics.fmean(request.ttft_s for request in run.requests[_RUNNING:]) * 1e3

    def row(name: str, run: Run) -> tuple[str | float, ...]:
        gaps = np.array(gaps_ms(run))
        quantiles = [round(float(np.quantile(gaps, share)), 2) for share in (0.5, 0.9, 0.99, 1.0)]
        return name, *quantiles, round(ttft_ms(run), 1), round(run.tokens_per_s, 1), round(100 * run.idle, 1)

    def worst(name: str) -> float:
        return float(np.quantile(np.array(gaps_ms(runs[name])), 0.99))

    return Experiment(
        number=10,
        title="Prefill mixed, split, and on a stream of its own",
        about=(
            f"{machine.name}, {_RUNNING} streams decode while {_NUM_LONG} prompts of {_LONG_PROMPT:,} tokens arrive "
            f"{period_s * 1e3:.0f} ms apart, in chunks of {_CHUNK:,}; {policy}. Gaps between the running streams' "
            f"tokens meanwhile.{_SHARING if lab.bench.is_virtual else ''}"
        ),
        tables=(
            Table(
                title="",
                columns=(
                    "prefill", "gap ms p50", "p90", "p99", "max", "TTFT of the prompts ms", "tokens/s", "device idle %",
                ),
                rows=tuple(row(name, run) for name, run in runs.items()),
            ),
        ),
        claims=_prefill_claims(runs, worst),
        panels=(
            Panel(title="gap p99", unit="ms", x=("",), series={name: (worst(name),) for name in runs}),
            Panel(title="TTFT of the prompts", unit="ms", x=("",), series={n: (ttft_ms(r),) for n, r in runs.items()}),
            Panel(title="throughput", unit="tokens/s", x=("",), series={n: (r.tokens_per_s,) for n, r in runs.items()}),
        ),
        timelines=tuple(window(run, run.began_s + first_s - _BEFORE_S) for run in runs.values()),
    )  # fmt: skip


def _prefill_claims(runs: dict[str, Run], worst: Callable[[str], float]) -> tuple[Claim, ...]:
    streams = [name for name in runs if name.startswith("streams")]
    return (
        *(
            Claim.of(
                f"{name}: the running streams' gap p99 is below that of mixed steps",
                worst(name) < worst("mixed"),
                f"{worst(name):.1f} ms against {worst('mixed'):.1f}",
            )
            for name in streams
        ),
        Claim.of(
            "split: the gap p99 is above that of mixed steps: a step of chunks and one of rows lie between two tokens",
            worst("split") > worst("mixed"),
            f"{worst('split'):.1f} ms against {worst('mixed'):.1f}",
        ),
    )


def _num_tokens(machine: Machine, period_s: float) -> int:
    """Enough to decode until the last prompt is through, most of the time beside a chunk."""
    return int((_NUM_LONG + 1.5) * period_s / (machine.costs.fixed_s + machine.costs.weights_s) / 1.5)
