"""Paged attention of one fixed shape: the reference, and the path for soft-capped scores, which torch's own lacks.

Shape suffixes: T tokens of the step, A query heads, H kv heads, G = A / H, D head_dim, N blocks, P tokens of a block,
I items, Q = QUERY_TILE, L = KEY_TILE, C keys that a group looks at, R = G * Q rows of a matmul.

Queries and keys lie in tiles by their absolute position: an item is one sequence's queries within one query tile. So a
query meets the same operands at the same place of equal matmuls in whatever batch, chunk or context length it is
computed, and its result is the same to the bit; how many items share a batched matmul does not matter to it (tested).
Key tiles are summed up in order by the online softmax (arXiv 1805.02867); one that a query cannot see changes nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from aserve.model.attention import StepAttention
from aserve.model.batch import ForwardBatch
from aserve.model.kv_tensors import KVTensors

QUERY_TILE = 8
KEY_TILE = 128

_GATHERED_BYTES_MAX = 64 << 20
"""K and V that one group of items gathers; longer batches take several groups."""

_NOTHING_SEEN = -1e30
"""The running maximum before the first key: finite, for -inf minus -inf is not a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Item:
    """Queries [begin, end) of sequence ``row``, all in one query tile; the first one lies at ``first_token`` in T."""

    row: int
    first_token: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Items that are computed together. query_IQ: positions. token_IQ: places in T, T itself where there is no query.

    slot_IC: where each key lies in the cache, 0 (the trash block) beyond the context. is_beyond_IC: such keys.
    """

    query_IQ: Tensor
    token_IQ: Tensor
    first_key: int
    slot_IC: Tensor
    is_beyond_IC: Tensor


class TiledAttention:
    """In float32 whatever the cache holds. softcap: scores become softcap * tanh(score / softcap)."""

    def __init__(self, *, softcap: float | None = None) -> None:
        self._softcap = softcap

    def plan(self, batch: ForwardBatch, kv: KVTensors) -> StepAttention:
        return _TiledStep(batch, kv, self._softcap)


class _TiledStep:
    def __init__(self, batch: ForwardBatch, kv: KVTensors, softcap: float | None) -> None:
        self._batch = batch
        self._kv = kv
        self._softcap = softcap
        self._block_tables = batch.block_tables_SB.long()
        self._items = list(_items(batch))
        self._groups_by_window: dict[int | None, list[_Group]] = {}

    def __call__(self, q_TAD: Tensor, layer: int, *, scale: float, window: int | None = None) -> Tensor:
        out_TAD = torch.zeros_like(q_TAD, memory_format=torch.contiguous_format)
        padded_TAD = torch.cat((q_TAD.float(), q_TAD.new_zeros(1, *q_TAD.shape[1:], dtype=torch.float32)))
        for group in self._groups(window):
            found_IQAD = self._attend(padded_TAD[group.token_IQ], group, layer, scale, window)
            is_query_IQ = group.token_IQ < len(q_TAD)
            out_TAD[group.token_IQ[is_query_IQ]] = found_IQAD[is_query_IQ].to(q_TAD.dtype)
        return out_TAD

    def _groups(self, window: int | None) -> list[_Group]:
        """The same for every layer with this window."""
        if window not in self._groups_by_window:
            num_heads, head_dim = self._kv.layers[0].shape[1], self._kv.layers[0].shape[-1]
            groups, part = [], list[_Item]()
            for item in self._items:
                num_keys = max(other.end for other in (*part, item)) + KEY_TILE
                if part and (len(part) + 1) * num_keys * num_heads * head_dim * 8 > _GATHERED_BYTES_MAX:
                    groups.append(self._group(part, window))
                    part = []
                part.append(item)
            if part:
                groups.append(self._group(part, window))
            self._groups_by_window[window] = groups
        return self._groups_by_window[window]

    def _group(self, items: list[_Item], window: int | None) -> _Group:
        device, block_size = self._block_tables.device, self._kv.block_size
        first_key = 0
        if window is not None:
            first_key = max(0, min(item.begin for item in items) - window + 1) // KEY_TILE * KEY_TILE
        last_key = max(item.end for item in items) - 1
        num_keys = (last_key // KEY_TILE + 1) * KEY_TILE - first_key
        begins_I1 = torch.tensor([[item.begin] for item in items], device=device)
        ends_I1 = torch.tensor([[item.end] for item in items], device=device)
        first_tokens_I1 = torch.tensor([[item.first_token] for item in items], device=device)
        rows_I1 = torch.tensor([[item.row] for item in items], device=device)
        query_IQ = begins_I1 // QUERY_TILE * QUERY_TILE + torch.arange(QUERY_TILE, device=device)
        is_query_IQ = (query_IQ >= begins_I1) & (query_IQ < ends_I1)
        no_token = len(self._batch.token_ids_T)
        key_1C = torch.arange(first_key, first_key + num_keys, device=device).unsqueeze(0)
        is_beyond_IC = key_1C >= ends_I1
        block_1C = (key_1C // block_size).clamp_max(self._block_tables.shape[1] - 1)
        slot_IC = self._block_tables[rows_I1, block_1C] * block_size + key_1C % block_size
        return _Group(
            query_IQ=query_IQ,
            token_IQ=torch.where(is_query_IQ, first_tokens_I1 + query_IQ - begins_I1, no_token),
            first_key=first_key,
            slot_IC=slot_IC.masked_fill_(is_beyond_IC, 0),
            is_beyond_IC=is_beyond_IC,
        )

    def _attend(self, q_IQAD: Tensor, group: _Group, layer: int, scale: float, window: int | None) -> Tensor:
        layer_2HNPD = self._kv.layers[layer]
        num_kv_heads, head_dim = layer_2HNPD.shape[1], layer_2HNPD.shape[-1]
        num_items, _, num_heads, _ = q_IQAD.shape
        num_groups = num_heads // num_kv_heads
        flat_2HSD = layer_2HNPD.reshape(2, num_kv_heads, -1, head_dim)
        kv_2HICD = (
            flat_2HSD.index_select(2, group.slot_IC.view(-1)).float().view(2, num_kv_heads, num_items, -1, head_dim)
        )
        # Zero times whatever lies there would be NaN if it were one; such keys' scores are masked below.
        kv_2HICD[1].masked_fill_(group.is_beyond_IC.view(1, num_items, -1, 1), 0)
        q_HIGQD = q_IQAD.view(num_items, QUERY_TILE, num_kv_heads, num_groups, head_dim).permute(2, 0, 3, 1, 4)
        q_BRD = q_HIGQD.reshape(num_kv_heads * num_items, num_groups * QUERY_TILE, head_dim)
        k_BCD, v_BCD = kv_2HICD.view(2, num_kv_heads * num_items, -1, head_dim).unbind(0)

        maximum_BR1 = q_BRD.new_full((len(q_BRD), num_groups * QUERY_TILE, 1), _NOTHING_SEEN)
        total_BR1 = torch.zeros_like(maximum_BR1)
        out_BRD = torch.zeros_like(q_BRD)
        for start in range(0, k_BCD.shape[1], KEY_TILE):
            k_BLD, v_BLD = k_BCD[:, start : start + KEY_TILE], v_BCD[:, start : start + KEY_TILE]
            score_BRL = torch.bmm(q_BRD, k_BLD.transpose(1, 2)).mul_(scale)
            if self._softcap is not None:
                score_BRL = score_BRL.div_(self._softcap).tanh_().mul_(self._softcap)
            first = group.first_key + start
            key_L = torch.arange(first, first + KEY_TILE, device=q_BRD.device)
            is_masked_IQL = key_L > group.query_IQ.unsqueeze(-1)
            if window is not None:
                is_masked_IQL |= key_L <= group.query_IQ.unsqueeze(-1) - window
            is_masked_IQL |= group.is_beyond_IC[:, None, start : start + KEY_TILE]
            score_BRL.view(num_kv_heads, num_items, num_groups, QUERY_TILE, KEY_TILE).masked_fill_(
                is_masked_IQL.unsqueeze(1), -torch.inf
            )
            new_maximum_BR1 = torch.maximum(maximum_BR1, score_BRL.amax(-1, keepdim=True))
            weight_BRL = score_BRL.sub_(new_maximum_BR1).exp_()
            decay_BR1 = (maximum_BR1 - new_maximum_BR1).exp_()
            total_BR1 = total_BR1.mul_(decay_BR1).add_(weight_BRL.sum(-1, keepdim=True))
            out_BRD = out_BRD.mul_(decay_BR1).add_(torch.bmm(weight_BRL, v_BLD))
            maximum_BR1 = new_maximum_BR1
        out_HIGQD = (out_BRD / total_BR1).view(num_kv_heads, num_items, num_groups, QUERY_TILE, head_dim)
        return out_HIGQD.permute(1, 3, 0, 2, 4).reshape(num_items, QUERY_TILE, num_heads, head_dim)


def _items(batch: ForwardBatch) -> Iterator[_Item]:
    for row, context_len in enumerate(batch.context_lens):
        start, stop = batch.query_starts[row], batch.query_starts[row + 1]
        first_position = context_len - (stop - start)
        for tile in range(first_position // QUERY_TILE, (context_len - 1) // QUERY_TILE + 1):
            begin, end = max(first_position, tile * QUERY_TILE), min(context_len, (tile + 1) * QUERY_TILE)
            yield _Item(row=row, first_token=start + begin - first_position, begin=begin, end=end)
