"""The engine over a CudaRunner whose steps come in parts: on a GPU, or in Triton's interpreter."""

import asyncio
import random
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parent.parent))
sys.path.append(str(Path(__file__).parents[2] / "engine"))

from cuda_builders import Sizes, make_runner
from engine_builders import read, running, tokens
from families import hf_logits, hf_model, prompt, save

from aserve.core.request import SamplingParams
from aserve.engine.engine import Engine
from aserve.engine.generation import GenerationRequest
from aserve.model import cuda_decoder

pytestmark = [
    pytest.mark.torch,
    # The interpreter, which is NumPy, computes both sides of a choice.
    pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow) encountered:RuntimeWarning"),
]

SIZES = Sizes(max_num_seqs=4, max_num_tokens=16, max_model_len=48, block_size=8, num_blocks=8)


async def test_whoever_comes_and_goes_each_gets_its_own_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More requests than slots, prompts in chunks, too few blocks for all, some that leave at their first token."""
    monkeypatch.setattr(cuda_decoder, "LAYERS_A_LAUNCH", 1)
    model = hf_model("llama", num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16)
    runner = make_runner(save(model, tmp_path / "tiny"), SIZES, num_cuts=1)
    numbers = random.Random(7)
    wanted = [(prompt(numbers.randrange(2, 20), seed=seed), numbers.randrange(2, 16)) for seed in range(9)]

    def greedy(start: list[int], count: int) -> list[int]:
        found = list(start)
        for _ in range(count):
            found.append(int(hf_logits(model, found)[-1].argmax()))
        return found[len(start) :]

    async def ask(engine: Engine, index: int) -> list[int]:
        start, count = wanted[index]
        stream = engine.submit_nowait(
            GenerationRequest(
                request_id=f"r{index}",
                prompts=(np.array(start, np.int32),),
                params=SamplingParams(temperature=0.0, max_tokens=count),
            )
        )
        if index % 5 == 4:
            first = await anext(aiter(stream))
            stream.close()
            return list(first.tokens)
        return tokens(await read(stream))

    async with running(runner, max_num_batched_tokens=SIZES.max_num_tokens, max_joined_steps=1) as engine:
        found = await asyncio.gather(*(ask(engine, index) for index in range(len(wanted))))
        num_preemptions = engine.statistics().num_preemptions

    for index, (start, count) in enumerate(wanted):
        expected = greedy(start, count)
        assert found[index] == (expected[: len(found[index])] if index % 5 == 4 else expected)
    assert num_preemptions
