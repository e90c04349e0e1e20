"""The decoder of ``decoder.py`` for a CPU that multiplies bfloat16: torch's matrix products, our kernels between them.

A step of a few decode rows, which is bound by reading weights, is one call of compiled code. Larger steps and prompts
go through oneDNN's products, which are as fast as the processor at many rows, and one pass of ours for each of what
lies between: torch would make some twenty operators a layer of it.

Shape suffixes: T tokens of the step, R rows whose logits are wanted, S decode rows, A query heads, H kv heads,
D head_dim, F = D / 2, M = A + H, C hidden size, I intermediate size, N columns of the QKV
product, V vocabulary, L layers.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from aserve.device.memory import available_bytes
from aserve.errors import ModelError
from aserve.model.attention.pages import PageAttention, array_of, pages_of, use_threads
from aserve.model.batch import ForwardBatch, KVShape
from aserve.model.config import DecoderShape, ModelConfig
from aserve.model.cpu_kernels.elementwise import add_rms_norm, rotate_and_cache, silu_mul
from aserve.model.cpu_kernels.few_rows import ROW_COUNTS, ROWS_MAX, make_step
from aserve.model.decoder import ReadTensor, tensor_shapes
from aserve.model.kv_tensors import KVTensors
from aserve.model.linear import PackedLinear
from aserve.model.rope import cos_sin, inverse_frequencies

Quantization = Literal["none", "int8"]

_MULTIPLE = 16
"""Of a matrix's inputs, for the kernel of few rows."""

_PACKED_BYTES, _SHARE_MAX = 2, 0.5
"""A packed weight's bytes; and how much of the free memory all weights may take with a second copy for few rows."""


def round_to_int8(weight_NK: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [N, K] and float32 scales [N]: symmetric, each output's largest weight is 127."""
    weight_NK = weight_NK.float()
    scale_N = weight_NK.abs().amax(1).clamp_min_(1e-12) / 127
    return (weight_NK / scale_N.unsqueeze(1)).round_().to(torch.int8), scale_N


class _Matrix:
    """One weight of all layers, twice: packed for many rows, and stacked in plain order for few if it is kept so.

    rows_LNK: int8, or bfloat16 as uint16; [L, 0, 0] where it is not kept. scale_LN: [L, 0] without quantisation;
    bias_LN: [L, 0] without biases.
    """

    def __init__(
        self, weights: list[Tensor], biases: list[Tensor] | None, quantization: Quantization, *, keeps_rows: bool
    ) -> None:
        num_layers = len(weights)
        nothing = np.empty((num_layers, 0), np.float32)
        self.bias_LN = nothing if biases is None else np.stack([bias.float().numpy() for bias in biases])
        if quantization == "int8":
            rounded = [round_to_int8(weight) for weight in weights]
            rows = [int8.numpy() for int8, _ in rounded]
            self.scale_LN = np.stack([scale.numpy() for _, scale in rounded])
            weights = [(int8.float() * scale.unsqueeze(1)).to(torch.bfloat16) for int8, scale in rounded]
        else:
            rows = [array_of(weight) for weight in weights]
            self.scale_LN = nothing
        self.rows_LNK = np.stack(rows) if keeps_rows else np.empty((num_layers, 0, 0), rows[0].dtype)
        self.packed = [
            PackedLinear(weight, None if biases is None else biases[layer]) for layer, weight in enumerate(weights)
        ]

    @property
    def num_bytes(self) -> int:
        packed = sum(linear.num_bytes for linear in self.packed)
        return packed + self.rows_LNK.nbytes + self.scale_LN.nbytes + self.bias_LN.nbytes

    @property
    def arguments(self) -> tuple[NDArray[Any], ...]:
        return self.rows_LNK, self.scale_LN, self.bias_LN


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weights:
    """norms: float32 [2 L + 1, C], in the order of use. gains_LMD: q's heads, then k's; [L, 0, D] without q/k norms."""

    embedding_VC: Tensor
    norms: NDArray[np.float32]
    qkv: _Matrix
    gains_LMD: NDArray[np.float32]
    o: _Matrix
    gate_up: _Matrix
    down: _Matrix
    head: _Matrix


class CpuDecoder:
    """A LanguageModel in bfloat16. Logits of a row depend on how many others there are by rounding only."""

    def __init__(self, config: ModelConfig, read: ReadTensor, *, quantization: Quantization = "none") -> None:
        if config.decoder is None:
            raise AssertionError(f"{config.model_type} has no native shape: {config.fallback_reason}")
        self.config = config
        self._shape = shape = config.decoder
        self._has_few_rows = _can_keep_rows(shape, config.vocab_size, quantization)
        self._weights = _read_weights(shape, read, quantization, keeps_rows=self._has_few_rows)
        self._attention = PageAttention()
        self.is_int8 = quantization == "int8"
        self._frequencies = inverse_frequencies(shape.rope, shape.head_dim)
        self._windows = np.array([window or 0 for window in shape.windows], np.int64)
        self._uses_rope = np.array(shape.uses_rope, np.bool_)

    @staticmethod
    def is_supported(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether there are kernels for this model here."""
        shape = config.decoder
        if shape is None or not PackedLinear.is_supported(dtype, device):
            return False
        inputs = (shape.hidden_size, shape.intermediate_size, shape.num_heads * shape.head_dim)
        return all(size % _MULTIPLE == 0 for size in inputs)

    @property
    def kv_shape(self) -> KVShape:
        shape = self._shape
        return KVShape(
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=torch.bfloat16,
            layout="rows",
        )

    @property
    def weight_bytes(self) -> int:
        weights = self._weights
        matrices = (weights.qkv, weights.o, weights.gate_up, weights.down, weights.head)
        return weights.embedding_VC.nbytes + weights.norms.nbytes + sum(matrix.num_bytes for matrix in matrices)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: KVTensors) -> Tensor:
        """See LanguageModel."""
        num_tokens = len(batch.token_ids_T)
        is_few = 0 < num_tokens == batch.num_decode_rows == len(batch.logit_rows_R) <= ROWS_MAX
        if is_few and self._has_few_rows:
            return self._few_rows(batch, kv)
        return self._many_rows(batch, kv)

    def _few_rows(self, batch: ForwardBatch, kv: KVTensors) -> Tensor:
        """Pure decoding, whose logits are wanted in the rows' order."""
        shape, weights = self._shape, self._weights
        num_rows = len(batch.token_ids_T)
        num_padded = next(count for count in ROW_COUNTS if count >= num_rows)
        cos_SF, sin_SF = self._angles(batch.positions_T)
        table_SB = batch.block_tables_SB.numpy()
        logits_SV = torch.empty(num_padded, self.config.vocab_size)
        step = make_step(shape.num_heads // shape.num_kv_heads, shape.head_dim, kv.block_size)
        # A row of padding writes to the trash block and sees one token of it.
        step(
            _pad(batch.token_ids_T.numpy(), num_padded), _pad(cos_SF, num_padded), _pad(sin_SF, num_padded),
            _pad(batch.slot_mapping_T.numpy(), num_padded), _pad(table_SB, num_padded),
            _pad(batch.context_lens_S.numpy(), num_padded, 1), array_of(weights.embedding_VC), weights.norms,
            *weights.qkv.arguments, weights.gains_LMD, *weights.o.arguments, *weights.gate_up.arguments,
            *weights.down.arguments, weights.head.rows_LNK[0], weights.head.scale_LN[0], self._windows,
            self._uses_rope, np.float32(shape.rms_norm_eps), np.float32(shape.head_dim**-0.5), pages_of(kv),
            use_threads(), logits_SV.numpy(),
        )  # fmt: skip
        return logits_SV[:num_rows]

    def _many_rows(self, batch: ForwardBatch, kv: KVTensors) -> Tensor:
        shape, weights = self._shape, self._weights
        num_tokens = len(batch.token_ids_T)
        num_heads, head_dim = shape.num_heads, shape.head_dim
        scale, eps = head_dim**-0.5, np.float32(shape.rms_norm_eps)
        attend = self._attention.plan(batch, kv)
        num_threads, pages, slots_T = use_threads(), pages_of(kv), batch.slot_mapping_T.numpy()
        cos_TF, sin_TF = self._angles(batch.positions_T)

        x_TC = F.embedding(batch.token_ids_T, weights.embedding_VC)
        y_TC, act_TI = torch.empty_like(x_TC), x_TC.new_empty(num_tokens, shape.intermediate_size)
        x, y, act = array_of(x_TC), array_of(y_TC), array_of(act_TI)
        d = x[:0]
        for layer in range(shape.num_layers):
            add_rms_norm(x, d, weights.norms[2 * layer], eps, num_threads, y)
            qkv_TN = weights.qkv.packed[layer](y_TC)
            rotate_and_cache(
                array_of(qkv_TN), cos_TF, sin_TF, weights.gains_LMD[layer], eps, self._uses_rope[layer], slots_T, pages,
                layer, kv.block_size, num_threads,
            )  # fmt: skip
            q_TAD = qkv_TN[:, : num_heads * head_dim].view(num_tokens, num_heads, head_dim)
            out_TAD = attend(q_TAD, layer, scale=scale, window=shape.windows[layer])
            d = array_of(weights.o.packed[layer](out_TAD.view(num_tokens, -1)))
            add_rms_norm(x, d, weights.norms[2 * layer + 1], eps, num_threads, y)
            silu_mul(array_of(weights.gate_up.packed[layer](y_TC)), num_threads, act)
            d = array_of(weights.down.packed[layer](act_TI))
        if len(batch.logit_rows_R) == 0:
            return x_TC.new_empty(0, self.config.vocab_size, dtype=torch.float32)
        add_rms_norm(x, d, weights.norms[-1], eps, num_threads, y)
        return weights.head.packed[0](y_TC[batch.logit_rows_R]).float()

    def _angles(self, positions_T: Tensor) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """cos and sin, float32 [T, F]."""
        factor = self._shape.rope.attention_factor
        cos_T1D, sin_T1D = cos_sin(self._frequencies, positions_T, factor, torch.float32)
        half = self._shape.head_dim // 2
        return cos_T1D[:, 0, half:].contiguous().numpy(), sin_T1D[:, 0, half:].contiguous().numpy()


def _pad(array: NDArray[Any], num_rows: int, value: int = 0) -> NDArray[Any]:
    if len(array) == num_rows:
        return np.ascontiguousarray(array)
    padded = np.full((num_rows, *array.shape[1:]), value, array.dtype)
    padded[: len(array)] = array
    return padded


def _can_keep_rows(shape: DecoderShape, vocab_size: int, quantization: Quantization) -> bool:
    """Whether memory is so plentiful that most weights may be in it twice."""
    num_weights = sum(math.prod(size) for size in tensor_shapes(shape, vocab_size).values())
    return num_weights * (_PACKED_BYTES + (1 if quantization == "int8" else 2)) <= _SHARE_MAX * available_bytes()


def _read_weights(shape: DecoderShape, read: ReadTensor, quantization: Quantization, *, keeps_rows: bool) -> _Weights:
    layers = [f"model.layers.{layer}." for layer in range(shape.num_layers)]

    def matrix(*names: str, has_bias: bool) -> _Matrix:
        """Several matrices stacked: fewer and longer products."""
        weights = [torch.cat([read(f"{layer}{name}.weight") for name in names]) for layer in layers]
        biases = [torch.cat([read(f"{layer}{name}.bias") for name in names]) for layer in layers] if has_bias else None
        return _Matrix(weights, biases, quantization, keeps_rows=keeps_rows)

    embedding_VC = read("model.embed_tokens.weight").contiguous()
    norms = [
        read(f"{layer}{name}.weight").float().numpy()
        for layer in layers
        for name in ("input_layernorm", "post_attention_layernorm")
    ]
    gains_LMD = np.empty((shape.num_layers, 0, shape.head_dim), np.float32)
    if shape.qk_norm:
        heads = (("q_norm", shape.num_heads), ("k_norm", shape.num_kv_heads))
        gains_LMD = np.stack([
            np.concatenate([
                np.tile(read(f"{layer}self_attn.{name}.weight").float().numpy(), (count, 1)) for name, count in heads
            ])
            for layer in layers
        ])  # fmt: skip
    return _Weights(
        embedding_VC=embedding_VC,
        norms=np.stack([*norms, read("model.norm.weight").float().numpy()]),
        qkv=matrix("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", has_bias=shape.qkv_bias),
        gains_LMD=gains_LMD,
        o=matrix("self_attn.o_proj", has_bias=shape.o_bias),
        gate_up=matrix("mlp.gate_proj", "mlp.up_proj", has_bias=shape.mlp_bias),
        down=matrix("mlp.down_proj", has_bias=shape.mlp_bias),
        head=_Matrix(
            [embedding_VC if shape.tied_embeddings else read("lm_head.weight")],
            None,
            quantization,
            keeps_rows=keeps_rows,
        ),
    )


def require_int8_support(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Raises ModelError, one sentence, where there are no int8 kernels."""
    if not PackedLinear.is_supported(dtype, device):
        raise ModelError("model.quantization int8 needs bfloat16 weights and a CPU that multiplies bfloat16 natively.")
    if not CpuDecoder.is_supported(config, dtype, device):
        raise ModelError(f"model.quantization int8 needs layers whose sizes are multiples of {_MULTIPLE}.")
