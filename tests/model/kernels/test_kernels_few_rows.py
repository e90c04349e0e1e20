"""Products of few rows with their norms and residuals: each against plain torch."""

import pytest
import torch
from kernel_builders import DEVICE, TOLERANCE, distance, ints, normal
from torch import Tensor

from aserve.model.kernels import reference
from aserve.model.kernels.few_rows import FewRowsProducts, Stream

pytestmark = pytest.mark.torch

EPS = 1e-5
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16
"""The interpreter has no bfloat16; values as small as these fit float16."""
NUM_ROWS = (1, 2, 16, 24, 64)


def make_products(num_channels: int, *, num_multiprocessors: int = 132) -> FewRowsProducts:
    """More multiprocessors cut inputs into more parts."""
    return FewRowsProducts(
        num_channels=num_channels,
        num_multiprocessors=num_multiprocessors,
        device=torch.device(DEVICE),
    )


def make_stream(num_rows: int, num_channels: int) -> Stream:
    """NaN: all has to be written before it is read."""
    nans = torch.full((2, num_rows, num_channels), float("nan"), dtype=DTYPE, device=DEVICE)
    return Stream(residual_TC=nans[0], scaled_TC=nans[1])


def embedded(products: FewRowsProducts, num_rows: int, num_channels: int, gain_C: Tensor) -> tuple[Stream, Tensor]:
    """A stream that begins with rows of an embedding, and these rows."""
    embedding_VC = normal(70, num_channels, dtype=DTYPE, seed=11)
    ids = [(7 * row + 3) % 70 for row in range(num_rows)]
    stream = make_stream(num_rows, num_channels)
    products.embed(ints(ids), embedding_VC, gain_C, stream=stream)
    return stream, embedding_VC[ids]


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """In float32, of what was rounded before."""
    return x.float() @ weight.float().t() + (0 if bias is None else bias.float())


def gain(num_channels: int, seed: int) -> Tensor:
    return 1 + 0.1 * normal(num_channels, dtype=DTYPE, seed=seed)


@pytest.mark.parametrize("num_rows", NUM_ROWS)
@pytest.mark.parametrize("num_channels", [576, 1024])
def test_the_stream_begins_with_the_embedding(num_rows: int, num_channels: int) -> None:
    """The residual is the rows, the other part these times the first norm's gain."""
    gain_C = gain(num_channels, 1)

    stream, rows_TC = embedded(make_products(num_channels), num_rows, num_channels, gain_C)

    assert torch.equal(stream.residual_TC, rows_TC)
    assert torch.equal(stream.scaled_TC, (rows_TC.float() * gain_C.float()).to(DTYPE))


@pytest.mark.parametrize("num_rows", NUM_ROWS)
@pytest.mark.parametrize(
    ("num_channels", "num_outputs", "has_bias", "out_dtype"),
    [(576, 960, False, DTYPE), (1024, 200, True, DTYPE), (1024, 77, False, torch.float32)],
)
def test_norm_and_product(
    num_rows: int, num_channels: int, num_outputs: int, has_bias: bool, out_dtype: torch.dtype
) -> None:
    """As the norm, rounded, and then the product; logits come in float32."""
    products, gain_C = make_products(num_channels), gain(num_channels, 1)
    weight_NC = normal(num_outputs, num_channels, dtype=DTYPE, seed=2)
    bias_N = normal(num_outputs, dtype=DTYPE, seed=3) if has_bias else None
    stream, rows_TC = embedded(products, num_rows, num_channels, gain_C)
    out_TN = torch.full((num_rows, num_outputs), float("nan"), dtype=out_dtype, device=DEVICE)

    products.norm_product(stream, EPS, weight_NC, bias_N, out_TN=out_TN)

    expected_TN = product(reference.rms_norm(rows_TC, gain_C, EPS), weight_NC, bias_N)
    assert distance(out_TN, expected_TN) < TOLERANCE[DTYPE]


@pytest.mark.parametrize("num_rows", NUM_ROWS)
@pytest.mark.parametrize(("size", "has_bias"), [(512, False), (100, True)])
def test_norm_gate_and_up(num_rows: int, size: int, has_bias: bool) -> None:
    """silu(gate) * up, also where the last tile is not whole."""
    products, gain_C = make_products(576), gain(576, 1)
    weight_JC = 0.1 * normal(2 * size, 576, dtype=DTYPE, seed=2)
    bias_J = normal(2 * size, dtype=DTYPE, seed=3) if has_bias else None
    stream, rows_TC = embedded(products, num_rows, 576, gain_C)
    out_TI = torch.full((num_rows, size), float("nan"), dtype=DTYPE, device=DEVICE)

    products.norm_gate_up(stream, EPS, weight_JC, bias_J, out_TI=out_TI)

    gate_up_TJ = product(reference.rms_norm(rows_TC, gain_C, EPS), weight_JC, bias_J)
    assert distance(out_TI, reference.silu_mul(gate_up_TJ)) < TOLERANCE[DTYPE]


@pytest.mark.parametrize("num_rows", NUM_ROWS)
@pytest.mark.parametrize("num_multiprocessors", [1, 132])
@pytest.mark.parametrize(("num_inputs", "has_bias"), [(1536, False), (4096, True), (9224, False)])
def test_product_and_residual(num_rows: int, num_multiprocessors: int, num_inputs: int, has_bias: bool) -> None:
    """The residual grows by the product, and all that the next norm takes of it is there: in one part or several."""
    products, gain_C = make_products(576, num_multiprocessors=num_multiprocessors), gain(576, 4)
    stream, rows_TC = embedded(products, num_rows, 576, gain(576, 1))
    x_TK, weight_CK = normal(num_rows, num_inputs, dtype=DTYPE), 0.01 * normal(576, num_inputs, dtype=DTYPE, seed=2)
    bias_C = normal(576, dtype=DTYPE, seed=3) if has_bias else None

    products.product_add(x_TK, weight_CK, bias_C, gain_C, stream=stream)

    expected_TC = rows_TC.float() + product(x_TK, weight_CK, bias_C)
    assert distance(stream.residual_TC, expected_TC) < TOLERANCE[DTYPE]
    assert torch.equal(stream.scaled_TC, (stream.residual_TC.float() * gain_C.float()).to(DTYPE))
    identity_CC, normed_TC = torch.eye(576, dtype=DTYPE, device=DEVICE), torch.empty_like(stream.residual_TC)
    products.norm_product(stream, EPS, identity_CC, None, out_TN=normed_TC)
    assert distance(normed_TC, reference.rms_norm(stream.residual_TC, gain_C, EPS)) < TOLERANCE[DTYPE]


def test_rows_do_not_touch_each_other() -> None:
    """A row of NaN stays alone with it."""
    products, gain_C = make_products(576), gain(576, 1)
    stream, _ = embedded(products, 4, 576, gain_C)
    x_TK, weight_CK = normal(4, 1024, dtype=DTYPE), normal(576, 1024, dtype=DTYPE, seed=2)
    x_TK[2] = float("nan")
    out_TN = torch.zeros(4, 576, dtype=DTYPE, device=DEVICE)

    products.product_add(x_TK, weight_CK, None, gain_C, stream=stream)
    products.norm_product(stream, EPS, weight_CK[:, :576].contiguous(), None, out_TN=out_TN)

    assert out_TN.isnan().any(1).tolist() == [False, False, True, False]
