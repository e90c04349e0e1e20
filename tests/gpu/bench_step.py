"""What a step of the product takes on this GPU, beside the time that its bytes or operations need.

    python tests/gpu/bench_step.py [--shapes 8b 1b] [--parts start decode ...]

Every step goes through ``CudaRunner.launch``: plans of numpy arrays, captured graphs, result words, with two steps in
flight as the server has them; no HTTP, no scheduler. Weights and cache are random. "graph" is the replay alone, by
events on the device; "probe" and "floor" are what bench_kernels.py compares with.
"""

import argparse
import asyncio
import gc
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import uvloop
from bench_common import PROBE_STEP_MS, SHAPES, Shape, ragged_lengths, say

from aserve.core.ids import Epoch, Slot, StepNumber
from aserve.core.options import SchedulerOptions
from aserve.core.plan import BatchPlan, Chunk, Join
from aserve.core.request import SamplingParams
from aserve.model.cuda_runner import CudaRunner
from aserve.model.cuda_start import load_cuda_runner
from aserve.model.options import ModelOptions

BYTES_PER_S = 4.3e12
NUM_STEPS = 60
PARTS = ("start", "decode", "ragged", "prefill", "mixed", "sampling", "watchers")


def model_folder(shape: Shape, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": shape.vocab,
        "hidden_size": shape.hidden, "intermediate_size": shape.intermediate, "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads, "num_key_value_heads": shape.num_kv_heads, "head_dim": shape.head_dim,
        "tie_word_embeddings": shape.tied, "max_position_embeddings": 40_960, "rope_theta": 500_000.0,
        "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def load(
    folder: Path, options: argparse.Namespace, *, max_num_seqs: int = 256, max_num_batched_tokens: int = 4096
) -> CudaRunner:
    """A runner; how long it took is said."""
    started_s = time.perf_counter()
    scheduler = SchedulerOptions(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, block_size=options.block_size
    )
    runner = load_cuda_runner(ModelOptions(load_format="dummy", kv_cache_gib=options.kv_cache_gib), scheduler, folder)
    seconds = time.perf_counter() - started_s
    parts = {name: round(value, 2) for name, value in runner._start_seconds.items()}
    say(f"{folder.name} from nothing to ready {seconds:.2f} s: {parts}; {runner.info.num_blocks} blocks")
    return runner


class Host:
    """Slots and blocks of the sequences under test."""

    def __init__(self, runner: CudaRunner, shape: Shape) -> None:
        self.runner, self.shape = runner, shape
        self._steps = itertools.count(1)
        self._free = (np.random.default_rng(0).permutation(runner.info.num_blocks) + 1).tolist()
        self.launch_s: list[float] = []
        """Of each launch, and of each part of one that the loop gets to later: what holds the loop in one go."""
        runner._note_go = lambda seconds, plan: self.launch_s.append(seconds)  # type: ignore[method-assign]

    def launch(self, **fields: Any) -> Any:
        plan = BatchPlan(step=StepNumber(next(self._steps)), **fields)
        return self.runner.launch(plan)

    async def bind(self, lengths: Sequence[int], params: SamplingParams, room: int = 200) -> None:
        """Sequences in slots 0, 1, ..., each with so many tokens in the cache."""
        writes = []
        self._free = self._free + [block for blocks in getattr(self, "_held", []) for block in blocks]
        self._held: list[list[int]] = []
        for slot, length in enumerate(lengths):
            blocks = [self._free.pop() for _ in range(-(-(length + room) // self.runner.info.block_size))]
            self._held.append(blocks)
            writes += [(slot, index, block) for index, block in enumerate(blocks)]
        joins = tuple(
            Join(
                slot=Slot(slot), epoch=Epoch(1), position=length, params=params, seed=slot, stop_ids=(), min_length=0,
                max_length=1 << 30, num_prompt_tokens=length,
                history=np.full(4 if params.needs_history else 0, 9, np.int32),
            )
            for slot, length in enumerate(lengths)
        )  # fmt: skip
        leaves = np.arange(self.runner.info.max_num_seqs, dtype=np.int32)
        await self.launch(leaves=leaves, joins=joins, table_writes=np.array(writes, np.int32))

    async def run(self, plans: Sequence[dict[str, Any]], depth: int = 2) -> list[float]:
        """Launch all, ``depth`` in flight; seconds between landings."""
        out: deque[Any] = deque()
        landed_s = []
        for plan in plans:
            if len(out) == depth:
                await out.popleft()
                landed_s.append(time.perf_counter())
            out.append(self.launch(**plan))
        while out:
            await out.popleft()
            landed_s.append(time.perf_counter())
        return [b - a for a, b in itertools.pairwise(landed_s)]

    def replay_of(self, size: tuple[int, int, bool]) -> Callable[[], None]:
        """A step's graph by itself, over the words of the newest plans in turn, which all have to be of this size."""
        step, staging, device = self.runner._steps.step(size), self.runner._staging, self.runner._device

        def replay() -> None:
            step.replay()
            staging.sent()
            staging.fence(device.record())

        return replay

    def graph_ms(self, size: tuple[int, int, bool], repeats: int = 12) -> float:
        """The replay over the newest plans' words, by the device's clock."""
        replay = self.replay_of(size)
        with self.runner._device.scope():
            events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
            events[0].record()
            for event in events[1:]:
                replay()
                event.record()
            torch.cuda.synchronize()
        return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events))


def rows_of(lengths: Sequence[int], step: int) -> np.ndarray:
    return np.stack([np.arange(len(lengths)), np.array(lengths) + step], axis=1).astype(np.int32)


def floor_ms(host: Host, lengths: Sequence[int]) -> float:
    shape = host.shape
    embedding = 0 if shape.tied else shape.vocab * shape.hidden * 2
    num_bytes = host.runner.info.weight_bytes - embedding + sum(lengths) * host.runner.info.kv_bytes_per_token
    return num_bytes / BYTES_PER_S * 1e3


def percentile_ms(seconds: Sequence[float], share: float) -> float:
    return float(np.quantile(np.array(seconds), share)) * 1e3


async def decode(host: Host, name: str, lengths: Sequence[int], params: SamplingParams) -> None:
    await host.bind(lengths, params)
    plans = [{"rows": rows_of(lengths, step)} for step in range(NUM_STEPS)]
    await host.run(plans[:10])
    host.launch_s.clear()
    seconds = await host.run(plans[10:])
    launch = percentile_ms(host.launch_s, 0.5), percentile_ms(host.launch_s, 0.99)
    graph_ms = host.graph_ms(host.runner._steps.size_of(BatchPlan(step=StepNumber(1), **plans[-1])))
    probe = PROBE_STEP_MS.get((host.shape.name, name), 0)
    mean_lengths = [length + NUM_STEPS // 2 for length in lengths]
    say(
        f"{host.shape.name} {name:24} step {statistics.median(seconds) * 1e3:7.3f} ms  p99 "
        f"{percentile_ms(seconds, 0.99):7.3f}  graph {graph_ms:7.3f}  floor {floor_ms(host, mean_lengths):7.3f}  "
        f"probe {probe:5.2f}  launch p50 {launch[0]:.3f} p99 {launch[1]:.3f}"
    )


def chunk(slot: int, start: int, count: int, last: bool) -> Chunk:
    tokens = np.random.default_rng(start).integers(0, 40_000, count, dtype=np.int32)
    return Chunk(slot=Slot(slot), start=start, tokens=tokens, last=last, next_token=-1 if last else 5)


async def prefill(host: Host, cached: int, count: int, piece: int) -> None:
    """A prompt behind ``cached`` tokens, in pieces."""
    found = []
    for _ in range(4):
        await host.bind([cached], SamplingParams(temperature=0), room=count + 8)
        starts = range(cached, cached + count, piece)
        plans = [{"chunks": (chunk(0, start, piece, start + piece == cached + count),)} for start in starts]
        started_s = time.perf_counter()
        await host.run(plans)
        found.append(time.perf_counter() - started_s)
    shape, seconds = host.shape, statistics.median(found[1:])
    matrices = (
        shape.num_layers * shape.hidden * (shape.qkv_width + shape.num_heads * shape.head_dim + 3 * shape.intermediate)
    )
    pairs = count * cached + count * (count + 1) / 2
    flops = 2 * matrices * count + 4 * pairs * shape.num_heads * shape.head_dim * shape.num_layers
    say(
        f"{shape.name} prefill {count} at {cached}, by {piece}: {seconds * 1e3:8.2f} ms  {flops / seconds / 1e12:6.0f} "
        f"TFLOP/s  {count / seconds:8.0f} tokens/s"
    )


async def mixed(host: Host, num_rows: int, length: int, count: int) -> None:
    """Decode rows beside a prompt's chunks, step after step."""
    lengths = [length] * num_rows
    await host.bind([*lengths, 0], SamplingParams(temperature=0), room=24 * count)
    plans = [
        {"rows": rows_of(lengths, step), "chunks": (chunk(num_rows, step * count, count, False),)} for step in range(20)
    ]
    await host.run(plans[:4])
    host.launch_s.clear()
    seconds = await host.run(plans[4:])
    graph_ms = host.graph_ms(host.runner._steps.size_of(BatchPlan(step=StepNumber(1), **plans[-1])))
    say(
        f"{host.shape.name} {num_rows} rows + {count} tokens: step {statistics.median(seconds) * 1e3:7.3f} ms  graph "
        f"{graph_ms:7.3f}  launch p50 {percentile_ms(host.launch_s, 0.5):.3f} "
        f"p99 {percentile_ms(host.launch_s, 0.99):.3f}"
    )


async def joins(host: Host, count: int) -> None:
    """Launch time of a step in which ``count`` sequences of 512 tokens join."""
    await host.bind([512] * count, SamplingParams(temperature=0.7, top_p=0.9))
    say(f"{host.shape.name} {count} joins: launch {host.launch_s[-1] * 1e3:.3f} ms")


async def watchers(host: Host) -> None:
    """Step time and CPU share by the way of waiting, one loop each."""
    for num_rows in (1, 64):
        lengths = [600] * num_rows
        for depth in (1, 2):
            await host.bind(lengths, SamplingParams(temperature=0))
            plans = [{"rows": rows_of(lengths, step)} for step in range(NUM_STEPS)]
            await host.run(plans[:10], depth)
            host.launch_s.clear()
            cpu_s, wall_s = time.process_time(), time.perf_counter()
            seconds = await host.run(plans[10:], depth)
            share = (time.process_time() - cpu_s) / (time.perf_counter() - wall_s)
            say(
                f"{host.shape.name} {num_rows} rows, {host.runner._watcher_name}, depth {depth}: step "
                f"{statistics.median(seconds) * 1e3:.3f} ms  p99 {percentile_ms(seconds, 0.99):.3f}  CPU {share:.2f}  "
                f"launch p50 {percentile_ms(host.launch_s, 0.5):.3f} p99 {percentile_ms(host.launch_s, 0.99):.3f}"
            )


SAMPLING = {
    "temperature": SamplingParams(temperature=0.8),
    "top-k, top-p": SamplingParams(temperature=0.8, top_k=50, top_p=0.95),
    "penalties": SamplingParams(temperature=0, frequency_penalty=0.3),
}


async def measure(host: Host, parts: Sequence[str]) -> None:
    greedy = SamplingParams(temperature=0)
    if "decode" in parts:
        for num_rows, length in ((1, 640), (16, 640), (64, 640), (256, 640), (64, 4096)):
            await decode(host, f"{num_rows}x{length}", [length - NUM_STEPS // 2] * num_rows, greedy)
        await joins(host, 64)
        await joins(host, 256)
    if "ragged" in parts:
        await decode(host, "ragged", ragged_lengths(), greedy)
    if "sampling" in parts:
        for name, params in SAMPLING.items():
            await decode(host, f"64x640 {name}", [610] * 64, params)
    if "prefill" in parts:
        for cached, count, piece in ((0, 512, 512), (4096, 512, 512), (0, 4096, 4096), (0, 32_768, 4096)):
            await prefill(host, cached, count, piece)
    if "mixed" in parts:
        await mixed(host, 64, 600, 448)
        await mixed(host, 16, 600, 496)
    if "watchers" in parts:
        for name in ("timer", "thread", "poll"):
            host.runner._watcher_name = name
            if host.runner._watcher is not None:
                await host.runner._watcher.aclose()
                host.runner._watcher = None
            await watchers(host)
    await host.runner.aclose()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=[shape.name for shape in SHAPES])
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--kv-cache-gib", type=float, default=0.0, help="0 takes what is free, as the server does")
    options = parser.parse_args()
    for shape in SHAPES:
        if shape.name not in options.shapes:
            continue
        with tempfile.TemporaryDirectory() as temporary:
            folder = model_folder(shape, Path(temporary) / shape.name)
            runner = load(folder, options)
            if "start" in options.parts:
                asyncio.run(runner.aclose())
                del runner
                gc.collect()
                torch.cuda.empty_cache()
                runner = load(folder, options)
        with torch.inference_mode():
            for part in runner._kv.memory.split(1 << 30):
                part.normal_()
        torch.cuda.synchronize()
        uvloop.run(measure(Host(runner, shape), options.parts))
        del runner
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
