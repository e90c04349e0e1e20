"""Stage 4: launched steps that have not landed. Each stream's land in launch order, two streams' as they come."""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from aserve.core.ids import NO_STEP, StepNumber
from aserve.core.plan import BatchPlan
from aserve.core.sequence import Sequence
from aserve.core.slots import Rows


@dataclass(slots=True, eq=False, kw_only=True)
class InflightStep:
    """What a landing needs of its launch. R sampling rows: the plan's decode rows, then its last chunks.

    positions: int32 [R], where the tokens go that the rows sample: as many come before. edges: rows that reach
    ``SlotBook.room``: their token may be the last one allowed, or the first behind a full block. chunks: the sequence
    of each of the plan's chunks.
    reads: debug builds only, the (blocks, generations) that the step was composed with.
    lost: the launch failed and its sequences have been told; the step only takes its place in the order.
    """

    plan: BatchPlan
    rows: Rows
    positions: NDArray[np.int32]
    edges: list[int]
    chunks: list[Sequence]
    reads: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None
    lost: bool = False

    def sequences(self) -> Iterator[Sequence]:
        """Every sequence that the step lists, but for rows whose sequence is over; with a last chunk it comes twice."""
        yield from self.rows.sequences()
        yield from self.chunks


@dataclass(slots=True)
class Inflight:
    """At most ``max_inflight`` steps; the count that the engine's permits are held against."""

    max_inflight: int
    _steps: OrderedDict[StepNumber, InflightStep] = field(default_factory=OrderedDict)
    _newest: StepNumber = NO_STEP

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[InflightStep]:
        return iter(self._steps.values())

    @property
    def landed(self) -> StepNumber:
        """The highest k such that every step up to k has landed, whatever its stream."""
        return StepNumber(next(iter(self._steps)) - 1) if self._steps else self._newest

    def num_on(self, stream: int) -> int:
        return sum(step.plan.stream == stream for step in self)

    def push(self, step: InflightStep) -> None:
        assert len(self._steps) < self.max_inflight, "more steps than permits"
        self._steps[step.plan.step] = step
        self._newest = step.plan.step

    def get(self, step: StepNumber) -> InflightStep:
        return self._steps[step]

    def pop(self, step: StepNumber) -> InflightStep:
        """The oldest step of its stream; any other is a lander that commits out of order."""
        landing = self._steps[step]
        oldest = next(each.plan.step for each in self if each.plan.stream == landing.plan.stream)
        assert step == oldest, f"step {step} landed before step {oldest}"
        return self._steps.pop(step)
