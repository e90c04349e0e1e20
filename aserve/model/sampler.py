"""From logits to tokens. Each row is chosen by its own parameters and noise alone: the same in any batch, in any order.

What is done to a row's logits, in this order: allowed tokens, then additions (logit bias, -inf for bad words and for
stop ids below the least length), repetition, frequency and presence penalties; greedy rows then take the maximum, the
lowest id among equals. Others: temperature, min-p, top-k, top-p, and a draw by the Gumbel-max method. Tokens that tie
with the last one that a filter keeps are kept too, so that no filter depends on an order of equals.

Shape suffixes: R rows, V vocabulary, K candidates, D rows that draw, P rows that something applies to, N single logits,
E stop ids, B rows of a block.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aserve.core.plan import Logprobs
from aserve.model.noise import log_exponential_, noise_bits

NUM_CANDIDATES: Final = 256
"""Filters look at so many of the likeliest tokens first; a row that keeps more of them is sorted as a whole.

A constant, so that a row's way does not depend on its neighbours. Taking 256 of 49,152 costs 0.15 ms a row.
"""

MAX_TOP_LOGPROBS: Final = 20

_LOGPROB_ROWS: Final = 64
"""Rows of log-probabilities at once, for a whole chunk of a prompt may ask for them."""

_BLOCK_ELEMENTS: Final = 8 * 49_152
"""Logits that are drawn from at once, in whole rows: their 1.5 MB of noise stay in a core's second-level cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitEdits:
    """values_N (float32, may be -inf) added to logits[rows_N, ids_N]; pairs may repeat."""

    rows_N: Tensor
    ids_N: Tensor
    values_N: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowedTokens:
    """Tokens outside mask_PV (bool) are -inf."""

    rows_P: Tensor
    mask_PV: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """Each token that a row has seen, once: (rows_N, ids_N), and how often its output holds it.

    Repetition applies to all of them (logits > 0 are divided, others multiplied); the other two count output only.
    """

    rows_N: Tensor
    ids_N: Tensor
    num_outputs_N: Tensor
    repetition_N: Tensor
    presence_N: Tensor
    frequency_N: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """Rows with a temperature > 0. positions_D: of the sampled tokens. top_k_D: 1..V. min_p_D: 0 is off."""

    rows_D: NDArray[np.int64]
    seeds_D: NDArray[np.uint64]
    positions_D: NDArray[np.int64]
    temperature_D: Tensor
    top_k_D: Tensor
    top_p_D: Tensor
    min_p_D: Tensor

    def select(self, rows: slice | NDArray[np.int64]) -> "Draws":
        return Draws(
            rows_D=self.rows_D[rows],
            seeds_D=self.seeds_D[rows],
            positions_D=self.positions_D[rows],
            temperature_D=self.temperature_D[rows],
            top_k_D=self.top_k_D[rows],
            top_p_D=self.top_p_D[rows],
            min_p_D=self.min_p_D[rows],
        )

    def blocks(self, num_rows: int) -> Iterator["Draws"]:
        """Parts of at most ``num_rows`` rows."""
        for start in range(0, len(self.seeds_D), num_rows):
            yield self.select(slice(start, start + num_rows))

    def noise_bits(self, vocab_size: int) -> Iterator[NDArray[np.uint32]]:
        """uint32 [V] for each row."""
        for seed, position in zip(self.seeds_D.tolist(), self.positions_D.tolist(), strict=True):
            yield noise_bits(seed, position, vocab_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRule:
    """When a row's sampled token ends its sequence. length_R: total tokens with that token. done_R: inert before."""

    stop_ids_RE: NDArray[np.int64]
    min_length_R: NDArray[np.int64]
    max_length_R: NDArray[np.int64]
    length_R: NDArray[np.int64]
    done_R: NDArray[np.bool_]

    def ended(self, tokens_R: NDArray[np.int64]) -> NDArray[np.bool_]:
        """bool [R]: a stop id at or after the least length, or the length limit reached. The host has the same rule."""
        is_stop_R = (self.stop_ids_RE == tokens_R[:, None]).any(1) & (self.length_R > self.min_length_R)
        ended_R: NDArray[np.bool_] = is_stop_R | (self.length_R >= self.max_length_R)
        return ended_R


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRows:
    """All that the sampler needs about R rows; ``SlotTable.sampling_rows`` gathers it. None: no row needs that."""

    end: EndRule
    plain: Draws | None
    filtered: Draws | None
    edits: LogitEdits | None
    allowed: AllowedTokens | None
    penalties: Penalties | None

    @property
    def changes_logits(self) -> bool:
        return self.edits is not None or self.allowed is not None or self.penalties is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTokens:
    """tokens_R: int64. invalid_R: bool, rows whose logits were NaN, infinite or all -inf; their token means nothing."""

    tokens_R: NDArray[np.int64]
    invalid_R: NDArray[np.bool_]
    logprobs: Logprobs | None


class Sampler:
    """Holds scratch memory for a block of rows, so one thread may use it at a time."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._block_rows = max(1, _BLOCK_ELEMENTS // vocab_size)
        self._noise_BV = torch.empty(self._block_rows, vocab_size)

    @torch.inference_mode()
    def sample(self, logits_RV: Tensor, rows: SamplingRows, logprobs_k: int = -1) -> SampledTokens:
        """Choose R tokens. Overwrites ``logits_RV`` (float32) where parameters ask for it.

        Log-probabilities (``logprobs_k`` >= 0) are of the logits as they came.
        """
        raw_RV = logits_RV.clone() if logprobs_k >= 0 and rows.changes_logits else logits_RV
        _change_logits(logits_RV, rows)
        logits = logits_RV.numpy()
        tokens_R = logits.argmax(axis=1) if len(logits) else np.empty(0, np.int64)
        # NaN is the largest of all to argmax(), and an infinite maximum means +inf somewhere or -inf everywhere.
        invalid_R = ~np.isfinite(logits[np.arange(len(logits)), tokens_R]) | (tokens_R >= self._vocab_size)
        if rows.plain is not None:
            for block in rows.plain.blocks(self._block_rows):
                tokens_R[block.rows_D] = self._gumbel_max(_scaled(logits_RV, block), block).numpy()
        if rows.filtered is not None:
            for block in rows.filtered.blocks(self._block_rows):
                tokens_R[block.rows_D] = self._filtered_gumbel_max(_scaled(logits_RV, block), block).numpy()
        logprobs = compute_logprobs(raw_RV, torch.from_numpy(tokens_R), logprobs_k) if logprobs_k >= 0 else None
        return SampledTokens(tokens_R=tokens_R, invalid_R=invalid_R, logprobs=logprobs)

    def _gumbel_max(self, scaled_BV: Tensor, block: Draws) -> Tensor:
        """argmax(logits + Gumbel noise), written as argmin(log E - logits), over the whole vocabulary."""
        noise_BV = self._noise_BV[: len(scaled_BV)]
        for noise_V, bits_V in zip(noise_BV.numpy(), block.noise_bits(self._vocab_size), strict=True):
            np.copyto(noise_V, bits_V)
        # min() takes a third of argmin()'s time.
        return log_exponential_(noise_BV).sub_(scaled_BV).min(dim=-1).indices

    def _filtered_gumbel_max(self, scaled_BV: Tensor, block: Draws) -> Tensor:
        candidates_BK, ids_BK = scaled_BV.topk(min(NUM_CANDIDATES, self._vocab_size))
        only_top_p_B = (block.top_p_D < 1) & (block.top_k_D == self._vocab_size)
        weight_B = _weights(scaled_BV, candidates_BK[:, :1]).sum(-1) if bool(only_top_p_B.any()) else None
        least_B, covered_B = least_kept(candidates_BK, block, self._vocab_size, weight_B)

        bits = zip(block.noise_bits(self._vocab_size), ids_BK.numpy(), strict=True)
        noise_BK = torch.from_numpy(np.stack([bits_V[ids_K] for bits_V, ids_K in bits]).astype(np.float32))
        scores_BK = log_exponential_(noise_BK).sub_(candidates_BK)
        scores_BK.masked_fill_(candidates_BK < least_B[:, None], float("inf"))
        tokens_B = ids_BK.gather(1, scores_BK.argmin(dim=-1, keepdim=True))[:, 0]

        if len(flat := np.flatnonzero(~covered_B.numpy())):
            flat_block, flat_BV = block.select(flat), scaled_BV[flat]
            least_B, _ = least_kept(_descending(flat_BV), flat_block, self._vocab_size, None)
            flat_BV.masked_fill_(flat_BV < least_B[:, None], float("-inf"))
            tokens_B[flat] = self._gumbel_max(flat_BV, flat_block)
        return tokens_B


def least_kept(candidates_BK: Tensor, block: Draws, vocab_size: int, weight_B: Tensor | None) -> tuple[Tensor, Tensor]:
    """The smallest logit that min-p, top-k and top-p keep, and whether the candidates suffice to know it.

    candidates_BK: each row's K largest logits, descending, after temperature. weight_B: float64, the sum of
    exp(logit - largest) over the whole row; needed where K < V and a row has top-p but no top-k.
    top-p keeps the likeliest tokens whose predecessors have less than top_p of what min-p and top-k left.
    """
    num_candidates = candidates_BK.shape[1]
    complete = num_candidates == vocab_size
    largest_B, smallest_B = candidates_BK[:, 0], candidates_BK[:, -1]
    least_B = largest_B + block.min_p_D.log()
    kth_B = candidates_BK.gather(1, block.top_k_D.clamp(max=num_candidates)[:, None] - 1)[:, 0]
    has_top_k_B = block.top_k_D < vocab_size
    least_B = torch.where(has_top_k_B, torch.maximum(least_B, kth_B), least_B)
    # Equals of the smallest candidate may lie beyond it, so only what is strictly larger is known in full.
    within_B = (least_B > smallest_B) | complete
    unfiltered_B = ~has_top_k_B & least_B.isneginf()

    weights_BK = _weights(candidates_BK, candidates_BK[:, :1])
    weights_BK = weights_BK.where(candidates_BK >= least_B[:, None], 0)
    left_B = weights_BK.sum(-1)
    if weight_B is not None and not complete:
        left_B = left_B.where(within_B, weight_B)
    before_BK = weights_BK.cumsum(-1) - weights_BK
    limit_B = torch.where(block.top_p_D < 1, block.top_p_D * left_B, torch.inf)
    kept_BK = (candidates_BK >= least_B[:, None]) & (before_BK < limit_B[:, None])
    num_kept_B = kept_BK.sum(-1).clamp(min=1)  # 0 in rows that are NaN
    least_B = candidates_BK.gather(1, num_kept_B[:, None] - 1)[:, 0]
    covered_B = complete | ((within_B | unfiltered_B) & (least_B > smallest_B))
    return least_B, covered_B


def compute_logprobs(logits_RV: Tensor, tokens_R: Tensor, k: int) -> Logprobs:
    """Log-probabilities of ``tokens_R`` and of the ``k`` likeliest tokens under the logits as they are.

    Always finds the 20 likeliest, so that which of several equals is reported does not depend on the batch's ``k``;
    equals come lowest id first.
    """
    num_top = min(max(k, MAX_TOP_LOGPROBS), logits_RV.shape[1])
    parts = []
    for rows in range(0, max(1, len(logits_RV)), _LOGPROB_ROWS):
        logits, tokens = logits_RV[rows : rows + _LOGPROB_ROWS], tokens_R[rows : rows + _LOGPROB_ROWS, None]
        normaliser = logits.logsumexp(-1, keepdim=True)
        chosen = logits.gather(1, tokens)
        top_ids = logits.topk(num_top).indices.sort(-1).values
        top, order = logits.gather(1, top_ids).sort(stable=True, dim=-1, descending=True)
        parts.append(
            (
                (chosen - normaliser)[:, 0],
                (logits > chosen).sum(-1) + 1,
                top_ids.gather(1, order)[:, :k],
                (top - normaliser)[:, :k],
            )
        )
    token_logprobs_R, ranks_R, top_ids_RK, top_logprobs_RK = (torch.cat(part) for part in zip(*parts, strict=True))
    return Logprobs(
        token_logprobs=token_logprobs_R.numpy(),
        ranks=ranks_R.numpy().astype(np.int32),
        top_ids=top_ids_RK.numpy().astype(np.int32),
        top_logprobs=top_logprobs_RK.numpy(),
    )


def _change_logits(logits_RV: Tensor, rows: SamplingRows) -> None:
    """Allowed tokens, additions and penalties, in place."""
    if rows.allowed is not None:
        allowed_PV = logits_RV[rows.allowed.rows_P].masked_fill_(~rows.allowed.mask_PV, float("-inf"))
        logits_RV[rows.allowed.rows_P] = allowed_PV
    if rows.edits is not None:
        logits_RV.index_put_((rows.edits.rows_N, rows.edits.ids_N), rows.edits.values_N, accumulate=True)
    if rows.penalties is not None:
        seen = rows.penalties
        logits_N = logits_RV[seen.rows_N, seen.ids_N]
        logits_N = torch.where(logits_N > 0, logits_N / seen.repetition_N, logits_N * seen.repetition_N)
        logits_N -= seen.frequency_N * seen.num_outputs_N
        logits_N -= seen.presence_N * (seen.num_outputs_N > 0)
        logits_RV[seen.rows_N, seen.ids_N] = logits_N


def _scaled(logits_RV: Tensor, block: Draws) -> Tensor:
    """A copy of the block's rows, divided by their temperatures."""
    return logits_RV[block.rows_D].div_(block.temperature_D[:, None])


def _weights(logits: Tensor, largest: Tensor) -> Tensor:
    """exp(logits - largest) in float64: too fine for the order of a sum, which threads change, to move a limit."""
    return (logits - largest).exp_().to(torch.float64)


def _descending(logits_BV: Tensor) -> Tensor:
    """Values only, through NumPy: its vectorised sort takes 0.14 ms for 49,152 of them, torch's 2.8."""
    return torch.from_numpy(np.sort(logits_BV.numpy(), axis=-1)[:, ::-1].copy())
