"""Two servers in one run: the same load to each by turns, so that what changes on the machine meanwhile meets both.

Each round gives both servers the same requests, A first in the even rounds and B first in the odd ones; another round
has other prompts. A figure's ratio is B's over A's, its interval that of Student's t over the logarithms of the rounds'
ratios: it says how sure the difference is in this run, not that another machine would show it.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from math import exp, log, sqrt
from statistics import fmean, stdev
from typing import Any

from loadgen import codec, figures, metrics, runner
from loadgen.options import Limit, RunOptions
from loadgen.result import RunResult

SHOWN = (
    "requests_per_s",
    "output_tokens_per_s",
    "ttft_ms_p50",
    "ttft_ms_p99",
    "tpot_ms_p50",
    "tpot_ms_p99",
    "icl_ms_p99",
    "e2e_ms_p50",
    "e2e_ms_p99",
    "goodput_requests_per_s",
)

# Two-sided 95 % points of Student's t for 1, 2, 3... degrees of freedom; beyond them the normal law's is close.
_T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)

Run = Callable[[RunOptions], RunResult]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """B over A: geometric mean over the rounds, and the bounds that hold the true one with 95 % confidence."""

    ratio: float
    low: float
    high: float

    @property
    def is_clear(self) -> bool:
        """Whether the interval leaves out 1."""
        return not self.low <= 1.0 <= self.high


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The figures of every round, the ratios of those that both servers gave in all rounds."""

    a: RunOptions
    b: RunOptions
    rounds: list[tuple[dict[str, float], dict[str, float]]]
    num_failed: int
    is_client_bound: bool
    ratios: dict[str, Ratio]


def run(
    a: RunOptions, b: RunOptions, *, num_rounds: int, show: Callable[[str], None], once: Run = runner.run
) -> Comparison:
    """Make the rounds and return what came of them. Blocks."""
    rounds = []
    num_failed, is_client_bound = 0, False
    for number in range(num_rounds):
        found: dict[str, dict[str, float]] = {}
        sides = [("A", a), ("B", b)]
        for name, options in sides if number % 2 == 0 else sides[::-1]:
            warm_up = options.num_warmup_requests if number == 0 else 0
            seeded = replace(options, seed=options.seed + number, num_warmup_requests=warm_up)
            summary = metrics.summarise(once(seeded))
            found[name] = figures.flat(summary)
            num_failed += summary.num_requests - summary.num_ok
            is_client_bound |= bool(summary.client.bound_by)
        rounds.append((found["A"], found["B"]))
        show(f"round {number + 1} of {num_rounds}: {_glance(rounds[-1])}")
    return Comparison(
        a=a,
        b=b,
        rounds=rounds,
        num_failed=num_failed,
        is_client_bound=is_client_bound,
        ratios=ratios(rounds),
    )


def ratios(rounds: list[tuple[dict[str, float], dict[str, float]]]) -> dict[str, Ratio]:
    """Return the ratio of every figure that is above 0 on both sides of at least two rounds, all of them."""
    found = {}
    for name in figures.NAMES:
        pairs = [(a.get(name, 0.0), b.get(name, 0.0)) for a, b in rounds]
        if len(pairs) < 2 or any(a <= 0 or b <= 0 for a, b in pairs):
            continue
        logs = [log(b / a) for a, b in pairs]
        degrees = len(logs) - 1
        t = _T_95[degrees - 1] if degrees <= len(_T_95) else metrics.Z_95 * (1 + 1.5 / degrees)
        middle, reach = fmean(logs), t * stdev(logs) / sqrt(len(logs))
        found[name] = Ratio(ratio=exp(middle), low=exp(middle - reach), high=exp(middle + reach))
    return found


def broken(comparison: Comparison, limits: tuple[Limit, ...]) -> list[str]:
    """Return a sentence for each limit that the whole interval breaks, or whose ratio could not be measured."""
    sentences = []
    for limit in limits:
        ratio = comparison.ratios.get(limit.figure)
        if ratio is None:
            sentences.append(f"{limit} (B over A): could not be measured")
        elif not (limit.is_kept_by(ratio.low) or limit.is_kept_by(ratio.high)):
            sentences.append(f"{limit} (B over A): it is {ratio.ratio:.3f} ({ratio.low:.3f} to {ratio.high:.3f})")
    return sentences


def table(comparison: Comparison) -> str:
    """Return the ratios for a terminal."""
    lines = [*_sides(comparison), "", f"{'':<26}{'A':>12}{'B':>12}{'B / A':>10}{'95 %':>20}"]
    for name, ratio in _shown(comparison):
        a, b = (fmean(round_[side][name] for round_ in comparison.rounds) for side in (0, 1))
        interval = f"{ratio.low:.3f} to {ratio.high:.3f}"
        clear = "  *" if ratio.is_clear else ""
        lines.append(f"{name:<26}{a:>12,.2f}{b:>12,.2f}{ratio.ratio:>10.3f}{interval:>20}{clear}")
    lines += ["", f"means of {len(comparison.rounds)} rounds; * the interval leaves out 1"]
    if comparison.num_failed:
        lines.append(f"{comparison.num_failed:,} requests failed")
    if comparison.is_client_bound:
        lines.append("client-bound: in some round the figures are this program's own")
    return "\n".join(lines) + "\n"


def markdown(comparison: Comparison) -> str:
    """Return the ratios as Markdown to paste."""
    lines = [*(f"{side}  " for side in _sides(comparison)), "", "| | A | B | B / A | 95 % |", "|---|---|---|---|---|"]
    for name, ratio in _shown(comparison):
        a, b = (fmean(round_[side][name] for round_ in comparison.rounds) for side in (0, 1))
        shown = f"**{ratio.ratio:.3f}**" if ratio.is_clear else f"{ratio.ratio:.3f}"
        lines.append(f"| {name} | {a:,.2f} | {b:,.2f} | {shown} | {ratio.low:.3f} to {ratio.high:.3f} |")
    return "\n".join(lines) + "\n"


def to_json(comparison: Comparison) -> bytes:
    """Return everything for programs."""
    fields: dict[str, Any] = {
        "a": comparison.a.target.origin,
        "b": comparison.b.target.origin,
        "num_failed": comparison.num_failed,
        "is_client_bound": comparison.is_client_bound,
        "ratios": {name: asdict(ratio) for name, ratio in comparison.ratios.items()},
        "rounds": [{"a": a, "b": b} for a, b in comparison.rounds],
    }
    return codec.dumps(fields)


def _shown(comparison: Comparison) -> list[tuple[str, Ratio]]:
    return [(name, comparison.ratios[name]) for name in SHOWN if name in comparison.ratios]


def _sides(comparison: Comparison) -> list[str]:
    return [
        f"{name}: {options.template.model} at {options.target.origin}"
        for name, options in (("A", comparison.a), ("B", comparison.b))
    ]


def _glance(pair: tuple[dict[str, float], dict[str, float]]) -> str:
    return ", ".join(f"{name} {pair[0][name]:,.1f} and {pair[1][name]:,.1f}" for name in SHOWN[1:3] if name in pair[0])
