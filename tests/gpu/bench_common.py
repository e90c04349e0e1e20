"""What the benches of kernels and of steps share: shapes, caches, slot tables, timed graphs, a report's lines."""

import itertools
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from aserve.core.ids import Epoch, Slot, StepNumber
from aserve.core.plan import BatchPlan, Join
from aserve.core.request import SamplingParams
from aserve.model.kernels.attention_plan import AttentionPlan
from aserve.model.kernels.attention_tiles import ChunkTiles, DecodeTiles
from aserve.model.kernels.differences import HEADER_WORDS, apply_differences
from aserve.model.kernels.slots import SlotTensors
from aserve.model.step_words import Differences

BYTES_PER_S = 4.3e12
FLOPS_PER_S = 780e12
BLOCK_SIZE = 16
NUM_MULTIPROCESSORS = 132
DEVICE = "cuda"
BF16 = torch.bfloat16


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    name: str
    hidden: int
    intermediate: int
    num_layers: int
    head_dim: int
    tied: bool
    num_heads: int = 32
    num_kv_heads: int = 8
    vocab: int = 49_152

    @property
    def qkv_width(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


SHAPES = (
    Shape(name="8b", hidden=4096, intermediate=14336, num_layers=32, head_dim=128, tied=False),
    Shape(name="1b", hidden=2048, intermediate=8192, num_layers=16, head_dim=64, tied=True),
)

PROBE_STEP_MS = {
    ("8b", "1x640"): 4.35, ("8b", "16x640"): 4.8, ("8b", "64x640"): 5.9, ("8b", "256x640"): 11.9,
    ("8b", "64x4096"): 12.2, ("1b", "1x640"): 0.98, ("1b", "16x640"): 1.1, ("1b", "64x640"): 1.4,
    ("1b", "256x640"): 2.7,
}  # fmt: skip


def graph_ms(run: Callable[[], object], repeats: int = 15) -> float:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(3):
        graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events))


def randn(*size: int, std: float = 1.0) -> Tensor:
    return torch.empty(size, dtype=BF16, device=DEVICE).normal_(0, std)


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def say(*parts: object) -> None:
    print(*parts, flush=True)  # noqa: T201


def report(what: str, us: float, *, num_bytes: float = 0, num_flops: float = 0, note: str = "") -> None:
    floor_us = max(num_bytes / BYTES_PER_S, num_flops / FLOPS_PER_S) * 1e6
    rate = f"{num_flops / us / 1e6:6.0f} TFLOP/s" if num_flops else f"{num_bytes / us / 1e3:6.0f} GB/s"
    say(f"{what:34} {us:9.1f} us  {rate}  floor {floor_us:8.1f}  x{us / max(floor_us, 1e-9):.2f} {note}")


def ragged_lengths() -> list[int]:
    """64 rows, most of a few hundred tokens, one of 16,384."""
    generator = np.random.default_rng(0)
    lengths = np.clip(generator.lognormal(6.2, 0.9, 64), 16, 4096).astype(int)
    lengths[20] = 16_384
    return lengths.tolist()


LENGTHS = {
    "1x512": [512], "16x512": [512] * 16, "64x512": [512] * 64, "256x512": [512] * 256, "64x4096": [4096] * 64,
    "ragged": ragged_lengths(), "1x16384": [16_384],
}  # fmt: skip


class Sequences:
    """Rows over shuffled blocks with a cache of a few layers that is larger than L2."""

    def __init__(self, shape: Shape, lengths: list[int], *, num_layers: int | None = None, spare: int = 0) -> None:
        self.lengths = lengths
        self.shape = shape
        nums_blocks = [-(-(length + spare) // BLOCK_SIZE) for length in lengths]
        num_blocks = sum(nums_blocks) + 1
        order = (torch.randperm(num_blocks - 1) + 1).int()
        self.tables_SB = torch.zeros(len(lengths) + 1, max(nums_blocks), dtype=torch.int32)
        for row, (part, count) in enumerate(zip(order.split(nums_blocks), nums_blocks, strict=True)):
            self.tables_SB[row, :count] = part
        self.tables_SB = self.tables_SB.to(DEVICE)
        size = (num_blocks, 2, shape.num_kv_heads, BLOCK_SIZE, shape.head_dim)
        num_bytes = 2 * math.prod(size)
        self.layers = [
            randn(*size).permute(1, 2, 0, 3, 4)
            for _ in range(num_layers or max(2, min(32, 200 * 2**20 // num_bytes + 1)))
        ]
        self.slots_S = int32(list(range(len(lengths))))
        self.context_S = int32(lengths)

    def newest(self) -> tuple[Tensor, Tensor]:
        """(positions, slots in the cache) of the rows' newest tokens."""
        positions_S = self.context_S - 1
        blocks_S = self.tables_SB[self.slots_S.long(), (positions_S // BLOCK_SIZE).long()]
        return positions_S, blocks_S * BLOCK_SIZE + positions_S % BLOCK_SIZE

    def plan(
        self,
        queries: list[int],
        *,
        num_programs: int | None = None,
        decode_tiles: DecodeTiles | None = None,
        chunk_tiles: ChunkTiles | None = None,
    ) -> AttentionPlan:
        shape = self.shape
        plan = AttentionPlan.allocate(
            num_sequences=len(self.lengths), num_chunk_tokens=sum(n for n in queries if n > 1),
            num_heads=shape.num_heads, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim,
            num_multiprocessors=NUM_MULTIPROCESSORS, dtype=BF16, num_programs=num_programs,
            decode_tiles=decode_tiles, chunk_tiles=chunk_tiles, device=DEVICE,
        )  # fmt: skip
        plan.fill(self.slots_S, int32([0, *itertools.accumulate(queries)]), self.context_S)
        return plan


def make_join(slot: int, params: SamplingParams, position: int = 0) -> Join:
    return Join(
        slot=Slot(slot), epoch=Epoch(1), position=position, params=params, seed=slot * 7919, stop_ids=(1, 2),
        min_length=0, max_length=1 << 30, num_prompt_tokens=0, history=np.empty(0, np.int32),
    )  # fmt: skip


def make_table(num_rows: int, vocab: int, params: SamplingParams, position: int = 0) -> SlotTensors:
    table = SlotTensors.allocate(
        num_slots=num_rows, max_num_blocks=300, vocab_size=vocab, max_additions=64, device=DEVICE
    )
    joins = tuple(make_join(slot, params, position) for slot in range(num_rows))
    differences = Differences.of(BatchPlan(step=StepNumber(1), joins=joins), vocab, 64)
    words = np.zeros(HEADER_WORDS + differences.num_words, np.int32)
    differences.write(words, HEADER_WORDS)
    apply_differences(torch.from_numpy(words).to(DEVICE), table)
    return table
