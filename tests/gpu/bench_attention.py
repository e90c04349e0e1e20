"""Paged attention of one layer: ours beside torch's, FlashInfer's and flash-attn 3 as vLLM has it.

    python tests/gpu/bench_attention.py [--site DIR ...] [--json FILE]

Each figure is the median replay of a CUDA graph that goes through several layers' caches, more than L2 holds. --site:
folders with packages that are not installed (flashinfer, vllm). A backend that is not there or refuses a case is said
and left out. "plan": what the host does before a step in which lengths have changed; 0 where it is done on the device,
inside the graph. "off": ||result - ours|| / ||ours||.
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
import torch.nn.functional as F
from bench_common import DEVICE, SHAPES, Sequences, Shape, graph_ms, int32, ragged_lengths, randn, say
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from aserve.model.kernels.attention_chunks import mixed_attention
from aserve.model.kernels.attention_decode import decode_attention

CASES: dict[str, tuple[list[int], list[int]]] = {
    **{f"{n} x {length}": ([1] * n, [length] * n) for n, length in ((1, 640), (16, 640), (64, 640), (256, 640))},
    "64 x 4,096": ([1] * 64, [4096] * 64),
    "1 x 16,384": ([1], [16_384]),
    "64 ragged": ([1] * 64, ragged_lengths()),
    "512": ([512], [512]),
    "512 behind 4,096": ([512], [4608]),
    "4,096": ([4096], [4096]),
    "2 x 512 beside 64 x 640": ([1] * 64 + [512] * 2, [640] * 64 + [512] * 2),
}
"""(queries, tokens of context with these) of each sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """q, out: [T, A, D]. rows.layers: [2, H, blocks, tokens of a block, D] each, blocks first in memory."""

    shape: Shape
    queries: list[int]
    lengths: list[int]
    rows: Sequences
    q: Tensor
    scale: float

    @property
    def has_chunks(self) -> bool:
        return max(self.queries) > 1

    @property
    def is_even(self) -> bool:
        return len(set(self.lengths)) == 1 and len(set(self.queries)) == 1

    def starts(self) -> Tensor:
        return int32([0, *accumulate(self.queries)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """run(layer index) -> [T, A, D]. plan: the host's work before a step, None without any."""

    run: Callable[[int], Tensor]
    plan: Callable[[], object] | None = None


def ours(case: Case) -> Way:
    plan, out = case.rows.plan(case.queries), torch.empty_like(case.q)
    side = torch.cuda.Stream() if case.has_chunks and 1 in case.queries else None

    def run(layer: int) -> Tensor:
        arguments = case.q, case.rows.layers[layer], case.rows.tables_SB, plan
        if case.has_chunks:
            mixed_attention(*arguments, scale=case.scale, side=side, out_TAD=out)
        else:
            decode_attention(*arguments, scale=case.scale, out_TAD=out)
        return out

    return Way(run=run)


def torch_sdpa(case: Case, *, gathers: bool) -> Way:
    """Of sequences of one length. gathers: whether pages are first copied together, as torch's kernels want them."""
    if not case.is_even:
        raise NotImplementedError("lengths differ")
    num_sequences, num_queries, length = len(case.lengths), case.queries[0], case.lengths[0]
    shape = case.shape
    blocks = case.rows.tables_SB[:num_sequences].long()
    mask = causal_lower_right(num_queries, length) if num_queries > 1 else None
    q = case.q.view(num_sequences, num_queries, shape.num_heads, shape.head_dim).transpose(1, 2)

    def contiguous(layer: int) -> Tensor:
        """[2, S, H, L, D]"""
        pages = case.rows.layers[layer][:, :, blocks].permute(0, 2, 1, 3, 4, 5)
        return pages.reshape(2, num_sequences, shape.num_kv_heads, -1, shape.head_dim)[..., :length, :]

    kept = [] if gathers else [contiguous(layer).contiguous() for layer in range(len(case.rows.layers))]

    def run(layer: int) -> Tensor:
        k, v = contiguous(layer) if gathers else kept[layer]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=case.scale, enable_gqa=True)
        return out.transpose(1, 2).reshape(case.q.shape)

    return Way(run=run)


def flashinfer(case: Case, *, backend: str) -> Way:
    import flashinfer

    shape, block_size = case.shape, case.rows.layers[0].shape[3]
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=DEVICE)
    nums_blocks = [-(-length // block_size) for length in case.lengths]
    blocks = torch.cat([case.rows.tables_SB[row, :count] for row, count in enumerate(nums_blocks)])
    starts, block_starts = case.starts().cpu(), torch.tensor([0, *accumulate(nums_blocks)], dtype=torch.int32)
    last = torch.tensor(
        [length - (count - 1) * block_size for length, count in zip(case.lengths, nums_blocks, strict=True)],
        dtype=torch.int32,
    )
    types = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16, "sm_scale": case.scale}
    caches = [layer.permute(2, 0, 1, 3, 4) for layer in case.rows.layers]
    heads = shape.num_heads, shape.num_kv_heads, shape.head_dim
    out = torch.empty_like(case.q)
    if case.has_chunks or backend == "fa3":
        prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND", backend=backend)

        def plan() -> None:
            prefill.plan(starts, block_starts, blocks, last, *heads, block_size, causal=True, **types)

        plan()
        return Way(run=lambda layer: prefill.run(case.q, caches[layer], out=out), plan=plan)
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True, backend=backend)

    def plan_decode() -> None:
        decode.plan(block_starts, blocks, last, *heads, block_size, **types)

    plan_decode()
    return Way(run=lambda layer: decode.run(case.q, caches[layer], out=out), plan=plan_decode)


def flash_attn_3(case: Case) -> Way:
    """In the layout it is made for, [blocks, tokens, H, D] of K and of V; its schedule is made on the device."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

    shape, block_size = case.shape, case.rows.layers[0].shape[3]
    caches = [layer.permute(0, 2, 3, 1, 4).contiguous() for layer in case.rows.layers]
    starts, lengths, tables = case.starts(), case.rows.context_S, case.rows.tables_SB[: len(case.lengths)].contiguous()
    longest = max(case.queries), max(case.lengths)
    out = torch.empty_like(case.q)

    def schedule() -> Tensor:
        return get_scheduler_metadata(
            len(case.lengths), *longest, shape.num_heads, shape.num_kv_heads, shape.head_dim, lengths,
            cu_seqlens_q=starts, page_size=block_size, causal=True,
        )  # fmt: skip

    found = schedule()

    def run(layer: int) -> Tensor:
        return flash_attn_varlen_func(
            case.q, *caches[layer], longest[0], starts, longest[1], seqused_k=lengths, softmax_scale=case.scale,
            causal=True, block_table=tables, out=out, scheduler_metadata=found, fa_version=3,
        )  # fmt: skip

    return Way(run=run, plan=schedule)


WAYS: dict[str, Callable[[Case], Way]] = {
    "ours": ours,
    "torch, pages gathered": lambda case: torch_sdpa(case, gathers=True),
    "torch, contiguous": lambda case: torch_sdpa(case, gathers=False),
    "FlashInfer fa2": lambda case: flashinfer(case, backend="fa2"),
    "FlashInfer fa3": lambda case: flashinfer(case, backend="fa3"),
    "flash-attn 3": flash_attn_3,
}


def plan_us(plan: Callable[[], object] | None) -> float:
    """The host's time, the median of some."""
    if plan is None:
        return 0.0
    found = []
    for _ in range(12):
        torch.cuda.synchronize()
        started_s = time.perf_counter()
        plan()
        found.append((time.perf_counter() - started_s) * 1e6)
    return statistics.median(found)


def measure(shape: Shape, name: str) -> dict[str, object]:
    """One case by all ways: us a layer, and what that is of the device's bandwidth or arithmetic."""
    queries, lengths = CASES[name]
    rows = Sequences(shape, lengths)
    case = Case(
        shape=shape, queries=queries, lengths=lengths, rows=rows,
        q=randn(sum(queries), shape.num_heads, shape.head_dim), scale=shape.head_dim**-0.5,
    )  # fmt: skip
    row: dict[str, object] = {"shape": shape.name, "case": name}
    expected: Tensor | None = None
    for way_name, make in WAYS.items():
        try:
            way = make(case)
            found = way.run(0).float().clone()
            expected = found if expected is None else expected
            off = float((found - expected).norm() / expected.norm())
            us = (
                1e3 / len(rows.layers) * graph_ms(lambda way=way: [way.run(layer) for layer in range(len(rows.layers))])
            )
            planned = plan_us(way.plan)
            row[way_name] = {"us": us, "plan_us": planned, "off": off}
            say(f"{shape.name} {name:26} {way_name:22} {us:9.1f} us  plan {planned:7.0f} us  off {off:.1e}")
        except Exception as error:  # a backend that is not here, or cannot do this
            torch.cuda.synchronize()
            say(f"{shape.name} {name:26} {way_name:22} not run: {type(error).__name__} {str(error)[:120]}")
        torch.cuda.empty_cache()
    pairs = sum(n * (m - n) + n * (n + 1) / 2 for n, m in zip(queries, lengths, strict=True))
    row["gigabytes"] = sum(lengths) * shape.num_kv_heads * shape.head_dim * 4 / 1e9
    row["teraflops"] = 4 * pairs * shape.num_heads * shape.head_dim / 1e12
    return row


def table(found: Sequence[dict[str, object]]) -> str:
    """Markdown: us a layer; behind FlashInfer's and flash-attn's, in brackets, the host's time to plan."""
    head = [f"| us a layer | {' | '.join(WAYS)} |", "|---" * (len(WAYS) + 1) + "|"]
    lines = []
    for row in found:
        cells = []
        for name in WAYS:
            entry = row.get(name)
            if not isinstance(entry, dict):
                cells.append("")
            else:
                plan = f" ({entry['plan_us']:.0f})" if entry["plan_us"] else ""
                cells.append(f"{entry['us']:.1f}{plan}")
        lines.append(f"| {row['shape']}, {row['case']} | {' | '.join(cells)} |")
    return "\n".join([*head, *lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--site", nargs="+", default=[], help="folders to look for packages in")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    sys.path += options.site
    torch.manual_seed(0)
    found = [measure(shape, name) for shape in SHAPES for name in options.cases]
    say("\n" + table(found))
    best = [
        math.log(min(e["us"] for n, e in row.items() if isinstance(e, dict) and n != "ours") / row["ours"]["us"])  # type: ignore[index]
        for row in found
        if "ours" in row and any(isinstance(e, dict) and n != "ours" for n, e in row.items())
    ]
    if best:
        say(f"\nthe best of the others takes {math.exp(statistics.mean(best)):.2f} of our time, the mean of all cases")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
