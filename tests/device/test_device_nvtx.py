"""Ranges go to torch's binding where there is CUDA, and are refused quietly where there is none."""

import pytest
import torch

from aserve.device.nvtx import NvtxRanges, open_ranges

pytestmark = pytest.mark.torch


def test_no_cuda_no_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """A setting for a profiler must not stop a server on a machine without a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    assert open_ranges() is None


def test_ranges_reach_the_binding(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the names that torch gives them, with the id of a range of the process handed back."""
    calls: list[tuple[object, ...]] = []
    for name, result in (("range_push", 0), ("range_pop", 0), ("range_start", 7), ("range_end", None)):
        monkeypatch.setattr(
            torch.cuda.nvtx, name, lambda *args, name=name, result=result: calls.append((name, *args)) or result
        )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    ranges = open_ranges()
    assert isinstance(ranges, NvtxRanges)
    ranges.push("a")
    range_id = ranges.start("b")
    ranges.pop()
    ranges.end(range_id)

    assert calls == [("range_push", "a"), ("range_start", "b"), ("range_pop",), ("range_end", 7)]
