"""What dashboards, autoscalers and routers made for vLLM ask for is on the page as vLLM 0.26 has it."""

from dataclasses import dataclass

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from aserve.obs.metrics import Metrics

MAX_MODEL_LEN = 4096

TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)
"""vLLM's for a context of 4,096."""
STEP = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
FIRST = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
NEXT = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip


@dataclass(frozen=True)
class Known:
    """A metric of vLLM's. labels: beside model_name and engine, with those values that vLLM gives them here."""

    kind: str
    labels: tuple[tuple[str, str], ...] = ()
    bounds: tuple[float, ...] = ()


def labelled(kind: str, label: str, *values: str) -> Known:
    return Known(kind, tuple((label, value) for value in values))


VLLM = {
    "num_requests_running": Known("gauge"),
    "num_requests_waiting": Known("gauge"),
    "num_requests_waiting_by_reason": labelled("gauge", "reason", "capacity", "deferred"),
    "kv_cache_usage_perc": Known("gauge"),
    "prefix_cache_queries": Known("counter"),
    "prefix_cache_hits": Known("counter"),
    "num_preemptions": Known("counter"),
    "prompt_tokens": Known("counter"),
    "prompt_tokens_by_source": labelled("counter", "source", "local_compute", "local_cache_hit"),
    "prompt_tokens_cached": Known("counter"),
    "generation_tokens": Known("counter"),
    "request_success": labelled("counter", "finished_reason", "stop", "length", "abort", "error"),
    "request_prompt_tokens": Known("histogram", bounds=TOKENS),
    "request_generation_tokens": Known("histogram", bounds=TOKENS),
    "iteration_tokens_total": Known("histogram", bounds=STEP),
    "request_max_num_generation_tokens": Known("histogram", bounds=TOKENS),
    "request_params_n": Known("histogram", bounds=(1, 2, 5, 10, 20)),
    "request_params_max_tokens": Known("histogram", bounds=TOKENS),
    "time_to_first_token_seconds": Known("histogram", bounds=FIRST),
    "inter_token_latency_seconds": Known("histogram", bounds=NEXT),
    "request_time_per_output_token_seconds": Known("histogram", bounds=NEXT),
    "e2e_request_latency_seconds": Known("histogram", bounds=REQUEST),
    "request_queue_time_seconds": Known("histogram", bounds=REQUEST),
    "request_inference_time_seconds": Known("histogram", bounds=REQUEST),
    "request_prefill_time_seconds": Known("histogram", bounds=REQUEST),
    "request_decode_time_seconds": Known("histogram", bounds=REQUEST),
    "request_prefill_kv_computed_tokens": Known("histogram", bounds=TOKENS),
}
"""By name, as vLLM 0.26.0 registers them, without what belongs to things that are not here: other sources of KV blocks,
adapters, sleeping, speculative decoding, caches of images, sampled lives of KV blocks."""

OLDER = {
    "gpu_cache_usage_perc": Known("gauge"),
    "time_per_output_token_seconds": Known("histogram", bounds=NEXT),
}
"""Names of 0.10 and before, which dashboards of that time still ask for."""

NAMES = VLLM | OLDER


@pytest.fixture(scope="module")
def families() -> dict[str, Metric]:
    metrics = Metrics(
        "smol",
        max_model_len=MAX_MODEL_LEN,
        cache_config={"block_size": 16, "num_gpu_blocks": 1000, "enable_prefix_caching": True},
        process=False,
    )
    page = metrics.render().decode()
    return {
        family.name.removeprefix("vllm:"): family
        for family in text_string_to_metric_families(page)
        if family.name.startswith("vllm:")
    }


def test_names(families: dict[str, Metric]) -> None:
    """All of the list, and nothing under vLLM's name that vLLM does not have."""
    assert set(families) == {*NAMES, "cache_config_info"}


@pytest.mark.parametrize("name", NAMES)
def test_kind_and_labels(families: dict[str, Metric], name: str) -> None:
    """Each has the kind and the labels that a query counts on; a label may have more values than there."""
    known, family = NAMES[name], families[name]
    own = [{key: value for key, value in sample.labels.items() if key != "le"} for sample in family.samples]

    assert family.type == known.kind
    assert {(labels.pop("model_name"), labels.pop("engine")) for labels in own} == {("smol", "0")}
    assert {item for labels in own for item in labels.items()} >= set(known.labels)
    assert {key for labels in own for key in labels} == {key for key, _ in known.labels}


@pytest.mark.parametrize("name", [name for name, known in NAMES.items() if known.kind == "histogram"])
def test_bounds(families: dict[str, Metric], name: str) -> None:
    """Every bound of vLLM's is one here, written the same way: a query may name it."""
    bounds = {sample.labels["le"] for sample in families[name].samples if sample.name.endswith("_bucket")}

    assert {str(float(bound)) for bound in NAMES[name].bounds} <= bounds


def test_cache_config(families: dict[str, Metric]) -> None:
    """Routers read the pool's size from its labels, which have no model_name there either."""
    [sample] = families["cache_config_info"].samples

    assert (families["cache_config_info"].type, sample.value) == ("gauge", 1)
    assert sample.labels == {
        "engine": "0", "block_size": "16", "num_gpu_blocks": "1000", "enable_prefix_caching": "True",
    }  # fmt: skip
