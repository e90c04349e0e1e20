"""A model that is loaded for the CPU runner: what it says of itself, and what cannot be served."""

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aserve.core.ids import Epoch, Slot, StepNumber
from aserve.core.options import SchedulerOptions
from aserve.core.plan import BatchPlan, Chunk, Join
from aserve.core.request import SamplingParams
from aserve.errors import ConfigError, ModelError
from aserve.model.options import ModelOptions
from aserve.model.runner import CpuRunner, load_runner, sampling_defaults

pytestmark = pytest.mark.torch

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "eos_token_id": [2, 7],
}


def model_folder(tmp_path: Path, **generation: Any) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    return tmp_path


def load(folder: Path, *, num_blocks: int = 0, prefill: Any = "mixed", **options: Any) -> CpuRunner:
    scheduler = SchedulerOptions(max_num_seqs=4, max_num_batched_tokens=32, num_blocks=num_blocks, prefill=prefill)
    return load_runner(ModelOptions(load_format="dummy", device="cpu", threads=1, **options), scheduler, folder)


@pytest.mark.parametrize(
    ("options", "device"),
    [
        ({"dtype": "float32"}, "cpu, float32, 1 thread"),
        ({"dtype": "bfloat16"}, "cpu, bfloat16, 1 thread"),
        ({"reference": True}, "cpu, float32, 1 thread, reference"),
    ],
)
async def test_a_loaded_model_says_what_it_is_and_answers(tmp_path: Path, options: Any, device: str) -> None:
    """Random weights of a tiny model: a prompt in, a token in range out."""
    runner = await asyncio.to_thread(load, model_folder(tmp_path), served_model_name=("tiny", "other"), **options)
    info = runner.info
    assert (info.model_name, info.device, info.eos_ids) == ("tiny", device, (2, 7))
    assert (info.vocab_size, info.max_model_len, info.max_num_seqs) == (128, 256, 4)
    newcomer = Join(
        slot=Slot(0), epoch=Epoch(1), position=0, params=SamplingParams(temperature=0), seed=0, stop_ids=(),
        min_length=0, max_length=64, num_prompt_tokens=3, history=np.empty(0, np.int32),
    )  # fmt: skip
    prompt = Chunk(slot=Slot(0), start=0, tokens=np.array([5, 6, 7], np.int32), last=True)
    plan = BatchPlan(
        step=StepNumber(1), joins=(newcomer,), table_writes=np.array([(0, 0, 1)], np.int32), chunks=(prompt,)
    )  # fmt: skip
    result = await runner.launch(plan)
    assert 0 <= result.tokens[0, 0] < 128
    assert result.flags.tolist() == [0]
    await runner.aclose()


def test_the_context_is_cut_to_a_small_pool(tmp_path: Path) -> None:
    """8 blocks of 32 tokens."""
    runner = load(model_folder(tmp_path), num_blocks=8)
    asyncio.run(runner.aclose())
    assert (runner.info.num_blocks, runner.info.max_model_len) == (8, 256)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"num_blocks": 7}, "at least 8 blocks"),
        ({"kv_cache_gib": 1e6}, "Too little memory"),
        ({"reference": True, "dtype": "bfloat16"}, "computes in float32"),
        ({"prefill": "streams"}, "takes a GPU"),
    ],
)
def test_a_model_that_cannot_be_served_is_one_sentence(tmp_path: Path, options: Any, sentence: str) -> None:
    """And its thread is gone."""
    with pytest.raises((ModelError, ConfigError), match=sentence):
        load(model_folder(tmp_path), **options)
    assert "aserve-device" not in {thread.name for thread in threading.enumerate()}


def test_sampling_defaults_are_the_models_unless_turned_off(tmp_path: Path) -> None:
    """What generation_config.json says, and the plain ones for the rest."""
    folder = model_folder(tmp_path, temperature=0.2, top_p=0.9, do_sample=True)
    assert sampling_defaults(ModelOptions(), folder) == SamplingParams(temperature=0.2, top_p=0.9)
    assert sampling_defaults(ModelOptions(generation_config="off"), folder) == SamplingParams()
