"""A matrix product whose rows do not depend on how many others there are: reference mode's.

Libraries choose their order of summation by the number of rows. Here each element is the sum over blocks of K in
rising order, in float32, whatever its row and whoever is in the batch.

Shape suffixes: T rows, K columns of the input, N columns of the output.
"""

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

_BLOCK_T: Final = 16
_BLOCK_N: Final = 64
_BLOCK_K: Final = 64


@triton.jit(do_not_specialize=["num_rows"])
def _matmul_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, num_rows, N: tl.constexpr, K: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    place = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
    for start in tl.range(0, K, BLOCK_K):
        k = start + place
        x = tl.load(
            x_ptr + row[:, None] * K + k[None, :], mask=(row < num_rows)[:, None] & (k < K)[None, :], other=0.0
        )  # fmt: skip
        weight = tl.load(
            weight_ptr + column[:, None] * K + k[None, :], mask=(column < N)[:, None] & (k < K)[None, :], other=0.0
        )  # fmt: skip
        acc = tl.dot(x, weight.T, acc, input_precision="ieee")
    if HAS_BIAS:
        acc += tl.load(bias_ptr + column, mask=column < N, other=0.0)[None, :]
    inside = (row < num_rows)[:, None] & (column < N)[None, :]
    tl.store(out_ptr + row[:, None] * N + column[None, :], acc, mask=inside)


def batch_invariant_matmul(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, *, out_TN: Tensor) -> None:
    """out = x weight^T + bias, all float32 and contiguous."""
    num_rows, num_inputs = x_TK.shape
    num_outputs = len(weight_NK)
    _matmul_kernel[(triton.cdiv(num_outputs, _BLOCK_N), triton.cdiv(num_rows, _BLOCK_T))](
        x_TK, weight_NK, bias_N, out_TN, num_rows, N=num_outputs, K=num_inputs, HAS_BIAS=bias_N is not None,
        BLOCK_T=_BLOCK_T, BLOCK_N=_BLOCK_N, BLOCK_K=_BLOCK_K, num_warps=4, num_stages=3,
    )  # fmt: skip
