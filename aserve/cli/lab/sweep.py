"""The sweep of the cost model: where late launching loses, if anywhere."""

import itertools
from typing import Final

import numpy as np

from aserve.cli.lab import study
from aserve.cli.lab.experiments_batching import AT_LEAST, WARM_UP, WARM_UP_SEED, host_costs
from aserve.cli.lab.findings import Cell, Claim, Experiment, Panel, Table
from aserve.cli.lab.laboratory import Lab, poisson, setup_of
from aserve.cli.lab.running import Run

FACTORS: Final = (0.5, 1.0, 1.5)
NOISES: Final = (0.0, 0.1, 0.3)
_OTHERS: Final = ("plain", "overlap")
_NUM_REQUESTS: Final = 300
"""Three times the study's, so that the last batch counts for less."""


def cost_sweep(lab: Lab) -> Experiment:
    """Number 0: not one of the ten, but what makes them trustworthy."""
    case = study.SECOND_BATCHING
    num_seeds = max(2, lab.num_seeds // 4)
    rows: list[tuple[Cell, ...]] = []
    losses: list[str] = []
    shares: dict[tuple[float, float, float], float] = {}
    for noise, device, host in itertools.product(NOISES, FACTORS, FACTORS):
        runs: dict[str, list[Run]] = {}
        for policy in (*_OTHERS, "late"):
            setup = setup_of(
                policy,
                case.costs(noise).scaled(device),
                host_costs(case, share_before=0.5).scaled(host),
                max_num_seqs=128,
            )
            runs[policy] = [
                lab.run(
                    setup,
                    poisson(case.rate, _NUM_REQUESTS, seed),
                    warm_up=poisson(case.rate, WARM_UP, WARM_UP_SEED + seed),
                    seed=seed,
                )
                for seed in range(num_seeds)
            ]
        rate = {policy: float(np.mean([run.requests_per_s for run in each])) for policy, each in runs.items()}
        wait = {policy: float(np.mean([run.latency_ms for run in each])) for policy, each in runs.items()}
        best_rate, best_ms = max(rate[p] for p in _OTHERS), min(wait[p] for p in _OTHERS)
        throughput, share = rate["late"] / best_rate, wait["late"] / best_ms
        rows.append(
            (
                f"{noise:.0%}", f"{device:g}", f"{host:g}", *(round(wait[p]) for p in (*_OTHERS, "late")),
                round(throughput, 3), round(share, 3),
            )
        )  # fmt: skip
        if throughput < AT_LEAST or share > 1 / AT_LEAST:
            losses.append(f"noise {noise:.0%}, device x {device:g}, host x {host:g} ({throughput:.3f}, {share:.3f})")
        shares[noise, device, host] = share
    return Experiment(
        number=0,
        title="Sweep of the cost model",
        about=(
            f"Experiment 6's second run with device and processor at {', '.join(f'{f:g}' for f in FACTORS)} times its "
            f"costs (half of the processor's after a step), and noise of {', '.join(f'{n:.0%}' for n in NOISES)} a "
            f"step (sigma of its logarithm); {num_seeds} seeds. Where does late launching lose to the better of plain "
            "and overlap?"
        ),
        tables=(
            Table(
                title="",
                columns=(
                    "noise", "device x", "processor x", "plain's latency ms", "overlap's", "late's",
                    "late's throughput, of the best other's", "late's latency, of the best other's",
                ),
                rows=tuple(rows),
            ),
        ),
        claims=(
            Claim.of(
                f"late is at least {AT_LEAST} of the better of plain and overlap everywhere, in throughput and latency",
                not losses,
                f"everywhere, {len(rows)} points" if not losses else f"not at {len(losses)} of {len(rows)} points",
                reason=(
                    "nobody can foresee when such steps end, so that the next is composed too soon, which costs it "
                    "requests, or too late, which leaves the device idle; as shares of the best other's throughput and "
                    "latency: " + "; ".join(losses)
                ),
            ),
        ),
        panels=tuple(
            Panel(
                title=f"late's latency, noise {noise:.0%}", unit="of the best other's", kind="lines", low=0.6,
                x=tuple(f"{device:g}" for device in FACTORS), x_title="device x",
                series={
                    f"processor x {host:g}": [shares[noise, device, host] for device in FACTORS] for host in FACTORS
                },
            )
            for noise in NOISES
        ),
    )  # fmt: skip
