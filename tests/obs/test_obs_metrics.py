"""The page has the promised names, right numbers, closed labels, and costs the hot path next to nothing."""

import time
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from aserve.obs.metrics import FINISH_REASONS, MAX_HTTP_LABELS, Histogram, LabelledCounter, Metrics


def samples(metrics: Metrics, statistics: object = None) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """The page as another program reads it: (name, labels) -> value."""
    page = metrics.render(statistics).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def value(metrics: Metrics, name: str, **labels: str) -> float:
    return samples(metrics)[name, tuple(sorted(labels.items()))]


def names(metrics: Metrics) -> set[str]:
    """Families as a dashboard names them: without a histogram's three endings."""
    found = set()
    for name, _labels in samples(metrics):
        for ending in ("_bucket", "_count", "_sum"):
            name = name.removesuffix(ending)
        found.add(name)
    return found


OWN_NAMES = {
    f"aserve_{name}"
    for name in (
        "build_info num_requests_running num_requests_waiting num_requests_parked queued_tokens steps_in_flight "
        "kv_cache_usage_ratio prompt_tokens_total generation_tokens_total prefix_cache_queries_total "
        "prefix_cache_hits_total preemptions_total steps_total wasted_rows_total log_lines_dropped_total "
        "eligible_rows_total left_out_rows_total step_rows step_prediction_error_ratio launch_duration_seconds "
        "launch_lead_seconds device_bubble_seconds requests_finished_total requests_rejected_total "
        "request_queue_time_seconds time_to_first_token_seconds inter_token_latency_seconds "
        "time_per_output_token_seconds e2e_request_latency_seconds http_request_duration_seconds "
        "step_duration_seconds loop_lag_seconds gc_pause_seconds"
    ).split()
}
VLLM_NAMES = {
    f"vllm:{name}"
    for name in (
        "num_requests_running num_requests_waiting kv_cache_usage_perc gpu_cache_usage_perc prompt_tokens_total "
        "generation_tokens_total prefix_cache_queries_total prefix_cache_hits_total num_preemptions_total "
        "request_success_total time_to_first_token_seconds inter_token_latency_seconds time_per_output_token_seconds "
        "request_time_per_output_token_seconds e2e_request_latency_seconds request_queue_time_seconds"
    ).split()
}


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("smol", process=False)


def test_names_on_the_page(metrics: Metrics) -> None:
    """Exactly the promised names are there from the first scrape on."""
    metrics.http_request("/health", "GET", 200, 0.001)

    assert names(metrics) == OWN_NAMES | VLLM_NAMES | {"aserve_http_responses_total"}
    assert names(Metrics("smol", vllm_names=False, process=False)) == OWN_NAMES


def test_process_figures() -> None:
    """Memory, CPU time and open files are reported unless turned off."""
    assert {"process_resident_memory_bytes", "process_cpu_seconds_total", "process_open_fds"} <= names(Metrics("smol"))


def test_histogram_on_the_page(metrics: Metrics) -> None:
    """Buckets accumulate, the last is the count, the sum is right; both names show the same."""
    for seconds in (0.0005, 0.004, 0.004, 99.0):
        metrics.inter_token_latency.observe(seconds)

    for name, labels in (
        ("aserve_inter_token_latency_seconds", {}),
        ("vllm:inter_token_latency_seconds", {"model_name": "smol"}),
        ("vllm:time_per_output_token_seconds", {"model_name": "smol"}),
    ):
        assert value(metrics, f"{name}_bucket", le="0.0005", **labels) == 1
        assert value(metrics, f"{name}_bucket", le="0.003", **labels) == 1
        assert value(metrics, f"{name}_bucket", le="0.004", **labels) == 3
        assert value(metrics, f"{name}_bucket", le="10.0", **labels) == 3
        assert value(metrics, f"{name}_bucket", le="+Inf", **labels) == 4
        assert value(metrics, f"{name}_count", **labels) == 4
        assert value(metrics, f"{name}_sum", **labels) == pytest.approx(99.0085)


def test_finished_request(metrics: Metrics) -> None:
    """An end counts by reason, with its latency and its mean time per token after the first."""
    metrics.request_finished("stop", e2e_s=1.1, first_token_s=0.1, num_output_tokens=11)
    metrics.request_finished("length", e2e_s=0.2, first_token_s=0.2, num_output_tokens=1)
    metrics.request_finished("abort", e2e_s=0.2)

    assert [value(metrics, "aserve_requests_finished_total", finish_reason=reason) for reason in FINISH_REASONS] == [
        1, 1, 1, 0, 0
    ]  # fmt: skip
    assert value(metrics, "vllm:request_success_total", model_name="smol", finished_reason="stop") == 1
    assert value(metrics, "aserve_e2e_request_latency_seconds_count") == 3
    assert value(metrics, "aserve_time_per_output_token_seconds_count") == 1
    assert value(metrics, "aserve_time_per_output_token_seconds_sum") == pytest.approx(0.1)


def test_statistics_are_read_at_the_scrape(metrics: Metrics) -> None:
    """What the engine counts itself shows as it is in the statistics; what these lack keeps its value."""

    @dataclass
    class Statistics:
        num_running: int = 3
        kv_cache_usage: float = 0.25
        num_preemptions: int = 7
        num_anything_else: int = 9

    metrics.num_waiting.value = 2
    page = samples(metrics, Statistics())

    model = (("model_name", "smol"),)
    assert page["aserve_num_requests_running", ()] == page["vllm:num_requests_running", model] == 3
    assert page["aserve_kv_cache_usage_ratio", ()] == page["vllm:kv_cache_usage_perc", model] == 0.25
    assert page["aserve_preemptions_total", ()] == page["vllm:num_preemptions_total", model] == 7
    assert page["aserve_num_requests_waiting", ()] == 2


def test_scraped_names_are_attributes(metrics: Metrics) -> None:
    """Every name that is read from statistics is a metric."""
    assert [name for name in Metrics.SCRAPED if not hasattr(getattr(metrics, name), "value")] == []


def test_before_render(metrics: Metrics) -> None:
    """A callback brings a figure up to date at each scrape."""

    def update() -> None:
        metrics.log_lines_dropped.value = 5

    metrics.before_render(update)

    assert value(metrics, "aserve_log_lines_dropped_total") == 5


def test_http_responses(metrics: Metrics) -> None:
    """Answers count by route, method and status."""
    metrics.http_request("/v1/models", "GET", 200, 0.01)
    metrics.http_request("/v1/models", "GET", 200, 0.01)
    metrics.http_request("/v1/models", "GET", 401, 0.01)

    route = {"route": "/v1/models", "method": "GET"}
    assert value(metrics, "aserve_http_responses_total", status="200", **route) == 2
    assert value(metrics, "aserve_http_responses_total", status="401", **route) == 1
    assert value(metrics, "aserve_http_request_duration_seconds_count") == 3


def test_labels_cannot_grow_without_bound(metrics: Metrics) -> None:
    """Even a caller who passes paths of clients cannot grow the page: the rest counts as "other"."""
    for number in range(MAX_HTTP_LABELS + 10):
        metrics.http_request(f"/{number}", "GET", 404, 0.01)

    assert value(metrics, "aserve_http_responses_total", route="other", method="other", status="other") == 10
    assert sum(name == "aserve_http_responses_total" for name, _ in samples(metrics)) == MAX_HTTP_LABELS + 1


def test_label_outside_of_its_set() -> None:
    """An unknown label counts as the last of the set."""
    counter = LabelledCounter(("a", "other"))
    counter.add("a")
    counter.add("b", 2)

    assert counter.values == {"a": 1, "other": 2}


def test_model_name_is_escaped() -> None:
    """Quotes, backslashes and line feeds in a model's name do not break the page."""
    metrics = Metrics('a"b\\c\nd', process=False)

    assert value(metrics, "vllm:num_requests_running", model_name='a"b\\c\nd') == 0


@given(st.lists(st.floats(0, 20), max_size=100))
def test_observe_many_is_observe_each(values: list[float]) -> None:
    """An array gives the counts and the sum that its values give one by one."""
    one_by_one, at_once = Histogram((0.5, 1.0, 10.0)), Histogram((0.5, 1.0, 10.0))
    for each in values:
        one_by_one.observe(each)
    at_once.observe_many(np.array(values, np.float64))

    assert at_once.counts == one_by_one.counts
    assert at_once.sum == pytest.approx(one_by_one.sum)
    assert at_once.count == len(values)


def test_observe_several_at_once() -> None:
    """``num`` counts one value several times."""
    histogram = Histogram((1.0,))
    histogram.observe(0.5, num=3)

    assert (histogram.counts, histogram.sum) == ([3, 0], 1.5)


def test_observing_a_token_is_cheap(metrics: Metrics) -> None:
    """One token's latency costs at most a few tenths of a microsecond (2 here, for busy machines)."""
    observe = metrics.inter_token_latency.observe
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(10_000):
            observe(0.0123)
        best = min(best, (time.perf_counter() - start) / 10_000)

    assert best < 2e-6
