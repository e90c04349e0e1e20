"""How long a watcher expects a kind of step to take, from those that it saw."""

import pytest

from aserve.device.prediction import StepTimes


def test_a_kind_of_step_is_unknown_until_it_was_seen() -> None:
    """A suggestion counts until then, and never against what was seen."""
    times = StepTimes()
    assert times.get("a") is None
    times.suggest("a", 0.002)
    times.suggest("a", 0.5)
    times.saw("b", 0.004)
    times.suggest("b", 0.5)
    assert [times.get(key).mean_s for key in "ab"] == [0.002, 0.004]  # type: ignore[union-attr]


def test_the_mean_follows_and_the_spread_tells_how_well() -> None:
    """Steady steps have no spread; steps that alternate have about half their difference."""
    times = StepTimes()
    for _ in range(100):
        times.saw("steady", 0.004)
    for number in range(100):
        times.saw("restless", 0.003 + 0.002 * (number % 2))
    steady, restless = times.get("steady"), times.get("restless")
    assert steady is not None and restless is not None
    assert (steady.mean_s, steady.spread_s) == (pytest.approx(0.004), pytest.approx(0, abs=1e-6))
    assert (restless.mean_s, restless.spread_s) == (pytest.approx(0.004, rel=0.1), pytest.approx(0.001, rel=0.2))


def test_a_missed_end_shortens_the_mean() -> None:
    """And of a kind that was never seen it says nothing."""
    times = StepTimes()
    times.suggest("a", 0.016)
    times.missed("a")
    times.missed("b")
    estimate = times.get("a")
    assert estimate is not None and estimate.mean_s == pytest.approx(0.015)
    assert times.get("b") is None
