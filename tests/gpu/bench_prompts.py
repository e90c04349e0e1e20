"""What a layer costs a step of prompts without its attention, and what the card's power makes of it.

    python tests/gpu/bench_prompts.py [--tokens 512 1024 2048] [--shapes 8b 1b]

Products by the library, norms and SiLU by our kernels, as ``CudaDecoder`` has them in steps with chunks; random
weights, eight layers in one graph. *cool* is behind five milliseconds of copies, as a step of prompts comes between
steps of rows; *hot* from an eighth of a second of nothing else on, as when many prompts come together, with the clock
and the power that ``nvidia-smi`` shows then.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Final

import torch
from bench_common import DEVICE, SHAPES, Shape, randn, say
from torch import Tensor

from aserve.model.kernels.activation import silu_mul
from aserve.model.kernels.norm import add_rms_norm

NUM_LAYERS: Final = 8
ROUNDS: Final = 12
COPIES: Final = 10
COPY_BYTES: Final = 1 << 30
"""Half a millisecond each."""
HOT_S: Final = 0.25
CLOCK_AND_POWER: Final = ("nvidia-smi", "--id=0", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader")


class Layers:
    """Some layers' weights, and what their products read and write."""

    def __init__(self, shape: Shape, max_num_tokens: int) -> None:
        hidden, width, size = shape.hidden, shape.num_heads * shape.head_dim, shape.intermediate
        sizes = ((shape.qkv_width, hidden), (hidden, width), (2 * size, hidden), (hidden, size))
        self._weights = [[randn(*each, std=0.02) for each in sizes] for _ in range(NUM_LAYERS)]
        self._gain = randn(hidden)
        self._stream, self._normed, self._delta = (randn(max_num_tokens, hidden) for _ in range(3))
        self._qkv, self._attended = randn(max_num_tokens, shape.qkv_width), randn(max_num_tokens, width)
        self._gate_up, self._product = randn(max_num_tokens, 2 * size), randn(max_num_tokens, size)
        self._num_weights = sum(weight.numel() for weight in self._weights[0])

    def run(self, num_tokens: int) -> None:
        def first(tensor: Tensor) -> Tensor:
            return tensor[:num_tokens]

        stream, normed, delta = first(self._stream), first(self._normed), first(self._delta)
        gate_up, product = first(self._gate_up), first(self._product)
        for qkv, output, gate_and_up, down in self._weights:
            torch.mm(normed, qkv.t(), out=first(self._qkv))
            torch.mm(first(self._attended), output.t(), out=delta)
            add_rms_norm(stream, delta, self._gain, 1e-5, out_TC=normed)
            torch.mm(normed, gate_and_up.t(), out=gate_up)
            silu_mul(gate_up, out_TI=product)
            torch.mm(product, down.t(), out=delta)
            add_rms_norm(stream, delta, self._gain, 1e-5, out_TC=normed)

    def num_flops(self, num_tokens: int) -> float:
        """Of one layer's products."""
        return 2.0 * num_tokens * self._num_weights


def captured(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def cool_us(graph: torch.cuda.CUDAGraph, copied_to: Tensor, copied: Tensor) -> float:
    """The graph's time behind work that leaves the arithmetic alone, the median."""
    found = []
    for _ in range(ROUNDS):
        for _ in range(COPIES):
            copied_to.copy_(copied)
        found.append(_replayed(graph))
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in found) * 1e3


def hot_us(graph: torch.cuda.CUDAGraph) -> tuple[float, str]:
    """The graph's time when it has run for a while, the median; and the clock and power that the driver tells then."""
    found = []
    asked: subprocess.Popen[str] | None = None
    started_s = time.perf_counter()
    while asked is None or asked.poll() is None:
        found += [_replayed(graph) for _ in range(4)]
        torch.cuda.synchronize()
        if asked is None and time.perf_counter() - started_s > HOT_S:
            num_warm = len(found)
            asked = subprocess.Popen(CLOCK_AND_POWER, stdout=subprocess.PIPE, text=True)
    times = [begin.elapsed_time(end) for begin, end in found[num_warm // 2 :]]
    return statistics.median(times) * 1e3, asked.communicate()[0].strip()


def _replayed(graph: torch.cuda.CUDAGraph) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    graph.replay()
    end.record()
    return begin, end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=(512, 1024, 2048))
    parser.add_argument("--shapes", nargs="+", default=[shape.name for shape in SHAPES])
    options = parser.parse_args()
    copied_to, copied = (torch.empty(COPY_BYTES, dtype=torch.int8, device=DEVICE) for _ in range(2))
    for shape in SHAPES:
        if shape.name not in options.shapes:
            continue
        layers = Layers(shape, max(options.tokens))
        for num_tokens in options.tokens:
            graph = captured(partial(layers.run, num_tokens))
            cool = cool_us(graph, copied_to, copied) / NUM_LAYERS
            hot, told = hot_us(graph)
            hot /= NUM_LAYERS
            rates = [layers.num_flops(num_tokens) / us / 1e6 for us in (cool, hot)]
            say(
                f"{shape.name} {num_tokens:5} tokens: cool {cool:7.1f} us a layer, {rates[0]:4.0f} TFLOP/s; "
                f"hot {hot:7.1f} us, {rates[1]:4.0f} TFLOP/s, {told}"
            )


if __name__ == "__main__":
    sys.exit(main())
