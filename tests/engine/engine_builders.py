"""Builders for the engine's tests: a running engine over the scripted device, and requests that state what matters."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import fields
from typing import Any

import numpy as np

from aserve.core.invariants import check
from aserve.core.options import SchedulerOptions
from aserve.core.request import SamplingParams
from aserve.engine.engine import Engine
from aserve.engine.generation import Delta, GenerationRequest
from aserve.engine.options import EngineOptions
from aserve.engine.ports import Runner, Tokenizer
from aserve.engine.stream import TokenStream
from aserve.testing import ByteTokenizer, ScriptedRunner

_ids = itertools.count(1)
_SAMPLING = {field.name for field in fields(SamplingParams)}


def request(prompt: str | list[str] = "hello", **wanted: Any) -> GenerationRequest:
    """A call with ``prompt`` in bytes; keywords are sampling parameters or fields of the request."""
    prompts = [prompt] if isinstance(prompt, str) else prompt
    sampling = {"temperature": 0.0, "max_tokens": 8} | {
        key: wanted.pop(key) for key in list(wanted) if key in _SAMPLING
    }
    return GenerationRequest(
        request_id=wanted.pop("request_id", f"test-{next(_ids)}"),
        prompts=tuple(np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in prompts),
        params=SamplingParams(**sampling),
        **wanted,
    )


@asynccontextmanager
async def running(
    runner: Runner | None = None, tokenizer: Tokenizer | None = None, **options: Any
) -> AsyncIterator[Engine]:
    """An engine that is started, and afterwards found to have given everything back."""
    runner = runner or ScriptedRunner()
    more = {key: options.pop(key) for key in ("observer", "clock", "make_alarm") if key in options}
    engine_fields = {field.name for field in fields(EngineOptions)}
    engine_options = EngineOptions(**{key: options.pop(key) for key in list(options) if key in engine_fields})
    scheduler_options = SchedulerOptions(
        **{"max_num_seqs": runner.info.max_num_seqs, "block_size": runner.info.block_size, "check_invariants_every": 1}
        | options
    )
    num_tasks = len(asyncio.all_tasks())
    engine = Engine(runner, tokenizer or ByteTokenizer(), scheduler_options, engine_options, **more)
    await engine.start()
    try:
        yield engine
        await settle(engine)
    finally:
        await engine.aclose()
    check(engine.scheduler)
    assert engine.scheduler.is_idle or not engine.health().alive
    assert engine.statistics().num_streams == 0
    assert sum(engine.statistics().num_finished.values()) == engine.statistics().num_accepted
    assert len(asyncio.all_tasks()) == num_tasks


async def settle(engine: Engine) -> None:
    """Let the loop turn until the engine has nothing left to do."""
    for _ in range(10_000):
        if engine.scheduler.is_idle or not engine.health().alive:
            return
        await asyncio.sleep(0)
    raise AssertionError("the engine does not come to rest")


async def read(stream: TokenStream) -> list[Delta]:
    """Every delta of a stream until its end."""
    return [delta async for delta in stream]


def text(deltas: list[Delta], index: int = 0) -> str:
    return "".join(delta.text for delta in deltas if delta.index == index)


def tokens(deltas: list[Delta], index: int = 0) -> list[int]:
    return [token for delta in deltas if delta.index == index for token in delta.tokens]


def end(deltas: list[Delta], index: int = 0) -> Delta:
    """The one delta that ends the choice."""
    (last,) = [delta for delta in deltas if delta.index == index and delta.finish is not None]
    assert last is [delta for delta in deltas if delta.index == index][-1]
    return last
