"""From samples to figures. Pure; the standard library's floats are enough.

Latencies come from the requests that succeeded, and those that failed are counted by kind beside them. Every latency
is given twice: from the send, as most tools do, and from the intended time, which also holds the wait for a connection,
for a place under the bound of requests in flight and for this program itself. Where a server stalls, requests that
should have been sent meanwhile are sent late, and only the second figure shows it ("coordinated omission").

*Inter-chunk* is the gap between two events with text, *inter-token* the same gap shared out to tokens: an event of k
tokens is one gap and k - 1 zeros, for that is how they came. The latter is known only where the server counts tokens in
each event, or where its final count shows that each event was one token.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import floor, sqrt

from loadgen.options import Slo
from loadgen.result import DriverResult, RunResult
from loadgen.sample import Answer, ErrorKind, Sample

CPU_SHARE_MAX = 0.85
LAG_MS_MAX = 20.0
"""Beyond these at the 90th (CPU, by second) or 99th percentile (lags) the figures are this program's own."""
CPU_JUDGED_S_MIN = 1.0
"""A shorter run is mostly its own beginning, and its CPU share says nothing."""

Z_95 = 1.959964
"""Standard deviations on either side that hold 95 % of a normal law."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Percentiles interpolate linearly between the two nearest of the ``count`` values."""

    count: int
    mean: float
    min: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FromTimes:
    """One latency, counted from two times."""

    sent: Distribution | None
    intended: Distribution | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """Rates over ``window_s``, the measured part of the run; of requests that succeeded, whenever they began."""

    window_s: float
    requests_per_s: float
    input_tokens_per_s: float | None  # None where the server gives no usage
    output_tokens_per_s: float
    is_output_counted_by_events: bool  # for at least one request without usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Requests that kept all limits of a request, among those due in the measured window; a failed one kept none.

    ``share_low`` and ``share_high`` hold the true share with 95 % confidence (Wilson's interval).
    """

    num_good: int
    num_judged: int
    share: float
    share_low: float
    share_high: float
    requests_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of a mixture; latencies from the intended time."""

    num_requests: int
    num_ok: int
    num_aborted: int
    errors: dict[str, int]
    first_content_ms: Distribution | None
    e2e_ms: Distribution | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientHealth:
    """How well this program kept up, by its worst process. ``bound_by`` names what makes the figures its own."""

    cpu_share: float
    cpu_share_p90: float  # over the run's seconds
    loop_lag_ms: Distribution | None
    send_lag_ms: Distribution | None
    num_held_back: int
    bound_by: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """All figures of a run. None stands for what could not be measured."""

    num_requests: int
    num_ok: int
    num_aborted: int  # of those: left in the middle, as they were told to
    num_measured: int  # succeeded and due between warm-up and cool-down: those in the latencies
    num_resent: int  # counted in the others by how they ended
    errors: dict[str, int]
    error_details: dict[str, str]  # one example of each
    throughput: Throughput
    goodput: Goodput | None  # None where no limit is set
    first_byte_ms: FromTimes
    first_content_ms: FromTimes
    e2e_ms: FromTimes
    tpot_ms: Distribution | None
    inter_token_ms: Distribution | None
    inter_chunk_ms: Distribution | None
    connect_ms: Distribution | None
    queue_ms: Distribution | None  # by the server's headers
    server_queue: Mapping[str, float]  # by the server's metrics
    output_tokens: Distribution | None
    prompt_tokens: Distribution | None
    cached_tokens: Distribution | None
    parts: dict[str, Part]  # empty unless the run is a mixture
    client: ClientHealth


def summarise(result: RunResult) -> Summary:
    """Return the figures of a run."""
    options = result.options
    everything = result.samples
    begin_s = options.warmup_s
    end_s = max((s.end_s for s in everything), default=0.0) - options.cooldown_s
    samples = [s for s in everything if s.part not in options.unmeasured_parts]
    ok = [s for s in samples if s.is_ok]
    failed = [s for s in samples if not s.is_ok]
    measured = [s for s in ok if begin_s <= s.intended_s <= end_s]
    answers = [s.answer for s in measured]
    counted = [a for a in answers if a.event_tokens or a.is_token_per_event]
    return Summary(
        num_requests=len(samples),
        num_ok=len(ok),
        num_aborted=sum(s.is_aborted for s in ok),
        num_measured=len(measured),
        num_resent=sum(s.is_resent for s in samples),
        errors=dict(sorted(Counter(s.error_name for s in failed).items())),
        error_details={s.error_name: s.detail for s in reversed(failed)},
        throughput=_throughput(ok, begin_s, end_s),
        goodput=_goodput(samples, options.slo, begin_s, end_s),
        first_byte_ms=_from_times((s, s.answer.first_byte_ns) for s in measured),
        first_content_ms=_from_times((s, first_content_ns(s)) for s in measured),
        e2e_ms=_from_times((s, e2e_ns(s)) for s in measured),
        tpot_ms=distribution([t for a in answers if (t := tpot_ms(a)) is not None]),
        inter_token_ms=distribution([gap for a in counted for gap in inter_token_ms(a)]),
        inter_chunk_ms=distribution([gap for a in answers for gap in inter_chunk_ms(a)]),
        connect_ms=distribution([s.connect_s * 1e3 for s in measured if s.connect_s is not None]),
        queue_ms=distribution([a.queue_ms for a in answers if a.queue_ms is not None]),
        server_queue=dict(result.server_queue),
        output_tokens=distribution([float(a.num_output_tokens) for a in answers]),
        prompt_tokens=distribution([float(a.prompt_tokens) for a in answers if a.prompt_tokens is not None]),
        cached_tokens=distribution([float(a.cached_tokens) for a in answers if a.cached_tokens is not None]),
        parts=_parts(everything),
        client=_health(result.drivers, everything),
    )


def percentile(ascending: Sequence[float], q: float) -> float:
    """Return the ``q``-th percentile (0..100) of at least one ascending value, interpolated linearly."""
    position = (len(ascending) - 1) * q / 100
    low = floor(position)
    high = min(low + 1, len(ascending) - 1)
    return ascending[low] + (ascending[high] - ascending[low]) * (position - low)


def distribution(values: Iterable[float]) -> Distribution | None:
    """Return the distribution of ``values``, or None of none."""
    ascending = sorted(values)
    if not ascending:
        return None
    return Distribution(
        count=len(ascending),
        mean=sum(ascending) / len(ascending),
        min=ascending[0],
        p50=percentile(ascending, 50),
        p90=percentile(ascending, 90),
        p95=percentile(ascending, 95),
        p99=percentile(ascending, 99),
        max=ascending[-1],
    )


def inter_chunk_ms(answer: Answer) -> list[float]:
    """Return the gaps between an answer's content events."""
    times = answer.event_ns
    return [(times[i] - times[i - 1]) / 1e6 for i in range(1, len(times))]


def inter_token_ms(answer: Answer) -> list[float]:
    """Return the gap before each token but the first event's; meaningful only where it is known."""
    gaps = inter_chunk_ms(answer)
    tokens = answer.event_tokens
    if not tokens:
        return gaps
    shared: list[float] = []
    for i, gap in enumerate(gaps, 1):
        num_tokens = tokens[i] - tokens[i - 1]
        shared.append(gap)
        shared.extend([0.0] * (num_tokens - 1))
    return shared


def first_content_ns(sample: Sample) -> int | None:
    """Return the time from the send to the first content event."""
    return sample.answer.event_ns[0] if sample.answer.event_ns else None


def e2e_ns(sample: Sample) -> int | None:
    """Return the time from the send to the end of the answer; None where it was left before."""
    if sample.is_aborted or sample.sent_s is None:
        return None
    return round((sample.end_s - sample.sent_s) * 1e9)


def waited_ms(sample: Sample) -> float:
    """Return the time from the intended time to the send."""
    return 0.0 if sample.sent_s is None else (sample.sent_s - sample.intended_s) * 1e3


def is_good(sample: Sample, slo: Slo) -> bool:
    """Whether a request kept the limits. One of fewer than two tokens has no TPOT to break."""
    if not sample.is_ok:
        return False
    waited = waited_ms(sample)
    first, whole, tpot = first_content_ns(sample), e2e_ns(sample), tpot_ms(sample.answer)
    return (
        (slo.ttft_ms is None or (first is not None and first / 1e6 + waited <= slo.ttft_ms))
        and (slo.e2e_ms is None or (whole is not None and whole / 1e6 + waited <= slo.e2e_ms))
        and (slo.tpot_ms is None or tpot is None or tpot <= slo.tpot_ms)
    )


def wilson(num_hits: int, num_trials: int) -> tuple[float, float]:
    """Return the bounds that hold the true share of at least one trial with 95 % confidence (Wilson 1927)."""
    share, z2 = num_hits / num_trials, Z_95**2
    middle = share + z2 / (2 * num_trials)
    reach = Z_95 * sqrt(share * (1 - share) / num_trials + z2 / (4 * num_trials**2))
    scale = 1 + z2 / num_trials
    return max(0.0, (middle - reach) / scale), min(1.0, (middle + reach) / scale)


def tpot_ms(answer: Answer) -> float | None:
    """Return the mean time of an output token after the first content event; None of fewer than two tokens."""
    times, tokens = answer.event_ns, answer.event_tokens
    if len(times) < 2:
        return None
    num_tokens = tokens[-1] - tokens[0] if tokens else answer.num_output_tokens - 1
    return (times[-1] - times[0]) / 1e6 / num_tokens if num_tokens > 0 else None


def _from_times(latencies: Iterable[tuple[Sample, int | None]]) -> FromTimes:
    sent_ms: list[float] = []
    intended_ms: list[float] = []
    for sample, latency_ns in latencies:
        if latency_ns is not None and sample.sent_s is not None:
            sent_ms.append(latency_ns / 1e6)
            intended_ms.append(latency_ns / 1e6 + waited_ms(sample))
    return FromTimes(sent=distribution(sent_ms), intended=distribution(intended_ms))


def _goodput(samples: Sequence[Sample], slo: Slo, begin_s: float, end_s: float) -> Goodput | None:
    judged = [
        s
        for s in samples
        if begin_s <= s.intended_s <= end_s and s.error is not ErrorKind.INTERRUPTED and not s.is_aborted
    ]
    if not slo or not judged:
        return None
    num_good = sum(is_good(s, slo) for s in judged)
    low, high = wilson(num_good, len(judged))
    num_ended = sum(is_good(s, slo) for s in samples if begin_s <= s.end_s <= end_s)
    return Goodput(
        num_good=num_good,
        num_judged=len(judged),
        share=num_good / len(judged),
        share_low=low,
        share_high=high,
        requests_per_s=num_ended / (end_s - begin_s) if end_s > begin_s else 0.0,
    )


def _parts(samples: Sequence[Sample]) -> dict[str, Part]:
    by_name: dict[str, list[Sample]] = {}
    for sample in samples:
        if sample.part:
            by_name.setdefault(sample.part, []).append(sample)
    return {
        name: Part(
            num_requests=len(own),
            num_ok=sum(s.is_ok for s in own),
            num_aborted=sum(s.is_aborted for s in own),
            errors=dict(sorted(Counter(s.error_name for s in own if not s.is_ok).items())),
            first_content_ms=_from_times((s, first_content_ns(s)) for s in own if s.is_ok).intended,
            e2e_ms=_from_times((s, e2e_ns(s)) for s in own if s.is_ok).intended,
        )
        for name, own in sorted(by_name.items())
    }


def _throughput(ok: list[Sample], begin_s: float, end_s: float) -> Throughput:
    window_s = end_s - begin_s
    if window_s <= 0:
        return Throughput(
            window_s=0.0,
            requests_per_s=0.0,
            input_tokens_per_s=None,
            output_tokens_per_s=0.0,
            is_output_counted_by_events=False,
        )
    num_input = [
        s.answer.prompt_tokens
        for s in ok
        if s.answer.prompt_tokens is not None and begin_s <= _first_content_s(s) <= end_s
    ]
    return Throughput(
        window_s=window_s,
        requests_per_s=sum(begin_s <= s.end_s <= end_s for s in ok) / window_s,
        input_tokens_per_s=sum(num_input) / window_s if num_input else None,
        output_tokens_per_s=sum(_tokens_within(s, begin_s, end_s) for s in ok) / window_s,
        is_output_counted_by_events=any(s.answer.completion_tokens is None for s in ok),
    )


def _first_content_s(sample: Sample) -> float:
    times = sample.answer.event_ns
    return (sample.sent_s or 0.0) + times[0] / 1e9 if times else sample.end_s


def _tokens_within(sample: Sample, begin_s: float, end_s: float) -> float:
    """Return how many of a request's tokens came in the window, its events standing for equal parts of them."""
    answer = sample.answer
    sent_s = sample.sent_s or 0.0
    if not answer.event_ns or (begin_s <= _first_content_s(sample) and sample.end_s <= end_s):
        return float(answer.num_output_tokens)
    num_events = sum(begin_s <= sent_s + t / 1e9 <= end_s for t in answer.event_ns)
    return answer.num_output_tokens * num_events / len(answer.event_ns)


def _health(drivers: Sequence[DriverResult], samples: Sequence[Sample]) -> ClientHealth:
    cpu_share = max((d.cpu_s / d.wall_s for d in drivers if d.wall_s > 0), default=0.0)
    cpu_share_p90 = max((percentile(sorted(d.cpu_shares), 90) for d in drivers if d.cpu_shares), default=cpu_share)
    loop_lag = max(
        (lag for d in drivers if (lag := distribution(v * 1e3 for v in d.loop_lag_s))),
        key=lambda d: d.p99,
        default=None,
    )
    send_lag = distribution(s.lag_s * 1e3 for s in samples)
    bound_by = []
    is_judged = max((d.wall_s for d in drivers), default=0.0) >= CPU_JUDGED_S_MIN
    if is_judged and max(cpu_share, cpu_share_p90) > CPU_SHARE_MAX:
        bound_by.append("CPU")
    if loop_lag is not None and loop_lag.p99 > LAG_MS_MAX:
        bound_by.append("loop lag")
    if send_lag is not None and send_lag.p99 > LAG_MS_MAX:
        bound_by.append("send lag")
    return ClientHealth(
        cpu_share=cpu_share,
        cpu_share_p90=cpu_share_p90,
        loop_lag_ms=loop_lag,
        send_lag_ms=send_lag,
        num_held_back=sum(d.num_held_back for d in drivers),
        bound_by=tuple(bound_by),
    )
