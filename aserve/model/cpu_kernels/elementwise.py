"""What lies between the matrix products of a layer, one pass over memory each: bfloat16 in and out, float32 within.

torch makes 4 to 10 operators of each, at 3 to 10 us a call however few rows there are.

Shape suffixes: T tokens, C hidden size, J = 2 I with I the intermediate size, N columns of the QKV product, A query
heads, H kv heads, D head_dim, F = D / 2, P tokens of a block, M = A + H.
"""

from typing import Any

import numba
import numpy as np

from aserve.model.cpu_kernels.compiler import exp, kernel, narrow, parallel_kernel, widen

_FEW_TOKENS = 32
"""Up to here the calling thread does the work: waking others costs more."""


@kernel
def _norm_row(x_C: Any, gain_C: Any, eps: Any, out_C: Any) -> None:
    total = np.float32(0)
    for i in range(len(x_C)):
        value = widen(x_C[i])
        total += value * value
    factor = np.float32(1) / np.sqrt(total / np.float32(len(x_C)) + eps)
    for i in range(len(x_C)):
        out_C[i] = narrow(widen(x_C[i]) * factor * gain_C[i])


@kernel
def _add_row(x_C: Any, d_C: Any) -> None:
    for i in range(len(x_C)):
        x_C[i] = narrow(widen(x_C[i]) + widen(d_C[i]))


@parallel_kernel
def add_rms_norm(x_TC: Any, d_TC: Any, gain_C: Any, eps: Any, num_threads: int, out_TC: Any) -> None:
    """x += d, then out = x / sqrt(mean(x ** 2) + eps) * gain. d without rows: x stays as it is. gain: float32."""
    num_tokens = len(x_TC)
    parts = 1 if num_tokens <= _FEW_TOKENS else num_threads
    if parts == 1:
        for token in range(num_tokens):
            if len(d_TC):
                _add_row(x_TC[token], d_TC[token])
            _norm_row(x_TC[token], gain_C, eps, out_TC[token])
    else:
        for part in numba.prange(parts):
            for token in range(num_tokens * part // parts, num_tokens * (part + 1) // parts):
                if len(d_TC):
                    _add_row(x_TC[token], d_TC[token])
                _norm_row(x_TC[token], gain_C, eps, out_TC[token])


@kernel
def _silu_mul_row(gate_up_J: Any, out_I: Any) -> None:
    gate_I, up_I = gate_up_J[: len(out_I)], gate_up_J[len(out_I) :]
    for i in range(len(out_I)):
        gate = widen(gate_I[i])
        small = exp(-abs(gate))  # of an argument that is never positive: 1 / (1 + e^-gate) either way
        share = (np.float32(1) if gate >= 0 else small) / (np.float32(1) + small)
        out_I[i] = narrow(gate * share * widen(up_I[i]))


@parallel_kernel
def silu_mul(gate_up_TJ: Any, num_threads: int, out_TI: Any) -> None:
    """silu(gate) * up."""
    num_tokens = len(gate_up_TJ)
    parts = 1 if num_tokens <= _FEW_TOKENS // 4 else num_threads
    if parts == 1:
        for token in range(num_tokens):
            _silu_mul_row(gate_up_TJ[token], out_TI[token])
    else:
        for part in numba.prange(parts):
            for token in range(num_tokens * part // parts, num_tokens * (part + 1) // parts):
                _silu_mul_row(gate_up_TJ[token], out_TI[token])


@kernel
def turn_head(x_D: Any, gain_D: Any, eps: Any, cos_F: Any, sin_F: Any, uses_rope: bool) -> None:
    """One head in place, float32: its own norm where there is a gain, then the rotation of its halves."""
    head_dim = len(x_D)
    if len(gain_D):
        total = np.float32(0)
        for i in range(head_dim):
            total += x_D[i] * x_D[i]
        factor = np.float32(1) / np.sqrt(total / np.float32(head_dim) + eps)
        for i in range(head_dim):
            x_D[i] = x_D[i] * factor * gain_D[i]
    if uses_rope:
        half = head_dim // 2
        first_F, second_F = x_D[:half], x_D[half:]
        for i in range(half):
            a, b = first_F[i], second_F[i]
            first_F[i] = a * cos_F[i] - b * sin_F[i]
            second_F[i] = b * cos_F[i] + a * sin_F[i]


@kernel
def store_key(x_D: Any, page: Any, place: int, block_size: int) -> None:
    """Into a page of keys [D, P]."""
    for d in range(len(x_D)):
        page[d * block_size + place] = narrow(x_D[d])


@kernel
def _rotate_token(
    qkv_N: Any, cos_F: Any, sin_F: Any, gains_MD: Any, eps: Any, uses_rope: bool, block_L2HX: Any, place: int,
    layer: int, num_kv_heads: int, block_size: int, head_D: Any,
) -> None:  # fmt: skip
    head_dim = len(head_D)
    num_heads = len(qkv_N) // head_dim - 2 * num_kv_heads
    for head in range(num_heads + num_kv_heads):
        x_D = qkv_N[head * head_dim : (head + 1) * head_dim]
        for d in range(head_dim):
            head_D[d] = widen(x_D[d])
        turn_head(head_D, gains_MD[head] if len(gains_MD) else head_D[:0], eps, cos_F, sin_F, uses_rope)
        if head < num_heads:
            for d in range(head_dim):
                x_D[d] = narrow(head_D[d])
        else:
            store_key(head_D, block_L2HX[layer, 0, head - num_heads], place, block_size)
    for head in range(num_kv_heads):
        v_D = qkv_N[(num_heads + num_kv_heads + head) * head_dim :]
        out_D = block_L2HX[layer, 1, head, place * head_dim : (place + 1) * head_dim]
        for d in range(head_dim):
            out_D[d] = v_D[d]


@parallel_kernel
def rotate_and_cache(
    qkv_TN: Any, cos_TF: Any, sin_TF: Any, gains_MD: Any, eps: Any, uses_rope: bool, slot_mapping_T: Any, memory: Any,
    layer: int, block_size: int, num_threads: int,
) -> None:  # fmt: skip
    """q turned in place; K turned and V written to each token's slot.

    memory: uint16 [N, L, 2, H, P * D], see ``attention``. gains_MD: float32, of q's heads and then k's; without rows:
    no such norm. cos, sin: float32. Where several tokens share a slot of block 0, any of them wins.
    """
    num_tokens, num_kv_heads = len(qkv_TN), memory.shape[3]
    head_dim = 2 * cos_TF.shape[1]
    parts = 1 if num_tokens <= _FEW_TOKENS else num_threads
    if parts == 1:
        head_D = np.empty(head_dim, np.float32)
        for token in range(num_tokens):
            slot = slot_mapping_T[token]
            _rotate_token(
                qkv_TN[token], cos_TF[token], sin_TF[token], gains_MD, eps, uses_rope, memory[slot // block_size],
                slot % block_size, layer, num_kv_heads, block_size, head_D,
            )  # fmt: skip
    else:
        for part in numba.prange(parts):
            own_D = np.empty(head_dim, np.float32)
            for token in range(num_tokens * part // parts, num_tokens * (part + 1) // parts):
                slot = slot_mapping_T[token]
                _rotate_token(
                    qkv_TN[token], cos_TF[token], sin_TF[token], gains_MD, eps, uses_rope, memory[slot // block_size],
                    slot % block_size, layer, num_kv_heads, block_size, own_D,
                )  # fmt: skip
