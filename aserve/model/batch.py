"""The contract between the runner and a model: one ForwardBatch in, logits out.

Shape suffixes: T tokens of the step, S sequences in it, B blocks of a table row, R rows whose logits are wanted,
V vocabulary.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from aserve.model.config import ModelConfig
    from aserve.model.kv_tensors import KVTensors


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShape:
    """What one token leaves in the cache: K and V of ``num_kv_heads`` heads in each layer.

    layout: how the cache's memory is ordered, as the model's attention wants it; see ``KVTensors``.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    layout: Literal["heads", "rows", "blocks"] = "heads"

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """T tokens of S sequences: first ``num_decode_rows`` sequences of one token each, then the chunks.

    token_ids_T, positions_T: int64. slot_mapping_T: int64, where a token's K/V goes: block * block_size + offset;
    padding and done rows point into block 0.
    block_tables_SB: int32; entries beyond a sequence's context may hold anything that is a valid block id (0 is).
    query_starts: S + 1 host ints; sequence s has tokens [query_starts[s], query_starts[s + 1]), positions consecutive.
    Tokens from query_starts[S] on, if any, are padding: they write to block 0 and attend to nothing.
    context_lens: S host ints, tokens of the sequence in the cache after this step, the step's own included (>= 1).
    context_lens_S: the same on the device, int32.
    logit_rows_R: int64, indices into T.
    """

    token_ids_T: Tensor
    positions_T: Tensor
    slot_mapping_T: Tensor
    block_tables_SB: Tensor
    context_lens_S: Tensor
    context_lens: list[int]
    query_starts: list[int]
    num_decode_rows: int
    logit_rows_R: Tensor


class LanguageModel(Protocol):
    """A causal language model over paged K/V. ``loader.load_model`` makes one; not safe for concurrent forwards."""

    config: "ModelConfig"

    @property
    def kv_shape(self) -> KVShape:
        """What ``KVTensors.allocate`` has to provide."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights in memory. Tied ones count once, unless the head keeps a packed copy of its own."""
        ...

    def forward(self, batch: ForwardBatch, kv: "KVTensors") -> Tensor:
        """Write the step's K/V into ``kv`` and return logits_RV in float32. Runs under inference_mode by itself."""
        ...
