"""Reference mode: a row's logits are the same to the bit whatever else is in the batch.

Matrix kernels choose their order of summation by the number of rows, so every forward here has the same number of
tokens: a batch is cut into tiles of TILE tokens, the last one padded, and the model below sees only those. Within such
a tile a row's place does not matter to the result (tested). ``TiledAttention`` does the same for chunks and contexts.
"""

from typing import Final

import torch
from torch import Tensor

from aserve.model.batch import ForwardBatch, KVShape, LanguageModel
from aserve.model.config import ModelConfig
from aserve.model.kv_tensors import KVTensors

TILE: Final = 16


class ReferenceModel:
    """A LanguageModel around another one, which should use ``TiledAttention`` in float32."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self.config: ModelConfig = model.config

    @property
    def kv_shape(self) -> KVShape:
        return self._model.kv_shape

    @property
    def weight_bytes(self) -> int:
        return self._model.weight_bytes

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: KVTensors) -> Tensor:
        """Tiles in order, so that a chunk's later tokens find the earlier ones' K/V written."""
        wanted = batch.logit_rows_R.tolist()
        device = batch.token_ids_T.device
        logits_RV = torch.empty(len(wanted), self.config.vocab_size, device=device)
        for start in range(0, batch.query_starts[-1], TILE):
            stop = min(start + TILE, batch.query_starts[-1])
            places = [place for place, row in enumerate(wanted) if start <= row < stop]
            for first in range(0, max(1, len(places)), TILE):
                part = places[first : first + TILE]
                rows = [wanted[place] - start for place in part]
                logits = self._model.forward(_tile(batch, start, stop, rows), kv)
                if part:
                    logits_RV[torch.tensor(part, device=device)] = logits[: len(part)]
        return logits_RV


def _tile(batch: ForwardBatch, start: int, stop: int, logit_rows: list[int]) -> ForwardBatch:
    """Tokens [start, stop) of the batch as TILE tokens; logits of ``logit_rows``, repeated up to TILE unless empty."""
    starts = batch.query_starts
    members = [row for row in range(len(starts) - 1) if starts[row] < stop and starts[row + 1] > start]
    ends = [min(stop, starts[row + 1]) for row in members]
    context_lens = [batch.context_lens[row] - (starts[row + 1] - end) for row, end in zip(members, ends, strict=True)]
    first, last = members[0], members[-1] + 1
    device = batch.token_ids_T.device
    padded_rows = logit_rows + logit_rows[:1] * (TILE - len(logit_rows))
    return ForwardBatch(
        token_ids_T=_padded(batch.token_ids_T[start:stop]),
        positions_T=_padded(batch.positions_T[start:stop]),
        slot_mapping_T=_padded(batch.slot_mapping_T[start:stop]),
        block_tables_SB=batch.block_tables_SB[first:last],
        context_lens_S=torch.tensor(context_lens, dtype=torch.int32, device=device),
        context_lens=context_lens,
        query_starts=[0, *(end - start for end in ends)],
        num_decode_rows=sum(row < batch.num_decode_rows for row in members),
        logit_rows_R=torch.tensor(padded_rows, dtype=torch.int64, device=device),
    )


def _padded(values: Tensor) -> Tensor:
    """Zeros behind: token 0 at position 0, written to the trash block."""
    return torch.nn.functional.pad(values, (0, TILE - len(values)))
