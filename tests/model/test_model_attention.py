"""Paged attention kernels against a plain softmax over each sequence's own tokens."""

import math

import pytest
import torch
from torch import Tensor

from aserve.model.attention import PagedAttention
from aserve.model.attention.pages import PageAttention
from aserve.model.attention.sdpa import SdpaAttention
from aserve.model.attention.tiled import TiledAttention
from aserve.model.batch import ForwardBatch, KVShape
from aserve.model.kv_tensors import KVTensors

pytestmark = pytest.mark.torch

KERNELS = {"pages": PageAttention, "sdpa": SdpaAttention, "tiled": TiledAttention}
HEAD_DIM = 16
NUM_LAYERS = 3
LAYER = 1


def plain(q_AD: Tensor, k_LHD: Tensor, v_LHD: Tensor, window: int | None, softcap: float | None = None) -> Tensor:
    """One query, the last of L tokens, by the definition."""
    group = q_AD.shape[0] // k_LHD.shape[1]
    k_LAD, v_LAD = k_LHD.repeat_interleave(group, 1), v_LHD.repeat_interleave(group, 1)
    if window is not None:
        k_LAD, v_LAD = k_LAD[-window:], v_LAD[-window:]
    score_AL = torch.einsum("ad,lad->al", q_AD, k_LAD) / math.sqrt(HEAD_DIM)
    if softcap is not None:
        score_AL = torch.tanh(score_AL / softcap) * softcap
    return torch.einsum("al,lad->ad", score_AL.softmax(-1), v_LAD)


def check(
    kernel: PagedAttention,
    *,
    decode: tuple[int, ...] = (),
    chunks: tuple[tuple[int, int], ...] = (),
    block_size: int = 16,
    num_heads: int = 6,
    num_kv_heads: int = 2,
    window: int | None = None,
    softcap: float | None = None,
    padding: int = 0,
    dtype: torch.dtype = torch.float32,
    atol: float = 1e-5,
) -> None:
    """decode: context lengths. chunks: (queries, context length). All that no sequence owns in the pool is NaN."""
    generator = torch.Generator().manual_seed(0)
    sequences = [(1, length) for length in decode] + list(chunks)
    nums_blocks = [-(-length // block_size) for _, length in sequences]
    kv = KVTensors.allocate(
        KVShape(
            num_layers=NUM_LAYERS,
            num_kv_heads=num_kv_heads,
            head_dim=HEAD_DIM,
            dtype=dtype,
            layout="rows" if isinstance(kernel, PageAttention) else "heads",
        ),
        num_blocks=sum(nums_blocks) + 5,
        block_size=block_size,
    )
    kv.poison()
    blocks = (torch.randperm(kv.num_blocks, generator=generator) + 1).tolist()
    tables, queries, expected, starts = [], [], [], [0]
    for (num_queries, length), num_blocks in zip(sequences, nums_blocks, strict=True):
        table = [blocks.pop() for _ in range(num_blocks)]
        # An unused entry may name any block: here somebody else's.
        tables.append(table + [blocks[0]] * (max(nums_blocks) + 2 - num_blocks))
        kv_LTHD = torch.randn(length, 2, num_kv_heads, HEAD_DIM, generator=generator).to(dtype)
        slots = torch.tensor([table[i // block_size] * block_size + i % block_size for i in range(length)])
        kv.write(LAYER, slots, kv_LTHD)
        q = torch.randn(num_queries, num_heads, HEAD_DIM, generator=generator).to(dtype)
        queries.append(q)
        k, v = kv_LTHD.float().unbind(1)
        for i in range(num_queries):
            end = length - num_queries + i + 1
            expected.append(plain(q[i].float(), k[:end], v[:end], window, softcap))
        starts.append(starts[-1] + num_queries)
    tables_SB = torch.tensor(tables, dtype=torch.int32)
    context_lens = [length for _, length in sequences]
    num_tokens = starts[-1] + padding
    batch = ForwardBatch(
        token_ids_T=torch.zeros(num_tokens, dtype=torch.int64),
        positions_T=torch.zeros(num_tokens, dtype=torch.int64),
        slot_mapping_T=torch.zeros(num_tokens, dtype=torch.int64),
        block_tables_SB=tables_SB,
        context_lens_S=torch.tensor(context_lens, dtype=torch.int32),
        context_lens=context_lens,
        query_starts=starts,
        num_decode_rows=len(decode),
        logit_rows_R=torch.arange(0),
    )
    q_TAD = torch.cat([*queries, torch.full((padding, num_heads, HEAD_DIM), math.nan, dtype=dtype)])

    out_TAD = kernel.plan(batch, kv)(q_TAD, LAYER, scale=HEAD_DIM**-0.5, window=window)

    assert out_TAD.shape == q_TAD.shape
    assert out_TAD.is_contiguous()
    assert not out_TAD[starts[-1] :].any()
    torch.testing.assert_close(out_TAD[: starts[-1]].float(), torch.stack(expected), rtol=0.0, atol=atol)


@pytest.fixture(params=list(KERNELS))
def kernel(request: pytest.FixtureRequest) -> PagedAttention:
    return KERNELS[request.param]()


@pytest.mark.parametrize("block_size", [1, 3, 16, 32, 300])
def test_mixed_batch_at_any_block_size(kernel: PagedAttention, block_size: int) -> None:
    """Decode rows beside a first chunk, a later one and one of a single token, over shuffled blocks amid NaN."""
    check(kernel, decode=(1, 40, 33, 17), chunks=((9, 9), (20, 57), (1, 30)), block_size=block_size)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (4, 4), (9, 3), (8, 1), (14, 2)])
def test_any_grouping_of_heads(kernel: PagedAttention, num_heads: int, num_kv_heads: int) -> None:
    """Multi-head, grouped and multi-query shapes."""
    check(kernel, decode=(20, 31), chunks=((7, 26),), num_heads=num_heads, num_kv_heads=num_kv_heads)


@pytest.mark.parametrize("window", [1, 5, 16, 17, 40, 500])
@pytest.mark.parametrize("block_size", [3, 16])
def test_sliding_windows(kernel: PagedAttention, window: int, block_size: int) -> None:
    """Windows within, across and beyond blocks, the whole context and a chunk's own start."""
    check(kernel, decode=(1, 5, 39, 90), chunks=((30, 30), (25, 60), (3, 41)), window=window, block_size=block_size)


def test_contexts_over_several_key_tiles(kernel: PagedAttention) -> None:
    """Long contexts, also such that a window starts tiles after the first."""
    check(kernel, decode=(700, 256, 257), chunks=((40, 530),))
    check(kernel, decode=(700, 256, 257), chunks=((40, 530),), window=100)


def test_rows_of_very_unlike_length(kernel: PagedAttention) -> None:
    """Rows so unlike that they are not gathered together keep their places."""
    check(kernel, decode=(3, 900, 20, 1, 870, 64, 300))


def test_padding_attends_to_nothing(kernel: PagedAttention) -> None:
    """Tokens behind the last sequence give zeros, whatever they hold."""
    check(kernel, decode=(10, 3), padding=6)
    check(kernel, chunks=((4, 4),), padding=1)


def test_a_plan_serves_several_windows(kernel: PagedAttention) -> None:
    """Layers with and without a window share a step, and a kernel its workspace over steps of any size."""
    check(kernel, decode=(300,) * 4)
    check(kernel, decode=(5,))
    check(kernel, decode=(5, 40), window=3)


def test_bfloat16(kernel: PagedAttention) -> None:
    """In bfloat16 results stay within its rounding."""
    check(kernel, decode=(64, 30), chunks=((20, 50),), dtype=torch.bfloat16, atol=0.03)


def test_softcapped_scores() -> None:
    """The tiled kernel bends scores before the softmax."""
    check(TiledAttention(softcap=1.5), decode=(40,), chunks=((9, 20),), softcap=1.5)


def test_groups_are_split_when_the_workspace_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound of a few hundred tokens changes the groups, never the result."""
    monkeypatch.setattr("aserve.model.attention.sdpa._WORKSPACE_BYTES_MAX", 300 * 2 * 2 * HEAD_DIM * 4)

    check(SdpaAttention(), decode=(100, 90, 110, 400, 80, 95))
