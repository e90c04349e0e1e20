"""``aserve.model.noise`` on the device: the same bits from the same seed, position and vocabulary index.

Philox4x64-10 takes 20 products of 64 by 64 bits for eight indices: 49,152 of them in about 25 µs of one multiprocessor.
"""

import triton
import triton.language as tl

INDICES_PER_COUNTER = tl.constexpr(8)

_MULTIPLIER_0 = tl.constexpr(0xD2E7470EE14C6C93)
_MULTIPLIER_1 = tl.constexpr(0xCA5A826395121157)
_WEYL_0 = tl.constexpr(0x9E3779B97F4A7C15)
_WEYL_1 = tl.constexpr(0xBB67AE8584CAA73B)
_SCALE = tl.constexpr(-(2.0**-32) * (1 - 2.0**-24))
_OFFSET = tl.constexpr(-(2.0**-33))


@triton.jit
def noise_words(seed, position, counters):
    """Four uint64 words, of the shape of ``counters``; counter c covers vocabulary indices 8 c .. 8 c + 7.

    seed: uint64. Word w holds index 8 c + 2 w in its lower half and the next one in its upper half.
    """
    c0 = counters.to(tl.uint64) + 1
    c1 = tl.zeros_like(c0) + position.to(tl.uint64)
    c2 = tl.zeros_like(c0)
    c3 = tl.zeros_like(c0)
    multiplier_0 = tl.full(c0.shape, _MULTIPLIER_0, tl.uint64)
    multiplier_1 = tl.full(c0.shape, _MULTIPLIER_1, tl.uint64)
    key_0 = tl.zeros_like(c0) + seed
    key_1 = tl.zeros_like(c0)
    for _ in tl.static_range(10):
        high_0 = tl.umulhi(multiplier_0, c0)
        high_1 = tl.umulhi(multiplier_1, c2)
        low_0 = multiplier_0 * c0
        low_1 = multiplier_1 * c2
        c0 = high_1 ^ c1 ^ key_0
        c1 = low_1
        c2 = high_0 ^ c3 ^ key_1
        c3 = low_0
        key_0 += tl.full(c0.shape, _WEYL_0, tl.uint64)
        key_1 += tl.full(c0.shape, _WEYL_1, tl.uint64)
    return c0, c1, c2, c3


@triton.jit
def log1p(x):
    """log(1 + x) for -1 < x <= 0 with a small relative error also near 0 (W. Kahan's correction of the rounded sum)."""
    sum_ = 1.0 + x
    rounded = sum_ - 1.0
    return tl.where(rounded == 0.0, x, tl.log(sum_) * (x / tl.where(rounded == 0.0, 1.0, rounded)))


@triton.jit
def log_exponential(bits):
    """log E of 32 noise bits (uint32), as in ``aserve.model.noise.log_exponential_``; float32, always finite."""
    return tl.log(-log1p(_OFFSET + bits.to(tl.float32) * _SCALE))
