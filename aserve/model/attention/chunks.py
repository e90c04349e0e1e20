"""Attention of prompt chunks over the paged cache: a chunk's blocks are gathered, torch's fused attention runs on them.

Shape suffixes: T tokens of the step, A query heads, H kv heads, G = A / H queries that share a kv head, Q queries of a
chunk, D head_dim, P tokens of a block, B gathered blocks, L gathered tokens.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from aserve.model.batch import ForwardBatch
from aserve.model.kv_tensors import KVTensors


class Workspace:
    """Memory that all layers and steps of a kernel reuse; it grows to the largest asked for."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def take(self, num_rows: int, row_size: int, dtype: torch.dtype) -> Tensor:
        """[num_rows, row_size], whose content lasts until the next gather. An earlier view stays valid memory."""
        size = num_rows * row_size
        if self._memory.numel() < size or self._memory.dtype != dtype:
            self._memory = torch.empty(size, dtype=dtype)
        return self._memory[:size].view(num_rows, row_size)


def gather_rows(kv: KVTensors, blocks: Tensor, workspace: Workspace) -> tuple[Tensor, Tensor]:
    """Rows of ``kv.blocks`` with K's and V's heads of these blocks, [2 * H * blocks], and the memory to put them in."""
    rows = kv.block_rows(blocks.reshape(-1)).view(-1)
    return rows, workspace.take(len(rows), kv.block_size * kv.shape.head_dim, kv.shape.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    """One chunk: queries [start, stop) of q_TAD. mask_QL: None for a plain causal square.

    The views are made once for all layers. k, v: [H, G, L, D] of out, where rows of a layer's blocks are gathered.
    turned: keys as gathered, [H, B, D, P], and where they go as [H, B, P, D]; None if they lie so already.
    """

    start: int
    stop: int
    rows: Tensor
    out: Tensor
    turned: tuple[Tensor, Tensor] | None
    k: Tensor
    v: Tensor
    mask_QL: Tensor | None


class ChunkAttention:
    """The chunks of a step, the same in each layer with the same window."""

    def __init__(self, batch: ForwardBatch, kv: KVTensors, workspace: Workspace) -> None:
        self._batch = batch
        self._kv = kv
        self._workspace = workspace
        self._spans: dict[int | None, list[_Span]] = {}

    def attend(self, q_TAD: Tensor, out_TAD: Tensor, layer: int, *, scale: float, window: int | None) -> None:
        """Puts the results of all chunks into their places of out_TAD."""
        if window not in self._spans:
            self._spans[window] = self._make_spans(window, q_TAD.shape[1])
        for span in self._spans[window]:
            torch.index_select(self._kv.blocks[layer], 0, span.rows, out=span.out)
            if span.turned is not None:
                gathered_HBDP, k_HBPD = span.turned
                k_HBPD.copy_(gathered_HBDP.transpose(2, 3))
            q_QAD = q_TAD[span.start : span.stop]
            q_HGQD = q_QAD.view(len(q_QAD), self._kv.shape.num_kv_heads, -1, q_QAD.shape[2]).permute(1, 2, 0, 3)
            out_HGQD = F.scaled_dot_product_attention(
                q_HGQD, span.k, span.v, attn_mask=span.mask_QL, is_causal=span.mask_QL is None, scale=scale
            )
            out_TAD[span.start : span.stop] = out_HGQD.permute(2, 0, 1, 3).flatten(1, 2)

    def _make_spans(self, window: int | None, num_heads: int) -> list[_Span]:
        batch, kv = self._batch, self._kv
        num_kv_heads, head_dim, block_size = kv.shape.num_kv_heads, kv.shape.head_dim, kv.block_size
        spans = []
        for row in range(batch.num_decode_rows, len(batch.context_lens)):
            start, stop = batch.query_starts[row], batch.query_starts[row + 1]
            end = batch.context_lens[row]
            position = end - (stop - start)
            first_block = 0 if window is None else max(0, position - window + 1) // block_size
            offset = first_block * block_size
            mask_QL = None
            if position > 0 or (window is not None and window < end):
                query_Q1 = torch.arange(position, end).unsqueeze(1)
                key_L = torch.arange(offset, end)
                is_masked_QL = key_L > query_Q1
                if window is not None:
                    is_masked_QL |= key_L <= query_Q1 - window
                mask_QL = additive(is_masked_QL, kv.shape.dtype)
            blocks = batch.block_tables_SB[row, first_block : -(-end // block_size)].long()
            rows, out = gather_rows(kv, blocks, self._workspace)
            k, v = out.view(2, num_kv_heads, len(blocks), -1)
            turned = None
            if kv.shape.layout == "rows":
                k_HBPD = torch.empty(num_kv_heads, len(blocks), block_size, head_dim, dtype=kv.shape.dtype)
                turned = k.view(num_kv_heads, len(blocks), head_dim, block_size), k_HBPD
                k = k_HBPD
            k_HGLD, v_HGLD = (
                part.view(num_kv_heads, 1, -1, head_dim)[:, :, : end - offset].expand(
                    -1, num_heads // num_kv_heads, -1, -1
                )
                for part in (k, v)
            )
            spans.append(
                _Span(start=start, stop=stop, rows=rows, out=out, turned=turned, k=k_HGLD, v=v_HGLD, mask_QL=mask_QL)
            )
        return spans


def additive(is_masked: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(is_masked.shape, dtype=dtype).masked_fill_(is_masked, -torch.inf)
