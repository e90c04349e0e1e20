"""What config.json and generation_config.json say, in both of the layouts that are about."""

import json
from pathlib import Path
from typing import Any

import pytest

from aserve.errors import ModelError
from aserve.model.config import ModelConfig, RopeConfig, SamplingDefaults

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}


def parse(generation: dict[str, Any] | None = None, **changes: Any) -> ModelConfig:
    return ModelConfig.from_dicts({**LLAMA, **changes}, generation)


def rope_of(**changes: Any) -> RopeConfig:
    config = parse(**changes)
    assert config.decoder is not None, config.fallback_reason
    return config.decoder.rope


def windows_of(**changes: Any) -> tuple[int | None, ...]:
    config = parse(**changes)
    assert config.decoder is not None, config.fallback_reason
    return config.decoder.windows


def test_old_and_new_rope_layouts_are_the_same() -> None:
    """rope_theta beside rope_scaling says what rope_parameters says."""
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}

    old = rope_of(rope_theta=5e5, rope_scaling={"type": "llama3", **scaling})
    new = rope_of(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling})

    assert old == new == RopeConfig(kind="llama3", theta=5e5, factor=8.0, original_max_positions=64)


def test_yarn_attention_factor_follows_from_the_factor() -> None:
    """Left out, it is 0.1 ln(factor) + 1; stated, it is taken."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

    assert rope_of(rope_parameters=yarn).attention_factor == pytest.approx(1.13862944)
    assert rope_of(rope_parameters={**yarn, "attention_factor": 1.5}).attention_factor == 1.5


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope type 'longrope'"),
        ({"partial_rotary_factor": 0.5}, "only part of each head"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differ between layers"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"model_type": "gpt_neox"}, "model type 'gpt_neox'"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "not a causal language model"),
    ],
)
def test_unknown_features_go_to_the_fallback(changes: dict[str, Any], reason: str) -> None:
    """What the native decoder does not know has no shape, and a reason."""
    config = parse(**changes)

    assert config.decoder is None
    assert reason in (config.fallback_reason or "")


def test_quantised_checkpoints_are_refused_by_name() -> None:
    """A quantization_config ends in a sentence with its method."""
    with pytest.raises(ModelError, match="quantised \\(awq\\)"):
        parse(quantization_config={"quant_method": "awq", "bits": 4})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "lacks a positive hidden_size"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "4 attention heads, not a multiple of its 3"),
        ({"vocab_size": "many"}, "vocab_size in config.json is 'many'"),
        ({"rope_scaling": {"type": "linear"}}, "of type 'linear' but lack factor"),
        ({"rope_scaling": {"type": "llama3", "factor": 8}}, "lack low_freq_factor, high_freq_factor"),
        ({"model_type": None}, "names no model_type"),
    ],
)
def test_configs_that_make_no_model_are_refused(changes: dict[str, Any], message: str) -> None:
    """One sentence says which value is at fault."""
    with pytest.raises(ModelError, match=message):
        parse(**changes)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"sliding_window": 8}, (None,) * 4),
        ({"model_type": "mistral", "sliding_window": 8}, (8,) * 4),
        ({"model_type": "mistral", "sliding_window": None}, (None,) * 4),
        ({"model_type": "mistral", "num_key_value_heads": 4}, (4096,) * 4),
        ({"model_type": "qwen2", "sliding_window": 8}, (None,) * 4),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3},
            (None,) * 3 + (8,),
        ),
        (
            {
                "model_type": "qwen3",
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (8, None, 8, None),
        ),
    ],
)
def test_sliding_windows_by_family(changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    """Which layers slide is each family's own rule."""
    assert windows_of(**{"num_key_value_heads": 2, **changes}) == windows


def test_smollm3_leaves_out_rope_in_every_fourth_layer() -> None:
    """no_rope_layers marks layers with rope by 1; left out, every fourth has none."""
    left_out = parse(model_type="smollm3", num_key_value_heads=2)
    stated = parse(model_type="smollm3", num_key_value_heads=2, no_rope_layers=[0, 1, 1, 0])

    assert left_out.decoder is not None
    assert left_out.decoder.uses_rope == (True, True, True, False)
    assert stated.decoder is not None
    assert stated.decoder.uses_rope == (False, True, True, False)


def test_generation_config_gives_eos_ids_and_sampling_defaults(tmp_path: Path) -> None:
    """Its end-of-sequence ids come before config.json's, as a list; what it leaves out stays unknown."""
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "eos_token_id": 2, "dtype": "bfloat16"}))
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [7, 2, 7], "temperature": 0.6, "top_p": 0.95, "bos_token_id": 1})
    )

    config = ModelConfig.from_folder(tmp_path)

    assert config.eos_ids == (7, 2)
    assert config.bos_id == 1
    assert config.dtype == "bfloat16"
    assert config.sampling_defaults == SamplingDefaults(temperature=0.6, top_p=0.95)


def test_without_generation_config_eos_comes_from_config() -> None:
    """A single id becomes a list of one, an absent one an empty list."""
    assert parse(eos_token_id=2).eos_ids == (2,)
    assert parse().eos_ids == ()


@pytest.mark.parametrize(("content", "message"), [(None, "no config.json"), ("{", "cannot be read"), ("[]", "object")])
def test_folders_that_hold_no_model_are_refused(content: str | None, message: str, tmp_path: Path) -> None:
    """A missing or broken config.json ends in one sentence."""
    if content is not None:
        (tmp_path / "config.json").write_text(content)

    with pytest.raises(ModelError, match=message):
        ModelConfig.from_folder(tmp_path)


@pytest.mark.torch
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_parameters_of_the_layers_are_counted(name: str, tmp_path: Path) -> None:
    """Those of the products: what transformers holds as matrices of linear layers, without embeddings and the head."""
    from families import NATIVE, hf_model, save

    model_type, overrides = NATIVE[name]
    model = hf_model(model_type, **overrides)
    config = ModelConfig.from_folder(save(model, tmp_path / name))
    expected = sum(weight.numel() for key, weight in model.named_parameters() if "layers" in key and weight.dim() == 2)

    assert config.num_layer_parameters == expected
