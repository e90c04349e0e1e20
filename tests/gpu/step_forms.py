"""Whole decode steps in each form, as a server captures them, without the server (``bench_kernels.py steps``)."""

import dataclasses
from collections.abc import Callable, Sequence

import torch
from bench_common import (
    BLOCK_SIZE,
    DEVICE,
    NUM_MULTIPROCESSORS,
    PROBE_STEP_MS,
    SHAPES,
    Sequences,
    Shape,
    graph_ms,
    int32,
    make_table,
    ragged_lengths,
    randn,
    report,
)
from torch import Tensor

from aserve.core.request import SamplingParams
from aserve.model.kernels.activation import silu_mul
from aserve.model.kernels.attention_decode import decode_attention, rotate_and_attend
from aserve.model.kernels.few_rows import MAX_ROWS, FewRowsProducts, Stream
from aserve.model.kernels.norm import add_rms_norm, add_rms_norm_rows, embed_rms_norm
from aserve.model.kernels.rope_kv import Rotation, rope_table, rotate_and_cache
from aserve.model.kernels.sampler import sample
from aserve.model.kernels.slot_update import FROM_SLOT, commit, lay_out


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
