"""Host and device on one clock: what the event loop was at while no kernel ran, and a picture of both for Perfetto.

Kernels come from torch's profiler, which stamps them with the wall clock; the host's work from the engine's own trace,
by the loop's clock.
"""

import dataclasses
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from aserve.engine.trace import Cut
from aserve.obs.trace import Slice, Timeline, render

SHORTEST_IDLE_S: Final = 5e-6
"""Less than that between two kernels is how they follow each other."""

KEPT_S: Final = 0.1
"""Of the end of the measured time, in the file."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """By the loop's clock."""

    name: str
    start_s: float
    end_s: float


def kernels_of(profiler: Any) -> list[Kernel]:
    """All that ran on the device, copies too, by their begin. For the process that made the profile, soon after."""
    import torch

    offset_s = time.time() - time.monotonic()
    kind = torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]  # it is there
    found = [
        Kernel(event.name(), start_s := event.start_ns() / 1e9 - offset_s, start_s + event.duration_ns() / 1e9)
        for event in profiler.profiler.kineto_results.events()
        if event.device_type() == kind
    ]
    return sorted(found, key=lambda kernel: kernel.start_s)


def idle_gaps(kernels: Sequence[Kernel], shortest_s: float = SHORTEST_IDLE_S) -> list[tuple[float, float]]:
    """When none ran between the first and the last. kernels: by their begin; they may overlap."""
    gaps, reached_s = [], kernels[0].start_s if kernels else 0.0
    for kernel in kernels:
        if kernel.start_s - reached_s >= shortest_s:
            gaps.append((reached_s, kernel.start_s))
        reached_s = max(reached_s, kernel.end_s)
    return gaps


def idle_by_host(gaps: Sequence[tuple[float, float]], host: Iterable[Slice]) -> dict[str, float]:
    """Seconds of the gaps by what the loop was at, "other" for what is in no slice. host: may not overlap."""
    found: dict[str, float] = defaultdict(float)
    ends_s = [end_s for _, end_s in gaps]
    for work in host:
        work_end_s = work.start_s if work.end_s is None else work.end_s
        for start_s, end_s in gaps[bisect_right(ends_s, work.start_s) :]:
            if start_s >= work_end_s:
                break
            found[work.name] += min(end_s, work_end_s) - max(start_s, work.start_s)
    found["other"] = sum(end_s - start_s for start_s, end_s in gaps) - sum(found.values())
    return dict(found)


def host_slices(cut: Cut) -> list[Slice]:
    """The loop's work on steps, launches among it, by their begin."""
    lanes = cut.timeline("").lanes
    return sorted([*lanes["loop"], *lanes["launch"]], key=lambda each: each.start_s)


def write(cut: Cut, kernels: Sequence[Kernel], path: Path, seconds: float = KEPT_S) -> None:
    """The last ``seconds`` of both as one file, kernels in a lane below the engine's."""
    timeline = cut.timeline("aserve")
    end_s = kernels[-1].end_s if kernels else timeline.end_s
    shown: Timeline = dataclasses.replace(
        timeline,
        start_s=end_s - seconds,
        end_s=end_s,
        lanes={
            **timeline.lanes,
            "kernels": [Slice(name=each.name[:80], start_s=each.start_s, end_s=each.end_s) for each in kernels],
        },
    )
    path.write_bytes(render([shown]))
