"""What each kernel takes on this GPU, beside the time that its bytes or operations need, and whole plain decode steps.

    python tests/gpu/bench_kernels.py [elementwise] [decode] [rotation] [chunks] [products] [sampler] [steps] [--tune]
        [--rows 1]

Each figure is the median replay of a CUDA graph that runs the kernel once a layer, over as many caches and weights, so
that nothing is found in the L2 cache that a step would not find there. --tune tries all tile settings.
"""

import argparse
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
import triton
from bench_common import (
    BF16,
    BLOCK_SIZE,
    DEVICE,
    LENGTHS,
    NUM_MULTIPROCESSORS,
    SHAPES,
    Sequences,
    Shape,
    graph_ms,
    int32,
    make_table,
    randn,
    report,
    say,
)
from step_forms import bench_steps
from torch import Tensor

from aserve.core.request import SamplingParams
from aserve.model.kernels.activation import silu_mul
from aserve.model.kernels.attention_chunks import chunk_attention, mixed_attention
from aserve.model.kernels.attention_decode import decode_attention, rotate_and_attend
from aserve.model.kernels.attention_plan import AttentionPlan
from aserve.model.kernels.attention_tiles import ChunkTiles, DecodeTiles
from aserve.model.kernels.compile import compile_variants, variants_of
from aserve.model.kernels.few_rows import FewRowsProducts, Stream
from aserve.model.kernels.few_rows_tiles import ProductTiles
from aserve.model.kernels.norm import add_rms_norm
from aserve.model.kernels.rope_kv import Rotation, rope_table, rotate_and_cache
from aserve.model.kernels.sampler import sample, top_logprobs
from aserve.model.kernels.slots import SlotTensors


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
