"""A result for people (a table, Markdown) and for programs (JSON with every sample). Pure."""

import platform
from collections.abc import Iterable
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from loadgen import __version__, codec
from loadgen.arrivals import Recorded
from loadgen.figures import broken, flat
from loadgen.metrics import Distribution, FromTimes, Goodput, Summary
from loadgen.options import RunOptions
from loadgen.result import RunResult
from loadgen.sample import Sample

SCHEMA = 2
"""Raised whenever a reader of the JSON would have to change."""

COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")
_OPTIONAL = ("inter-token", "queue, by the server (headers)")
_RED, _PLAIN = "\x1b[1;31m", "\x1b[0m"


def table(result: RunResult, summary: Summary, *, is_colored: bool) -> str:
    """Return the report for a terminal, ended by a newline."""
    options = result.options
    lines = [
        f"{options.template.model} at {options.target.origin}{options.target.path}, {wire(options)}",
        f"{load(options)}, seed {options.seed}, {_plural(options.num_processes, 'process', 'processes')}",
        *_calibrations(options),
        "",
        *_counts(summary, is_colored),
        *_throughput(summary),
        *_goodput(summary.goodput),
        "",
        *_latencies(summary),
        *_parts(summary),
        "",
        *_client(summary, is_colored),
        *(_red(f"limit       {sentence}", is_colored) for sentence in broken(options.limits, flat(summary))),
    ]
    return "\n".join(lines) + "\n"


def markdown(result: RunResult, summary: Summary) -> str:
    """Return the figures as Markdown to paste, with what they are of."""
    options = result.options
    throughput = summary.throughput
    lines = [
        f"**{options.name or 'loadgen'}**: {options.template.model}, {load(options)}, seed {options.seed}, "
        f"{wire(options)}; "
        f"{summary.num_ok:,} requests succeeded, {summary.num_requests - summary.num_ok:,} failed; "
        f"{throughput.requests_per_s:,.2f} requests/s, {throughput.output_tokens_per_s:,.1f} output tokens/s"
        + (f"; goodput {summary.goodput.share:.1%}" if summary.goodput else ""),
        "",
        f"| ms | {' | '.join(COLUMNS)} |",
        f"|---|{'---|' * len(COLUMNS)}",
    ]
    for name, values in latency_rows(summary):
        if values is not None:
            lines.append(
                f"| {name.strip()} | {' | '.join(milliseconds(getattr(values, column)) for column in COLUMNS)} |"
            )
    if summary.client.bound_by:
        lines += [
            "",
            f"**Client-bound** ({' and '.join(summary.client.bound_by)}): these figures are the client's own.",
        ]
    return "\n".join(lines) + "\n"


def load(options: RunOptions) -> str:
    """Return what came when, in words."""
    name = f"{options.name}: " if options.name else ""
    bound = "" if options.arrivals.kind == "closed" else f", at most {options.max_inflight} at once"
    return f"{name}{options.arrivals}{bound}"


def wire(options: RunOptions) -> str:
    """Return how answers travel, in words."""
    if options.template.endpoint == "responses-ws":
        return "websocket"
    return "SSE" if options.template.is_streamed else "not streamed"


def to_json(result: RunResult, summary: Summary) -> bytes:
    """Return everything that is known of a run, but for keys and prompts."""
    options = result.options
    return codec.dumps(
        {
            "schema": SCHEMA,
            "loadgen": __version__,
            "started_at": datetime.fromtimestamp(result.started_at, UTC).isoformat(),
            "environment": {
                "python": platform.python_version(),
                "platform": platform.platform(),
                "loop": result.loop_name,
                "json": "orjson" if codec.HAS_ORJSON else "json",
            },
            "options": _options(options),
            "summary": asdict(summary),
            "figures": flat(summary),
            "broken_limits": broken(options.limits, flat(summary)),
            "processes": [
                {
                    "process": d.process,
                    "wall_s": d.wall_s,
                    "cpu_s": d.cpu_s,
                    "cpu_shares": d.cpu_shares.tolist(),
                    "num_held_back": d.num_held_back,
                    "loop_lag_ms": [round(lag * 1e3, 3) for lag in d.loop_lag_s],
                }
                for d in result.drivers
            ],
            "requests": [_request(sample) for sample in result.samples],
        }
    )


def _request(sample: Sample) -> dict[str, Any]:
    answer = sample.answer
    return {
        "index": sample.index,
        "turn": sample.turn,
        "part": sample.part,
        "process": sample.process,
        "intended_s": round(sample.intended_s, 6),
        "sent_s": None if sample.sent_s is None else round(sample.sent_s, 6),
        "end_s": round(sample.end_s, 6),
        "lag_ms": round(sample.lag_s * 1e3, 3),
        "connect_ms": None if sample.connect_s is None else round(sample.connect_s * 1e3, 3),
        "is_resent": sample.is_resent,
        "is_aborted": sample.is_aborted,
        "status": sample.status,
        "error": sample.error_name or None,
        "detail": sample.detail,
        "finish_reason": answer.finish_reason,
        "prompt_tokens": answer.prompt_tokens,
        "cached_tokens": answer.cached_tokens,
        "completion_tokens": answer.completion_tokens,
        "queue_ms": answer.queue_ms,
        "num_bytes": answer.num_bytes,
        "first_byte_us": None if answer.first_byte_ns is None else answer.first_byte_ns // 1000,
        "event_us": [ns // 1000 for ns in answer.event_ns],
        "event_tokens": answer.event_tokens.tolist(),
    }


def _options(options: RunOptions) -> dict[str, Any]:
    template, arrivals = options.template, options.arrivals
    # A trace's times are in the samples.
    law = {} if isinstance(arrivals, Recorded) else asdict(arrivals)
    return {
        "name": options.name,
        "host": options.target.host,
        "port": options.target.port,
        "path": options.target.path,
        "model": template.model,
        "endpoint": template.endpoint,
        "max_tokens": template.max_tokens,
        "temperature": template.temperature,
        "ignore_eos": template.ignore_eos,
        "is_streamed": template.is_streamed,
        "usage": template.usage,
        "history": options.history,
        "extra_body": dict(template.extra),
        "arrivals": {"kind": arrivals.kind, **law},
        "calibrations": {language: asdict(c) for language, c in options.calibrations.items()},
        "num_requests": options.num_requests,
        "duration_s": options.duration_s,
        "num_warmup_requests": options.num_warmup_requests,
        "warmup_s": options.warmup_s,
        "cooldown_s": options.cooldown_s,
        "timeout_s": options.timeout_s,
        "connect_timeout_s": options.connect_timeout_s,
        "max_inflight": options.max_inflight,
        "num_processes": options.num_processes,
        "seed": options.seed,
        "slo": asdict(options.slo),
        "limits": [str(limit) for limit in options.limits],
        "labels": dict(options.labels),
    }


def _calibrations(options: RunOptions) -> list[str]:
    return [
        f"{language}: {c.tokens_per_word:.3f} tokens a word and {c.overhead_tokens:.1f} a prompt, as the server counts"
        for language, c in options.calibrations.items()
    ]


def _counts(summary: Summary, is_colored: bool) -> list[str]:
    num_failed = summary.num_requests - summary.num_ok
    lines = [f"requests    {summary.num_ok:,} ok, {num_failed:,} failed"]
    if summary.num_aborted:
        lines.append(f"            {summary.num_aborted:,} of them left in the middle, as they were told to")
    if summary.num_measured != summary.num_ok:
        lines.append(f"            latencies of {summary.num_measured:,}: the others belong to warm-up or cool-down")
    if summary.num_resent:
        lines.append(
            f"            {summary.num_resent:,} sent again: the server closed their kept connections unanswered"
        )
    for name, count in summary.errors.items():
        lines.append(_red(f"            {count:,} × {name}: {summary.error_details[name][:100]}", is_colored))
    return lines


def _throughput(summary: Summary) -> list[str]:
    throughput = summary.throughput
    tokens = "events" if throughput.is_output_counted_by_events else "tokens"
    parts = [f"{throughput.requests_per_s:,.2f} requests/s"]
    if throughput.input_tokens_per_s is not None:
        parts.append(f"{throughput.input_tokens_per_s:,.1f} input tokens/s")
    parts.append(f"{throughput.output_tokens_per_s:,.1f} output {tokens}/s")
    lines = [f"throughput  {', '.join(parts)}, over {throughput.window_s:,.1f} s"]
    lengths = [
        f"{name} mean {d.mean:,.1f}, {d.min:,.0f} to {d.max:,.0f}"
        for name, d in (("prompt", summary.prompt_tokens), (f"output {tokens}", summary.output_tokens))
        if d is not None
    ]
    return [*lines, f"lengths     {'; '.join(lengths)}"] if lengths else lines


def _goodput(goodput: Goodput | None) -> list[str]:
    if goodput is None:
        return []
    return [
        f"goodput     {goodput.share:.1%} of {goodput.num_judged:,} kept the limits (95 %: {goodput.share_low:.1%} to "
        f"{goodput.share_high:.1%}), {goodput.requests_per_s:,.2f} requests/s"
    ]


def _parts(summary: Summary) -> Iterable[str]:
    if not summary.parts:
        return
    yield ""
    yield f"{'part':<24}{'ok':>8}{'left':>8}{'failed':>8}{'TTFT p50':>12}{'p99':>10}{'E2E p50':>12}{'p99':>10}"
    for name, part in summary.parts.items():
        first, whole = part.first_content_ms, part.e2e_ms
        cells = [milliseconds(d.p50) if d else "-" for d in (first, whole)]
        tails = [milliseconds(d.p99) if d else "-" for d in (first, whole)]
        errors = ", ".join(f"{count} × {kind}" for kind, count in part.errors.items())
        yield (
            f"{name:<24}{part.num_ok:>8,}{part.num_aborted:>8,}{part.num_requests - part.num_ok:>8,}"
            f"{cells[0]:>12}{tails[0]:>10}{cells[1]:>12}{tails[1]:>10}  {errors}".rstrip()
        )


def _latencies(summary: Summary) -> Iterable[str]:
    yield f"{'ms':<34}{''.join(f'{column:>10}' for column in COLUMNS)}{'n':>10}"
    for name, values in latency_rows(summary):
        if values is not None or name not in _OPTIONAL:
            yield _row(name, values)
    if summary.server_queue:
        figures = ", ".join(
            f"{key[:-3]} {milliseconds(value)}" for key, value in summary.server_queue.items() if key != "count"
        )
        yield f"{'queue, by the server (metrics)':<34}{figures} of {summary.server_queue['count']:,.0f}"


def latency_rows(summary: Summary) -> list[tuple[str, Distribution | None]]:
    """Return the latencies with their names, in the order in which people read them."""

    def pair(name: str, latency: FromTimes) -> list[tuple[str, Distribution | None]]:
        return [(f"{name}, from send", latency.sent), ("  from intended time", latency.intended)]

    return [
        *pair("TTFT, first content", summary.first_content_ms),
        *pair("TTFT, any byte", summary.first_byte_ms),
        *pair("E2E", summary.e2e_ms),
        ("TPOT", summary.tpot_ms),
        ("inter-token", summary.inter_token_ms),
        ("inter-chunk", summary.inter_chunk_ms),
        ("queue, by the server (headers)", summary.queue_ms),
        ("connect", summary.connect_ms),
    ]


def _row(name: str, values: Distribution | None) -> str:
    if values is None:
        return f"{name:<34}{'-':>10}"
    cells = "".join(f"{milliseconds(getattr(values, column)):>10}" for column in COLUMNS)
    return f"{name:<34}{cells}{values.count:>10,}"


def milliseconds(value: float) -> str:
    """Return a value as short as it stays useful, without its unit."""
    return f"{value:,.0f}" if value >= 10_000 else f"{value:,.1f}" if value >= 100 else f"{value:,.2f}"


def _client(summary: Summary, is_colored: bool) -> Iterable[str]:
    client = summary.client
    lags = [
        f"{name} lag p99 {milliseconds(d.p99)} ms, max {milliseconds(d.max)}"
        for name, d in (("loop", client.loop_lag_ms), ("send", client.send_lag_ms))
        if d is not None
    ]
    yield f"client      CPU {client.cpu_share:.0%} (p90 of seconds {client.cpu_share_p90:.0%}), {', '.join(lags)}"
    if client.num_held_back:
        yield f"            {client.num_held_back:,} requests were held back by the bound of requests in flight"
    if client.bound_by:
        causes = " and ".join(client.bound_by)
        yield _red(f"            client-bound: the figures above are this program's own ({causes})", is_colored)


def _red(text: str, is_colored: bool) -> str:
    return f"{_RED}{text}{_PLAIN}" if is_colored else text


def _plural(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"
