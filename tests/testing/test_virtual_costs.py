"""What steps cost: the terms, the noise, and the fit to a log of real steps."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from virtual_builders import prompt_step, rows_step

from aserve.testing import HostCosts, StepCosts, StepShape, fit_step_costs, h200_costs, read_step_log

COSTS = StepCosts(
    fixed_s=1e-3,
    weights_s=3e-3,
    matrix_token_s=20e-6,
    row_s=8e-6,
    kv_byte_s=2.3e-13,
    pair_s=1.5e-9,
    kv_bytes_per_token=131_072,
)

SHAPES = [
    StepShape(num_rows=rows, kv_tokens=rows * length) for rows in (1, 16, 64, 256) for length in (128, 1024, 4096)
]
SHAPES += [
    StepShape(num_prefill_tokens=n, num_pairs=n * n // 2 + n * before) for n in (128, 512, 2048) for before in (0, 4096)
]
SHAPES += [StepShape(num_rows=64, kv_tokens=40_960, num_prefill_tokens=448, num_pairs=100_000)]


def test_a_shape_is_what_the_plan_computes() -> None:
    """Rows see the tokens before them and their own; a chunk's tokens see each other in a triangle."""
    assert StepShape.of(rows_step(1, [9, 19])) == StepShape(num_rows=2, kv_tokens=30)
    assert StepShape.of(prompt_step(1, 4)) == StepShape(num_prefill_tokens=4, num_pairs=10)


def test_reading_the_weights_hides_the_matrices_or_is_hidden() -> None:
    """Few tokens cost what the weights cost, many what the matrices do, never the sum."""
    assert COSTS.seconds(StepShape(num_prefill_tokens=100)) == pytest.approx(4e-3)
    assert COSTS.seconds(StepShape(num_prefill_tokens=1000)) == pytest.approx(21e-3)


def test_the_fit_finds_the_costs_again() -> None:
    """From steps without noise, every term."""
    found = fit_step_costs(SHAPES, [COSTS.seconds(shape) for shape in SHAPES], kv_bytes_per_token=131_072)

    assert found.noise < 1e-9
    assert {name: pytest.approx(value, rel=1e-6, abs=1e-12) for name, value in asdict(COSTS).items()} == asdict(found)


def test_the_fit_measures_the_noise() -> None:
    """Steps that scatter by 5 % give costs near the true ones, and a noise near 5 %."""
    random = np.random.default_rng(1)
    noisy = [COSTS.seconds(shape) * float(np.exp(0.05 * random.standard_normal())) for shape in SHAPES * 20]
    found = fit_step_costs(SHAPES * 20, noisy, kv_bytes_per_token=131_072)

    assert found.noise == pytest.approx(0.05, rel=0.2)
    assert [found.seconds(shape) for shape in SHAPES] == pytest.approx(list(map(COSTS.seconds, SHAPES)), rel=0.05)


def test_no_term_of_a_fit_is_negative() -> None:
    """Steps that get cheaper with context are noise: the term is left out."""
    shapes = [StepShape(num_rows=1, kv_tokens=tokens) for tokens in (100, 1000, 10_000)]
    found = fit_step_costs(shapes, [1.02e-3, 1.01e-3, 1.0e-3], kv_bytes_per_token=1000)

    assert found.kv_byte_s == 0
    assert min(value for value in asdict(found).values()) >= 0


@pytest.mark.parametrize("name", ["8b", "1b"])
def test_the_shipped_log_fits(name: str) -> None:
    """The model explains the recorded steps to some 8 %, and reading the cache to the memory's bandwidth."""
    model = read_step_log()[name]
    costs = h200_costs(name)
    errors = np.array([costs.seconds(shape) for shape in model.shapes]) / model.device_s - 1

    assert float(np.sqrt(np.mean(errors**2))) < 0.1
    assert 3e12 < 1 / costs.kv_byte_s < 6e12


def test_a_log_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Times come in milliseconds and leave in seconds; a step need have neither a launch time nor a spread."""
    step = asdict(SHAPES[0]) | {"device_ms": 4.0}
    log = {
        "origin": "here",
        "shapes": {
            "m": {
                "kv_bytes_per_token": 8,
                "weight_bytes": 9,
                "steps": [step, step | {"launch_ms": 0.5, "device_ms_p90": 4.4}],
            }
        },
    }
    (tmp_path / "log.json").write_text(json.dumps(log))
    model = read_step_log(tmp_path / "log.json")["m"]

    assert (model.origin, model.shapes) == ("here", (SHAPES[0], SHAPES[0]))
    assert (model.device_s, model.launch_s) == ((0.004, 0.004), (0.0005,))
    assert model.costs().noise == pytest.approx(np.log(1.1) / 1.2816, rel=1e-3)


def test_noise_has_mean_one() -> None:
    """A noisy device is no slower on average; without noise nothing is drawn."""
    random = np.random.default_rng(3)
    noisy = StepCosts(fixed_s=1.0, noise=0.3)
    factors = [noisy.noise_factor(random) for _ in range(20_000)]

    assert np.mean(factors) == pytest.approx(1.0, abs=0.01)
    assert np.std(np.log(factors)) == pytest.approx(0.3, rel=0.02)
    assert StepCosts(fixed_s=1.0).noise_factor(random) == 1.0


def test_scaling_is_of_time_alone() -> None:
    """A device at half the speed takes twice as long for everything, with the same noise and cache."""
    slow = COSTS.scaled(2.0)

    assert [slow.seconds(shape) for shape in SHAPES] == pytest.approx([2 * COSTS.seconds(shape) for shape in SHAPES])
    assert (slow.noise, slow.kv_bytes_per_token) == (COSTS.noise, COSTS.kv_bytes_per_token)
    assert HostCosts(before_s=1.0, num_threads=3).scaled(0.5) == HostCosts(before_s=0.5, num_threads=3)
