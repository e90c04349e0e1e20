"""Paged attention of rows with one query each: grouped-query heads, rows cut by tokens, parts merged in the same go.

A program reads one item's K and V of one kv head for all the query heads that share it. The program of a row that
finishes last merges the row's parts: a counter tells it, and no second launch is needed.

It comes in two forms: behind ``rope_kv``, or in its place, straight from the QKV product.

Shape suffixes: T tokens of the step, A query heads, D head_dim, H kv heads, N blocks or the product's columns, P tokens
of a block or positions, S slots, B entries of a block table.
"""

import math

import triton
import triton.language as tl
from torch import Tensor

from aserve.model.kernels.attention_inner import LOWEST, attend_range
from aserve.model.kernels.attention_plan import NUM_FIELDS, AttentionPlan
from aserve.model.kernels.early import early_launch, let_next_begin, wait_for_former
from aserve.model.kernels.rope_kv import Rotation, load_heads, load_rotation, rotate_heads


@triton.jit
def _merge(
    out_ptr, partial_ptr, lse_ptr, num_splits,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):  # fmt: skip
    """The weighted mean of a row's parts, each normalised in itself, with lse their log2 of the sum of weights.

    partial, lse: of the row's first part and this kv head.
    """
    group = tl.arange(0, BLOCK_G)
    dim = tl.arange(0, BLOCK_D)
    inside = (group < G)[:, None] & (dim < D)[None, :]
    largest = tl.full([BLOCK_G], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for start in tl.range(0, num_splits, BLOCK_SPLITS):
        split = start + tl.arange(0, BLOCK_SPLITS)
        row = split * (H * G)
        there = (split < num_splits)[:, None] & (group < G)[None, :]
        # Written by other multiprocessors: not to be looked for in this one's first-level cache.
        lse = tl.load(lse_ptr + row[:, None] + group[None, :], mask=there, other=LOWEST, cache_modifier=".cg")
        new = tl.maximum(largest, tl.max(lse, 0))
        weight = tl.where(there, tl.exp2(lse - new[None, :]), 0.0)
        part = tl.load(
            partial_ptr + (row[:, None, None] + group[None, :, None]) * D + dim[None, None, :],
            mask=there[:, :, None] & (dim < D)[None, None, :], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        shrink = tl.exp2(largest - new)
        acc = acc * shrink[:, None] + tl.sum(part * weight[:, :, None], 0)
        total = total * shrink + tl.sum(weight, 0)
        largest = new
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out_ptr + group[:, None] * D + dim[None, :], result.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _take_from_product(
    row_ptr, kv_head, k_ptr, v_ptr, place, is_newest, cos, sin, gain_ptr, eps,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_ROPE: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """q of the heads that share a kv head, [BLOCK_G, BLOCK_D], from a row of the QKV product.

    is_newest: whether to leave the row's K and V in the cache too, at ``place`` from k and v.
    """
    q_group = tl.arange(0, BLOCK_G)
    q_head, has_q = kv_head * G + q_group, q_group < G
    k_head = tl.full([1], H * G, tl.int32) + kv_head
    has_k = tl.full([1], 1, tl.int1) & is_newest
    # All that is read is asked for before any of it is needed, without a branch: its way here is most of the time.
    q, q_partner = load_heads(row_ptr, q_head, has_q, HAS_ROPE, D, BLOCK_D)
    k, k_partner = load_heads(row_ptr, k_head, has_k, HAS_ROPE, D, BLOCK_D)
    v, _ = load_heads(row_ptr, k_head + H, has_k, False, D, BLOCK_D)
    q = rotate_heads(q, q_partner, gain_ptr, q_head, has_q, cos, sin, eps, D, BLOCK_D, HAS_ROPE, HAS_NORM)
    k = rotate_heads(k, k_partner, gain_ptr, k_head, has_k, cos, sin, eps, D, BLOCK_D, HAS_ROPE, HAS_NORM)
    dim = tl.arange(0, BLOCK_D)[None, :]
    inside = has_k[:, None] & (dim < D)
    tl.store(k_ptr + place + dim, k.to(k_ptr.dtype.element_ty), mask=inside)
    tl.store(v_ptr + place + dim, v.to(v_ptr.dtype.element_ty), mask=inside)
    # The barrier alone orders these stores before this program's own reads, by whichever way they go (through the
    # first-level cache, which a store of the same multiprocessor keeps true, or by asynchronous copies past it); and no
    # other program of this launch reads what they wrote.
    tl.debug_barrier()
    return q.to(row_ptr.dtype.element_ty)


@triton.jit
def _attend_item(
    item, kv_head, q_ptr, q_stride, kv_ptr, stride_kv, stride_head, stride_block, tables_ptr, table_stride, out_ptr,
    items_ptr, partial_ptr, lse_ptr, arrivals_ptr, scale_log2e, positions_ptr, mapping_ptr, angles_ptr, gain_ptr, eps,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, P: tl.constexpr, F: tl.constexpr, SOFTCAP: tl.constexpr,
    BLOCK_G: tl.constexpr, MERGE_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_L: tl.constexpr,
    NUM_STAGES: tl.constexpr, FROM_PRODUCT: tl.constexpr, HAS_ROPE: tl.constexpr, HAS_NORM: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One item, one kv head. An item without tokens gives zeros."""
    item_ptr = items_ptr + item * F
    row = tl.load(item_ptr).to(tl.int64)
    slot = tl.load(item_ptr + 1).to(tl.int64)
    first = tl.load(item_ptr + 2)
    end = tl.load(item_ptr + 3)
    split = tl.load(item_ptr + 4)
    num_splits = tl.load(item_ptr + 5)
    sequence = tl.load(item_ptr + 6)

    group = tl.arange(0, BLOCK_G)
    dim = tl.arange(0, BLOCK_D)
    inside = (group < G)[:, None] & (dim < D)[None, :]
    head_offsets = (kv_head * G + group)[:, None] * D + dim[None, :]
    k_ptr = kv_ptr + kv_head.to(tl.int64) * stride_head
    v_ptr = k_ptr + stride_kv
    table_ptr = tables_ptr + slot * table_stride
    # The plan and what the step was laid out as are older than the kernel in front.
    if FROM_PRODUCT:
        cos, sin = load_rotation(angles_ptr, tl.load(positions_ptr + row), D, BLOCK_D)
        cached = tl.load(mapping_ptr + row).to(tl.int64)
        wait_for_former(EARLY)
        # Of a row's items, which do not overlap, the last one ends with its newest token. A row that is done has one
        # item without tokens: nobody would read what it wrote.
        q = _take_from_product(
            q_ptr + row * q_stride, kv_head, k_ptr, v_ptr, cached // P * stride_block + cached % P * D,
            (split == num_splits - 1) & (first < end), cos, sin, gain_ptr, eps,
            H, G, D, BLOCK_G, BLOCK_D, HAS_ROPE, HAS_NORM,
        )  # fmt: skip
    else:
        wait_for_former(EARLY)
        q = tl.load(q_ptr + row * q_stride + head_offsets, mask=inside, other=0.0)

    largest = tl.full([BLOCK_G], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    position = tl.zeros([BLOCK_G], tl.int32) + (end - 1)
    whole = first + (end - first) // BLOCK_L * BLOCK_L
    acc, largest, total = attend_range(
        acc, largest, total, q, position, first, whole, k_ptr, v_ptr, stride_block, table_ptr, scale_log2e,
        D, P, SOFTCAP, 0, False, BLOCK_D, BLOCK_L, NUM_STAGES,
    )  # fmt: skip
    acc, largest, total = attend_range(
        acc, largest, total, q, position, whole, end, k_ptr, v_ptr, stride_block, table_ptr, scale_log2e,
        D, P, SOFTCAP, 0, True, BLOCK_D, BLOCK_L, 1,
    )  # fmt: skip
    let_next_begin(EARLY)
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    out_row_ptr = out_ptr + row * (H * G * D)
    if num_splits == 1:
        tl.store(out_row_ptr + head_offsets, result.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        # 64 bits: reference mode has up to 32 parts a token.
        first_part = ((item - split).to(tl.int64) * H + kv_head) * G
        partial_ptr += first_part * D
        lse_ptr += first_part
        part = split * (H * G)
        tl.store(partial_ptr + (part + group)[:, None] * D + dim[None, :], result, mask=inside)
        tl.store(lse_ptr + part + group, largest + tl.log2(total), mask=group < G)
        tl.debug_barrier()  # all threads' parts are written before the counter says so
        arrivals_ptr += sequence * H + kv_head
        if tl.atomic_add(arrivals_ptr, 1, sem="acq_rel", scope="gpu") == num_splits - 1:
            tl.store(arrivals_ptr, 0)
            _merge(
                out_row_ptr + kv_head * G * D, partial_ptr, lse_ptr, num_splits,
                H, G, D, MERGE_G, BLOCK_D, BLOCK_SPLITS=8,
            )  # fmt: skip


@triton.jit(do_not_specialize=["table_stride"])
def _decode_kernel(
    q_ptr, q_stride, kv_ptr, stride_kv, stride_head, stride_block, tables_ptr, table_stride, out_ptr,
    items_ptr, counts_ptr, partial_ptr, lse_ptr, arrivals_ptr, scale_log2e,
    positions_ptr, mapping_ptr, angles_ptr, gain_ptr, eps,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, P: tl.constexpr, F: tl.constexpr, SOFTCAP: tl.constexpr,
    BLOCK_G: tl.constexpr, MERGE_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_L: tl.constexpr,
    NUM_STAGES: tl.constexpr, FROM_PRODUCT: tl.constexpr, HAS_ROPE: tl.constexpr, HAS_NORM: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0) // H
    if item < tl.load(counts_ptr):
        _attend_item(
            item, tl.program_id(0) % H, q_ptr, q_stride, kv_ptr, stride_kv, stride_head, stride_block,
            tables_ptr, table_stride, out_ptr, items_ptr, partial_ptr, lse_ptr, arrivals_ptr, scale_log2e,
            positions_ptr, mapping_ptr, angles_ptr, gain_ptr, eps,
            H, G, D, P, F, SOFTCAP, BLOCK_G, MERGE_G, BLOCK_D, BLOCK_L, NUM_STAGES, FROM_PRODUCT, HAS_ROPE, HAS_NORM,
            EARLY,
        )  # fmt: skip
    else:
        wait_for_former(EARLY)


def decode_attention(
    q_TAD: Tensor,
    kv_layer: Tensor,
    block_tables_SB: Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    softcap: float = 0.0,
    early: bool = False,
    out_TAD: Tensor,
) -> None:
    """Attention of every row that the plan counts as a row of one token. Only a row's own tokens enter its result.

    q: heads contiguous, rows at any stride (q may lie in the QKV product). kv_layer: [2, H, N, P, D], the last two
    contiguous; holds the step's K and V already. out: contiguous. softcap: 0 is off. early: see
    the module ``early``.
    """
    _launch(q_TAD, None, kv_layer, block_tables_SB, plan, scale=scale, softcap=softcap, early=early, out_TAD=out_TAD)


def rotate_and_attend(
    qkv_TN: Tensor,
    rotation: Rotation,
    kv_layer: Tensor,
    block_tables_SB: Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    softcap: float = 0.0,
    early: bool = False,
    out_TAD: Tensor,
) -> None:
    """``rope_kv.rotate_and_cache`` and ``decode_attention`` in one launch, which leaves ``qkv`` as it is.

    plan: all of the step's tokens are rows of it. K and V of a row are written once, by the programs whose item ends
    with it, where ``rotation`` says: that has to be its newest token's place in the block table. Those of a row that is
    done go nowhere. Everything else as there.
    """
    assert not plan.tile_queries, "K and V of a chunk's tokens would be written by nobody"
    _launch(
        qkv_TN, rotation, kv_layer, block_tables_SB, plan, scale=scale, softcap=softcap, early=early, out_TAD=out_TAD
    )


def _launch(
    q: Tensor,
    rotation: Rotation | None,
    kv_layer: Tensor,
    block_tables_SB: Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    softcap: float,
    early: bool,
    out_TAD: Tensor,
) -> None:
    """q: heads that are turned already, or the product with a rotation."""
    num_heads, head_dim = out_TAD.shape[1:]
    _, num_kv_heads, _, block_size, _ = kv_layer.shape
    stride_kv, stride_head, stride_block = kv_layer.stride()[:3]
    group = num_heads // num_kv_heads
    tiles = plan.decode_tiles
    inputs: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, float] = (None, None, None, None, 0.0)
    if rotation is not None:
        inputs = (
            rotation.positions_T, rotation.slot_mapping_T, rotation.table_PD, rotation.qk_norm_AHD, rotation.eps
        )  # fmt: skip
    # In one dimension, since the others hold 65,535 programs and reference mode has more items.
    _decode_kernel[(num_kv_heads * len(plan.items_WF),)](
        q, q.stride(0), kv_layer, stride_kv, stride_head, stride_block,
        block_tables_SB, block_tables_SB.stride(0), out_TAD,
        plan.items_WF, plan.counts_2, plan.partial_WHGD, plan.lse_WHG, plan.arrivals_SH, scale * math.log2(math.e),
        *inputs,
        H=num_kv_heads, G=group, D=head_dim, P=block_size, F=NUM_FIELDS, SOFTCAP=softcap,
        BLOCK_G=max(16, triton.next_power_of_2(group)), MERGE_G=triton.next_power_of_2(group),
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)), BLOCK_L=tiles.tokens, NUM_STAGES=tiles.num_stages,
        FROM_PRODUCT=rotation is not None, HAS_ROPE=rotation is not None and rotation.uses_rope,
        HAS_NORM=inputs[3] is not None, num_warps=tiles.num_warps, **early_launch(early),
    )  # fmt: skip
