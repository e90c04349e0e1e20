"""The search for how much a server can take: raise the load until something breaks, then halve the interval.

A load *holds* where no request failed, every limit of the run and 99 % of the requests' own limits were kept, and the
server kept up: in an open run nothing was left over long after the last arrival, in a closed one more users still
brought more tokens. The *knee* is where throughput over latency is highest (Kleinrock's power): beyond it latency is
paid for little throughput.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from loadgen import arrivals, codec, figures, metrics, runner
from loadgen.errors import UsageError
from loadgen.metrics import Summary
from loadgen.options import Limit, RunOptions
from loadgen.result import RunResult

GOODPUT_SHARE_MIN = 0.99
GAIN_MIN = 1.03
"""Twice the users have to bring so much more throughput, or the server is full."""
DRAIN_SHARE_MAX = 0.1
"""After the last arrival of an open run a server that kept up needs one usual latency and this share of the run."""

Over = Literal["rate", "concurrency"]
Run = Callable[[RunOptions], RunResult]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Where to look. ``high`` None doubles for as long as it holds."""

    over: Over
    low: float
    high: float | None = None
    precision: float = 0.1
    seconds: float = 20.0
    num_points_max: int = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One load and what came of it; ``broken`` says why it does not hold."""

    load: float
    figures: dict[str, float]
    broken: list[str]
    is_client_bound: bool

    @property
    def holds(self) -> bool:
        """Whether the server can take this load."""
        return not self.broken

    @property
    def power(self) -> float:
        """Tokens a second over the median latency."""
        latency_ms = self.figures.get("e2e_ms_p50", 0.0)
        return self.figures["output_tokens_per_s"] / latency_ms if latency_ms else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """All points in the order of their load. ``best`` is the highest that holds, ``knee`` that of the highest power."""

    options: RunOptions
    plan: Plan
    points: list[Point]

    @property
    def best(self) -> Point | None:
        """The highest load below which nothing broke."""
        best = None
        for point in self.points:
            if not point.holds:
                break
            best = point
        return best

    @property
    def knee(self) -> Point:
        """The load of the highest power."""
        return max(self.points, key=lambda point: point.power)


def search(options: RunOptions, plan: Plan, *, show: Callable[[Point], None], run: Run = runner.run) -> Sweep:
    """Make the runs that the search asks for, each of other prompts. Raises UsageError where the plan makes none."""
    if plan.high is not None and plan.high < plan.low:
        raise UsageError(f"the highest load to try, {plan.high:g}, is below the lowest, {plan.low:g}")
    points: list[Point] = []

    def measure(load: float) -> Point:
        result = run(_at(options, plan, load, len(points)))
        point = _judge(result, plan, load, sorted(points, key=lambda p: p.load))
        points.append(point)
        show(point)
        return point

    load = _rounded(plan, plan.low)
    low, high = None, None  # the highest that held, the lowest that broke
    while len(points) < plan.num_points_max:
        if not measure(load).holds:
            high = load
            break
        low = load
        if plan.high is not None and load >= plan.high:
            break
        load = _rounded(plan, load * 2 if plan.high is None else min(load * 2, plan.high))
    while (
        low is not None and high is not None and len(points) < plan.num_points_max and high / low > 1 + plan.precision
    ):
        load = _rounded(plan, (low * high) ** 0.5)
        if load in (low, high):
            break
        if measure(load).holds:
            low = load
        else:
            high = load
    return Sweep(options=options, plan=plan, points=sorted(points, key=lambda p: p.load))


def _rounded(plan: Plan, load: float) -> float:
    return float(max(1, round(load))) if plan.over == "concurrency" else float(f"{load:.3g}")


def _at(options: RunOptions, plan: Plan, load: float, number: int) -> RunOptions:
    when: arrivals.Arrivals
    if plan.over == "concurrency":
        when = arrivals.ClosedLoop(concurrency=int(load))
    elif isinstance(options.arrivals, arrivals.Constant | arrivals.Gamma):
        when = replace(options.arrivals, rate=load)
    else:
        when = arrivals.Poisson(rate=load)
    return replace(
        options,
        arrivals=when,
        num_requests=None,
        duration_s=plan.seconds,
        seed=options.seed + number,  # or the prompts of the last point would be in the server's cache
        num_warmup_requests=options.num_warmup_requests if number == 0 else 0,
        max_inflight=max(options.max_inflight, int(load)),
    )


def _judge(result: RunResult, plan: Plan, load: float, below: list[Point]) -> Point:
    summary = metrics.summarise(result)
    found = figures.flat(summary)
    slower = [point for point in below if point.load < load]
    broken = [
        *_failures(summary),
        *figures.broken(_limits(result.options), found),
        *(_left_over(result, found, slower) if plan.over == "rate" else _no_gain(found, slower)),
    ]
    return Point(load=load, figures=found, broken=broken, is_client_bound=bool(summary.client.bound_by))


def _failures(summary: Summary) -> list[str]:
    if not summary.num_requests:
        return ["no request fell into the time"]
    return [f"{count} × {name}" for name, count in summary.errors.items()]


def _limits(options: RunOptions) -> tuple[Limit, ...]:
    goodput = Limit(figure="goodput_share", relation=">", bound=GOODPUT_SHARE_MIN)
    return (*options.limits, goodput) if options.slo else options.limits


def _left_over(result: RunResult, found: dict[str, float], slower: list[Point]) -> list[str]:
    seconds = result.options.duration_s or 0.0
    usual_s = (slower[0].figures if slower else found).get("e2e_ms_p99", 0.0) / 1e3
    drained_s = max((s.end_s for s in result.samples), default=0.0) - seconds
    if drained_s > usual_s + DRAIN_SHARE_MAX * seconds:
        return [f"it needed {drained_s:.1f} s more to work off {seconds:g} s of arrivals"]
    return []


def _no_gain(found: dict[str, float], slower: list[Point]) -> list[str]:
    best = max((point.figures["output_tokens_per_s"] for point in slower if point.load <= _half(slower)), default=0.0)
    if best and found["output_tokens_per_s"] < best * GAIN_MIN:
        return [f"no more tokens/s than at half the users ({found['output_tokens_per_s']:,.1f}, {best:,.1f})"]
    return []


def _half(slower: list[Point]) -> float:
    return slower[-1].load


def line(plan: Plan, point: Point) -> str:
    """Return a point on one line."""
    found = point.figures
    unit = "requests/s" if plan.over == "rate" else "users"
    cells = [
        f"{point.load:>9g} {unit}",
        f"{found['output_tokens_per_s']:>10,.1f} tokens/s",
        *(f"{name} {found[key]:,.0f} ms" for name, key in _SHOWN if key in found),
        "holds" if point.holds else f"breaks: {'; '.join(point.broken)}",
    ]
    return "  ".join(cells) + ("  CLIENT-BOUND" if point.is_client_bound else "")


_SHOWN = (("TTFT p50", "ttft_ms_p50"), ("p99", "ttft_ms_p99"), ("TPOT p50", "tpot_ms_p50"), ("E2E p50", "e2e_ms_p50"))


def table(sweep: Sweep) -> str:
    """Return the search for a terminal."""
    lines = [line(sweep.plan, point) for point in sweep.points]
    unit = "requests/s" if sweep.plan.over == "rate" else "users at once"
    best = f"{sweep.best.load:g} {unit}" if sweep.best else "none"
    return "\n".join([*lines, f"highest load that holds: {best}; knee: {sweep.knee.load:g} {unit}"]) + "\n"


def markdown(sweep: Sweep) -> str:
    """Return the search as Markdown to paste."""
    unit = "requests/s" if sweep.plan.over == "rate" else "users"
    lines = [
        f"| {unit} | output tokens/s | TTFT p50 ms | p99 | TPOT p50 ms | E2E p50 ms | |",
        "|---|---|---|---|---|---|---|",
    ]
    for point in sweep.points:
        cells = [f"{point.figures[key]:,.1f}" if key in point.figures else "-" for _, key in _SHOWN]
        marks = ["highest that holds"] if point is sweep.best else []
        marks += ["knee"] if point is sweep.knee else []
        note = ", ".join(marks) or "; ".join(point.broken)
        lines.append(f"| {point.load:g} | {point.figures['output_tokens_per_s']:,.1f} | {' | '.join(cells)} | {note} |")
    return "\n".join(lines) + "\n"


def to_json(sweep: Sweep) -> bytes:
    """Return all points for programs."""
    fields: dict[str, Any] = {
        "plan": asdict(sweep.plan),
        "best": sweep.best.load if sweep.best else None,
        "knee": sweep.knee.load,
        "points": [asdict(point) for point in sweep.points],
    }
    return codec.dumps(fields)
