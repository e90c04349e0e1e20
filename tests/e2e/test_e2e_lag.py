"""The loop keeps its pace beside the model on the CPU."""

import sys

import pytest
from loop_lag import measure

pytestmark = [pytest.mark.torch, pytest.mark.slow]

P99_MS_MAX = 25.0
"""For machines that others use too; on a quiet one the aim is 5 ms. ``loop_lag.py`` measures it at length."""


def test_the_loop_is_on_time_while_prompts_prefill(
    default_model_folder: object, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sixteen streams decode and prompts of 2,000 tokens prefill: the loop's lateness stays bounded at p99."""
    figures = measure(threads=1, seconds=8)

    with capsys.disabled():
        sys.stdout.write(f"\n{figures}\n")
    assert figures.num_samples > 500
    assert figures.p99_ms <= P99_MS_MAX
