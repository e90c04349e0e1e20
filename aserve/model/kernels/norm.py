"""RMSNorm together with what comes before it: the embedding lookup, or the addition to the residual stream.

Sums and norms are in float32; what is stored is rounded once.

Shape suffixes: T tokens of the step, R rows whose logits are wanted, C hidden size, V vocabulary.
"""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _normalised(x, gain_ptr, channel, inside, eps, C: tl.constexpr):
    gain = tl.load(gain_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x) / C + eps) * gain


@triton.jit
def _embed_kernel(
    token_ids_ptr, embedding_ptr, gain_ptr, residual_ptr, out_ptr, eps, C: tl.constexpr, BLOCK_C: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK_C)
    inside = channel < C
    token = tl.load(token_ids_ptr + row).to(tl.int64)
    x = tl.load(embedding_ptr + token * C + channel, mask=inside, other=0.0)
    tl.store(residual_ptr + row * C + channel, x, mask=inside)
    y = _normalised(x.to(tl.float32), gain_ptr, channel, inside, eps, C)
    tl.store(out_ptr + row * C + channel, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _add_kernel(
    residual_ptr, delta_ptr, rows_ptr, gain_ptr, out_ptr, eps,
    C: tl.constexpr, BLOCK_C: tl.constexpr, HAS_ROWS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK_C)
    inside = channel < C
    row = program
    if HAS_ROWS:
        row = tl.load(rows_ptr + program).to(tl.int64)
    x = tl.load(residual_ptr + row * C + channel, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(delta_ptr + row * C + channel, mask=inside, other=0.0).to(tl.float32)
    # The sum as the stream keeps it, so that what is normalised is what the next layer adds to.
    stored = x.to(residual_ptr.dtype.element_ty)
    if not HAS_ROWS:
        tl.store(residual_ptr + row * C + channel, stored, mask=inside)
    y = _normalised(stored.to(tl.float32), gain_ptr, channel, inside, eps, C)
    tl.store(out_ptr + program * C + channel, y.to(out_ptr.dtype.element_ty), mask=inside)


def embed_rms_norm(
    token_ids_T: Tensor, embedding_VC: Tensor, gain_C: Tensor, eps: float, *, residual_TC: Tensor, out_TC: Tensor
) -> None:
    """residual = embedding[token_ids]; out = rms_norm(residual) * gain. Ids have to lie in the vocabulary."""
    num_channels = embedding_VC.shape[1]
    _embed_kernel[(len(token_ids_T),)](
        token_ids_T, embedding_VC, gain_C, residual_TC, out_TC, eps,
        C=num_channels, BLOCK_C=triton.next_power_of_2(num_channels), num_warps=_num_warps(num_channels),
    )  # fmt: skip


def add_rms_norm(residual_TC: Tensor, delta_TC: Tensor, gain_C: Tensor, eps: float, *, out_TC: Tensor) -> None:
    """residual += delta, in place; out = rms_norm(residual) * gain."""
    _launch_add(residual_TC, delta_TC, None, gain_C, eps, out_TC)


def add_rms_norm_rows(
    residual_TC: Tensor, delta_TC: Tensor, rows_R: Tensor, gain_C: Tensor, eps: float, *, out_RC: Tensor
) -> None:
    """out = rms_norm((residual + delta)[rows]) * gain, the end of the stack; the residual stays as it is."""
    _launch_add(residual_TC, delta_TC, rows_R, gain_C, eps, out_RC)


def _launch_add(
    residual_TC: Tensor, delta_TC: Tensor, rows_R: Tensor | None, gain_C: Tensor, eps: float, out: Tensor
) -> None:
    num_channels = residual_TC.shape[1]
    _add_kernel[(len(out),)](
        residual_TC, delta_TC, rows_R, gain_C, out, eps,
        C=num_channels, BLOCK_C=triton.next_power_of_2(num_channels), HAS_ROWS=rows_R is not None,
        num_warps=_num_warps(num_channels),
    )  # fmt: skip


def _num_warps(num_channels: int) -> int:
    """A power of two, at most 16: about 16 channels a thread."""
    return 1 << min(4, max(0, (num_channels - 1).bit_length() - 9))
