"""A run's figures by flat names, for limits, comparisons and searches: ``ttft_ms_p99``, ``output_tokens_per_s``. Pure.

A latency's plain name counts from the intended time, with ``_sent`` from the send: ``ttft_sent_ms_p99``.
"""

import re
from collections.abc import Mapping
from difflib import get_close_matches

from loadgen.errors import UsageError
from loadgen.metrics import Distribution, Summary
from loadgen.options import Limit

STATISTICS = ("mean", "min", "p50", "p90", "p95", "p99", "max")

_LATENCIES = ("ttft", "ttft_sent", "first_byte", "first_byte_sent", "e2e", "e2e_sent", "tpot", "itl", "icl", "queue")
_RATES = (
    "requests_per_s",
    "input_tokens_per_s",
    "output_tokens_per_s",
    "goodput_share",
    "goodput_requests_per_s",
    "error_share",
    "cached_token_share",
    "client_cpu_share",
)

NAMES = (*_RATES, *(f"{name}_ms_{statistic}" for name in _LATENCIES for statistic in STATISTICS))

_LIMIT = re.compile(r"\s*([a-z0-9_]+)\s*([<>])\s*([0-9.eE+-]+)\s*\Z")


def flat(summary: Summary) -> dict[str, float]:
    """Return every figure that could be measured, by its name."""
    figures = {
        "requests_per_s": summary.throughput.requests_per_s,
        "output_tokens_per_s": summary.throughput.output_tokens_per_s,
        "error_share": 1 - summary.num_ok / summary.num_requests if summary.num_requests else 0.0,
        "client_cpu_share": summary.client.cpu_share,
    }
    if summary.throughput.input_tokens_per_s is not None:
        figures["input_tokens_per_s"] = summary.throughput.input_tokens_per_s
    if summary.goodput is not None:
        figures["goodput_share"] = summary.goodput.share
        figures["goodput_requests_per_s"] = summary.goodput.requests_per_s
    if summary.cached_tokens is not None and summary.prompt_tokens is not None and summary.prompt_tokens.mean:
        figures["cached_token_share"] = summary.cached_tokens.mean / summary.prompt_tokens.mean
    for name, distribution in _latencies(summary).items():
        if distribution is not None:
            figures |= {f"{name}_ms_{statistic}": getattr(distribution, statistic) for statistic in STATISTICS}
    return figures


def _latencies(summary: Summary) -> Mapping[str, Distribution | None]:
    return {
        "ttft": summary.first_content_ms.intended,
        "ttft_sent": summary.first_content_ms.sent,
        "first_byte": summary.first_byte_ms.intended,
        "first_byte_sent": summary.first_byte_ms.sent,
        "e2e": summary.e2e_ms.intended,
        "e2e_sent": summary.e2e_ms.sent,
        "tpot": summary.tpot_ms,
        "itl": summary.inter_token_ms,
        "icl": summary.inter_chunk_ms,
        "queue": summary.queue_ms,
    }


def parse_limit(text: str) -> Limit:
    """Make a limit of ``FIGURE < NUMBER`` or ``FIGURE > NUMBER``. Raises UsageError."""
    match = _LIMIT.match(text)
    if match is None:
        raise UsageError(f"{text!r} is not a limit such as 'ttft_ms_p99 < 500' or 'goodput_share > 0.99'")
    name, relation, number = match.groups()
    try:
        bound = float(number)
    except ValueError as error:
        raise UsageError(f"{text!r}: {number} is not a number") from error
    return Limit(figure=check_name(name), relation="<" if relation == "<" else ">", bound=bound)


def check_name(name: str) -> str:
    """Return the name of a figure, or raise UsageError with those that are close."""
    if name not in NAMES:
        close = get_close_matches(name, NAMES, n=3)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise UsageError(f"there is no figure {name}{hint}")
    return name


def broken(limits: tuple[Limit, ...], figures: Mapping[str, float]) -> list[str]:
    """Return a sentence for each limit that is broken, or whose figure could not be measured."""
    sentences = []
    for limit in limits:
        value = figures.get(limit.figure)
        if value is None:
            sentences.append(f"{limit}: could not be measured")
        elif not limit.is_kept_by(value):
            sentences.append(f"{limit}: it is {value:.4g}")
    return sentences
