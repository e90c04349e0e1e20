"""Any other causal language model of transformers: its own modelling code, with our paged attention inside.

transformers calls attention through a table of functions by name. Ours writes the step's K/V into the paged cache and
attends there; transformers then builds neither a mask nor a cache of its own. All tokens of a step go in as one row,
with their positions beside them. Each model is tried at load against its own eager attention, so that one whose code
departs from this (biases in the scores, state beside the cache, other masks) is refused rather than served wrong.

Shape suffixes: T tokens of the step, R rows whose logits are wanted, A query heads, H kv heads, D head_dim,
V vocabulary.
"""

import inspect
import warnings
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from aserve.errors import ModelError
from aserve.model.attention import PagedAttention, StepAttention
from aserve.model.attention.sdpa import SdpaAttention
from aserve.model.attention.tiled import TiledAttention
from aserve.model.batch import ForwardBatch, KVShape
from aserve.model.config import ModelConfig
from aserve.model.kv_tensors import KVTensors

_ATTENTION_NAME: Final = "aserve"
_PLAIN_LAYERS: Final = {"full_attention", "sliding_attention"}
PROBE_TOKENS: Final = 6


class PagedStep(Protocol):
    """What the attention function finds in its context: the present step."""

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
        """Write K and V into the layer's cache, and return what the queries find there, [T, A, D], contiguous."""
        ...


@dataclass(slots=True, eq=False)
class _Step:
    """A PagedStep of a ForwardBatch."""

    batch: ForwardBatch
    kv: KVTensors
    plain: PagedAttention
    plans: dict[float | None, StepAttention] = field(default_factory=dict)

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
        self.kv.write(layer, self.batch.slot_mapping_T, torch.stack((k_THD, v_THD), 1).to(self.kv.shape.dtype))
        if softcap not in self.plans:
            kernel = self.plain if softcap is None else TiledAttention(softcap=softcap)
            self.plans[softcap] = kernel.plan(self.batch, self.kv)
        return self.plans[softcap](q_TAD.contiguous(), layer, scale=scale, window=window)


@dataclass(slots=True, eq=False)
class _Survey:
    """A first look at a model: which layers call attention, and what they leave in a cache.

    shapes: kv heads and their size by layer. num_heads: the most query heads. windows: 0 for full attention.
    """

    shapes: dict[int, tuple[int, int]] = field(default_factory=dict)
    num_heads: int = 0
    windows: set[int] = field(default_factory=set)


_context: ContextVar[PagedStep | _Survey] = ContextVar("aserve_forward")


def load_fallback(
    folder: Path, config: ModelConfig, *, dtype: torch.dtype, device: torch.device | str, dummy: bool, reference: bool
) -> "FallbackModel":
    """Loads the folder through transformers and tries it. Raises ModelError, with the reason, if that fails."""
    model = FallbackModel(load_module(folder, config, dtype=dtype, device=device, dummy=dummy), reference=reference)
    model.try_out()
    return model


def load_module(
    folder: Path, config: ModelConfig, *, dtype: torch.dtype, device: torch.device | str, dummy: bool
) -> "TransformersModule":
    """The folder's model as transformers makes it, on ``device``, looked over. Raises ModelError, with the reason."""
    import transformers

    _register()
    why = f"This {config.model_type} model cannot be served:"
    try:
        hf_config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of foreign code on a foreign file
        raise ModelError(f"{why} its config does not load: {_sentence(error)}") from error
    _refuse_by_config(hf_config, why)
    try:
        if dummy:
            torch.manual_seed(0)
            auto_model: Any = transformers.AutoModelForCausalLM
            module = auto_model.from_config(
                hf_config, dtype=dtype, attn_implementation=_ATTENTION_NAME, trust_remote_code=False
            )
        else:
            module = _from_pretrained(transformers, folder, hf_config, dtype, why)
    except ModelError:
        raise
    except Exception as error:  # of foreign code on a foreign file
        raise ModelError(
            f"{why} {config.fallback_reason}, and transformers does not load it: {_sentence(error)}"
        ) from error
    module = module.eval().requires_grad_(False).to(device)
    return TransformersModule(module, _completed(config, hf_config), dtype=dtype, why=why)


class TransformersModule:
    """transformers' model, and what a look at it has told.

    kv_shape: in the order of a CPU's cache. num_heads: of queries. windows: of its layers, 0 for full attention.
    """

    def __init__(self, module: Any, config: ModelConfig, *, dtype: torch.dtype, why: str) -> None:
        """why: how a refusal begins. Raises ModelError."""
        self.config = config
        self.device: torch.device = module.device
        self._module = module
        self._why = why
        self._selects_logits = "logits_to_keep" in inspect.signature(module.forward).parameters
        survey = self._survey()
        num_kv_heads, head_dim = survey.shapes[0]
        self.kv_shape = KVShape(
            num_layers=len(survey.shapes), num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype
        )
        self.num_heads = survey.num_heads
        self.windows = tuple(sorted(survey.windows))

    @property
    def weight_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self._module.parameters())  # shared ones come once

    def logits(self, step: PagedStep, token_ids_T: Tensor, positions_T: Tensor, rows_R: Tensor | None = None) -> Tensor:
        """Of some rows, or of all, in the module's own dtype. Under inference_mode."""
        token = _context.set(step)
        try:
            return self._logits(token_ids_T, positions_T, rows_R)
        finally:
            _context.reset(token)

    def probe(self) -> tuple[Tensor, Tensor]:
        """Token ids and positions for ``check``: int64, a few."""
        positions = torch.arange(PROBE_TOKENS, device=self.device)
        return positions % self.config.vocab_size, positions

    def check(self, ours_TV: Tensor) -> None:
        """Raises ModelError unless these logits of the probe are what the module's own eager attention gives."""
        token_ids, positions = self.probe()
        own = self._module.config._attn_implementation
        try:
            self._module.set_attn_implementation("eager")
            with torch.inference_mode():
                theirs_TV = self._logits(token_ids, positions, None).float()
        except torch.OutOfMemoryError:  # a RuntimeError, which says nothing of the model
            raise
        except (ValueError, TypeError, AttributeError, RuntimeError) as error:
            raise ModelError(f"{self._why} it cannot be tried: {_sentence(error)}") from error
        finally:
            self._module.set_attn_implementation(own)
        distance = float((ours_TV - theirs_TV).square().mean().sqrt() / theirs_TV.std().clamp_min(1e-6))
        if not distance < (1e-3 if self.kv_shape.dtype == torch.float32 else 0.1):
            raise ModelError(
                f"{self._why} paged attention does not give its own logits (off by {distance:.2g} of their spread)."
            )

    def refuse(self, reason: str) -> ModelError:
        return ModelError(f"{self._why} {reason}")

    def _survey(self) -> _Survey:
        """Runs two tokens to learn what each layer caches. Raises ModelError unless that is one shape in all layers."""
        survey = _Survey()
        token = _context.set(survey)
        try:
            with torch.inference_mode():
                probe = torch.arange(2, device=self.device)
                self._logits(probe, probe, None)
        except torch.OutOfMemoryError:  # a RuntimeError, which says nothing of the model
            raise
        except (ValueError, TypeError, AttributeError, RuntimeError, KeyError, IndexError) as error:
            raise ModelError(f"{self._why} it does not run: {_sentence(error)}") from error
        finally:
            _context.reset(token)
        if not survey.shapes:
            raise ModelError(f"{self._why} it has no attention to page.")
        if sorted(survey.shapes) != list(range(len(survey.shapes))) or len(set(survey.shapes.values())) > 1:
            raise ModelError(f"{self._why} its layers do not all cache the same shape.")
        return survey

    def _logits(self, token_ids_T: Tensor, positions_T: Tensor, rows_R: Tensor | None) -> Tensor:
        selection = {"logits_to_keep": rows_R} if self._selects_logits and rows_R is not None else {}
        output = self._module(
            input_ids=token_ids_T.unsqueeze(0), position_ids=positions_T.unsqueeze(0), use_cache=False, **selection
        )
        logits_TV: Tensor = output.logits[0]
        return logits_TV if selection or rows_R is None else logits_TV[rows_R]


class FallbackModel:
    """A LanguageModel around transformers' module."""

    def __init__(self, module: TransformersModule, *, reference: bool) -> None:
        self.config = module.config
        self.kv_shape = module.kv_shape
        self._module = module
        self._attention: PagedAttention = TiledAttention() if reference else SdpaAttention()

    @property
    def weight_bytes(self) -> int:
        return self._module.weight_bytes

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: KVTensors) -> Tensor:
        step = _Step(batch, kv, self._attention)
        return self._module.logits(step, batch.token_ids_T, batch.positions_T, batch.logit_rows_R).float()

    def try_out(self) -> None:
        """Raises ModelError unless a short prompt in two chunks gives the logits that its own eager attention gives."""
        token_ids, positions = self._module.probe()
        kv = KVTensors.allocate(self.kv_shape, num_blocks=PROBE_TOKENS, block_size=1, device=positions.device)
        parts = ((0, 4), (4, PROBE_TOKENS))
        self._module.check(
            torch.cat([self.forward(_probe(token_ids, positions, start, stop), kv) for start, stop in parts])
        )


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [1, A, T, D], key and value [1, H, T, D] -> [1, T, A, D]."""
    step = _context.get()
    _, num_heads, num_tokens, head_dim = query.shape
    num_kv_heads = key.shape[1]
    layer: int = getattr(module, "layer_idx", -1)
    if isinstance(step, _Survey):
        _check_call(module, key, value, attention_mask, kwargs)
        if layer in step.shapes:
            raise ValueError("its attention layers are not numbered")
        step.shapes[layer] = (num_kv_heads, head_dim)
        step.num_heads = max(step.num_heads, num_heads)
        step.windows.add(sliding_window or 0)
        return query.new_zeros(1, num_tokens, num_heads, head_dim), None
    out_TAD = step.attend(
        layer,
        *(x[0].transpose(0, 1) for x in (query, key, value)),
        scale=head_dim**-0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
    )
    return out_TAD.unsqueeze(0), None


def _check_call(module: Any, key: Tensor, value: Tensor, mask: Tensor | None, kwargs: dict[str, Any]) -> None:
    """Raises ValueError for what this attention does not do."""
    if mask is not None:
        raise ValueError("it brings its own attention mask")
    if key.shape != value.shape:
        raise ValueError("its keys and values differ in size")
    if getattr(module, "is_causal", True) is False or kwargs.get("is_causal") is False:
        raise ValueError("its attention is not causal")
    for name in ("s_aux", "sinks", "position_bias", "head_mask"):
        if kwargs.get(name) is not None:
            raise ValueError(f"its attention takes {name}")


def _register() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(_ATTENTION_NAME, _attention)


def _refuse_by_config(hf_config: Any, why: str) -> None:
    if hf_config.is_encoder_decoder:
        raise ModelError(f"{why} it is an encoder and decoder pair.")
    if hf_config.get_text_config() is not hf_config:
        raise ModelError(f"{why} it is multimodal.")
    layer_types = set(getattr(hf_config, "layer_types", None) or ()) - _PLAIN_LAYERS
    if layer_types:
        raise ModelError(f"{why} it has layers of {', '.join(sorted(layer_types))}.")


def _from_pretrained(transformers: Any, folder: Path, hf_config: Any, dtype: torch.dtype, why: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module, report = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            config=hf_config,
            dtype=dtype,
            attn_implementation=_ATTENTION_NAME,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    if report["missing_keys"]:
        missing = ", ".join(sorted(report["missing_keys"])[:4])
        raise ModelError(f"{why} its checkpoint lacks {missing}.")
    return module


def _completed(config: ModelConfig, hf_config: Any) -> ModelConfig:
    """What config.json left to transformers' defaults. Rope that changes beyond the original length is served up to it:
    transformers decides by the longest sequence of a batch, which here holds many."""
    positions = getattr(hf_config, "max_position_embeddings", 0) or config.max_position_embeddings
    rope = getattr(hf_config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        positions = min(positions, int(rope["original_max_position_embeddings"]))
    return replace(config, vocab_size=hf_config.vocab_size, max_position_embeddings=positions)


def _probe(token_ids: Tensor, positions: Tensor, start: int, stop: int) -> ForwardBatch:
    """Tokens [start, stop) of one sequence in blocks of one token, block 1 first."""
    return ForwardBatch(
        token_ids_T=token_ids[start:stop],
        positions_T=positions[start:stop],
        slot_mapping_T=positions[start:stop] + 1,
        block_tables_SB=(positions[:stop] + 1).int().unsqueeze(0),
        context_lens_S=torch.tensor([stop], dtype=torch.int32, device=positions.device),
        context_lens=[stop],
        query_starts=[0, stop - start],
        num_decode_rows=0,
        logit_rows_R=positions[: stop - start],
    )


def _sentence(error: Exception) -> str:
    """The first line, with exactly one full stop. Of a KeyError the text is but the key."""
    text = str(error).strip().partition("\n")[0].rstrip(".")
    return f"{type(error).__name__} {text}".strip() + "." if isinstance(error, KeyError) or not text else f"{text}."
