"""Model folders for measurements with random weights: a config and a tokenizer, no weights.

    python tests/gpu/make_models.py FOLDER [llama8b llama1b qwen06b tiny]

All share one vocabulary of 49,152: lower-case words of two or three syllables, each with its space before it, and the
printable ASCII characters. Every token is whole text: a random model never leaves half a character behind, for which a
server would wait, and a prompt of so many random tokens is the same number of tokens again when it is read back.
"""

import argparse
import itertools
import json
import sys
from pathlib import Path
from typing import Any, Final

VOCAB_SIZE: Final = 49_152
SPECIALS: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CONSONANTS: Final = "bcdfghjklmnpqrstvwxz"
_VOWELS: Final = "aeiou"
_SPACE: Final = "Ġ"  # as byte-level vocabularies write it
_NEWLINE: Final = "Ċ"
_TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_BASE: Final[dict[str, Any]] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_act": "silu",
    "max_position_embeddings": 32_768,
    "dtype": "bfloat16",
    "torch_dtype": "bfloat16",  # its name before
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_bias": False,
    "mlp_bias": False,
}
_LLAMA: Final = _BASE | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
}
_QWEN3: Final = _BASE | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
}


def _shape(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, head: int, tied: bool) -> Any:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
        "tie_word_embeddings": tied,
    }


SHAPES: Final[dict[str, dict[str, Any]]] = {
    "llama8b": _LLAMA | _shape(4096, 14_336, 32, 32, 8, 128, tied=False),
    "llama1b": _LLAMA | _shape(2048, 8192, 16, 32, 8, 64, tied=True),
    "qwen06b": _QWEN3 | _shape(1024, 3072, 28, 16, 8, 128, tied=True),
    "tiny": _LLAMA | _shape(64, 128, 2, 2, 1, 64, tied=True),
}


def vocabulary() -> dict[str, int]:
    """Token to id: specials, characters, words."""
    characters = [*map(chr, range(0x21, 0x7F)), _SPACE, _NEWLINE]
    syllables = ["".join(pair) for pair in itertools.product(_CONSONANTS, _VOWELS)]
    words = (_SPACE + "".join(parts) for length in (2, 3) for parts in itertools.product(syllables, repeat=length))
    tokens = itertools.chain(SPECIALS, characters, words)
    return {token: number for number, token in enumerate(itertools.islice(tokens, VOCAB_SIZE))}


def tokenizer_json() -> dict[str, Any]:
    """No merges: a piece of text is one token if the vocabulary has it, else its characters are."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": number, "content": token, **added} for number, token in enumerate(SPECIALS)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": vocabulary(),
            "merges": [],
        },
    }


def write_model(parent: Path, name: str) -> Path:
    """The folder ``parent / name``, written anew."""
    folder = parent / name
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, dict[str, Any]] = {
        "config.json": SHAPES[name],
        "tokenizer.json": tokenizer_json(),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": SPECIALS[2],
            "pad_token": SPECIALS[0],
            "model_max_length": SHAPES[name]["max_position_embeddings"],
            "chat_template": _TEMPLATE,
        },
    }
    for file, content in files.items():
        (folder / file).write_text(json.dumps(content, indent=1), encoding="utf-8")
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("shapes", nargs="*", metavar="shape", help=", ".join(SHAPES))
    arguments = parser.parse_args()
    for name in arguments.shapes or SHAPES:
        sys.stdout.write(f"{write_model(arguments.folder, name)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
