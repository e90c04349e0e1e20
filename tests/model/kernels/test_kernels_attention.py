"""Paged attention planned on the device, against a softmax over each sequence's own tokens."""

import dataclasses

import pytest
import torch
from kernel_builders import DEVICE, DTYPES, TOLERANCE, Batch, batch, distance, ints

from aserve.model.kernels import reference
from aserve.model.kernels.attention_chunks import mixed_attention
from aserve.model.kernels.attention_decode import decode_attention
from aserve.model.kernels.attention_plan import NUM_FIELDS, AttentionPlan

pytestmark = pytest.mark.torch


def expected(case: Batch, *, window: int = 0, softcap: float = 0.0) -> torch.Tensor:
    return reference.paged_attention(
        case.q_TAD, case.kv_layer, case.block_tables_SB, case.slots, case.query_starts, case.context_lens,
        scale=0.125, window=window, softcap=softcap,
    )  # fmt: skip


def actual(case: Batch, plan: AttentionPlan, *, softcap: float = 0.0) -> torch.Tensor:
    attend = mixed_attention if plan.tile_queries else decode_attention
    out_TAD = torch.zeros_like(case.q_TAD)
    attend(case.q_TAD, case.kv_layer, case.block_tables_SB, plan, scale=0.125, softcap=softcap, out_TAD=out_TAD)
    return out_TAD


def check(case: Batch, *, window: int = 0, softcap: float = 0.0, num_programs: int = 64, fixed: int = 0) -> None:
    plan = case.plan(window=window, num_programs=num_programs, fixed_tokens=fixed)
    want = expected(case, window=window, softcap=softcap)
    for _ in range(2):  # the second launch finds the counters as the first one did
        assert distance(actual(case, plan, softcap=softcap), want) < TOLERANCE[case.q_TAD.dtype]


ROWS = [(1, 70), (1, 1), (1, 300), (1, 16), (1, 17)]
CHUNKS = [(1, 70), (50, 50), (3, 200), (1, 33), (40, 170), (2, 2)]


@pytest.mark.parametrize(
    ("head_dim", "dtype"), [*((64, dtype) for dtype in DTYPES), *((size, DTYPES[-1]) for size in (80, 96, 128, 256))]
)
@pytest.mark.parametrize("sequences", [ROWS, CHUNKS], ids=["rows", "mixed"])
def test_every_head_size(sequences: list[tuple[int, int]], head_dim: int, dtype: torch.dtype) -> None:
    """Ragged lengths, at block edges and off them, some in several parts."""
    check(batch(sequences, head_dim=head_dim, dtype=dtype))


@pytest.mark.parametrize("heads", [(2, 2), (9, 3), (14, 2), (17, 1)])
@pytest.mark.parametrize("sequences", [ROWS, CHUNKS], ids=["rows", "mixed"])
def test_every_grouping(sequences: list[tuple[int, int]], heads: tuple[int, int]) -> None:
    """Groups that are no power of two, and more than the 16 rows of the smallest matrix product."""
    check(batch(sequences[:4], num_heads=heads[0], num_kv_heads=heads[1]))


@pytest.mark.parametrize("window", [1, 100, 1000])
@pytest.mark.parametrize("sequences", [ROWS, CHUNKS], ids=["rows", "mixed"])
def test_sliding_window(sequences: list[tuple[int, int]], window: int) -> None:
    """A query sees so many tokens, itself included."""
    check(batch(sequences), window=window)


@pytest.mark.parametrize("sequences", [ROWS, CHUNKS], ids=["rows", "mixed"])
def test_softcap(sequences: list[tuple[int, int]]) -> None:
    """Scores are bent before the softmax."""
    check(batch(sequences), softcap=0.7)


@pytest.mark.parametrize("block_size", [8, 32])
def test_other_block_sizes(block_size: int) -> None:
    """Blocks smaller and larger than sixteen."""
    check(batch(CHUNKS, block_size=block_size))


def test_blocks_may_come_before_heads_in_memory() -> None:
    """The cache is read by its strides."""
    case = batch(CHUNKS)
    blocks_first = case.kv_layer.permute(2, 0, 1, 3, 4).contiguous().permute(1, 2, 0, 3, 4)

    check(dataclasses.replace(case, kv_layer=blocks_first))


def test_one_long_row_among_short_ones() -> None:
    """It is cut into parts about as long as they are, merged across more than one round."""
    case = batch([(1, 20)] * 6 + [(1, 1500)], num_heads=2)
    plan = case.plan()

    check(case)
    item = plan.items_WF[: int(plan.counts_2[0])]
    assert int((item[:, 3] - item[:, 2]).max()) == 64
    assert len(item) == 6 + 24


def test_items_of_fixed_length_do_not_depend_on_the_batch() -> None:
    """In reference mode a row's result is the same to the bit, whoever is in the batch."""
    case = batch([(1, 300), (1, 40), (1, 700)])
    alone = Batch(
        q_TAD=case.q_TAD[:1],
        kv_layer=case.kv_layer,
        block_tables_SB=case.block_tables_SB,
        slots=case.slots[:1],
        query_starts=[0, 1],
        context_lens=[300],
    )

    check(case, fixed=128)
    together = actual(case, case.plan(fixed_tokens=128))
    assert torch.equal(together[:1], actual(alone, alone.plan(fixed_tokens=128)))


@pytest.mark.parametrize("sequences", [[(1, 0), (1, 40)], [(1, 0), (4, 40), (3, 0), (0, 0)]], ids=["rows", "mixed"])
def test_done_and_absent_sequences(sequences: list[tuple[int, int]]) -> None:
    """A done row gives zeros, a done chunk and a sequence without tokens nothing; nobody reads the trash block."""
    check(batch(sequences))


def test_queries_inside_the_qkv_product() -> None:
    """q may be a strided view of a wider matrix."""
    case = batch(ROWS)
    wide = torch.full((len(case.q_TAD), 8, 64), float("nan"), device=DEVICE)
    wide[:, :4] = case.q_TAD
    strided = Batch(
        q_TAD=wide[:, :4],
        kv_layer=case.kv_layer,
        block_tables_SB=case.block_tables_SB,
        slots=case.slots,
        query_starts=case.query_starts,
        context_lens=case.context_lens,
    )

    out_TAD = torch.zeros_like(case.q_TAD)
    decode_attention(strided.q_TAD, case.kv_layer, case.block_tables_SB, case.plan(), scale=0.125, out_TAD=out_TAD)

    assert distance(out_TAD, expected(case)) < TOLERANCE[torch.float32]


def test_a_plan_fits_its_memory_at_any_lengths() -> None:
    """No plan has more items or tiles than were allocated for, and every token of a row is in one item exactly."""
    generator = torch.Generator().manual_seed(0)
    plan = AttentionPlan.allocate(
        num_sequences=32, num_chunk_tokens=512, num_heads=4, num_kv_heads=2, head_dim=16, num_programs=50,
        num_multiprocessors=1, dtype=torch.float32, device=DEVICE,
    )  # fmt: skip
    for _ in range(10):
        context = (torch.rand(32, generator=generator) ** 4 * 20000).int() + 1
        queries = torch.where(torch.rand(32, generator=generator) < 0.3, torch.minimum(context, torch.tensor(50)), 1)
        starts = [0, *queries.cumsum(0).tolist()]
        plan.items_WF.fill_(-1)
        plan.tiles_XF.fill_(-1)

        plan.fill(ints(list(range(32))), ints(starts), ints(context.tolist()))

        num_items, num_tiles = plan.counts_2.tolist()
        assert num_items <= len(plan.items_WF) and num_tiles <= len(plan.tiles_XF)
        items = plan.items_WF[:num_items].cpu()
        assert items.shape[1] == NUM_FIELDS
        covered = torch.zeros(32, dtype=torch.int64).index_add_(
            0, items[:, 6].long(), (items[:, 3] - items[:, 2]).long()
        )
        assert torch.equal(covered, torch.where(queries == 1, context, 0).long())
        tiles = plan.tiles_XF[:num_tiles].cpu()
        assert int(tiles[:, 3].sum()) == int(queries[queries > 1].sum())
