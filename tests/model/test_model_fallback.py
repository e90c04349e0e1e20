"""Models that go through transformers' own code: equal to it, or refused in one sentence."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from families import FALLBACK, PagedDriver, edit_config, hf_logits, hf_model, prompt, save

from aserve.errors import ModelError
from aserve.model.fallback import FallbackModel, TransformersModule
from aserve.model.loader import load_model

pytestmark = pytest.mark.torch

TOKENS = prompt(29)
FLOAT32 = {"rtol": 0.0, "atol": 1e-4}


@pytest.fixture(scope="module", params=list(FALLBACK))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    model_type, overrides = FALLBACK[request.param]
    reference = hf_model(model_type, **overrides)
    return reference, save(reference, tmp_path_factory.mktemp("fallback") / request.param)


def test_chunks_and_mixed_decode_match_transformers(family: tuple[Any, Path]) -> None:
    """Two sequences in chunks, mixed steps and decode rows give transformers' own logits within 1e-4."""
    reference, folder = family
    model = load_model(folder, dtype=torch.float32)
    other = prompt(21, 5)
    driver = PagedDriver(model, block_size=4)

    parts = [driver.step(chunks={"a": TOKENS[:9]})["a"]]
    step = driver.step(chunks={"a": TOKENS[9:20], "b": other[:20]})
    parts.append(step["a"])
    parts.append(driver.step(rows={"a": TOKENS[20]})["a"])
    last = driver.step(rows={"b": other[20]}, chunks={"a": TOKENS[21:]})
    parts.append(last["a"])

    assert isinstance(model, FallbackModel)
    torch.testing.assert_close(torch.cat(parts), hf_logits(reference, TOKENS), **FLOAT32)
    torch.testing.assert_close(torch.cat([step["b"], last["b"]]), hf_logits(reference, other), **FLOAT32)


def test_reference_logits_do_not_depend_on_the_batch(family: tuple[Any, Path]) -> None:
    """Reference mode holds for the fallback too, to the bit."""
    _, folder = family
    model = load_model(folder, dtype=torch.float32, reference=True)
    alone = PagedDriver(model, block_size=4).step(chunks={"a": TOKENS})["a"]
    driver = PagedDriver(model)

    crowded = [driver.step(chunks={"b": prompt(21, 5), "a": TOKENS[:19]})["a"]]
    crowded += [driver.step(rows={"b": 7, "a": token})["a"] for token in TOKENS[19:]]

    assert torch.equal(torch.cat(crowded), alone)


def test_dummy_weights_need_no_checkpoint(tmp_path: Path) -> None:
    """load_format dummy runs a fallback model from its config alone."""
    folder = save(hf_model("olmo2"), tmp_path)
    (folder / "model.safetensors").unlink()

    model = load_model(folder, dtype=torch.bfloat16, load_format="dummy")

    assert PagedDriver(model).step(chunks={"a": TOKENS})["a"].isfinite().all()


def test_config_completes_what_the_file_leaves_out(tmp_path: Path) -> None:
    """Sizes that config.json does not state come from transformers' defaults."""
    folder = edit_config(save(hf_model("gpt_neox", num_key_value_heads=None), tmp_path), max_position_embeddings=None)

    model = load_model(folder, dtype=torch.float32)

    assert model.config.max_position_embeddings == transformers.GPTNeoXConfig().max_position_embeddings


@pytest.mark.parametrize(
    ("model_type", "overrides", "reason"),
    [
        ("mamba", {"state_size": 4, "num_key_value_heads": None}, "layers of"),
        ("bloom", {"n_head": 4, "num_key_value_heads": None, "num_attention_heads": None}, "no attention to page"),
    ],
)
def test_models_without_pageable_attention_are_refused(
    model_type: str, overrides: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    """A recurrent model and one whose code bypasses the attention interface end in one sentence."""
    folder = save(hf_model(model_type, **overrides), tmp_path)

    with pytest.raises(ModelError) as caught:
        load_model(folder, dtype=torch.float32)

    assert reason in caught.value.message
    assert "\n" not in caught.value.message


def test_too_little_memory_is_not_the_models_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look and a try that run out of a device's memory say so, not that the model does not run."""
    folder = save(hf_model("olmo2", num_hidden_layers=1), tmp_path)
    module = load_model(folder, dtype=torch.float32)._module

    def run_out(*args: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(TransformersModule, "_logits", run_out)

    with pytest.raises(torch.OutOfMemoryError):
        module.check(torch.zeros(1))
    with pytest.raises(torch.OutOfMemoryError):
        load_model(folder, dtype=torch.float32)


def test_encoder_decoder_is_refused(tmp_path: Path) -> None:
    """An encoder and decoder pair is named as such."""
    transformers.T5Config(d_model=8, num_layers=1, num_heads=2, vocab_size=32).save_pretrained(tmp_path)

    with pytest.raises(ModelError, match="encoder and decoder"):
        load_model(tmp_path, dtype=torch.float32)


def test_linear_attention_layers_are_refused_by_name(tmp_path: Path) -> None:
    """A hybrid model is refused before its weights are read."""
    transformers.Qwen3NextConfig(hidden_size=32, num_hidden_layers=4, vocab_size=32).save_pretrained(tmp_path)

    with pytest.raises(ModelError, match="linear_attention"):
        load_model(tmp_path, dtype=torch.float32)


def test_unknown_model_type_is_refused(tmp_path: Path) -> None:
    """A model type that transformers does not know ends in one sentence too."""
    (tmp_path / "config.json").write_text('{"model_type": "madeup"}')

    with pytest.raises(ModelError, match="madeup"):
        load_model(tmp_path, dtype=torch.float32)


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    """transformers would start from random values; we say which tensors are not there."""
    folder = save(hf_model("olmo2", num_hidden_layers=1), tmp_path)
    edit_config(folder, num_hidden_layers=2)

    with pytest.raises(ModelError, match=r"lacks model\.layers\.1"):
        load_model(folder, dtype=torch.float32)
