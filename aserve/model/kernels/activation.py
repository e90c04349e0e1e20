"""SwiGLU's middle: silu(gate) * up.

Shape suffixes: T tokens, I intermediate size, J = 2 I.
"""

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _silu_mul_kernel(gate_up_ptr, out_ptr, I: tl.constexpr, BLOCK: tl.constexpr):  # noqa: E741
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < I
    gate = tl.load(gate_up_ptr + row * 2 * I + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * I + I + column, mask=inside, other=0.0).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + row * I + column, y.to(out_ptr.dtype.element_ty), mask=inside)


def silu_mul(gate_up_TJ: Tensor, *, out_TI: Tensor) -> None:
    """out = silu(gate) * up in float32, rounded once. gate_up: gate's I columns, then up's."""
    num_tokens, size = out_TI.shape
    _silu_mul_kernel[(num_tokens, triton.cdiv(size, _BLOCK))](gate_up_TJ, out_TI, I=size, BLOCK=_BLOCK, num_warps=4)
