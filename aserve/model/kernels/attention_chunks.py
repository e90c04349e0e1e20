"""Paged attention of chunks: some of a prompt's queries against all of its cached tokens, causal within the chunk.

A tile holds some queries of a chunk with all the query heads that share a kv head, so that K and V are read once for
them.

Shape suffixes as in ``attention_decode``.
"""

import math
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from aserve.model.kernels.attention_decode import decode_attention
from aserve.model.kernels.attention_inner import LOWEST, attend_range
from aserve.model.kernels.attention_plan import NUM_FIELDS, AttentionPlan


@triton.jit
def _attend_tile(
    tile, kv_head, q_ptr, q_stride, kv_ptr, stride_kv, stride_head, stride_block, tables_ptr, table_stride, out_ptr,
    tiles_ptr, scale_log2e,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, P: tl.constexpr, F: tl.constexpr, SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_L: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    tile_ptr = tiles_ptr + tile * F
    row = tl.load(tile_ptr).to(tl.int64)
    slot = tl.load(tile_ptr + 1).to(tl.int64)
    first_position = tl.load(tile_ptr + 2)
    num_queries = tl.load(tile_ptr + 3)

    line = tl.arange(0, BLOCK_M)
    query = line // G
    dim = tl.arange(0, BLOCK_D)
    head = kv_head * G + line % G
    inside = (query < num_queries)[:, None] & (dim < D)[None, :]
    q = tl.load(
        q_ptr + (row + query)[:, None] * q_stride + head[:, None] * D + dim[None, :], mask=inside, other=0.0
    )  # fmt: skip
    position = first_position + query
    k_ptr = kv_ptr + kv_head.to(tl.int64) * stride_head
    v_ptr = k_ptr + stride_kv
    table_ptr = tables_ptr + slot * table_stride

    largest = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    end = first_position + num_queries
    if WINDOW > 0:
        masked_from = tl.maximum(first_position - WINDOW + 1, 0) // BLOCK_L * BLOCK_L
    else:
        # Tokens that the first query sees are seen by all.
        masked_from = (first_position + 1) // BLOCK_L * BLOCK_L
        acc, largest, total = attend_range(
            acc, largest, total, q, position, 0, masked_from, k_ptr, v_ptr, stride_block, table_ptr, scale_log2e,
            D, P, SOFTCAP, WINDOW, False, BLOCK_D, BLOCK_L, NUM_STAGES,
        )  # fmt: skip
    acc, largest, total = attend_range(
        acc, largest, total, q, position, masked_from, end, k_ptr, v_ptr, stride_block, table_ptr, scale_log2e,
        D, P, SOFTCAP, WINDOW, True, BLOCK_D, BLOCK_L, NUM_STAGES,
    )  # fmt: skip
    result = acc / total[:, None]
    out_offsets = (row + query)[:, None] * (H * G * D) + head[:, None] * D + dim[None, :]
    tl.store(out_ptr + out_offsets, result.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["table_stride"])
def _chunk_kernel(
    q_ptr, q_stride, kv_ptr, stride_kv, stride_head, stride_block, tables_ptr, table_stride, out_ptr,
    tiles_ptr, counts_ptr, scale_log2e,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, P: tl.constexpr, F: tl.constexpr, SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_L: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(1)
    if tile < tl.load(counts_ptr + 1):
        _attend_tile(
            tile, tl.program_id(0), q_ptr, q_stride, kv_ptr, stride_kv, stride_head, stride_block,
            tables_ptr, table_stride, out_ptr, tiles_ptr, scale_log2e,
            H, G, D, P, F, SOFTCAP, WINDOW, BLOCK_M, BLOCK_D, BLOCK_L, NUM_STAGES,
        )  # fmt: skip


def chunk_attention(
    q_TAD: Tensor,
    kv_layer: Tensor,
    block_tables_SB: Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    softcap: float = 0.0,
    out_TAD: Tensor,
) -> None:
    """Attention of every query of the sequences that the plan counts as chunks, causal within the chunk.

    As ``decode_attention``, whose rows it leaves alone, as it does rows of padding and of chunks that are done.
    """
    num_heads, head_dim = q_TAD.shape[1:]
    _, num_kv_heads, _, block_size, _ = kv_layer.shape
    stride_kv, stride_head, stride_block = kv_layer.stride()[:3]
    tiles = plan.chunk_tiles
    _chunk_kernel[(num_kv_heads, len(plan.tiles_XF))](
        q_TAD, q_TAD.stride(0), kv_layer, stride_kv, stride_head, stride_block, block_tables_SB,
        block_tables_SB.stride(0), out_TAD, plan.tiles_XF, plan.counts_2, scale * math.log2(math.e),
        H=num_kv_heads, G=num_heads // num_kv_heads, D=head_dim, P=block_size, F=NUM_FIELDS, SOFTCAP=softcap,
        WINDOW=plan.window, BLOCK_M=tiles.rows, BLOCK_D=max(16, triton.next_power_of_2(head_dim)), BLOCK_L=tiles.tokens,
        NUM_STAGES=tiles.num_stages, num_warps=tiles.num_warps,
    )  # fmt: skip


def mixed_attention(
    q_TAD: Tensor,
    kv_layer: Tensor,
    block_tables_SB: Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    softcap: float = 0.0,
    side: torch.cuda.Stream | None = None,
    out_TAD: Tensor,
) -> None:
    """Both kernels, for a step with chunks and rows. On a ``side`` stream the rows' one runs beside the chunks'.

    Rows are bound by memory and chunks by arithmetic, so side by side (in a graph: as parallel branches) they take less
    than one after the other. One kernel for both took longer than two in a row: its programs are as large as a chunk's.
    """

    def attend(kernel: Callable[..., None]) -> None:
        kernel(q_TAD, kv_layer, block_tables_SB, plan, scale=scale, softcap=softcap, out_TAD=out_TAD)

    if side is None:
        attend(decode_attention)
        attend(chunk_attention)
        return
    main = torch.cuda.current_stream()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        attend(decode_attention)
    attend(chunk_attention)
    main.wait_stream(side)
