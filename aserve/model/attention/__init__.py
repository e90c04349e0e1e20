"""Attention over the paged cache: one interface, several kernels behind it.

Shape suffixes: T tokens of the step, A query heads, D head_dim.
"""

from typing import Protocol

from torch import Tensor

from aserve.model.batch import ForwardBatch
from aserve.model.kv_tensors import KVTensors


class StepAttention(Protocol):
    """What one step's layers share."""

    def __call__(self, q_TAD: Tensor, layer: int, *, scale: float, window: int | None = None) -> Tensor:
        """Causal attention of each query over its own sequence in the cache, which holds the step's K/V already.

        window: only the last ``window`` tokens, the query's own included. Returns out_TAD, contiguous; rows of padding
        are zero. Only the sequence's own tokens enter a result, whatever else its blocks hold, NaN included.
        """
        ...


class PagedAttention(Protocol):
    """A kernel with its workspace: one step at a time."""

    def plan(self, batch: ForwardBatch, kv: KVTensors) -> StepAttention:
        """Everything that depends on the step alone, done once rather than in each layer."""
        ...
