"""Experiments 7 to 10: a model's shape under streams of tokens, on a virtual device or on a real one."""

import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import numpy as np

from aserve.cli.lab import study
from aserve.cli.lab.findings import Claim, Experiment, Interval, Panel, Table, interval
from aserve.cli.lab.laboratory import Lab, poisson, setup_of
from aserve.cli.lab.running import Arrival, Run, Setup
from aserve.cli.lab.shapes import A10, ALARM_LATE_S, DRAWN_ROW_S, GREEDY_ROW_S, Machine, h200
from aserve.obs.trace import Timeline

LOADS: Final = (0.05, 0.20)
TTFT_AT_MOST: Final = 1.02
_PROMPT: Final = 512


def _setup(policy: str, machine: Machine, **more: Any) -> Setup:
    return setup_of(policy, machine.costs, machine.host, **{"max_inflight": 4, "alarm_late_s": ALARM_LATE_S} | more)


# --- 7


_LOW_REQUESTS: Final = 40
_LOW_TOKENS: Final = 24
_LOW_WARM_UP: Final = 8


def capacity(lab: Lab, machine: Machine, *, num_prompt_tokens: int, num_output_tokens: int) -> float:
    """Requests a second of a backlog, with overlap: 100 % load."""
    count = 128 if lab.bench.is_virtual else 256
    arrival = Arrival(num_prompt_tokens=num_prompt_tokens, num_output_tokens=num_output_tokens)
    return lab.run(_setup("overlap", machine), [arrival] * count, warm_up=[arrival] * 8).requests_per_s


def low_load(lab: Lab) -> Experiment:
    machine = h200(lab.shape)
    full_rate = capacity(lab, machine, num_prompt_tokens=_PROMPT, num_output_tokens=_LOW_TOKENS)
    rows, claims = [], []
    ratios: dict[str, list[Interval]] = {}
    last: dict[str, Run] = {}
    for load in LOADS:
        ttft_ms: dict[str, list[float]] = {}
        gaps_ms: dict[str, list[float]] = {}
        idle: dict[str, list[float]] = {}
        lengths = {"num_prompt_tokens": _PROMPT, "num_output_tokens": _LOW_TOKENS}
        for policy in lab.policies:
            for seed in range(lab.num_seeds):
                run = lab.run(
                    _setup(policy, machine),
                    poisson(load * full_rate, _LOW_REQUESTS, seed, **lengths),
                    warm_up=poisson(load * full_rate, _LOW_WARM_UP, 1000 + seed, **lengths),
                    seed=seed,
                    with_timeline=seed == 0 and load == LOADS[-1],
                )
                ttft_ms.setdefault(policy, []).append(run.ttft_ms)
                gaps_ms.setdefault(policy, []).append(run.gap_ms_at(0.5))
                idle.setdefault(policy, []).append(run.idle)
                if run.timeline is not None:
                    last[policy] = run
        for policy in lab.policies:
            plain = ttft_ms.get("plain", ttft_ms[policy])
            ratio = interval([a / b for a, b in zip(ttft_ms[policy], plain, strict=True)])
            ratios.setdefault(policy, []).append(ratio)
            rows.append(
                (
                    f"{load:.0%}", policy, round(float(np.mean(ttft_ms[policy])), 2), str(ratio),
                    round(float(np.mean(gaps_ms[policy])), 2), round(100 * float(np.mean(idle[policy])), 1),
                )
            )  # fmt: skip
        if {"plain", "late"} <= set(lab.policies):
            ratio = ratios["late"][-1]
            claims.append(
                Claim.of(
                    f"at {load:.0%} load late's TTFT is at most {TTFT_AT_MOST} of plain's, its whole interval",
                    ratio.high <= TTFT_AT_MOST,
                    f"{ratio} of plain's",
                )
            )
        if {"plain", "overlap"} <= set(lab.policies):
            ratio = ratios["overlap"][-1]
            claims.append(
                Claim.of(
                    f"at {load:.0%} load overlap's TTFT is above plain's",
                    ratio.low > 1,
                    f"{ratio} of plain's",
                    reason="at this load a newcomer seldom meets a step that is queued ahead of it",
                )
            )
    return Experiment(
        number=7,
        title="Low load",
        about=(
            f"{machine.name}, prompts of {_PROMPT} tokens, answers of {_LOW_TOKENS}, at 5 and 20 % of the "
            f"{full_rate:.1f} requests/s that a backlog gets; {_LOW_REQUESTS} requests a run, {lab.num_seeds} seeds. "
            "The TTFT of each policy as a share of plain's with the same arrivals, and its 95 % interval over the "
            "seeds."
        ),
        tables=(
            Table(
                title="",
                columns=("load", "policy", "TTFT ms", "of plain's", "gap between tokens ms p50", "device idle %"),
                rows=tuple(rows),
            ),
        ),
        claims=tuple(claims),
        panels=(
            Panel(
                title="TTFT, as a share of plain's", unit="", x=tuple(f"{load:.0%} load" for load in LOADS),
                series={policy: [each.mean for each in ratios[policy]] for policy in lab.policies},
            ),
        ),
        timelines=tuple(_head(run) for run in last.values()),
    )  # fmt: skip


_TIMELINE_S: Final = 0.4


def _head(run: Run) -> Timeline:
    """The first part of a run, which is enough to look at."""
    assert run.timeline is not None
    return replace(run.timeline, end_s=min(run.timeline.end_s, run.timeline.start_s + _TIMELINE_S))


# --- 8


DEPTHS: Final = (1, 2, 4, 8)
CHUNKS: Final = (128, 256, 512, 1024, 2048)
FIRST_CHUNK: Final = 512
"""Where the study's order of tuning begins: first the steps in flight at this chunk, then the chunk."""
_STREAMS: Final = 16
_TUNING_TOKENS: Final = 192
_NEAR_BEST: Final = 0.98


def tuning(lab: Lab) -> Experiment:
    tables, claims, panels = [], [], []
    machines = (h200(lab.shape), A10) if lab.bench.is_virtual else (h200(lab.shape),)
    for machine in machines:
        runs = {(depth, chunk): _tuning_run(lab, machine, depth, chunk) for depth in DEPTHS for chunk in CHUNKS}
        tables += _tuning_tables(machine, runs)
        claims += _tuning_claims(machine, runs)
        panels += [
            _tuning_panel(machine, "throughput", "tokens/s", {key: run.tokens_per_s for key, run in runs.items()}),
            _tuning_panel(machine, "TPOT p50", "ms", {key: run.tpot_ms_at(0.5) for key, run in runs.items()}),
            _tuning_panel(machine, "gap p99", "ms", {key: run.gap_ms_at(0.99) for key, run in runs.items()}),
        ]
    return Experiment(
        number=8,
        title="Steps in flight and chunks",
        about=(
            f"{_STREAMS} streams, {2 * _STREAMS} requests of {_PROMPT} tokens in and {_TUNING_TOKENS} out, eager up to "
            "max_inflight. In the study's order of tuning: the depth first, then the chunk (max_num_batched_tokens). "
            + " ".join(f"{machine.name}: {machine.origin}." for machine in machines)
        ),
        tables=tuple(tables),
        claims=tuple(claims),
        panels=tuple(panels),
    )


def _tuning_run(lab: Lab, machine: Machine, depth: int, chunk: int) -> Run:
    setup = _setup("eager", machine, max_inflight=depth, max_num_batched_tokens=chunk, max_num_seqs=_STREAMS)
    request = Arrival(num_prompt_tokens=_PROMPT, num_output_tokens=_TUNING_TOKENS)
    return lab.run(setup, [request] * (2 * _STREAMS), seed=1)


def _tuning_tables(machine: Machine, runs: dict[tuple[int, int], Run]) -> list[Table]:
    def row(name: str, run: Run) -> tuple[str | float, ...]:
        gaps = [round(run.gap_ms_at(share), 2) for share in (0.5, 0.99)]
        tpot = [round(run.tpot_ms_at(share), 2) for share in (0.5, 0.99)]
        return name, round(run.tokens_per_s, 1), *tpot, *gaps, round(100 * run.idle, 1)

    columns = ("tokens/s", "TPOT ms p50", "p99", "gap ms p50", "p99", "device idle %")
    best_depth = _best_depth(runs)
    return [
        Table(
            title=f"{machine.name}: first the steps in flight, chunks of {FIRST_CHUNK}",
            columns=("max_inflight", *columns),
            rows=tuple(row(str(depth), runs[depth, FIRST_CHUNK]) for depth in DEPTHS),
        ),
        Table(
            title=f"{machine.name}: then the chunk, {best_depth} in flight",
            columns=("chunk", *columns),
            rows=tuple(row(f"{chunk:,}", runs[best_depth, chunk]) for chunk in CHUNKS),
        ),
        Table(
            title=f"{machine.name}: tokens/s of all",
            columns=("max_inflight", *(f"{chunk:,}" for chunk in CHUNKS)),
            rows=tuple(
                (str(depth), *(round(runs[depth, chunk].tokens_per_s, 1) for chunk in CHUNKS)) for depth in DEPTHS
            ),
        ),
    ]


def _best_depth(runs: dict[tuple[int, int], Run]) -> int:
    """The smallest within 2 % of the best: what lies deeper buys nothing."""
    best = max(runs[depth, FIRST_CHUNK].tokens_per_s for depth in DEPTHS)
    return next(depth for depth in DEPTHS if runs[depth, FIRST_CHUNK].tokens_per_s >= _NEAR_BEST * best)


def _tuning_claims(machine: Machine, runs: dict[tuple[int, int], Run]) -> list[Claim]:
    rates = [runs[depth, FIRST_CHUNK].tokens_per_s for depth in DEPTHS]
    loss = 1 - rates[0] / rates[DEPTHS.index(4)]
    claims = [
        Claim.of(
            f"{machine.name}: one step in flight in place of four loses throughput"
            + (f", about {study.DEPTH_LOSS:.0%}" if machine is A10 else ""),
            abs(loss - study.DEPTH_LOSS) <= 0.05 if machine is A10 else loss > 0,
            f"{loss:.1%}",
            reason="the processor's share of a step is another one than on the study's machine",
        ),
        Claim.of(
            f"{machine.name}: more than two in flight add nothing without jitter",
            max(rates) <= rates[1] / _NEAR_BEST,
            f"{max(rates) / rates[1] - 1:+.1%} at most",
        ),
    ]
    if machine is A10:
        depth = _best_depth(runs)
        best = max(runs[depth, chunk].tokens_per_s for chunk in CHUNKS)
        enough = next(chunk for chunk in CHUNKS if runs[depth, chunk].tokens_per_s >= _NEAR_BEST * best)
        low, high = study.BEST_CHUNKS
        claims.append(
            Claim.of(
                f"{machine.name}: chunks of {low} to {high} are best",
                low <= enough <= high,
                f"{enough} is the smallest within {1 - _NEAR_BEST:.0%} of the best throughput; beyond it gaps grow",
                reason="in the cost model small chunks reach the matrix rate of large ones and hide behind "
                "the reading of the weights; a real card's kernels need longer rows for that rate",
            )
        )
    return claims


def _tuning_panel(machine: Machine, title: str, unit: str, values: dict[tuple[int, int], float]) -> Panel:
    return Panel(
        title=f"{title}, {machine.name}",
        unit=unit,
        kind="lines",
        x=tuple(f"{chunk:,}" for chunk in CHUNKS),
        x_title="chunk",
        series={f"{depth} in flight": [values[depth, chunk] for chunk in CHUNKS] for depth in DEPTHS},
    )


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
            setup = replace(_setup("overlap", machine, max_num_seqs=streams), host=host, sampler=sampler, name=name)
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
            f"since its next row needs the token, and a row costs {GREEDY_ROW_S * 1e6:.0f} µs greedy and "
            f"{DRAWN_ROW_S * 1e3:.2f} ms drawn with a temperature, in one thread; copying the logits is left out."
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


# --- 10


SHARED_RATES: Final = (0.5, 0.6, 0.75)
"""How fast each of two streams runs beside the other; what a real device does has to be measured there."""
_LONG_PROMPT: Final = 8192
_NUM_LONG: Final = 4
_RUNNING: Final = 32
_CHUNK: Final = 1024


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
        ways = [("mixed", 0.5), ("split", 0.5), ("streams", 0.5)]
    policy = "late" if "late" in lab.policies else "overlap"
    runs: dict[str, Run] = {}
    for prefill, rate in ways:
        name = prefill if prefill != "streams" or not lab.bench.is_virtual else f"streams at {rate:g}"
        setup = replace(
            _setup(policy, machine, max_num_batched_tokens=_CHUNK, max_num_seqs=64),
            prefill=prefill, shared_rate=rate, name=name,
        )  # fmt: skip
        runs[name] = lab.run(setup, [*running, *longs], seed=1, with_timeline=True)
    first_s, until_s = longs[0].at_s, longs[-1].at_s + period_s

    def gaps_ms(run: Run) -> list[float]:
        """Of the running streams, while the prompts come."""
        return [
            (b - a) * 1e3
            for request in run.requests[:_RUNNING]
            for a, b in zip(request.read_s, request.read_s[1:], strict=False)
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
            "tokens meanwhile. Two streams share the virtual device at a rate that is assumed: each runs at 0.5 "
            "(nothing gained), 0.6 or 0.75 of its speed alone while both have work."
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
        timelines=tuple(_window(run, first_s) for run in runs.values()),
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


def _window(run: Run, first_s: float) -> Timeline:
    assert run.timeline is not None
    start_s = run.began_s + first_s - 0.02
    return replace(run.timeline, start_s=start_s, end_s=start_s + _TIMELINE_S)
