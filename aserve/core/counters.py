"""What the scheduler counts."""

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Totals since start. num_wasted_rows: rows that landed after their sequence had ended, or behind a stop string.

    num_prefill_tokens: tokens that chunks computed. num_prompt_tokens: those of prompts that started, cached ones too.
    num_prefix_queries, num_prefix_hits: tokens looked up in the prefix cache and found.
    """

    num_steps: int = 0
    num_failed_steps: int = 0
    num_preemptions: int = 0
    num_wasted_rows: int = 0
    num_rows: int = 0
    num_prefill_tokens: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
