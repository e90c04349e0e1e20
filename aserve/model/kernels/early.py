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
def wait_for_former(EARLY: tl.constexpr):
    """Until all kernels before this one are done. Before anything of theirs is read, and before anything is written.

    Every program has to wait: the kernel behind relies on this one for all that lie before both.
    """
    if EARLY:
        gdc_wait()


@triton.jit
def let_next_begin(EARLY: tl.constexpr):
    """Once all programs have called this, the next kernel's take what room there is. Behind the long part of the work:
    called at its start, the next ones crowd where there was room by chance, which costs more than it gains."""
    if EARLY:
        gdc_launch_dependents()


def early_launch(early: bool) -> dict[str, Any]:
    """What a kernel that may begin early is launched with."""
    return {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}


def can_begin_early(device: torch.device) -> bool:
    """From compute capability 9.0 on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
