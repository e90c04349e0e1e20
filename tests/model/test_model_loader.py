"""Weights from a folder: every layout that is about, and one sentence for what does not fit."""

import json
from pathlib import Path

import pytest
import torch
from families import PagedDriver, edit_config, hf_logits, hf_model, prompt, save
from safetensors.torch import load_file, save_file

from aserve.errors import ModelError
from aserve.model.loader import load_model

pytestmark = pytest.mark.torch

TOKENS = prompt(11)
WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(hf_model("llama"), tmp_path)


def logits(folder: Path) -> torch.Tensor:
    return PagedDriver(load_model(folder, dtype=torch.float32)).step(chunks={"a": TOKENS})["a"]


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load_model(folder, dtype=torch.float32)
    assert "\n" not in caught.value.message
    return caught.value.message


def test_sharded_checkpoints_load(tmp_path: Path) -> None:
    """Tensors are found through the index of several files."""
    reference = hf_model("llama")
    folder = save(reference, tmp_path, max_shard_size="40KB")

    assert len(list(folder.glob("*.safetensors"))) > 2
    torch.testing.assert_close(logits(folder), hf_logits(reference, TOKENS), rtol=0.0, atol=1e-4)


def test_pickled_checkpoints_load(folder: Path) -> None:
    """pytorch_model.bin gives the same logits."""
    expected = logits(folder)
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()

    assert torch.equal(logits(folder), expected)


def test_pickles_with_code_are_refused(folder: Path) -> None:
    """A pickle that would run something is not unpickled."""
    (folder / WEIGHTS).unlink()
    torch.save({"weights": Path}, folder / "pytorch_model.bin")

    assert "cannot be read as weights" in refusal(folder)


def test_stale_buffers_and_tied_copies_are_ignored(tmp_path: Path) -> None:
    """Old checkpoints carry rotary buffers, tied ones a second embedding: neither is needed or in the way."""
    reference = hf_model("llama", tie_word_embeddings=True)
    folder = save(reference, tmp_path)
    tensors = load_file(folder / WEIGHTS)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    tensors["lm_head.weight"] = torch.zeros_like(tensors["model.embed_tokens.weight"])
    save_file(tensors, folder / WEIGHTS)

    torch.testing.assert_close(logits(folder), hf_logits(reference, TOKENS), rtol=0.0, atol=1e-4)


def test_missing_unexpected_and_misshaped_tensors_are_named_together(folder: Path) -> None:
    """One sentence names all that does not fit."""
    tensors = load_file(folder / WEIGHTS)
    del tensors["model.norm.weight"]
    tensors["model.extra"] = torch.zeros(1)
    tensors["lm_head.weight"] = torch.zeros(5, 48)
    save_file(tensors, folder / WEIGHTS)

    message = refusal(folder)

    assert "lacks model.norm.weight" in message
    assert "unexpected model.extra" in message
    assert "lm_head.weight (5 x 48 instead of 97 x 48)" in message


def test_long_lists_are_cut(folder: Path) -> None:
    """A checkpoint of another model does not fill the screen."""
    edit_config(folder, num_hidden_layers=9)

    assert "and 50 more" in refusal(folder)


def test_folders_without_weights_say_what_was_looked_for(folder: Path) -> None:
    """No weights at all is a sentence too."""
    (folder / WEIGHTS).unlink()

    assert "has no weights" in refusal(folder)


def test_shards_that_the_index_names_must_exist(folder: Path) -> None:
    """A half-copied folder names the absent file."""
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))

    assert "gone.safetensors" in refusal(folder)


@pytest.mark.parametrize("content", [b"", b"\x10\0\0\0\0\0\0\0not a header at all"])
def test_broken_weight_files_are_refused(content: bytes, folder: Path) -> None:
    """A truncated download ends in one sentence with the path."""
    (folder / WEIGHTS).write_bytes(content)

    assert f"{folder / WEIGHTS} cannot be read" in refusal(folder)


def test_dummy_weights_are_the_same_in_each_run_and_finite(folder: Path) -> None:
    """load_format dummy reads no weights, and two loads agree."""
    (folder / WEIGHTS).unlink()

    first, second = (
        PagedDriver(load_model(folder, dtype=torch.bfloat16, load_format="dummy")).step(chunks={"a": TOKENS})["a"]
        for _ in range(2)
    )

    assert first.isfinite().all()
    assert torch.equal(first, second)


def test_an_index_that_its_files_do_not_fit_is_a_sentence(folder: Path) -> None:
    """Neither a name that the file lacks nor an index of another shape is a traceback."""
    index = folder / "model.safetensors.index.json"
    for weight_map in ({"nowhere": "model.safetensors"}, ["model.safetensors"]):
        index.write_text(json.dumps({"weight_map": weight_map}))

        with pytest.raises(ModelError, match="index"):
            load_model(folder, dtype=torch.float32)


def test_a_pickled_file_of_other_things_is_a_sentence(folder: Path) -> None:
    """A training checkpoint, whose weights lie a level deeper."""
    (folder / "model.safetensors").unlink()
    torch.save({"state_dict": {"a": torch.zeros(1)}}, folder / "pytorch_model.bin")

    with pytest.raises(ModelError, match="not a table of tensors"):
        load_model(folder, dtype=torch.float32)
