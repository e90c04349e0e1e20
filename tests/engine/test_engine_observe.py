"""What the engine tells of its steps arrives in the metrics, and nothing where nothing is known."""

from dataclasses import replace

import pytest
from engine_builders import read, request, running

from aserve.core.plan import BatchPlan
from aserve.engine.observe import MetricsObserver
from aserve.engine.ports import NullObserver, StepLanding, StepLaunch
from aserve.obs.metrics import Histogram, Metrics
from aserve.testing import ScriptedRunner
from aserve.testing.manual import ManualEvent

LAUNCH = StepLaunch(
    step=7,
    stream=0,
    composed_s=10.0,
    handed_s=10.0002,
    launched_s=10.0005,
    num_rows=3,
    num_chunks=2,
    num_prefill_tokens=40,
    num_inflight=2,
    reason="lead",
    lead_s=0.0012,
    predicted_end_s=10.006,
    bubble_s=0.0,
)
LANDING = StepLanding(
    step=7,
    stream=0,
    launched_s=10.0005,
    started_s=10.001,
    landed_s=10.005,
    committed_s=10.0052,
    num_rows=3,
    num_chunks=2,
    num_prefill_tokens=40,
    num_eligible=6,
    num_wasted_rows=1,
    predicted_s=0.005,
    failed=False,
)


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("smol", process=False)


def seen(histogram: Histogram) -> tuple[int, float]:
    """How many observations, and their sum."""
    return histogram.count, pytest.approx(histogram.sum)


def test_a_launch_behind_another_step(metrics: Metrics) -> None:
    """Its cost, its rows and chunks, and the predicted work before it."""
    MetricsObserver(metrics).step_launched(LAUNCH)

    assert seen(metrics.launch_duration) == (1, 0.0005)
    assert seen(metrics.step_rows) == (1, 5)
    assert seen(metrics.launch_lead) == (1, 0.0012)
    assert seen(metrics.device_bubble) == (0, 0.0)


def test_a_launch_after_a_bubble(metrics: Metrics) -> None:
    """Nothing was out: there is no lead, but how long the device had waited."""
    MetricsObserver(metrics).step_launched(replace(LAUNCH, num_inflight=1, lead_s=0.0, bubble_s=0.003, reason="idle"))

    assert seen(metrics.launch_lead) == (0, 0.0)
    assert seen(metrics.device_bubble) == (1, 0.003)


def test_a_policy_that_predicts_nothing(metrics: Metrics) -> None:
    """No lead and no error are observed, durations are."""
    observer = MetricsObserver(metrics)
    observer.step_launched(replace(LAUNCH, lead_s=None, predicted_end_s=None))
    observer.step_landed(replace(LANDING, predicted_s=None))

    assert seen(metrics.launch_lead) == (0, 0.0)
    assert seen(metrics.step_prediction_error) == (0, 0.0)
    assert seen(metrics.step_duration) == (1, 0.004)


def test_the_prediction_error_is_relative_to_what_the_step_took(metrics: Metrics) -> None:
    """5 ms were predicted and 4 ms taken; a failed step proves nothing."""
    observer = MetricsObserver(metrics)
    observer.step_landed(LANDING)
    observer.step_landed(replace(LANDING, failed=True))
    observer.step_landed(replace(LANDING, landed_s=LANDING.started_s))

    assert seen(metrics.step_prediction_error) == (1, 0.25)


@pytest.mark.parametrize("is_lost", [False, True])
async def test_a_start_is_told_behind_its_launch_and_not_lost_with_it(is_lost: bool) -> None:
    """What newcomers cost the loop does not keep the device waiting; a launch that fails has started them as well."""
    order: list[str] = []

    class Runner(ScriptedRunner):
        def launch(self, plan: BatchPlan) -> ManualEvent:
            order.append("launch")
            return super().launch(plan)

    class Observer(NullObserver):
        def request_started(self, wait_s: float, num_prompt_tokens: int, num_cached_tokens: int) -> None:
            order.append("start")

    runner = Runner()
    if is_lost:
        runner.fail_launch(1, MemoryError("launch"))
    async with running(runner, observer=Observer()) as engine:
        await read(engine.submit_nowait(request(max_tokens=1)))

    assert order == ["launch", "start"]
