"""The contract between scheduler and device: one BatchPlan out, one BatchResult back.

Numpy and ints only, so that a plan can be sent to other ranks and replayed there. R is the number of rows that sample:
the decode rows in their order, then the chunks with ``last`` in theirs. K is ``logprobs_k``.
"""

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from aserve.core.ids import Epoch, Slot, StepNumber
from aserve.core.request import SamplingParams

MAIN_STREAM: Final = 0
PREFILL_STREAM: Final = 1
"""Where ``prefill = "streams"``, steps of chunks; those of decode rows, and all others, are on the main one."""

FLAG_DONE: Final = 1
"""The device saw a stop id or the length limit in this row's token, or the row was done before."""
FLAG_INVALID: Final = 2
"""The row's logits were NaN or all -inf, or its token lies beyond the vocabulary: the row alone fails."""


def _empty(columns: int) -> NDArray[np.int32]:
    return np.empty((0, columns), np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """Binds a slot to a sequence before the step's rows and chunks run.

    position: tokens whose K/V are in the cache already (a prefix hit), where the first chunk starts.
    min_length: while the sequence is shorter than this (prompt and output, before the new token) stop ids are masked.
    max_length: the sequence is done when it is this long (the new token included).
    history: int32 tokens seen so far, prompt then output, empty unless ``params.needs_history``;
    num_prompt_tokens tells where the prompt ends (kept over preemption: earlier output stays output).
    """

    slot: Slot
    epoch: Epoch
    position: int
    params: SamplingParams
    seed: int
    stop_ids: tuple[int, ...]
    min_length: int
    max_length: int
    num_prompt_tokens: int
    history: NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Prompt tokens [start, start + n) of one slot. The last one samples the next token.

    prompt_logprobs_k: None is off; otherwise the result carries logprobs of the n tokens after each position of the
    chunk, the last of which is ``next_token`` (-1 for the last chunk: that row belongs to the sampled token).
    """

    slot: Slot
    start: int
    tokens: NDArray[np.int32]
    last: bool
    prompt_logprobs_k: int | None = None
    next_token: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """One step. Applied in this order: leaves, joins, table writes, token writes, then rows and chunks together.

    stream: steps of one stream run in launch order, those of two at once and in any order: what one touches (slots,
    blocks that it writes), none of another touches before it has landed.
    leaves: int32 [n], slots whose owner is gone. table_writes: int32 [n, 3] of (slot, index, block).
    token_writes: int32 [n, 3] of (slot, position, token), tokens that the host sampled for the slot's next row.
    rows: int32 [n, 2] of (slot, position): computes the token at ``position`` and samples the one after it.
    deferred: bool [R], rows whose token the host samples: the device writes nothing back for them.
    logprobs_k: alternatives to report for each sampled row, -1 for no logprobs at all.
    """

    step: StepNumber
    stream: int = MAIN_STREAM
    leaves: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    joins: tuple[Join, ...] = ()
    table_writes: NDArray[np.int32] = field(default_factory=lambda: _empty(3))
    token_writes: NDArray[np.int32] = field(default_factory=lambda: _empty(3))
    rows: NDArray[np.int32] = field(default_factory=lambda: _empty(2))
    chunks: tuple[Chunk, ...] = ()
    deferred: NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, np.bool_))
    logprobs_k: int = -1

    @property
    def num_sampled(self) -> int:
        """R, the rows of the result."""
        return len(self.rows) + sum(chunk.last for chunk in self.chunks)

    @property
    def num_tokens(self) -> int:
        """Tokens that the forward computes."""
        return len(self.rows) + sum(len(chunk.tokens) for chunk in self.chunks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprobs:
    """Log-probabilities under the model's own distribution, before temperature and filters.

    token_logprobs: float32 [R]. ranks: int32 [R], 1 is the most likely. top_ids: int32 [R, K]. top_logprobs:
    float32 [R, K].
    """

    token_logprobs: NDArray[np.float32]
    ranks: NDArray[np.int32]
    top_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchResult:
    """What a step produced.

    tokens: int32 [R, 1] (wider with speculation). num_tokens: int32 [R], how many of them count. flags: uint8 [R].
    prompt_logprobs: (index into plan.chunks, Logprobs over the chunk's n positions; n - 1 for the last chunk).
    """

    step: StepNumber
    tokens: NDArray[np.int32]
    num_tokens: NDArray[np.int32]
    flags: NDArray[np.uint8]
    logprobs: Logprobs | None = None
    prompt_logprobs: tuple[tuple[int, Logprobs], ...] = ()
