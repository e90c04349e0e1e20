"""What a Hugging Face folder says of its model in config.json and generation_config.json. Loads no torch."""

import json
from dataclasses import dataclass, field
from math import log
from pathlib import Path
from typing import Any, Final, Literal

from aserve.errors import ModelError

RopeKind = Literal["default", "linear", "llama3", "yarn"]
ROPE_KINDS: Final[tuple[RopeKind, ...]] = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding by name. The fields after ``theta`` matter for the kinds that name them.

    factor: linear, llama3, yarn. low_freq_factor, high_freq_factor: llama3. original_max_positions: llama3, yarn.
    beta_fast, beta_slow, truncate, attention_factor (what cos and sin are multiplied by): yarn.
    """

    kind: RopeKind = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """All that ``decoder.py`` needs to know of a dense decoder of the Llama kind.

    windows: for each layer the sliding window in tokens, the query's own included, or None for full attention.
    uses_rope: for each layer whether queries and keys are rotated.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    windows: tuple[int | None, ...]
    uses_rope: tuple[bool, ...]
    qk_norm: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    tied_embeddings: bool

    @property
    def num_layer_parameters(self) -> int:
        """Of the products in all layers."""
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        return self.num_layers * self.hidden_size * (attention + 3 * self.intermediate_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """What generation_config.json recommends; None where it says nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One model, whoever computes it.

    decoder: the shape for the native decoder, or None when the model has to go through transformers' own code, and then
    ``fallback_reason`` says why. vocab_size and max_position_embeddings are 0 where config.json leaves them to
    transformers' defaults; the fallback fills them in. eos_ids: generation_config.json's, else config.json's.
    dtype: as stored, such as "bfloat16", or None.
    """

    model_type: str
    vocab_size: int
    max_position_embeddings: int
    decoder: DecoderShape | None = None
    fallback_reason: str | None = None
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    dtype: str | None = None
    sampling_defaults: SamplingDefaults = field(default_factory=SamplingDefaults)

    @property
    def num_layer_parameters(self) -> int | None:
        """Of the products in all layers, None where the decoder is not ours: half of a token's operations there."""
        return None if self.decoder is None else self.decoder.num_layer_parameters

    @classmethod
    def from_folder(cls, folder: str | Path) -> "ModelConfig":
        """Reads the folder's two config files. Raises ModelError for a missing or unreadable config.json, for quantised
        checkpoints and for values that make no model."""
        folder = Path(folder)
        config = _read_json(folder / "config.json")
        if config is None:
            raise ModelError(f"{folder} is not a model folder: it has no config.json.")
        generation = _read_json(folder / "generation_config.json") or {}
        return cls.from_dicts(config, generation)

    @classmethod
    def from_dicts(cls, config: dict[str, Any], generation: dict[str, Any] | None = None) -> "ModelConfig":
        """The same from the files' parsed contents."""
        generation = generation or {}
        model_type = config.get("model_type")
        if not isinstance(model_type, str):
            raise ModelError("config.json names no model_type, so that there is no telling how to run this model.")
        _refuse_quantised(config)
        shape, reason = _decoder_shape(model_type, config)
        eos = generation.get("eos_token_id")
        return cls(
            model_type=model_type,
            vocab_size=_first_int(config, "vocab_size"),
            max_position_embeddings=_first_int(
                config, "max_position_embeddings", "n_positions", "max_seq_len", "seq_length"
            )
            or (_FAMILIES[model_type].max_positions if shape is not None else 0),
            decoder=shape,
            fallback_reason=reason,
            eos_ids=_token_ids(config.get("eos_token_id") if eos is None else eos),
            bos_id=_first_id(generation.get("bos_token_id"), config.get("bos_token_id")),
            dtype=config.get("dtype") or config.get("torch_dtype"),
            sampling_defaults=SamplingDefaults(
                temperature=generation.get("temperature"),
                top_p=generation.get("top_p"),
                top_k=generation.get("top_k"),
                min_p=generation.get("min_p"),
                repetition_penalty=generation.get("repetition_penalty"),
                max_new_tokens=generation.get("max_new_tokens"),
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """Where a family departs from Llama: its fixed traits, and what it assumes for keys that config.json leaves out."""

    qk_norm: bool = False
    qkv_bias: bool | None = None  # None: attention_bias decides, for the output projection too
    num_kv_heads: int | None = None
    head_dim: int | None = None
    theta: float = 10_000.0
    max_positions: int = 2048
    tied_embeddings: bool = False
    window: int | None = None


_FAMILIES: Final[dict[str, _Family]] = {
    "llama": _Family(),
    "mistral": _Family(qkv_bias=False, num_kv_heads=8, window=4096, max_positions=131_072),
    "qwen2": _Family(qkv_bias=True, num_kv_heads=32, window=4096, max_positions=32_768),
    "qwen3": _Family(qk_norm=True, num_kv_heads=32, head_dim=128, window=4096, max_positions=32_768),
    "smollm3": _Family(num_kv_heads=4, theta=2_000_000.0, max_positions=32_768, tied_embeddings=True),
}


def _decoder_shape(model_type: str, config: dict[str, Any]) -> tuple[DecoderShape | None, str | None]:
    """The native decoder's shape, or None and the reason."""
    family = _FAMILIES.get(model_type)
    if family is None:
        return None, f"model type {model_type!r} is not one of {', '.join(_FAMILIES)}"
    architectures = config.get("architectures") or []
    if architectures and not any(name.endswith("ForCausalLM") for name in architectures):
        return None, f"architecture {architectures[0]!r} is not a causal language model"
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        return None, f"activation {activation!r} is not SiLU"

    num_layers = _required_int(config, "num_hidden_layers")
    num_heads = _required_int(config, "num_attention_heads")
    hidden_size = _required_int(config, "hidden_size")
    _required_int(config, "vocab_size")
    num_kv_heads = _first_int(config, "num_key_value_heads") or family.num_kv_heads or num_heads
    if num_heads % num_kv_heads:
        raise ModelError(f"config.json has {num_heads} attention heads, not a multiple of its {num_kv_heads} KV heads.")
    head_dim = _first_int(config, "head_dim") or family.head_dim or hidden_size // num_heads
    rope, reason = _rope(config, family, head_dim)
    if rope is None:
        return None, reason
    uses_rope = _rope_layers(model_type, config, num_layers)
    attention_bias = bool(config.get("attention_bias", False))
    has_own_rule = family.qkv_bias is not None
    return DecoderShape(
        hidden_size=hidden_size,
        intermediate_size=_required_int(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=rope,
        windows=_windows(model_type, config, family, num_layers, uses_rope),
        uses_rope=uses_rope,
        qk_norm=family.qk_norm,
        qkv_bias=bool(family.qkv_bias) if has_own_rule else attention_bias,
        o_bias=False if has_own_rule else attention_bias,
        mlp_bias=bool(config.get("mlp_bias", False)) if model_type in ("llama", "smollm3") else False,
        tied_embeddings=bool(config.get("tie_word_embeddings", family.tied_embeddings)),
    ), None


def _rope(config: dict[str, Any], family: _Family, head_dim: int) -> tuple[RopeConfig | None, str | None]:
    """Reads both layouts: ``rope_theta`` beside ``rope_scaling``, and the single ``rope_parameters``."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(parameters, dict):
        raise ModelError("The rope parameters in config.json are not an object.")
    if any(isinstance(value, dict) for value in parameters.values()):
        return None, "its rope parameters differ between layers"
    kind = parameters.get("rope_type", parameters.get("type")) or "default"
    if kind not in ROPE_KINDS:
        return None, f"rope type {kind!r} is not one of {', '.join(ROPE_KINDS)}"
    turned = parameters.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if float(turned) != 1.0:
        return None, "its rope turns only part of each head"
    if head_dim % 2:
        return None, f"its rope cannot pair the {head_dim} dimensions of a head"
    theta = float(parameters.get("rope_theta") or config.get("rope_theta") or family.theta)
    if kind == "default":
        return RopeConfig(theta=theta), None

    factor = parameters.get("factor")
    original = (
        config.get("original_max_position_embeddings")
        or parameters.get("original_max_position_embeddings")
        or _first_int(config, "max_position_embeddings")
        or family.max_positions
    )
    if factor is None and kind == "yarn":
        factor = (_first_int(config, "max_position_embeddings") or family.max_positions) / original
    stated = {**parameters, "factor": factor}
    needed = ("factor", "low_freq_factor", "high_freq_factor") if kind == "llama3" else ("factor",)
    missing = [name for name in needed if stated.get(name) is None]
    if factor is None or missing:
        raise ModelError(f"The rope parameters in config.json are of type {kind!r} but lack {', '.join(missing)}.")
    return RopeConfig(
        kind=kind,
        theta=theta,
        factor=float(factor),
        low_freq_factor=float(parameters.get("low_freq_factor") or 1.0),
        high_freq_factor=float(parameters.get("high_freq_factor") or 4.0),
        original_max_positions=int(original),
        beta_fast=float(parameters.get("beta_fast") or 32.0),
        beta_slow=float(parameters.get("beta_slow") or 1.0),
        truncate=bool(parameters.get("truncate", True)),
        attention_factor=_yarn_attention_factor(parameters, float(factor)) if kind == "yarn" else 1.0,
    ), None


def _yarn_attention_factor(parameters: dict[str, Any], factor: float) -> float:
    """0.1 ln(factor) + 1 by YaRN (arXiv 2309.00071, section 3.4); checkpoints may set it, or two weights of the log."""
    if parameters.get("attention_factor") is not None:
        return float(parameters["attention_factor"])

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * log(factor) + 1.0

    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        return mscale(float(parameters["mscale"])) / mscale(float(parameters["mscale_all_dim"]))
    return mscale(1.0)


def _rope_layers(model_type: str, config: dict[str, Any], num_layers: int) -> tuple[bool, ...]:
    if model_type != "smollm3":
        return (True,) * num_layers
    flags = config.get("no_rope_layers")  # in spite of its name, 1 marks a layer with rope
    if flags is None:
        interval = _first_int(config, "no_rope_layer_interval") or 4
        return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    return tuple(bool(flag) for flag in flags[:num_layers])


def _windows(
    model_type: str, config: dict[str, Any], family: _Family, num_layers: int, uses_rope: tuple[bool, ...]
) -> tuple[int | None, ...]:
    """Mistral slides in every layer; Qwen and SmolLM3 only if ``use_sliding_window``, by layer type or layer number."""
    full: tuple[int | None, ...] = (None,) * num_layers
    window = config.get("sliding_window", family.window)
    if window is None or model_type == "llama":
        return full
    if model_type == "mistral":
        return (int(window),) * num_layers
    if not config.get("use_sliding_window", False):
        return full
    types = config.get("layer_types")
    if types is not None:
        slides = [kind == "sliding_attention" for kind in types[:num_layers]]
    elif model_type == "smollm3":
        slides = [not rotates for rotates in uses_rope]
    else:
        first = int(config.get("max_window_layers", 28))
        slides = [layer >= first for layer in range(num_layers)]
    return tuple(int(window) if slide else None for slide in slides)


def _refuse_quantised(config: dict[str, Any]) -> None:
    quantisation = config.get("quantization_config") or config.get("compression_config")
    if quantisation is None:
        return
    method = quantisation.get("quant_method", "unnamed") if isinstance(quantisation, dict) else "unnamed"
    raise ModelError(
        f"This checkpoint is quantised ({method}), which is not supported: take the unquantised one or a GGUF file."
    )


def _read_json(path: Path) -> dict[str, Any] | None:
    """None if the file does not exist."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}.") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} cannot be read: it does not hold an object.")
    return content


def _required_int(config: dict[str, Any], key: str) -> int:
    value = _first_int(config, key)
    if value <= 0:
        raise ModelError(f"config.json lacks a positive {key}.")
    return value


def _first_int(config: dict[str, Any], *keys: str) -> int:
    """The first of the keys that is there, or 0."""
    for key in keys:
        value = config.get(key)
        if value is not None:
            if type(value) is not int:
                raise ModelError(f"{key} in config.json is {value!r}, not a whole number.")
            return value
    return 0


def _token_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(dict.fromkeys(value)) if isinstance(value, list) else (int(value),)


def _first_id(*values: Any) -> int | None:
    for value in values:
        if value is not None:
            return int(value[0]) if isinstance(value, list) else int(value)
    return None
