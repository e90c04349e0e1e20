"""What runners have in common once logits are there: the rows of a result, and the figures of steps.

Shape suffix: R rows that sample.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from aserve.core.plan import FLAG_DONE, FLAG_INVALID, BatchPlan, Logprobs
from aserve.model.sampler import SampledTokens, SamplingRows

Kind = Literal["decode", "prefill", "mixed"]


@dataclass(slots=True)
class KindTimes:
    """Of one kind of step. Written by one thread, read by anybody."""

    num_steps: int = 0
    seconds: float = 0.0
    last_s: float = 0.0

    def add(self, seconds: float) -> None:
        self.num_steps += 1
        self.seconds += seconds
        self.last_s = seconds


@dataclass(slots=True)
class StepCounters:
    """Written by the device thread, on a GPU by the loop; read by anybody."""

    times: dict[Kind, KindTimes] = field(
        default_factory=lambda: {"decode": KindTimes(), "prefill": KindTimes(), "mixed": KindTimes()}
    )
    num_failed: int = 0
    num_tokens_computed: int = 0
    num_tokens_sampled: int = 0

    def figures(self) -> dict[str, float]:
        """For ``Runner.statistics``: totals since the start; failed steps have no time."""
        figures: dict[str, float] = {}
        for kind, times in self.times.items():
            figures[f"steps_{kind}"] = times.num_steps
            figures[f"step_seconds_{kind}"] = times.seconds
            figures[f"step_last_ms_{kind}"] = times.last_s * 1e3
        figures["steps_failed"] = self.num_failed
        figures["tokens_computed"] = self.num_tokens_computed
        figures["tokens_sampled"] = self.num_tokens_sampled
        return figures


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledPart:
    """Some of a result's rows: int64 [n] rows, int32 [n] tokens, uint8 [n] flags."""

    rows: NDArray[np.int64]
    tokens: NDArray[np.int32]
    flags: NDArray[np.uint8]
    logprobs: Logprobs | None


def kind_of(plan: BatchPlan) -> Kind:
    if not plan.chunks:
        return "decode"
    return "mixed" if len(plan.rows) else "prefill"


def sampled_part(indices: NDArray[np.int64], rows: SamplingRows, sampled: SampledTokens) -> SampledPart:
    """A sampler's output as the host reads it. A row that was done before is done, whatever its logits are."""
    done_R = rows.end.done_R
    ended_R = done_R | (rows.end.ended(sampled.tokens_R) & ~sampled.invalid_R)
    flags_R = ended_R * np.uint8(FLAG_DONE) + (sampled.invalid_R & ~done_R) * np.uint8(FLAG_INVALID)
    return SampledPart(
        rows=indices,
        tokens=sampled.tokens_R.astype(np.int32),
        flags=flags_R,
        logprobs=sampled.logprobs,
    )


def in_row_order(parts: Sequence[SampledPart]) -> SampledPart:
    if len(parts) == 1:
        return parts[0]
    order = np.argsort(np.concatenate([part.rows for part in parts]))
    logprobs = [part.logprobs for part in parts if part.logprobs is not None]
    return SampledPart(
        rows=np.arange(len(order)),
        tokens=np.concatenate([part.tokens for part in parts])[order],
        flags=np.concatenate([part.flags for part in parts])[order],
        logprobs=Logprobs(
            token_logprobs=np.concatenate([part.token_logprobs for part in logprobs])[order],
            ranks=np.concatenate([part.ranks for part in logprobs])[order],
            top_ids=np.concatenate([part.top_ids for part in logprobs])[order],
            top_logprobs=np.concatenate([part.top_logprobs for part in logprobs])[order],
        )
        if logprobs
        else None,
    )
