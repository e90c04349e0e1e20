"""The vocabulary of the measurements (tests/gpu/make_models.py): every token is whole text, and text is its tokens."""

import random
import sys
from pathlib import Path

import pytest

from aserve.text.chat_template import ChatTemplate, PromptRenderer
from aserve.text.tokenizer import HFTokenizer

sys.path.append(str(Path(__file__).parents[1] / "gpu"))

from make_models import SPECIALS, VOCAB_SIZE, write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models"), "tiny")


def test_random_tokens_are_the_same_tokens_when_read_back(folder: Path) -> None:
    """A prompt of so many random tokens is exactly so long for every server."""
    tokenizer = HFTokenizer.from_folder(folder)
    dice = random.Random(1)
    words = [dice.randrange(256, VOCAB_SIZE) for _ in range(2000)]

    assert tokenizer.encode(tokenizer.decode(words)) == words


def test_no_token_holds_half_a_character(folder: Path) -> None:
    """Whatever a random model says comes out token by token, at once."""
    tokenizer = HFTokenizer.from_folder(folder)
    decoder = tokenizer.decoder()
    pushed = [decoder.push(token) for token in range(len(SPECIALS), VOCAB_SIZE)]

    assert (tokenizer.vocab_size, all(pushed), decoder.finish()) == (VOCAB_SIZE, True, "")


def test_chats_can_be_rendered(folder: Path) -> None:
    """For a load of chats: the specials are single tokens, other ASCII text is spelt."""
    renderer = PromptRenderer(HFTokenizer.from_folder(folder), ChatTemplate.from_folder(folder))
    ids = renderer.encode_chat([{"role": "user", "content": "Hi there."}], add_generation_prompt=True)

    assert [ids.count(SPECIALS.index(special)) for special in ("<|im_start|>", "<|im_end|>")] == [2, 1]
