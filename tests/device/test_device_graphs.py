"""Which sizes of steps are captured, and what a capture is made of."""

import ctypes
import gc
from types import SimpleNamespace
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

    def raw_cuda_graph_exec(self) -> int:
        return id(self)

    def replay(self) -> None:
        self.log.append(f"replay {id(self)}")


class _Driver:
    """Stands for CUDA's. code: what its call returns."""

    def __init__(self, code: int = 0) -> None:
        self.code = code

    def cuGraphUpload(self, graph_exec: ctypes.c_void_p, stream: ctypes.c_void_p) -> int:
        _Graph.log.append(f"upload {graph_exec.value} to {stream.value}")
        return self.code


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> CudaDevice:
    """One whose graphs are not a GPU's."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", _Graph)
    monkeypatch.setattr(_Graph, "log", [])
    device = object.__new__(CudaDevice)
    device._pool, device._capturing, device._captured = None, None, []  # type: ignore[assignment]
    device._driver, device._stream = _Driver(), SimpleNamespace(cuda_stream=7)  # type: ignore[assignment]
    return device


def events() -> list[str]:
    """What was done, without which graph it was done with."""
    return [entry.partition(" ")[0] for entry in _Graph.log]


def test_each_cut_begins_a_part(device: CudaDevice) -> None:
    """They are replayed by themselves, in their order; outside of a capture a cut is nothing."""

    def run() -> None:
        device.cut()
        _Graph.log.append("work")
        device.cut()

    device.cut()
    replays = device.capture(run)
    captured = events()
    for replay in replays:
        replay()

    assert [each for each in captured if each != "upload"] == ["begin", "end", "begin", "work", "end", "begin", "end"]
    assert len(set(_Graph.log[len(captured) :])) == len(replays) == 3


def test_a_graph_is_on_the_device_before_its_first_launch(device: CudaDevice) -> None:
    """Each part, once, on the stream that launches it."""
    replays = device.capture(device.cut)
    for replay in replays:
        replay()
    graphs = [entry.partition(" ")[2] for entry in _Graph.log if entry.startswith("replay")]

    assert events() == [*["begin", "end", "upload"] * 2, "replay", "replay"]
    assert [entry for entry in _Graph.log if entry.startswith("upload")] == [f"upload {each} to 7" for each in graphs]


@pytest.mark.parametrize(
    ("code", "expected", "says"),
    [(2, torch.OutOfMemoryError, "no memory left"), (700, RuntimeError, "CUDA error 700")],
)
def test_a_graph_that_does_not_get_there_is_an_error(
    code: int, expected: type[Exception], says: str, device: CudaDevice
) -> None:
    """What lacked memory is told apart; no replay is handed out."""
    device._driver = _Driver(code)  # type: ignore[assignment]
    with pytest.raises(expected, match=says):
        device.capture(lambda: None)
    device._driver = _Driver()  # type: ignore[assignment]

    assert len(device.capture(lambda: None)) == 1


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
    assert events() == ["begin", "end", "upload"] * 2


def test_a_cut_that_cannot_go_on_tells_why(device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is ended twice, and the next capture is as any."""
    monkeypatch.setattr(_Graph, "begins_max", 1)
    with pytest.raises(MemoryError, match="no graph any more"):
        device.capture(device.cut)
    monkeypatch.setattr(_Graph, "begins_max", 100)

    assert events() == ["begin", "end", "upload"]
    assert len(device.capture(lambda: None)) == 1
