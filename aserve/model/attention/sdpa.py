"""Paged attention for the CPU: blocks are gathered into a workspace, over which torch's fused attention runs.

Shape suffixes: T tokens of the step, S sequences of a group, A query heads, H kv heads, G = A / H queries that share a
kv head, Q queries of a chunk, D head_dim, N blocks of the pool, P tokens of a block, B gathered blocks of a sequence,
L gathered tokens of a sequence.

Queries that share a kv head go in as one head's rows, so that K and V are read once and never repeated.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from aserve.model.attention import StepAttention
from aserve.model.batch import ForwardBatch
from aserve.model.kv_tensors import KVTensors

_WORKSPACE_BYTES_MAX = 32 << 20
"""Of gathered K/V at a time; a single longer sequence may take more."""

_PADDING_TOKENS_MAX = 512
"""Of gathered tokens in a group that belong to no row: they cost as much as one more group's calls."""


class SdpaAttention:
    """Holds the workspace, which grows to the longest group seen and is reused by all layers and steps."""

    def __init__(self) -> None:
        self._workspace = torch.empty(0)

    def plan(self, batch: ForwardBatch, kv: KVTensors) -> StepAttention:
        return _SdpaStep(self, batch, kv)

    def gather(self, layer_2HNPD: Tensor, rows: Tensor) -> Tensor:
        """The selected rows of the layer seen as [2 * H * N, P * D], in the workspace: valid until the next call."""
        flat = layer_2HNPD.view(-1, layer_2HNPD.shape[-2] * layer_2HNPD.shape[-1])
        size = rows.numel() * flat.shape[1]
        if self._workspace.numel() < size or self._workspace.dtype != flat.dtype:
            self._workspace = torch.empty(size, dtype=flat.dtype, device=flat.device)
        out = self._workspace[:size].view(rows.numel(), flat.shape[1])
        return torch.index_select(flat, 0, rows, out=out)


@dataclass(frozen=True, slots=True, kw_only=True)
class _DecodeGroup:
    """Decode rows of similar length. queries: their rows in q_TAD, None for all of them in order.

    gather_rows: [2 * H * S * B]. num_tokens: L. mask_S1L: added to the scores, None if every row fills L.
    tail: tokens before it belong to every row; stale_1SL1 marks those from there on that do not belong to their row.
    """

    queries: Tensor | None
    num_rows: int
    gather_rows: Tensor
    num_tokens: int
    mask_S1L: Tensor | None
    tail: int
    stale_1SL1: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _ChunkSpan:
    """One chunk: queries [start, stop) of q_TAD over ``num_tokens`` gathered. mask_QL None: a plain causal square."""

    start: int
    stop: int
    gather_rows: Tensor
    num_tokens: int
    mask_QL: Tensor | None


class _SdpaStep:
    def __init__(self, owner: SdpaAttention, batch: ForwardBatch, kv: KVTensors) -> None:
        self._owner = owner
        self._batch = batch
        self._block_size = kv.block_size
        self._block_tables = batch.block_tables_SB.long()
        self._dtype = kv.shape.dtype
        shape = kv.shape
        device = self._block_tables.device
        self._head_starts = torch.arange(2 * shape.num_kv_heads, device=device).unsqueeze(1) * (kv.num_blocks + 1)
        bytes_per_token = shape.bytes_per_token // shape.num_layers
        self._tokens_max = max(1, _WORKSPACE_BYTES_MAX // bytes_per_token)
        self._plans: dict[int | None, tuple[list[_DecodeGroup], list[_ChunkSpan]]] = {}

    def __call__(self, q_TAD: Tensor, layer_2HNPD: Tensor, *, scale: float, window: int | None = None) -> Tensor:
        if window not in self._plans:
            self._plans[window] = (self._decode_groups(window), self._chunk_spans(window))
        groups, spans = self._plans[window]
        if len(groups) == 1 and not spans and groups[0].num_rows == len(q_TAD):
            return self._attend_group(groups[0], q_TAD, layer_2HNPD, scale)
        out_TAD = torch.zeros_like(q_TAD, memory_format=torch.contiguous_format)
        for group in groups:
            if group.queries is None:
                out_TAD[: group.num_rows] = self._attend_group(group, q_TAD[: group.num_rows], layer_2HNPD, scale)
            else:
                out_TAD[group.queries] = self._attend_group(group, q_TAD[group.queries], layer_2HNPD, scale)
        for span in spans:
            out_TAD[span.start : span.stop] = self._attend_chunk(
                span, q_TAD[span.start : span.stop], layer_2HNPD, scale
            )
        return out_TAD

    def _attend_group(self, group: _DecodeGroup, q_SAD: Tensor, layer_2HNPD: Tensor, scale: float) -> Tensor:
        num_rows, num_heads, head_dim = q_SAD.shape
        num_kv_heads = layer_2HNPD.shape[1]
        kv_2HSLD = self._owner.gather(layer_2HNPD, group.gather_rows).view(2, num_kv_heads, num_rows, -1, head_dim)
        if group.stale_1SL1 is not None:
            # A weight of zero does not silence a stale NaN or infinity.
            kv_2HSLD[:, :, :, group.tail : group.num_tokens].masked_fill_(group.stale_1SL1, 0)
        k_HSLD, v_HSLD = kv_2HSLD[:, :, :, : group.num_tokens].unbind(0)
        q_HSGD = q_SAD.view(num_rows, num_kv_heads, -1, head_dim).transpose(0, 1)
        out_HSGD = F.scaled_dot_product_attention(q_HSGD, k_HSLD, v_HSLD, attn_mask=group.mask_S1L, scale=scale)
        return out_HSGD.transpose(0, 1).reshape(num_rows, num_heads, head_dim)

    def _attend_chunk(self, span: _ChunkSpan, q_QAD: Tensor, layer_2HNPD: Tensor, scale: float) -> Tensor:
        num_queries, num_heads, head_dim = q_QAD.shape
        num_kv_heads = layer_2HNPD.shape[1]
        kv_2HLD = self._owner.gather(layer_2HNPD, span.gather_rows).view(2, num_kv_heads, -1, head_dim)
        kv_2H1LD = kv_2HLD[:, :, : span.num_tokens].unsqueeze(2)
        k_HGLD, v_HGLD = kv_2H1LD.expand(-1, -1, num_heads // num_kv_heads, -1, -1).unbind(0)
        q_HGQD = q_QAD.view(num_queries, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
        out_HGQD = F.scaled_dot_product_attention(
            q_HGQD, k_HGLD, v_HGLD, attn_mask=span.mask_QL, is_causal=span.mask_QL is None, scale=scale
        )
        return out_HGQD.permute(2, 0, 1, 3).reshape(num_queries, num_heads, head_dim)

    def _decode_groups(self, window: int | None) -> list[_DecodeGroup]:
        """Rows of similar length together, longest first; a new group where padding or workspace passes its bound."""
        block_size = self._block_size
        lengths = self._batch.context_lens[: self._batch.num_decode_rows]
        starts = [0 if window is None else max(0, length - window) for length in lengths]
        first_blocks = [start // block_size for start in starts]
        nums_blocks = [-(-length // block_size) - first for length, first in zip(lengths, first_blocks, strict=True)]
        groups: list[_DecodeGroup] = []
        members: list[int] = []
        padding = 0
        for row in sorted(range(len(lengths)), key=lambda row: -nums_blocks[row]):
            if members:
                widest = nums_blocks[members[0]]
                padding += (widest - nums_blocks[row]) * block_size
                if padding > _PADDING_TOKENS_MAX or widest * block_size * (len(members) + 1) > self._tokens_max:
                    groups.append(self._decode_group(members, starts, first_blocks, nums_blocks))
                    members, padding = [], 0
            members.append(row)
        if members:
            groups.append(self._decode_group(members, starts, first_blocks, nums_blocks))
        return groups

    def _decode_group(
        self, members: list[int], starts: list[int], first_blocks: list[int], nums_blocks: list[int]
    ) -> _DecodeGroup:
        num_blocks = nums_blocks[members[0]]
        members = sorted(members)
        device = self._block_tables.device
        is_all = len(members) == self._batch.num_decode_rows
        queries = None if is_all else torch.tensor(members, device=device)
        tables = self._block_tables[: len(members)] if queries is None else self._block_tables[queries]
        first_S = torch.tensor([first_blocks[row] for row in members], device=device)
        columns_SB = first_S.unsqueeze(1) + torch.arange(num_blocks, device=device)
        blocks_SB = tables.gather(1, columns_SB.clamp_(max=tables.shape[1] - 1))
        # From here on tokens are counted from the first gathered one of their row.
        offsets = [first_blocks[row] * self._block_size for row in members]
        begins = [starts[row] - offset for row, offset in zip(members, offsets, strict=True)]
        ends = [self._batch.context_lens[row] - offset for row, offset in zip(members, offsets, strict=True)]
        num_tokens, tail = max(ends), min(ends)
        mask_S1L = stale_1SL1 = None
        if tail < num_tokens or any(begins):
            token_L = torch.arange(num_tokens, device=device)
            is_stale_SL = token_L >= torch.tensor(ends, device=device).unsqueeze(1)
            is_masked_SL = is_stale_SL | (token_L < torch.tensor(begins, device=device).unsqueeze(1))
            mask_S1L = _additive(is_masked_SL, self._dtype).unsqueeze(1)
            if tail < num_tokens:
                stale_1SL1 = is_stale_SL[None, :, tail:, None]
        return _DecodeGroup(
            queries=queries,
            num_rows=len(members),
            gather_rows=self._gather_rows(blocks_SB),
            num_tokens=num_tokens,
            mask_S1L=mask_S1L,
            tail=tail,
            stale_1SL1=stale_1SL1,
        )

    def _chunk_spans(self, window: int | None) -> list[_ChunkSpan]:
        batch = self._batch
        device = self._block_tables.device
        spans = []
        for row in range(batch.num_decode_rows, len(batch.context_lens)):
            start, stop = batch.query_starts[row], batch.query_starts[row + 1]
            end = batch.context_lens[row]
            position = end - (stop - start)
            first_block = 0 if window is None else max(0, position - window + 1) // self._block_size
            offset = first_block * self._block_size
            mask_QL = None
            if position > 0 or (window is not None and window < end):
                query_Q1 = torch.arange(position, end, device=device).unsqueeze(1)
                key_L = torch.arange(offset, end, device=device)
                is_masked_QL = key_L > query_Q1
                if window is not None:
                    is_masked_QL |= key_L <= query_Q1 - window
                mask_QL = _additive(is_masked_QL, self._dtype)
            blocks_B = self._block_tables[row, first_block : -(-end // self._block_size)]
            spans.append(
                _ChunkSpan(
                    start=start,
                    stop=stop,
                    gather_rows=self._gather_rows(blocks_B),
                    num_tokens=end - offset,
                    mask_QL=mask_QL,
                )
            )
        return spans

    def _gather_rows(self, blocks: Tensor) -> Tensor:
        """Rows of K's and V's heads for these blocks: [2 * H * blocks]."""
        return (self._head_starts + blocks.reshape(1, -1)).view(-1)


def _additive(is_masked: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(is_masked.shape, dtype=dtype, device=is_masked.device).masked_fill_(is_masked, -torch.inf)
