"""Step times are learnt from steps: through noise and outliers, by shape, and anew where the device's pace changes."""

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aserve.core.plan import BatchPlan, Chunk
from aserve.core.prediction import FIRST_STEPS, RecentValues, StepShape, StepTimePredictor, shape_of


def shape(rows: int = 0, prefill: int = 0, *, context: int = 500, start: int = 0) -> StepShape:
    """Decode rows with so much context each, and one chunk from ``start`` on."""
    chunk_kv = start + prefill if prefill else 0
    return StepShape(rows, prefill, rows * context + chunk_kv, prefill * start + prefill * (prefill + 1) // 2)


def true_s(step: StepShape) -> float:
    """A device whose steps read the weights, then take so much a row, a prompt token, and a token of context."""
    return 4e-3 + 1e-5 * step.num_rows + 2e-5 * step.num_prefill_tokens + 3e-8 * step.num_kv_tokens


def workload(num: int, seed: int = 0) -> list[StepShape]:
    """Decode rows that come and go and whose contexts grow, with a chunk now and then."""
    chance = random.Random(seed)
    steps, rows = [], 8
    for index in range(num):
        rows = min(max(rows + chance.choice((-2, 0, 0, 0, 1, 2)), 1), 64)
        prefill = chance.choice((512, chance.randrange(16, 512))) if chance.random() < 0.15 else 0
        steps.append(shape(rows, prefill, context=400 + index % 600))
    return steps


def teach(predictor: StepTimePredictor, steps: list[StepShape], time_s=true_s) -> list[float]:
    """Learn from the steps; the relative error of what was predicted before each, against ``true_s`` times its pace."""
    errors = []
    for step in steps:
        predicted_s, seconds = predictor.predict(step), time_s(step)
        if predicted_s is not None:
            errors.append(abs(predicted_s - true_s(step)) / true_s(step))
        predictor.learn(step, seconds, predicted_s)
    return errors


def noisy(chance: random.Random, spread: float, odd: float = 0.0):
    """Times with Gaussian noise, of which a share ``odd`` are a hundred times as long."""

    def time_s(step: StepShape) -> float:
        return true_s(step) * max(chance.gauss(1, spread), 0.1) * (100 if chance.random() < odd else 1)

    return time_s


# --- what is learnt


def test_nothing_is_predicted_from_a_few_steps():
    """The first steps are often odd ones: none is believed alone."""
    predictor = StepTimePredictor()
    predictions = []
    for _ in range(FIRST_STEPS + 1):
        predictions.append(predictor.predict(shape(1)))
        predictor.learn(shape(1), 0.004, predictions[-1])

    assert predictions == [None] * FIRST_STEPS + [pytest.approx(0.004)]


def test_all_shapes_of_a_workload_are_learnt():
    """Without noise, within a percent once twenty steps have been seen, and few are not predicted at all."""
    errors = teach(StepTimePredictor(), workload(500))

    assert len(errors) > 480
    assert max(errors[20:]) < 0.01


def test_noise_is_averaged():
    """Of a noise of ten percent, less than half is in the predictions."""
    errors = sorted(teach(StepTimePredictor(), workload(1000), noisy(random.Random(1), 0.1))[50:])

    assert errors[len(errors) // 2] < 0.04
    assert errors[int(0.9 * len(errors))] < 0.1


def test_outliers_do_not_move_it():
    """Two steps in a hundred take a hundred times as long, and every prediction stays within a tenth."""
    errors = teach(StepTimePredictor(), workload(1000), noisy(random.Random(1), 0.02, odd=0.02))

    assert max(errors[50:]) < 0.1


def test_a_first_step_that_compiles_is_forgotten():
    """It took seconds. Ten steps later it is as if it had never been."""
    predictor = StepTimePredictor()
    predictor.learn(shape(8), 2.0, None)
    teach(predictor, [shape(8)] * 10)

    assert predictor.predict(shape(8)) == pytest.approx(true_s(shape(8)), rel=0.01)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(pace=st.floats(0.2, 5.0), seed=st.integers(0, 5))
def test_a_new_pace_is_learnt_in_some_tens_of_steps(pace, seed):
    """The device is throttled, or shared: every shape, seen since or not, is predicted at the new pace."""
    predictor = StepTimePredictor()
    noise = noisy(random.Random(seed), 0.02)
    teach(predictor, workload(300, seed), noise)
    teach(predictor, workload(40, seed + 1), lambda step: pace * noise(step))
    errors = []
    for step in workload(200, seed + 2):
        predicted_s, seconds = predictor.predict(step), pace * noise(step)
        if predicted_s is not None:
            errors.append(abs(predicted_s - pace * true_s(step)) / (pace * true_s(step)))
        predictor.learn(step, seconds, predicted_s)

    assert len(errors) > 190
    assert max(errors) < 0.15


def test_a_shape_between_is_predicted_and_a_new_kind_is_not():
    """Rows between those seen follow the line; a chunk, when none was seen, may take anything. Once it has been seen,
    so are chunks like it."""
    predictor = StepTimePredictor()
    teach(predictor, [shape(rows) for rows in (4, 8, 32, 16, 8, 32)])

    assert predictor.predict(shape(24)) == pytest.approx(true_s(shape(24)), rel=0.02)
    assert predictor.predict(shape(24, 512)) is None
    teach(predictor, [shape(24, 512), shape(24, 256), shape(24, 512)])
    assert predictor.predict(shape(24, 400)) == pytest.approx(true_s(shape(24, 400)), rel=0.02)


def test_stairs_are_learnt():
    """A device that pads rows to powers of two: after a few steps on a stair, what that stair takes."""
    predictor = StepTimePredictor()

    def stairs_s(step: StepShape) -> float:
        return 1e-3 * 2 ** (step.num_rows - 1).bit_length()

    for rows in (*range(1, 65), 33, 33, 33):
        predictor.learn(shape(rows), stairs_s(shape(rows)), predictor.predict(shape(rows)))

    assert predictor.predict(shape(33)) == pytest.approx(0.064, rel=0.1)
    assert predictor.predict(shape(62)) == pytest.approx(0.064, rel=0.1)


def test_what_no_step_shows_is_kept():
    """Five thousand decode steps later a chunk takes what it took: forgetting is restricted to what steps show."""
    predictor = StepTimePredictor()
    noise = noisy(random.Random(2), 0.02)
    teach(predictor, workload(200), noise)
    teach(predictor, [shape(8, context=400 + index % 600) for index in range(5000)], noise)

    assert predictor.predict(shape(8, 300)) == pytest.approx(true_s(shape(8, 300)), rel=0.1)


def test_the_error_is_reported():
    """Quantiles of |predicted - actual| / actual, of the steps that were predicted."""
    predictor = StepTimePredictor()
    teach(predictor, [shape(4)] * 20)
    predictor.learn(shape(4), 0.008, 0.004)
    predictor.learn(shape(4), 0.004, 0.008)

    assert predictor.error(0.5) == pytest.approx(0.0, abs=1e-6)
    assert predictor.error(0.95) == pytest.approx(0.5)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    steps=st.lists(
        st.tuples(st.integers(0, 300), st.integers(0, 2048), st.integers(0, 30000), st.floats(1e-7, 1e3)),
        min_size=1,
        max_size=80,
    )
)
def test_any_times_at_all_leave_it_finite(steps):
    """Whatever a device does, a prediction is a positive number of seconds, or none."""
    predictor = StepTimePredictor()
    for rows, prefill, context, seconds in steps:
        step = shape(rows, prefill, context=context, start=context)
        predicted_s = predictor.predict(step)
        assert predicted_s is None or 0.0 < predicted_s < math.inf
        predictor.learn(step, seconds, predicted_s)


# --- parts


def test_a_plan_has_its_shape():
    """Rows read what is before them and themselves; a chunk's tokens attend to all up to each of them."""
    plan = BatchPlan(
        step=1,
        rows=np.array([[0, 9], [1, 4]], np.int32),
        chunks=(
            Chunk(slot=2, start=0, tokens=np.zeros(3, np.int32), last=True),
            Chunk(slot=3, start=10, tokens=np.zeros(2, np.int32), last=False),
        ),
    )

    assert shape_of(plan) == StepShape(
        num_rows=2, num_prefill_tokens=5, num_kv_tokens=10 + 5 + 3 + 12, num_pairs=1 + 2 + 3 + 11 + 12
    )


@given(values=st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=40), size=st.integers(1, 8))
def test_recent_values_are_the_newest(values, size):
    """Quantiles are of the last so many, whatever came before; forgetting takes the oldest."""
    recent = RecentValues(size)
    for value in values:
        recent.add(value)

    newest = values[-size:]
    assert (recent.quantile(0.0), recent.quantile(1.0), len(recent)) == (min(newest), max(newest), len(newest))
    recent.forget()
    assert recent.quantile(1.0) == max(newest[1:], default=0.0)
