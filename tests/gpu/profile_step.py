"""Where the time of a captured step goes: its kernels by the profiler, and the host's calls beside them.

    python tests/gpu/profile_step.py [--shapes 8b] [--rows 1 16 256] [--length 640] [--trace FILE] [--plain]
    python tests/gpu/profile_step.py --rows 63 --chunk 512 [--shapes 1b 8b]
    python tests/gpu/profile_step.py --anatomy [--shapes 1b 8b] [--rows 1]

Prints, for each number of rows, every kernel's launches a step, its mean and its share. --chunk adds a prompt of so
many tokens to the rows. --plain profiles the step of
bench_kernels.py, which no server surrounds, as well. --trace writes a timeline of four steps through
``CudaRunner.launch`` for chrome://tracing. --anatomy asks what a launched step has that a replayed graph has not: the
time of a step in ways that lie between the two, each by the device's clock or between landings, and its parts and the
gaps before them, two steps in flight.
"""

import argparse
import gc
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
import torch
import uvloop
from bench_common import SHAPES, Shape, randn, say
from bench_step import Host, chunk, load, model_folder, rows_of
from step_anatomy import PARTS, Span, anatomy_of
from step_forms import PlainStep
from torch.profiler import ProfilerActivity, profile

from aserve.core.ids import StepNumber
from aserve.core.plan import BatchPlan
from aserve.core.request import SamplingParams

NUM_REPLAYS = 10
SHOWN = 24
NUM_STEPS: Final = 40
"""Of each way that is timed."""
GREEDY: Final = SamplingParams(temperature=0)


def kernels(run: Callable[[], None]) -> None:
    """Profile ``run`` and print its kernels, the longest in all first."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(NUM_REPLAYS):
            run()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = defaultdict(list)
    spans = []
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found[event.name].append(event.time_range.elapsed_us())
            spans.append((event.time_range.start, event.time_range.end))
    busy_us = sum(map(sum, found.values())) / NUM_REPLAYS
    wall_us = (max(end for _, end in spans) - min(start for start, _ in spans)) / NUM_REPLAYS
    say(f"  kernels {busy_us:9.1f} us of {wall_us:9.1f} us a step")
    for name, times in sorted(found.items(), key=lambda entry: -sum(entry[1]))[:SHOWN]:
        say(
            f"  {sum(times) / NUM_REPLAYS:9.1f} us  {len(times) / NUM_REPLAYS:5.1f} x {np.mean(times):8.2f} us  "
            f"{name[:96]}"
        )


def replay_of(graph_body: Callable[[], None]) -> Callable[[], None]:
    graph_body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        graph_body()
    return graph.replay


async def product(host: Host, num_rows: int, length: int, num_chunk_tokens: int, trace: str) -> None:
    lengths = [length] * num_rows
    await host.bind(
        [*lengths, 0] if num_chunk_tokens else lengths, SamplingParams(temperature=0), num_chunk_tokens + 64
    )
    prompt = {"chunks": (chunk(num_rows, 0, num_chunk_tokens, last=False),)} if num_chunk_tokens else {}
    num_arrays = len(host.runner._steps.arrays_RW)  # all of which a replay goes through
    plans = [{"rows": rows_of(lengths, step), **prompt} for step in range(num_arrays + 4)]
    seconds = await host.run(plans[:num_arrays])
    size = host.runner._steps.size_of(BatchPlan(step=StepNumber(1), **plans[0]))
    replay = host.replay_of(size)
    say(
        f"{host.shape.name} {num_rows} x {length} + {num_chunk_tokens}, the product's step: {min(seconds) * 1e3:.3f} ms"
    )
    if trace:
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
            await host.run(plans[num_arrays:])
        profiler.export_chrome_trace(trace)
    with host.runner._device.scope():
        kernels(replay)


def plain(shape: Shape, num_rows: int, length: int) -> None:
    attention_width = shape.num_heads * shape.head_dim
    sizes = {
        "qkv": (shape.qkv_width, shape.hidden), "o": (shape.hidden, attention_width),
        "gate_up": (2 * shape.intermediate, shape.hidden), "down": (shape.hidden, shape.intermediate),
    }  # fmt: skip
    weights = {name: [randn(*size, std=0.02) for _ in range(shape.num_layers)] for name, size in sizes.items()}
    weights["embedding"] = [randn(shape.vocab, shape.hidden, std=0.5)]
    weights["head"] = weights["embedding"] if shape.tied else [randn(shape.vocab, shape.hidden, std=0.02)]
    weights["gain"] = [1 + randn(shape.hidden, std=0.1) for _ in range(2 * shape.num_layers + 1)]
    say(f"{shape.name} {num_rows} x {length}, the plain step")
    kernels(replay_of(PlainStep(shape, [length] * num_rows, weights).run))


class Anatomist:
    """Times steps of so many rows in all ways, by sequences that are bound anew for each."""

    def __init__(self, host: Host, num_rows: int, length: int) -> None:
        self._host = host
        self._lengths = [length] * num_rows
        self._plans = [{"rows": rows_of(self._lengths, step)} for step in range(NUM_STEPS + 4)]
        size = host.runner._steps.size_of(BatchPlan(step=StepNumber(1), **self._plans[0]))
        self._replay = host.replay_of(size)

    async def ways(self) -> dict[str, float]:
        """ms a step."""

        def with_event() -> None:
            self._replay()
            self._host.runner._device.record()

        found = {}
        for name, body in (("graph alone", self._replay), ("an event after it", with_event)):
            await self._bind()
            found[name] = self._device_ms(body)
        for watcher, depth in (("timer", 2), ("thread", 2), ("timer", 3), ("timer", 1)):
            await self._wait_by(watcher)
            await self._bind()
            found[f"launched, {depth} in flight, {watcher}"] = 1e3 * statistics.median(
                (await self._host.run(self._plans, depth))[4:]
            )
        await self._wait_by("timer")
        return found

    async def spans(self) -> list[Span]:
        """What the device did while steps were launched, two in flight."""
        await self._bind()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            await self._host.run(self._plans, 2)
            torch.cuda.synchronize()
        kind = torch.autograd.DeviceType.CUDA
        events = [event for event in profiler.profiler.kineto_results.events() if event.device_type() == kind]
        spans = [Span(event.name(), event.start_ns(), event.start_ns() + event.duration_ns()) for event in events]
        return sorted(spans, key=lambda span: span.start_ns)

    async def _bind(self) -> None:
        """All arrays hold words of such a step afterwards."""
        await self._host.bind(self._lengths, GREEDY)
        await self._host.run(self._plans[: len(self._host.runner._steps.arrays_RW)])

    async def _wait_by(self, name: str) -> None:
        runner = self._host.runner
        if runner._watcher is not None:
            await runner._watcher.aclose()
        runner._watcher, runner._watcher_name = None, name

    def _device_ms(self, body: Callable[[], object]) -> float:
        with self._host.runner._device.scope():
            body()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(NUM_STEPS):
                body()
            end.record()
            end.synchronize()
        return start.elapsed_time(end) / NUM_STEPS


def clocks() -> str:
    """What the GPU runs at just now, if its driver's tool is here to tell."""
    if shutil.which("nvidia-smi") is None:
        return "clocks unknown"
    fields = "clocks.sm,clocks.mem,power.draw,temperature.gpu"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


async def dissect(host: Host, num_rows: int, length: int) -> None:
    """Print the tables of one shape at so many rows."""
    anatomist = Anatomist(host, num_rows, length)
    with torch.inference_mode():
        ways = await anatomist.ways()
        running = clocks()
        anatomy = anatomy_of(await anatomist.spans())
    title = f"{host.shape.name} x {num_rows}"
    lines = [f"| {title}: a step | ms |", "|---|---|", *(f"| {name} | {ms:.3f} |" for name, ms in ways.items()), ""]
    lines += [f"| {title}: parts, {anatomy.num_steps} steps | nodes | us | us of gaps before them |", "|---" * 4 + "|"]
    lines += [
        f"| {part} | {anatomy.nodes[part]:.1f} | {anatomy.busy_us[part]:.1f} | {anatomy.gap_us[part]:.1f} |"
        for part in PARTS
        if anatomy.nodes[part]
    ]
    nodes, busy, gaps = (sum(each.values()) for each in (anatomy.nodes, anatomy.busy_us, anatomy.gap_us))
    say("\n".join([*lines, f"| together | {nodes:.1f} | {busy:.1f} | {gaps:.1f} |", "", f"{title}: {running}", ""]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=[shape.name for shape in SHAPES])
    parser.add_argument("--rows", type=int, nargs="+")
    parser.add_argument("--length", type=int, default=640)
    parser.add_argument("--chunk", type=int, default=0)
    parser.add_argument("--trace", default="")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--anatomy", action="store_true")
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--kv-cache-gib", type=float, default=44.0)
    options = parser.parse_args()
    options.rows = options.rows or ([1] if options.anatomy else [1, 16, 256])
    for name in options.shapes or (["1b", "8b"] if options.anatomy else ["8b"]):
        profile_shape(next(shape for shape in SHAPES if shape.name == name), options)
        gc.collect()
        torch.cuda.empty_cache()


def profile_shape(shape: Shape, options: argparse.Namespace) -> None:
    """Load it once for all numbers of rows."""
    with tempfile.TemporaryDirectory() as folder:
        few = {"max_num_seqs": max(options.rows), "max_num_batched_tokens": 1024} if options.anatomy else {}
        runner = load(model_folder(shape, Path(folder) / shape.name), options, **few)
    with torch.inference_mode():
        for part in runner._kv.memory.split(1 << 30):
            part.normal_()
    torch.cuda.synchronize()

    async def run() -> None:
        host = Host(runner, shape)
        for num_rows in options.rows:
            if options.anatomy:
                await dissect(host, num_rows, options.length)
            else:
                await product(host, num_rows, options.length, options.chunk, options.trace)
        await runner.aclose()

    uvloop.run(run())
    for num_rows in options.rows if options.plain else ():
        plain(shape, num_rows, options.length)


if __name__ == "__main__":
    sys.exit(main())
