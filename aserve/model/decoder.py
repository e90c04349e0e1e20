"""One dense decoder for the Llama, Mistral, Qwen2, Qwen3 and SmolLM families, after a single parametric shape.

Plain tensors and functions, no module tree: at one row a step is bound by the Python around its kernels.

Shape suffixes: T tokens of the step, R rows whose logits are wanted, A query heads, H kv heads, D head_dim,
C hidden size, I intermediate size, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from aserve.model.attention import PagedAttention
from aserve.model.batch import ForwardBatch, KVShape
from aserve.model.config import DecoderShape, ModelConfig
from aserve.model.kv_tensors import KVTensors
from aserve.model.linear import Linear, MakeLinear, PlainLinear, make_linear
from aserve.model.norm import RmsNorm
from aserve.model.rope import cos_sin, inverse_frequencies, rotate_

ReadTensor = Callable[[str], Tensor]
"""A checkpoint's tensor by name, in the dtype and on the device where the model runs."""


def tensor_shapes(shape: DecoderShape, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint of this shape holds, by its name in transformers."""
    q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    hidden, intermediate = shape.hidden_size, shape.intermediate_size
    linears = {
        "self_attn.q_proj": (q_size, hidden, shape.qkv_bias),
        "self_attn.k_proj": (kv_size, hidden, shape.qkv_bias),
        "self_attn.v_proj": (kv_size, hidden, shape.qkv_bias),
        "self_attn.o_proj": (hidden, q_size, shape.o_bias),
        "mlp.gate_proj": (intermediate, hidden, shape.mlp_bias),
        "mlp.up_proj": (intermediate, hidden, shape.mlp_bias),
        "mlp.down_proj": (hidden, intermediate, shape.mlp_bias),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if shape.qk_norm:
        norms |= {"self_attn.q_norm": shape.head_dim, "self_attn.k_norm": shape.head_dim}

    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab_size, hidden)}
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}."
        for name, (num_outputs, num_inputs, has_bias) in linears.items():
            shapes[f"{prefix}{name}.weight"] = (num_outputs, num_inputs)
            if has_bias:
                shapes[f"{prefix}{name}.bias"] = (num_outputs,)
        shapes |= {f"{prefix}{name}.weight": (size,) for name, size in norms.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not shape.tied_embeddings:
        shapes["lm_head.weight"] = (vocab_size, hidden)
    return shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """qkv: q, k and v stacked. gate_up: gate, then up. qk_norm_AHD: one gain a head, q's then k's; None without."""

    input_norm: RmsNorm
    qkv: Linear
    qk_norm_AHD: Tensor | None
    o: Linear
    post_norm: RmsNorm
    gate_up: Linear
    down: Linear
    window: int | None
    uses_rope: bool


class Decoder:
    """A LanguageModel that keeps activations in the weights' dtype."""

    def __init__(
        self,
        config: ModelConfig,
        read: ReadTensor,
        *,
        dtype: torch.dtype,
        attention: PagedAttention,
        layout: Literal["heads", "rows"] = "heads",
        linear: MakeLinear = make_linear,
    ) -> None:
        """layout: what ``attention`` wants of the cache. linear: how the matrices are kept and multiplied."""
        if config.decoder is None:
            raise AssertionError(f"{config.model_type} has no native shape: {config.fallback_reason}")
        self.config = config
        self._shape = shape = config.decoder
        self._dtype = dtype
        self._attention = attention
        self._layout: Literal["heads", "rows"] = layout
        self._embedding_VC = read("model.embed_tokens.weight")
        self._frequencies = inverse_frequencies(shape.rope, shape.head_dim).to(self._embedding_VC.device)
        self._layers = [_read_layer(shape, layer, read, linear) for layer in range(shape.num_layers)]
        self._norm = RmsNorm(read("model.norm.weight"), shape.rms_norm_eps)
        self._head = linear(self._embedding_VC if shape.tied_embeddings else read("lm_head.weight"), None)

    @property
    def kv_shape(self) -> KVShape:
        shape = self._shape
        return KVShape(
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=self._dtype,
            layout=self._layout,
        )

    @property
    def weight_bytes(self) -> int:
        linears = [linear for layer in self._layers for linear in (layer.qkv, layer.o, layer.gate_up, layer.down)]
        norms = [norm for layer in self._layers for norm in (layer.input_norm, layer.post_norm)]
        shares_embedding = self._shape.tied_embeddings and isinstance(self._head, PlainLinear)
        return (
            self._embedding_VC.nbytes
            + (0 if shares_embedding else self._head.num_bytes)
            + self._norm.num_bytes
            + sum(linear.num_bytes for linear in linears)
            + sum(norm.num_bytes for norm in norms)
        )

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: KVTensors) -> Tensor:
        """See LanguageModel. Writes to ``kv`` only where the slot mapping says."""
        shape = self._shape
        num_tokens = len(batch.token_ids_T)
        num_heads, num_kv_heads, head_dim, eps = shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.rms_norm_eps
        q_size, qk_size = num_heads * head_dim, (num_heads + num_kv_heads) * head_dim
        scale = head_dim**-0.5
        attend = self._attention.plan(batch, kv)
        slots = kv.slots(batch.slot_mapping_T)
        cos, sin = cos_sin(self._frequencies, batch.positions_T, shape.rope.attention_factor, self._dtype)

        x_TC = F.embedding(batch.token_ids_T, self._embedding_VC)
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(layer.input_norm(x_TC))
            qk_TAD = qkv[:, :qk_size].view(num_tokens, num_heads + num_kv_heads, head_dim)
            if layer.qk_norm_AHD is not None:
                qk_TAD.copy_(F.rms_norm(qk_TAD, (head_dim,), None, eps) * layer.qk_norm_AHD)
            if layer.uses_rope:
                rotate_(qk_TAD, cos, sin)
            kv.put(index, slots, qk_TAD[:, num_heads:], qkv[:, qk_size:].view(num_tokens, num_kv_heads, head_dim))
            out_TAD = attend(qk_TAD[:, :num_heads], index, scale=scale, window=layer.window)
            x_TC = layer.o(out_TAD.view(num_tokens, q_size)).add_(x_TC)

            gate_TI, up_TI = layer.gate_up(layer.post_norm(x_TC)).chunk(2, -1)
            x_TC = layer.down(F.silu(gate_TI).mul_(up_TI)).add_(x_TC)

        if len(batch.logit_rows_R) == 0:
            return x_TC.new_empty(0, self.config.vocab_size, dtype=torch.float32)
        x_RC = self._norm(x_TC[batch.logit_rows_R])
        return self._head(x_RC).float()


def _read_layer(shape: DecoderShape, layer: int, read: ReadTensor, make: MakeLinear) -> _Layer:
    prefix = f"model.layers.{layer}."

    def linear(*names: str, has_bias: bool) -> Linear:
        """One matrix of several stacked ones: a third of the calls, and longer ones."""
        weight = torch.cat([read(f"{prefix}{name}.weight") for name in names])
        return make(weight, torch.cat([read(f"{prefix}{name}.bias") for name in names]) if has_bias else None)

    qk_norm_AHD = None
    if shape.qk_norm:
        gains = (("q_norm", shape.num_heads), ("k_norm", shape.num_kv_heads))
        qk_norm_AHD = torch.cat([read(f"{prefix}self_attn.{name}.weight").expand(n, -1) for name, n in gains])
    return _Layer(
        input_norm=RmsNorm(read(f"{prefix}input_layernorm.weight"), shape.rms_norm_eps),
        qkv=linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", has_bias=shape.qkv_bias),
        qk_norm_AHD=qk_norm_AHD,
        o=linear("self_attn.o_proj", has_bias=shape.o_bias),
        post_norm=RmsNorm(read(f"{prefix}post_attention_layernorm.weight"), shape.rms_norm_eps),
        gate_up=linear("mlp.gate_proj", "mlp.up_proj", has_bias=shape.mlp_bias),
        down=linear("mlp.down_proj", has_bias=shape.mlp_bias),
        window=shape.windows[layer],
        uses_rope=shape.uses_rope[layer],
    )
