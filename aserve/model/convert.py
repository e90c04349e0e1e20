"""Turn a GGUF file into a Hugging Face folder (safetensors, config, tokenizer, chat template): one loader serves both.

Done once for a file. Weights of quantised files are stored as bfloat16 (half of float32's load time and disk), those of
float16 and float32 files as they are. Loads neither torch nor transformers.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from aserve.errors import ModelError
from aserve.model.gguf import FloatType, GgufFile

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

# Chat models whose eos ends a document end their turns with one of these, if their template writes it.
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>")

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # GGUF's token types that become added tokens


def convert_gguf(path: Path, folder: Path) -> None:
    """Write the model of the GGUF file ``path`` into the existing ``folder``.

    Raises ModelError, in one sentence, for an architecture, tensor, tokenizer or rope scaling that is not known here,
    and OSError when the folder cannot be written.
    """
    gguf = GgufFile(path)
    config = _config(gguf)
    tensors = _tensors(gguf, config)
    vocabulary = _Vocabulary(gguf)
    special_ids = vocabulary.special_ids()

    _write_json(folder / "config.json", config | special_ids)
    _write_json(folder / "generation_config.json", special_ids)
    vocabulary.tokenizer().save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", vocabulary.config(config["max_position_embeddings"]))
    if vocabulary.chat_template:
        (folder / "chat_template.jinja").write_text(vocabulary.chat_template, encoding="utf-8")
    _write_safetensors(folder / "model.safetensors", gguf, tensors, config)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# --- config


def _config(gguf: GgufFile) -> dict[str, Any]:
    """The contents of config.json but for the special ids."""
    architecture = gguf.field("general.architecture", str)
    if architecture not in _ARCHITECTURES:
        raise ModelError(
            f"{gguf.path} is of architecture {architecture!r}; of GGUF files only {', '.join(_ARCHITECTURES)} are "
            "served, so give the model's Hugging Face folder instead."
        )

    def size(key: str, default: int | None = None) -> int:
        value = gguf.field(f"{architecture}.{key}", int, default)
        if value < 1:
            raise ModelError(f"{gguf.path} has {value} for the metadata field {architecture}.{key}.")
        return value

    if gguf.field(f"{architecture}.expert_count", int, 0):
        raise ModelError(f"{gguf.path} is a mixture of experts, which is not served from GGUF files.")
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{gguf.path} lacks the tensor token_embd.weight.")
    hidden_size, num_heads = size("embedding_length"), size("attention.head_count")
    head_dim = size("attention.key_length", max(1, hidden_size // num_heads))
    if size("rope.dimension_count", head_dim) != head_dim or head_dim % 2:
        raise ModelError(f"{gguf.path} rotates only a part of each head, which is not served from GGUF files.")
    return {
        "architectures": [_ARCHITECTURES[architecture]],
        "model_type": architecture,
        "dtype": _stored_dtype(gguf),
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": size("feed_forward_length"),
        "num_hidden_layers": size("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": size("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": size("context_length"),
        "rms_norm_eps": _shortest(gguf.field(f"{architecture}.attention.layer_norm_rms_epsilon", float)),
        "rope_parameters": _rope(gguf, architecture, head_dim),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
    }


def _shortest(value: float) -> float:
    """The shortest decimal of a float32: 1e-05 instead of 9.999999747378752e-06, as the model's authors wrote it."""
    return float(str(np.float32(value)))


def _stored_dtype(gguf: GgufFile) -> FloatType:
    """float32 and float16 files keep their precision; bfloat16 holds what a quantised file knows."""
    matrix_types = {info.type_name for info in gguf.tensors.values() if len(info.shape) > 1}
    if matrix_types == {"F32"}:
        return "float32"
    return "float16" if matrix_types <= {"F32", "F16"} else "bfloat16"


def _rope(gguf: GgufFile, architecture: str, head_dim: int) -> dict[str, Any]:
    theta = _shortest(gguf.field(f"{architecture}.rope.freq_base", float, 10_000.0))
    if "rope_freqs.weight" in gguf.tensors:
        return {"rope_theta": theta} | _llama3_rope(gguf, theta, head_dim)
    kind = gguf.field(f"{architecture}.rope.scaling.type", str, "none")
    if kind == "none":
        return {"rope_theta": theta, "rope_type": "default"}
    if kind not in ("linear", "yarn"):
        raise ModelError(f"{gguf.path} scales its rope in the way {kind!r}, which is not served from GGUF files.")
    scaled = {"rope_theta": theta, "rope_type": kind}
    scaled["factor"] = _shortest(gguf.field(f"{architecture}.rope.scaling.factor", float))
    if kind == "yarn":
        original = f"{architecture}.rope.scaling.original_context_length"
        scaled["original_max_position_embeddings"] = gguf.field(original, int)
    return scaled


def _llama3_rope(gguf: GgufFile, theta: float, head_dim: int) -> dict[str, Any]:
    """The parameters behind a table of frequency divisors, which is all that GGUF keeps of them.

    Every Llama 3.x model has the same three but for the factor, which is the table's largest entry; the table made
    from them must equal the file's.
    """
    low, high, original = 1.0, 4.0, 8192
    table = gguf.read("rope_freqs.weight")
    factor = float(table.max())
    turns = original * theta ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    if table.shape != turns.shape or not np.allclose(table, 1 / ((1 - smooth) / factor + smooth), rtol=1e-4):
        raise ModelError(f"{gguf.path} has a table of rope frequencies that is not Llama 3's, which is not served.")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


# --- weights


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tensor:
    """A tensor of the target: its source's name, its shape, and the heads whose rows GGUF interleaves (0: none)."""

    source: str
    shape: tuple[int, ...]
    interleaved_heads: int = 0


def _tensors(gguf: GgufFile, config: dict[str, Any]) -> dict[str, _Tensor]:
    """Hugging Face name -> source for all tensors; the file must have these, of these shapes, and no others.

    llama.cpp rotates neighbouring elements where Hugging Face rotates halves; for the architecture llama the converter
    to GGUF therefore interleaves the two halves of each head's rows of q and k.
    """
    architecture, hidden, ffn = config["model_type"], config["hidden_size"], config["intermediate_size"]
    num_heads, num_kv_heads, head_dim = (
        config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    q, kv, vocab = num_heads * head_dim, num_kv_heads * head_dim, config["vocab_size"]
    llama = architecture == "llama"
    layer = {
        "input_layernorm.weight": ("attn_norm.weight", (hidden,), 0),
        "self_attn.q_proj.weight": ("attn_q.weight", (q, hidden), num_heads if llama else 0),
        "self_attn.k_proj.weight": ("attn_k.weight", (kv, hidden), num_kv_heads if llama else 0),
        "self_attn.v_proj.weight": ("attn_v.weight", (kv, hidden), 0),
        "self_attn.o_proj.weight": ("attn_output.weight", (hidden, q), 0),
        "post_attention_layernorm.weight": ("ffn_norm.weight", (hidden,), 0),
        "mlp.gate_proj.weight": ("ffn_gate.weight", (ffn, hidden), 0),
        "mlp.up_proj.weight": ("ffn_up.weight", (ffn, hidden), 0),
        "mlp.down_proj.weight": ("ffn_down.weight", (hidden, ffn), 0),
    }
    if architecture == "qwen2":
        layer |= {f"self_attn.{x}_proj.bias": (f"attn_{x}.bias", (q if x == "q" else kv,), 0) for x in "qkv"}
    if architecture == "qwen3":
        layer |= {f"self_attn.{x}_norm.weight": (f"attn_{x}_norm.weight", (head_dim,), 0) for x in "qk"}

    tensors = {
        "model.embed_tokens.weight": _Tensor(source="token_embd.weight", shape=(vocab, hidden)),
        "model.norm.weight": _Tensor(source="output_norm.weight", shape=(hidden,)),
    }
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = _Tensor(source="output.weight", shape=(vocab, hidden))
    num_layers = config["num_hidden_layers"]
    if num_layers > len(gguf.tensors):  # before a loop over a number that the file chose
        raise ModelError(f"{gguf.path} claims {num_layers} layers and has {len(gguf.tensors)} tensors.")
    for index in range(num_layers):
        for target, (source, shape, heads) in layer.items():
            tensors[f"model.layers.{index}.{target}"] = _Tensor(
                source=f"blk.{index}.{source}", shape=shape, interleaved_heads=heads
            )

    for tensor in tensors.values():
        found = gguf.tensors.get(tensor.source)
        if found is None:
            raise ModelError(f"{gguf.path} lacks the tensor {tensor.source}.")
        if found.shape != tensor.shape:
            raise ModelError(f"{gguf.path} has {tensor.source} of shape {found.shape} instead of {tensor.shape}.")
    unknown = gguf.tensors.keys() - {tensor.source for tensor in tensors.values()} - {"rope_freqs.weight"}
    if unknown:
        raise ModelError(f"{gguf.path} has the tensor {min(unknown)}, which is not known for {architecture}.")
    return tensors


_SAFETENSORS_TYPES: dict[FloatType, str] = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def _write_safetensors(path: Path, gguf: GgufFile, tensors: dict[str, _Tensor], config: dict[str, Any]) -> None:
    """One tensor at a time, so that the largest one bounds the memory: the writers of safetensors want all at once."""
    dtype: FloatType = config["dtype"]
    itemsize = 4 if dtype == "float32" else 2
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + math.prod(tensor.shape) * itemsize
        header[name] = {"dtype": _SAFETENSORS_TYPES[dtype], "shape": tensor.shape, "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in tensors.values():
            values = gguf.read(tensor.source, dtype)
            if heads := tensor.interleaved_heads:
                pairs = values.reshape(heads, -1, 2, values.shape[1])
                values = np.ascontiguousarray(pairs.swapaxes(1, 2))
            file.write(values.data)


# --- tokenizer


def _byte_level(*, use_regex: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _split(num_digits: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    """The split of Llama 3 and Qwen 2, which differ in how many digits stay together."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + num_digits + r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), behavior="isolated"), _byte_level(use_regex=False)]
    )


def _smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level(use_regex=True)])


_LLAMA3, _QWEN2 = _split("{1,3}"), _split("")
_PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "default": lambda: _byte_level(use_regex=True),
    "gpt-2": lambda: _byte_level(use_regex=True),
    "smollm": _smollm,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}
_SPACE = "▁"  # what sentencepiece writes for a space


class _Vocabulary:
    """The tokenizer's metadata of a GGUF file."""

    __slots__ = ("_gguf", "chat_template", "kind", "pre", "tokens", "types")

    def __init__(self, gguf: GgufFile) -> None:
        self._gguf = gguf
        self.kind = gguf.field("tokenizer.ggml.model", str)
        if self.kind not in ("gpt2", "llama"):
            raise ModelError(
                f"{gguf.path} has a tokenizer of kind {self.kind!r}; of GGUF files only 'gpt2' and 'llama' are served."
            )
        self.pre = gguf.field("tokenizer.ggml.pre", str, "default")
        if self.kind == "gpt2" and self.pre not in _PRE_TOKENIZERS:
            raise ModelError(
                f"{gguf.path} splits text in the way {self.pre!r}, and only {', '.join(_PRE_TOKENIZERS)} are known."
            )
        self.tokens = self._strings("tokenizer.ggml.tokens")
        self.types = gguf.field("tokenizer.ggml.token_type", np.ndarray, np.ones(len(self.tokens), np.int32))
        self.chat_template = gguf.field("tokenizer.chat_template", str, "")

    def _strings(self, key: str) -> list[str]:
        values = self._gguf.field(key, list)
        if not values or not isinstance(values[0], str):
            raise ModelError(f"{self._gguf.path} has no strings in the metadata field {key}.")
        return values

    def _id(self, name: str) -> int | None:
        """The id of the special token ``name`` (bos, eos, eot, eom, unknown, padding), None where the file has none."""
        token_id = self._gguf.field(f"tokenizer.ggml.{name}_token_id", int, -1)
        return token_id if 0 <= token_id < len(self.tokens) else None

    def special_ids(self) -> dict[str, Any]:
        """bos, pad and the list of end-of-sequence ids, as config.json and generation_config.json name them."""
        eos = [token_id for name in ("eos", "eot", "eom") if (token_id := self._id(name)) is not None]
        eos += [self.tokens.index(text) for text in _END_OF_TURN if text in self.chat_template and text in self.tokens]
        ids = {
            "bos_token_id": self._id("bos"),
            "eos_token_id": [*dict.fromkeys(eos)],
            "pad_token_id": self._id("padding"),
        }
        return {name: value for name, value in ids.items() if value is not None and value != []}

    def config(self, model_max_length: int) -> dict[str, Any]:
        """The contents of tokenizer_config.json."""
        names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
        tokens = {key: self.tokens[i] for key, name in names.items() if (i := self._id(name)) is not None}
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",  # any other class would replace parts of tokenizer.json
            "clean_up_tokenization_spaces": False,
            "model_max_length": model_max_length,
        } | tokens

    def tokenizer(self) -> Tokenizer:
        """The tokenizer, with its added tokens and, where the model wants one, a leading bos."""
        try:
            tokenizer = self._byte_level_bpe() if self.kind == "gpt2" else self._sentencepiece_bpe()
        except Exception as error:  # the tokenizers library raises nothing narrower
            raise ModelError(f"{self._gguf.path} has a broken vocabulary: {error}.") from error
        for token, kind in zip(self.tokens, self.types.tolist(), strict=False):
            if kind in (_UNKNOWN, _CONTROL):
                tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
            elif kind == _USER_DEFINED:
                tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])
        bos = self._id("bos")
        wants_bos = self.kind == "llama" or self.pre in ("llama-bpe", "llama3", "llama-v3")
        if bos is not None and self._gguf.field("tokenizer.ggml.add_bos_token", bool, wants_bos):
            token = self.tokens[bos]
            tokenizer.post_processor = processors.TemplateProcessing(
                single=[token, "$A"], pair=[token, "$A", f"{token}:1", "$B:1"], special_tokens=[(token, bos)]
            )
        return tokenizer

    def _byte_level_bpe(self) -> Tokenizer:
        merges = []
        for merge in self._strings("tokenizer.ggml.merges"):
            left, _, right = merge.partition(" ")
            merges.append((left, right))
        vocabulary = {token: i for i, token in enumerate(self.tokens)}
        whole_words = _PRE_TOKENIZERS[self.pre] is _LLAMA3  # Llama 3 takes a word that is a token without merging
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=whole_words))
        if _PRE_TOKENIZERS[self.pre] is _QWEN2:
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = _PRE_TOKENIZERS[self.pre]()
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer

    def _sentencepiece_bpe(self) -> Tokenizer:
        """Sentencepiece has no merges but a score for each piece: the higher, the earlier it is made, from any pair."""
        scores = self._gguf.field("tokenizer.ggml.scores", np.ndarray).tolist()
        vocabulary = {token: i for i, token in enumerate(self.tokens)}
        ranked = []
        for token, score, kind in zip(self.tokens, scores, self.types.tolist(), strict=True):
            if kind == 1:
                for cut in range(1, len(token)):
                    left, right = token[:cut], token[cut:]
                    if left in vocabulary and right in vocabulary:
                        ranked.append((-score, vocabulary[left], vocabulary[right], left, right))
        ranked.sort()
        unknown = self._id("unknown")
        tokenizer = Tokenizer(
            models.BPE(
                vocab=vocabulary,
                merges=[(left, right) for *_, left, right in ranked],
                unk_token=None if unknown is None else self.tokens[unknown],
                fuse_unk=True,
                byte_fallback=True,
            )
        )
        prefix = self._gguf.field("tokenizer.ggml.add_space_prefix", bool, True)
        spaces = normalizers.Replace(" ", _SPACE)
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefix else spaces
        undo = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        tokenizer.decoder = decoders.Sequence([*undo, decoders.Strip(" ", 1, 0)] if prefix else undo)
        return tokenizer
