"""A whole decode step of up to 8 rows in one call: the loop over layers is compiled too, activations stay float32.

At so few rows a step is as fast as its weights are read, if nothing else is in the way: torch's operators and the
Python around them take longer than that. Weights are read once for all rows, by outputs shared out over the threads.

Shape suffixes: S rows, L layers, C hidden size, I intermediate size, J = 2 I, N columns of the QKV product, Q = A * D,
A query heads, H kv heads, G = A / H, D head_dim, F = D / 2, M = A + H, V vocabulary, B block-table entries, P tokens of
a block.
"""

from functools import cache
from typing import Any, Final

import numba
import numpy as np

from aserve.model.cpu_kernels import ahead
from aserve.model.cpu_kernels.attention import attend_heads
from aserve.model.cpu_kernels.compiler import HAS_COMPILED_BEFORE, exp, kernel, narrow, parallel_kernel, widen
from aserve.model.cpu_kernels.elementwise import store_key, turn_head
from aserve.model.cpu_kernels.vectors import dot_rows

ROWS_MAX: Final = 8
ROW_COUNTS: Final = (1, 2, 4, 8)
"""Compiled ones; a step pads its rows to the next."""


@kernel
def norm_rows(x_SC: Any, gain_C: Any, eps: Any, out_SC: Any) -> None:
    for row in range(len(x_SC)):
        x_C, out_C = x_SC[row], out_SC[row]
        total = np.float32(0)
        for i in range(len(x_C)):
            total += x_C[i] * x_C[i]
        factor = np.float32(1) / np.sqrt(total / np.float32(len(x_C)) + eps)
        for i in range(len(x_C)):
            out_C[i] = x_C[i] * factor * gain_C[i]


@kernel
def multiply(
    weight_NK: Any, scale_N: Any, bias_N: Any, x_SK: Any, out_SN: Any, first: int, last: int, adds: bool
) -> None:
    """Outputs first .. last - 1 of x @ weight^T (+ bias): into ``out``, or added to it. scale, bias: empty for none."""
    rows, num_inputs = x_SK.shape
    sums = np.empty(rows, np.float32)
    for n in range(first, last):
        weight, x, out = weight_NK[n].ctypes.data, x_SK.ctypes.data, sums.ctypes.data
        if rows == 1:
            dot_rows(weight_NK, weight, x, out, num_inputs, 1)
        elif rows == 2:
            dot_rows(weight_NK, weight, x, out, num_inputs, 2)
        elif rows == 4:
            dot_rows(weight_NK, weight, x, out, num_inputs, 4)
        else:
            dot_rows(weight_NK, weight, x, out, num_inputs, 8)
        scale = scale_N[n] if len(scale_N) else np.float32(1)
        bias = bias_N[n] if len(bias_N) else np.float32(0)
        for row in range(rows):
            value = sums[row] * scale + bias
            out_SN[row, n] = out_SN[row, n] + value if adds else value


@kernel
def silu_mul_columns(gate_up_SJ: Any, act_SI: Any, first: int, last: int) -> None:
    num_inner = act_SI.shape[1]
    for row in range(len(act_SI)):
        for i in range(first, last):
            gate = gate_up_SJ[row, i]
            small = exp(-abs(gate))
            share = (np.float32(1) if gate >= 0 else small) / (np.float32(1) + small)
            act_SI[row, i] = gate * share * gate_up_SJ[row, num_inner + i]


@cache
def make_step(group: int, head_dim: int, block_size: int) -> Any:
    """``step(...)`` of 1, 2, 4 or 8 rows: from token ids to float32 logits_SV.

    Weights: int8 or bfloat16 (as uint16) [L, outputs, inputs]; scales float32 [L, outputs], biases float32 likewise, of
    shape [L, 0] where there are none. norms: float32 [2 L + 1, C], in the order of use. gains_LMD: float32, [L, 0, D]
    without q/k norms. windows: int64 [L], 0 for none. cos, sin: float32 [S, F]. memory: uint16, see ``attention``.

    Where no kernels have been kept yet, those of larger steps are compiled in another process from now on.
    """
    if not HAS_COMPILED_BEFORE:
        ahead.begin(group, head_dim, block_size)

    @parallel_kernel
    def step(
        ids_S: Any, cos_SF: Any, sin_SF: Any, slot_mapping_S: Any, table_SB: Any, context_S: Any, embedding_VC: Any,
        norms: Any, qkv: Any, qkv_scale: Any, qkv_bias: Any, gains_LMD: Any, o: Any, o_scale: Any, o_bias: Any,
        gate_up: Any, gate_up_scale: Any, gate_up_bias: Any, down: Any, down_scale: Any, down_bias: Any, head_VC: Any,
        head_scale_V: Any, windows: Any, uses_rope: Any, eps: Any, scale: Any, memory: Any, num_threads: int,
        logits_SV: Any,
    ) -> None:  # fmt: skip
        rows, num_layers, num_columns = len(ids_S), qkv.shape[0], qkv.shape[1]
        hidden, inner, num_kv_heads = embedding_VC.shape[1], down.shape[2], memory.shape[3]
        num_heads = num_kv_heads * group
        x_SC, y_SC = np.empty((rows, hidden), np.float32), np.empty((rows, hidden), np.float32)
        qkv_SN = np.empty((rows, num_columns), np.float32)
        out_SHGD = np.empty((rows, num_kv_heads, group, head_dim), np.float32)
        out_SQ = out_SHGD.reshape(rows, num_heads * head_dim)
        gate_up_SJ, act_SI = np.empty((rows, 2 * inner), np.float32), np.empty((rows, inner), np.float32)
        score = np.empty((num_threads, num_kv_heads, group, block_size), np.float32)
        running = np.empty((num_threads, num_kv_heads, group, 2), np.float32)
        no_bias = np.empty(0, np.float32)
        for row in range(rows):
            for i in range(hidden):
                x_SC[row, i] = widen(embedding_VC[ids_S[row], i])
        for layer in range(num_layers):
            norm_rows(x_SC, norms[2 * layer], eps, y_SC)
            for thread in numba.prange(num_threads):
                first, last = num_columns * thread // num_threads, num_columns * (thread + 1) // num_threads
                multiply(qkv[layer], qkv_scale[layer], qkv_bias[layer], y_SC, qkv_SN, first, last, False)
            for thread in numba.prange(num_threads):
                for task in range(thread, rows * num_kv_heads, num_threads):
                    row, head = task // num_kv_heads, task % num_kv_heads
                    q_QD = qkv_SN[row, : num_heads * head_dim].reshape(num_heads, head_dim)
                    k_D = qkv_SN[row, (num_heads + head) * head_dim : (num_heads + head + 1) * head_dim]
                    v_D = qkv_SN[row, (num_heads + num_kv_heads + head) * head_dim :]
                    gains = gains_LMD[layer]
                    for g in range(head * group, (head + 1) * group):
                        gain = gains[g] if len(gains) else k_D[:0]
                        turn_head(q_QD[g], gain, eps, cos_SF[row], sin_SF[row], uses_rope[layer])
                    gain = gains[num_heads + head] if len(gains) else k_D[:0]
                    turn_head(k_D, gain, eps, cos_SF[row], sin_SF[row], uses_rope[layer])
                    slot = slot_mapping_S[row]
                    place = slot % block_size
                    pages = memory[slot // block_size, layer]
                    store_key(k_D, pages[0, head], place, block_size)
                    for d in range(head_dim):
                        pages[1, head, place * head_dim + d] = narrow(v_D[d])
                    end = context_S[row]
                    start = max(0, end - windows[layer]) if windows[layer] > 0 else 0
                    attend_heads(
                        q_QD.reshape(num_kv_heads, group, head_dim), memory, table_SB[row], layer, head, head + 1,
                        start, end, scale, score[thread], running[thread], out_SHGD[row], group, head_dim, block_size,
                    )  # fmt: skip
            for thread in numba.prange(num_threads):
                first, last = hidden * thread // num_threads, hidden * (thread + 1) // num_threads
                multiply(o[layer], o_scale[layer], o_bias[layer], out_SQ, x_SC, first, last, True)
            norm_rows(x_SC, norms[2 * layer + 1], eps, y_SC)
            for thread in numba.prange(num_threads):
                first, last = inner * thread // num_threads, inner * (thread + 1) // num_threads
                for start in (0, inner):
                    multiply(
                        gate_up[layer], gate_up_scale[layer], gate_up_bias[layer], y_SC, gate_up_SJ, start + first,
                        start + last, False,
                    )  # fmt: skip
                silu_mul_columns(gate_up_SJ, act_SI, first, last)
            for thread in numba.prange(num_threads):
                first, last = hidden * thread // num_threads, hidden * (thread + 1) // num_threads
                multiply(down[layer], down_scale[layer], down_bias[layer], act_SI, x_SC, first, last, True)
        norm_rows(x_SC, norms[2 * num_layers], eps, y_SC)
        vocab = len(head_VC)
        for thread in numba.prange(num_threads):
            first, last = vocab * thread // num_threads, vocab * (thread + 1) // num_threads
            multiply(head_VC, head_scale_V, no_bias, y_SC, logits_SV, first, last, False)

    return step
