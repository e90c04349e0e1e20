"""Commands that load a model, on a tiny one with random weights: chat, doctor and bench as their users call them."""

import io
import json
import sys
from pathlib import Path

import pytest

from aserve.__main__ import main

pytestmark = [pytest.mark.torch, pytest.mark.timeout(120)]

CONFIG = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="module")
def arguments(default_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The flags for a model that loads at once: the default one's tokenizer around random weights."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).symlink_to(default_model_folder / name)
    return [str(folder), "--model.load-format", "dummy", "--max-num-seqs", "8", "--max-num-batched-tokens", "64"]


def test_chat_answers_a_pipe(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A prompt on standard input, an engine in this process, and its answer alone on standard output."""
    answers = []
    for _ in range(2):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Hello")))
        assert main(["chat", *arguments, "--max-tokens", "8", "--seed", "1"]) == 0
        answers.append(capsys.readouterr())

    assert answers[0].out == answers[1].out != "\n"
    assert answers[0].err == ""


def test_doctor_loads(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """--load loads the model for real and says how long it took."""
    assert main(["doctor", "--json", "--load", *arguments, "--port", "0", "--threads", "1"]) == 0
    found = json.loads(capsys.readouterr().out)

    assert found["versions"]["torch"][0].isdigit()
    assert found["model"]["loaded"].startswith("in ")
    assert found["model"]["KV pool"].endswith("context as served 512 tokens")


def test_bench_measures(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Every point that the options allow is measured, in about the time that was given."""
    assert main(["bench", "--json", "--seconds", "2", *arguments]) == 0
    report = json.loads(capsys.readouterr().out)

    assert [point["num_tokens"] for point in report["prefill"]] == [16, 64]
    assert [point["num_sequences"] for point in report["decode"]] == [1, 8]
    assert all(point["tokens_per_s"] > 0 for point in report["prefill"] + report["decode"])
    assert report["measured_s"] < 20
