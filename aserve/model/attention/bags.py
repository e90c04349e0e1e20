"""Paged attention of decode rows without a copy of the cache: weighted sums of its rows, where they lie.

An embedding bag sums chosen rows of a table, each with a weight of its own. A query's result is such a sum over its
tokens' values, weighted by the softmax; and its scores against a block's P keys are one too, over the block's D rows of
P keys, weighted by the query. So K and V are read once, from wherever their blocks are, by rows of any length.

Measured at 16 rows x 1,024 tokens of SmolLM2-135M in bfloat16 (30 layers, 377 MB), ms of one thread's time a step:

    gather 50, then fused attention on what was gathered 44                                 94
    fused attention, were the cache contiguous                                              81-87
    batched matmuls, were it contiguous: q K^T 32, p V 28; keys first, k q 22, v^T p 20     42-60
    bags, blocks of 64 or 128 tokens: keys 31, values 30                                    61
    bags, blocks of 32: keys 37; of 16: keys 57                                             67, 87
    bags over int8 rows: keys 24, values 24                                                 48
    reading 377 MB and no more                                                              30-38

Shape suffixes: T tokens of the step, S sequences of a group, A query heads, H kv heads, G = A / H, D head_dim, P tokens
of a block, B blocks of a row, L = B * P.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from aserve.model.attention import StepAttention
from aserve.model.attention.chunks import ChunkAttention, Workspace
from aserve.model.batch import ForwardBatch
from aserve.model.kv_tensors import KVTensors

_PADDING_TOKENS_MAX = 512
"""Of a group's rows together, beyond half of the longest one's each: they cost as much as one more group's calls."""

_INT32_MAX = 2**31 - 1


class BagAttention:
    """For a cache in the order of rows."""

    def __init__(self) -> None:
        self._workspace = Workspace()

    def plan(self, batch: ForwardBatch, kv: KVTensors) -> StepAttention:
        return _BagStep(batch, kv, ChunkAttention(batch, kv, self._workspace))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Decode rows of similar length, padded to B blocks of the longest.

    queries: their rows in q_TAD, None for all in order. key_index: [S, A, B, D] rows of P keys, a bag of D for each
    block; value_index: [S, A, L] rows, a bag of L. Padding repeats rows that the sequence owns, lest a stale NaN or
    infinity meet a weight of zero. masks: parts of L, each with the tokens of it that a row does not see, [S, 1, part].
    """

    queries: Tensor | None
    num_rows: int
    num_blocks: int
    key_index: Tensor
    key_offsets: Tensor
    value_index: Tensor
    value_offsets: Tensor
    masks: list[tuple[slice, Tensor]]


class _BagStep:
    def __init__(self, batch: ForwardBatch, kv: KVTensors, chunks: ChunkAttention) -> None:
        self._batch = batch
        self._kv = kv
        self._chunks = chunks
        self._groups: dict[int | None, list[_Group]] = {}

    def __call__(self, q_TAD: Tensor, layer: int, *, scale: float, window: int | None = None) -> Tensor:
        if window not in self._groups:
            self._groups[window] = self._make_groups(window, q_TAD.shape[1])
        groups = self._groups[window]
        if len(groups) == 1 and groups[0].num_rows == len(q_TAD):
            return self._attend(groups[0], q_TAD, layer, scale)
        out_TAD = torch.zeros_like(q_TAD, memory_format=torch.contiguous_format)
        for group in groups:
            if group.queries is None:
                out_TAD[: group.num_rows] = self._attend(group, q_TAD[: group.num_rows], layer, scale)
            else:
                out_TAD[group.queries] = self._attend(group, q_TAD[group.queries], layer, scale)
        self._chunks.attend(q_TAD, out_TAD, layer, scale=scale, window=window)
        return out_TAD

    def _attend(self, group: _Group, q_SAD: Tensor, layer: int, scale: float) -> Tensor:
        num_rows, num_heads, head_dim = q_SAD.shape
        weight_SABD = (q_SAD * scale).unsqueeze(2).expand(-1, -1, group.num_blocks, -1).reshape(-1)
        score_BP, *_ = torch.embedding_bag(
            self._kv.key_rows[layer], group.key_index, group.key_offsets, False, 0, False, weight_SABD
        )
        score_SAL = score_BP.view(num_rows, num_heads, -1)
        for part, is_masked in group.masks:
            score_SAL[:, :, part].masked_fill_(is_masked, -torch.inf)
        weight_SAL = score_SAL.softmax(-1).view(-1)
        out_XD, *_ = torch.embedding_bag(
            self._kv.value_rows[layer], group.value_index, group.value_offsets, False, 0, False, weight_SAL
        )
        out_SAD: Tensor = out_XD.view(num_rows, num_heads, head_dim)
        return out_SAD

    def _make_groups(self, window: int | None, num_heads: int) -> list[_Group]:
        """Rows of similar length together, longest first."""
        block_size = self._kv.block_size
        lengths = self._batch.context_lens[: self._batch.num_decode_rows]
        starts = [0 if window is None else max(0, length - window) for length in lengths]
        nums_blocks = [
            -(-length // block_size) - start // block_size for length, start in zip(lengths, starts, strict=True)
        ]
        parts: list[list[int]] = []
        padding = 0
        for row in sorted(range(len(lengths)), key=lambda row: -nums_blocks[row]):
            widest = nums_blocks[parts[-1][0]] if parts else 0
            padding += max(0, widest - 2 * nums_blocks[row]) * block_size
            if parts and padding <= _PADDING_TOKENS_MAX:
                parts[-1].append(row)
            else:
                parts.append([row])
                padding = 0
        return [self._make_group(sorted(part), starts, window, num_heads) for part in parts]

    def _make_group(self, rows: list[int], starts: list[int], window: int | None, num_heads: int) -> _Group:
        kv, block_size = self._kv, self._kv.block_size
        num_kv_heads, head_dim, num_layers = kv.shape.num_kv_heads, kv.shape.head_dim, kv.shape.num_layers
        tables = self._batch.block_tables_SB
        queries = None
        if len(rows) == self._batch.num_decode_rows:
            tables_SB = tables[: len(rows)].long()
        else:
            queries = torch.tensor(rows)
            tables_SB = tables[queries].long()
        end_S1 = torch.tensor([[self._batch.context_lens[row]] for row in rows])
        start_S1 = torch.tensor([[starts[row]] for row in rows])
        first_S1 = start_S1 // block_size
        last_S1 = (end_S1 - 1) // block_size
        num_blocks = int((last_S1 - first_S1).max()) + 1
        column_SB = torch.minimum(first_S1 + torch.arange(num_blocks), last_S1)
        block_SB = tables_SB.gather(1, column_SB)

        # From here on tokens are counted from the first block's first one.
        begins, ends = start_S1 - first_S1 * block_size, end_S1 - first_S1 * block_size
        token_L = torch.arange(num_blocks * block_size)
        is_masked_SL = token_L >= ends
        shared = int(ends.min())
        masks = [(slice(shared, None), is_masked_SL[:, None, shared:])] if shared < len(token_L) else []
        if int(begins.max()):
            is_before_SL = token_L < begins
            is_masked_SL |= is_before_SL
            masks.append((slice(0, block_size), is_before_SL[:, None, :block_size]))

        group_size = num_heads // num_kv_heads
        head_H = torch.arange(num_kv_heads)
        heads_a_block = 2 * num_layers * num_kv_heads
        index_type = torch.int32 if kv.memory.numel() <= _INT32_MAX else torch.int64
        row_SHBD = (block_SB[:, None, :, None] * heads_a_block + head_H[:, None, None]) * head_dim
        row_SHBD = (row_SHBD + torch.arange(head_dim)).to(index_type)
        row_SHBP = (block_SB[:, None, :, None] * heads_a_block + head_H[:, None, None]) * block_size
        row_SHL = (row_SHBP + torch.arange(block_size)).flatten(2)
        own_SH1 = row_SHL.gather(2, (ends - 1).expand(-1, num_kv_heads).unsqueeze(2))
        row_SHL = torch.where(is_masked_SL.unsqueeze(1), own_SH1, row_SHL).to(index_type)
        key_index, value_index = (
            part.unsqueeze(2).expand(-1, -1, group_size, *part.shape[2:]).reshape(-1) for part in (row_SHBD, row_SHL)
        )
        return _Group(
            queries=queries,
            num_rows=len(rows),
            num_blocks=num_blocks,
            key_index=key_index,
            key_offsets=torch.arange(0, len(key_index), head_dim, dtype=index_type),
            value_index=value_index,
            value_offsets=torch.arange(0, len(value_index), len(token_L), dtype=index_type),
            masks=masks,
        )
