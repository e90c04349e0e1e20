"""Folders to tokenizers: special tokens only where meant, end-of-sequence ids as a list, faults in one sentence."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_builders import (
    TINY_FOLDER,
    added_token,
    bos_first,
    llama_spec,
    tiny_spec,
    tiny_tokenizer,
    unigram_spec,
    wordpiece_spec,
    write_folder,
)

from aserve.errors import InvalidRequest, ModelError
from aserve.text.tokenizer import HFTokenizer

START, END = 1, 2
"""<|im_start|> and <|im_end|> of the tiny tokenizer."""


def qwen_like_spec() -> dict:
    """The tiny tokenizer with a BOS, and tokens that are added but not special: a marker and a run of spaces."""
    spec = tiny_spec()
    size = len(spec["model"]["vocab"])
    spec["added_tokens"] += [
        added_token(size, "<think>", special=False),
        added_token(size + 1, "    ", special=False),
    ]
    spec["post_processor"] = bos_first("<|endoftext|>", 0)
    return spec


def test_markers_in_text_are_text_unless_asked_for() -> None:
    """A prompt's <|im_end|> yields no control token, keeps its letters, and is one token with parse_special."""
    tokenizer = tiny_tokenizer()
    text = "hi<|im_end|>\n<|im_start|> you"
    plain = tokenizer.encode(text)

    assert not {START, END} & set(plain)
    assert tokenizer.decode(plain) == text
    assert tokenizer.encode("<|im_end|>", parse_special=True) == [END]


@given(st.lists(st.sampled_from(["<|im_end|>", "<|im_start|>", "<|", "|>", " ", "a", "\n", "é🙂"])))
def test_any_text_round_trips_without_control_tokens(parts: list[str]) -> None:
    """Whatever stands around a marker, and however many there are."""
    tokenizer, text = tiny_tokenizer(), "".join(parts)
    tokens = tokenizer.encode(text)

    assert (tokenizer.decode(tokens), min(tokens, default=3) > END) == (text, True)


@pytest.mark.parametrize(
    ("spec", "marker"), [(llama_spec(), "</s>"), (unigram_spec(), "</s>"), (wordpiece_spec(), "[SEP]")]
)
def test_a_control_token_in_the_vocabulary_does_not_match_as_a_piece(spec: dict, marker: str) -> None:
    """Unigram models would find it there even with special tokens turned off."""
    tokenizer = HFTokenizer(spec)
    [token] = tokenizer.encode(marker, add_special_tokens=False, parse_special=True)

    assert token not in tokenizer.encode(f"hello {marker} world", add_special_tokens=False)


def test_ignore_merges_does_not_find_control_tokens_either() -> None:
    """Newer BPE models look whole words up in the vocabulary, before any merge."""
    spec = tiny_spec()
    spec["model"]["ignore_merges"] = True
    spec["pre_tokenizer"] = None

    assert END not in HFTokenizer(spec).encode("<|im_end|>")


def test_added_tokens_that_the_template_writes_are_control_tokens() -> None:
    """<think> is not special in the file, and still no client's to set; runs of spaces are ordinary text."""
    spec = qwen_like_spec()
    think, spaces = (token["id"] for token in spec["added_tokens"][-2:])
    tokenizer = HFTokenizer(spec, template_text="{% if x %}    {{ '<think>' }}{% endif %}")

    assert {think, spaces} & set(tokenizer.encode("<think>    a")) == {spaces}
    assert think in tokenizer.encode("<think>", parse_special=True)


def test_added_tokens_that_the_template_does_not_write_stay_tokens() -> None:
    """HTML tags and the like, which some vocabularies add, are what the model expects in text."""
    spec = qwen_like_spec()

    assert spec["added_tokens"][-2]["id"] in HFTokenizer(spec).encode("<think>")


def test_a_one_letter_special_token_stays_a_letter() -> None:
    """Folders with the pad token "!" exist; renaming it would make the letter unknown."""
    spec = tiny_spec()
    exclamation = spec["model"]["vocab"]["!"]
    spec["added_tokens"].append(added_token(exclamation, "!"))

    assert HFTokenizer(spec).encode("!") == [exclamation]


def test_bos_comes_from_the_post_processor_and_never_twice() -> None:
    """Added once where asked for, not at all otherwise, and not before a BOS that the text already has."""
    tokenizer = HFTokenizer(llama_spec())
    bare = tokenizer.encode("hello", add_special_tokens=False)

    assert tokenizer.encode("hello") == [1, *bare]
    assert tokenizer.encode("<s>hello", parse_special=True).count(1) == 1


def test_truncation_and_padding_of_a_training_run_do_not_apply() -> None:
    """Some files were saved with them on, and would cut every prompt at 8 tokens."""
    spec = tiny_spec()
    spec["truncation"] = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    spec["padding"] = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<|endoftext|>",
    }
    text = "The quick brown fox jumps over the lazy dog. " * 3

    assert HFTokenizer(spec).encode(text) == tiny_tokenizer().encode(text)


def test_nul_is_a_character() -> None:
    """It encodes, and decodes to itself."""
    tokenizer = tiny_tokenizer()

    assert tokenizer.decode(tokenizer.encode("a\0b")) == "a\0b"


def test_half_a_surrogate_pair_is_the_clients_fault() -> None:
    """Not a TypeError from inside the package."""
    with pytest.raises(InvalidRequest, match="surrogate"):
        tiny_tokenizer().encode("hi \ud83d")


def test_token_bytes_are_raw() -> None:
    """Single bytes of byte-level and byte-fallback vocabularies; spaces as spaces; nothing outside."""
    byte_level, fallback = tiny_tokenizer(), HFTokenizer(llama_spec())
    text = "Straße 🙂!"

    assert b"".join(map(byte_level.token_bytes, byte_level.encode(text))) == text.encode()
    assert [fallback.token_bytes(token) for token in fallback.encode("hé ß", add_special_tokens=False)] == [
        b" h",
        "é".encode(),
        b" ",
        b"\xc3",
        b"\x9f",
    ]
    assert [byte_level.token_bytes(token) for token in (END, -1, 10**6)] == [b"<|im_end|>", b"", b""]


def test_eos_ids_are_those_of_the_generation_config_and_the_tokenizer(tmp_path: Path) -> None:
    """A list and a single token joined; null and config.json do not count beside them."""
    folder = write_folder(
        tmp_path,
        tokenizer=tiny_spec(),
        tokenizer_config={"eos_token": "<|im_end|>", "bos_token": None},
        generation_config={"eos_token_id": [0, 7]},
        config={"eos_token_id": 9, "bos_token_id": 9},
    )
    tokenizer = HFTokenizer.from_folder(folder)

    assert (tokenizer.eos_ids, tokenizer.bos_id) == ((0, 7, END), None)


@pytest.mark.parametrize("config", [{"eos_token_id": 9}, {"text_config": {"eos_token_id": [9]}}])
def test_eos_ids_fall_back_to_the_models_config(tmp_path: Path, config: dict) -> None:
    """Folders without a generation_config.json, of text models and of those that hold one."""
    folder = write_folder(tmp_path, tokenizer=tiny_spec(), config=config)

    assert HFTokenizer.from_folder(folder).eos_ids == (9,)


def test_special_tokens_that_only_the_config_declares_are_special(tmp_path: Path) -> None:
    """In special_tokens_map.json, in additional_special_tokens, or in added_tokens_decoder: skipped in text."""
    spec = tiny_spec()
    size = len(spec["model"]["vocab"])
    folder = write_folder(
        tmp_path,
        tokenizer=spec,
        special_tokens_map={"eos_token": {"content": "first"}},
        tokenizer_config={
            "additional_special_tokens": ["river"],
            "added_tokens_decoder": {str(size): added_token(size, "<|call|>")},
        },
    )
    tokenizer = HFTokenizer.from_folder(folder)
    vocabulary = spec["model"]["vocab"]

    assert tokenizer.eos_ids == (vocabulary["first"],)
    assert tokenizer.decode([vocabulary["first"], vocabulary["river"], size, vocabulary["is"]]) == "is"


def test_a_folder_without_a_tokenizer_is_refused_in_a_sentence(tmp_path: Path) -> None:
    """What is missing, and where."""
    with pytest.raises(ModelError, match=r"holds no tokenizer: there is no tokenizer\.json"):
        HFTokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"model": {"type": "BPE"}}'])
def test_a_damaged_tokenizer_is_refused_in_a_sentence(tmp_path: Path, content: str) -> None:
    """Not JSON, not an object, or not a tokenizer."""
    (tmp_path / "tokenizer.json").write_text(content)

    with pytest.raises(ModelError, match="tokenizer"):
        HFTokenizer.from_folder(tmp_path)


def test_an_older_tokenizer_that_cannot_be_converted_is_refused_in_a_sentence(tmp_path: Path) -> None:
    """A sentencepiece file that is none."""
    (tmp_path / "tokenizer.model").write_bytes(b"\0")
    write_folder(tmp_path, config={"model_type": "no-such-model"})

    with pytest.raises(ModelError, match=r"has no tokenizer\.json, and its tokenizer cannot be converted"):
        HFTokenizer.from_folder(tmp_path)


def test_one_tokenizer_serves_many_threads() -> None:
    """Eight threads encode both ways, stream and decode at once; each gets what it gets alone."""
    tokenizer = tiny_tokenizer()

    def work(number: int) -> tuple[list[int], list[int], str]:
        text = f"Hello {number}<|im_end|> 🙂 " * 20
        plain, special = tokenizer.encode(text), tokenizer.encode(text, parse_special=True)
        decoder = tokenizer.decoder()
        return plain, special, "".join(map(decoder.push, plain)) + decoder.finish()

    alone = [work(number) for number in range(64)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(work, range(64)))

    assert together == alone


def test_reading_a_folder_loads_neither_torch_nor_transformers() -> None:
    """The page of text/ stays importable in a client without either."""
    code = (
        "import sys, aserve.text.chat_template, aserve.text.stops; from aserve.text.tokenizer import HFTokenizer;"
        f"HFTokenizer.from_folder({str(TINY_FOLDER)!r}).encode('a');"
        "print([name for name in ('torch', 'transformers', 'asyncio') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert json.loads(done.stdout.replace("'", '"')) == []
