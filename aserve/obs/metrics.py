"""Metrics in Prometheus' text format: plain numbers on the hot path, turned into text when somebody scrapes.

Observing costs a bisection and two additions (0.16 us); prometheus-client's own histogram takes a lock and several
calls. Labels come from closed sets only, so that no client can make the page grow. Written on the event loop's thread;
rendering may run in another one: a histogram's counts are then of one moment, its sum perhaps one observation later.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from aserve import __version__

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
"""Of what ``Metrics.render`` returns."""

FINISH_REASONS: Final = ("stop", "length", "abort", "timeout", "error")

REJECT_REASONS: Final = (
    "invalid_request", "unsupported", "context_length_exceeded", "invalid_api_key", "model_not_found",
    "payload_too_large", "rate_limit_exceeded", "server_overloaded", "server_draining", "model_loading", "engine_dead",
    "other",
)  # fmt: skip
"""Codes of ``aserve.errors`` under which a request is turned away at the door."""

OTHER: Final = "other"
MAX_HTTP_LABELS: Final = 512
"""Combinations of route, method and status; further ones count as "other". The route table gives far fewer."""

TTFT_BUCKETS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0,
)  # fmt: skip
TOKEN_BUCKETS: Final = (
    0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15,
    0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
REQUEST_BUCKETS: Final = (
    0.01, 0.025, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0,
    240.0, 480.0, 960.0, 1920.0,
)  # fmt: skip
STEP_BUCKETS: Final = (
    0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5,
    1.0, 2.5, 5.0,
)  # fmt: skip
LAG_BUCKETS: Final = (
    0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0,
)  # fmt: skip
LEAD_BUCKETS: Final = (
    0.0001, 0.0002, 0.0003, 0.0004, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.02,
    0.05, 0.1, 0.25, 0.5, 1.0,
)  # fmt: skip
ROW_BUCKETS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
RATIO_BUCKETS: Final = (0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0)


class Counter:
    """A number that only grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0

    def add(self, num: float = 1) -> None:
        self.value += num


class LabelledCounter:
    """One counter for each label of a closed set; a label outside of it counts as the last one."""

    __slots__ = ("_fallback", "values")

    def __init__(self, labels: Sequence[str]) -> None:
        self.values = dict.fromkeys(labels, 0)
        self._fallback = labels[-1]

    def add(self, label: str, num: int = 1) -> None:
        self.values[label if label in self.values else self._fallback] += num


class Gauge:
    """A number as of now."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0


class Histogram:
    """Counts of observations by upper bound; the last count is of what exceeds every bound."""

    __slots__ = ("_bounds_array", "bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0
        self._bounds_array = np.asarray(bounds)

    def observe(self, value: float, num: int = 1) -> None:
        """Count ``value``, ``num`` times."""
        self.counts[bisect_left(self.bounds, value)] += num
        self.sum += value * num

    def observe_many(self, values: NDArray[np.floating[Any]]) -> None:
        """Count an array at once: cheaper than ``observe`` for each from about 50 values on."""
        nums = np.bincount(np.searchsorted(self._bounds_array, values), minlength=len(self.counts))
        self.counts = [count + num for count, num in zip(self.counts, nums.tolist(), strict=True)]
        self.sum += float(values.sum())

    @property
    def count(self) -> int:
        return sum(self.counts)


class Metrics:
    """Every metric of the server, one attribute each.

    What the engine counts itself is not counted here again: ``render(statistics)`` reads it by the names in ``SCRAPED``
    from whatever object it is given. ``before_render`` takes callbacks that bring other figures up to date.
    """

    SCRAPED: Final = (
        "num_running", "num_waiting", "num_parked", "num_queued_tokens", "num_inflight_steps", "kv_cache_usage",
        "num_steps", "num_wasted_rows", "num_eligible_rows", "num_left_out_rows", "num_preemptions", "prompt_tokens",
        "generation_tokens", "prefix_cache_queries", "prefix_cache_hits",
    )  # fmt: skip
    """Attributes that ``render`` copies from the statistics, where they are there. kv_cache_usage is 0 to 1;
    prefix_cache_* count tokens looked up and found."""

    def __init__(self, model_name: str, *, vllm_names: bool = True, process: bool = True) -> None:
        self.model_name = model_name

        self.num_running = Gauge()
        self.num_waiting = Gauge()
        self.num_parked = Gauge()
        self.num_queued_tokens = Gauge()
        self.num_inflight_steps = Gauge()
        self.kv_cache_usage = Gauge()

        self.prompt_tokens = Counter()
        self.generation_tokens = Counter()
        self.prefix_cache_queries = Counter()
        self.prefix_cache_hits = Counter()
        self.num_preemptions = Counter()
        self.num_steps = Counter()
        self.num_wasted_rows = Counter()
        self.num_eligible_rows = Counter()
        self.num_left_out_rows = Counter()
        self.log_lines_dropped = Counter()
        self.finished = LabelledCounter(FINISH_REASONS)
        self.rejected = LabelledCounter(REJECT_REASONS)
        self._http: dict[tuple[str, str, str], int] = {}

        self.queue_time = Histogram(REQUEST_BUCKETS)
        self.time_to_first_token = Histogram(TTFT_BUCKETS)
        self.inter_token_latency = Histogram(TOKEN_BUCKETS)
        self.time_per_output_token = Histogram(TOKEN_BUCKETS)
        self.e2e_latency = Histogram(REQUEST_BUCKETS)
        self.http_duration = Histogram(REQUEST_BUCKETS)
        self.step_duration = Histogram(STEP_BUCKETS)
        self.step_rows = Histogram(ROW_BUCKETS)
        self.step_prediction_error = Histogram(RATIO_BUCKETS)
        self.launch_duration = Histogram(LEAD_BUCKETS)
        self.launch_lead = Histogram(LEAD_BUCKETS)
        self.device_bubble = Histogram(LEAD_BUCKETS)
        self.loop_lag = Histogram(LAG_BUCKETS)
        self.gc_pause = Histogram(LAG_BUCKETS)

        self._before_render: list[Callable[[], None]] = []
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Page(self._families))
        if vllm_names:
            self._registry.register(_Page(self._vllm_families))
        if process:
            ProcessCollector(registry=self._registry)

    def request_finished(
        self, reason: str, *, e2e_s: float, first_token_s: float | None = None, num_output_tokens: int = 0
    ) -> None:
        """One accepted sequence ended. first_token_s: from its arrival to its first token, None without one."""
        self.finished.add(reason)
        self.e2e_latency.observe(e2e_s)
        if first_token_s is not None and num_output_tokens > 1:
            self.time_per_output_token.observe((e2e_s - first_token_s) / (num_output_tokens - 1))

    def http_request(self, route: str, method: str, status: int, seconds: float) -> None:
        """One answered request. The labels are the server's own: the route's pattern, never the path that was sent."""
        key = (route, method, str(status))
        if key not in self._http and len(self._http) >= MAX_HTTP_LABELS:
            key = (OTHER, OTHER, OTHER)
        self._http[key] = self._http.get(key, 0) + 1
        self.http_duration.observe(seconds)

    def before_render(self, update: Callable[[], None]) -> None:
        """Call ``update`` at each scrape, before anything is read."""
        self._before_render.append(update)

    def render(self, statistics: object = None) -> bytes:
        """The page. Takes some milliseconds and reads /proc: off the loop, through ``asyncio.to_thread``."""
        for update in self._before_render:
            update()
        for name in self.SCRAPED:
            value = getattr(statistics, name, None)
            if value is not None:
                getattr(self, name).value = value
        return generate_latest(self._registry)

    def _families(self) -> Iterable[Metric]:
        prefix = "aserve_"
        build = GaugeMetricFamily(f"{prefix}build_info", "Version and model.", labels=["version", "model_name"])
        build.add_metric([__version__, self.model_name], 1)
        yield build
        for name, gauge, text in (
            ("num_requests_running", self.num_running, "Sequences that own KV blocks and run."),
            ("num_requests_waiting", self.num_waiting, "Sequences that were admitted and own no blocks yet."),
            ("num_requests_parked", self.num_parked, "Sequences that sit out because their reader lags."),
            ("queued_tokens", self.num_queued_tokens, "Uncached prompt tokens of waiting sequences."),
            ("steps_in_flight", self.num_inflight_steps, "Steps launched and not landed."),
            ("kv_cache_usage_ratio", self.kv_cache_usage, "Share of the KV pool in use, 0 to 1."),
        ):
            yield GaugeMetricFamily(prefix + name, text, value=gauge.value)
        for name, counter, text in (
            ("prompt_tokens", self.prompt_tokens, "Prompt tokens of sequences that were started."),
            ("generation_tokens", self.generation_tokens, "Tokens generated."),
            ("prefix_cache_queries", self.prefix_cache_queries, "Prompt tokens looked up in the prefix cache."),
            ("prefix_cache_hits", self.prefix_cache_hits, "Prompt tokens found in the prefix cache."),
            ("preemptions", self.num_preemptions, "Sequences that gave up their blocks to run later."),
            ("steps", self.num_steps, "Steps launched."),
            ("wasted_rows", self.num_wasted_rows, "Rows computed for sequences that had already ended."),
            ("eligible_rows", self.num_eligible_rows, "Rows that steps could have had when the device began them."),
            ("left_out_rows", self.num_left_out_rows, "Of the eligible rows, those that came too late for the step."),
            ("log_lines_dropped", self.log_lines_dropped, "Log records that could not be written in time."),
        ):
            yield CounterMetricFamily(prefix + name, text, value=counter.value)
        yield _labelled(f"{prefix}requests_finished", "Sequences ended, by reason.", "finish_reason", self.finished)
        yield _labelled(f"{prefix}requests_rejected", "Requests turned away, by reason.", "reason", self.rejected)
        http = CounterMetricFamily(
            f"{prefix}http_responses", "Answers, by route, method and status.", labels=["route", "method", "status"]
        )
        for labels, num in list(self._http.items()):
            http.add_metric(labels, num)
        yield http
        for name, histogram, text in (
            ("request_queue_time_seconds", self.queue_time, "From arrival to the first step."),
            ("time_to_first_token_seconds", self.time_to_first_token, "From arrival to the first token."),
            ("inter_token_latency_seconds", self.inter_token_latency, "Between two tokens of a sequence."),
            ("time_per_output_token_seconds", self.time_per_output_token, "Mean of a sequence after its first token."),
            ("e2e_request_latency_seconds", self.e2e_latency, "From arrival to the end."),
            ("http_request_duration_seconds", self.http_duration, "From the request's headers to the answer's end."),
            (
                "step_duration_seconds",
                self.step_duration,
                "From a step's launch, or the landing before, to its landing.",
            ),
            ("step_rows", self.step_rows, "Sequences in a step: decode rows and prompt chunks."),
            (
                "step_prediction_error_ratio",
                self.step_prediction_error,
                "Difference of a step's predicted time and what it took, as a share of that.",
            ),
            ("launch_duration_seconds", self.launch_duration, "Composing a step and handing it to the device."),
            (
                "launch_lead_seconds",
                self.launch_lead,
                "Predicted work that the device had left when a step was composed behind it.",
            ),
            ("device_bubble_seconds", self.device_bubble, "The device stood idle beside work, from landing to launch."),
            ("loop_lag_seconds", self.loop_lag, "Lateness of a timer of the event loop."),
            ("gc_pause_seconds", self.gc_pause, "Pauses of the garbage collector."),
        ):
            yield _histogram(prefix + name, text, histogram, {})

    def _vllm_families(self) -> Iterable[Metric]:
        names, values = ["model_name"], [self.model_name]
        for name, gauge in (
            ("num_requests_running", self.num_running),
            ("num_requests_waiting", self.num_waiting),
            ("kv_cache_usage_perc", self.kv_cache_usage),  # a share of 1 in spite of its name, there too
            ("gpu_cache_usage_perc", self.kv_cache_usage),
        ):
            gauge_family = GaugeMetricFamily(f"vllm:{name}", _SAME, labels=names)
            gauge_family.add_metric(values, gauge.value)
            yield gauge_family
        for name, counter in (
            ("prompt_tokens", self.prompt_tokens),
            ("generation_tokens", self.generation_tokens),
            ("prefix_cache_queries", self.prefix_cache_queries),
            ("prefix_cache_hits", self.prefix_cache_hits),
            ("num_preemptions", self.num_preemptions),
        ):
            counter_family = CounterMetricFamily(f"vllm:{name}", _SAME, labels=names)
            counter_family.add_metric(values, counter.value)
            yield counter_family
        success = CounterMetricFamily("vllm:request_success", _SAME, labels=[*names, "finished_reason"])
        for reason, num in self.finished.values.items():
            success.add_metric([*values, reason], num)
        yield success
        for name, histogram in (
            ("time_to_first_token_seconds", self.time_to_first_token),
            ("inter_token_latency_seconds", self.inter_token_latency),
            ("time_per_output_token_seconds", self.inter_token_latency),  # its older name for the same
            ("request_time_per_output_token_seconds", self.time_per_output_token),
            ("e2e_request_latency_seconds", self.e2e_latency),
            ("request_queue_time_seconds", self.queue_time),
        ):
            yield _histogram(f"vllm:{name}", _SAME, histogram, dict(zip(names, values, strict=True)))


_SAME: Final = "The metric of the same meaning under the name that dashboards know."


class _Page(Collector):
    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterable[Metric]:
        return self._collect()


def _labelled(name: str, text: str, label: str, counter: LabelledCounter) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=[label])
    for value, num in counter.values.items():
        family.add_metric([value], num)
    return family


def _histogram(name: str, text: str, histogram: Histogram, labels: dict[str, str]) -> HistogramMetricFamily:
    counts = list(accumulate(histogram.counts[:]))
    bounds = [*map(str, histogram.bounds), "+Inf"]
    family = HistogramMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), list(zip(bounds, counts, strict=True)), histogram.sum)
    return family
