"""What experiments 7 to 10 run on, where the device is virtual: costs of models on real machines, and their sources."""

import statistics
from dataclasses import dataclass
from functools import cache
from typing import Final

from aserve.testing import HostCosts, StepCosts, StepShape, read_step_log

SHAPES: Final = ("8b", "1b")
"""Those in the log that is shipped."""

_LAYER_PARAMETERS: Final = {"8b": 6_979_321_856, "1b": 973_078_528}

ALARM_LATE_S: Final = 30e-6
"""A timerfd read by the loop: 11 to 50 µs late at the median on the H200's host."""

GREEDY_ROW_S: Final = 23e-6
DRAWN_ROW_S: Final = 0.95e-3
"""Sampling a row of 49,152 logits on the host, greedy and with a temperature: ``model.sampler.Sampler`` on one core
(Sapphire Rapids), median of 30 calls of 16 rows."""

_COMPOSE_S: Final = 53e-6
_COMPOSE_ROW_S: Final = (99e-6 - 53e-6) / 255
"""Composing and landing a step of 1 row and of 256 (``tests/bench/scheduler.py``)."""
_TOKEN_S: Final = 13.8e-6
"""The server's processor time a token at 256 streams on the H200's host, without device and scheduler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A model on a machine. shape: out of SHAPES, or another. num_layer_parameters: the model's, which decide how many
    tokens a step holds by default. origin: where the figures come from."""

    name: str
    shape: str
    num_layer_parameters: int
    origin: str
    costs: StepCosts
    host: HostCosts


@cache
def h200(shape: str) -> Machine:
    """ "8b" or "1b" on one NVIDIA H200, by the log of steps that is shipped. Raises KeyError for another."""
    log = read_step_log()[shape]
    return Machine(
        name=f"{shape.upper()} on one H200",
        shape=shape,
        num_layer_parameters=_LAYER_PARAMETERS[shape],
        origin=log.origin,
        costs=log.costs(),
        host=HostCosts(
            before_s=_COMPOSE_S,
            before_row_s=_COMPOSE_ROW_S,
            launch_s=statistics.median(log.launch_s),
            after_row_s=_TOKEN_S,
        ),
    )


_A10_BYTES_PER_S: Final = 600e9 * 0.85
_A10_FLOPS: Final = 125e12 * 0.55
_PARAMETERS_7B: Final = 6.7e9
_A10_COSTS: Final = StepCosts(
    fixed_s=0.5e-3,
    weights_s=2 * _PARAMETERS_7B / _A10_BYTES_PER_S,
    matrix_token_s=2 * _PARAMETERS_7B / _A10_FLOPS,
    kv_byte_s=1 / _A10_BYTES_PER_S,
    kv_bytes_per_token=2 * 32 * 4096 * 2,
    noise=0.02,
)

A10: Final = Machine(
    name="7B on an A10",
    shape="7b",
    num_layer_parameters=6_476_005_376,
    origin=(
        "the card's data sheet (600 GB/s, 125 TFLOP/s in 16 bits) at 85 and 55 % of it; the processor's time is a "
        "third of a step of 16 rows at 600 tokens, which is what loses a quarter of the throughput with one step in "
        "flight"
    ),
    costs=_A10_COSTS,
    host=HostCosts(before_s=_A10_COSTS.seconds(StepShape(num_rows=16, kv_tokens=16 * 600)) / 3),
)
