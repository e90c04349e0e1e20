"""GGUF files: every type against a scalar reference, broken files, and whole models against transformers."""

import json
import random
import struct
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from tiny_gguf import (
    ENCODERS,
    SPECIALS,
    TYPE_IDS,
    model_metadata,
    model_tensors,
    tokenizer_metadata,
    write_gguf,
    write_tiny_model,
)
from tokenizers import Tokenizer

from aserve.errors import ModelError
from aserve.model.convert import convert_gguf
from aserve.model.gguf import QUANT_TYPES, GgufFile, to_bfloat16


def converted(tmp_path: Path, metadata: dict[str, Any], tensors: dict[str, np.ndarray], kind: str = "F32") -> Path:
    folder = tmp_path / "converted"
    folder.mkdir()
    convert_gguf(write_gguf(tmp_path / "model.gguf", metadata, tensors, kind=kind), folder)
    return folder


def converted_tokenizer(tmp_path: Path, tokens: dict[str, Any]) -> Tokenizer:
    tensors = model_tensors(len(tokens["tokenizer.ggml.tokens"]))
    return Tokenizer.from_file(str(converted(tmp_path, model_metadata() | tokens, tensors) / "tokenizer.json"))


# --- types


def scale_and_minimum(j: int, packed: bytes) -> tuple[int, int]:
    if j < 4:
        return packed[j] & 63, packed[j + 4] & 63
    return packed[j + 4] & 15 | packed[j - 4] >> 6 << 4, packed[j + 4] >> 4 | packed[j] >> 6 << 4


def halves(block: bytes, count: int) -> tuple[float, ...]:
    return struct.unpack_from(f"<{count}e", block)


def reference_q4_0(block: bytes) -> list[float]:
    (d,) = halves(block, 1)
    return [d * ((q & 15) - 8) for q in block[2:]] + [d * ((q >> 4) - 8) for q in block[2:]]


def reference_q4_1(block: bytes) -> list[float]:
    d, m = halves(block, 2)
    return [d * (q & 15) + m for q in block[4:]] + [d * (q >> 4) + m for q in block[4:]]


def five_bits(high: int, quants: bytes) -> list[int]:
    low = [q & 15 for q in quants] + [q >> 4 for q in quants]
    return [q | (high >> i & 1) << 4 for i, q in enumerate(low)]


def reference_q5_0(block: bytes) -> list[float]:
    d, high = struct.unpack_from("<eI", block)
    return [d * (q - 16) for q in five_bits(high, block[6:])]


def reference_q5_1(block: bytes) -> list[float]:
    d, m, high = struct.unpack_from("<eeI", block)
    return [d * q + m for q in five_bits(high, block[8:])]


def reference_q8_0(block: bytes) -> list[float]:
    (d,) = halves(block, 1)
    return [d * q for q in struct.unpack_from("<32b", block, 2)]


def reference_q4_k(block: bytes) -> list[float]:
    d, m = halves(block, 2)
    out = []
    for j in range(8):
        scale, minimum = scale_and_minimum(j, block[4:16])
        quants = block[16 + j // 2 * 32 :][:32]
        out += [d * scale * (q >> j % 2 * 4 & 15) - m * minimum for q in quants]
    return out


def reference_q5_k(block: bytes) -> list[float]:
    d, m = halves(block, 2)
    out = []
    for j in range(8):
        scale, minimum = scale_and_minimum(j, block[4:16])
        for high, q in zip(block[16:48], block[48 + j // 2 * 32 :][:32], strict=True):
            out.append(d * scale * ((q >> j % 2 * 4 & 15) + (high >> j & 1) * 16) - m * minimum)
    return out


def reference_q6_k(block: bytes) -> list[float]:
    low, high, scales = block[:128], block[128:192], struct.unpack_from("<16b", block, 192)
    (d,) = struct.unpack_from("<e", block, 208)
    out = [0.0] * 256
    for half in range(2):
        for i in range(32):
            for quarter in range(4):
                nibble = low[half * 64 + quarter % 2 * 32 + i] >> quarter // 2 * 4 & 15
                q = (nibble | (high[half * 32 + i] >> quarter * 2 & 3) << 4) - 32
                out[half * 128 + quarter * 32 + i] = d * scales[half * 8 + quarter * 2 + i // 16] * q
    return out


REFERENCES = {
    "Q4_0": reference_q4_0,
    "Q4_1": reference_q4_1,
    "Q5_0": reference_q5_0,
    "Q5_1": reference_q5_1,
    "Q8_0": reference_q8_0,
    "Q4_K": reference_q4_k,
    "Q5_K": reference_q5_k,
    "Q6_K": reference_q6_k,
}


@pytest.mark.parametrize("name", REFERENCES)
def test_a_quantised_block_decodes_as_the_scalar_reference_does(name: str) -> None:
    """Any bits with finite scales: the vectorised decoder equals the loop over single values."""
    quant = QUANT_TYPES[TYPE_IDS[name]]
    rng = random.Random(name)
    blocks = []
    for _ in range(8):
        block = bytearray(rng.randbytes(quant.block_bytes))
        halves_at = [208] if name == "Q6_K" else [0, 2] if name.endswith(("_1", "4_K", "5_K")) else [0]
        for at in halves_at:
            struct.pack_into("<e", block, at, rng.uniform(-2, 2))
        blocks.append(bytes(block))
    assert quant.decode is not None

    decoded = quant.decode(np.frombuffer(b"".join(blocks), np.uint8).reshape(8, -1)).reshape(8, -1)

    np.testing.assert_allclose(decoded, [REFERENCES[name](block) for block in blocks], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "step"), [("F32", 0), ("F16", 2e-3), ("Q8_0", 0.02), ("Q4_0", 0.4), ("Q4_1", 0.3)])
def test_a_tensor_comes_back_as_it_was_quantised(tmp_path: Path, name: str, step: float) -> None:
    """What the plain quantiser stored is read back to within the type's step, in the right order."""
    tensor = np.random.default_rng(1).standard_normal((6, 64)).astype(np.float32)
    path = write_gguf(tmp_path / "x.gguf", {}, {"x": tensor}, kind=name)

    np.testing.assert_allclose(GgufFile(path).read("x"), tensor, atol=step)


def test_bfloat16_tensors_are_exact(tmp_path: Path) -> None:
    """BF16 is widened to float32 and narrowed again without a change."""
    tensor = np.array([[1.0, -2.5, 0.0078125, 3e38]], np.float32)
    tensor = (to_bfloat16(tensor).astype(np.uint32) << 16).view(np.float32)
    gguf = GgufFile(write_gguf(tmp_path / "x.gguf", {}, {"x": tensor}, kind="BF16"))

    assert gguf.read("x").tolist() == tensor.tolist()
    assert gguf.read("x", "bfloat16").tolist() == to_bfloat16(tensor).tolist()


def test_rounding_to_bfloat16_is_to_nearest_even() -> None:
    """Halves go to the even neighbour, infinities stay, not-a-number stays not-a-number."""
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7F800000, 0x7FFFFFFF], np.uint32)

    assert [hex(x) for x in to_bfloat16(bits.view(np.float32))] == ["0x3f80", "0x3f82", "0x3f81", "0x7f80", "0x7fc0"]


def test_large_tensors_are_read_chunk_by_chunk(tmp_path: Path) -> None:
    """More elements than a chunk holds arrive in order and complete."""
    tensor = np.arange(300_000, dtype=np.float32).reshape(3, -1)
    path = write_gguf(tmp_path / "x.gguf", {}, {"x": tensor})

    assert np.array_equal(GgufFile(path).read("x"), tensor)


def test_other_types_name_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A type that only the optional package decodes ends in a sentence with the type and the command."""
    monkeypatch.setitem(sys.modules, "gguf", None)
    gguf = GgufFile(write_gguf(tmp_path / "x.gguf", {}, {"x": np.zeros((1, 256), np.float32)}, kind="Q2_K"))

    with pytest.raises(ModelError, match=r"Q2_K.*pip install 'aserve\[gguf\]'"):
        gguf.read("x")


def test_other_types_are_decoded_by_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the optional package there, its decoder gets the raw blocks."""
    package = tmp_path / "site" / "gguf"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("GGMLQuantizationType = int\n")
    (package / "quants.py").write_text(
        "import numpy as np\n"
        "def dequantize(raw, kind):\n"
        "    return np.full((len(raw), 256), kind + raw.shape[1], np.float32)\n"
    )
    monkeypatch.syspath_prepend(package.parent)
    for name in ("gguf", "gguf.quants"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    gguf = GgufFile(write_gguf(tmp_path / "x.gguf", {}, {"x": np.zeros((2, 512), np.float32)}, kind="Q2_K"))

    assert gguf.read("x").tolist() == [[10.0 + 84.0] * 512] * 2


# --- metadata and broken files


@pytest.mark.parametrize("version", [2, 3])
def test_metadata_of_every_kind_is_read(tmp_path: Path, version: int) -> None:
    """Numbers, booleans, strings and arrays, in both versions of the format."""
    metadata = {"a": 7, "b": 0.5, "c": True, "d": "naïve", "e": ["x", ""], "f": [1, 2], "g": [[3], [4, 5]]}
    read = GgufFile(write_gguf(tmp_path / "x.gguf", metadata, {}, version=version)).metadata
    lists = {"f": read["f"].tolist(), "g": [part.tolist() for part in read["g"]]}

    assert read | lists == metadata


def test_a_field_of_another_kind_is_refused(tmp_path: Path) -> None:
    """The sentence names the file and the key."""
    gguf = GgufFile(write_gguf(tmp_path / "x.gguf", {"a": "text"}, {}))

    with pytest.raises(ModelError, match=r"x\.gguf has an unexpected kind of value for the metadata field a"):
        gguf.field("a", int)
    with pytest.raises(ModelError, match=r"x\.gguf lacks the metadata field b"):
        gguf.field("b", int)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "cannot read the GGUF file"),
        (b"PK\3\4" + bytes(64), "magic bytes"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version is 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "little-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**62, 0) + bytes(64), "more than it can hold"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**62) + bytes(64), "more than it can hold"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**63) + bytes(64), "middle of its header"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 4, 2**61) + bytes(64), "more than it can hold"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 77) + bytes(64), "unknown type 77"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"\xff", 4) + bytes(64), "utf-8"),
    ],
)
def test_a_broken_header_is_refused_without_allocating(tmp_path: Path, content: bytes, sentence: str) -> None:
    """Whatever a header claims, the answer is one sentence and no memory of that size."""
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    tracemalloc.start()

    with pytest.raises(ModelError, match=sentence):
        GgufFile(path)

    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def described(shape: tuple[int, ...], type_id: int, offset: int, name: bytes = b"t") -> bytes:
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return struct.pack("<Q", len(name)) + name + dims + struct.pack("<IQ", type_id, offset)


@pytest.mark.parametrize(
    ("tensors", "sentence"),
    [
        ([described((2**40, 2**40), 0, 0)], "beyond its end"),
        ([described((8,), 0, 2**63)], "beyond its end"),
        ([described((8,), 0, 0), described((8,), 0, 16, b"u")], "over another"),
        ([described((8,), 0, 0), described((8,), 0, 32)], "over another"),
        ([described((33,), 8, 0)], "shape that Q8_0 cannot have"),
        ([described((0,), 0, 0)], "shape that F32 cannot have"),
        ([described((1,) * 5, 0, 0)], "5 dimensions"),
        ([described((8,), 99, 0)], "unknown type 99"),
    ],
)
def test_a_tensor_that_the_file_cannot_hold_is_refused(tmp_path: Path, tensors: list[bytes], sentence: str) -> None:
    """Sizes, places, overlaps and types are checked before anything is read."""
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), 0) + b"".join(tensors) + bytes(256))

    with pytest.raises(ModelError, match=sentence):
        GgufFile(path)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    """No prefix of a valid file is taken for a model."""
    whole = write_tiny_model(tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    for length in [*range(0, 6000, 97), len(whole) // 2, len(whole) - 33]:
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError):
            GgufFile(path)


def test_a_damaged_header_never_ends_in_another_error(tmp_path: Path) -> None:
    """300 files with a few wrong bytes each: converted, or refused by a ModelError."""
    whole = write_tiny_model(tmp_path / "whole.gguf").read_bytes()
    path, folder, rng = tmp_path / "damaged.gguf", tmp_path / "out", random.Random(5)
    folder.mkdir()
    refused = 0
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(6500)] = rng.choice((0, 1, 9, 127, 255, rng.randrange(256)))
        path.write_bytes(damaged)
        try:
            convert_gguf(path, folder)
        except ModelError:
            refused += 1
    assert 100 < refused < 300


# --- whole models


def interleaved(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of q or k as llama.cpp wants them: the two halves of each head in turn."""
    rows, columns = weights.shape
    return weights.reshape(num_heads, 2, rows // num_heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def gguf_tensors(state: dict[str, Any], architecture: str) -> dict[str, np.ndarray]:
    """A Hugging Face state dict under its GGUF names."""
    parts = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers": "blk",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    tensors = {}
    for name, value in state.items():
        tensor = value.numpy()
        for theirs, ours in parts.items():
            name = name.replace(theirs + ".", ours + ".")
        if architecture == "llama" and name.endswith(("attn_q.weight", "attn_k.weight")):
            tensor = interleaved(tensor, 4 if "attn_q" in name else 2)
        tensors[name] = tensor
    return tensors


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.torch
@pytest.mark.parametrize(("family", "rope"), [("llama", {}), ("llama", LLAMA3_ROPE), ("qwen2", {}), ("qwen3", {})])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_converted_model_computes_what_the_original_did(
    tmp_path: Path, family: str, rope: dict[str, Any], tied: bool
) -> None:
    """A random model of each family, written as GGUF in float32, comes back with the same logits."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    tokens = tokenizer_metadata()
    config = AutoConfig.for_model(
        family,
        vocab_size=len(tokens["tokenizer.ggml.tokens"]),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0} | rope,
        tie_word_embeddings=tied,
    )
    original = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in original.parameters():
            parameter.normal_(0, 0.2)
    state = dict(original.state_dict())
    if tied:
        del state["lm_head.weight"]
    tensors = gguf_tensors(state, family)
    if rope:
        plain = 500000.0 ** (-np.arange(0, 16, 2) / 16)
        tensors["rope_freqs.weight"] = (plain / original.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    sizes = model_metadata(family, num_layers=2) | {f"{family}.rope.freq_base": 500000.0}
    folder = converted(tmp_path, sizes | tokens, tensors)
    input_ids_BT = torch.randint(0, config.vocab_size, (1, 40))

    again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    assert type(again) is type(original)
    assert again.config.rope_parameters == config.rope_parameters
    torch.testing.assert_close(again(input_ids_BT).logits, original(input_ids_BT).logits, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("kind", "dtype"), [("F32", "F32"), ("F16", "F16"), ("Q8_0", "BF16"), ("BF16", "BF16")])
def test_weights_keep_what_the_file_knows(tmp_path: Path, kind: str, dtype: str) -> None:
    """float32 and float16 files stay so; quantised ones become bfloat16; the config says which."""
    tokens = tokenizer_metadata()
    tensors = model_tensors(len(tokens["tokenizer.ggml.tokens"]))
    folder = converted(tmp_path, model_metadata() | tokens, tensors, kind)

    with safe_open(folder / "model.safetensors", framework="numpy") as weights:
        types = {weights.get_slice(name).get_dtype() for name in weights.keys()}
    assert types == {dtype}
    config = json.loads((folder / "config.json").read_text())
    assert config["dtype"] == {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[dtype]


def without(tensors: dict[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    return {key: value for key, value in tensors.items() if key != name}


def test_models_that_are_not_known_are_refused_by_name(tmp_path: Path) -> None:
    """Architecture, experts, rope, tensors, shapes, tokenizer: each in one sentence that names the fault."""
    tokens = tokenizer_metadata()
    tensors = model_tensors(len(tokens["tokenizer.ggml.tokens"]))
    llama = model_metadata() | tokens
    cases: list[tuple[dict[str, Any], dict[str, np.ndarray], str]] = [
        (llama | {"general.architecture": "mamba"}, tensors, "architecture 'mamba'"),
        (llama | {"llama.expert_count": 8}, tensors, "mixture of experts"),
        (llama | {"llama.rope.scaling.type": "longrope"}, tensors, "'longrope'"),
        (llama | {"llama.rope.dimension_count": 8}, tensors, "rotates only a part"),
        (llama | {"llama.attention.head_count": 0}, tensors, "has 0 for the metadata field llama.attention.head_count"),
        (llama | {"llama.block_count": 4_000_000_000}, tensors, "claims 4000000000 layers"),
        (llama | {"llama.feed_forward_length": 32}, tensors, r"ffn_gate.weight of shape \(96, 64\) instead of"),
        (llama, tensors | {"rope_freqs.weight": np.full(8, 3.0, np.float32)}, "rope frequencies"),
        (llama, without(tensors, "token_embd.weight"), "lacks the tensor token_embd.weight"),
        (llama, without(tensors, "blk.0.attn_v.weight"), "lacks the tensor blk.0.attn_v.weight"),
        (llama, tensors | {"blk.0.attn_q.bias": np.zeros(64, np.float32)}, "has the tensor blk.0.attn_q.bias"),
        (llama | {"tokenizer.ggml.model": "t5"}, tensors, "tokenizer of kind 't5'"),
        (llama | {"tokenizer.ggml.pre": "tekken"}, tensors, "way 'tekken'"),
        (llama | {"tokenizer.ggml.tokens": [1, 2]}, tensors, "field tokenizer.ggml.tokens"),
        (llama | {"tokenizer.ggml.merges": ["no such"]}, tensors, "broken vocabulary"),
    ]
    for number, (metadata, tensors_, sentence) in enumerate(cases):
        path = write_gguf(tmp_path / f"{number}.gguf", metadata, tensors_)
        with pytest.raises(ModelError, match=sentence):
            convert_gguf(path, tmp_path)


# --- tokenizers


@pytest.mark.parametrize(
    ("pre", "tokens"),
    [
        ("smollm", ["1", "2", "3", "4", "ab"]),
        ("qwen2", ["1", "2", "3", "4", "ab"]),
        ("llama-bpe", ["123", "4", "ab"]),
        ("gpt-2", ["1234", "ab"]),
        ("default", ["1234", "ab"]),
        (None, ["1234", "ab"]),
    ],
)
def test_each_family_splits_digits_its_own_way(tmp_path: Path, pre: str | None, tokens: list[str]) -> None:
    """The merges would join all four digits; the split before them decides."""
    tokenizer = converted_tokenizer(tmp_path, tokenizer_metadata(pre))

    assert tokenizer.encode("1234ab").tokens == tokens


@pytest.mark.parametrize("pre", ["smollm", "qwen2", "llama-bpe", "default"])
def test_byte_level_text_survives_the_way_there_and_back(tmp_path: Path, pre: str) -> None:
    """Spaces, line ends, digits and characters of several bytes; special tokens stay whole."""
    tokenizer = converted_tokenizer(tmp_path, tokenizer_metadata(pre))
    text = "<|im_start|>user\n  It's 12 o'clock,\r\n\tnaïve 🙂 你好!<|im_end|>"
    encoding = tokenizer.encode(text)

    assert tokenizer.decode(encoding.ids, skip_special_tokens=False) == text
    assert [token for token in encoding.tokens if token in SPECIALS] == ["<|im_start|>", "<|im_end|>"]


def test_qwen_composes_characters(tmp_path: Path) -> None:
    """An e and a combining accent become one character before anything else."""
    tokenizer = converted_tokenizer(tmp_path, tokenizer_metadata("qwen2"))

    assert tokenizer.decode(tokenizer.encode("e\u0301").ids) == "\u00e9"


def test_a_leading_bos_is_the_files_choice(tmp_path: Path) -> None:
    """With add_bos_token every text starts with bos; text that asks for no special tokens does not."""
    tokenizer = converted_tokenizer(tmp_path, tokenizer_metadata(**{"tokenizer.ggml.add_bos_token": True}))

    assert tokenizer.encode("ab").tokens == ["<|im_start|>", "ab"]
    assert tokenizer.encode("ab", add_special_tokens=False).tokens == ["ab"]


def test_every_end_of_sequence_is_listed(tmp_path: Path) -> None:
    """eos, eot and an end of turn that the template writes, each once, in both configs; the template is a file."""
    tokens = tokenizer_metadata(**{"tokenizer.ggml.eos_token_id": 0, "tokenizer.ggml.eot_token_id": 0})
    folder = converted(tmp_path, model_metadata() | tokens, model_tensors(len(tokens["tokenizer.ggml.tokens"])))
    special = {"bos_token_id": 1, "eos_token_id": [0, 2], "pad_token_id": 2}

    assert json.loads((folder / "generation_config.json").read_text()) == special
    assert json.loads((folder / "config.json").read_text()).items() >= special.items()
    assert (folder / "chat_template.jinja").read_text() == tokens["tokenizer.chat_template"]
    assert json.loads((folder / "tokenizer_config.json").read_text())["eos_token"] == "<|endoftext|>"


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    words = ["▁", "a", "b", "c", "ab", "bc", "▁a", "▁ab", "<|user|>"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    scores = [0.0] * 259 + [-9.0, -9.0, -9.0, -9.0, -3.0, -1.0, -4.0, -5.0, 0.0]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * 8 + [4],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    } | changes


def test_sentencepiece_joins_the_best_pair_first(tmp_path: Path) -> None:
    """bc has the higher score than ab, whatever stands further left; bos and the leading space come by default."""
    tokenizer = converted_tokenizer(tmp_path, sentencepiece_metadata())

    assert tokenizer.encode("abc ab").tokens == ["<s>", "▁a", "bc", "▁ab"]
    assert tokenizer.encode("c<|user|>a").tokens == ["<s>", "▁", "c", "<|user|>", "▁a"]


def test_sentencepiece_falls_back_to_bytes(tmp_path: Path) -> None:
    """Characters without a piece become bytes, and come back; the leading space does not."""
    tokenizer = converted_tokenizer(tmp_path, sentencepiece_metadata())
    encoding = tokenizer.encode("a é🙂  b")

    assert "<0xC3>" in encoding.tokens
    assert tokenizer.decode(encoding.ids) == "a é🙂  b"


def test_sentencepiece_without_a_leading_space(tmp_path: Path) -> None:
    """The file can turn the leading space and bos off."""
    off = {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False}
    tokenizer = converted_tokenizer(tmp_path, sentencepiece_metadata(**off))

    assert tokenizer.encode("ab a").tokens == ["ab", "▁a"]
    assert tokenizer.decode(tokenizer.encode("ab a").ids) == "ab a"


def test_the_writers_encoders_cover_the_types_read_here() -> None:
    """A type added to the table needs an encoder or a reference in these tests."""
    native = {quant.name for quant in QUANT_TYPES.values() if quant.decode is not None}

    assert native <= ENCODERS.keys() | REFERENCES.keys()
