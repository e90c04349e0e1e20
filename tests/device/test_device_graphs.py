"""Which sizes of steps are captured, and what a capture is made of."""

import gc
from typing import ClassVar

import pytest
import torch

from aserve.device.graphs import CudaDevice, fitting, row_buckets, token_buckets

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("largest", [1, 2, 5, 8, 17, 64, 100, 256, 1000])
def test_row_buckets_rise_to_the_largest(largest: int) -> None:
    """Every number of rows has one, and none is larger than needed."""
    buckets = row_buckets(largest)

    assert buckets == sorted(set(buckets))
    assert buckets[-1] == largest


@pytest.mark.parametrize("largest", [4, 16, 48, 512, 600, 2048, 8192])
def test_token_buckets_rise_to_the_largest(largest: int) -> None:
    """The same for tokens of steps with chunks."""
    buckets = token_buckets(largest)

    assert buckets == sorted(set(buckets))
    assert buckets[-1] == largest


def test_padding_stays_within_a_quarter_above_some_hundred_tokens() -> None:
    """Below, weights take the time, and padding costs little."""
    buckets = token_buckets(8192)

    assert max(fitting(buckets, size) / size for size in range(256, 8193)) <= 1.25


def test_the_smallest_bucket_that_fits() -> None:
    """Exact sizes have their own."""
    assert [fitting([1, 2, 4, 8], size) for size in (1, 2, 3, 8)] == [1, 2, 4, 8]


class _Graph:
    """Stands for ``torch.cuda.CUDAGraph``. log: what was done with all of them; begins_max: more than so many fail."""

    log: ClassVar[list[str]] = []
    begins_max: ClassVar[int] = 100

    def capture_begin(self, **options: object) -> None:
        if self.log.count("begin") == self.begins_max:
            raise MemoryError("no graph any more")
        self.log.append("begin")

    def capture_end(self) -> None:
        self.log.append("end")

    def replay(self) -> None:
        self.log.append(f"replay {id(self)}")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> CudaDevice:
    """One whose graphs are not a GPU's."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", _Graph)
    monkeypatch.setattr(_Graph, "log", [])
    device = object.__new__(CudaDevice)
    device._pool, device._capturing, device._captured = None, None, []  # type: ignore[assignment]
    return device


def test_each_cut_begins_a_part(device: CudaDevice) -> None:
    """They are replayed by themselves, in their order; outside of a capture a cut is nothing."""

    def run() -> None:
        device.cut()
        _Graph.log.append("work")
        device.cut()

    device.cut()
    replays = device.capture(run)
    captured = list(_Graph.log)
    for replay in replays:
        replay()

    assert captured == ["begin", "end", "begin", "work", "end", "begin", "end"]
    assert len(set(_Graph.log[len(captured) :])) == len(replays) == 3


@pytest.mark.parametrize("is_on", [True, False])
def test_nothing_is_collected_while_a_graph_is_captured(device: CudaDevice, is_on: bool) -> None:
    """An older graph that the collector destroys then would break it; afterwards the collector is as it was."""
    was_on = gc.isenabled()
    found = []
    try:
        (gc.enable if is_on else gc.disable)()
        device.capture(lambda: found.append(gc.isenabled()))
        with pytest.raises(ZeroDivisionError):
            device.capture(lambda: 1 // 0)  # type: ignore[arg-type,return-value]
        found.append(gc.isenabled())
    finally:
        (gc.enable if was_on else gc.disable)()

    assert found == [False, is_on]
    assert _Graph.log == ["begin", "end"] * 2


def test_a_cut_that_cannot_go_on_tells_why(device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is ended twice, and the next capture is as any."""
    monkeypatch.setattr(_Graph, "begins_max", 1)
    with pytest.raises(MemoryError, match="no graph any more"):
        device.capture(device.cut)
    monkeypatch.setattr(_Graph, "begins_max", 100)

    assert _Graph.log == ["begin", "end"]
    assert len(device.capture(lambda: None)) == 1
