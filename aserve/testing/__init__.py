"""Shipped fakes: a clock, a completion, a tokenizer and two devices that a test controls. No torch.

``ScriptedRunner`` says what a test tells it to, when the test lets it. ``MemoryRunner`` is a device without arithmetic:
it has blocks, a slot table, staging buffers and a result ring, and makes each token from everything that it reads, so
that a stale or foreign read changes the output.
"""

from aserve.testing.manual import ManualClock, ManualEvent
from aserve.testing.memory import DeviceBugs, MemoryRunner, expected_tokens
from aserve.testing.scripted import Script, ScriptedRunner
from aserve.testing.text import ByteTokenizer

__all__ = [
    "ByteTokenizer",
    "DeviceBugs",
    "ManualClock",
    "ManualEvent",
    "MemoryRunner",
    "Script",
    "ScriptedRunner",
    "expected_tokens",
]
