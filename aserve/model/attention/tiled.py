"""Paged attention of one fixed shape: the reference, and the path for soft-capped scores, which torch's own lacks.

Shape suffixes: T tokens of the step, A query heads, H kv heads, G = A / H, D head_dim, N blocks, P tokens of a block,
Q = QUERY_TILE, L = KEY_TILE, R = G * Q rows of a matmul.

Queries and keys lie in tiles by their absolute position, so that a query meets the same operands at the same place of
the same calls in whatever batch, chunk or context length it is computed: its result is the same to the bit. Tiles are
summed up in order by the online softmax (arXiv 1805.02867); a tile that a query cannot see changes nothing.
"""

import torch
from torch import Tensor

from aserve.model.attention import StepAttention
from aserve.model.batch import ForwardBatch
from aserve.model.kv_tensors import KVTensors

QUERY_TILE = 16
KEY_TILE = 256

_NOTHING_SEEN = -1e30
"""The running maximum before the first key: finite, for -inf minus -inf is not a number."""


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
        self._block_size = kv.block_size
        self._softcap = softcap
        self._block_tables = batch.block_tables_SB.long()

    def __call__(self, q_TAD: Tensor, layer: int, *, scale: float, window: int | None = None) -> Tensor:
        out_TAD = torch.zeros_like(q_TAD, memory_format=torch.contiguous_format)
        batch, layer_2HNPD = self._batch, self._kv.layers[layer]
        for row, context_len in enumerate(batch.context_lens):
            start, stop = batch.query_starts[row], batch.query_starts[row + 1]
            first_position = context_len - (stop - start)
            first_key = 0 if window is None else max(0, first_position - window + 1) // KEY_TILE * KEY_TILE
            kv_2HLD = self._gather(layer_2HNPD, row, first_key, context_len)
            for tile in range(first_position // QUERY_TILE, (context_len - 1) // QUERY_TILE + 1):
                begin = max(first_position, tile * QUERY_TILE)
                end = min(context_len, (tile + 1) * QUERY_TILE)
                rows = slice(start + begin - first_position, start + end - first_position)
                out_TAD[rows] = self._attend_tile(q_TAD[rows], begin, kv_2HLD, first_key, scale, window)
        return out_TAD

    def _gather(self, layer_2HNPD: Tensor, row: int, first_key: int, context_len: int) -> Tensor:
        """Tokens [first_key, context_len) of the sequence in float32, zeros up to the end of the last key tile."""
        num_kv_heads, head_dim = layer_2HNPD.shape[1], layer_2HNPD.shape[-1]
        num_tokens = -(-(context_len - first_key) // KEY_TILE) * KEY_TILE
        kv_2HLD = torch.zeros(2, num_kv_heads, num_tokens, head_dim, dtype=torch.float32, device=layer_2HNPD.device)
        first_block = first_key // self._block_size
        blocks = self._block_tables[row, first_block : -(-context_len // self._block_size)]
        offset = first_block * self._block_size
        found = layer_2HNPD.index_select(2, blocks).view(2, num_kv_heads, -1, head_dim)
        kv_2HLD[:, :, : context_len - first_key] = found[:, :, first_key - offset : context_len - offset]
        return kv_2HLD

    def _attend_tile(
        self, q_TAD: Tensor, position: int, kv_2HLD: Tensor, first_key: int, scale: float, window: int | None
    ) -> Tensor:
        """Queries at ``position`` and on, all of one tile."""
        num_queries, num_heads, head_dim = q_TAD.shape
        num_kv_heads = kv_2HLD.shape[1]
        group = num_heads // num_kv_heads
        device = q_TAD.device
        inset = position % QUERY_TILE
        q_HGQD = torch.zeros(num_kv_heads, group, QUERY_TILE, head_dim, dtype=torch.float32, device=device)
        q_HGQD[:, :, inset : inset + num_queries] = q_TAD.view(num_queries, num_kv_heads, group, head_dim).permute(
            1, 2, 0, 3
        )
        q_HRD = q_HGQD.view(num_kv_heads, group * QUERY_TILE, head_dim)
        query_Q1 = torch.arange(position - inset, position - inset + QUERY_TILE, device=device).unsqueeze(1)

        maximum_HR1 = torch.full((num_kv_heads, group * QUERY_TILE, 1), _NOTHING_SEEN, device=device)
        total_HR1 = torch.zeros_like(maximum_HR1)
        out_HRD = torch.zeros_like(q_HRD)
        last_key = position + num_queries - 1
        for tile_start in range(first_key, last_key + 1, KEY_TILE):
            k_HLD, v_HLD = kv_2HLD[:, :, tile_start - first_key : tile_start - first_key + KEY_TILE].unbind(0)
            score_HRL = torch.bmm(q_HRD, k_HLD.transpose(1, 2)).mul_(scale)
            if self._softcap is not None:
                score_HRL = score_HRL.div_(self._softcap).tanh_().mul_(self._softcap)
            key_L = torch.arange(tile_start, tile_start + KEY_TILE, device=device)
            is_masked_QL = key_L > query_Q1
            if window is not None:
                is_masked_QL |= key_L <= query_Q1 - window
            score_HRL.view(num_kv_heads, group, QUERY_TILE, KEY_TILE).masked_fill_(is_masked_QL, -torch.inf)
            new_maximum_HR1 = torch.maximum(maximum_HR1, score_HRL.amax(-1, keepdim=True))
            weight_HRL = score_HRL.sub_(new_maximum_HR1).exp_()
            decay_HR1 = (maximum_HR1 - new_maximum_HR1).exp_()
            total_HR1 = total_HR1.mul_(decay_HR1).add_(weight_HRL.sum(-1, keepdim=True))
            out_HRD = out_HRD.mul_(decay_HR1).add_(torch.bmm(weight_HRL, v_HLD))
            maximum_HR1 = new_maximum_HR1
        out_HGQD = (out_HRD / total_HR1).view(num_kv_heads, group, QUERY_TILE, head_dim)
        found_HGQD = out_HGQD[:, :, inset : inset + num_queries]
        return found_HGQD.permute(2, 0, 1, 3).reshape(num_queries, num_heads, head_dim).to(q_TAD.dtype)
