"""Incremental decoding joins to decoding the whole, for every family of decoders and every cut."""

import json
import time
from collections.abc import Callable
from functools import lru_cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_builders import SPACE_MARK, llama_spec, suffix_spec, tiny_tokenizer, unigram_spec, wordpiece_spec
from tokenizers import Tokenizer

from aserve.text.detokenizer import HELD_TOKENS_MAX, WindowDetokenizer
from aserve.text.tokenizer import HFTokenizer

BUILDERS: dict[str, Callable[[], HFTokenizer]] = {
    "byte level": tiny_tokenizer,
    "byte fallback": lambda: HFTokenizer(llama_spec()),
    "metaspace": lambda: HFTokenizer(unigram_spec()),
    "metaspace without prefix": lambda: HFTokenizer(unigram_spec("never")),
    "word piece": lambda: HFTokenizer(wordpiece_spec()),
    "suffix": lambda: HFTokenizer(suffix_spec()),
}


@lru_cache
def tokenizer_named(name: str) -> HFTokenizer:
    return BUILDERS[name]()


def deltas(tokenizer: HFTokenizer, tokens: list[int], *, skip_special_tokens: bool = True) -> list[str]:
    """What each push gives, and the end."""
    decoder = tokenizer.decoder(skip_special_tokens=skip_special_tokens)
    return [*map(decoder.push, tokens), decoder.finish()]


def byte_tokens(tokenizer: HFTokenizer, data: bytes) -> list[int]:
    """One token for each byte."""
    by_bytes = {tokenizer.token_bytes(token): token for token in reversed(range(tokenizer.vocab_size))}
    return [by_bytes[bytes([byte])] for byte in data]


@pytest.mark.parametrize("name", BUILDERS)
@settings(max_examples=200)
@given(data=st.data())
def test_pushes_and_finish_join_to_decode(name: str, data: st.DataObject) -> None:
    """Any ids at all: halves of characters, special tokens, ids far outside, skipping on and off."""
    tokenizer = tokenizer_named(name)
    token = st.integers(0, tokenizer.vocab_size - 1) | st.sampled_from([-1, 10**6, 2**40])
    tokens = data.draw(st.lists(token, max_size=40))
    skip = data.draw(st.booleans())

    assert "".join(deltas(tokenizer, tokens, skip_special_tokens=skip)) == tokenizer.decode(
        tokens, skip_special_tokens=skip
    )


@settings(max_examples=300)
@given(
    text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40),
    skip=st.booleans(),
    tail=st.lists(st.integers(0, 558), max_size=10),
)
def test_byte_level_decoding_is_the_packages_own(text: str, skip: bool, tail: list[int]) -> None:
    """The table gives what ``tokenizers`` gives, for text and for arbitrary ids behind it."""
    tokenizer = tiny_tokenizer()
    tokens = tokenizer.encode(text) + tail

    assert tokenizer.decode(tokens, skip_special_tokens=skip) == tokenizer._tokenizer.decode(
        tokens, skip_special_tokens=skip
    )


@pytest.mark.parametrize("spec", [llama_spec(), unigram_spec(), unigram_spec("never")])
@settings(max_examples=200)
@given(data=st.data())
def test_space_mark_decoding_is_the_packages_own(spec: dict, data: st.DataObject) -> None:
    """The same for spaces at the start, marks inside tokens and special tokens; byte tokens apart."""
    ours, theirs = HFTokenizer(spec), Tokenizer.from_str(json.dumps(spec))
    known = [token for token in range(ours.vocab_size) if not theirs.id_to_token(token).startswith("<0x")]
    tokens = data.draw(st.lists(st.sampled_from(known), max_size=20))
    skip = data.draw(st.booleans())

    assert ours.decode(tokens, skip_special_tokens=skip) == theirs.decode(tokens, skip_special_tokens=skip)


@settings(max_examples=100)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
def test_valid_byte_tokens_decode_as_in_the_package(text: str) -> None:
    """A byte-fallback vocabulary spells most characters in byte tokens; whole ones come out equal."""
    tokenizer = tokenizer_named("byte fallback")
    tokens = tokenizer.encode(text)

    assert tokenizer.decode(tokens) == tokenizer._tokenizer.decode(tokens)


@pytest.mark.parametrize("name", ["byte level", "byte fallback"])
def test_an_emoji_in_four_tokens_comes_out_once_and_whole(name: str) -> None:
    """Nothing while it is incomplete, then the one character, with what follows untouched."""
    tokenizer = tokenizer_named(name)
    tokens = byte_tokens(tokenizer, "🙂a".encode())

    assert deltas(tokenizer, tokens)[-6:] == ["", "", "", "🙂", "a", ""]


@pytest.mark.parametrize("name", ["byte level", "byte fallback"])
def test_a_truncated_last_character_is_one_replacement_at_the_end(name: str) -> None:
    """The end flushes what is held; characters before it stay."""
    tokenizer = tokenizer_named(name)
    tokens = byte_tokens(tokenizer, "é🙂".encode()[:-1])

    assert deltas(tokenizer, tokens) == ["", "é", "", "", "", "�"]


@pytest.mark.parametrize("name", ["byte level", "byte fallback"])
def test_invalid_bytes_are_shown_as_they_come(name: str) -> None:
    """200 invalid bytes are not withheld: a push later at most three bytes are still open."""
    tokenizer = tokenizer_named(name)
    decoder = tokenizer.decoder()
    shown = "".join(map(decoder.push, byte_tokens(tokenizer, b"\xff\xfe\xc0\x80\xf5" * 40)))

    assert shown + decoder.finish() == "�" * 200
    assert len(shown) >= 197


def test_a_space_does_not_flush_half_a_character_that_it_breaks_twice() -> None:
    """The valid beginning becomes one replacement when the space proves it broken; the later bytes one each."""
    tokenizer = tiny_tokenizer()

    assert deltas(tokenizer, byte_tokens(tokenizer, b"\xe4 \xbd\xa0")) == ["", "� ", "�", "�", ""]


def test_a_token_that_is_the_replacement_character_is_not_withheld() -> None:
    """U+FFFD as a piece of the vocabulary is a character like any other."""
    tokenizer = tokenizer_named("byte fallback")
    tokens = tokenizer.encode("a�", add_special_tokens=False)

    assert deltas(tokenizer, tokens)[-2:] == ["�", ""]


def test_spaces_between_words_survive_and_the_first_goes_as_in_decode() -> None:
    """Sentencepiece-style pieces: one leading space is the vocabulary's, all others are the text's."""
    tokenizer = tokenizer_named("byte fallback")
    tokens = tokenizer.encode("hello world", add_special_tokens=False)

    assert tokenizer._tokenizer.id_to_token(tokens[0]).startswith(SPACE_MARK)
    assert deltas(tokenizer, tokens)[:2] == ["hell", "o"]
    assert "".join(deltas(tokenizer, tokens)) == "hello world"


def test_special_tokens_are_skipped_or_shown_as_asked() -> None:
    """Skipped ones vanish even inside a character; shown ones are their text."""
    tokenizer = tiny_tokenizer()
    [end] = tokenizer.eos_ids
    first, *rest = byte_tokens(tokenizer, "é".encode())

    assert deltas(tokenizer, [first, end, *rest]) == ["", "", "é", ""]
    assert deltas(tokenizer, [end], skip_special_tokens=False) == ["<|im_end|>", ""]


def test_ids_outside_the_vocabulary_are_nothing() -> None:
    """A padded row of the logits must not end the stream that it hits."""
    tokenizer = tiny_tokenizer()
    first, *rest = byte_tokens(tokenizer, "é".encode())

    assert deltas(tokenizer, [first, tokenizer.vocab_size + 3, *rest]) == ["", "", "é", ""]


def test_a_window_shows_a_run_of_replacements_before_it_grows_long() -> None:
    """Any decoder, even one whose text always ends in U+FFFD, is withheld for a bounded number of tokens."""
    decoder = WindowDetokenizer(lambda tokens: "�" * len(tokens))
    shown = [decoder.push(token) for token in range(HELD_TOKENS_MAX)]

    assert shown == [*[""] * (HELD_TOKENS_MAX - 1), "�" * HELD_TOKENS_MAX]


@pytest.mark.parametrize("name", BUILDERS)
def test_the_cost_of_a_token_does_not_grow(name: str) -> None:
    """Tokens 7,000 to 8,000 take no more than twice as long as the first thousand (best of five, one process)."""
    tokenizer = tokenizer_named(name)
    tokens = [token % tokenizer.vocab_size for token in range(0, 7000, 7)]

    def seconds(push: Callable[[int], str]) -> float:
        started = time.process_time()
        for token in tokens:
            push(token)
        return time.process_time() - started

    early, late = [], []
    for _ in range(5):
        push = tokenizer.decoder().push
        costs = [seconds(push) for _ in range(8)]
        early.append(costs[0])
        late.append(costs[-1])
    assert min(late) <= 2 * min(early) + 0.001
