"""The engine's timings as Prometheus metrics."""

from aserve.engine.ports import RequestEnd, RequestMove, StepLanding, StepLaunch
from aserve.obs.metrics import Metrics


class MetricsObserver:
    """``ports.Observer`` over the process's metrics. A request costs it some ten observations, a step up to six."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        # Bound once: each is called for every token or request.
        self.first_token = metrics.time_to_first_token.observe
        self.inter_token = metrics.inter_token_latency.observe
        self.request_rejected = metrics.rejected.add

    def step_launched(self, launch: StepLaunch) -> None:
        metrics = self._metrics
        metrics.launch_duration.observe(launch.launched_s - launch.composed_s)
        metrics.step_rows.observe(launch.num_rows + launch.num_chunks)
        metrics.step_tokens.observe(launch.num_rows + launch.num_prefill_tokens)
        if launch.lead_s is not None and launch.num_inflight > 1:
            metrics.launch_lead.observe(launch.lead_s)
        if launch.bubble_s:
            metrics.device_bubble.observe(launch.bubble_s)

    def step_landed(self, landing: StepLanding) -> None:
        if landing.failed:  # how long a step that was lost did not take says nothing of steps
            return
        taken_s = landing.landed_s - landing.started_s
        self._metrics.step_duration.observe(taken_s)
        if landing.predicted_s is not None and taken_s > 0.0:
            self._metrics.step_prediction_error.observe(abs(landing.predicted_s - taken_s) / taken_s)

    def delivered(self, start_s: float, end_s: float, num_tokens: int) -> None: ...

    def request_moved(self, move: RequestMove) -> None: ...

    def request_started(self, wait_s: float, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        self._metrics.queue_time.observe(wait_s)
        self._metrics.prompt_sources.add("local_cache_hit", num_cached_tokens)
        self._metrics.prompt_sources.add("local_compute", num_prompt_tokens - num_cached_tokens)

    def request_finished(self, end: RequestEnd) -> None:
        """Phases count where they were gone through: a sequence without a token has neither prefilled nor decoded."""
        metrics = self._metrics
        metrics.finished.add(end.reason)
        metrics.e2e_latency.observe(end.ended_s - end.submitted_s)
        metrics.num_prompt_tokens.observe(end.num_prompt_tokens)
        metrics.num_output_tokens.observe(end.num_output_tokens)
        metrics.max_tokens.observe(end.max_tokens)
        if end.num_output_tokens_max is not None:
            metrics.num_choices.observe(end.n)
            metrics.num_output_tokens_max.observe(end.num_output_tokens_max)
        if end.started_s is None or end.first_token_s is None or end.last_token_s is None:
            return
        decode_s = end.last_token_s - end.first_token_s
        metrics.num_prefill_tokens.observe(end.num_prompt_tokens - end.num_cached_tokens)
        metrics.prefill_time.observe(end.first_token_s - end.started_s)
        metrics.decode_time.observe(decode_s)
        metrics.inference_time.observe(end.last_token_s - end.started_s)
        if end.num_output_tokens > 1:
            metrics.time_per_output_token.observe(decode_s / (end.num_output_tokens - 1))
