"""The dense decoder of ``decoder.py`` on a GPU: cuBLAS and the kernels beside this, everything in place and capturable.

A forward reads and writes memory that was allocated at start, launches nothing that depends on a value, and asks the
host for nothing: a CUDA graph of it serves any step of its size. There are two forms of it: nine kernels a layer, the
products by cuBLAS; and for decode steps of few rows five, whose products take norms, SiLU and the residual along, and
whose attention takes RoPE and the cache's writes.

Shape suffixes: S sequences of the step, T tokens, R rows whose logits are wanted, A query heads, H kv heads,
D head_dim, C hidden size, I intermediate size, J = 2 I, N columns of the QKV product, V vocabulary, P positions.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from aserve.model.batch import KVShape
from aserve.model.config import DecoderShape, ModelConfig
from aserve.model.decoder import ReadTensor
from aserve.model.kernels.activation import silu_mul
from aserve.model.kernels.attention_backend import AttentionBackend, TritonAttention
from aserve.model.kernels.attention_plan import AttentionPlan
from aserve.model.kernels.few_rows import MAX_ROWS, FewRowsProducts, Stream, can_read
from aserve.model.kernels.matmul import batch_invariant_matmul
from aserve.model.kernels.norm import add_rms_norm, add_rms_norm_rows, embed_rms_norm
from aserve.model.kernels.rope_kv import Rotation, rope_table, rotate_and_cache
from aserve.model.rope import inverse_frequencies

LAYERS_A_LAUNCH = 8
"""Of the long form, some ten nodes each: a graph of 16 takes the launching thread up to half a millisecond in a server
whose caches are cold."""

SHORT_LAYERS_A_LAUNCH = 16
"""Of the short form, with five."""

_REFERENCE_BLOCK_HEADS = 2
"""Reference mode computes norms of heads in one form, whatever the number of tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardTensors:
    """One size of step, as views of memory that all sizes share. int32 but for the plans.

    last_rows_S: a sequence's last token, whose logits are wanted. plans: for each window of the model's layers (0 for
    none) who computes what. has_chunks: whether the plans may hold sequences with more than one token.
    side: the stream on which decode rows attend beside chunks. cut: called where a step of many layers may be launched
    in two goes, between two of them.
    """

    token_ids_T: Tensor
    positions_T: Tensor
    slot_mapping_T: Tensor
    last_rows_S: Tensor
    block_tables_SB: Tensor
    plans: Mapping[int, AttentionPlan]
    has_chunks: bool
    side: torch.cuda.Stream | None = None
    cut: Callable[[], None] | None = None


class HeadShape(Protocol):
    """What attention's plans have to know of a model."""

    @property
    def num_heads(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...


class StepDecoder(Protocol):
    """What steps want of a model; ``CudaDecoder`` is one, and says what each means. memory: what ``allocate`` gave."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def shape(self) -> HeadShape: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def reference(self) -> bool: ...

    @property
    def kv_shape(self) -> KVShape: ...

    @property
    def windows(self) -> tuple[int, ...]: ...

    @property
    def weight_bytes(self) -> int: ...

    def prepare(self, num_positions: int) -> None: ...

    def allocate(self, num_tokens: int, *, num_multiprocessors: int) -> Any: ...

    def forward(
        self,
        step: ForwardTensors,
        kv_layers: tuple[Tensor, ...],
        memory: Any,
        *,
        logits_SV: Tensor,
        each_kind_once: bool = False,
    ) -> None: ...

    def logits_of(self, rows_R: Tensor, memory: Any, *, logits_RV: Tensor) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """What a forward leaves on its way. Of the largest step; smaller ones use the first rows.

    After a forward with chunks, ``residual`` and ``delta`` still hold the last layer's output, so that logits of other
    rows can be had from them. few_rows: None where all steps take the long form.
    """

    residual_TC: Tensor
    normed_TC: Tensor
    delta_TC: Tensor
    qkv_TN: Tensor
    attended_TAD: Tensor
    gate_up_TJ: Tensor
    product_TI: Tensor
    few_rows: FewRowsProducts | None


@dataclass(frozen=True, slots=True)
class _Matrix:
    """x -> x weight^T + bias, into memory that is given."""

    weight_NK: Tensor
    bias_N: Tensor | None
    is_batch_invariant: bool

    def __call__(self, x_TK: Tensor, *, out_TN: Tensor) -> None:
        if self.is_batch_invariant:
            batch_invariant_matmul(x_TK, self.weight_NK, self.bias_N, out_TN=out_TN)
        elif self.bias_N is not None:
            torch.addmm(self.bias_N, x_TK, self.weight_NK.t(), out=out_TN)
        elif out_TN.dtype != x_TK.dtype:
            torch.mm(x_TK, self.weight_NK.t(), out_dtype=out_TN.dtype, out=out_TN)
        else:
            torch.mm(x_TK, self.weight_NK.t(), out=out_TN)

    @property
    def weights(self) -> tuple[Tensor, Tensor | None]:
        return self.weight_NK, self.bias_N

    @property
    def num_bytes(self) -> int:
        return self.weight_NK.nbytes + (0 if self.bias_N is None else self.bias_N.nbytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """qkv: q, k and v stacked. gate_up: gate, then up. qk_norm_AHD: one gain a head, q's then k's; None without.

    window: 0 for full attention.
    """

    input_gain_C: Tensor
    qkv: _Matrix
    qk_norm_AHD: Tensor | None
    o: _Matrix
    post_gain_C: Tensor
    gate_up: _Matrix
    down: _Matrix
    window: int
    uses_rope: bool


class CudaDecoder:
    """Weights on the device, and the forward over them."""

    def __init__(
        self,
        config: ModelConfig,
        read: ReadTensor,
        *,
        dtype: torch.dtype,
        reference: bool = False,
        short_dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,),
        attention: AttentionBackend | None = None,
    ) -> None:
        """reference: a row's results do not depend on the batch; ``dtype`` has to be float32 then.

        short_dtypes: those whose decode steps of few rows take the short form. float16 is not safe there: a residual
        times a gain, before it is normalised, may be more than it holds. attention: ours, unless given.
        """
        assert config.decoder is not None
        assert not reference or dtype == torch.float32
        self.config = config
        self.shape = shape = config.decoder
        self.dtype = dtype
        self.reference = reference
        self._attention = attention or TritonAttention()
        self._embedding_VC = read("model.embed_tokens.weight")
        self.device = self._embedding_VC.device
        self._layers = [_read_layer(shape, layer, read, reference) for layer in range(shape.num_layers)]
        self._kinds = list({(layer.window, layer.uses_rope): layer for layer in self._layers}.values())
        self._gain_C = read("model.norm.weight")
        head_VC = self._embedding_VC if shape.tied_embeddings else read("lm_head.weight")
        self._head = _Matrix(head_VC, None, reference)
        self._rope_PD = torch.empty(0, shape.head_dim)
        self.has_short_form = (
            dtype in short_dtypes and not reference and all(can_read(each.weight_NK) for each in self._matrices())
        )

    @property
    def kv_shape(self) -> KVShape:
        shape = self.shape
        return KVShape(
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=self.dtype,
            layout="blocks",
        )

    @property
    def windows(self) -> tuple[int, ...]:
        """The distinct windows of the layers, 0 for full attention."""
        return tuple(sorted({layer.window for layer in self._layers}))

    @property
    def weight_bytes(self) -> int:
        """Tied weights count once."""
        gains = [gain for layer in self._layers for gain in (layer.input_gain_C, layer.post_gain_C)]
        return (
            sum(matrix.num_bytes for matrix in self._matrices())
            + (0 if self.shape.tied_embeddings else self._embedding_VC.nbytes)
            + sum(gain.nbytes for gain in (*gains, self._gain_C))
        )

    def prepare(self, num_positions: int) -> None:
        """Make the table of rotations for contexts of so many tokens. Before the first forward; a second time does
        nothing."""
        if len(self._rope_PD) == num_positions:
            return
        rope = self.shape.rope
        frequencies_F = inverse_frequencies(rope, self.shape.head_dim).to(self.device)
        self._rope_PD = rope_table(frequencies_F, num_positions, rope.attention_factor)

    def allocate(self, num_tokens: int, *, num_multiprocessors: int) -> Activations:
        """For steps of at most so many tokens."""
        shape = self.shape
        q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim

        def zeros(*size: int) -> Tensor:
            return torch.zeros(num_tokens, *size, dtype=self.dtype, device=self.device)

        few_rows = None
        if self.has_short_form:
            few_rows = FewRowsProducts(
                num_channels=shape.hidden_size, num_multiprocessors=num_multiprocessors, device=self.device
            )
        return Activations(
            residual_TC=zeros(shape.hidden_size),
            normed_TC=zeros(shape.hidden_size),
            delta_TC=zeros(shape.hidden_size),
            qkv_TN=zeros(q_size + 2 * kv_size),
            attended_TAD=zeros(shape.num_heads, shape.head_dim),
            gate_up_TJ=zeros(2 * shape.intermediate_size),
            product_TI=zeros(shape.intermediate_size),
            few_rows=few_rows,
        )

    def _matrices(self) -> list[_Matrix]:
        layers = [matrix for layer in self._layers for matrix in (layer.qkv, layer.o, layer.gate_up, layer.down)]
        return [*layers, self._head]

    def forward(
        self,
        step: ForwardTensors,
        kv_layers: tuple[Tensor, ...],
        memory: Activations,
        *,
        logits_SV: Tensor,
        each_kind_once: bool = False,
    ) -> None:
        """Write the step's K and V into ``kv_layers`` ([2, H, blocks, tokens of a block, D] each), and the logits.

        each_kind_once: leave out layers whose like has run: for a start, which only wants to see every kernel.
        """
        layers = self._kinds if each_kind_once else self._layers
        if memory.few_rows is not None and not step.has_chunks and len(step.token_ids_T) <= MAX_ROWS:
            self._forward_few_rows(step, kv_layers, memory, memory.few_rows, layers, logits_SV=logits_SV)
        else:
            self._forward(step, kv_layers, memory, layers, logits_SV=logits_SV)

    def _forward(
        self,
        step: ForwardTensors,
        kv_layers: tuple[Tensor, ...],
        memory: Activations,
        layers: Sequence[_Layer],
        *,
        logits_SV: Tensor,
    ) -> None:
        shape, eps = self.shape, self.shape.rms_norm_eps
        num_tokens = len(step.token_ids_T)
        residual_TC, normed_TC = memory.residual_TC[:num_tokens], memory.normed_TC[:num_tokens]
        delta_TC, qkv_TN = memory.delta_TC[:num_tokens], memory.qkv_TN[:num_tokens]
        attended_TAD = memory.attended_TAD[:num_tokens]
        gate_up_TJ, product_TI = memory.gate_up_TJ[:num_tokens], memory.product_TI[:num_tokens]
        q_TAD = qkv_TN.view(num_tokens, -1, shape.head_dim)[:, : shape.num_heads]

        embed_rms_norm(
            step.token_ids_T, self._embedding_VC, self._layers[0].input_gain_C, eps,
            residual_TC=residual_TC, out_TC=normed_TC,
        )  # fmt: skip
        for index, (layer, kv_layer) in enumerate(zip(layers, kv_layers, strict=False)):
            layer.qkv(normed_TC, out_TN=qkv_TN)
            rotate_and_cache(
                qkv_TN, step.positions_T, step.slot_mapping_T, self._rope_PD, kv_layer, qk_norm_AHD=layer.qk_norm_AHD,
                eps=eps, uses_rope=layer.uses_rope, block_heads=_REFERENCE_BLOCK_HEADS if self.reference else None,
            )  # fmt: skip
            self._attend(q_TAD, kv_layer, step, layer.window, attended_TAD)
            layer.o(attended_TAD.view(num_tokens, -1), out_TN=delta_TC)
            add_rms_norm(residual_TC, delta_TC, layer.post_gain_C, eps, out_TC=normed_TC)
            layer.gate_up(normed_TC, out_TN=gate_up_TJ)
            silu_mul(gate_up_TJ, out_TI=product_TI)
            layer.down(product_TI, out_TN=delta_TC)
            if index + 1 < len(layers):
                add_rms_norm(residual_TC, delta_TC, layers[index + 1].input_gain_C, eps, out_TC=normed_TC)
                if step.cut is not None and (index + 1) % LAYERS_A_LAUNCH == 0:
                    step.cut()
        self.logits_of(step.last_rows_S, memory, logits_RV=logits_SV)

    def _forward_few_rows(
        self,
        step: ForwardTensors,
        kv_layers: tuple[Tensor, ...],
        memory: Activations,
        products: FewRowsProducts,
        layers: Sequence[_Layer],
        *,
        logits_SV: Tensor,
    ) -> None:
        """Of a step without chunks, whose rows are its sequences."""
        shape, eps = self.shape, self.shape.rms_norm_eps
        num_rows = len(step.token_ids_T)
        stream = Stream(residual_TC=memory.residual_TC[:num_rows], scaled_TC=memory.normed_TC[:num_rows])
        qkv_TN, product_TI = memory.qkv_TN[:num_rows], memory.product_TI[:num_rows]
        attended_TAD = memory.attended_TAD[:num_rows]
        next_gains = [*(layer.input_gain_C for layer in layers[1:]), self._gain_C]

        products.embed(step.token_ids_T, self._embedding_VC, layers[0].input_gain_C, stream=stream)
        for index, (layer, next_gain_C, kv_layer) in enumerate(zip(layers, next_gains, kv_layers, strict=False), 1):
            products.norm_product(stream, eps, *layer.qkv.weights, out_TN=qkv_TN)
            rotation = Rotation(
                positions_T=step.positions_T,
                slot_mapping_T=step.slot_mapping_T,
                table_PD=self._rope_PD,
                qk_norm_AHD=layer.qk_norm_AHD,
                eps=eps,
                uses_rope=layer.uses_rope,
            )
            self._attention.rotate_and_attend_rows(
                qkv_TN, rotation, kv_layer, step.block_tables_SB, step.plans[layer.window],
                scale=shape.head_dim**-0.5, early=products.early, out_TAD=attended_TAD,
            )  # fmt: skip
            products.product_add(attended_TAD.view(num_rows, -1), *layer.o.weights, layer.post_gain_C, stream=stream)
            products.norm_gate_up(stream, eps, *layer.gate_up.weights, out_TI=product_TI)
            products.product_add(product_TI, *layer.down.weights, next_gain_C, stream=stream)
            if step.cut is not None and index < len(layers) and index % SHORT_LAYERS_A_LAUNCH == 0:
                step.cut()
        products.norm_product(stream, eps, *self._head.weights, out_TN=logits_SV)

    def logits_of(self, rows_R: Tensor, memory: Activations, *, logits_RV: Tensor) -> None:
        """The logits of some rows of the newest forward, float32. rows: int32."""
        normed_RC = memory.normed_TC[: len(rows_R)]
        add_rms_norm_rows(
            memory.residual_TC, memory.delta_TC, rows_R, self._gain_C, self.shape.rms_norm_eps, out_RC=normed_RC
        )
        self._head(normed_RC, out_TN=logits_RV)

    def _attend(self, q_TAD: Tensor, kv_layer: Tensor, step: ForwardTensors, window: int, attended_TAD: Tensor) -> None:
        arguments = q_TAD, kv_layer, step.block_tables_SB, step.plans[window]
        scale = self.shape.head_dim**-0.5
        if step.has_chunks:
            self._attention.attend(*arguments, scale=scale, side=step.side, out_TAD=attended_TAD)
        else:
            self._attention.attend_rows(*arguments, scale=scale, out_TAD=attended_TAD)


def _read_layer(shape: DecoderShape, layer: int, read: ReadTensor, reference: bool) -> _Layer:
    prefix = f"model.layers.{layer}."

    def matrix(*names: str, has_bias: bool) -> _Matrix:
        weight = torch.cat([read(f"{prefix}{name}.weight") for name in names])
        bias = torch.cat([read(f"{prefix}{name}.bias") for name in names]) if has_bias else None
        return _Matrix(weight, bias, reference)

    qk_norm_AHD = None
    if shape.qk_norm:
        gains = (("q_norm", shape.num_heads), ("k_norm", shape.num_kv_heads))
        qk_norm_AHD = torch.cat([read(f"{prefix}self_attn.{name}.weight").expand(n, -1) for name, n in gains])
    return _Layer(
        input_gain_C=read(f"{prefix}input_layernorm.weight"),
        qkv=matrix("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", has_bias=shape.qkv_bias),
        qk_norm_AHD=qk_norm_AHD,
        o=matrix("self_attn.o_proj", has_bias=shape.o_bias),
        post_gain_C=read(f"{prefix}post_attention_layernorm.weight"),
        gate_up=matrix("mlp.gate_proj", "mlp.up_proj", has_bias=shape.mlp_bias),
        down=matrix("mlp.down_proj", has_bias=shape.mlp_bias),
        window=shape.windows[layer] or 0,
        uses_rope=shape.uses_rope[layer],
    )
