"""What ``compare_vllm.py`` finds, as JSON and Markdown: starts, points, ratios, and the gates for one H200."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final


@dataclass(slots=True)
class Start:
    """Seconds from the start of the process. compiled: its log tells of kernels that were not on disk yet."""

    server: str
    ready_s: float = 0.0
    first_token_s: float = 0.0
    compiled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTotals:
    """What one aserve has counted since its start (``/v1/stats``). cpu_s: of its process without those it started."""

    num_steps: int
    num_rows: int
    num_prefill_tokens: int
    bubble_s: float
    cpu_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSteps:
    """A point as aserve saw it. rows_a_step: decode rows, prompts apart.

    bubble: share of the time in which no step was out beside work. cpu_us: of the server's process, a token out.
    """

    num_steps: int
    rows_a_step: float
    prompt_tokens_a_step: float
    bubble: float
    cpu_us: float

    @classmethod
    def between(cls, before: ServerTotals, after: ServerTotals, *, seconds: float, output_tokens: int) -> "ServerSteps":
        num_steps = after.num_steps - before.num_steps
        a_step = 1 / max(num_steps, 1)
        return cls(
            num_steps=num_steps,
            rows_a_step=(after.num_rows - before.num_rows) * a_step,
            prompt_tokens_a_step=(after.num_prefill_tokens - before.num_prefill_tokens) * a_step,
            bubble=(after.bubble_s - before.bubble_s) / seconds,
            cpu_us=(after.cpu_s - before.cpu_s) / output_tokens * 1e6,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Of one server at so many streams; times in ms. client_cpu: of the busiest client process, a share of a core.

    server_steps: aserve's alone.
    """

    server: str
    streams: int
    run: int
    requests: int
    output_tokens: int
    tokens_per_s: float
    ttft_p50: float
    ttft_p99: float
    tpot_p50: float
    itl_p50: float
    itl_p99: float
    client_cpu: float
    server_steps: ServerSteps | None = None

    @classmethod
    def of(
        cls,
        server: str,
        streams: int,
        run: int,
        answers: Sequence[dict[str, Any]],
        totals: tuple[ServerTotals, ServerTotals] | None = None,
    ) -> "Point":
        """totals: before and after it."""

        def ms(name: str, share: float) -> float:
            values = sorted(value for answer in answers for value in answer[name])
            return values[min(len(values) - 1, int(len(values) * share))] * 1e3 if values else 0.0

        seconds = max(answer["ended_s"] for answer in answers) - min(answer["started_s"] for answer in answers)
        tokens = sum(answer["output_tokens"] for answer in answers)
        return cls(
            server=server,
            streams=streams,
            run=run,
            requests=sum(answer["completed"] for answer in answers),
            output_tokens=tokens,
            tokens_per_s=tokens / seconds,
            ttft_p50=ms("ttft_s", 0.5),
            ttft_p99=ms("ttft_s", 0.99),
            tpot_p50=ms("tpot_s", 0.5),
            itl_p50=ms("itl_s", 0.5),
            itl_p99=ms("itl_s", 0.99),
            client_cpu=max(answer["cpu"] for answer in answers),
            server_steps=totals and ServerSteps.between(*totals, seconds=seconds, output_tokens=tokens),
        )


FIGURES: Final = {
    "ttft_p50": "TTFT p50 ms", "ttft_p99": "TTFT p99 ms", "tpot_p50": "TPOT p50 ms", "itl_p99": "ITL p99 ms",
    "tokens_per_s": "tokens/s",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Gate:
    """A figure of aserve's as so many ``times`` better than the best of vLLM's, or within ``limit``.

    An aim is what comes after the gates.
    """

    figure: str
    times: float = 1.0
    limit: float | None = None
    is_aim: bool = False

    def wanted(self) -> str:
        sign = "≥" if self.figure == "tokens_per_s" else "≤"
        if self.limit is not None:
            return f"{sign} {self.limit:g}"
        return f"{sign} {self.times:g}x vLLM's" if self.times != 1.0 else f"{sign} vLLM's"

    def is_met(self, ours: float, theirs: float | None) -> bool | None:
        """None: there is nothing of vLLM's to hold it against."""
        if self.limit is not None:
            return ours >= self.limit if self.figure == "tokens_per_s" else ours <= self.limit
        return None if theirs is None else times_better(self.figure, ours, theirs) >= self.times


def times_better(figure: str, ours: float, theirs: float) -> float:
    """Above 1, ours is ahead."""
    better, worse = (ours, theirs) if figure == "tokens_per_s" else (theirs, ours)
    return better / worse if worse else float("inf")


_NO_LATER: Final = (Gate("ttft_p50"), Gate("ttft_p99"))
GATES: Final[dict[tuple[str, int], tuple[Gate, ...]]] = {
    ("llama8b", 1): (
        Gate("tpot_p50"),
        Gate("tpot_p50", limit=4.5),
        Gate("tpot_p50", limit=3.9, is_aim=True),
        Gate("ttft_p50", limit=16, is_aim=True),
    ),
    ("llama8b", 16): (Gate("tpot_p50"), Gate("tpot_p50", limit=4.5, is_aim=True)),
    ("llama8b", 64): (
        Gate("tpot_p50"),
        Gate("tokens_per_s"),
        *_NO_LATER,
        Gate("tokens_per_s", limit=7760, is_aim=True),
        Gate("itl_p99", limit=15, is_aim=True),
    ),
    ("llama1b", 1): (
        Gate("tpot_p50"),
        Gate("tpot_p50", limit=1.05),
        Gate("tpot_p50", limit=0.8, is_aim=True),
        Gate("ttft_p50", limit=6, is_aim=True),
    ),
    ("llama1b", 64): (
        Gate("tpot_p50"),
        Gate("tokens_per_s", 1.8),
        *_NO_LATER,
        Gate("tokens_per_s", limit=30_000, is_aim=True),
    ),
    ("llama1b", 256): (
        Gate("tpot_p50"),
        Gate("tokens_per_s", 2.0),
        *_NO_LATER,
        Gate("tokens_per_s", limit=50_000, is_aim=True),
    ),
}
"""By shape and streams, for one H200."""


@dataclass(slots=True)
class Report:
    """seconds: what a server took them for, in order. A figure of several runs of a point is their median."""

    shape: str
    lengths: tuple[int, int]
    about: dict[str, str]
    starts: list[Start] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)
    not_run: list[str] = field(default_factory=list)
    seconds: list[tuple[str, str, float]] = field(default_factory=list)

    def save(self, out: Path) -> None:
        """As JSON and Markdown. After every point: a run that is cut short has lost nothing."""
        (out / f"{self.shape}.json").write_text(json.dumps(asdict(self), indent=1))
        (out / f"{self.shape}.md").write_text(self.markdown() + "\n")

    def markdown(self) -> str:
        about = ", ".join(f"{key} {value}" for key, value in self.about.items())
        lines = [f"{self.shape}, {self.lengths[0]} tokens in, {self.lengths[1]} out; {about}", ""]
        lines += ["| server | kernels | start to ready s | to first token s |", "|---|---|---|---|"]
        for start in self.starts:
            kernels = "compiled" if start.compiled else "on disk"
            lines.append(f"| {start.server} | {kernels} | {start.ready_s:.2f} | {start.first_token_s:.2f} |")
        lines += ["", "| streams | server | TTFT p50 ms | p99 | TPOT p50 | ITL p50 | p99 | tokens/s | client CPU |"]
        lines += ["|---" * 9 + "|"]
        for point in self._sorted_points():
            lines.append(
                f"| {point.streams} | {point.server} | {point.ttft_p50:.1f} | {point.ttft_p99:.1f} "
                f"| {point.tpot_p50:.2f} | {point.itl_p50:.2f} | {point.itl_p99:.2f} | {point.tokens_per_s:.0f} "
                f"| {point.client_cpu:.0%} |"
            )
        not_run = [f"not run: {what}" for what in self.not_run]
        for block in (self._server_steps(), self._ratios(), self._gates(), self._seconds(), not_run):
            lines += ["", *block] if block else []
        return "\n".join(lines)

    def _sorted_points(self) -> list[Point]:
        names = list(dict.fromkeys(point.server for point in self.points))
        return sorted(self.points, key=lambda point: (point.streams, names.index(point.server), point.run))

    def _server_steps(self) -> list[str]:
        lines = [
            f"| {point.streams} | {point.server} | {steps.num_steps} | {steps.rows_a_step:.1f} "
            f"| {steps.prompt_tokens_a_step:.1f} | {steps.bubble:.1%} | {steps.cpu_us:.1f} |"
            for point in self._sorted_points()
            if (steps := point.server_steps) is not None
        ]
        head = ["| streams | server | steps | rows a step | prompt tokens a step | bubble | server's CPU µs a token |"]
        return ["inside aserve:", "", *head, "|---" * 7 + "|", *lines] if lines else []

    def _ratios(self) -> list[str]:
        """How many times better each setting of aserve is; above 1 is ahead."""
        lines = []
        for streams in sorted({point.streams for point in self.points}):
            for name in self._names("aserve", streams):
                for other in self._names("vllm", streams):
                    ratios = [
                        times_better(figure, self._figure(name, streams, figure), self._figure(other, streams, figure))
                        for figure in FIGURES
                    ]
                    lines.append(f"| {streams} | {name} | {other} | {' | '.join(f'{x:.2f}x' for x in ratios)} |")
        head = ["| streams | ahead | of | " + " | ".join(FIGURES.values()) + " |", "|---" * 8 + "|"]
        return [*head, *lines] if lines else []

    def _gates(self) -> list[str]:
        """Each setting of aserve at its points, against the best of vLLM's servers; and what none of them met."""
        lines = ["| streams | server | figure | wanted | aserve | vLLM's best | |", "|---" * 7 + "|"]
        unmet: list[str] = []
        unknown: list[str] = []
        for (shape, streams), gates in GATES.items():
            if shape != self.shape:
                continue
            for gate in gates:
                best = max if gate.figure == "tokens_per_s" else min
                theirs = best(
                    (self._figure(n, streams, gate.figure) for n in self._names("vllm", streams)), default=None
                )
                verdicts = []
                for name in self._names("aserve", streams):
                    ours = self._figure(name, streams, gate.figure)
                    verdicts.append(gate.is_met(ours, theirs))
                    verdict = {True: "met", False: "missed", None: "nothing to compare"}[verdicts[-1]]
                    lines.append(
                        f"| {streams} | {name} | {FIGURES[gate.figure]} | {gate.wanted()} | {ours:.5g} "
                        f"| {'' if theirs is None else f'{theirs:.5g}'} | {'aim ' * gate.is_aim}{verdict} |"
                    )
                if not gate.is_aim and True not in verdicts:
                    known = unmet if False in verdicts else unknown
                    known.append(f"{FIGURES[gate.figure]} {gate.wanted()} at {streams}")
        if len(lines) == 2:
            return []
        told = [f"gates that no setting met: {'; '.join(unmet) or 'none'}"]
        return [*lines, "", *told, *([f"gates not measured: {'; '.join(unknown)}"] if unknown else [])]

    def _seconds(self) -> list[str]:
        lines = []
        for server in dict.fromkeys(server for server, *_ in self.seconds):
            parts = [(what, took_s) for name, what, took_s in self.seconds if name == server]
            told = ", ".join(f"{what} {took_s:.1f}" for what, took_s in parts)
            lines.append(f"seconds of {server}: {sum(took_s for _, took_s in parts):.1f} ({told})")
        return lines

    def _names(self, kind: str, streams: int) -> list[str]:
        found = (point.server for point in self.points if point.streams == streams and point.server.startswith(kind))
        return list(dict.fromkeys(found))

    def _figure(self, server: str, streams: int, figure: str) -> float:
        return float(median(getattr(p, figure) for p in self.points if (p.server, p.streams) == (server, streams)))
