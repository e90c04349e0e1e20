"""What each kernel takes on this GPU, beside the time that its bytes or operations need, and whole plain decode steps.

    python tests/gpu/bench_kernels.py [elementwise] [decode] [rotation] [chunks] [products] [sampler] [steps] [--tune]
        [--rows 1]

Each figure is the median replay of a CUDA graph that runs the kernel once a layer, over as many caches and weights, so
that nothing is found in the L2 cache that a step would not find there. --tune tries all tile settings.
"""

import argparse
import dataclasses
import functools
import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from aserve.core.ids import Epoch, Slot, StepNumber
from aserve.core.plan import BatchPlan, Join
from aserve.core.request import SamplingParams
from aserve.model.kernels.activation import silu_mul
from aserve.model.kernels.attention_chunks import chunk_attention, mixed_attention
from aserve.model.kernels.attention_decode import decode_attention, rotate_and_attend
from aserve.model.kernels.attention_plan import AttentionPlan
from aserve.model.kernels.attention_tiles import ChunkTiles, DecodeTiles
from aserve.model.kernels.compile import compile_variants, variants_of
from aserve.model.kernels.differences import HEADER_WORDS, apply_differences
from aserve.model.kernels.few_rows import MAX_ROWS, FewRowsProducts, Stream
from aserve.model.kernels.few_rows_tiles import ProductTiles
from aserve.model.kernels.norm import add_rms_norm, add_rms_norm_rows, embed_rms_norm
from aserve.model.kernels.rope_kv import Rotation, rope_table, rotate_and_cache
from aserve.model.kernels.sampler import sample, top_logprobs
from aserve.model.kernels.slot_update import FROM_SLOT, commit, lay_out
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


def bench_elementwise(tune: bool) -> None:
    for shape, num_tokens in itertools.product(SHAPES, (1, 64, 256, 4096)):
        bench_elementwise_case(shape, num_tokens)


def bench_elementwise_case(shape: Shape, num_tokens: int) -> None:
    name = f"{shape.name} {num_tokens} "
    count = max(2, min(32, 300 * 2**20 // (num_tokens * shape.hidden * 6) + 1))
    hidden = [(randn(num_tokens, shape.hidden), randn(num_tokens, shape.hidden)) for _ in range(count)]
    gain, out = randn(shape.hidden), randn(num_tokens, shape.hidden)
    us = 1e3 / count * graph_ms(lambda: [add_rms_norm(x, d, gain, 1e-5, out_TC=out) for x, d in hidden])
    report(name + "add_rms_norm", us, num_bytes=num_tokens * shape.hidden * 8)
    gate_up = [randn(num_tokens, 2 * shape.intermediate) for _ in range(count)]
    out_TI = randn(num_tokens, shape.intermediate)
    us = 1e3 / count * graph_ms(lambda: [silu_mul(x, out_TI=out_TI) for x in gate_up])
    report(name + "silu_mul", us, num_bytes=num_tokens * shape.intermediate * 6)
    qkv = [randn(num_tokens, shape.qkv_width) for _ in range(count)]
    cache = randn(2, shape.num_kv_heads, 512, BLOCK_SIZE, shape.head_dim)
    table = rope_table(torch.rand(shape.head_dim // 2, device=DEVICE), 8192)
    positions, slots = int32(list(range(num_tokens))), int32(torch.randperm(8192)[:num_tokens].tolist())
    heads = [randn(shape.vocab, shape.hidden) for _ in range(2)]
    logits = torch.empty(num_tokens, shape.vocab, device=DEVICE)
    if num_tokens <= 256:
        us = 500 * graph_ms(lambda: [torch.mm(out, w.t(), out_dtype=torch.float32, out=logits) for w in heads])
        report(name + "head to float32", us, num_bytes=heads[0].numel() * 2 + logits.numel() * 4)
        us = 500 * graph_ms(lambda: [torch.mm(out, w.t()) for w in heads])
        report(name + "head to bfloat16", us, num_bytes=heads[0].numel() * 2 + logits.numel() * 2)
    us = 1e3 / count * graph_ms(lambda: [rotate_and_cache(x, positions, slots, table, cache) for x in qkv])
    report(name + "rotate_and_cache", us, num_bytes=num_tokens * shape.qkv_width * 4)


def decode_settings(tune: bool) -> Iterator[tuple[DecodeTiles | None, int | None]]:
    if not tune:
        yield None, None
        return
    for (tokens, stages, warps), target in itertools.product(
        ((64, 2, 4), (32, 4, 2), (128, 2, 4), (64, 2, 2), (128, 2, 2), (128, 3, 4), (64, 3, 2)), (264, 528, 1056)
    ):
        yield DecodeTiles(tokens=tokens, num_stages=stages, num_warps=warps), target


def bench_decode(tune: bool) -> None:
    for shape, (name, lengths) in itertools.product(SHAPES, LENGTHS.items()):
        bench_decode_case(shape, name, lengths, tune)
        torch.cuda.empty_cache()


def bench_decode_case(shape: Shape, name: str, lengths: list[int], tune: bool) -> None:
    rows = Sequences(shape, lengths)
    q = randn(len(lengths), shape.num_heads, shape.head_dim)
    out = torch.empty_like(q)
    found = []
    for tiles, target in decode_settings(tune):
        plan = rows.plan([1] * len(lengths), num_programs=target, decode_tiles=tiles)

        def run(plan: AttentionPlan = plan) -> None:
            for layer in rows.layers:
                decode_attention(q, layer, rows.tables_SB, plan, scale=0.1, out_TAD=out)

        found.append((graph_ms(run) * 1e3 / len(rows.layers), target, tiles))
    found.sort(key=lambda entry: entry[0])
    num_bytes = sum(lengths) * shape.num_kv_heads * shape.head_dim * 4
    best = [f"{us:.1f} {target} {t and (t.tokens, t.num_stages, t.num_warps)}" for us, target, t in found[:5]]
    report(f"{shape.name} {name} decode", found[0][0], num_bytes=num_bytes, note=" | ".join(best) if tune else "")
    if tune:
        by_setting = {(target, t and (t.tokens, t.num_stages, t.num_warps)): us for us, target, t in found}
        say("   ", {str(k): round(v, 1) for k, v in sorted(by_setting.items(), key=str)})


def bench_rotation(tune: bool, nums_rows: Sequence[int] = ()) -> None:
    """Attention that does RoPE and the cache's writes itself, beside the two kernels, each begun early."""
    for shape, num_rows in itertools.product(SHAPES, nums_rows or (1, 16, 64)):
        bench_rotation_case(shape, [640] * num_rows)
        torch.cuda.empty_cache()


def bench_rotation_case(shape: Shape, lengths: list[int]) -> None:
    rows = Sequences(shape, lengths)
    num_rows, plan = len(lengths), rows.plan([1] * len(lengths))
    qkv = randn(num_rows, shape.qkv_width)
    q = qkv.view(num_rows, -1, shape.head_dim)[:, : shape.num_heads]
    out = torch.empty(num_rows, shape.num_heads, shape.head_dim, dtype=BF16, device=DEVICE)
    table = rope_table(torch.rand(shape.head_dim // 2, device=DEVICE), 8192)
    positions, mapping = rows.newest()
    rotation = Rotation(positions_T=positions, slot_mapping_T=mapping, table_PD=table)

    def apart() -> None:
        for layer in rows.layers:
            rotate_and_cache(qkv, positions, mapping, table, layer, early=True)
            decode_attention(q, layer, rows.tables_SB, plan, scale=0.1, early=True, out_TAD=out)

    def in_one() -> None:
        for layer in rows.layers:
            rotate_and_attend(qkv, rotation, layer, rows.tables_SB, plan, scale=0.1, early=True, out_TAD=out)

    num_bytes = sum(lengths) * shape.num_kv_heads * shape.head_dim * 4
    apart_us, in_one_us = (graph_ms(run) * 1e3 / len(rows.layers) for run in (apart, in_one))
    report(f"{shape.name} {num_rows} attention with rope", in_one_us, num_bytes=num_bytes, note=f"apart {apart_us:.1f}")


CHUNKS = {
    "4096": ([4096], [4096]), "512": ([512], [512]), "8x512": ([512] * 8, [512] * 8),
    "512 at 4096": ([512], [4608]), "512 at 32k": ([512], [33_280]), "32k": ([32_768], [32_768]),
    "512 + 64 rows": ([1] * 64 + [512], [640] * 64 + [512]),
    "512 at 4096 + 64 rows": ([1] * 64 + [512], [640] * 64 + [4608]),
}  # fmt: skip


def chunk_settings(tune: bool, head_dim: int) -> Iterator[ChunkTiles | None]:
    yield None
    if not tune:
        return
    for tokens, stages, warps, rows in (
        (64, 2, 8, 128), (64, 3, 8, 128), (128, 2, 8, 128), (128, 3, 8, 128), (64, 3, 4, 128),
        (64, 2, 8, 256), (64, 3, 8, 256), (32, 3, 8, 256), (64, 2, 4, 64), (64, 3, 4, 64), (128, 2, 4, 64),
    ):  # fmt: skip
        if (stages - 1) * tokens * head_dim * 4 <= 160 * 1024:
            yield ChunkTiles(rows=rows, tokens=tokens, num_stages=stages, num_warps=warps)


def bench_chunks(tune: bool) -> None:
    for shape, (name, (queries, lengths)) in itertools.product(SHAPES, CHUNKS.items()):
        bench_chunks_case(shape, name, queries, lengths, tune)
        torch.cuda.empty_cache()


def bench_chunks_case(shape: Shape, name: str, queries: list[int], lengths: list[int], tune: bool) -> None:
    rows = Sequences(shape, lengths, num_layers=2)
    q = randn(sum(queries), shape.num_heads, shape.head_dim)
    out = torch.empty_like(q)
    found = []
    for tiles in chunk_settings(tune, shape.head_dim):
        plan = rows.plan(queries, chunk_tiles=tiles)

        def run(plan: AttentionPlan = plan) -> None:
            for layer in rows.layers:
                chunk_attention(q, layer, rows.tables_SB, plan, scale=0.1, out_TAD=out)

        try:
            us = graph_ms(run, 8) * 1e3 / len(rows.layers)
            found.append((us, tiles and (tiles.tokens, tiles.num_stages, tiles.num_warps, tiles.rows)))
        except triton.runtime.errors.OutOfResources as error:
            say("   ", tiles, error)
    found.sort(key=lambda entry: entry[0])
    pairs = sum(n * (m - n) + n * (n + 1) / 2 for n, m in zip(queries, lengths, strict=True) if n > 1)
    num_flops = 4 * pairs * shape.num_heads * shape.head_dim
    note = " | ".join(f"{us:.1f} {setting}" for us, setting in found) if tune else ""
    report(f"{shape.name} {name} chunks", found[0][0], num_flops=num_flops, note=note)
    if 1 in queries:
        plan, side = rows.plan(queries), torch.cuda.Stream()
        for way, stream in (("in a row", None), ("side by side", side)):

            def run_both(stream: torch.cuda.Stream | None = stream) -> None:
                for layer in rows.layers:
                    mixed_attention(q, layer, rows.tables_SB, plan, scale=0.1, side=stream, out_TAD=out)

            report(f"   with decode rows, {way}", graph_ms(run_both, 8) * 1e3 / len(rows.layers), num_flops=num_flops)
    if name in ("4096", "512"):
        bench_torch_attention(shape, queries[0], num_flops)


def bench_torch_attention(shape: Shape, num_tokens: int, num_flops: float) -> None:
    """What torch's kernels take for the same prompt in contiguous memory."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q = randn(1, shape.num_heads, num_tokens, shape.head_dim)
    k, v = (randn(1, shape.num_kv_heads, num_tokens, shape.head_dim) for _ in range(2))
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        try:
            with sdpa_kernel(backend):
                us = 1e3 * graph_ms(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), 8)
            report(f"   torch {backend.name.lower()}", us, num_flops=num_flops)
        except RuntimeError as error:
            say("   torch", backend.name, str(error)[:80])


def product_settings(num_rows: int, num_outputs: int, num_inputs: int, pairs: bool) -> list[ProductTiles]:
    """All that may be worth trying for a product; pairs: it is gate and up."""
    if num_rows == 1:
        found = []
        for outputs, inputs in itertools.product((1, 2, 4, 8), (512, 1024, 2048, 4096)):
            for stages, warps in itertools.product((1, 2, 3), (2, 4, 8)):
                num_weights = outputs * inputs * (2 if pairs else 1)
                if num_inputs % inputs == 0 and num_weights // warps in (1024, 2048):
                    tiles = ProductTiles(
                        rows=1, outputs=outputs, inputs=inputs, parts=1, num_stages=stages, num_warps=warps
                    )
                    found.append(tiles)
        return found
    rows = max(16, triton.next_power_of_2(num_rows))
    found = []
    for (outputs, inputs, stages, warps), parts in itertools.product(
        ((64, 128, 3, 4), (64, 128, 4, 4), (64, 128, 6, 4), (64, 256, 3, 4), (64, 64, 6, 4), (64, 64, 8, 4),
         (128, 64, 4, 4), (128, 64, 4, 8), (128, 128, 3, 4), (128, 128, 3, 8)), (1, 2, 4, 8)
    ):  # fmt: skip
        programs = num_outputs // outputs * parts // (2 if pairs else 1)
        shared = stages * inputs * 2 * (outputs * (2 if pairs else 1) + rows)
        is_cut_well = parts == 1 or (not pairs and programs <= 2 * NUM_MULTIPROCESSORS and num_inputs // parts >= 512)
        if shared <= 220 * 1024 and programs >= 60 and is_cut_well:
            found.append(
                ProductTiles(rows=rows, outputs=outputs, inputs=inputs, parts=parts, num_stages=stages, num_warps=warps)
            )
    return found


def bench_products(tune: bool, nums_rows: Sequence[int] = ()) -> None:
    """Products of few rows with what goes along, beside the library's alone and what surrounds it on the long way."""
    for shape, num_rows in itertools.product(SHAPES, nums_rows or (1, 16, 64)):
        bench_products_case(shape, num_rows, tune)
        torch.cuda.empty_cache()


def bench_products_case(shape: Shape, num_rows: int, tune: bool) -> None:
    hidden, size, width = shape.hidden, shape.intermediate, shape.num_heads * shape.head_dim
    products = FewRowsProducts(
        num_channels=hidden, num_multiprocessors=4 * NUM_MULTIPROCESSORS if tune else NUM_MULTIPROCESSORS,
        device=torch.device(DEVICE),
    )  # fmt: skip
    chosen = FewRowsProducts(
        num_channels=hidden, num_multiprocessors=NUM_MULTIPROCESSORS, device=torch.device(DEVICE)
    )  # fmt: skip
    stream = Stream(residual_TC=randn(num_rows, hidden), scaled_TC=randn(num_rows, hidden))
    gain = randn(hidden)
    attended, product = randn(num_rows, width), randn(num_rows, size)
    qkv, gate_up = randn(num_rows, shape.qkv_width), randn(num_rows, 2 * size)
    logits = torch.empty(num_rows, shape.vocab, device=DEVICE)
    x, d = stream.scaled_TC, randn(num_rows, hidden)
    cases = {
        "qkv": (
            (shape.qkv_width, hidden),
            lambda p, w, t: p.norm_product(stream, 1e-5, w, None, tiles=t, out_TN=qkv),
            lambda w: torch.mm(x, w.t(), out=qkv),
        ),
        "o": (
            (hidden, width),
            lambda p, w, t: p.product_add(attended, w, None, gain, tiles=t, stream=stream),
            lambda w: (torch.mm(attended, w.t(), out=d), add_rms_norm(stream.residual_TC, d, gain, 1e-5, out_TC=x)),
        ),
        "gate_up": (
            (2 * size, hidden),
            lambda p, w, t: p.norm_gate_up(stream, 1e-5, w, None, tiles=t, out_TI=product),
            lambda w: (torch.mm(x, w.t(), out=gate_up), silu_mul(gate_up, out_TI=product)),
        ),
        "down": (
            (hidden, size),
            lambda p, w, t: p.product_add(product, w, None, gain, tiles=t, stream=stream),
            lambda w: (torch.mm(product, w.t(), out=d), add_rms_norm(stream.residual_TC, d, gain, 1e-5, out_TC=x)),
        ),
        "head": (
            (shape.vocab, hidden),
            lambda p, w, t: p.norm_product(stream, 1e-5, w, None, tiles=t, out_TN=logits),
            lambda w: torch.mm(x, w.t(), out_dtype=torch.float32, out=logits),
        ),
    }  # fmt: skip
    for name, (weight_size, ours, plain) in cases.items():
        num_bytes = 2 * math.prod(weight_size)
        weights = [randn(*weight_size, std=0.02) for _ in range(max(2, min(12, 400 * 2**20 // num_bytes)))]
        settings = product_settings(num_rows, *weight_size, name == "gate_up") if tune else []
        run = functools.partial(run_settings, ours, products, weights)
        compile_variants(variants_of(lambda: [run(each, weights[:1]) for each in settings]), lambda done, of: None)  # noqa: B023
        us = {"plain": 1e3 / len(weights) * graph_ms(lambda: [plain(w) for w in weights])}  # noqa: B023
        us["chosen"] = 1e3 / len(weights) * graph_ms(lambda: [ours(chosen, w, None) for w in weights])  # noqa: B023
        found = []
        for each in settings:
            try:
                found.append((1e3 / len(weights) * graph_ms(functools.partial(run, each), 8), each))
            except triton.runtime.errors.OutOfResources:
                continue
        found.sort(key=lambda entry: entry[0])
        note = "".join(
            f" | {t:.1f} {s.outputs}x{s.inputs}/{s.parts} s{s.num_stages} w{s.num_warps}" for t, s in found[:6]
        )
        report(
            f"{shape.name} {num_rows} {name}", us["chosen"], num_bytes=num_bytes,
            note=f"library's {us['plain']:.1f}{note}",
        )  # fmt: skip


def run_settings(
    run: Callable[[FewRowsProducts, Tensor, ProductTiles], None],
    products: FewRowsProducts,
    weights: list[Tensor],
    tiles: ProductTiles,
    some: list[Tensor] | None = None,
) -> None:
    for weight in some or weights:
        run(products, weight, tiles)


SAMPLING = {
    "greedy": SamplingParams(temperature=0),
    "temperature": SamplingParams(temperature=0.8),
    "top-p": SamplingParams(temperature=0.8, top_p=0.95),
    "top-k, top-p": SamplingParams(temperature=0.8, top_k=50, top_p=0.95),
    "penalties": SamplingParams(temperature=0, frequency_penalty=0.3),
}


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


def bench_sampler(tune: bool) -> None:
    for vocab, num_rows in ((49_152, 1), (49_152, 64), (49_152, 256), (152_064, 64)):
        bench_sampler_case(vocab, num_rows)


def bench_sampler_case(vocab: int, num_rows: int) -> None:
    logits = [torch.randn(num_rows, vocab, device=DEVICE) * 2 for _ in range(4)]
    work = torch.empty_like(logits[0])
    slots, lengths = int32(list(range(num_rows))), int32([600] * num_rows)
    tokens, flags = int32([0] * num_rows), int32([0] * num_rows)
    for name, params in SAMPLING.items():
        table = make_table(num_rows, vocab, params)

        def run(table: SlotTensors = table) -> None:
            for x in logits:
                sample(x, work, slots, lengths, table, tokens_R=tokens, flags_R=flags)

        us = 250 * graph_ms(run)
        report(f"{num_rows} x {vocab} {name}", us, num_bytes=num_rows * vocab * 4)
    out = {
        "token_logprobs_R": torch.empty(num_rows, device=DEVICE),
        "ranks_R": torch.empty(num_rows, dtype=torch.int32, device=DEVICE),
        "top_ids_RK": torch.empty(num_rows, 20, dtype=torch.int32, device=DEVICE),
        "top_logprobs_RK": torch.empty(num_rows, 20, device=DEVICE),
    }
    us = 250 * graph_ms(lambda: [top_logprobs(x, tokens, **out) for x in logits])
    report(f"{num_rows} x {vocab} logprobs", us, num_bytes=num_rows * vocab * 4)


class PlainStep:
    """A decode step as the server captures it: cuBLAS and these kernels, from the slot table to the result words."""

    def __init__(self, shape: Shape, lengths: list[int], weights: dict[str, list[Tensor]]) -> None:
        num_rows = len(lengths)
        self.shape, self.weights = shape, weights
        self.rows = rows = Sequences(shape, lengths, num_layers=shape.num_layers, spare=64)
        self.table = make_table(num_rows, shape.vocab, SamplingParams(temperature=0))
        self.table.records_SW[:num_rows, 1] = rows.context_S - 1
        self.tables = dataclasses.replace(self.table, block_tables_SB=rows.tables_SB)
        self.records = self.table.records_SW.clone()
        self.starts, self.tokens_in = int32(list(range(num_rows + 1))), int32([FROM_SLOT] * num_rows)
        self.samples = int32([1] * num_rows)
        names = ("token_ids", "positions", "mapping", "context", "last_rows", "tokens", "flags")
        self.ints = {name: int32([0] * num_rows) for name in names}
        self.x, self.y, self.d = (randn(num_rows, shape.hidden) for _ in range(3))
        self.qkv, self.gate_up = randn(num_rows, shape.qkv_width), randn(num_rows, 2 * shape.intermediate)
        self.out, self.act = randn(num_rows, shape.num_heads, shape.head_dim), randn(num_rows, shape.intermediate)
        self.logits, self.work = (torch.empty(num_rows, shape.vocab, device=DEVICE) for _ in range(2))
        self.ring = torch.zeros(16, num_rows, dtype=torch.int64).pin_memory()
        self.step = torch.ones(1, dtype=torch.int64, device=DEVICE)
        self.rope = rope_table(torch.rand(shape.head_dim // 2, device=DEVICE), 32_768)
        self.plan = rows.plan([1] * num_rows)

    def run(self) -> None:
        rows, ints = self.rows, self.ints
        lay_out(
            self.tokens_in, rows.slots_S, self.starts, self.tables, BLOCK_SIZE, token_ids_T=ints["token_ids"],
            positions_T=ints["positions"], slot_mapping_T=ints["mapping"], context_lens_S=ints["context"],
            last_rows_S=ints["last_rows"],
        )  # fmt: skip
        self.plan.fill(rows.slots_S, self.starts, ints["context"])
        self.forward()
        sample(
            self.logits, self.work, rows.slots_S, ints["context"], self.tables, tokens_R=ints["tokens"],
            flags_R=ints["flags"],
        )  # fmt: skip
        commit(
            ints["tokens"], ints["flags"], rows.slots_S, self.starts, ints["context"], self.samples, self.tables,
            ring_NS=self.ring, step_1=self.step,
        )  # fmt: skip

    def forward(self) -> None:
        shape, rows, ints, gains = self.shape, self.rows, self.ints, self.weights["gain"]
        embed_rms_norm(
            ints["token_ids"], self.weights["embedding"][0], gains[0], 1e-5, residual_TC=self.x, out_TC=self.y
        )
        q_TAD = self.qkv.view(len(self.x), -1, shape.head_dim)[:, : shape.num_heads]
        for index, layer in enumerate(rows.layers):
            torch.mm(self.y, self.weights["qkv"][index].t(), out=self.qkv)
            rotate_and_cache(self.qkv, ints["positions"], ints["mapping"], self.rope, layer)
            decode_attention(q_TAD, layer, rows.tables_SB, self.plan, scale=0.1, out_TAD=self.out)
            torch.mm(self.out.view(len(self.x), -1), self.weights["o"][index].t(), out=self.d)
            add_rms_norm(self.x, self.d, gains[2 * index + 1], 1e-5, out_TC=self.y)
            torch.mm(self.y, self.weights["gate_up"][index].t(), out=self.gate_up)
            silu_mul(self.gate_up, out_TI=self.act)
            torch.mm(self.act, self.weights["down"][index].t(), out=self.d)
            if index + 1 < len(rows.layers):
                add_rms_norm(self.x, self.d, gains[2 * index + 2], 1e-5, out_TC=self.y)
        add_rms_norm_rows(self.x, self.d, ints["last_rows"], gains[-1], 1e-5, out_RC=self.y)
        torch.mm(self.y, self.weights["head"][0].t(), out_dtype=torch.float32, out=self.logits)


class ShortStep(PlainStep):
    """The same in the short form. early: whether kernels begin before the ones in front have ended. is_rope_apart:
    whether RoPE and the cache's writes are a kernel of their own, and not attention's."""

    def __init__(
        self,
        shape: Shape,
        lengths: list[int],
        weights: dict[str, list[Tensor]],
        *,
        early: bool,
        is_rope_apart: bool = False,
    ) -> None:
        super().__init__(shape, lengths, weights)
        self.is_rope_apart = is_rope_apart
        self.rotation = Rotation(
            positions_T=self.ints["positions"], slot_mapping_T=self.ints["mapping"], table_PD=self.rope
        )
        self.products = FewRowsProducts(
            num_channels=shape.hidden, num_multiprocessors=NUM_MULTIPROCESSORS, device=self.x.device, early=early
        )

    def forward(self) -> None:
        shape, rows, ints, weights, products = self.shape, self.rows, self.ints, self.weights, self.products
        gains, early = weights["gain"], products.early
        stream = Stream(residual_TC=self.x, scaled_TC=self.y)
        options = {"scale": 0.1, "early": early, "out_TAD": self.out}
        q_TAD = self.qkv.view(len(self.x), -1, shape.head_dim)[:, : shape.num_heads]
        products.embed(ints["token_ids"], weights["embedding"][0], gains[0], stream=stream)
        for index, layer in enumerate(rows.layers):
            products.norm_product(stream, 1e-5, weights["qkv"][index], None, out_TN=self.qkv)
            if self.is_rope_apart:
                rotate_and_cache(self.qkv, ints["positions"], ints["mapping"], self.rope, layer, early=early)
                decode_attention(q_TAD, layer, rows.tables_SB, self.plan, **options)
            else:
                rotate_and_attend(self.qkv, self.rotation, layer, rows.tables_SB, self.plan, **options)
            attended = self.out.view(len(self.x), -1)
            products.product_add(attended, weights["o"][index], None, gains[2 * index + 1], stream=stream)
            products.norm_gate_up(stream, 1e-5, weights["gate_up"][index], None, out_TI=self.act)
            products.product_add(self.act, weights["down"][index], None, gains[2 * index + 2], stream=stream)
        products.norm_product(stream, 1e-5, weights["head"][0], None, out_TN=self.logits)


def forms_of_step(
    shape: Shape, lengths: list[int], weights: dict[str, list[Tensor]]
) -> dict[str, Callable[[], PlainStep]]:
    forms: dict[str, Callable[[], PlainStep]] = {"long": lambda: PlainStep(shape, lengths, weights)}
    if len(lengths) <= MAX_ROWS:
        forms["short"] = lambda: ShortStep(shape, lengths, weights, early=False)
        forms["short, rope apart, early"] = lambda: ShortStep(shape, lengths, weights, early=True, is_rope_apart=True)
        forms["short, early"] = lambda: ShortStep(shape, lengths, weights, early=True)
    return forms


def bench_steps(tune: bool, nums_rows: Sequence[int] = ()) -> None:
    for shape in SHAPES:
        std = 0.02
        embedding = randn(shape.vocab, shape.hidden, std=0.5)
        attention_width = shape.num_heads * shape.head_dim
        sizes = {
            "qkv": (shape.qkv_width, shape.hidden), "o": (shape.hidden, attention_width),
            "gate_up": (2 * shape.intermediate, shape.hidden), "down": (shape.hidden, shape.intermediate),
        }  # fmt: skip
        weights = {name: [randn(*size, std=std) for _ in range(shape.num_layers)] for name, size in sizes.items()}
        weights["embedding"] = [embedding]
        weights["head"] = [embedding if shape.tied else randn(shape.vocab, shape.hidden, std=std)]
        weights["gain"] = [1 + randn(shape.hidden, std=0.1) for _ in range(2 * shape.num_layers + 1)]
        weight_bytes = 2 * sum(w.numel() for name, ws in weights.items() if name != "embedding" for w in ws)
        cases = {f"{n}x{c}": [c] * n for n, c in ((1, 640), (16, 640), (64, 640), (256, 640), (64, 4096))}
        for name, lengths in {**cases, "ragged": ragged_lengths()}.items():
            if len(lengths) not in (nums_rows or [len(lengths)]):
                continue
            num_bytes = weight_bytes + sum(lengths) * shape.num_layers * shape.num_kv_heads * shape.head_dim * 4
            probe = PROBE_STEP_MS.get((shape.name, name))
            for form, make in forms_of_step(shape, lengths, weights).items():
                step = make()
                note = f"probe {probe} ms" if probe else ""
                report(f"{shape.name} {name} step, {form}", graph_ms(step.run) * 1e3, num_bytes=num_bytes, note=note)
                del step
                torch.cuda.empty_cache()
        del weights, embedding
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {
        "elementwise": bench_elementwise,
        "decode": bench_decode,
        "rotation": lambda tune: bench_rotation(tune, options.rows),
        "chunks": bench_chunks,
        "products": lambda tune: bench_products(tune, options.rows),
        "sampler": bench_sampler,
        "steps": lambda tune: bench_steps(tune, options.rows),
    }
    parser.add_argument("parts", nargs="*", choices=[*parts, []], help="all of them, if none is named")
    parser.add_argument("--tune", action="store_true", help="attention and products with all tile settings")
    parser.add_argument("--rows", type=int, nargs="+", default=[], help="of rotation, products and steps, only these")
    options = parser.parse_args()
    torch.manual_seed(0)
    for name in options.parts or parts:
        parts[name](options.tune)


if __name__ == "__main__":
    main()
