"""Shipped fakes: clocks, a completion, a tokenizer and three devices that a test controls. No torch.

``ScriptedRunner`` says what a test tells it to, when the test lets it. ``MemoryRunner`` is a device without arithmetic:
it has blocks, a slot table, staging buffers and a result ring, and makes each token from everything that it reads, so
that a stale or foreign read changes the output. ``VirtualDevice`` has time in place of arithmetic: costs of real steps,
on the virtual clock of ``run_virtual``, for questions about scheduling, races and planning.
"""

from aserve.testing.manual import ManualClock, ManualEvent
from aserve.testing.memory import DeviceBugs, MemoryRunner, expected_tokens
from aserve.testing.scripted import Script, ScriptedRunner
from aserve.testing.text import ByteTokenizer
from aserve.testing.virtual import VirtualDevice, VirtualStep, idle_share
from aserve.testing.virtual_costs import (
    STEP_LOG,
    HostCosts,
    StepCosts,
    StepShape,
    fit_step_costs,
    h200_costs,
    read_step_log,
)
from aserve.testing.virtual_loop import NothingWillHappen, VirtualAlarm, VirtualLoop, run_virtual

__all__ = [
    "STEP_LOG",
    "ByteTokenizer",
    "DeviceBugs",
    "HostCosts",
    "ManualClock",
    "ManualEvent",
    "MemoryRunner",
    "NothingWillHappen",
    "Script",
    "ScriptedRunner",
    "StepCosts",
    "StepShape",
    "VirtualAlarm",
    "VirtualDevice",
    "VirtualLoop",
    "VirtualStep",
    "expected_tokens",
    "fit_step_costs",
    "h200_costs",
    "idle_share",
    "read_step_log",
    "run_virtual",
]
