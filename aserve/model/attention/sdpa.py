"""Paged attention for the CPU: blocks are gathered into a workspace, over which torch's fused attention runs.

For a cache in the order of heads, which the models of transformers' own code have; ``pages`` is faster for the others.

Shape suffixes: T tokens of the step, S sequences of a group, A query heads, H kv heads, G = A / H queries that share a
kv head, D head_dim, B gathered blocks of a sequence, L gathered tokens of a sequence.

Queries that share a kv head go in as one head's rows, so that K and V are read once and never repeated.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from aserve.model.attention import StepAttention
from aserve.model.attention.chunks import ChunkAttention, Workspace, additive, gather_rows
from aserve.model.batch import ForwardBatch
from aserve.model.kv_tensors import KVTensors

_WORKSPACE_BYTES_MAX = 32 << 20
"""Of gathered K/V at a time; a single longer sequence may take more."""

_PADDING_TOKENS_MAX = 512
"""Of gathered tokens in a group that belong to no row: they cost as much as one more group's calls."""


class SdpaAttention:
    """For a cache in the order of heads."""

    def __init__(self) -> None:
        self._workspace = Workspace()

    def plan(self, batch: ForwardBatch, kv: KVTensors) -> StepAttention:
        return _SdpaStep(self._workspace, batch, kv)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gather:
    """Blocks of several sequences, copied to where a fused kernel can read them.

    rows: indices into the layer's ``blocks``, 2 * H of each gathered block. out: the workspace. The views are made once
    for all layers, as they cost more than they look at one row a step. k, v: [H, S, L, D]. stale: the part of out that
    holds tokens not all of the rows own, with a mask of them.
    """

    rows: Tensor
    out: Tensor
    k: Tensor
    v: Tensor
    stale: tuple[Tensor, Tensor] | None = None

    def __call__(self, blocks: Tensor) -> None:
        torch.index_select(blocks, 0, self.rows, out=self.out)
        if self.stale is not None:
            tokens, is_stale = self.stale
            tokens.masked_fill_(is_stale, 0)  # a weight of zero does not silence a stale NaN or infinity


@dataclass(frozen=True, slots=True, kw_only=True)
class _DecodeGroup:
    """Decode rows of similar length. queries: their rows in q_TAD, None for all in order. mask_S1L: None to see all."""

    queries: Tensor | None
    num_rows: int
    gather: _Gather
    mask_S1L: Tensor | None


class _SdpaStep:
    def __init__(self, workspace: Workspace, batch: ForwardBatch, kv: KVTensors) -> None:
        self._workspace = workspace
        self._batch = batch
        self._kv = kv
        self._block_size = kv.block_size
        self._block_tables = batch.block_tables_SB.long()
        self._dtype = kv.shape.dtype
        self._num_kv_heads = kv.shape.num_kv_heads
        bytes_per_token = kv.shape.bytes_per_token // kv.shape.num_layers
        self._tokens_max = max(1, _WORKSPACE_BYTES_MAX // bytes_per_token)
        self._chunks = ChunkAttention(batch, kv, workspace)
        self._plans: dict[int | None, list[_DecodeGroup]] = {}

    def __call__(self, q_TAD: Tensor, layer: int, *, scale: float, window: int | None = None) -> Tensor:
        if window not in self._plans:
            self._plans[window] = self._decode_groups(window)
        groups = self._plans[window]
        blocks = self._kv.blocks[layer]
        if len(groups) == 1 and groups[0].num_rows == len(q_TAD):
            return self._attend_group(groups[0], q_TAD, blocks, scale)
        out_TAD = torch.zeros_like(q_TAD, memory_format=torch.contiguous_format)
        for group in groups:
            if group.queries is None:
                out_TAD[: group.num_rows] = self._attend_group(group, q_TAD[: group.num_rows], blocks, scale)
            else:
                out_TAD[group.queries] = self._attend_group(group, q_TAD[group.queries], blocks, scale)
        self._chunks.attend(q_TAD, out_TAD, layer, scale=scale, window=window)
        return out_TAD

    def _attend_group(self, group: _DecodeGroup, q_SAD: Tensor, blocks: Tensor, scale: float) -> Tensor:
        gather = group.gather
        gather(blocks)
        num_rows, num_heads, head_dim = q_SAD.shape
        q_HSGD = q_SAD.view(num_rows, self._num_kv_heads, -1, head_dim).transpose(0, 1)
        out_HSGD = F.scaled_dot_product_attention(q_HSGD, gather.k, gather.v, attn_mask=group.mask_S1L, scale=scale)
        return out_HSGD.transpose(0, 1).reshape(num_rows, num_heads, head_dim)

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
        is_all = len(members) == self._batch.num_decode_rows
        queries = None if is_all else torch.tensor(members)
        tables = self._block_tables[: len(members)] if queries is None else self._block_tables[queries]
        first_S = torch.tensor([first_blocks[row] for row in members])
        columns_SB = first_S.unsqueeze(1) + torch.arange(num_blocks)
        blocks_SB = tables.gather(1, columns_SB.clamp_(max=tables.shape[1] - 1))
        rows, out = gather_rows(self._kv, blocks_SB, self._workspace)
        kv_2HSLD = out.view(2, self._num_kv_heads, len(members), -1, self._kv.shape.head_dim)
        # From here on tokens are counted from the first gathered one of their row.
        offsets = [first_blocks[row] * self._block_size for row in members]
        begins = [starts[row] - offset for row, offset in zip(members, offsets, strict=True)]
        ends = [self._batch.context_lens[row] - offset for row, offset in zip(members, offsets, strict=True)]
        num_tokens, shared = max(ends), min(ends)
        k_HSLD, v_HSLD = kv_2HSLD[:, :, :, :num_tokens].unbind(0)
        mask_S1L = stale = None
        if shared < num_tokens or any(begins):
            token_L = torch.arange(num_tokens)
            is_stale_SL = token_L >= torch.tensor(ends).unsqueeze(1)
            mask_S1L = additive(is_stale_SL | (token_L < torch.tensor(begins).unsqueeze(1)), self._dtype).unsqueeze(1)
            if shared < num_tokens:
                stale = (kv_2HSLD[:, :, :, shared:num_tokens], is_stale_SL[None, :, shared:, None])
        return _DecodeGroup(
            queries=queries,
            num_rows=len(members),
            gather=_Gather(rows=rows, out=out, k=k_HSLD, v=v_HSLD, stale=stale),
            mask_S1L=mask_S1L,
        )
