"""The CPU's own kernels against the definitions that the GPU's are held to, and their decoder against the plain one."""

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import NATIVE, PagedDriver, hf_model, prompt, save
from numba import typeof
from torch import Tensor

from aserve.model import cpu_decoder
from aserve.model.attention import pages
from aserve.model.attention.pages import PageAttention, array_of, pages_of
from aserve.model.batch import KVShape
from aserve.model.config import ModelConfig
from aserve.model.cpu_decoder import CpuDecoder, round_to_int8
from aserve.model.cpu_kernels import ahead
from aserve.model.cpu_kernels.attention import make_attend
from aserve.model.cpu_kernels.compiler import exp, kernel, narrow, widen
from aserve.model.cpu_kernels.elementwise import add_rms_norm, rotate_and_cache, silu_mul
from aserve.model.cpu_kernels.few_rows import multiply
from aserve.model.decoder import Decoder
from aserve.model.kernels import reference
from aserve.model.kv_tensors import KVTensors
from aserve.model.linear import PackedLinear
from aserve.model.loader import load_model, open_weights

pytestmark = pytest.mark.torch

HAS_BFLOAT16 = PackedLinear.is_supported(torch.bfloat16, torch.device("cpu"))
needs_bfloat16 = pytest.mark.skipif(not HAS_BFLOAT16, reason="the decoder needs a CPU with native bfloat16")
BF16_STEP = 2**-8
TOKENS = [1, 7, 40]
"""Alone in the calling thread, and shared out over two."""


def normal(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).bfloat16()


def assert_rounded(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.float(), expected.float(), rtol=BF16_STEP, atol=1e-5)


@kernel
def narrow_all(x, out):  # type: ignore[no-untyped-def]
    for i in range(len(x)):
        out[i] = narrow(x[i])


@kernel
def widen_all(x, out):  # type: ignore[no-untyped-def]
    for i in range(len(x)):
        out[i] = widen(x[i])


@kernel
def exp_all(x, out):  # type: ignore[no-untyped-def]
    for i in range(len(x)):
        out[i] = exp(x[i])


def test_bfloat16_rounds_as_torchs_does() -> None:
    """To the nearest, halves to even, infinities and NaN kept; back without a change."""
    special = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1.00390625, 1.01171875, 3e38]
    x = torch.cat((torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 100, torch.tensor(special)))
    bits, back = np.empty(len(x), np.uint16), np.empty(len(x), np.float32)

    narrow_all(x.numpy(), bits)
    widen_all(bits, back)

    torch.testing.assert_close(torch.from_numpy(back), x.bfloat16().float(), rtol=0, atol=0, equal_nan=True)


def test_exp_is_exact_to_single_precision() -> None:
    """Over all of a softmax's range, but for the rounding of x * log2(e); what float32 cannot hold is near zero."""
    x = np.linspace(-86, 0, 20_001, dtype=np.float32)
    out, tiny = np.empty_like(x), np.empty(2, np.float32)

    exp_all(x, out)
    exp_all(np.array([-200, -np.inf], np.float32), tiny)

    exact = np.exp(x.astype(np.float64))
    assert (np.abs(out / exact - 1) < 3e-7 + 8e-8 * np.abs(x)).all()
    assert (tiny < 1e-37).all()


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("adds", [True, False])
def test_norm_with_residual(num_tokens: int, adds: bool) -> None:
    """The sum goes back to the residual stream, its norm comes out."""
    x, d, gain = normal(num_tokens, 48), normal(num_tokens, 48, seed=1), normal(48, seed=2).float()
    expected_x = (x.float() + d.float()).bfloat16() if adds else x.clone()
    out = torch.empty_like(x)

    add_rms_norm(array_of(x), array_of(d if adds else d[:0]), gain.numpy(), np.float32(1e-5), 2, array_of(out))

    assert torch.equal(x, expected_x)
    assert_rounded(out, reference.rms_norm(expected_x, gain, 1e-5))


@pytest.mark.parametrize("num_tokens", TOKENS)
def test_silu_mul(num_tokens: int) -> None:
    """Also where e to the gate would be out of range."""
    gate_up = normal(num_tokens, 64) * 30
    out = torch.empty(num_tokens, 32, dtype=torch.bfloat16)

    silu_mul(array_of(gate_up), 2, array_of(out))

    assert_rounded(out, reference.silu_mul(gate_up))


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize("uses_rope", [True, False])
def test_rotate_and_cache(num_tokens: int, has_norm: bool, uses_rope: bool) -> None:
    """q turned in place, K turned and V as it is in the slots, nothing elsewhere."""
    num_heads, num_kv_heads, head_dim, block_size = 4, 2, 16, 8
    shape = KVShape(
        num_layers=2, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=torch.bfloat16, layout="rows"
    )  # fmt: skip
    kv = KVTensors.allocate(shape, num_blocks=6, block_size=block_size)
    qkv = normal(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim)
    slots = torch.randperm(6 * block_size, generator=torch.Generator().manual_seed(3))[:num_tokens] + block_size
    angles = torch.rand(num_tokens, head_dim // 2, generator=torch.Generator().manual_seed(4)) * 6
    gains = normal(num_heads + num_kv_heads, head_dim, seed=5).float()
    rope_table = torch.cat((angles.cos(), angles.sin()), 1)
    expected_layer = torch.zeros(2, num_kv_heads, 7, block_size, head_dim, dtype=torch.bfloat16)
    expected_q = reference.rotate_and_cache(
        qkv, torch.arange(num_tokens), slots, rope_table, expected_layer,
        qk_norm_AHD=gains if has_norm else None, uses_rope=uses_rope,
    )  # fmt: skip

    rotate_and_cache(
        array_of(qkv), angles.cos().numpy(), angles.sin().numpy(), (gains if has_norm else gains[:0]).numpy(),
        np.float32(1e-6), uses_rope, slots.numpy(), pages_of(kv), 1, block_size, 2,
    )  # fmt: skip

    assert_rounded(qkv[:, : num_heads * head_dim].view(num_tokens, num_heads, head_dim), expected_q)
    assert_rounded(kv.keys[1].permute(2, 0, 1, 3), expected_layer[0])
    assert_rounded(kv.values[1].permute(2, 0, 1, 3), expected_layer[1])
    assert not kv.keys[0].any()


@pytest.mark.parametrize("num_rows", [1, 2, 4, 8])
@pytest.mark.parametrize("num_inputs", [16, 48, 208])
@pytest.mark.parametrize("is_int8", [True, False])
def test_few_rows_multiply_like_a_plain_weight(num_rows: int, num_inputs: int, is_int8: bool) -> None:
    """Any number of inputs that fills registers in part; a row that is zero or NaN stays alone with it; sums add up."""
    weight, bias = normal(11, num_inputs), normal(11, seed=1).float()
    x, before = normal(num_rows, num_inputs, seed=2).float(), normal(num_rows, 11, seed=3).float()
    if num_rows > 2:
        x[1], x[2, 5] = 0, torch.nan
    rows, scale = array_of(weight), np.empty(0, np.float32)
    exact = weight.float()
    if is_int8:
        int8, scales = round_to_int8(weight)
        rows, scale, exact = int8.numpy(), scales.numpy(), int8.float() * scales.unsqueeze(1)
    expected = before.clone()
    expected[:, 2:9] += x @ exact.T[:, 2:9] + bias[2:9]

    multiply(rows, scale, bias.numpy(), x.numpy(), before.numpy(), 2, 9, True)

    torch.testing.assert_close(before, expected, rtol=1e-5, atol=1e-4, equal_nan=True)


@needs_bfloat16
@pytest.mark.parametrize("family", ["llama-biases", "smollm3", "qwen2-window", "qwen3", "mistral-window"])
def test_the_fused_decoder_is_as_exact_as_the_plain_one(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts, steps of 1, 3 and 9 rows, rows beside a chunk: its rounding is of the size of torch's in bfloat16.

    So it is where memory is too short for a second copy of the weights.
    """
    model_type, overrides = NATIVE[family]
    folder = save(hf_model(model_type, **overrides), tmp_path)
    config = ModelConfig.from_folder(folder)
    read = open_weights(folder, config, dtype=torch.bfloat16, device="cpu")
    attention = PageAttention()
    plain = PagedDriver(Decoder(config, read, dtype=torch.bfloat16, attention=attention, layout="rows"))
    exact = PagedDriver(load_model(folder, dtype=torch.float32))
    fused = PagedDriver(load_model(folder, dtype=torch.bfloat16))
    monkeypatch.setattr(cpu_decoder, "_SHARE_MAX", 0)
    lean = PagedDriver(load_model(folder, dtype=torch.bfloat16))
    assert isinstance(fused.model, CpuDecoder)
    assert isinstance(lean.model, CpuDecoder)
    assert lean.model.weight_bytes < fused.model.weight_bytes
    names = [str(index) for index in range(9)]

    for rows, chunks in (
        ({}, {name: prompt(5 + 4 * index, seed=index) for index, name in enumerate(names)}),
        ({"0": 3}, {}),
        ({"0": 4, "1": 5, "5": 6}, {}),
        ({name: 7 + index for index, name in enumerate(names)}, {}),
        ({"2": 8, "7": 9}, {"late": prompt(20)}),
    ):
        expected = torch.cat([*exact.step(rows, chunks).values()])
        fused_error, lean_error, plain_error = (
            (torch.cat([*driver.step(rows, chunks).values()]) - expected).square().mean().sqrt()
            for driver in (fused, lean, plain)
        )
        assert max(fused_error, lean_error) < 1.5 * plain_error


@needs_bfloat16
def test_what_is_compiled_ahead_is_what_larger_steps_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kernel with the same types as in a step of nine rows and a chunk, in any layer."""
    called: dict[str, set[tuple[object, ...]]] = {}

    def record(kernel: Any) -> Any:
        def call(*arguments: object) -> None:
            called.setdefault(kernel.__name__, set()).add(tuple(map(typeof, arguments)))

        return call

    for module in (ahead, cpu_decoder):
        for each in (add_rms_norm, rotate_and_cache, silu_mul):
            monkeypatch.setattr(module, each.__name__, record(each))
    for module in (ahead, pages):
        monkeypatch.setattr(module, "make_attend", lambda *constants: record(make_attend(*constants)))
    ahead.compile_larger_steps(2, 16, 8)
    compiled = {name: set(types) for name, types in called.items()}

    model_type, overrides = NATIVE["qwen3"]
    driver = PagedDriver(load_model(save(hf_model(model_type, **overrides), tmp_path), dtype=torch.bfloat16))
    names = [str(index) for index in range(9)]
    driver.step({}, {name: prompt(5) for name in names})
    driver.step(dict.fromkeys(names, 3), {"late": prompt(20)})

    assert called == compiled
    assert len(compiled) == 4


def test_another_process_compiles_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the constants that it is given."""
    found = tmp_path / "found"
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$@" > {found}.part && mv {found}.part {found}\n')
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))

    ahead.begin(3, 64, 32)
    next(thread for thread in threading.enumerate() if thread.name == "aserve-compile").join(20)

    assert found.read_text().split() == ["-m", "aserve.model.cpu_kernels.ahead", "3", "64", "32"]


def test_kernels_leave_torchs_threads_as_they_are() -> None:
    """In a process of its own, since numba makes its threads once: one thread stays one."""
    program = (
        "import torch; torch.set_num_threads(1)\n"
        "from aserve.model.attention.pages import use_threads\n"
        "print(use_threads(), torch.get_num_threads(), use_threads(), torch.get_num_threads())"
    )

    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=100)

    assert result.stdout.split() == ["1"] * 4
