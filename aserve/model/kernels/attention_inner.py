"""The loop that all paged attention kernels share: scores, online softmax, weighted values."""

import triton
import triton.language as tl

LOWEST = tl.constexpr(-(2.0**100))
"""Stands for -inf where the difference of two of them has to be a number.

A power of two: its product with the scale is exact, or a fused multiply-add would find a difference of 1e22 between the
product and what it was rounded to.
"""


@triton.jit
def capped(score, scale_log2e, SOFTCAP: tl.constexpr):
    """Scores that, once scaled, are SOFTCAP * tanh(scaled / SOFTCAP)."""
    scale = scale_log2e * 0.6931471805599453
    return SOFTCAP / scale * (2.0 * tl.sigmoid(score * (2.0 / SOFTCAP * scale)) - 1.0)


@triton.jit
def attend_range(
    acc, largest, total, q, position, first, end, k_ptr, v_ptr, stride_block, table_ptr, scale_log2e,
    D: tl.constexpr, P: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_L: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Folds tokens [first, end) into (acc, largest, total), for all rows of q, row i seeing tokens <= position[i].

    Unmasked, every row sees all of them, and they are whole steps of BLOCK_L: a step then takes a third less time.
    WINDOW > 0: only the last so many. ``largest`` is of the scaled scores' log2 weights, ``total`` their sum.
    """
    dim = tl.arange(0, BLOCK_D)
    for start in tl.range(first, end, BLOCK_L, num_stages=NUM_STAGES):
        token = start + tl.arange(0, BLOCK_L)
        if MASKED:
            block = tl.load(table_ptr + token // P, mask=token < end, other=0).to(tl.int64)
        else:
            block = tl.load(table_ptr + token // P).to(tl.int64)
        offsets = (block * stride_block + (token % P) * D)[:, None] + dim[None, :]
        if MASKED:
            # What lies behind a sequence's own tokens may be NaN, which no weight of zero would silence.
            own = (token < end)[:, None] & (dim < D)[None, :]
            k = tl.load(k_ptr + offsets, mask=own, other=0.0)
            v = tl.load(v_ptr + offsets, mask=own, other=0.0)
        elif D < BLOCK_D:
            k = tl.load(k_ptr + offsets, mask=(dim < D)[None, :], other=0.0)
            v = tl.load(v_ptr + offsets, mask=(dim < D)[None, :], other=0.0)
        else:
            k = tl.load(k_ptr + offsets)
            v = tl.load(v_ptr + offsets)
        score = tl.dot(q, k.T, input_precision="ieee")
        if SOFTCAP > 0:
            score = capped(score, scale_log2e, SOFTCAP)
        if MASKED:
            visible = token[None, :] <= position[:, None]
            if WINDOW > 0:
                visible = visible & (token[None, :] > position[:, None] - WINDOW)
            score = tl.where(visible, score, LOWEST)
        # The scale is positive: it may wait until the exponent, where it costs nothing.
        new = tl.maximum(largest, tl.max(score, 1) * scale_log2e)
        shrink = tl.exp2(largest - new)
        weight = tl.exp2(score * scale_log2e - new[:, None])
        total = total * shrink + tl.sum(weight, 1)
        acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        largest = new
    return acc, largest, total
