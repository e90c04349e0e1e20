"""The seam between the decoder and attention on a GPU: who computes what a step's plan asks for.

Ours is the only one that the server uses: README.md beside this has what others took for the same work. A backend that
plans on the host before every step, as most libraries do, does not fit in: a step is launched before the host knows
which of its rows are still alive, and the graph that holds it is captured once for all lengths.
"""

from typing import Protocol

import torch
from torch import Tensor

from aserve.model.kernels.attention_chunks import mixed_attention
from aserve.model.kernels.attention_decode import decode_attention, rotate_and_attend
from aserve.model.kernels.attention_plan import AttentionPlan
from aserve.model.kernels.rope_kv import Rotation


class AttentionBackend(Protocol):
    """Attention of a step's tokens over the paged cache, which holds their own K and V already, unless a call
    says otherwise.

    Captured in a graph that serves any lengths: whatever depends on them is read on the device, from the plan and the
    block tables. q: [T, A, D], heads contiguous, rows at any stride. kv_layer: [2, H, blocks, tokens of a block, D].
    out: [T, A, D]; rows that the plan does not name are left alone.
    """

    def rotate_and_attend_rows(
        self,
        qkv_TN: Tensor,
        rotation: Rotation,
        kv_layer: Tensor,
        block_tables_SB: Tensor,
        plan: AttentionPlan,
        *,
        scale: float,
        early: bool,
        out_TAD: Tensor,
    ) -> None:
        """Of a step whose sequences have one token each, from the QKV product: q and K are not turned yet, and K and V
        not in the cache.

        One launch of ours. A backend that does not turn by itself calls ``rope_kv.rotate_and_cache`` and then what it
        has for ``attend_rows``. ``qkv`` may be changed, and nobody reads what rows that are done leave in the trash
        block. early: may begin before the kernel in front has ended.
        """
        ...

    def attend_rows(
        self,
        q_TAD: Tensor,
        kv_layer: Tensor,
        block_tables_SB: Tensor,
        plan: AttentionPlan,
        *,
        scale: float,
        out_TAD: Tensor,
    ) -> None:
        """Of a step whose sequences have one token each."""
        ...

    def attend(
        self,
        q_TAD: Tensor,
        kv_layer: Tensor,
        block_tables_SB: Tensor,
        plan: AttentionPlan,
        *,
        scale: float,
        side: torch.cuda.Stream | None,
        out_TAD: Tensor,
    ) -> None:
        """Of a step of rows and chunks. side: a second stream, joined again before this returns."""
        ...


class TritonAttention:
    """The kernels beside this, for rows and chunks of any length."""

    def rotate_and_attend_rows(
        self,
        qkv_TN: Tensor,
        rotation: Rotation,
        kv_layer: Tensor,
        block_tables_SB: Tensor,
        plan: AttentionPlan,
        *,
        scale: float,
        early: bool,
        out_TAD: Tensor,
    ) -> None:
        rotate_and_attend(qkv_TN, rotation, kv_layer, block_tables_SB, plan, scale=scale, early=early, out_TAD=out_TAD)

    def attend_rows(
        self,
        q_TAD: Tensor,
        kv_layer: Tensor,
        block_tables_SB: Tensor,
        plan: AttentionPlan,
        *,
        scale: float,
        out_TAD: Tensor,
    ) -> None:
        decode_attention(q_TAD, kv_layer, block_tables_SB, plan, scale=scale, out_TAD=out_TAD)

    def attend(
        self,
        q_TAD: Tensor,
        kv_layer: Tensor,
        block_tables_SB: Tensor,
        plan: AttentionPlan,
        *,
        scale: float,
        side: torch.cuda.Stream | None,
        out_TAD: Tensor,
    ) -> None:
        mixed_attention(q_TAD, kv_layer, block_tables_SB, plan, scale=scale, side=side, out_TAD=out_TAD)
