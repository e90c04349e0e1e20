"""Devices, tolerances and batches for the tests of kernels."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aserve.core.ids import StepNumber
from aserve.core.plan import BatchPlan
from aserve.core.request import SamplingParams
from aserve.model.kernels.attention_plan import AttentionPlan
from aserve.model.kernels.differences import HEADER_WORDS, apply_differences
from aserve.model.kernels.slots import SlotTensors
from aserve.model.step_words import Differences

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]
"""The interpreter has no bfloat16."""

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Of ``distance``, by dtype."""


def distance(actual: Tensor, expected: Tensor) -> float:
    """||actual - expected|| / ||expected||; NaN is infinitely far."""
    actual, expected = actual.double(), expected.double()
    found = float((actual - expected).norm() / expected.norm().clamp(min=1e-30))
    return found if found == found else float("inf")


def normal(*size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator).to(DEVICE, dtype)


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def change_slots(table: SlotTensors, **fields: Any) -> None:
    """Joins, leaves and writes of a plan, applied to the table."""
    plan = BatchPlan(step=StepNumber(1), **fields)
    differences = Differences.of(plan, table.vocab_size, table.addition_ids_SA.shape[1])
    words = np.zeros(HEADER_WORDS + differences.num_words, np.int32)
    differences.write(words, HEADER_WORDS)
    apply_differences(torch.from_numpy(words).to(DEVICE), table)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Sequences over shuffled blocks. All of the cache that no sequence owns is NaN."""

    q_TAD: Tensor
    kv_layer: Tensor
    block_tables_SB: Tensor
    slots: list[int]
    query_starts: list[int]
    context_lens: list[int]

    def plan(self, *, window: int = 0, num_programs: int = 64, fixed_tokens: int = 0) -> AttentionPlan:
        num_queries = [b - a for a, b in zip(self.query_starts, self.query_starts[1:], strict=False)]
        num_kv_heads = self.kv_layer.shape[1]
        plan = AttentionPlan.allocate(
            num_sequences=len(self.slots),
            num_chunk_tokens=sum(n for n in num_queries if n > 1),
            num_heads=self.q_TAD.shape[1],
            num_kv_heads=num_kv_heads,
            head_dim=self.q_TAD.shape[2],
            num_multiprocessors=1,
            num_programs=num_programs,
            dtype=self.q_TAD.dtype,
            window=window,
            fixed_tokens=fixed_tokens,
            context_max=max(self.context_lens),
            device=DEVICE,
        )
        plan.fill(ints(self.slots), ints(self.query_starts), ints(self.context_lens))
        return plan


def batch(
    sequences: list[tuple[int, int]],
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
) -> Batch:
    """sequences: (queries, context length), length 0 for one that is done."""
    generator = torch.Generator().manual_seed(1)
    nums_blocks = [-(-length // block_size) for _, length in sequences]
    num_blocks = sum(nums_blocks) + 2
    kv_layer = torch.full((2, num_kv_heads, num_blocks, block_size, head_dim), float("nan"))
    free = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    num_slots = len(sequences) + 3
    tables = torch.zeros(num_slots, max(nums_blocks) + 1, dtype=torch.int32)
    slots = torch.randperm(num_slots, generator=generator)[: len(sequences)].tolist()
    starts = [0]
    for (num_queries, length), slot, count in zip(sequences, slots, nums_blocks, strict=True):
        blocks = [free.pop() for _ in range(count)]
        tables[slot, :count] = torch.tensor(blocks, dtype=torch.int32)
        for index, block in enumerate(blocks):
            size = min(block_size, length - index * block_size)
            kv_layer[:, :, block, :size] = torch.randn(2, num_kv_heads, size, head_dim, generator=generator)
        starts.append(starts[-1] + num_queries)
    return Batch(
        q_TAD=normal(starts[-1], num_heads, head_dim, dtype=dtype),
        kv_layer=kv_layer.to(DEVICE, dtype),
        block_tables_SB=tables.to(DEVICE),
        slots=slots,
        query_starts=starts,
        context_lens=[length for _, length in sequences],
    )


def exact_distribution(logits_V: Tensor, params: SamplingParams) -> Tensor:
    """What a sampler draws from, float64: min-p, then top-k, then the fewest of the rest that reach top-p."""
    p = (logits_V.double() / params.temperature).softmax(0)
    p[p < params.min_p * p.max()] = 0
    if params.top_k:
        p[p < p.sort().values[-params.top_k]] = 0
    p /= p.sum()
    order = p.argsort(descending=True)
    p[order[p[order].cumsum(0) - p[order] >= params.top_p]] = 0
    return p / p.sum()


def check_frequencies(tokens_R: Tensor, p_V: Tensor) -> None:
    """Nothing is drawn that has no probability, the rest in proportion: chi-square within 5 standard deviations."""
    counts, num_draws, kept = torch.bincount(tokens_R.long(), minlength=len(p_V)).double(), len(tokens_R), p_V > 0
    assert counts[~kept].sum() == 0
    expected, freedom = num_draws * p_V[kept], int(kept.sum()) - 1
    assert freedom > 0
    assert float(((counts[kept] - expected) ** 2 / expected).sum()) < freedom + 5 * (2 * freedom) ** 0.5
