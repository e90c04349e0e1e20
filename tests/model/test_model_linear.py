"""Fixed-weight products in every layout, and what rounding weights to 8 bits costs a model."""

from pathlib import Path

import pytest
import torch
from families import PagedDriver, hf_model, prompt, save
from torch import Tensor

from aserve.errors import ModelError
from aserve.model.linear import Linear, PackedLinear, PlainLinear, make_linear
from aserve.model.loader import load_model
from aserve.model.norm import RmsNorm

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")
HAS_BFLOAT16 = PackedLinear.is_supported(torch.bfloat16, CPU)
ROWS = [1, 2, 8, 9, 100]


def weights(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(96, 64, generator=generator).bfloat16(), torch.randn(96, generator=generator).bfloat16()


def inputs(num_rows: int) -> Tensor:
    """Rows of very unlike size, a zero one among them."""
    x_MK = torch.randn(num_rows, 64, generator=torch.Generator().manual_seed(1))
    return (x_MK * torch.logspace(-3, 3, num_rows).unsqueeze(1)).bfloat16()


def error(linear: Linear, x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor) -> float:
    """Of the worst row, relative to its size."""
    exact_MN = x_MK.double() @ weight_NK.double().T + bias_N.double()
    return float(((linear(x_MK).double() - exact_MN).norm(dim=1) / exact_MN.norm(dim=1)).max())


@pytest.mark.parametrize("num_rows", ROWS)
def test_a_packed_weight_multiplies_like_a_plain_one(num_rows: int) -> None:
    """The layout for bfloat16 changes nothing beyond its rounding."""
    weight, bias = weights()

    assert error(make_linear(weight, bias), inputs(num_rows), weight, bias) < 0.005


def test_int8_is_refused_for_float32(tmp_path: Path) -> None:
    """Quantised weights come beside bfloat16 activations only, and the error says so."""
    folder = save(hf_model("llama"), tmp_path)

    with pytest.raises(ModelError, match="bfloat16"):
        load_model(folder, dtype=torch.float32, quantization="int8")


def test_int8_is_refused_in_reference_mode(tmp_path: Path) -> None:
    """Reference mode is exact or nothing."""
    folder = save(hf_model("llama"), tmp_path)

    with pytest.raises(ModelError, match="reference"):
        load_model(folder, dtype=torch.bfloat16, reference=True, quantization="int8")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 32, 33])
def test_rms_norm_is_the_definition(num_rows: int, dtype: torch.dtype) -> None:
    """By whichever operators, within one rounding of the definition in double precision."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_rows, 48, generator=generator).to(dtype) + 2
    gain = torch.randn(48, generator=generator).to(dtype)
    exact = x.double() / (x.double().square().mean(1, keepdim=True) + 1e-5).sqrt() * gain.double()

    y = RmsNorm(gain, 1e-5)(x)

    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), exact, rtol=1e-5 if dtype == torch.float32 else 2**-8, atol=1e-6)


def test_weights_count_their_bytes() -> None:
    """num_bytes is what a weight holds in memory."""
    weight = torch.randn(8, 4)

    assert PlainLinear(weight, None).num_bytes == 128


@pytest.mark.slow
@pytest.mark.skipif(not HAS_BFLOAT16, reason="int8 weights need a CPU with native bfloat16")
def test_int8_keeps_a_real_models_likelihood(default_model_folder: Path) -> None:
    """The mean negative log-likelihood of a text, token by token, is float32's within 1 %."""
    from tokenizers import Tokenizer

    folder = default_model_folder
    text = (Path(__file__).parents[2] / "README.md").read_text()
    tokens = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids[:180]

    def likelihood(dtype: torch.dtype, **options: str) -> float:
        driver = PagedDriver(load_model(folder, dtype=dtype, **options))  # type: ignore[arg-type]
        logits = [driver.step(chunks={"a": tokens[:100]})["a"][-1:]]
        logits += [driver.step(rows={"a": token})["a"] for token in tokens[100:-1]]
        return float(torch.nn.functional.cross_entropy(torch.cat(logits), torch.tensor(tokens[100:])))

    assert likelihood(torch.bfloat16, quantization="int8") < 1.01 * likelihood(torch.float32)


@pytest.mark.skipif(not HAS_BFLOAT16, reason="int8 weights need a CPU with native bfloat16")
def test_random_tokens_get_the_same_model_from_int8(tmp_path: Path) -> None:
    """A whole decoder with rounded weights, few rows and many, stays within a tenth of its logits' spread."""
    folder, tokens = save(hf_model("llama"), tmp_path), prompt(30)
    exact = PagedDriver(load_model(folder, dtype=torch.float32)).step(chunks={"a": tokens})["a"]
    driver = PagedDriver(load_model(folder, dtype=torch.bfloat16, quantization="int8"))

    parts = [driver.step(chunks={"a": tokens[:20]})["a"], *(driver.step(rows={"a": t})["a"] for t in tokens[20:])]

    assert (torch.cat(parts) - exact).square().mean().sqrt() < 0.1 * exact.std()


def test_auto_rounds_where_it_can_and_keeps_weights_elsewhere(tmp_path: Path) -> None:
    """With bfloat16 on a CPU that has it; never in float32, nor in reference mode."""
    folder = save(hf_model("llama"), tmp_path)

    loaded = [
        load_model(folder, dtype=dtype, reference=reference, quantization="auto")
        for dtype, reference in ((torch.bfloat16, False), (torch.float32, False), (torch.bfloat16, True))
    ]

    assert [getattr(model, "is_int8", False) for model in loaded] == [HAS_BFLOAT16, False, False]
