"""Between the QKV product and attention: norms of q's and k's heads, RoPE, and K and V into the cache.

One launch of its own, for steps of any tokens; and the parts of it with which the attention of rows does the same in
its own launch (``attention_decode.rotate_and_attend``).

Shape suffixes: T tokens, N columns of the product (q's A heads, k's H, v's H, of D each), P positions, F = D / 2.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from aserve.model.kernels.early import early_launch, let_next_begin, wait_for_former


def rope_table(frequencies_F: Tensor, num_positions: int, attention_factor: float = 1.0) -> Tensor:
    """float32 [P, D]: a position's cosines, then its sines, of ``rope.inverse_frequencies``."""
    positions_P = torch.arange(num_positions, device=frequencies_F.device, dtype=torch.float32)
    angles_PF = positions_P.unsqueeze(-1) * frequencies_F
    return torch.cat((angles_PF.cos(), angles_PF.sin()), -1) * attention_factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """What is done to a step's q and K on their way from one layer's product to its attention, and where K and V go.

    positions_T, slot_mapping_T: int32, of the step's tokens; slots are block * block_size + offset. table_PD: of
    ``rope_table``. qk_norm_AHD: one gain a head of q, then of k; None without norms, which come before the turn.
    """

    positions_T: Tensor
    slot_mapping_T: Tensor
    table_PD: Tensor
    qk_norm_AHD: Tensor | None = None
    eps: float = 1e-6
    uses_rope: bool = True


@triton.jit
def load_rotation(table_ptr, position, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """A position's (cos, sin) for each element of a head, [BLOCK_D]: x turned is x * cos + partner * sin."""
    F: tl.constexpr = D // 2
    dim = tl.arange(0, BLOCK_D)
    angle_ptr = table_ptr + position.to(tl.int64) * D + dim % F
    cos = tl.load(angle_ptr, mask=dim < D, other=0.0)
    sin = tl.load(angle_ptr + F, mask=dim < D, other=0.0)
    return cos, tl.where(dim < F, -sin, sin)


@triton.jit
def load_heads(x_ptr, head, is_wanted, PARTNERS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """(x, partners), both [heads, BLOCK_D]: of one token's heads, or of their gains; zeros for those not wanted.

    An element's partner is the one that it is turned with, half a head away: read beside it, from the same lines, since
    another thread holds it. PARTNERS: whether they are needed; else x again.
    """
    dim = tl.arange(0, BLOCK_D)
    inside = is_wanted[:, None] & (dim < D)[None, :]
    x = tl.load(x_ptr + head[:, None] * D + dim[None, :], mask=inside, other=0.0).to(tl.float32)
    if PARTNERS:
        partner_dim = (dim + D // 2) % D
        partner = tl.load(x_ptr + head[:, None] * D + partner_dim[None, :], mask=inside, other=0.0).to(tl.float32)
    else:
        partner = x
    return x, partner


@triton.jit
def rotate_heads(
    x, partner, gain_ptr, head, is_wanted, cos, sin, eps, D: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_ROPE: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """Heads of q or k, of ``load_heads``, as ``_rope_kv_kernel`` leaves them before they are rounded. gain: of q's
    first head."""
    if HAS_NORM:
        gain, partner_gain = load_heads(gain_ptr, head, is_wanted, HAS_ROPE, D, BLOCK_D)
        rstd = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        x = x * rstd * gain
        partner = partner * rstd * partner_gain
    if HAS_ROPE:
        x = x * cos[None, :] + partner * sin[None, :]
    return x


@triton.jit
def _rope_kv_kernel(
    qkv_ptr, positions_ptr, slots_ptr, table_ptr, gain_ptr, kv_ptr, eps, stride_kv, stride_head, stride_block,
    A: tl.constexpr, H: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_F: tl.constexpr, HAS_ROPE: tl.constexpr, HAS_NORM: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    F: tl.constexpr = D // 2
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    pair = tl.arange(0, BLOCK_F)
    inside = (head < A + 2 * H)[:, None] & (pair < F)[None, :]
    offsets = head[:, None] * D + pair[None, :]
    row_ptr = qkv_ptr + token * ((A + 2 * H) * D)
    wait_for_former(EARLY)
    first = tl.load(row_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(row_ptr + offsets + F, mask=inside, other=0.0).to(tl.float32)
    turns = inside & (head < A + H)[:, None]
    if HAS_NORM:
        square = tl.sum(first * first + second * second, 1)
        rstd = tl.rsqrt(square / D + eps)[:, None]
        first = tl.where(turns, first * rstd * tl.load(gain_ptr + offsets, mask=turns, other=0.0), first)
        second = tl.where(turns, second * rstd * tl.load(gain_ptr + offsets + F, mask=turns, other=0.0), second)
    if HAS_ROPE:
        position = tl.load(positions_ptr + token).to(tl.int64)
        cos = tl.load(table_ptr + position * D + pair, mask=pair < F, other=0.0)[None, :]
        sin = tl.load(table_ptr + position * D + F + pair, mask=pair < F, other=0.0)[None, :]
        turned = first * cos - second * sin
        second = tl.where(turns, second * cos + first * sin, second)
        first = tl.where(turns, turned, first)
    if HAS_ROPE or HAS_NORM:
        is_q = inside & (head < A)[:, None]
        tl.store(row_ptr + offsets, first.to(qkv_ptr.dtype.element_ty), mask=is_q)
        tl.store(row_ptr + offsets + F, second.to(qkv_ptr.dtype.element_ty), mask=is_q)
    let_next_begin(EARLY)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    kv_head = (head - A).to(tl.int64)  # k's heads, then v's
    place = kv_head // H * stride_kv + kv_head % H * stride_head + slot // P * stride_block + slot % P * D
    cached_ptr = kv_ptr + place[:, None] + pair[None, :]
    is_kv = inside & (head >= A)[:, None]
    tl.store(cached_ptr, first.to(kv_ptr.dtype.element_ty), mask=is_kv)
    tl.store(cached_ptr + F, second.to(kv_ptr.dtype.element_ty), mask=is_kv)


def rotate_and_cache(
    qkv_TN: Tensor,
    positions_T: Tensor,
    slot_mapping_T: Tensor,
    rope_table_PD: Tensor,
    kv_layer: Tensor,
    *,
    qk_norm_AHD: Tensor | None = None,
    eps: float = 1e-6,
    uses_rope: bool = True,
    block_heads: int | None = None,
    early: bool = False,
) -> None:
    """q turned in place in ``qkv``; k turned, and v, written where the mapping says (k in ``qkv`` stays as it was).

    kv_layer: [2, H, blocks, tokens of a block, D], the last two contiguous. qk_norm: one gain a head of q, then of k;
    norms come before the turn. slot_mapping: block * block_size + offset; where tokens share a slot (block 0), any of
    them wins. block_heads: heads of a program, a power of two; by the number of tokens unless given. early: see
    the module ``early``.
    """
    _, num_kv_heads, _, block_size, head_dim = kv_layer.shape
    stride_kv, stride_head, stride_block = kv_layer.stride()[:3]
    num_tokens, width = qkv_TN.shape
    num_heads = width // head_dim - 2 * num_kv_heads
    # Few tokens: many small programs, all at once. Many tokens: fewer, larger ones.
    block_heads = block_heads or (2 if num_tokens <= 64 else 16)
    _rope_kv_kernel[(num_tokens, triton.cdiv(num_heads + 2 * num_kv_heads, block_heads))](
        qkv_TN, positions_T, slot_mapping_T, rope_table_PD, qk_norm_AHD, kv_layer, eps,
        stride_kv, stride_head, stride_block,
        A=num_heads, H=num_kv_heads, D=head_dim, P=block_size, BLOCK_HEADS=block_heads,
        BLOCK_F=triton.next_power_of_2(head_dim // 2), HAS_ROPE=uses_rope, HAS_NORM=qk_norm_AHD is not None,
        num_warps=1 if block_heads == 2 else 4, **early_launch(early),
    )  # fmt: skip
