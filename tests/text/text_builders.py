"""Small tokenizers of every decoding family, and folders that hold them."""

import copy
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from aserve.text.tokenizer import HFTokenizer

TINY_FOLDER = Path(__file__).parents[1] / "data" / "tiny_tokenizer"
SPACE_MARK = "▁"


@lru_cache
def _tiny_spec() -> dict[str, Any]:
    return json.loads((TINY_FOLDER / "tokenizer.json").read_text("utf-8"))


def tiny_spec() -> dict[str, Any]:
    """The tiny tokenizer.json, a copy to change."""
    return copy.deepcopy(_tiny_spec())


@lru_cache
def tiny_tokenizer() -> HFTokenizer:
    """The tiny in-repo ByteLevel tokenizer."""
    return HFTokenizer.from_folder(TINY_FOLDER)


def added_token(token_id: int, content: str, **flags: bool) -> dict[str, Any]:
    """An entry of added_tokens."""
    defaults = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": token_id, "content": content, **defaults, **flags}


def spec_of(model: dict[str, Any], *, special: list[str], **parts: Any) -> dict[str, Any]:
    """A tokenizer.json around ``model``, whose vocabulary holds the ``special`` tokens."""
    vocabulary = model["vocab"]
    ids = vocabulary if isinstance(vocabulary, dict) else {piece: i for i, (piece, _) in enumerate(vocabulary)}
    names = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    return {
        "version": "1.0",
        "added_tokens": [added_token(ids[token], token) for token in special],
        **(dict.fromkeys(names) | parts),
        "model": model,
    }


def bos_first(bos: str, bos_id: int) -> dict[str, Any]:
    """A post-processor that puts ``bos`` before every text."""
    return {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}},
    }


def llama_spec() -> dict[str, Any]:
    """Byte fallback with a leading space mark and a BOS, in the manner of the first Llamas."""
    merges = [[SPACE_MARK, "h"], ["l", "l"], ["e", "ll"], [SPACE_MARK + "h", "ell"], [SPACE_MARK, "w"], ["o", "r"]]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), SPACE_MARK]
    pieces += [*"abcdefghijklmnopqrstuvwxyz.,!<>/", *("".join(merge) for merge in merges), "�", "é"]
    model = {
        "type": "BPE",
        "vocab": {piece: token for token, piece in enumerate(pieces)},
        "merges": merges,
        "byte_fallback": True,
        "unk_token": "<unk>",
        "fuse_unk": True,
    }
    to_mark = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK}
    return spec_of(
        model,
        special=["<unk>", "<s>", "</s>"],
        normalizer={"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": SPACE_MARK}, to_mark]},
        post_processor=bos_first("<s>", 1),
        decoder={
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
    )


def unigram_spec(prepend_scheme: str = "always") -> dict[str, Any]:
    """A Unigram vocabulary with Metaspace, whose control tokens would match in text as any other piece does."""
    pieces = ["<unk>", "</s>", SPACE_MARK, "▁hello", "▁world", "▁▁", *"abcdehlorw!</>s"]
    metaspace = {"type": "Metaspace", "replacement": SPACE_MARK, "prepend_scheme": prepend_scheme, "split": True}
    model = {"type": "Unigram", "unk_id": 0, "vocab": [[piece, -1.0 * i] for i, piece in enumerate(pieces)]}
    return spec_of(model, special=["<unk>", "</s>"], pre_tokenizer=metaspace, decoder=metaspace)


def wordpiece_spec() -> dict[str, Any]:
    """WordPiece: whether a space comes before a token depends on its place."""
    pieces = ["[UNK]", "[SEP]", "hello", "world", "##s", "##ly", "!", "'", "n"]
    return spec_of(
        {
            "type": "WordPiece",
            "vocab": {piece: token for token, piece in enumerate(pieces)},
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
        },
        special=["[UNK]", "[SEP]"],
        pre_tokenizer={"type": "BertPreTokenizer"},
        decoder={"type": "WordPiece", "prefix": "##", "cleanup": True},
    )


def suffix_spec() -> dict[str, Any]:
    """BPE with an end-of-word suffix: a token's trailing space shows only once another token follows."""
    pieces = ["<unk>", "h", "i", "i</w>", "o</w>", "hi</w>", "ho</w>"]
    return spec_of(
        {
            "type": "BPE",
            "vocab": {piece: token for token, piece in enumerate(pieces)},
            "merges": [["h", "i</w>"], ["h", "o</w>"]],
            "unk_token": "<unk>",
            "end_of_word_suffix": "</w>",
        },
        special=["<unk>"],
        pre_tokenizer={"type": "Whitespace"},
        decoder={"type": "BPEDecoder", "suffix": "</w>"},
    )


def write_folder(folder: Path, **files: Any) -> Path:
    """A model's folder of JSON files, named without their ending; a string is written as it is, under its own name."""
    for name, content in files.items():
        if isinstance(content, str):
            (folder / name).write_text(content, "utf-8")
        else:
            (folder / f"{name}.json").write_text(json.dumps(content), "utf-8")
    return folder
