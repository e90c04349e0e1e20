"""The measurements of ``bench``: prompts of random ids, in which neither prefix cache nor tokenizer has a part."""

import asyncio
import contextlib
import itertools
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import uvloop

from aserve import __version__
from aserve.config import Config
from aserve.embedding import Engine

CHUNKS = (16, 64, 128, 256, 512, 1024, 2048)
BATCHES = (1, 8, 16, 32)
FIRST_TOKEN_PROMPT = 48
"""Tokens of a short question with the template around it."""
DECODE_PROMPT = 32
NUM_RUNS_MIN = 2
"""Runs that count, even where the time is up: a first run is no measurement."""
METHOD = "each point after a run that does not count; random prompts, no cache hits, no HTTP"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillPoint:
    """A prompt that fits one step: time from the call to its first token. Median of ``num_runs``."""

    num_tokens: int
    tokens_per_s: float
    chunk_ms: float
    num_runs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePoint:
    """Tokens that arrived in a window in which ``num_sequences`` were decoding throughout."""

    num_sequences: int
    tokens_per_s: float
    tokens_per_s_each: float
    token_ms: float
    window_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstTokenPoint:
    """Time from the call to the first delta on an idle engine."""

    num_prompt_tokens: int
    median_ms: float
    max_ms: float
    num_runs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything measured. left_out: points that these options do not allow, and why.

    others_cpu_share: of all cores, what other processes used meanwhile; None where the system does not say.
    """

    version: str
    model: str
    device: str
    profile: str
    method: str
    load_s: float
    measured_s: float
    others_cpu_share: float | None
    prefill: tuple[PrefillPoint, ...]
    decode: tuple[DecodePoint, ...]
    first_token: FirstTokenPoint
    left_out: tuple[str, ...]


def measure(config: Config, *, seconds: float, say: Callable[[str], None]) -> Report:
    """Load the model and measure for about ``seconds``; ``say`` is told what is being done. Raises ModelError."""
    return uvloop.run(_measure(config, seconds, say))


async def _measure(config: Config, seconds: float, say: Callable[[str], None]) -> Report:
    say("loading the model")
    began_s = time.monotonic()
    async with Engine.from_config(config, progress=True) as engine:
        loaded_s = time.monotonic()
        cores = _CoreWatch()
        points = Points(engine, config)
        chunks, batches, left_out = points.possible()
        share_s = seconds / (len(chunks) + 2 * len(batches) + 1)  # decoding gets twice the time of a chunk
        say("first token")
        first_token = await points.first_token(share_s)
        prefill, decode = [], []
        for num_tokens in chunks:
            say(f"prefill of {num_tokens} tokens")
            prefill.append(await points.prefill(num_tokens, share_s))
        for num_sequences in batches:
            say(f"decoding {num_sequences} sequences")
            decode.append(await points.decode(num_sequences, 2 * share_s))
        return Report(
            version=__version__,
            model=engine.name,
            device=engine.info.device,
            profile=config.profile,
            method=METHOD,
            load_s=round(loaded_s - began_s, 3),
            measured_s=round(time.monotonic() - loaded_s, 3),
            others_cpu_share=cores.others_share(),
            prefill=tuple(prefill),
            decode=tuple(decode),
            first_token=first_token,
            left_out=tuple(left_out),
        )


class Points:
    """Measures single points on a started engine, which has nothing else to do."""

    def __init__(self, engine: Engine, config: Config) -> None:
        self._engine = engine
        self._budget = engine.info.max_num_batched_tokens or config.scheduler.with_sizes().max_num_batched_tokens
        self._random = np.random.default_rng(0)

    def possible(self) -> tuple[list[int], list[int], list[str]]:
        """Chunks and batches that fit the options, and sentences about those that do not."""
        info = self._engine.info
        left_out = []
        longest = min(self._budget, info.max_model_len - 1)
        chunks = [size for size in CHUNKS if size <= longest]
        if len(chunks) < len(CHUNKS):
            left_out.append(f"chunks beyond {longest} tokens (scheduler.max_num_batched_tokens, or the context)")
        most = min(info.max_num_seqs, info.num_blocks * info.block_size // (2 * DECODE_PROMPT))
        batches = [size for size in BATCHES if size <= most]
        if len(batches) < len(BATCHES):
            left_out.append(f"batches beyond {most} sequences (scheduler.max_num_seqs, or the KV pool)")
        return chunks or [longest], batches, left_out

    async def prefill(self, num_tokens: int, seconds: float) -> PrefillPoint:
        times = await self._repeat(num_tokens, seconds)
        median_s = statistics.median(times)
        return PrefillPoint(
            num_tokens=num_tokens,
            tokens_per_s=round(num_tokens / median_s, 1),
            chunk_ms=round(median_s * 1000, 2),
            num_runs=len(times),
        )

    async def first_token(self, seconds: float) -> FirstTokenPoint:
        num_tokens = min(FIRST_TOKEN_PROMPT, self._engine.info.max_model_len - 1)
        times = await self._repeat(num_tokens, seconds)
        return FirstTokenPoint(
            num_prompt_tokens=num_tokens,
            median_ms=round(statistics.median(times) * 1000, 2),
            max_ms=round(max(times) * 1000, 2),
            num_runs=len(times),
        )

    async def decode(self, num_sequences: int, seconds: float) -> DecodePoint:
        """Start them all, wait until each has written a few tokens, count what all write until the time is up."""
        info = self._engine.info
        pool_tokens = info.num_blocks * info.block_size // num_sequences
        max_tokens = min(info.max_model_len, pool_tokens * 7 // 8) - DECODE_PROMPT  # so that nothing is preempted
        counts = [0] * num_sequences
        all_write = asyncio.Event()
        num_warm = min(4, max_tokens // 2)

        async def read(index: int) -> None:
            prompt = self._prompt(DECODE_PROMPT)
            async for delta in self._engine.generate(prompt, max_tokens=max_tokens, temperature=0, ignore_eos=True):
                counts[index] += len(delta.tokens)
                if min(counts) >= num_warm:
                    all_write.set()

        async with asyncio.TaskGroup() as readers:
            tasks = [readers.create_task(read(index)) for index in range(num_sequences)]
            await all_write.wait()
            before, began_s = sum(counts), time.monotonic()
            # The first of them to reach its last token ends the window: from there on fewer are decoding.
            await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            num_tokens, window_s = sum(counts) - before, time.monotonic() - began_s
            for task in tasks:
                task.cancel()
        rate = num_tokens / window_s
        return DecodePoint(
            num_sequences=num_sequences,
            tokens_per_s=round(rate, 2),
            tokens_per_s_each=round(rate / num_sequences, 2),
            token_ms=round(1000 * num_sequences / rate, 2),
            window_s=round(window_s, 2),
        )

    async def _repeat(self, num_tokens: int, seconds: float) -> list[float]:
        """Seconds from call to first token, run after run; the first one is dropped."""
        times: list[float] = []
        end_s = time.monotonic() + seconds
        for run in itertools.count():
            began_s = time.monotonic()
            await self._engine.generate(self._prompt(num_tokens), max_tokens=1, temperature=0, ignore_eos=True).text()
            if run:
                times.append(time.monotonic() - began_s)
            if len(times) >= NUM_RUNS_MIN and time.monotonic() >= end_s:
                break
        return times

    def _prompt(self, num_tokens: int) -> list[int]:
        ids: list[int] = self._random.integers(0, self._engine.info.vocab_size, num_tokens).tolist()
        return ids


class _CoreWatch:
    """How much of the machine others use, since it was made (Linux)."""

    def __init__(self) -> None:
        self._before = self._now()

    def others_share(self) -> float | None:
        now = self._now()
        if self._before is None or now is None:
            return None
        total, busy, own = (end - begin for begin, end in zip(self._before, now, strict=True))
        return round(min(1.0, max(0.0, (busy - own) / max(total, 1e-9))), 3)

    @staticmethod
    def _now() -> tuple[float, float, float] | None:
        """Seconds of all cores, seconds of them that were busy, and seconds of this process."""
        with contextlib.suppress(OSError, ValueError):
            ticks = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
            per_second = os.sysconf("SC_CLK_TCK")
            idle = ticks[3] + ticks[4]
            return sum(ticks) / per_second, (sum(ticks) - idle) / per_second, time.process_time()
        return None
