"""transformers' own code on a GPU: the steps, kernels of attention and graphs of ``cuda_steps``, around its module.

A step's forward is captured as the native decoder's is, its own memory taken from the graphs' pool. A model whose code
looks at values on the host (experts that are looped over, rope that depends on the longest sequence) cannot be.

Shape suffixes: S sequences of the step, T tokens, R rows whose logits are wanted, A query heads, H kv heads,
D head_dim, V vocabulary.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from aserve.errors import ModelError, NotOnGpu
from aserve.model.config import ModelConfig
from aserve.model.cuda_decoder import ForwardTensors
from aserve.model.fallback import TransformersModule, load_module
from aserve.model.kernels.attention_chunks import mixed_attention
from aserve.model.kernels.attention_decode import decode_attention
from aserve.model.kernels.attention_plan import AttentionPlan
from aserve.model.kv_tensors import KVTensors

_PROBE_BLOCK: Final = 16
_PROBE_PARTS: Final = ((0, 4), (4, 5), (5, 6))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Heads:
    """What attention's plans have to know."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLogits:
    """What a forward leaves: the logits of all its tokens, in the module's dtype. Of the largest step."""

    logits_TV: Tensor


class _CudaStep:
    """A ``fallback.PagedStep`` of a step's tensors."""

    def __init__(self, step: ForwardTensors, kv_layers: tuple[Tensor, ...]) -> None:
        self._step = step
        self._kv_layers = kv_layers
        block_size = kv_layers[0].shape[3]
        slots_T = step.slot_mapping_T.long()
        self._slots = slots_T // block_size, slots_T % block_size

    def attend(
        self,
        layer: int,
        q_TAD: Tensor,
        k_THD: Tensor,
        v_THD: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        step, kv_layer = self._step, self._kv_layers[layer]
        for cache, x_THD in zip(kv_layer, (k_THD, v_THD), strict=True):
            cache.permute(1, 2, 0, 3).index_put_(self._slots, x_THD.to(cache.dtype))
        # A row always gets a result, but rows of padding behind chunks, and those of chunks that are done, are left as
        # they are, and go through the rest of the module: not with what the memory held before, which may be NaN.
        new = q_TAD.new_zeros if step.has_chunks else q_TAD.new_empty
        out_TAD = new(q_TAD.shape)
        plan, q_TAD = step.plans[window or 0], q_TAD.contiguous()
        if step.has_chunks:
            mixed_attention(
                q_TAD, kv_layer, step.block_tables_SB, plan, scale=scale, softcap=softcap or 0.0, side=step.side,
                out_TAD=out_TAD,
            )  # fmt: skip
        else:
            decode_attention(
                q_TAD, kv_layer, step.block_tables_SB, plan, scale=scale, softcap=softcap or 0.0, out_TAD=out_TAD
            )
        return out_TAD


class CudaFallback:
    """A ``cuda_decoder.StepDecoder`` around transformers' module. All of a step's tokens get logits, whoever wants
    some of a prompt's finds them there."""

    reference = False

    def __init__(self, module: TransformersModule) -> None:
        self.config = module.config
        self.kv_shape = replace(module.kv_shape, layout="blocks")
        self.dtype = module.kv_shape.dtype
        self.shape = _Heads(
            num_heads=module.num_heads, num_kv_heads=self.kv_shape.num_kv_heads, head_dim=self.kv_shape.head_dim
        )
        self.windows = module.windows
        self._module = module

    @property
    def weight_bytes(self) -> int:
        return self._module.weight_bytes

    def prepare(self, num_positions: int) -> None:
        """Nothing: the module knows its positions."""

    def allocate(self, num_tokens: int, *, num_multiprocessors: int) -> StepLogits:
        """For steps of at most so many tokens, on any device."""
        size = num_tokens, self.config.vocab_size
        return StepLogits(logits_TV=torch.zeros(size, dtype=self.dtype, device=self._module.device))

    def forward(
        self,
        step: ForwardTensors,
        kv_layers: tuple[Tensor, ...],
        memory: StepLogits,
        *,
        logits_SV: Tensor,
        each_kind_once: bool = False,
    ) -> None:
        """As ``CudaDecoder.forward``. each_kind_once: is not known here, all layers run."""
        paged = _CudaStep(step, kv_layers)
        logits_TV = self._module.logits(paged, step.token_ids_T.long(), step.positions_T.long())
        memory.logits_TV[: len(logits_TV)].copy_(logits_TV)
        self.logits_of(step.last_rows_S, memory, logits_RV=logits_SV)

    def logits_of(self, rows_R: Tensor, memory: StepLogits, *, logits_RV: Tensor) -> None:
        """The logits of some rows of the newest forward, float32. rows: int32."""
        logits_RV.copy_(memory.logits_TV[rows_R.long()])

    def try_out(self, num_multiprocessors: int) -> None:
        """Raises NotOnGpu unless a prompt, as a chunk and two rows, gives the logits of its own eager attention."""
        token_ids, positions = (x.int() for x in self._module.probe())
        device = positions.device
        memory = self.allocate(len(positions), num_multiprocessors=num_multiprocessors)
        kv = KVTensors.allocate(self.kv_shape, num_blocks=1, block_size=_PROBE_BLOCK, device=device)
        found = []
        for start, stop in _PROBE_PARTS:
            count = stop - start
            rows = torch.tensor([0]), torch.tensor([0, count]), torch.tensor([stop])
            slots_S, starts, context_lens_S = (x.to(device, torch.int32) for x in rows)
            plans = {}
            for window in self.windows:
                plans[window] = AttentionPlan.allocate(
                    num_sequences=1,
                    num_chunk_tokens=count if count > 1 else 0,
                    num_heads=self.shape.num_heads,
                    num_kv_heads=self.shape.num_kv_heads,
                    head_dim=self.shape.head_dim,
                    num_multiprocessors=num_multiprocessors,
                    dtype=self.dtype,
                    window=window,
                    context_max=_PROBE_BLOCK,
                    device=device,
                )
                plans[window].fill(slots_S, starts, context_lens_S)
            step = ForwardTensors(
                token_ids_T=token_ids[start:stop],
                positions_T=positions[start:stop],
                slot_mapping_T=positions[start:stop] + _PROBE_BLOCK,
                last_rows_S=starts[1:] - 1,
                block_tables_SB=torch.ones(1, 1, dtype=torch.int32, device=device),
                plans=plans,
                has_chunks=count > 1,
            )
            logits_SV = torch.empty(1, self.config.vocab_size, device=device)
            self.forward(step, kv.layers, memory, logits_SV=logits_SV)
            found.append(memory.logits_TV[:count].float().clone())
        try:
            self._module.check(torch.cat(found))
        except ModelError as error:
            raise NotOnGpu(error.message) from error


def load_cuda_fallback(
    folder: Path, config: ModelConfig, *, dtype: torch.dtype, device: torch.device, dummy: bool
) -> CudaFallback:
    """The folder's model on ``device``. Raises ModelError, with the reason, if it cannot be served."""
    return CudaFallback(load_module(folder, config, dtype=dtype, device=device, dummy=dummy))
