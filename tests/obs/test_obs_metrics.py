"""The page has the promised names, right numbers and closed labels."""

from dataclasses import dataclass

import pytest
from prometheus_client.parser import text_string_to_metric_families

from aserve.obs.metrics import MAX_HTTP_LABELS, MAX_HTTP_ROUTES, Metrics, length_buckets


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
        "build_info num_requests_running num_requests_waiting num_requests_parked open_requests queued_tokens "
        "max_queue_requests max_queue_tokens steps_in_flight kv_cache_usage_ratio kv_blocks kv_blocks_free "
        "kv_blocks_cached kv_blocks_pending open_connections open_websockets prompt_tokens_total "
        "prompt_tokens_by_source_total generation_tokens_total prefix_cache_queries_total prefix_cache_hits_total "
        "preemptions_total steps_total failed_steps_total wasted_rows_total eligible_rows_total left_out_rows_total "
        "requests_finished_total requests_rejected_total connections_refused_total slow_headers_total "
        "write_stalls_total log_lines_dropped_total request_prompt_tokens request_prefill_tokens "
        "request_generation_tokens request_max_num_generation_tokens request_params_n request_params_max_tokens "
        "request_queue_time_seconds request_prefill_time_seconds request_decode_time_seconds "
        "request_inference_time_seconds e2e_request_latency_seconds time_to_first_token_seconds "
        "inter_token_latency_seconds time_per_output_token_seconds step_duration_seconds step_rows step_tokens "
        "step_prediction_error_ratio launch_duration_seconds launch_lead_seconds device_bubble_seconds "
        "loop_lag_seconds gc_pause_seconds"
    ).split()
}
HTTP_NAMES = {"aserve_http_responses_total", "aserve_http_request_duration_seconds"}


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("smol", process=False)


def test_names_on_the_page(metrics: Metrics) -> None:
    """Exactly the promised names are there from the first scrape on."""
    metrics.http_request("/health", "GET", 200, 0.001)

    assert {name for name in names(metrics) if not name.startswith("vllm:")} == OWN_NAMES | HTTP_NAMES
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
        ("vllm:inter_token_latency_seconds", {"model_name": "smol", "engine": "0"}),
        ("vllm:time_per_output_token_seconds", {"model_name": "smol", "engine": "0"}),
    ):
        assert value(metrics, f"{name}_bucket", le="0.0005", **labels) == 1
        assert value(metrics, f"{name}_bucket", le="0.003", **labels) == 1
        assert value(metrics, f"{name}_bucket", le="0.004", **labels) == 3
        assert value(metrics, f"{name}_bucket", le="10.0", **labels) == 3
        assert value(metrics, f"{name}_bucket", le="+Inf", **labels) == 4
        assert value(metrics, f"{name}_count", **labels) == 4
        assert value(metrics, f"{name}_sum", **labels) == pytest.approx(99.0085)


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

    model = (("engine", "0"), ("model_name", "smol"))
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
    assert value(metrics, "aserve_http_request_duration_seconds_count", route="/v1/models") == 3


def test_labels_cannot_grow_without_bound(metrics: Metrics) -> None:
    """Even a caller who passes paths of clients cannot grow the page: the rest counts as "other"."""
    for number in range(MAX_HTTP_LABELS + 10):
        metrics.http_request(f"/{number}", "GET", 404, 0.01)

    assert value(metrics, "aserve_http_responses_total", route="other", method="other", status="other") == 10
    assert sum(name == "aserve_http_responses_total" for name, _ in samples(metrics)) == MAX_HTTP_LABELS + 1
    assert sum(name == "aserve_http_request_duration_seconds_count" for name, _ in samples(metrics)) == (
        MAX_HTTP_ROUTES + 1
    )


def test_model_name_is_escaped() -> None:
    """Quotes, backslashes and line feeds in a model's name do not break the page."""
    metrics = Metrics('a"b\\c\nd', process=False)

    assert value(metrics, "vllm:num_requests_running", model_name='a"b\\c\nd', engine="0") == 0


def test_bounds_of_lengths() -> None:
    """1, 2, 5 up to the context's length, which may be a bound itself."""
    assert length_buckets(100) == (1, 2, 5, 10, 20, 50, 100)
    assert length_buckets(8192)[-3:] == (1000, 2000, 5000)


def test_every_family_is_described(metrics: Metrics) -> None:
    """Each one on the page has one HELP and one TYPE, and no name comes twice."""
    metrics.http_request("/health", "GET", 200, 0.001)
    lines = metrics.render().decode().splitlines()
    families = {"HELP": [], "TYPE": []}
    for line in lines:
        if line.startswith("# "):
            _, kind, name, text = line.split(" ", 3)
            assert text
            families[kind].append(name)

    assert families["HELP"] == families["TYPE"]
    assert len(families["HELP"]) == len(set(families["HELP"]))
    assert set(families["HELP"]) == names(metrics)
