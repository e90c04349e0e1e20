"""A small GGUF writer for tests, independent of the reader: plain Python, one value after the other."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

TYPE_IDS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q2_K": 10}
TYPE_IDS |= {"Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "BF16": 30}


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: Any) -> tuple[int, bytes]:
    match value:
        case bool():
            return 7, struct.pack("<?", value)
        case int():
            return 4, struct.pack("<I", value)
        case float():
            return 6, struct.pack("<f", value)
        case str():
            return 8, _string(value)
    items = [_value(item) for item in value]
    return 9, struct.pack("<IQ", items[0][0], len(items)) + b"".join(body for _, body in items)


def write_gguf(
    path: Path,
    metadata: dict[str, Any],
    tensors: dict[str, np.ndarray],
    *,
    kind: str = "F32",
    version: int = 3,
) -> Path:
    """Write ``tensors`` (float arrays) with matrices as ``kind`` and vectors as F32; returns ``path``."""
    out = [b"GGUF", struct.pack("<IQQ", version, len(tensors), len(metadata))]
    for key, value in metadata.items():
        type_id, body = _value(value)
        out.append(_string(key) + struct.pack("<I", type_id) + body)
    data = b""
    for name, tensor in tensors.items():
        used = kind if tensor.ndim > 1 else "F32"
        out.append(_string(name) + struct.pack("<I", tensor.ndim))
        out.append(b"".join(struct.pack("<Q", size) for size in reversed(tensor.shape)))
        out.append(struct.pack("<IQ", TYPE_IDS[used], len(data)))
        data += ENCODERS[used](tensor.reshape(-1).tolist())
        data += bytes(-len(data) % 32)
    header = b"".join(out)
    path.write_bytes(header + bytes(-len(header) % 32) + data)
    return path


# --- quantisers


def _blocks(values: list[float]) -> list[list[float]]:
    return [values[start : start + 32] for start in range(0, len(values), 32)]


def _packed(quants: list[int]) -> bytes:
    return bytes(quants[i] | quants[i + 16] << 4 for i in range(16))


def _q8_0(values: list[float]) -> bytes:
    out = b""
    for block in _blocks(values):
        scale = max(map(abs, block)) / 127 or 1.0
        out += struct.pack("<e32b", scale, *(round(value / scale) for value in block))
    return out


def _q4_0(values: list[float]) -> bytes:
    out = b""
    for block in _blocks(values):
        scale = max(block, key=abs) / -8 or 1.0
        out += struct.pack("<e", scale) + _packed([min(15, max(0, round(value / scale) + 8)) for value in block])
    return out


def _q4_1(values: list[float]) -> bytes:
    out = b""
    for block in _blocks(values):
        scale = (max(block) - min(block)) / 15 or 1.0
        quants = [min(15, max(0, round((value - min(block)) / scale))) for value in block]
        out += struct.pack("<ee", scale, min(block)) + _packed(quants)
    return out


def _bf16(values: list[float]) -> bytes:
    """Cut off, not rounded: exact for values that bfloat16 can hold."""
    return b"".join(struct.pack("<f", value)[2:] for value in values)


ENCODERS: dict[str, Callable[[list[float]], bytes]] = {
    "F32": lambda values: struct.pack(f"<{len(values)}f", *values),
    "F16": lambda values: struct.pack(f"<{len(values)}e", *values),
    "BF16": _bf16,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q8_0": _q8_0,
    "Q2_K": lambda values: bytes(len(values) // 256 * 84),
}


# --- a whole model


def byte_alphabet() -> list[str]:
    """The 256 characters that stand for bytes in byte-level vocabularies, in the order of the bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["1 2", "12 3", "123 4", "a b"]


def tokenizer_metadata(pre: str | None = "smollm", **changes: Any) -> dict[str, Any]:
    """A byte-level vocabulary: three special tokens, the bytes, and a few merges."""
    tokens = [*SPECIALS, *byte_alphabet(), *(merge.replace(" ", "") for merge in MERGES)]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(SPECIALS) + [1] * (len(tokens) - len(SPECIALS)),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{{ messages[0].content }}<|im_end|>",
    }
    if pre is not None:
        metadata["tokenizer.ggml.pre"] = pre
    return metadata | changes


def model_metadata(architecture: str = "llama", *, num_layers: int = 1, **changes: Any) -> dict[str, Any]:
    """Sizes: hidden 64, 4 heads of 16, 2 KV heads, ffn 96, context 128. ``changes`` lack the architecture."""
    sizes = {
        "block_count": num_layers,
        "context_length": 128,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
    } | changes
    return {"general.architecture": architecture} | {f"{architecture}.{key}": value for key, value in sizes.items()}


def model_tensors(vocab_size: int, *, num_layers: int = 1) -> dict[str, np.ndarray]:
    """Random tensors of a llama of ``model_metadata``'s sizes, under their GGUF names."""
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab_size, 64), "output_norm.weight": (64,)}
    for layer in range(num_layers):
        block = f"blk.{layer}."
        shapes |= {block + "attn_norm.weight": (64,), block + "ffn_norm.weight": (64,)}
        shapes |= {block + "attn_q.weight": (64, 64), block + "attn_k.weight": (32, 64)}
        shapes |= {block + "attn_v.weight": (32, 64), block + "attn_output.weight": (64, 64)}
        shapes |= {block + "ffn_gate.weight": (96, 64), block + "ffn_up.weight": (96, 64)}
        shapes |= {block + "ffn_down.weight": (64, 96)}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def write_tiny_model(path: Path, *, kind: str = "Q8_0") -> Path:
    """A whole one-layer llama with a byte-level tokenizer; returns ``path``."""
    tokens = tokenizer_metadata()
    vocab_size = len(tokens["tokenizer.ggml.tokens"])
    return write_gguf(path, model_metadata() | tokens, model_tensors(vocab_size), kind=kind)
