"""The whole engine on the real model: where the parts meet, beyond what greedy text shows."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from e2e_builders import chat_prompts, generate, questions, real_engine

from aserve.core.request import SamplingParams
from aserve.engine.generation import GenerationRequest

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]

SAMPLED = {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "logprobs": 2, "repetition_penalty": 1.1}


@pytest.fixture(scope="module")
def prompt(default_model_folder: Path) -> np.ndarray:
    return chat_prompts(default_model_folder, questions(1))[0]


async def outcome(folder: Path, prompt: np.ndarray, **options: object) -> tuple[list[int], list[float], list[int]]:
    """Seeded sampled tokens with their logprobs, then greedy tokens, of one engine."""
    async with real_engine(folder, reference=False, max_num_seqs=4, **options) as engine:
        request = GenerationRequest(
            request_id="sampled", prompts=(prompt,), params=SamplingParams(max_tokens=12, **SAMPLED), seed=7
        )
        deltas = [delta async for delta in engine.submit_nowait(request)]
        greedy = await generate(engine, "greedy", prompt, 8)
    tokens = [token for delta in deltas for token in delta.tokens]
    logprobs = [entry.logprob for delta in deltas for entry in delta.logprobs or ()]
    return tokens, logprobs, greedy


def test_sampling_on_the_host_gives_the_device_s_tokens(default_model_folder: Path, prompt: np.ndarray) -> None:
    """The same seed, the same tokens and logprobs, wherever they are drawn."""
    on_device = asyncio.run(outcome(default_model_folder, prompt, sampler="device"))
    on_host = asyncio.run(outcome(default_model_folder, prompt, sampler="host"))

    assert (on_host[0], on_host[2]) == (on_device[0], on_device[2])
    assert on_host[1] == pytest.approx(on_device[1], abs=1e-4)
    assert len(on_device[0]) == len(on_device[1])


def test_prompt_logprobs_are_those_of_generating(default_model_folder: Path, prompt: np.ndarray) -> None:
    """Scoring a generated text as a prompt gives each token the logprob it had when it was generated."""

    async def run() -> tuple[list[float], list[float]]:
        async with real_engine(default_model_folder, max_num_seqs=1, max_num_batched_tokens=64) as engine:
            params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=0)
            first = GenerationRequest(request_id="generate", prompts=(prompt,), params=params)
            deltas = [delta async for delta in engine.submit_nowait(first)]
            tokens = [token for delta in deltas for token in delta.tokens]
            whole = np.concatenate((prompt, np.array(tokens, np.int32)))
            params = SamplingParams(max_tokens=0, prompt_logprobs=0)
            second = GenerationRequest(request_id="score", prompts=(whole,), params=params)
            scored = [delta async for delta in engine.submit_nowait(second)]
        generated = [entry.logprob for delta in deltas for entry in delta.logprobs or ()]
        entries = [entry for delta in scored for entry in delta.prompt_logprobs or ()]
        return generated, [entry.logprob for entry in entries[len(prompt) :] if entry is not None]

    generated, scored = asyncio.run(run())

    assert scored == pytest.approx(generated, abs=1e-4)
