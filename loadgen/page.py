"""A result as one HTML file to look at: figures, plots and every request, without anything from elsewhere. Pure, but
for reading its own parts.

The page's script draws from columns of whole numbers, about 40 bytes a request, so that 10,000 requests stay well below
1 MB. The gaps between tokens are too many for that and travel as quantiles.
"""

import platform
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from loadgen import __version__, codec
from loadgen.arrivals import ClosedLoop
from loadgen.figures import broken, flat
from loadgen.metrics import Summary, inter_chunk_ms, inter_token_ms, percentile, tpot_ms
from loadgen.options import RunOptions
from loadgen.report import COLUMNS, latency_rows, load, milliseconds, wire
from loadgen.result import RunResult
from loadgen.sample import Sample
from loadgen.sweep import Point, Sweep

_FOLDER = Path(__file__).parent

NUM_BINS_MAX = 240
NUM_QUANTILES = 160
NUM_NINES = 3
"""How far the quantiles go: to 99.9 %."""


def run_page(result: RunResult, summary: Summary) -> str:
    """Return the page of a run."""
    options, client = result.options, summary.client
    samples = result.samples
    parts = sorted({s.part for s in samples if s.part})
    statuses = ["ok", "left on purpose", *sorted({s.error_name for s in samples if not s.is_ok})]
    end_s = max((s.end_s for s in samples), default=0.0)
    alarms = []
    if client.bound_by:
        alarms.append(f"Client-bound: these figures are the load generator's own ({' and '.join(client.bound_by)}).")
    alarms += [f"Limit broken: {sentence}." for sentence in broken(options.limits, flat(summary))]
    return _page(
        title=f"{options.name or 'Run'}: {options.template.model}",
        data={
            "lines": [f"{options.target.origin}{options.target.path}, {wire(options)}", load(options)],
            "alarms": alarms,
            "tiles": _tiles(summary),
            "end_ms": max(1, round(end_s * 1e3)),
            "statuses": statuses,
            "parts": parts,
            "requests": [_request(s, statuses, parts) for s in samples],
            "bins": _bins(samples, end_s),
            "quantiles": _quantiles(samples),
            "tables": _tables(summary),
            "facts": _facts(result, summary),
        },
    )


def sweep_page(sweep: Sweep) -> str:
    """Return the page of a search."""
    options = sweep.options
    unit = "requests/s" if sweep.plan.over == "rate" else "users"
    best, knee = sweep.best, sweep.knee
    alarms = [f"Client-bound at {p.load:g} {unit}." for p in sweep.points if p.is_client_bound]
    head = [unit, "tokens/s", "TTFT p50", "p99", "TPOT p50", "E2E p50", ""]
    return _page(
        title=f"{options.name or 'Sweep'}: {options.template.model}",
        data={
            "lines": [f"{options.target.origin}{options.target.path}, {wire(options)}"],
            "alarms": alarms,
            "tiles": [
                [f"{best.load:g}" if best else "none", f"{unit}: the highest load that holds", best is None],
                [f"{knee.load:g}", f"{unit}: the knee", False],
                [f"{max(p.figures['output_tokens_per_s'] for p in sweep.points):,.0f}", "most output tokens/s", False],
                [f"{len(sweep.points)}", f"loads of {sweep.plan.seconds:g} s", False],
            ],
            "unit": unit,
            "best": best.load if best else None,
            "knee": knee.load,
            "points": [_point(p) for p in sweep.points],
            "tables": [
                {
                    "title": "Loads",
                    "note": "Latencies in ms, from the intended time.",
                    "wide": True,
                    "head": head,
                    "rows": [
                        {"cells": _point_cells(p, best, knee), "marked": p is best, "words": len(head) - 1}
                        for p in sweep.points
                    ],
                }
            ],
            "facts": [
                ["limits", ", ".join(map(str, options.limits)) or "none"],
                ["of a request", _slo(options)],
                *_origins(options),
            ],
        },
    )


def _page(*, title: str, data: dict[str, Any]) -> str:
    # Inside a string "</script" would end the element and "<!--" hide its end.
    json = codec.dumps({"title": title, **data}).decode().replace("<", "\\u003c")
    page = (_FOLDER / "page.html").read_text(encoding="utf-8")
    shown = title.replace("&", "&amp;").replace("<", "&lt;")
    for mark, text in (
        ("@STYLE@", (_FOLDER / "page.css").read_text(encoding="utf-8")),
        ("@SCRIPT@", (_FOLDER / "page.js").read_text(encoding="utf-8")),
        ("@TITLE@", shown),
        ("@DATA@", json),
    ):
        page = page.replace(mark, text, 1)
    return page


def _request(sample: Sample, statuses: Sequence[str], parts: Sequence[str]) -> list[Any]:
    times = sample.answer.event_ns
    wait_ms = -1 if sample.sent_s is None else _short((sample.sent_s - sample.intended_s) * 1e3)
    first_ms: float = -1
    if times and sample.sent_s is not None:
        first_ms = _short((sample.sent_s - sample.intended_s) * 1e3 + times[0] / 1e6)
    status = statuses.index(sample.error_name) if not sample.is_ok else int(sample.is_aborted)
    return [
        round(sample.intended_s * 1e3),
        wait_ms,
        first_ms,
        _short((sample.end_s - sample.intended_s) * 1e3),
        sample.answer.num_output_tokens,
        status,
        parts.index(sample.part) if sample.part else -1,
        sample.index,
    ]


def _short(ms: float) -> float:
    """Round to a thousandth of the value or so: what a plot can show."""
    return round(ms) if ms >= 1000 else round(ms, 1) if ms >= 10 else round(ms, 2)


def _bins(samples: Sequence[Sample], end_s: float) -> dict[str, Any]:
    """Return tokens a second, open requests and latencies in equal slices of the run."""
    num_bins = max(1, min(NUM_BINS_MAX, round(end_s * 2)))
    width_s = max(end_s, 1e-3) / num_bins
    tokens = [0.0] * num_bins
    changes = [0.0] * (num_bins + 1)
    e2e_ms: list[list[float]] = [[] for _ in range(num_bins)]

    def at(time_s: float) -> int:
        return min(num_bins - 1, max(0, int(time_s / width_s)))

    for sample in samples:
        times, sent_s = sample.answer.event_ns, sample.sent_s
        if times and sent_s is not None:
            share = sample.answer.num_output_tokens / len(times)
            for ns in times:
                tokens[at(sent_s + ns / 1e9)] += share
        changes[at(sample.intended_s)] += 1
        changes[at(sample.end_s) + 1] -= 1
        if sample.is_ok and not sample.is_aborted:
            e2e_ms[at(sample.intended_s)].append((sample.end_s - sample.intended_s) * 1e3)
    open_requests, total = [], 0.0
    for change in changes[:-1]:
        total += change
        open_requests.append(round(total))
    return {
        "width_ms": width_s * 1e3,
        "tokens_per_s": [round(n / width_s, 1) for n in tokens],
        "open": open_requests,
        "e2e_ms": [round(median(values), 1) if values else 0 for values in e2e_ms],
    }


def _quantiles(samples: Sequence[Sample]) -> dict[str, list[float]]:
    answers = [s.answer for s in samples if s.is_ok]
    counted = [a for a in answers if a.event_tokens or a.is_token_per_event]
    # Evenly spaced on the plot's axis, on which each nine takes the same room.
    marks = [100 - 100 * 10 ** (-step / NUM_QUANTILES * NUM_NINES) for step in range(NUM_QUANTILES + 1)]
    found: dict[str, list[float]] = {"at": [round(q, 3) for q in marks]}
    for name, values in (
        ("inter-token", [gap for a in counted for gap in inter_token_ms(a)]),
        ("inter-chunk", [gap for a in answers for gap in inter_chunk_ms(a)]),
        ("TPOT", [t for a in answers if (t := tpot_ms(a)) is not None]),
    ):
        if values:
            values.sort()
            found[name] = [round(percentile(values, q), 3) for q in marks]
    return found


def _tiles(summary: Summary) -> list[list[Any]]:
    num_failed = summary.num_requests - summary.num_ok
    first, whole, tpot = summary.first_content_ms.intended, summary.e2e_ms.intended, summary.tpot_ms
    tiles: list[list[Any]] = [
        [f"{summary.num_ok:,}", "requests ok", False],
        [f"{num_failed:,}", "failed", num_failed > 0],
        [f"{summary.throughput.requests_per_s:,.2f}", "requests/s", False],
        [f"{summary.throughput.output_tokens_per_s:,.0f}", "output tokens/s", False],
    ]
    for name, values in (("TTFT", first), ("TPOT", tpot), ("E2E", whole)):
        if values is not None:
            tiles.append([_time(values.p50), f"{name} p50; p99 {_time(values.p99)}", False])
    if summary.goodput is not None:
        good = summary.goodput
        tiles.append([f"{good.share:.1%}", f"goodput, {good.share_low:.1%} to {good.share_high:.1%}", False])
    return tiles


def _time(ms: float) -> str:
    return f"{ms / 1e3:,.3g} s" if ms >= 1000 else f"{ms:.3g} ms"


def _tables(summary: Summary) -> list[dict[str, Any]]:
    tables = [
        {
            "title": "Latencies",
            "note": "In ms.",
            "wide": True,
            "head": ["", *COLUMNS, "n"],
            "rows": [
                {"cells": [name, *(milliseconds(getattr(d, c)) for c in COLUMNS), f"{d.count:,}"]}
                for name, d in latency_rows(summary)
                if d is not None
            ],
        }
    ]
    if summary.parts:
        tables.append(
            {
                "title": "Parts",
                "note": "Latencies in ms, from the intended time.",
                "wide": True,
                "head": ["", "ok", "left", "failed", "TTFT p50", "p99", "E2E p50", "p99", "errors"],
                "rows": [
                    {
                        "words": 8,
                        "cells": [
                            name,
                            *(f"{n:,}" for n in (part.num_ok, part.num_aborted, part.num_requests - part.num_ok)),
                            *(
                                milliseconds(getattr(d, c)) if d else "-"
                                for d in (part.first_content_ms, part.e2e_ms)
                                for c in ("p50", "p99")
                            ),
                            ", ".join(f"{count} × {kind}" for kind, count in part.errors.items()),
                        ],
                    }
                    for name, part in summary.parts.items()
                ],
            }
        )
    if summary.errors:
        tables.append(
            {
                "title": "Errors",
                "note": "With one example of each.",
                "wide": True,
                "head": ["kind", "requests", ""],
                "rows": [
                    {"cells": [kind, f"{count:,}", summary.error_details[kind][:300]], "words": 2}
                    for kind, count in summary.errors.items()
                ],
            }
        )
    return tables


def _facts(result: RunResult, summary: Summary) -> list[list[str]]:
    options, client = result.options, summary.client
    lags = [
        f"{name} lag p99 {milliseconds(d.p99)} ms, max {milliseconds(d.max)} ms"
        for name, d in (("loop", client.loop_lag_ms), ("send", client.send_lag_ms))
        if d is not None
    ]
    facts = [
        ["started", datetime.fromtimestamp(result.started_at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")],
        ["window", f"{summary.throughput.window_s:,.1f} s; {summary.num_measured:,} requests in the latencies"],
        ["client", f"CPU {client.cpu_share:.0%} of a core in the busiest process, {', '.join(lags)}"],
        ["seed", f"{options.seed}; {options.num_processes} processes"],
        ["limits of a request", _slo(options)],
        ["limits of the run", ", ".join(map(str, options.limits)) or "none"],
        ["held back", f"{client.num_held_back:,} requests by the bound of {options.max_inflight} in flight"],
        *_origins(options),
        ["loop", f"{result.loop_name}, Python {platform.python_version()}, {platform.platform()}"],
    ]
    for name, d in (("prompt tokens", summary.prompt_tokens), ("output tokens", summary.output_tokens)):
        if d is not None:
            facts.insert(2, [name, f"mean {d.mean:,.1f}, {d.min:,.0f} to {d.max:,.0f}"])
    if summary.server_queue:
        queue = ", ".join(
            f"{key[:-3]} {milliseconds(v)} ms" for key, v in summary.server_queue.items() if key != "count"
        )
        facts.insert(2, ["queue, by the server's metrics", queue])
    if isinstance(options.arrivals, ClosedLoop):
        facts.append(
            ["closed loop", "a user's next request waits for its last answer: a stall is met once by each user"]
        )
    return facts


def _origins(options: RunOptions) -> list[list[str]]:
    labels = [[str(name), str(value)] for name, value in options.labels.items()]
    return [*labels, ["by", f"loadgen {__version__}"]]


def _slo(options: RunOptions) -> str:
    slo = options.slo
    pairs: Iterable[tuple[str, float | None]] = (("TTFT", slo.ttft_ms), ("TPOT", slo.tpot_ms), ("E2E", slo.e2e_ms))
    return ", ".join(f"{name} up to {value:g} ms" for name, value in pairs if value is not None) or "none"


def _point(point: Point) -> dict[str, Any]:
    found = point.figures
    return {
        "load": point.load,
        "tokens_per_s": round(found["output_tokens_per_s"], 2),
        "TTFT p50": _short(found.get("ttft_ms_p50", 0.0)),
        "TTFT p99": _short(found.get("ttft_ms_p99", 0.0)),
        "E2E p50": _short(found.get("e2e_ms_p50", 0.0)),
        "holds": point.holds,
        "note": "holds" if point.holds else "; ".join(point.broken),
    }


def _point_cells(point: Point, best: Point | None, knee: Point) -> list[str]:
    keys = ("ttft_ms_p50", "ttft_ms_p99", "tpot_ms_p50", "e2e_ms_p50")
    marks = [name for name, marked in (("highest that holds", best), ("knee", knee)) if point is marked]
    return [
        f"{point.load:g}",
        f"{point.figures['output_tokens_per_s']:,.1f}",
        *(milliseconds(point.figures[key]) if key in point.figures else "-" for key in keys),
        ", ".join(marks + point.broken),
    ]
