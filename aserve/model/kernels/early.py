"""Programmatic dependent launch: a kernel that begins while the one in front of it still runs.

Launched with ``launch_pdl``, a kernel's programs start as soon as those of the kernel in front have all begun and there
is room; see "Programmatic Dependent Launch" in the CUDA Programming Guide. What is gained is the time between the two.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def begin_early(EARLY: tl.constexpr):
    """Lets the next kernel begin, and waits until all before this one are done. Before anything is read or written.

    Waiting comes before the end of every kernel in a row, so that each may rely on all that lie before it.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


def early_launch(early: bool) -> dict[str, Any]:
    """What a kernel that calls ``begin_early`` is launched with."""
    return {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}


def can_begin_early(device: torch.device) -> bool:
    """From compute capability 9.0 on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
