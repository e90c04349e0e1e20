"""Attention straight from the QKV product, against the two kernels that do the same one after the other."""

import dataclasses
from dataclasses import dataclass

import pytest
import torch
from kernel_builders import DEVICE, DTYPES, TOLERANCE, Batch, batch, distance, ints, normal
from torch import Tensor

from aserve.model.kernels.attention_decode import decode_attention, rotate_and_attend
from aserve.model.kernels.attention_plan import AttentionPlan
from aserve.model.kernels.early import can_begin_early
from aserve.model.kernels.rope_kv import Rotation, rope_table, rotate_and_cache

pytestmark = pytest.mark.torch

LENGTHS = [70, 1, 200, 16, 17]
"""At the edges of blocks and of a program's steps and off them, one row in several items."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Rows whose newest tokens are in the product alone: their slots in the cache are NaN."""

    rows: Batch
    qkv_TN: Tensor
    rotation: Rotation

    @property
    def num_kv_heads(self) -> int:
        return self.rows.kv_layer.shape[1]


def case_of(
    lengths: list[int],
    *,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    has_norm: bool = False,
    uses_rope: bool = True,
) -> Case:
    """lengths: contexts, the newest token included; 0 for a row that is done."""
    num_heads, num_kv_heads = heads
    rows = batch(
        [(1, length) for length in lengths],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
    )
    block_size = rows.kv_layer.shape[3]
    positions = [max(0, length - 1) for length in lengths]
    mapping = []
    for slot, length, position in zip(rows.slots, lengths, positions, strict=True):
        block, offset = int(rows.block_tables_SB[slot, position // block_size]), position % block_size
        mapping.append(block * block_size + offset if length else 0)
        rows.kv_layer[:, :, block if length else 0, offset] = float("nan")
    gain = 1 + 0.1 * normal(num_heads + num_kv_heads, head_dim, dtype=dtype, seed=4)
    frequencies_F = 1 / 10000 ** (torch.arange(0, head_dim, 2, device=DEVICE) / head_dim)
    return Case(
        rows=rows,
        qkv_TN=normal(len(lengths), (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype, seed=5),
        rotation=Rotation(
            positions_T=ints(positions),
            slot_mapping_T=ints(mapping),
            table_PD=rope_table(frequencies_F, 400),
            qk_norm_AHD=gain if has_norm else None,
            eps=1e-5,
            uses_rope=uses_rope,
        ),
    )


def one_after_the_other(case: Case, plan: AttentionPlan, *, softcap: float = 0.0) -> tuple[Tensor, Tensor]:
    """(result, cache), of kernels with tests of their own."""
    rows, rotation, qkv_TN = case.rows, case.rotation, case.qkv_TN.clone()
    kv_layer, out_TAD = rows.kv_layer.clone(), torch.full_like(rows.q_TAD, float("nan"))
    rotate_and_cache(
        qkv_TN, rotation.positions_T, rotation.slot_mapping_T, rotation.table_PD, kv_layer,
        qk_norm_AHD=rotation.qk_norm_AHD, eps=rotation.eps, uses_rope=rotation.uses_rope,
    )  # fmt: skip
    num_heads, head_dim = rows.q_TAD.shape[1:]
    q_TAD = qkv_TN.view(len(qkv_TN), -1, head_dim)[:, :num_heads]
    decode_attention(q_TAD, kv_layer, rows.block_tables_SB, plan, scale=0.125, softcap=softcap, out_TAD=out_TAD)
    return out_TAD, kv_layer


def in_one(case: Case, plan: AttentionPlan, *, softcap: float = 0.0, early: bool = False) -> tuple[Tensor, Tensor]:
    rows = case.rows
    kv_layer, out_TAD = rows.kv_layer.clone(), torch.full_like(rows.q_TAD, float("nan"))
    rotate_and_attend(
        case.qkv_TN, case.rotation, kv_layer, rows.block_tables_SB, plan, scale=0.125, softcap=softcap, early=early,
        out_TAD=out_TAD,
    )  # fmt: skip
    return out_TAD, kv_layer


def check(case: Case, *, window: int = 0, num_programs: int = 64, softcap: float = 0.0) -> None:
    """The same result, and the same cache but for the trash block. To the bit, where both compute in the same order:
    without the sum of a norm, and not where a compiler fuses products and sums as it likes."""
    is_exact = DEVICE == "cpu" and case.rotation.qk_norm_AHD is None
    tolerance = 0.0 if is_exact else TOLERANCE[case.qkv_TN.dtype]
    plan = case.rows.plan(window=window, num_programs=num_programs)
    expected_TAD, expected_cache = one_after_the_other(case, plan, softcap=softcap)
    # The second launch, which begins early where it can, finds the counters as the first one did.
    for early in (False, can_begin_early(torch.device(DEVICE))):
        actual_TAD, cache = in_one(case, plan, softcap=softcap, early=early)
        assert distance(actual_TAD, expected_TAD) <= tolerance
        assert torch.equal(cache.isnan()[:, :, 1:], expected_cache.isnan()[:, :, 1:])
        assert distance(cache[:, :, 1:].nan_to_num(), expected_cache[:, :, 1:].nan_to_num()) <= tolerance


@pytest.mark.parametrize(
    ("head_dim", "dtype", "has_norm", "uses_rope"),
    [
        *((64, dtype, False, True) for dtype in DTYPES),
        (64, DTYPES[0], True, False),
        (80, DTYPES[-1], False, True),
        (96, DTYPES[-1], True, True),
        (128, DTYPES[-1], True, True),
        (256, DTYPES[-1], False, False),
    ],
)
def test_every_head_size(head_dim: int, dtype: torch.dtype, has_norm: bool, uses_rope: bool) -> None:
    """With norms of heads and without, turned or not."""
    check(case_of(LENGTHS, head_dim=head_dim, dtype=dtype, has_norm=has_norm, uses_rope=uses_rope))


@pytest.mark.parametrize("heads", [(2, 2), (9, 3), (17, 1)])
def test_every_grouping(heads: tuple[int, int]) -> None:
    """Groups that are no power of two, and more than the 16 rows of the smallest matrix product."""
    check(case_of([70, 17], heads=heads, has_norm=True))


@pytest.mark.parametrize("window", [1, 100])
def test_sliding_window(window: int) -> None:
    """The newest token is in the window, and may be all of it."""
    check(case_of([120, 1, 70]), window=window)


def test_softcap() -> None:
    """Scores are bent before the softmax."""
    check(case_of(LENGTHS[:3]), softcap=0.7)


@pytest.mark.parametrize("num_programs", [2, 1000])
def test_however_finely_rows_are_cut(num_programs: int) -> None:
    """The newest token alone in an item, or with all others."""
    check(case_of([65, 192, 64]), num_programs=num_programs)


def test_blocks_may_come_before_heads_in_memory() -> None:
    """The cache is written by its strides."""
    case = case_of([70, 17])
    blocks_first = case.rows.kv_layer.permute(2, 0, 1, 3, 4).contiguous().permute(1, 2, 0, 3, 4)

    check(dataclasses.replace(case, rows=dataclasses.replace(case.rows, kv_layer=blocks_first)))


def test_nothing_but_the_newest_tokens_is_written() -> None:
    """The product stays as it was, and of the cache all that is not a live row's newest slot, the trash block too."""
    case = case_of([40, 0, 33])
    product_TN = case.qkv_TN.clone()

    _, cache = in_one(case, case.rows.plan())

    newest = case.rotation.slot_mapping_T[[0, 2]].long()
    before, after = (
        layer.view(2, case.num_kv_heads, -1, layer.shape[-1]).clone() for layer in (case.rows.kv_layer, cache)
    )
    assert before[:, :, newest].isnan().all() and after[:, :, newest].isfinite().all()
    before[:, :, newest], after[:, :, newest] = 0, 0
    assert torch.equal(after.isnan(), before.isnan())
    assert torch.equal(after.nan_to_num(), before.nan_to_num())
    assert torch.equal(case.qkv_TN, product_TN)


def test_only_the_last_item_of_a_row_has_to_do_with_its_newest_token() -> None:
    """Those before it, run without it, neither write nor read it: programs come in any order."""
    case = case_of([200])
    plan = case.rows.plan()
    num_others = int(plan.counts_2[0]) - 1
    assert num_others >= 2
    plan.counts_2[0] = num_others

    _, cache = in_one(case, plan)

    newest = case.rotation.slot_mapping_T.long()
    assert cache.view(2, case.num_kv_heads, -1, cache.shape[-1])[:, :, newest].isnan().all()
    assert plan.partial_WHGD[:num_others].isfinite().all()
    assert (plan.partial_WHGD[:num_others] != 0).all()


def test_done_rows_give_zeros() -> None:
    """Whatever their product is."""
    case = case_of([0, 40, 0])
    case.qkv_TN[[0, 2]] = float("nan")

    out_TAD, cache = in_one(case, case.rows.plan())

    assert (out_TAD[[0, 2]] == 0).all()
    assert out_TAD[1].isfinite().all()
    assert cache[:, :, 0].isnan().all()


def test_steps_with_chunks_are_refused() -> None:
    """Nobody would write what their tokens leave in the cache."""
    case = case_of([40, 33])
    chunks = batch([(1, 40), (3, 33)])

    with pytest.raises(AssertionError, match="chunk"):
        in_one(case, chunks.plan())
