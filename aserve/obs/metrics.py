"""Every metric of the server on one page of Prometheus' text format, under names of its own and under vLLM's.

``engine/observe.py`` observes requests and steps as they happen; what the scheduler, the server and the log count for
themselves is read when somebody scrapes.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

from aserve import __version__
from aserve.obs.instruments import (
    BoundedCounter,
    BoundedHistogram,
    Counter,
    Gauge,
    Histogram,
    Info,
    Instrument,
    LabelledCounter,
    family,
)

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
"""Of what ``Metrics.render`` returns."""

FINISH_REASONS: Final = ("stop", "length", "abort", "timeout", "error")

REJECT_REASONS: Final = (
    "server_overloaded", "server_draining", "context_length_exceeded", "invalid_request", "engine_dead", "other"
)  # fmt: skip
"""Codes of ``aserve.errors`` under which the engine turns a request away. What the server refuses before it asks the
engine (a field out of range, a wrong key, an unknown model) is in ``http_responses_total``, by route and status."""

PROMPT_SOURCES: Final = ("local_cache_hit", "local_compute")
"""Where the KV of a prompt's tokens came from, in vLLM's words."""

MAX_HTTP_LABELS: Final = 512
"""Combinations of route, method and status; further ones count as "other". The route table gives far fewer."""
MAX_HTTP_ROUTES: Final = 64
"""The same for the routes whose durations are told apart."""

# Bounds hold vLLM's as a subset, so that a query which names one finds it here too.
TTFT_BUCKETS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
TOKEN_BUCKETS: Final = (
    0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15,
    0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_BUCKETS: Final = (
    0.01, 0.025, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0,
    240.0, 480.0, 960.0, 1920.0, 7680.0,
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
STEP_TOKEN_BUCKETS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
CHOICE_BUCKETS: Final = (1, 2, 5, 10, 20, 50, 100)

ENGINE: Final = "0"
"""Label of vLLM's names, where data-parallel engines are told apart; here is one."""

_Measure = TypeVar("_Measure", bound=Instrument)


def length_buckets(num_tokens_max: int) -> tuple[int, ...]:
    """1, 2, 5, 10 and so on up to the bound, as vLLM has them for lengths in tokens."""
    return tuple(
        bound
        for exponent in range(len(str(num_tokens_max)))
        for mantissa in (1, 2, 5)
        if (bound := mantissa * 10**exponent) <= num_tokens_max
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """A metric of the page. vllm: its names among vLLM's."""

    instrument: Instrument
    name: str
    text: str
    vllm: tuple[str, ...]


class Metrics:
    """Every metric of the server, one attribute each.

    What the engine counts itself is not counted here again: ``render(statistics)`` reads it by the names in ``SCRAPED``
    from whatever object it is given. ``before_render`` takes callbacks that bring other figures up to date.
    """

    SCRAPED: Final = (
        "num_running", "num_waiting", "num_parked", "num_streams", "num_queued_tokens", "max_queue_requests",
        "max_queue_tokens", "num_inflight_steps", "kv_cache_usage", "num_blocks", "num_blocks_free",
        "num_blocks_cached", "num_blocks_pending", "num_steps", "num_failed_steps", "num_wasted_rows",
        "num_eligible_rows", "num_left_out_rows", "num_preemptions", "prompt_tokens", "generation_tokens",
        "prefix_cache_queries", "prefix_cache_hits",
    )  # fmt: skip
    """Attributes that ``render`` copies from the statistics, where they are there. kv_cache_usage is 0 to 1;
    prefix_cache_* count tokens looked up and found."""

    def __init__(
        self,
        model_name: str,
        *,
        max_model_len: int = 131_072,
        cache_config: Mapping[str, object] | None = None,
        vllm_names: bool = True,
        process: bool = True,
    ) -> None:
        """max_model_len: bounds the buckets of lengths. cache_config: what vLLM's ``cache_config_info`` tells."""
        self.model_name = model_name
        self._entries: list[_Entry] = []
        self._before_render: list[Callable[[], None]] = []
        self._cache_config = Info(cache_config or {})

        add = self._add
        add(Info({"version": __version__, "model_name": model_name}), "build_info", "Version and model.")

        # As of now
        self.num_running = add(
            Gauge(), "num_requests_running", "Sequences that own KV blocks and run.", "num_requests_running"
        )
        self.num_waiting = add(
            Gauge(),
            "num_requests_waiting",
            "Sequences that were admitted and own no blocks yet.",
            "num_requests_waiting",
        )
        self.num_parked = add(Gauge(), "num_requests_parked", "Sequences that sit out because their reader lags.")
        self.num_streams = add(Gauge(), "open_requests", "Calls whose answer has not ended.")
        self.num_queued_tokens = add(Gauge(), "queued_tokens", "Uncached prompt tokens of waiting sequences.")
        self.max_queue_requests = add(Gauge(), "max_queue_requests", "So many sequences may wait.")
        self.max_queue_tokens = add(Gauge(), "max_queue_tokens", "So many uncached prompt tokens may wait.")
        self.num_inflight_steps = add(Gauge(), "steps_in_flight", "Steps launched and not landed.")
        self.kv_cache_usage = add(
            Gauge(),
            "kv_cache_usage_ratio",
            "Share of the KV pool in use, 0 to 1.",
            "kv_cache_usage_perc",  # a share of 1 in spite of its name, there too
            "gpu_cache_usage_perc",  # its older name
        )
        self.num_blocks = add(Gauge(), "kv_blocks", "KV blocks of the pool.")
        self.num_blocks_free = add(Gauge(), "kv_blocks_free", "KV blocks that hold nothing.")
        self.num_blocks_cached = add(
            Gauge(),
            "kv_blocks_cached",
            "KV blocks that nobody uses and that the prefix cache keeps while there is room.",
        )
        self.num_blocks_pending = add(
            Gauge(), "kv_blocks_pending", "KV blocks given back that a step in flight may still touch."
        )
        self.open_connections = add(Gauge(), "open_connections", "Connections of clients, websockets among them.")
        self.open_websockets = add(Gauge(), "open_websockets", "Websockets of clients.")

        # Since start
        self.prompt_tokens = add(
            Counter(), "prompt_tokens", "Prompt tokens of sequences that were started.", "prompt_tokens"
        )
        self.prompt_sources = add(
            LabelledCounter("source", PROMPT_SOURCES),
            "prompt_tokens_by_source",
            "Prompt tokens of sequences that were started, by where their KV came from.",
            "prompt_tokens_by_source",
        )
        self.generation_tokens = add(Counter(), "generation_tokens", "Tokens generated.", "generation_tokens")
        self.prefix_cache_queries = add(
            Counter(), "prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "prefix_cache_queries"
        )
        self.prefix_cache_hits = add(
            Counter(), "prefix_cache_hits", "Prompt tokens found in the prefix cache.", "prefix_cache_hits"
        )
        self.num_preemptions = add(
            Counter(), "preemptions", "Sequences that gave up their blocks to run later.", "num_preemptions"
        )
        self.num_steps = add(Counter(), "steps", "Steps launched.")
        self.num_failed_steps = add(Counter(), "failed_steps", "Steps that did not start or came back with a fault.")
        self.num_wasted_rows = add(Counter(), "wasted_rows", "Rows computed for sequences that had already ended.")
        self.num_eligible_rows = add(
            Counter(), "eligible_rows", "Rows that steps could have had when the device began them."
        )
        self.num_left_out_rows = add(
            Counter(), "left_out_rows", "Of the eligible rows, those that came too late for the step."
        )
        self.finished = add(
            LabelledCounter("finish_reason", FINISH_REASONS), "requests_finished", "Sequences ended, by reason."
        )
        self.rejected = add(
            LabelledCounter("reason", REJECT_REASONS),
            "requests_rejected",
            "Requests that the engine turned away, by reason.",
        )
        self.http_responses = add(
            BoundedCounter(("route", "method", "status"), MAX_HTTP_LABELS),
            "http_responses",
            "Answers, by route, method and status.",
        )
        self.connections_refused = add(
            Counter(), "connections_refused", "Connections beyond the limit, sent away with a 503."
        )
        self.slow_headers = add(Counter(), "slow_headers", "Connections closed since a request's head took too long.")
        self.write_stalls = add(Counter(), "write_stalls", "Connections closed since their client took nothing.")
        self.log_lines_dropped = add(Counter(), "log_lines_dropped", "Log records that could not be written in time.")

        # Of each request
        lengths = length_buckets(max_model_len)
        self.num_prompt_tokens = add(
            Histogram(lengths), "request_prompt_tokens", "Length of the prompt.", "request_prompt_tokens"
        )
        self.num_prefill_tokens = add(
            Histogram(lengths),
            "request_prefill_tokens",
            "Tokens of the prompt that the prefix cache did not have.",
            "request_prefill_kv_computed_tokens",
        )
        self.num_output_tokens = add(
            Histogram(lengths), "request_generation_tokens", "Length of the output.", "request_generation_tokens"
        )
        self.num_output_tokens_max = add(
            Histogram(lengths),
            "request_max_num_generation_tokens",
            "Length of the longest output of a prompt.",
            "request_max_num_generation_tokens",
        )
        self.num_choices = add(
            Histogram(CHOICE_BUCKETS), "request_params_n", "Outputs asked for of a prompt.", "request_params_n"
        )
        self.max_tokens = add(
            Histogram(lengths),
            "request_params_max_tokens",
            "Bound of the output, as asked for or by default.",
            "request_params_max_tokens",
        )
        self.queue_time = add(
            Histogram(REQUEST_BUCKETS),
            "request_queue_time_seconds",
            "From arrival to the first step.",
            "request_queue_time_seconds",
        )
        self.prefill_time = add(
            Histogram(REQUEST_BUCKETS),
            "request_prefill_time_seconds",
            "From the first step to the first token.",
            "request_prefill_time_seconds",
        )
        self.decode_time = add(
            Histogram(REQUEST_BUCKETS),
            "request_decode_time_seconds",
            "From the first token to the last.",
            "request_decode_time_seconds",
        )
        self.inference_time = add(
            Histogram(REQUEST_BUCKETS),
            "request_inference_time_seconds",
            "From the first step to the last token.",
            "request_inference_time_seconds",
        )
        self.e2e_latency = add(
            Histogram(REQUEST_BUCKETS),
            "e2e_request_latency_seconds",
            "From arrival to the end.",
            "e2e_request_latency_seconds",
        )
        self.time_to_first_token = add(
            Histogram(TTFT_BUCKETS),
            "time_to_first_token_seconds",
            "From arrival to the first token.",
            "time_to_first_token_seconds",
        )
        self.inter_token_latency = add(
            Histogram(TOKEN_BUCKETS),
            "inter_token_latency_seconds",
            "Between two tokens of a sequence; those that go out together share their time.",
            "inter_token_latency_seconds",
            "time_per_output_token_seconds",  # its older name
        )
        self.time_per_output_token = add(
            Histogram(TOKEN_BUCKETS),
            "time_per_output_token_seconds",
            "Mean of a sequence after its first token.",
            "request_time_per_output_token_seconds",
        )
        self.http_duration = add(
            BoundedHistogram("route", MAX_HTTP_ROUTES, REQUEST_BUCKETS),
            "http_request_duration_seconds",
            "From the request's headers to the answer's end, by route.",
        )

        # Of each step, and of the loop
        self.step_duration = add(
            Histogram(STEP_BUCKETS),
            "step_duration_seconds",
            "From a step's launch, or the landing before, to its landing.",
        )
        self.step_rows = add(Histogram(ROW_BUCKETS), "step_rows", "Sequences in a step: decode rows and prompt chunks.")
        self.step_tokens = add(
            Histogram(STEP_TOKEN_BUCKETS),
            "step_tokens",
            "Tokens that a step computes: one of each decode row, and those of its prompt chunks.",
            "iteration_tokens_total",
        )
        self.step_prediction_error = add(
            Histogram(RATIO_BUCKETS),
            "step_prediction_error_ratio",
            "Difference of a step's predicted time and what it took, as a share of that.",
        )
        self.launch_duration = add(
            Histogram(LEAD_BUCKETS), "launch_duration_seconds", "Composing a step and handing it to the device."
        )
        self.launch_lead = add(
            Histogram(LEAD_BUCKETS),
            "launch_lead_seconds",
            "Predicted work that the device had left when a step was composed behind it.",
        )
        self.device_bubble = add(
            Histogram(LEAD_BUCKETS),
            "device_bubble_seconds",
            "The device stood idle beside work, from landing to launch.",
        )
        self.loop_lag = add(Histogram(LAG_BUCKETS), "loop_lag_seconds", "Lateness of a timer of the event loop.")
        self.gc_pause = add(Histogram(LAG_BUCKETS), "gc_pause_seconds", "Pauses of the garbage collector.")

        self._vllm_names = vllm_names
        self._process = CollectorRegistry()
        if process:
            ProcessCollector(registry=self._process)

    def _add(self, instrument: _Measure, name: str, text: str, *vllm: str) -> _Measure:
        self._entries.append(_Entry(instrument=instrument, name=name, text=text, vllm=vllm))
        return instrument

    def http_request(self, route: str, method: str, status: int, seconds: float) -> None:
        """One answered request. The labels are the server's own: the route's pattern, never the path that was sent."""
        self.http_responses.add(route, method, str(status))
        self.http_duration.observe(route, seconds)

    def before_render(self, update: Callable[[], None]) -> None:
        """Call ``update`` at each scrape, before anything is read. It may be called in any thread."""
        self._before_render.append(update)

    def render(self, statistics: object = None) -> bytes:
        """The page. Takes most of a millisecond and reads /proc: off the loop, through ``asyncio.to_thread``."""
        for update in self._before_render:
            update()
        for name in self.SCRAPED:
            value = getattr(statistics, name, None)
            if value is not None:
                getattr(self, name).value = value
        page = [*self._families(), *(self._vllm_families() if self._vllm_names else ())]
        return "".join(page).encode() + generate_latest(self._process)

    def _families(self) -> Iterator[str]:
        for entry in self._entries:
            yield from family(entry.instrument, f"aserve_{entry.name}", entry.text, {})

    def _vllm_families(self) -> Iterator[str]:
        labels = {"model_name": self.model_name, "engine": ENGINE}
        for entry in self._entries:
            for name in entry.vllm:
                yield from family(entry.instrument, f"vllm:{name}", entry.text, labels)
        success = self.finished.labelled("finished_reason")
        yield from family(success, "vllm:request_success", "Sequences ended, by reason.", labels)
        cached = Counter()
        cached.add(self.prompt_sources.values["local_cache_hit"])
        yield from family(cached, "vllm:prompt_tokens_cached", "Prompt tokens that the prefix cache had.", labels)
        waiting = "vllm:num_requests_waiting_by_reason"
        text = "Waiting sequences; none waits for anything but capacity."
        yield from family(self.num_waiting, waiting, text, {**labels, "reason": "capacity"})
        yield from Gauge().samples(waiting, {**labels, "reason": "deferred"})
        yield from family(self._cache_config, "vllm:cache_config_info", "Facts on the KV cache.", {"engine": ENGINE})
