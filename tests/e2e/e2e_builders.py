"""Builders for tests of the whole engine on the real model."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from aserve.core.invariants import check
from aserve.core.options import SchedulerOptions
from aserve.core.request import SamplingParams
from aserve.engine.engine import Engine
from aserve.engine.generation import GenerationRequest
from aserve.model.options import ModelOptions
from aserve.model.runner import load_runner
from aserve.text.chat_template import ChatTemplate, PromptRenderer
from aserve.text.tokenizer import HFTokenizer

MADE_UP = Path(__file__).parent.parent / "data" / "questions.jsonl"


def questions(count: int) -> list[str]:
    """First turns of MT-Bench from the folder that ASERVE_TEST_DATA names, else made-up ones of the same shape."""
    public = Path(os.environ.get("ASERVE_TEST_DATA", "/nonexistent")) / "mtbench" / "mt_bench-question.jsonl"
    lines = (public if public.is_file() else MADE_UP).read_text().splitlines()
    return [json.loads(line)["turns"][0] for line in lines[:count]]


def chat_prompts(folder: Path, texts: list[str]) -> list[np.ndarray]:
    """Each text as one user message through the model's template, int32 ids."""
    renderer = PromptRenderer(HFTokenizer.from_folder(folder), ChatTemplate.from_folder(folder))
    chats = [[{"role": "user", "content": text}] for text in texts]
    return [np.array(renderer.encode_chat(chat, add_generation_prompt=True), np.int32) for chat in chats]


@asynccontextmanager
async def real_engine(
    folder: Path, *, reference: bool = True, threads: int = 0, **options: Any
) -> AsyncIterator[Engine]:
    """An engine over the CPU device, checked and closed afterwards."""
    scheduler_options = SchedulerOptions(**{"check_invariants_every": 16} | options)
    model_options = ModelOptions(device="cpu", reference=reference, threads=threads)
    runner = await asyncio.to_thread(load_runner, model_options, scheduler_options, folder)
    engine = Engine(runner, HFTokenizer.from_folder(folder), scheduler_options)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.aclose()
    check(engine.scheduler)


async def generate(engine: Engine, name: str, prompt: np.ndarray, num_tokens: int, **params: Any) -> list[int]:
    """Greedy ids of one request, unless ``params`` say otherwise."""
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": num_tokens} | params)
    stream = engine.submit_nowait(GenerationRequest(request_id=name, prompts=(prompt,), params=sampling))
    return [token async for delta in stream for token in delta.tokens]


async def generate_all(engine: Engine, prompts: list[np.ndarray], num_tokens: int, at_once: int) -> list[list[int]]:
    """Greedy ids of all prompts, at most ``at_once`` of them open at a time."""
    gate = asyncio.Semaphore(at_once)

    async def one(index: int) -> list[int]:
        async with gate:
            return await generate(engine, f"prompt-{index}", prompts[index], num_tokens)

    return list(await asyncio.gather(*(one(index) for index in range(len(prompts)))))
