"""Experiment 8: how many steps in flight, and chunks of which size, in the study's order of tuning."""

from typing import Final

from aserve.cli.lab import study
from aserve.cli.lab.findings import Claim, Experiment, Panel, Table
from aserve.cli.lab.laboratory import Lab, serving_setup
from aserve.cli.lab.running import Arrival, Run
from aserve.cli.lab.shapes import A10, Machine, h200

_PROMPT: Final = 512
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
            _tuning_panel(machine, "longest gap", "ms", {key: run.gap_ms_at(1.0) for key, run in runs.items()}),
        ]
    return Experiment(
        number=8,
        title="Steps in flight and chunks",
        about=(
            f"{_STREAMS} streams, {2 * _STREAMS} requests of {_PROMPT} tokens in and {_TUNING_TOKENS} out, eager up to "
            "max_inflight. In the study's order of tuning: the depth first, then the chunk (max_num_batched_tokens)."
            + "".join(f" {machine.name}: {machine.origin}." for machine in machines if lab.bench.is_virtual)
        ),
        tables=tuple(tables),
        claims=tuple(claims),
        panels=tuple(panels),
    )


def _tuning_run(lab: Lab, machine: Machine, depth: int, chunk: int) -> Run:
    setup = serving_setup("eager", machine, max_inflight=depth, max_num_batched_tokens=chunk, max_num_seqs=_STREAMS)
    request = Arrival(num_prompt_tokens=_PROMPT, num_output_tokens=_TUNING_TOKENS)
    return lab.run(setup, [request] * (2 * _STREAMS), seed=1)


def _tuning_tables(machine: Machine, runs: dict[tuple[int, int], Run]) -> list[Table]:
    def row(name: str, run: Run) -> tuple[str | float, ...]:
        gaps = [round(run.gap_ms_at(share), 2) for share in (0.5, 0.99, 1.0)]
        tpot = [round(run.tpot_ms_at(share), 2) for share in (0.5, 0.99)]
        return name, round(run.tokens_per_s, 1), *tpot, *gaps, round(100 * run.idle, 1)

    columns = ("tokens/s", "TPOT ms p50", "p99", "gap ms p50", "p99", "max", "device idle %")
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
