"""The scheduler's options, with defaults and a sentence each; the top-level configuration is composed of these."""

from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

CPU_NUM_SEQS: Final = 64
GPU_NUM_SEQS: Final = 256
"""Sequences at once where nobody sets them. An H200 gave 48,000 tokens a second to 64 streams of 1B and 93,000 to 256:
one reading of the weights serves them all."""

CPU_BATCHED_TOKENS: Final = 512
GPU_BATCHED_TOKENS: Final = 1024
SMALL_GPU_BATCHED_TOKENS: Final = 2048
"""Token budget of a step where nobody sets one, on a GPU also by the size of the model: a step of so many tokens takes
an H200 some 7 ms with 1B and 25 with 8B. At 256 streams of 1B, 2,048 gave more tokens a second than 1,024 and brought
the last first token of a burst sooner; with 8B, it made the gaps beside prompts twice as long and gained nothing."""

SMALL_MODEL_PARAMETERS: Final = 4_000_000_000
"""In the layers."""


def gpu_batched_tokens(num_layer_parameters: int | None) -> int:
    """What max_num_batched_tokens = 0 is on a GPU. num_layer_parameters: None if they are not known."""
    is_small = num_layer_parameters is not None and num_layer_parameters < SMALL_MODEL_PARAMETERS
    return SMALL_GPU_BATCHED_TOKENS if is_small else GPU_BATCHED_TOKENS


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOptions:
    """Section ``[scheduler]``. Where ``max_num_seqs``, ``max_num_batched_tokens``, ``num_blocks`` or ``max_model_len``
    is 0, the model's side decides at start."""

    max_num_seqs: int = _option(
        0,
        f"Sequences that run at once: rows of the slot table; 0 is {CPU_NUM_SEQS} on a CPU and {GPU_NUM_SEQS} on a "
        "GPU, or as many as a token budget that is set has room for.",
    )
    max_num_batched_tokens: int = _option(
        0,
        "Token budget of a step; decode rows first, prompt chunks fill the rest; "
        f"0 is {CPU_BATCHED_TOKENS} on a CPU, {GPU_BATCHED_TOKENS} on a GPU, and {SMALL_GPU_BATCHED_TOKENS} there for "
        f"models below {SMALL_MODEL_PARAMETERS // 10**9} billion parameters in their layers.",
    )
    max_model_len: int = _option(
        0, "Longest prompt plus output in tokens; 0 takes the model's own, cut to the KV pool."
    )
    block_size: int = _option(32, "Tokens in a KV block: fewer share prefixes more finely, more are read faster.")
    num_blocks: int = _option(0, "KV blocks in the pool (at least 8); 0 sizes the pool from memory.")
    max_inflight: int = _option(4, "Steps launched and not landed, 1 to 8: a cap, not a goal.")
    policy: Literal["sync", "overlap", "eager", "late"] = _option(
        "overlap",
        "When to launch: after each landing, with one step queued behind the running one, up to max_inflight, or just "
        "before the predicted end of the work that is out.",
    )
    late_margin_ms: float = _option(
        0.2, "How much before that end, beyond what a launch is measured to cost and the loop to be late."
    )
    prefill: Literal["mixed", "split", "streams"] = _option(
        "mixed",
        "Prompt chunks beside decode rows in one step; in steps of their own that take turns with those; or, on a GPU, "
        "in steps on a second stream, at the same time.",
    )
    queue_order: Literal["fcfs", "priority"] = _option("fcfs", "Order of the waiting queue.")
    enable_prefix_caching: bool = _option(
        True, "Keep the blocks of finished prompts for later requests that share a prefix."
    )
    watermark: float = _option(0.01, "Share of the pool that admission leaves free for sequences that already run.")
    long_prefill_threshold: int = _option(2048, "Prompts with more uncomputed tokens than this count as long.")
    max_long_partial_prefills: int = _option(
        2, "Long prompts that prefill at once; shorter ones overtake further ones."
    )
    prefill_ageing_steps: int = _option(16, "Steps after which an overtaken prompt goes first again.")
    sampler: Literal["device", "host"] = _option(
        "device", "Where tokens are sampled; on the host each sequence has one row in flight."
    )
    hash_bits: int = _option(
        256, "Bits of the prefix hash that are used (1 to 256); few bits are for tests of collisions."
    )
    force_preempt_every: int = _option(0, "Preempt the last running sequence every N steps; for tests, 0 is off.")
    check_invariants_every: int = _option(
        0, "Recount all state every N landings and when idle; for debugging, 0 is off."
    )

    @property
    def min_batched_tokens(self) -> int:
        """What a step must hold: a row of every sequence (of one, where that is open), and a block of a prompt."""
        return (self.max_num_seqs or 1) + self.block_size

    def with_sizes(self, *, num_seqs: int = 0, num_batched_tokens: int = 0) -> "SchedulerOptions":
        """With numbers in place of max_num_seqs = 0 and max_num_batched_tokens = 0: these (0: a CPU's), but no more
        sequences than a budget that is set has room for, and a budget that holds a step of them all."""
        sized = self
        if not sized.max_num_seqs:
            num_seqs = num_seqs or CPU_NUM_SEQS
            if self.max_num_batched_tokens:
                num_seqs = max(1, min(num_seqs, self.max_num_batched_tokens - self.block_size))
            sized = replace(sized, max_num_seqs=num_seqs)
        if not sized.max_num_batched_tokens:
            budget = max(num_batched_tokens or CPU_BATCHED_TOKENS, sized.min_batched_tokens)
            sized = replace(sized, max_num_batched_tokens=budget)
        return sized

    def with_gpu_sizes(self, num_layer_parameters: int | None) -> "SchedulerOptions":
        """The same with a GPU's numbers. num_layer_parameters: as for ``gpu_batched_tokens``."""
        return self.with_sizes(num_seqs=GPU_NUM_SEQS, num_batched_tokens=gpu_batched_tokens(num_layer_parameters))
