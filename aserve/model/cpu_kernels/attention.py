"""Attention of decode rows over K/V pages where they lie: no gather, each page read once for a group of query heads.

Pages are those of ``KVTensors``' order of rows: keys [D, P], so that a block's scores add up in P lanes, and values
[P, D]. A block's keys and values of all heads lie together, and are read in that order with a running softmax
(Milakov and Gimelshein, arXiv 1805.02867): one stretch of memory a block, which is what a core's prefetching follows.

Shape suffixes: S rows, A query heads, H kv heads, G = A / H, D head_dim, P tokens of a block, B block-table entries,
N blocks of the pool, L layers, X threads.
"""

from functools import cache
from typing import Any

import numba
import numpy as np

from aserve.model.cpu_kernels.compiler import as_float, exp, inlined, kernel, parallel_kernel, put
from aserve.model.cpu_kernels.vectors import add_page, highest, score_page


@kernel
def soften(score_P: Any, begin: int, end: int, scale: Any, most: Any) -> Any:
    """exp(scale * (score - most)) in place; returns their sum. Others than begin .. end - 1 become 0."""
    for p in range(begin):
        score_P[p] = np.float32(0)
    for p in range(end, len(score_P)):
        score_P[p] = np.float32(0)
    seen = score_P[begin:end]
    total = np.float32(0)
    for p in range(len(seen)):
        weight = exp((seen[p] - most) * scale)
        seen[p] = weight
        total += weight
    return total


@kernel
def rescale(values: Any, factor: Any) -> None:
    for i in range(len(values)):
        values[i] *= factor


@inlined
def attend_heads(
    q_HGD: Any, memory: Any, table_B: Any, layer: Any, first_head: Any, last_head: Any, start: Any, end: Any,
    scale: Any, score_HGP: Any, running_HG2: Any, out_HGD: Any, group: Any, head_dim: Any, block_size: Any,
) -> None:  # fmt: skip
    """One row's kv heads first_head .. last_head - 1 over tokens start .. end - 1.

    q_HGD, out_HGD: float32, of all heads. memory: float32, or bfloat16 as uint16, [N, L, 2, H, P * D]. score_HGP,
    running_HG2: float32 scratch, the latter the highest score so far and the sum of weights relative to it. group,
    head_dim, block_size: constants.
    """
    first, stop = start // block_size, (end + block_size - 1) // block_size
    for head in range(first_head, last_head):
        for g in range(group):
            running_HG2[head, g, 0], running_HG2[head, g, 1] = np.float32(-np.inf), np.float32(0)
            for d in range(head_dim):
                out_HGD[head, g, d] = np.float32(0)
    for index in range(first, stop):
        pages = memory[table_B[index], layer]
        next_pages = memory[table_B[min(index + 1, stop - 1)], layer]
        begin, inside = max(0, start - index * block_size), min(block_size, end - index * block_size)
        for head in range(first_head, last_head):
            after = next_pages[0, head]
            score_page(
                memory, pages[0, head].ctypes.data, after.ctypes.data, q_HGD[head].ctypes.data,
                score_HGP[head].ctypes.data, group, head_dim, block_size,
            )  # fmt: skip
        for head in range(first_head, last_head):
            for g in range(group):
                score_P = score_HGP[head, g]
                before = running_HG2[head, g, 0]
                most = max(before, highest(score_P[begin:inside].ctypes.data, inside - begin))
                if most > before:
                    factor = np.float32(0) if before == -np.inf else exp((before - most) * scale)
                    rescale(out_HGD[head, g], factor)
                    running_HG2[head, g, 0] = most
                    running_HG2[head, g, 1] *= factor
                running_HG2[head, g, 1] += soften(score_P, begin, inside, scale, most)
            after = next_pages[1, head]
            add_page(
                memory, pages[1, head].ctypes.data, after.ctypes.data, score_HGP[head].ctypes.data, inside,
                out_HGD[head].ctypes.data, group, head_dim, block_size,
            )  # fmt: skip
    for head in range(first_head, last_head):
        for g in range(group):
            rescale(out_HGD[head, g], np.float32(1) / running_HG2[head, g, 1])


@cache
def make_attend(group: int, head_dim: int, block_size: int) -> Any:
    """``attend(q_SAD, memory, table_SB, context_S, layer, window, scale, num_threads, out_SAD)``: all rows of a step.

    q_SAD, out_SAD: as memory's type, the latter contiguous. window: 0 for none. A thread takes whole rows where there
    are enough of them, else single kv heads.
    """

    @parallel_kernel
    def attend(
        q_SAD: Any, memory: Any, table_SB: Any, context_S: Any, layer: int, window: int, scale: Any, num_threads: int,
        out_SAD: Any,
    ) -> None:  # fmt: skip
        num_rows, num_kv_heads = q_SAD.shape[0], memory.shape[3]
        heads_a_task = num_kv_heads if num_rows >= 2 * num_threads else 1
        tasks_a_row = num_kv_heads // heads_a_task
        for thread in numba.prange(num_threads):
            q_HGD = np.empty((num_kv_heads, group, head_dim), np.float32)
            out_HGD = np.empty((num_kv_heads, group, head_dim), np.float32)
            score_HGP = np.empty((num_kv_heads, group, block_size), np.float32)
            running_HG2 = np.empty((num_kv_heads, group, 2), np.float32)
            for task in range(thread, num_rows * tasks_a_row, num_threads):
                row, first_head = task // tasks_a_row, task % tasks_a_row * heads_a_task
                last_head = first_head + heads_a_task
                for head in range(first_head, last_head):
                    for g in range(group):
                        for d in range(head_dim):
                            q_HGD[head, g, d] = as_float(q_SAD[row, head * group + g, d])
                end = context_S[row]
                start = max(0, end - window) if window > 0 else 0
                attend_heads(
                    q_HGD, memory, table_SB[row], layer, first_head, last_head, start, end, scale, score_HGP,
                    running_HG2, out_HGD, group, head_dim, block_size,
                )  # fmt: skip
                for head in range(first_head, last_head):
                    for g in range(group):
                        for d in range(head_dim):
                            put(out_SAD[row, head * group + g], d, out_HGD[head, g, d])

    return attend
