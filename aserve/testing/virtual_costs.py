"""What a step and the host work around it cost: the virtual device's model, and how it is learnt from real steps.

A log of real steps is JSON: ``{"origin", "shapes": {name: {"kv_bytes_per_token", "weight_bytes", "steps": [...]}}}``,
each step with the fields of ``StepShape``, ``device_ms``, and where they are known ``device_ms_p90`` and ``launch_ms``;
``tests/gpu/record_steps.py`` writes one.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from aserve.core.plan import BatchPlan

STEP_LOG: Final = Path(__file__).parent / "steps_h200.json"
"""Steps of the 8B and the 1B shape on one NVIDIA H200."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """What a step's time depends on.

    kv_tokens: context of all decode rows together. num_pairs: (query, key) pairs that the chunks' attention looks at.
    """

    num_rows: int = 0
    kv_tokens: int = 0
    num_prefill_tokens: int = 0
    num_pairs: int = 0

    @property
    def mean_context(self) -> float:
        """Keys that a prompt token looks at, on average."""
        return self.num_pairs / self.num_prefill_tokens if self.num_prefill_tokens else 0.0

    @classmethod
    def of(cls, plan: BatchPlan) -> "StepShape":
        counts = [(chunk.start, len(chunk.tokens)) for chunk in plan.chunks]
        return cls(
            num_rows=len(plan.rows),
            kv_tokens=int(plan.rows[:, 1].sum()) + len(plan.rows),
            num_prefill_tokens=sum(count for _, count in counts),
            num_pairs=sum(count * start + count * (count + 1) // 2 for start, count in counts),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """Seconds of a step on the device, a sum of terms: ``fixed_s`` and so much a row, prompt token, KV byte and pair.

    weights_s, matrix_token_s: reading the weights, and multiplying each token, row or prompt, with them; the longer of
    the two hides the other (the roofline of Williams, Waterman and Patterson, CACM 2009).
    context_s: for each token of context that a prompt token looks at on average; a chunk's attention walks through it,
    however few its tokens are.
    noise: sigma of a log-normal factor with mean 1. kv_bytes_per_token: of the model's cache, all layers.
    """

    fixed_s: float
    weights_s: float = 0.0
    matrix_token_s: float = 0.0
    row_s: float = 0.0
    prefill_token_s: float = 0.0
    kv_byte_s: float = 0.0
    pair_s: float = 0.0
    context_s: float = 0.0
    kv_bytes_per_token: int = 0
    noise: float = 0.0

    def seconds(self, shape: StepShape) -> float:
        """Without noise."""
        return (
            self.fixed_s
            + max(self.weights_s, self.matrix_token_s * (shape.num_rows + shape.num_prefill_tokens))
            + self.row_s * shape.num_rows
            + self.prefill_token_s * shape.num_prefill_tokens
            + self.kv_byte_s * self.kv_bytes_per_token * shape.kv_tokens
            + self.pair_s * shape.num_pairs
            + self.context_s * shape.mean_context
        )

    def noise_factor(self, random: np.random.Generator) -> float:
        """Draws from ``random`` only where there is noise."""
        return math.exp(self.noise * random.standard_normal() - self.noise**2 / 2) if self.noise else 1.0

    def scaled(self, factor: float) -> "StepCosts":
        """A device that takes ``factor`` times as long for everything."""
        return replace(
            self,
            fixed_s=self.fixed_s * factor,
            weights_s=self.weights_s * factor,
            matrix_token_s=self.matrix_token_s * factor,
            row_s=self.row_s * factor,
            prefill_token_s=self.prefill_token_s * factor,
            kv_byte_s=self.kv_byte_s * factor,
            pair_s=self.pair_s * factor,
            context_s=self.context_s * factor,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCosts:
    """Seconds of the processor around each step.

    before_s, before_row_s: making a step ready, on the loop. launch_s: handing it to the device, on the loop.
    after_s, after_row_s: turning what a step brought into text and writing it: on the loop with one thread, before
    the text is seen by anybody; with more, in ``num_threads - 1`` workers, before the loop learns of the landing.
    sample_row_s: drawing a token on the host, for rows that want it there; in a thread of its own.
    """

    before_s: float = 0.0
    before_row_s: float = 0.0
    launch_s: float = 0.0
    after_s: float = 0.0
    after_row_s: float = 0.0
    sample_row_s: float = 0.0
    num_threads: int = 1

    def scaled(self, factor: float) -> "HostCosts":
        """A processor that takes ``factor`` times as long."""
        values = {name: value * factor for name, value in asdict(self).items() if name != "num_threads"}
        return replace(self, **values)


def fit_step_costs(shapes: Sequence[StepShape], seconds: Sequence[float], *, kv_bytes_per_token: int) -> StepCosts:
    """The costs that give these steps these times, none below 0, with the least relative error squared.

    Which steps the matrices bind is one number, the fewest tokens of such a step: each is tried. ``prefill_token_s``
    stays 0, for ``matrix_token_s`` tells the same. noise: the root mean square of the relative error that is left.
    """
    times = np.array(seconds, np.float64)
    rows = np.array([shape.num_rows for shape in shapes], np.float64)
    tokens = rows + [shape.num_prefill_tokens for shape in shapes]
    others = [
        rows,
        np.array([shape.kv_tokens * kv_bytes_per_token for shape in shapes], np.float64),
        np.array([shape.num_pairs for shape in shapes], np.float64),
        np.array([shape.mean_context for shape in shapes], np.float64),
    ]
    best: StepCosts | None = None
    for fewest in (*np.unique(tokens)[1:], np.inf):
        bound = tokens >= fewest
        first = (np.ones(len(times)), ~bound, np.where(bound, tokens, 0.0))
        columns = np.column_stack([*first, *others]) / times[:, None]
        fixed_s, weights_s, matrix_token_s, row_s, kv_byte_s, pair_s, context_s = _least_squares_nonnegative(
            columns
        ).tolist()
        found = StepCosts(
            fixed_s=fixed_s,
            weights_s=weights_s,
            matrix_token_s=matrix_token_s,
            row_s=row_s,
            kv_byte_s=kv_byte_s,
            pair_s=pair_s,
            context_s=context_s,
            kv_bytes_per_token=kv_bytes_per_token,
        )
        errors = np.array([found.seconds(shape) for shape in shapes]) / times - 1.0
        found = replace(found, noise=float(np.sqrt(np.mean(errors**2))))
        if best is None or found.noise < best.noise:
            best = found
    assert best is not None
    return best


def _least_squares_nonnegative(matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    """Factors, none below 0, of the columns that bring every row nearest to 1.

    Plain least squares, again without the most negative factor until there is none. Columns are scaled to one length,
    for a byte costs ten orders of magnitude less than a step.
    """
    lengths = np.linalg.norm(matrix, axis=0)
    used = [index for index in range(matrix.shape[1]) if lengths[index] > 0]
    found = np.zeros(matrix.shape[1])
    while used:
        solution = np.linalg.lstsq(matrix[:, used] / lengths[used], np.ones(len(matrix)), rcond=None)[0]
        worst = int(solution.argmin())
        if solution[worst] >= 0:
            found[used] = solution / lengths[used]
            break
        del used[worst]
    return found


_NORMAL_P90: Final = 1.2816
"""The normal distribution's 0.9 quantile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSteps:
    """One model's part of a log: what its steps were and how long each took, device_s and launch_s in seconds.

    spreads: of the steps that were repeated often, the logarithm of their p90 by their median.
    """

    name: str
    origin: str
    kv_bytes_per_token: int
    weight_bytes: int
    shapes: tuple[StepShape, ...]
    device_s: tuple[float, ...]
    launch_s: tuple[float, ...]
    spreads: tuple[float, ...]

    def costs(self) -> StepCosts:
        """The fit. noise: by the spreads where there are any, since what the fit misses is the same at every step."""
        fitted = fit_step_costs(self.shapes, self.device_s, kv_bytes_per_token=self.kv_bytes_per_token)
        if not self.spreads:
            return fitted
        return replace(fitted, noise=float(np.median(self.spreads)) / _NORMAL_P90)


def read_step_log(path: Path = STEP_LOG) -> dict[str, ModelSteps]:
    """Every model of a log by its name. Raises OSError, ValueError or KeyError for a file that is none."""
    log: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    names = {field.name for field in fields(StepShape)}
    return {
        name: ModelSteps(
            name=name,
            origin=log["origin"],
            kv_bytes_per_token=model["kv_bytes_per_token"],
            weight_bytes=model["weight_bytes"],
            shapes=tuple(StepShape(**{key: step[key] for key in names}) for step in model["steps"]),
            device_s=tuple(step["device_ms"] / 1e3 for step in model["steps"]),
            launch_s=tuple(step["launch_ms"] / 1e3 for step in model["steps"] if "launch_ms" in step),
            spreads=tuple(
                math.log(step["device_ms_p90"] / step["device_ms"])
                for step in model["steps"]
                if "device_ms_p90" in step
            ),
        )
        for name, model in log["shapes"].items()
    }


@cache
def h200_costs(name: str) -> StepCosts:
    """Costs of "8b" or "1b" as fitted to the log of real steps that is shipped."""
    return read_step_log()[name].costs()
