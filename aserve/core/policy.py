"""When the next step is launched. Sees launches and landings only, never what a step costs."""

from collections.abc import Callable
from typing import Final

OVERLAP_DEPTH: Final = 2
"""One step running and one queued behind it hide all steady host work; deeper added nothing without jitter."""

Policy = Callable[[int, int], bool]
"""(steps in flight, max_inflight) -> whether a step may be composed now."""


def sync(num_inflight: int, max_inflight: int) -> bool:
    """After each landing: the host works while the device idles. The baseline, and what the others are held against."""
    return num_inflight == 0


def overlap(num_inflight: int, max_inflight: int) -> bool:
    """Whenever fewer than two are out."""
    return num_inflight < min(OVERLAP_DEPTH, max_inflight)


def eager(num_inflight: int, max_inflight: int) -> bool:
    """Whenever there is a permit. Fragments batches; for tests of depth and for the laboratory."""
    return num_inflight < max_inflight


POLICIES: Final[dict[str, Policy]] = {"sync": sync, "overlap": overlap, "eager": eager}
