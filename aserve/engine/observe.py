"""The engine's timings as Prometheus metrics."""

from aserve.engine.ports import RequestMove, StepLanding, StepLaunch
from aserve.obs.metrics import Metrics


class MetricsObserver:
    """``ports.Observer`` over the process's metrics."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        # Bound once: each is called for every token or step.
        self.queue_time = metrics.queue_time.observe
        self.first_token = metrics.time_to_first_token.observe
        self.inter_token = metrics.inter_token_latency.observe
        self.request_rejected = metrics.rejected.add

    def step_launched(self, launch: StepLaunch) -> None:
        metrics = self._metrics
        metrics.launch_duration.observe(launch.launched_s - launch.composed_s)
        metrics.step_rows.observe(launch.num_rows + launch.num_chunks)
        if launch.lead_s is not None and launch.num_inflight > 1:
            metrics.launch_lead.observe(launch.lead_s)
        if launch.bubble_s:
            metrics.device_bubble.observe(launch.bubble_s)

    def step_landed(self, landing: StepLanding) -> None:
        taken_s = landing.landed_s - landing.started_s
        self._metrics.step_duration.observe(taken_s)
        if landing.predicted_s is not None and taken_s > 0.0 and not landing.failed:
            self._metrics.step_prediction_error.observe(abs(landing.predicted_s - taken_s) / taken_s)

    def delivered(self, start_s: float, end_s: float, num_tokens: int) -> None: ...

    def request_moved(self, move: RequestMove) -> None: ...

    def request_finished(
        self, reason: str, seconds: float, first_token_s: float | None, num_output_tokens: int
    ) -> None:
        self._metrics.request_finished(
            reason, e2e_s=seconds, first_token_s=first_token_s, num_output_tokens=num_output_tokens
        )
