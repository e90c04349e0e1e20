"""Attention of decode rows on the CPU, over the pages themselves; chunks are gathered for torch's fused attention.

Shape suffixes: T tokens of the step, S decode rows, B block-table entries, A query heads, H kv heads, D head_dim,
P tokens of a block, N blocks, L layers.
"""

from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aserve.model.attention import StepAttention
from aserve.model.attention.chunks import ChunkAttention, Workspace
from aserve.model.batch import ForwardBatch
from aserve.model.cpu_kernels.attention import make_attend
from aserve.model.kv_tensors import KVTensors


def array_of(tensor: Tensor) -> NDArray[Any]:
    """The same memory for kernels: bfloat16, which numpy does not know, as uint16."""
    return tensor.view(torch.int16).numpy().view(np.uint16) if tensor.dtype == torch.bfloat16 else tensor.numpy()


def pages_of(kv: KVTensors) -> NDArray[Any]:
    """[N, L, 2, H, P * D] of a cache in the order of rows."""
    shape = kv.shape
    return array_of(kv.memory).reshape(
        kv.num_blocks + 1, shape.num_layers, 2, shape.num_kv_heads, kv.block_size * shape.head_dim
    )


def use_threads() -> int:
    """Let kernels of the calling thread use as many threads as torch's operators do; returns their number."""
    num_threads: int = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)
    numba.set_num_threads(num_threads)
    if torch.get_num_threads() != num_threads:
        # numba's threads, when they are first made, set the OpenMP run time that both share to all of the cores.
        torch.set_num_threads(num_threads)
    return num_threads


class PageAttention:
    """For a cache in the order of rows, in bfloat16 or float32. A row's result does not depend on the other rows."""

    def __init__(self) -> None:
        self._workspace = Workspace()

    def plan(self, batch: ForwardBatch, kv: KVTensors) -> StepAttention:
        return _PageStep(batch, kv, ChunkAttention(batch, kv, self._workspace))


class _PageStep:
    def __init__(self, batch: ForwardBatch, kv: KVTensors, chunks: ChunkAttention) -> None:
        self._kv = kv
        self._chunks = chunks
        self._num_rows = num_rows = batch.num_decode_rows
        self._pages = pages_of(kv)
        self._table_SB = batch.block_tables_SB[:num_rows].numpy()
        self._context_S = batch.context_lens_S[:num_rows].numpy()
        self._num_threads = use_threads()

    def __call__(self, q_TAD: Tensor, layer: int, *, scale: float, window: int | None = None) -> Tensor:
        num_rows = self._num_rows
        if num_rows == len(q_TAD):
            out_TAD = torch.empty(q_TAD.shape, dtype=q_TAD.dtype)
        else:
            out_TAD = torch.zeros(q_TAD.shape, dtype=q_TAD.dtype)
        if num_rows:
            shape = self._kv.shape
            attend = make_attend(q_TAD.shape[1] // shape.num_kv_heads, shape.head_dim, self._kv.block_size)
            # Copied where it is a part of wider rows: kernels are compiled anew for each kind of stride that they meet.
            q_SAD = q_TAD[:num_rows].contiguous()
            attend(
                array_of(q_SAD), self._pages, self._table_SB, self._context_S, layer, window or 0, np.float32(scale),
                self._num_threads, array_of(out_TAD[:num_rows]),
            )  # fmt: skip
        self._chunks.attend(q_TAD, out_TAD, layer, scale=scale, window=window)
        return out_TAD
