"""The kernels at real sizes, and captured: one graph, replayed over sequences that grow, end and make room."""

import numpy as np
import pytest
import torch
from kernel_builders import (
    TOLERANCE,
    Batch,
    batch,
    change_slots,
    check_frequencies,
    distance,
    exact_distribution,
    ints,
    normal,
)

from aserve.core.ids import Epoch, Slot
from aserve.core.plan import FLAG_DONE, Join
from aserve.core.request import SamplingParams
from aserve.model.kernels import reference
from aserve.model.kernels.attention_chunks import mixed_attention
from aserve.model.kernels.attention_decode import decode_attention
from aserve.model.kernels.attention_plan import AttentionPlan
from aserve.model.kernels.rope_kv import rope_table, rotate_and_cache
from aserve.model.kernels.sampler import sample
from aserve.model.kernels.slot_update import FROM_SLOT, commit, lay_out, unpack_words
from aserve.model.kernels.slots import SlotTensors
from aserve.model.noise import noise_bits

pytestmark = [pytest.mark.gpu, pytest.mark.torch]

BF16 = torch.bfloat16


def check(case: Batch, *, window: int = 0, num_programs: int = 528) -> None:
    plan = case.plan(window=window, num_programs=num_programs)
    attend = mixed_attention if plan.tile_queries else decode_attention
    scale = case.q_TAD.shape[2] ** -0.5
    out_TAD = torch.zeros_like(case.q_TAD)
    expected = reference.paged_attention(
        case.q_TAD, case.kv_layer, case.block_tables_SB, case.slots, case.query_starts, case.context_lens,
        scale=scale, window=window,
    )  # fmt: skip
    for _ in range(3):
        attend(case.q_TAD, case.kv_layer, case.block_tables_SB, plan, scale=scale, out_TAD=out_TAD)
        assert distance(out_TAD, expected) < TOLERANCE[case.q_TAD.dtype]


def ragged(num_rows: int, longest: int) -> list[tuple[int, int]]:
    generator = torch.Generator().manual_seed(2)
    return [(1, 1 + int(longest * share**3)) for share in torch.rand(num_rows, generator=generator).tolist()]


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("num_rows", [1, 16, 64, 256])
def test_ragged_decode(num_rows: int, head_dim: int) -> None:
    """Up to 256 rows of 1 to 6,000 tokens, 32 query heads over 8."""
    check(batch(ragged(num_rows, 6000), num_heads=32, num_kv_heads=8, head_dim=head_dim, dtype=BF16))


def test_one_long_row() -> None:
    """30,000 tokens beside 63 rows of a hundred."""
    check(batch([(1, 100)] * 63 + [(1, 30_000)], num_heads=32, num_kv_heads=8, head_dim=128, dtype=BF16))


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("window", [0, 700])
def test_mixed_step(window: int, head_dim: int) -> None:
    """Chunks with and without cached context beside decode rows."""
    sequences = [*ragged(40, 3000), (1024, 1024), (333, 2500), (17, 4000), (2, 2)]
    check(batch(sequences, num_heads=32, num_kv_heads=8, head_dim=head_dim, dtype=BF16), window=window)


def test_a_long_prompt() -> None:
    """4,096 tokens at once."""
    check(batch([(4096, 4096)], num_heads=8, num_kv_heads=2, head_dim=128, dtype=BF16))


def test_parts_of_very_many_rows() -> None:
    """Half a million items, as reference mode has in steps of many tokens: their results lie 2**31 floats apart."""
    num_rows, num_parts, part = 16_500, 32, 64
    one = batch([(1, num_parts * part)], num_heads=32, num_kv_heads=8, head_dim=128, dtype=BF16)
    q_TAD = normal(num_rows, 32, 128, dtype=BF16, seed=5)
    plan = AttentionPlan.allocate(
        num_sequences=num_rows, num_chunk_tokens=0, num_heads=32, num_kv_heads=8, head_dim=128, num_multiprocessors=16,
        dtype=BF16, fixed_tokens=part, context_max=num_parts * part, device="cuda",
    )  # fmt: skip
    row = torch.arange(num_rows).repeat_interleave(num_parts)
    split, slot = torch.arange(num_parts).repeat(num_rows), torch.full_like(row, one.slots[0])
    fields = (row, slot, split * part, (split + 1) * part, split, torch.full_like(row, num_parts), row)
    plan.items_WF[:, :7] = torch.stack(fields, 1).int().cuda()
    plan.counts_2[0] = len(row)
    out_TAD = torch.zeros_like(q_TAD)

    decode_attention(q_TAD, one.kv_layer, one.block_tables_SB, plan, scale=0.1, out_TAD=out_TAD)

    assert plan.partial_WHGD.numel() > 1 << 31
    chosen = [0, 8191, 8192, num_rows - 1]
    expected = torch.cat([
        reference.paged_attention(
            q_TAD[i : i + 1], one.kv_layer, one.block_tables_SB, one.slots, [0, 1], one.context_lens, scale=0.1
        )
        for i in chosen
    ])  # fmt: skip
    assert distance(out_TAD[chosen], expected) < TOLERANCE[BF16]


def test_frequencies_of_a_hundred_thousand_draws() -> None:
    """Top-k, top-p and min-p leave the likeliest tokens, drawn in proportion (chi-square within 5 deviations)."""
    num_rows, vocab_size = 100_000, 64
    logits_V = normal(vocab_size, seed=3) * 1.5
    params = SamplingParams(temperature=1.3, top_k=20, top_p=0.85, min_p=0.03)
    table = SlotTensors.allocate(num_slots=1, max_num_blocks=1, vocab_size=vocab_size, max_additions=1, device="cuda")
    change_slots(table, joins=(sequence(0, params=params),))
    logits_RV = logits_V.expand(num_rows, -1).contiguous()
    tokens_R, flags_R = (torch.empty(num_rows, dtype=torch.int32, device="cuda") for _ in range(2))
    lengths_R = torch.arange(num_rows, dtype=torch.int32, device="cuda")

    sample(logits_RV, logits_RV, torch.zeros_like(lengths_R), lengths_R, table, tokens_R=tokens_R, flags_R=flags_R)

    check_frequencies(tokens_R, exact_distribution(logits_V, params))


def test_the_draw_over_a_whole_vocabulary_is_the_cpus() -> None:
    """152,064 tokens, by the published noise, in float64."""
    vocab_size = 152_064
    logits_RV = normal(8, vocab_size, seed=6) * 2
    table = SlotTensors.allocate(num_slots=8, max_num_blocks=1, vocab_size=vocab_size, max_additions=1, device="cuda")
    change_slots(table, joins=tuple(sequence(slot, params=SamplingParams(temperature=0.8)) for slot in range(8)))
    tokens_R, flags_R = ints([-1] * 8), ints([-1] * 8)

    sample(
        logits_RV, torch.empty_like(logits_RV), ints(list(range(8))), ints([100] * 8), table,
        tokens_R=tokens_R, flags_R=flags_R,
    )  # fmt: skip

    u = (np.stack([noise_bits(1000 + slot, 100, vocab_size) for slot in range(8)]) + 0.5) / 2**32
    expected = (logits_RV.double().cpu().numpy() / 0.8 - np.log(-np.log1p(-u))).argmax(-1)
    assert tokens_R.tolist() == expected.tolist()


def sequence(slot: int, *, position: int = 0, max_length: int = 10_000, params: SamplingParams | None = None) -> Join:
    return Join(
        slot=Slot(slot),
        epoch=Epoch(1),
        position=position,
        params=params or SamplingParams(temperature=0),
        seed=1000 + slot,
        stop_ids=(),
        min_length=0,
        max_length=max_length,
        num_prompt_tokens=0,
        history=np.empty(0, np.int32),
    )


def test_a_captured_step_follows_the_slot_table() -> None:
    """One graph of layout, cache write, attention, sampling and update: each replay uses the table as it then is."""
    num_slots, block_size, num_heads, num_kv_heads, head_dim, vocab_size = 4, 16, 4, 2, 64, 1000
    width = (num_heads + 2 * num_kv_heads) * head_dim
    table = SlotTensors.allocate(
        num_slots=num_slots, max_num_blocks=8, vocab_size=vocab_size, max_additions=1, device="cuda"
    )
    change_slots(table, joins=(sequence(0, position=14, max_length=19), sequence(2, position=70)))
    table.block_tables_SB[0] = ints([1, 2, 3, 4, 5, 6, 7, 8])
    table.block_tables_SB[2] = ints([9, 10, 11, 12, 13, 14, 15, 16])
    kv_layer = torch.zeros(2, num_kv_heads, 17, block_size, head_dim, dtype=BF16, device="cuda")
    embedding_VN = normal(vocab_size, width, dtype=BF16, seed=1)
    head_VC = normal(vocab_size, num_heads * head_dim, dtype=BF16, seed=2)
    rope_PD = rope_table(1 / 10000 ** (torch.arange(0, head_dim, 2, device="cuda") / head_dim), 200)

    slots_S, starts = ints([0, 2, num_slots]), ints([0, 1, 2, 3])
    tokens_in, samples = ints([FROM_SLOT] * 3), ints([1] * 3)
    token_ids, positions, mapping, context, last_rows, tokens, flags = (ints([0] * 3) for _ in range(7))
    out_TAD = torch.zeros(3, num_heads, head_dim, dtype=BF16, device="cuda")
    work = torch.zeros(3, vocab_size, device="cuda")
    ring = torch.zeros(8, num_slots, dtype=torch.int64).pin_memory()
    step = torch.ones(1, dtype=torch.int64, device="cuda")
    plan = AttentionPlan.allocate(
        num_sequences=3, num_chunk_tokens=0, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim,
        num_multiprocessors=16, dtype=BF16, device="cuda",
    )  # fmt: skip

    def run() -> None:
        lay_out(
            tokens_in, slots_S, starts, table, block_size, token_ids_T=token_ids, positions_T=positions,
            slot_mapping_T=mapping, context_lens_S=context, last_rows_S=last_rows,
        )  # fmt: skip
        plan.fill(slots_S, starts, context)
        qkv = embedding_VN[token_ids]
        rotate_and_cache(qkv, positions, mapping, rope_PD, kv_layer)
        q_TAD = qkv.view(3, -1, head_dim)[:, :num_heads]
        decode_attention(q_TAD, kv_layer, table.block_tables_SB, plan, scale=0.125, out_TAD=out_TAD)
        logits = (out_TAD.view(3, -1) @ head_VC.t()).float()
        sample(logits, work, slots_S, context, table, tokens_R=tokens, flags_R=flags)
        commit(tokens, flags, slots_S, starts, context, samples, table, ring_NS=ring, step_1=step)

    records, tables = table.records_SW.clone(), table.block_tables_SB.clone()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run()  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            run()

    def play(replayed: bool) -> list[list[int]]:
        table.records_SW.copy_(records)
        table.block_tables_SB.copy_(tables)
        kv_layer.copy_(normal(*kv_layer.shape, dtype=BF16, seed=9))
        step.fill_(1)
        ring.zero_()
        for index in range(7):
            if index == 5:
                change_slots(table, joins=(sequence(0, position=3),))  # the slot's next owner
                table.block_tables_SB[0, :1] = 7
            if replayed:
                graph.replay()
            else:
                run()
        torch.cuda.synchronize()
        return ring.tolist()

    words = play(True)

    assert words == play(False)
    steps, flags_seen, _ = unpack_words(np.array(words)[1:, :3])
    assert steps.tolist() == [[i] * 3 for i in range(1, 8)]
    assert flags_seen[:, 0].tolist() == [0, 0, 0, FLAG_DONE, FLAG_DONE, 0, 0]
    assert flags_seen[:, 1].tolist() == [0] * 7
    assert flags_seen[:, 2].tolist() == [FLAG_DONE] * 7
    assert table.records_SW[[0, 2], 1].tolist() == [5, 77]
