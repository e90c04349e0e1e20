"""Where the time of a captured step goes: its kernels by the profiler, and the host's calls beside them.

    python tests/gpu/profile_step.py [--shape 8b] [--rows 1 16 256] [--length 640] [--trace FILE] [--plain]

Prints, for each number of rows, every kernel's launches a step, its mean and its share. --plain profiles the step of
bench_kernels.py, which no server surrounds, as well. --trace writes a timeline of four steps through
``CudaRunner.launch`` for chrome://tracing.
"""

import argparse
import asyncio
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from bench_kernels import SHAPES, PlainStep, Shape, randn, say
from bench_step import Host, load, model_folder, rows_of
from torch.profiler import ProfilerActivity, profile

from aserve.core.ids import StepNumber
from aserve.core.plan import BatchPlan
from aserve.core.request import SamplingParams

NUM_REPLAYS = 10
SHOWN = 24


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


async def product(host: Host, num_rows: int, length: int, trace: str) -> None:
    lengths = [length] * num_rows
    await host.bind(lengths, SamplingParams(temperature=0))
    plans = [{"rows": rows_of(lengths, step)} for step in range(8)]
    await host.run(plans[:4])
    replay = host.runner._steps.step(host.runner._steps.size_of(BatchPlan(step=StepNumber(1), **plans[0]))).replay
    say(f"{host.shape.name} {num_rows} x {length}, the product's step")
    if trace:
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
            await host.run(plans[4:])
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[shape.name for shape in SHAPES], default="8b")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 256])
    parser.add_argument("--length", type=int, default=640)
    parser.add_argument("--trace", default="")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--kv-cache-gib", type=float, default=44.0)
    options = parser.parse_args()
    shape = next(shape for shape in SHAPES if shape.name == options.shape)
    with tempfile.TemporaryDirectory() as folder:
        runner = load(model_folder(shape, Path(folder) / shape.name), options)
    with torch.inference_mode():
        for part in runner._kv.memory.split(1 << 30):
            part.normal_()
    torch.cuda.synchronize()

    async def run() -> None:
        host = Host(runner, shape)
        for num_rows in options.rows:
            await product(host, num_rows, options.length, options.trace)
        await runner.aclose()

    asyncio.run(run())
    for num_rows in options.rows if options.plain else ():
        plain(shape, num_rows, options.length)


if __name__ == "__main__":
    sys.exit(main())
