"""The engine's figures, and whether it is well."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatistics:
    """A moment's figures and totals since start; prefix_cache figures count tokens.

    num_rejected: sequences that found the queue full. num_eligible_rows: rows that steps could have had at the moment
    the device began them, a row being one sequence with work, as far as there are slots. num_left_out_rows: those of
    them that were not in the step, most of them because they came after it was composed; its share of the former is
    how fragmented the batches are. bubble_s: time that the device stood idle beside work. policy: what the launch
    policy knows, times in the unit of their names.
    """

    num_waiting: int
    num_queued_tokens: int
    max_queue_requests: int
    max_queue_tokens: int
    num_running: int
    num_parked: int
    num_inflight_steps: int
    num_streams: int
    num_blocks: int
    num_blocks_free: int
    num_blocks_cached: int
    num_blocks_pending: int
    kv_cache_usage: float
    num_accepted: int
    num_rejected: int
    num_finished: dict[str, int]
    num_steps: int
    num_failed_steps: int
    num_rows: int
    num_prefill_tokens: int
    num_preemptions: int
    num_wasted_rows: int
    num_eligible_rows: int
    num_left_out_rows: int
    bubble_s: float
    prompt_tokens: int
    generation_tokens: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    policy: dict[str, float]
    runner: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """alive: the engine can still make progress. ready: it would take a request now. reason: why not."""

    alive: bool
    ready: bool
    reason: str
