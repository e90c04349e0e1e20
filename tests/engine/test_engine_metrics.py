"""What becomes of requests is in the metrics: lengths, phases and parameters, each once and none twice."""

from dataclasses import replace

import pytest
from engine_builders import read, request, running
from prometheus_client.parser import text_string_to_metric_families

from aserve.core.request import FinishReason
from aserve.engine.observe import MetricsObserver
from aserve.engine.ports import NullObserver, RequestEnd
from aserve.errors import AserveError
from aserve.obs.instruments import Histogram
from aserve.obs.metrics import Metrics
from aserve.testing import ScriptedRunner

END = RequestEnd(
    reason=FinishReason.LENGTH,
    submitted_s=10.0,
    started_s=10.5,
    first_token_s=12.5,
    last_token_s=16.5,
    ended_s=17.0,
    num_prompt_tokens=40,
    num_cached_tokens=32,
    num_output_tokens=9,
    max_tokens=9,
    n=2,
    num_output_tokens_max=11,
)


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("smol", process=False)


def seen(histogram: Histogram) -> tuple[int, float]:
    """How many observations, and their sum."""
    return histogram.count, pytest.approx(histogram.sum)


def test_a_whole_life(metrics: Metrics) -> None:
    """Its phases add up to its time on the device; its lengths are those of its prompt and output."""
    MetricsObserver(metrics).request_finished(END)

    assert metrics.finished.values["length"] == 1
    assert seen(metrics.e2e_latency) == (1, 7.0)
    assert seen(metrics.prefill_time) == (1, 2.0)
    assert seen(metrics.decode_time) == (1, 4.0)
    assert seen(metrics.inference_time) == (1, 6.0)
    assert seen(metrics.time_per_output_token) == (1, 0.5)
    assert seen(metrics.num_prompt_tokens) == (1, 40)
    assert seen(metrics.num_prefill_tokens) == (1, 8)
    assert seen(metrics.num_output_tokens) == (1, 9)
    assert seen(metrics.max_tokens) == (1, 9)
    assert seen(metrics.num_choices) == (1, 2)
    assert seen(metrics.num_output_tokens_max) == (1, 11)


@pytest.mark.parametrize("started_s", [None, 10.5])
def test_a_life_without_a_token(metrics: Metrics, started_s: float | None) -> None:
    """It has gone through no phase, whether it was started or not; that it was there and how long counts."""
    end = replace(END, started_s=started_s, first_token_s=None, last_token_s=None, num_output_tokens=0)
    MetricsObserver(metrics).request_finished(replace(end, reason=FinishReason.ABORT))

    assert metrics.finished.values["abort"] == 1
    assert seen(metrics.e2e_latency) == (1, 7.0)
    assert seen(metrics.num_output_tokens) == (1, 0)
    phases = (metrics.prefill_time, metrics.decode_time, metrics.inference_time, metrics.num_prefill_tokens)
    assert [phase.count for phase in phases] == [0, 0, 0, 0]


def test_a_single_token_has_no_pace(metrics: Metrics) -> None:
    """Nothing lies between one token."""
    MetricsObserver(metrics).request_finished(replace(END, num_output_tokens=1, last_token_s=12.5))

    assert seen(metrics.decode_time) == (1, 0.0)
    assert seen(metrics.time_per_output_token) == (0, 0.0)


async def test_a_few_requests_on_the_page(metrics: Metrics) -> None:
    """Requests of one, of two prompts, of three choices, and one that fails: every figure is what they did."""

    def script(context: object, index: int) -> int:
        if broken:
            raise ValueError("no")
        return 97

    broken = False
    async with running(ScriptedRunner(script), observer=MetricsObserver(metrics)) as engine:
        await read(engine.submit_nowait(request("a" * 40, max_tokens=3)))
        await read(engine.submit_nowait(request(["b" * 5, "c" * 7], max_tokens=4)))
        await read(engine.submit_nowait(request("d" * 33, max_tokens=2, n=3)))
        broken = True
        await read(engine.submit_nowait(request("e" * 3, max_tokens=2)))
        statistics = engine.statistics()
        page = metrics.render(statistics).decode()

    value = {
        (sample.name, *(v for k, v in sample.labels.items() if k not in ("model_name", "engine"))): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }
    sums = {
        name: (value[f"aserve_{name}_count",], value[f"aserve_{name}_sum",])
        for name in (
            "request_prompt_tokens", "request_generation_tokens", "request_params_max_tokens", "request_params_n",
            "request_max_num_generation_tokens",
        )
    }  # fmt: skip
    assert sums == {
        "request_prompt_tokens": (7, 40 + 5 + 7 + 3 * 33 + 3),
        "request_generation_tokens": (7, 3 + 4 + 4 + 3 * 2),
        "request_params_max_tokens": (7, 3 + 4 + 4 + 3 * 2 + 2),
        "request_params_n": (5, 1 + 1 + 1 + 3 + 1),
        "request_max_num_generation_tokens": (5, 3 + 4 + 4 + 2),
    }
    assert value["aserve_request_queue_time_seconds_count",] == 7
    for phase in ("prefill", "decode", "inference"):
        assert value[f"vllm:request_{phase}_time_seconds_count",] == 6
    assert (value["aserve_requests_finished_total", "length"], value["aserve_failed_steps_total",]) == (6, 1)
    assert value["vllm:iteration_tokens_total_sum",] == statistics.runner["num_tokens"]
    assert value["aserve_prompt_tokens_by_source_total", "local_compute"] == (
        value["aserve_prompt_tokens_total",] - value["aserve_prompt_tokens_by_source_total", "local_cache_hit"]
    )
    assert value["vllm:prompt_tokens_cached_total",] == 2 * 32  # two of three choices found their prompt's blocks
    blocks = [value[f"aserve_kv_blocks{kind}",] for kind in ("", "_free", "_cached", "_pending")]
    assert blocks == [
        statistics.num_blocks, statistics.num_blocks_free, statistics.num_blocks_cached, statistics.num_blocks_pending,
    ]  # fmt: skip
    assert (value["aserve_max_queue_requests",], value["aserve_max_queue_tokens",]) == (
        engine.options.max_queue_requests,
        8 * statistics.num_blocks * engine.info.block_size,
    )


async def test_a_resumed_sequence_starts_once() -> None:
    """Preempted again and again, it waited for its first step once, and its phases are in order."""
    starts: list[tuple[int, int]] = []
    ends: list[RequestEnd] = []

    class Lives(NullObserver):
        def request_started(self, wait_s: float, num_prompt_tokens: int, num_cached_tokens: int) -> None:
            assert wait_s >= 0.0
            starts.append((num_prompt_tokens, num_cached_tokens))

        def request_finished(self, end: RequestEnd) -> None:
            ends.append(end)

    async with running(observer=Lives(), force_preempt_every=5, max_num_seqs=2) as engine:
        streams = [engine.submit_nowait(request("hello", max_tokens=40)) for _ in range(3)]
        for stream in streams:
            await read(stream)
        num_preemptions = engine.statistics().num_preemptions

    assert num_preemptions > 0
    assert starts == [(5, 0)] * 3
    for end in ends:
        assert None not in (end.started_s, end.first_token_s, end.last_token_s)
        times = [end.submitted_s, end.started_s, end.first_token_s, end.last_token_s, end.ended_s]
        assert times == sorted(times)


async def test_refusals_by_reason(metrics: Metrics) -> None:
    """Each call that the engine turns away counts once, under the code of its error; one that runs does not."""
    runner = ScriptedRunner(max_model_len=64)
    async with running(runner, observer=MetricsObserver(metrics), max_queue_requests=1) as engine:

        def refuse(*args: object, **fields: object) -> None:
            with pytest.raises(AserveError):
                engine.submit_nowait(request(*args, **fields))  # type: ignore[arg-type]

        engine.submit_nowait(request(request_id="open"))  # and it waits, until the loop gets a turn
        refuse("x" * 64, request_id="long")
        refuse("x", request_id="open")
        refuse("x", request_id="many", stop_token_ids=tuple(range(100, 130)))
        refuse("x", request_id="late")
        with pytest.raises(AserveError):
            engine.fit(65, None)
        await engine.drain(0.0)
        refuse("x", request_id="later")

    assert metrics.rejected.values == {
        "server_overloaded": 1,
        "server_draining": 1,
        "context_length_exceeded": 2,
        "invalid_request": 2,
        "engine_dead": 0,
        "other": 0,
    }
