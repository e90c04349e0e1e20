"""A run as a timeline in the trace event format, which Chrome's tracing page and Perfetto show. Pure.

Each request is a row of slices: *waiting* from its intended time to its send, *first token* until its first content,
*tokens* until its end. Rows are reused, so that there are no more of them than requests were out at once.
"""

from collections.abc import Iterator
from heapq import heappop, heappush
from typing import Any

from loadgen import codec
from loadgen.driver import LAG_PERIOD_S
from loadgen.result import RunResult
from loadgen.sample import Sample

LAG_EVENTS_MAX = 20_000


def to_trace(result: RunResult) -> bytes:
    """Return the trace as JSON."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": d.process, "name": "process_name", "args": {"name": f"loadgen process {d.process}"}}
        for d in result.drivers
    ]
    for sample, row in rows(result.samples):
        events.extend(_slices(sample, row))
    for driver in result.drivers:
        stride = max(1, len(driver.loop_lag_s) // LAG_EVENTS_MAX)
        for number in range(0, len(driver.loop_lag_s), stride):
            lag_ms = driver.loop_lag_s[number] * 1e3
            at_us = round(number * LAG_PERIOD_S * 1e6)
            events.append(
                {"ph": "C", "pid": driver.process, "name": "loop lag", "ts": at_us, "args": {"ms": round(lag_ms, 3)}}
            )
    return codec.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def rows(samples: list[Sample]) -> Iterator[tuple[Sample, int]]:
    """Give each request the lowest row that is free from its intended time to its end, process by process."""
    free: dict[int, list[int]] = {}
    busy: dict[int, list[tuple[float, int]]] = {}
    num_rows: dict[int, int] = {}
    for sample in sorted(samples, key=lambda s: s.intended_s):
        process = sample.process
        ours, out = free.setdefault(process, []), busy.setdefault(process, [])
        while out and out[0][0] <= sample.intended_s:
            heappush(ours, heappop(out)[1])
        if ours:
            row = heappop(ours)
        else:
            row = num_rows[process] = num_rows.get(process, 0) + 1
        heappush(out, (sample.end_s, row))
        yield sample, row


def _slices(sample: Sample, row: int) -> Iterator[dict[str, Any]]:
    sent_s = sample.end_s if sample.sent_s is None else sample.sent_s
    times = sample.answer.event_ns
    first_s = sent_s + times[0] / 1e9 if times else sample.end_s
    name = f"{sample.index}.{sample.turn}"
    facts = {
        "part": sample.part,
        "prompt_tokens": sample.answer.prompt_tokens,
        "cached_tokens": sample.answer.cached_tokens,
        "output_tokens": sample.answer.num_output_tokens,
        "error": sample.error_name or None,
        "detail": sample.detail or None,
    }
    for what, begin_s, end_s in (
        ("waiting", sample.intended_s, sent_s),
        ("first token", sent_s, first_s),
        ("tokens", first_s, sample.end_s),
    ):
        if end_s > begin_s:
            yield {
                "ph": "X",
                "pid": sample.process,
                "tid": row,
                "name": f"{what} {name}" if sample.is_ok else f"failed {name}",
                "cat": what,
                "ts": round(begin_s * 1e6),
                "dur": round((end_s - begin_s) * 1e6),
                "args": facts,
            }
