"""Attention can be somebody else's: one in plain torch, made from the plan alone, gives the same model."""

import sys
from pathlib import Path

import pytest
import torch
from cuda_builders import PlanHost, chunk_of, join, make_runner
from kernel_builders import DEVICE, distance
from torch import Tensor

sys.path.append(str(Path(__file__).parent.parent))

from families import hf_logits, hf_model, prompt, save

from aserve.model.kernels.attention_plan import AttentionPlan
from aserve.model.kernels.rope_kv import Rotation, rotate_and_cache

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(DEVICE == "cuda", reason="the backend of this test reads the plan on the host"),
    pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow) encountered:RuntimeWarning"),
]


class TorchAttention:
    """By the definition, query by query. num_queries: how many it has computed; num_products: of how many products."""

    def __init__(self) -> None:
        self.num_queries = 0
        self.num_products = 0

    def rotate_and_attend_rows(
        self, qkv_TN: Tensor, rotation: Rotation, kv_layer: Tensor, block_tables_SB: Tensor, plan: AttentionPlan, *,
        scale: float, early: bool, out_TAD: Tensor,
    ) -> None:  # fmt: skip
        rotate_and_cache(
            qkv_TN, rotation.positions_T, rotation.slot_mapping_T, rotation.table_PD, kv_layer,
            qk_norm_AHD=rotation.qk_norm_AHD, eps=rotation.eps, uses_rope=rotation.uses_rope, early=early,
        )  # fmt: skip
        q_TAD = qkv_TN.view(len(qkv_TN), -1, out_TAD.shape[-1])[:, : out_TAD.shape[1]]
        self.attend_rows(q_TAD, kv_layer, block_tables_SB, plan, scale=scale, out_TAD=out_TAD)
        self.num_products += 1

    def attend_rows(
        self, q_TAD: Tensor, kv_layer: Tensor, block_tables_SB: Tensor, plan: AttentionPlan, *, scale: float,
        out_TAD: Tensor,
    ) -> None:  # fmt: skip
        self.attend(q_TAD, kv_layer, block_tables_SB, plan, scale=scale, side=None, out_TAD=out_TAD)

    def attend(
        self, q_TAD: Tensor, kv_layer: Tensor, block_tables_SB: Tensor, plan: AttentionPlan, *, scale: float,
        side: object, out_TAD: Tensor,
    ) -> None:  # fmt: skip
        num_items, num_tiles = plan.counts_2.tolist()
        queries = {}
        for row, slot, _, end, *_ in plan.items_WF[:num_items].tolist():
            queries[row] = slot, max(end, queries.get(row, (slot, 0))[1])
        if plan.tile_queries:
            for first_row, slot, position, count, *_ in plan.tiles_XF[:num_tiles].tolist():
                queries |= {first_row + index: (slot, position + index + 1) for index in range(count)}
        for row, (slot, end) in queries.items():
            out_TAD[row] = self._query(q_TAD[row], kv_layer, block_tables_SB[slot], end, plan.window, scale)
        self.num_queries += len(queries)

    def _query(
        self, q_AD: Tensor, kv_layer: Tensor, blocks_B: Tensor, end: int, window: int, scale: float
    ) -> Tensor:  # fmt: skip
        if end == 0:
            return torch.zeros_like(q_AD)
        num_kv_heads, block_size = kv_layer.shape[1], kv_layer.shape[3]
        pages = kv_layer[:, :, blocks_B[: -(-end // block_size)].long()]
        k_HLD, v_HLD = pages.flatten(2, 3)[:, :, max(0, end - window) if window else 0 : end]
        q_HGD = q_AD.view(num_kv_heads, -1, q_AD.shape[-1])
        return ((q_HGD @ k_HLD.transpose(1, 2) * scale).softmax(-1) @ v_HLD).view_as(q_AD)


@pytest.mark.parametrize("window", [None, 7])
async def test_another_backend_takes_the_place_of_ours(window: int | None, tmp_path: Path) -> None:
    """A prompt's chunk beside a decode row, then two rows: the logits are transformers'."""
    model = hf_model("mistral", sliding_window=window, head_dim=16)
    first, second = prompt(15, seed=1), prompt(12, seed=2)
    attention = TorchAttention()
    host = PlanHost(make_runner(save(model, tmp_path / "mistral"), attention=attention))
    for flight in host.prefill(0, first[:-1]):
        await flight

    await host.launch(
        joins=(join(1, second),),
        table_writes=host.table(1, 32),
        token_writes=[(0, len(first) - 1, first[-1])],
        rows=[(0, len(first) - 1)],
        chunks=(chunk_of(1, second, 0, len(second)),),
    )

    found = host.runner._steps.logits_SV[:2].clone()
    expected = torch.stack([hf_logits(model, tokens)[-1] for tokens in (first, second)])
    assert distance(found, expected) < 1e-5
    assert attention.num_queries >= 3 * (len(first) + len(second))
    await host.runner.aclose()


async def test_it_may_leave_the_rotation_to_a_kernel_of_its_own(tmp_path: Path) -> None:
    """In the decoder's short form, which hands out the QKV product as it is."""
    model = hf_model("qwen3", head_dim=16)
    tokens = prompt(13, seed=3)
    attention = TorchAttention()
    runner = make_runner(save(model, tmp_path / "qwen3"), has_short_form=True, attention=attention)
    host = PlanHost(runner)
    for flight in host.prefill(0, tokens[:-1]):
        await flight

    await host.launch(token_writes=[(0, len(tokens) - 1, tokens[-1])], rows=[(0, len(tokens) - 1)])

    found = host.runner._steps.logits_SV[:1].clone()
    assert distance(found, hf_logits(model, tokens)[-1:]) < 1e-5
    assert attention.num_products == model.config.num_hidden_layers
    await host.runner.aclose()
