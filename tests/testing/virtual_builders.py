"""Builders of the virtual device's tests: plans by hand, and a whole engine on a virtual clock."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from aserve.core.ids import Epoch, Slot, StepNumber
from aserve.core.invariants import check
from aserve.core.options import SchedulerOptions
from aserve.core.plan import BatchPlan, Chunk, Join
from aserve.core.request import SamplingParams
from aserve.engine.engine import Engine
from aserve.engine.generation import GenerationRequest
from aserve.testing import VirtualAlarm, VirtualDevice

_ids = itertools.count(1)


def join(slot: int) -> Join:
    return Join(
        slot=Slot(slot),
        epoch=Epoch(1),
        position=0,
        params=SamplingParams(),
        seed=slot,
        stop_ids=(),
        min_length=0,
        max_length=1000,
        num_prompt_tokens=1,
        history=np.empty(0, np.int32),
    )


def prompt_step(step: int, num_tokens: int = 1, *, slot: int = 0, stream: int = 0) -> BatchPlan:
    """A whole prompt in one chunk, which samples a token."""
    tokens = np.full(num_tokens, 65, np.int32)
    return BatchPlan(
        step=StepNumber(step),
        stream=stream,
        joins=(join(slot),),
        chunks=(Chunk(slot=Slot(slot), start=0, tokens=tokens, last=True),),
    )


def rows_step(step: int, positions: Sequence[int], *, deferred: bool = False) -> BatchPlan:
    """Decode rows of slots 0, 1, ... at those positions."""
    rows = np.array(list(enumerate(positions)), np.int32).reshape(-1, 2)
    return BatchPlan(step=StepNumber(step), rows=rows, deferred=np.full(len(rows), deferred, np.bool_))


@asynccontextmanager
async def engine_on(device: VirtualDevice, **options: Any) -> AsyncIterator[Engine]:
    """A started engine, afterwards found to have given everything back."""
    scheduler_options = SchedulerOptions(
        **{"max_num_seqs": device.info.max_num_seqs, "block_size": device.info.block_size} | options
    )
    clock = asyncio.get_running_loop().time
    engine = Engine(device, device.tokenizer(), scheduler_options, clock=clock, make_alarm=VirtualAlarm)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.aclose()
    check(engine.scheduler)
    assert engine.scheduler.is_idle


async def generate(engine: Engine, num_prompt_tokens: int = 1, max_tokens: int = 1) -> list[float]:
    """One request; when each of its tokens was read."""
    request = GenerationRequest(
        request_id=f"virtual-{next(_ids)}",
        prompts=(np.full(num_prompt_tokens, 65, np.int32),),
        params=SamplingParams(temperature=0, max_tokens=max_tokens),
    )
    read_s: list[float] = []
    async for delta in engine.submit_nowait(request):
        assert delta.error is None, delta.error
        read_s += [asyncio.get_running_loop().time()] * len(delta.tokens)
    return read_s


def milliseconds(seconds: Iterable[float]) -> list[float]:
    """Rounded to a microsecond."""
    return [round(value * 1e3, 3) for value in seconds]
