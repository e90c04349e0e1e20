"""What long prompts cost those who are decoding, by ``prefill``: mixed, split, streams.

    python tests/gpu/prefill_streams.py [--shape llama1b] [--streams 16] [--prompt 8192] [--every 0.25] [--json FILE]
    python tests/gpu/prefill_streams.py --device cpu --shape tiny --streams 2 --prompt 600 --modes mixed split

Requests of 128 + 1,024 tokens decode, so many at a time, through the engine in this process, without a server: first
alone, then while prompts arrive at a fixed rate. Told are the gaps between a request's deltas, the time to the first
token of the long prompts, and both kinds' throughput. Then torch's profiler looks for half a second: for how much of
the time kernels of both streams ran at once, and for how much none did. FILE gets the figures, and a moment of the
kernels' timeline in which both run.
"""

import argparse
import asyncio
import itertools
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import uvloop
from make_models import SHAPES, VOCAB_SIZE, write_model

from aserve.core.options import SchedulerOptions
from aserve.core.policy import POLICIES
from aserve.core.request import SamplingParams
from aserve.device.alarm import Alarm
from aserve.device.alarm import is_supported as alarm_is_supported
from aserve.device.threads import prepare_process
from aserve.engine.engine import Engine
from aserve.engine.generation import GenerationRequest
from aserve.engine.ports import Runner
from aserve.model.options import ModelOptions
from aserve.obs.trace import Slice, Timeline, render
from aserve.text.tokenizer import HFTokenizer

MODES: Final = ("mixed", "split", "streams")
SHORT_PROMPT: Final = 128
SHORT_OUTPUT: Final = 1024
PROFILE_S: Final = 0.5
SHOWN_KERNELS: Final = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    stream: int
    name: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """Shares of the profiled time. both: kernels of the main stream and of another one ran. idle: none did.

    moment: (whether of the main stream, name, start, duration in µs) around one such time.
    """

    both: float
    idle: float
    moment: tuple[tuple[bool, str, float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Of one mode. gaps in ms between deltas, alone and beside prompts; ttft of the prompts in ms."""

    mode: str
    policy: str
    streams: int
    gap_alone_p50: float
    gap_alone_p99: float
    gap_p50: float
    gap_p99: float
    gap_max: float
    decode_tokens_per_s_alone: float
    decode_tokens_per_s: float
    num_prompts: int
    ttft_p50: float
    ttft_p99: float
    prompt_tokens_per_s: float
    overlap: Overlap | None


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0.0


class Load:
    """Requests on an engine, and what their readers see. gaps_ms, ttfts_ms: since ``clear``."""

    def __init__(self, engine: Engine, prompt_tokens: int) -> None:
        self.gaps_ms: list[float] = []
        self.num_tokens = 0
        self.ttfts_ms: list[float] = []
        self._engine = engine
        self._prompt_tokens = prompt_tokens
        self._numbers = np.random.default_rng(0)
        self._ids = itertools.count()

    def clear(self) -> None:
        self.gaps_ms, self.ttfts_ms, self.num_tokens = [], [], 0

    def _request(self, num_prompt: int, num_output: int) -> GenerationRequest:
        return GenerationRequest(
            request_id=f"r{next(self._ids)}",
            prompts=(self._numbers.integers(3, VOCAB_SIZE, num_prompt, dtype=np.int32),),
            params=SamplingParams(temperature=0.0, max_tokens=num_output),
            ignore_eos=True,
        )

    async def decode(self) -> None:
        """One client: a request after another, for ever."""
        while True:
            async with self._engine.submit_nowait(self._request(SHORT_PROMPT, SHORT_OUTPUT)) as stream:
                before_s = None
                async for delta in stream:
                    now_s = time.perf_counter()
                    if before_s is not None:
                        self.gaps_ms.append((now_s - before_s) * 1e3)
                    before_s = now_s
                    self.num_tokens += len(delta.tokens)

    async def arrive(self, every_s: float) -> None:
        """Long prompts, one output token each, at a fixed rate, whatever becomes of them."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                tasks.create_task(self._prefill())
                await asyncio.sleep(every_s)

    async def _prefill(self) -> None:
        started_s = time.perf_counter()
        async with self._engine.submit_nowait(self._request(self._prompt_tokens, 1)) as stream:
            async for _ in stream:
                pass
        self.ttfts_ms.append((time.perf_counter() - started_s) * 1e3)


def make_profiler() -> Any:
    import torch

    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])


def kernels_of(profiler: Any) -> list[Kernel]:
    import torch

    return sorted(
        (
            Kernel(
                stream=event.device_resource_id(),
                name=event.name(),
                start_ns=event.start_ns(),
                end_ns=event.start_ns() + event.duration_ns(),
            )
            for event in profiler.profiler.kineto_results.events()
            if event.device_type() == torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]  # it is there
            and not event.name().startswith(("Memcpy", "Memset"))
        ),
        key=lambda kernel: kernel.start_ns,
    )


def main_stream(kernels: Sequence[Kernel]) -> int:
    """Of kernels of decode steps, with few chunks between them: the stream that ran the most."""
    return Counter(kernel.stream for kernel in kernels).most_common(1)[0][0]


def overlap_of(kernels: Sequence[Kernel], main: int) -> Overlap | None:
    """By sweeping over starts and ends. None where nothing ran."""
    edges = sorted(
        [(kernel.start_ns, 1, kernel.stream == main) for kernel in kernels]
        + [(kernel.end_ns, -1, kernel.stream == main) for kernel in kernels]
    )
    if not edges:
        return None
    running = {True: 0, False: 0}
    both_ns = idle_ns = 0
    longest_ns, longest_at = 0, edges[0][0]
    for (at, change, is_main), (until, _, _) in itertools.pairwise(edges):
        running[is_main] += change
        if running[True] and running[False]:
            both_ns += until - at
            if until - at > longest_ns:
                longest_ns, longest_at = until - at, at
        elif not running[True] and not running[False]:
            idle_ns += until - at
    total_ns = edges[-1][0] - edges[0][0]
    near = sorted(kernels, key=lambda kernel: abs((kernel.start_ns + kernel.end_ns) // 2 - longest_at))[:SHOWN_KERNELS]
    moment = [
        (k.stream == main, k.name[:60], (k.start_ns - longest_at) / 1e3, (k.end_ns - k.start_ns) / 1e3)
        for k in sorted(near, key=lambda kernel: kernel.start_ns)
    ]
    return Overlap(both=both_ns / total_ns, idle=idle_ns / total_ns, moment=tuple(moment) if both_ns else ())


async def profiled() -> list[Kernel]:
    profiler = make_profiler()
    profiler.start()
    await asyncio.sleep(PROFILE_S)
    profiler.stop()
    return kernels_of(profiler)


async def measure(arguments: argparse.Namespace, engine: Engine, mode: str) -> Point:
    load = Load(engine, arguments.prompt)
    on_gpu = arguments.device == "cuda"
    clients = [asyncio.create_task(load.decode()) for _ in range(arguments.streams)]
    while load.num_tokens < 16 * arguments.streams:  # noqa: ASYNC110  # nobody announces it
        await asyncio.sleep(0.02)

    load.clear()
    await asyncio.sleep(arguments.seconds / 2)
    alone_ms, alone_tokens_per_s = load.gaps_ms, load.num_tokens / (arguments.seconds / 2)
    main = main_stream(await profiled()) if on_gpu else 0

    arrivals = asyncio.create_task(load.arrive(arguments.every))
    await asyncio.sleep(4 * arguments.every)
    load.clear()
    before = engine.statistics().num_prefill_tokens
    await asyncio.sleep(arguments.seconds)
    gaps_ms, ttfts_ms, tokens = load.gaps_ms, load.ttfts_ms, load.num_tokens
    prompt_tokens = engine.statistics().num_prefill_tokens - before
    overlap = overlap_of(await profiled(), main) if on_gpu else None

    for task in (arrivals, *clients):
        task.cancel()
    await asyncio.gather(arrivals, *clients, return_exceptions=True)
    return Point(
        mode=mode,
        policy=arguments.policy,
        streams=arguments.streams,
        gap_alone_p50=quantile(alone_ms, 0.5),
        gap_alone_p99=quantile(alone_ms, 0.99),
        gap_p50=quantile(gaps_ms, 0.5),
        gap_p99=quantile(gaps_ms, 0.99),
        gap_max=max(gaps_ms, default=0.0),
        decode_tokens_per_s_alone=alone_tokens_per_s,
        decode_tokens_per_s=tokens / arguments.seconds,
        num_prompts=len(ttfts_ms),
        ttft_p50=quantile(ttfts_ms, 0.5),
        ttft_p99=quantile(ttfts_ms, 0.99),
        prompt_tokens_per_s=prompt_tokens / arguments.seconds,
        overlap=overlap,
    )


async def run(
    arguments: argparse.Namespace, mode: str, runner: Runner, tokenizer: HFTokenizer, scheduler: SchedulerOptions
) -> Point:
    engine = Engine(runner, tokenizer, scheduler, make_alarm=Alarm if alarm_is_supported() else None)
    await engine.start()
    try:
        if arguments.device == "cuda":  # the first start of a profiler takes seconds
            with make_profiler():
                pass
        return await measure(arguments, engine, mode)
    finally:
        await engine.aclose()


def kernel_timelines(points: Sequence[Point]) -> list[Timeline]:
    """Each mode's moment, a lane a stream, for Perfetto."""
    return [
        Timeline(
            name=f"prefill = {point.mode}",
            start_s=moment[0][2] / 1e6,
            end_s=max(start_us + taken_us for _, _, start_us, taken_us in moment) / 1e6,
            lanes={
                lane: [
                    Slice(name=name, start_s=start_us / 1e6, end_s=(start_us + taken_us) / 1e6)
                    for is_main, name, start_us, taken_us in moment
                    if is_main == on_main
                ]
                for lane, on_main in (("main stream", True), ("prefill stream", False))
            },
        )
        for point in points
        if point.overlap is not None and (moment := point.overlap.moment)
    ]


def table(points: Sequence[Point]) -> str:
    lines = [
        "| prefill | gap ms alone p50 | p99 | beside prompts p50 | p99 | max | decode tokens/s alone | beside "
        "| prompts | their TTFT ms p50 | p99 | prompt tokens/s | both streams | GPU idle |",
        "|---" * 14 + "|",
    ]
    for point in points:
        shares = "| |" if point.overlap is None else f"| {point.overlap.both:.1%} | {point.overlap.idle:.1%} "
        lines.append(
            f"| {point.mode} | {point.gap_alone_p50:.2f} | {point.gap_alone_p99:.2f} | {point.gap_p50:.2f} "
            f"| {point.gap_p99:.2f} | {point.gap_max:.1f} | {point.decode_tokens_per_s_alone:.0f} "
            f"| {point.decode_tokens_per_s:.0f} | {point.num_prompts} | {point.ttft_p50:.0f} | {point.ttft_p99:.0f} "
            f"| {point.prompt_tokens_per_s:.0f} {shares}|"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", choices=list(SHAPES), default="llama1b")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--policy", choices=list(POLICIES), default="overlap")
    parser.add_argument("--streams", type=int, default=16, help="requests that decode at a time")
    parser.add_argument("--prompt", type=int, default=8192, help="tokens of a long one")
    parser.add_argument("--every", type=float, default=0.25, help="seconds between long prompts")
    parser.add_argument("--seconds", type=float, default=6.0, help="of measuring beside prompts; half of that alone")
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--max-num-batched-tokens", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--trace", type=Path, help="the moments, for Perfetto")
    arguments = parser.parse_args()
    prepare_process()
    points = []
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder), arguments.shape)
        from aserve.model.runner import load_runner

        tokenizer = HFTokenizer.from_folder(model)
        for mode in arguments.modes:
            scheduler = SchedulerOptions(
                max_num_seqs=arguments.max_num_seqs,
                max_num_batched_tokens=arguments.max_num_batched_tokens,
                max_model_len=max(arguments.prompt, SHORT_PROMPT + SHORT_OUTPUT) + 64,
                policy=arguments.policy,
                prefill=mode,
            )
            options = ModelOptions(load_format="dummy", device=arguments.device, gpu_memory_utilization=0.4)
            runner = load_runner(options, scheduler, model)
            points.append(uvloop.run(run(arguments, mode, runner, tokenizer, scheduler)))
            del runner  # its memory, before the next one takes its own
            print(table(points[-1:]), file=sys.stderr, flush=True)  # noqa: T201  # if it is cut short
    print(table(points))  # noqa: T201
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(point) for point in points], indent=1))
    if arguments.trace is not None:
        arguments.trace.write_bytes(render(kernel_timelines(points)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
