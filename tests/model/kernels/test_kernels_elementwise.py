"""Norms, RoPE with the cache's writes, SiLU and product: each against plain torch."""

import pytest
import torch
from kernel_builders import DEVICE, DTYPES, TOLERANCE, distance, ints, normal

from aserve.model.kernels import reference
from aserve.model.kernels.activation import silu_mul
from aserve.model.kernels.matmul import batch_invariant_matmul
from aserve.model.kernels.norm import add_rms_norm, add_rms_norm_rows, embed_rms_norm
from aserve.model.kernels.rope_kv import rope_table, rotate_and_cache

pytestmark = pytest.mark.torch

EPS = 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_channels", [576, 1024])
def test_residual_addition_and_norm(num_channels: int, dtype: torch.dtype) -> None:
    """The sum is stored in the stream and normalised as it is stored there."""
    residual_TC, delta_TC = (normal(5, num_channels, dtype=dtype, seed=seed) for seed in (1, 2))
    gain_C = 1 + 0.1 * normal(num_channels, dtype=dtype, seed=3)
    sum_TC = residual_TC + delta_TC
    out_TC = torch.full_like(residual_TC, float("nan"))

    add_rms_norm(residual_TC, delta_TC, gain_C, EPS, out_TC=out_TC)

    assert torch.equal(residual_TC, sum_TC)
    assert distance(out_TC, reference.rms_norm(sum_TC, gain_C, EPS)) < TOLERANCE[dtype]


def test_the_last_norm_takes_the_wanted_rows_only() -> None:
    """Rows may come in any order and leave the residual alone."""
    residual_TC, delta_TC, gain_C = normal(6, 96), normal(6, 96, seed=1), normal(96, seed=2)
    before = residual_TC.clone()
    out_RC = torch.full((3, 96), float("nan"), device=DEVICE)

    add_rms_norm_rows(residual_TC, delta_TC, ints([4, 0, 5]), gain_C, EPS, out_RC=out_RC)

    expected = reference.rms_norm((residual_TC + delta_TC)[[4, 0, 5]], gain_C, EPS)
    assert distance(out_RC, expected) < TOLERANCE[torch.float32]
    assert torch.equal(residual_TC, before)


def test_embedding_starts_the_stream() -> None:
    """The looked-up rows and their norm."""
    embedding_VC, gain_C = normal(11, 80), normal(80, seed=1)
    residual_TC, out_TC = (torch.full((3, 80), float("nan"), device=DEVICE) for _ in range(2))

    embed_rms_norm(ints([10, 0, 3]), embedding_VC, gain_C, EPS, residual_TC=residual_TC, out_TC=out_TC)

    assert torch.equal(residual_TC, embedding_VC[[10, 0, 3]])
    assert distance(out_TC, reference.rms_norm(residual_TC, gain_C, EPS)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [100, 1536])
def test_silu_mul(size: int, dtype: torch.dtype) -> None:
    """Gate's half through SiLU, times up's half."""
    gate_up_TJ = normal(4, 2 * size, dtype=dtype)
    out_TI = torch.full((4, size), float("nan"), dtype=dtype, device=DEVICE)

    silu_mul(gate_up_TJ, out_TI=out_TI)

    assert distance(out_TI, reference.silu_mul(gate_up_TJ)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("head_dim", "num_heads", "num_kv_heads", "has_norm", "uses_rope"),
    [
        (64, 9, 3, False, True),
        (80, 4, 4, False, True),
        (96, 4, 2, True, True),
        (128, 8, 2, True, True),
        (256, 2, 1, False, True),
        (64, 4, 2, False, False),
        (64, 4, 2, True, False),
    ],
)
def test_rope_and_cache(
    head_dim: int, num_heads: int, num_kv_heads: int, has_norm: bool, uses_rope: bool, dtype: torch.dtype
) -> None:
    """q is turned in place; K and V go where the mapping says and nowhere else."""
    num_tokens, num_slots = 66, 160  # enough tokens for the wide form of the launch
    qkv_TN = normal(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    frequencies_F = 1 / (10000 ** (torch.arange(0, head_dim, 2, device=DEVICE) / head_dim))
    table_PD = rope_table(frequencies_F, 200)
    positions_T = ints(list(range(100, 100 + num_tokens)))
    slots_T = ints(torch.randperm(num_slots)[:num_tokens].tolist())
    gain = 1 + 0.1 * normal(num_heads + num_kv_heads, head_dim, dtype=dtype, seed=4) if has_norm else None
    for tokens in (slice(0, 3), slice(0, num_tokens)):
        arguments = (positions_T[tokens], slots_T[tokens], table_PD)
        cached = torch.full((2, num_kv_heads, num_slots // 16, 16, head_dim), 7.0, dtype=dtype, device=DEVICE)
        actual_TN, actual = qkv_TN[tokens].clone(), cached.clone()

        expected_q = reference.rotate_and_cache(
            qkv_TN[tokens], *arguments, cached, qk_norm_AHD=gain, eps=EPS, uses_rope=uses_rope
        )
        rotate_and_cache(actual_TN, *arguments, actual, qk_norm_AHD=gain, eps=EPS, uses_rope=uses_rope)

        q_TAD = actual_TN[:, : num_heads * head_dim].view(-1, num_heads, head_dim)
        assert distance(q_TAD, expected_q) < TOLERANCE[dtype]
        assert distance(actual, cached) < TOLERANCE[dtype]
        assert torch.equal(actual == 7.0, cached == 7.0)


@pytest.mark.parametrize("has_bias", [False, True])
def test_rows_of_the_batch_invariant_product(has_bias: bool) -> None:
    """A row is the same to the bit wherever it lies, and close to torch's."""
    x_TK, weight_NK = normal(19, 150), normal(70, 150, seed=1)
    bias_N = normal(70, seed=2) if has_bias else None
    out_TN, alone_TN = (torch.full((19, 70), float("nan"), device=DEVICE) for _ in range(2))

    batch_invariant_matmul(x_TK, weight_NK, bias_N, out_TN=out_TN)
    for row in range(19):
        batch_invariant_matmul(x_TK[row : row + 1], weight_NK, bias_N, out_TN=alone_TN[row : row + 1])

    expected_TN = x_TK.double() @ weight_NK.double().t() + (0 if bias_N is None else bias_N)
    assert distance(out_TN, expected_TN) < 1e-6
    assert torch.equal(out_TN, alone_TN)
