"""The start of a CUDA runner, over steps that compute nothing on a device that keeps accounts of its memory."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parent.parent))

from cuda_builders import EagerDevice
from families import hf_model, save

from aserve.core.options import SchedulerOptions
from aserve.errors import ModelError, NotOnGpu
from aserve.model import cuda_start
from aserve.model.batch import KVShape
from aserve.model.config import ModelConfig
from aserve.model.cuda_start import load_cuda_runner
from aserve.model.kv_tensors import KVTensors
from aserve.model.options import ModelOptions

pytestmark = pytest.mark.torch

Size = tuple[int, int, bool]


class CountingDevice(EagerDevice):
    """Free memory goes as the steps take it."""

    name = "counting"

    def __init__(self, *, priority: int = 0) -> None:
        self.free = 1 << 30

    def free_bytes(self) -> int:
        return self.free


class CountedSteps:
    """CudaSteps of 17 sizes. Their graphs share a pool that grows to the largest one's activations.

    once_bytes: what the first graph takes beside. fail: called as all graphs are to be made.
    """

    def __init__(
        self,
        device: CountingDevice,
        *,
        graph_bytes: int = 0,
        token_bytes: int = 0,
        once_bytes: int = 0,
        fail: Callable[[], None] = lambda: None,
    ) -> None:
        self.device = device
        self._graph_bytes, self._token_bytes, self._once_bytes = graph_bytes, token_bytes, once_bytes
        self._fail = fail
        self._pool_bytes = 0

    def use(self, kv: KVTensors | None) -> None: ...

    def apply(self) -> None: ...

    def run(self, size: Size) -> None: ...

    def sizes(self) -> list[Size]:
        return [(4, 16 * count, True) for count in range(17, 0, -1)]

    def capture(self, size: Size) -> None:
        pool_bytes = max(self._pool_bytes, self._token_bytes * size[1])
        self.device.free -= self._graph_bytes + self._once_bytes + pool_bytes - self._pool_bytes
        self._pool_bytes, self._once_bytes = pool_bytes, 0

    def capture_all(self) -> None:
        self._fail()
        for size in self.sizes():
            self.capture(size)


@pytest.mark.parametrize(
    "costs",
    [
        {"graph_bytes": 1000, "once_bytes": 70_000},
        {"graph_bytes": 1000, "token_bytes": 4096, "once_bytes": 70_000},
        {"token_bytes": 4096},
    ],
    ids=["native", "fallback", "pool alone"],
)
def test_what_graphs_share_is_counted_once(costs: dict[str, int]) -> None:
    """A few trials foretell what all of them take, with activations in the graphs' pool or outside."""
    device = CountingDevice()
    foretold = cuda_start._warm_up(CountedSteps(device, **costs), device)  # type: ignore[arg-type]
    device = CountingDevice()
    before = device.free
    CountedSteps(device, **costs).capture_all()

    assert foretold == before - device.free


def test_a_single_size_is_its_own_trial() -> None:
    """There are no others to go by."""
    device = CountingDevice()
    steps = CountedSteps(device, graph_bytes=1000, once_bytes=70_000)
    steps.sizes = lambda: [(1, 1, False)]  # type: ignore[method-assign]

    assert cuda_start._warm_up(steps, device) == 71_000  # type: ignore[arg-type]


def start(folder: Path, monkeypatch: pytest.MonkeyPatch, fail: Callable[[], None]) -> None:
    """Load the folder's model as far as all of its graphs, where ``fail`` raises."""

    def load_decoder(options: Any, folder: Any, config: Any, *args: Any) -> Any:
        shape = KVShape(num_layers=1, num_kv_heads=1, head_dim=16, dtype=torch.float32, layout="blocks")
        return SimpleNamespace(config=config, kv_shape=shape, weight_bytes=0)

    monkeypatch.setattr(cuda_start, "CudaDevice", CountingDevice)
    monkeypatch.setattr(cuda_start, "_load_decoder", load_decoder)
    monkeypatch.setattr(cuda_start, "make_lanes", lambda _, devices, __: [CountedSteps(devices[0], fail=fail)])
    monkeypatch.setattr(cuda_start, "_compile", lambda lanes: None)
    load_cuda_runner(ModelOptions(dtype="float32"), SchedulerOptions(num_blocks=8), folder)


def test_a_size_that_no_trial_met_is_refused_like_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All sizes are captured after a few were tried: one of them may be the first that does not go."""
    folder = save(hf_model("olmo2"), tmp_path)

    def fail() -> None:
        raise RuntimeError("operation not permitted\nwhen a stream is capturing")

    with pytest.raises(NotOnGpu, match=r"CUDA graph \(operation not permitted\): set model\.device to cpu"):
        start(folder, monkeypatch, fail)


@pytest.mark.parametrize("fails_again", [False, True])
def test_a_capture_that_lacks_memory_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_again: bool
) -> None:
    """Also where ending the broken capture fails in its turn: it is no fault of the model's code."""
    folder = save(hf_model("olmo2"), tmp_path)

    def fail() -> None:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory")
        finally:
            if fails_again:
                raise RuntimeError("capturing stream has unjoined work")

    with pytest.raises(ModelError, match="Too little device memory") as caught:
        start(folder, monkeypatch, fail)

    assert type(caught.value) is ModelError


def test_a_fault_under_our_own_decoder_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its graphs are no question of the model."""
    folder = save(hf_model("llama"), tmp_path)

    def fail() -> None:
        raise RuntimeError("ours")

    with pytest.raises(RuntimeError, match="ours"):
        start(folder, monkeypatch, fail)


@pytest.mark.parametrize(("num_layer_parameters", "given", "expected"), [
    (10**9, 0, 2048), (7 * 10**9, 0, 1024), (None, 0, 1024), (10**9, 700, 700),
])  # fmt: skip
def test_a_steps_tokens_follow_from_the_models_size(
    num_layer_parameters: int | None, given: int, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where they are left open."""
    folder = save(hf_model("llama", num_hidden_layers=1), tmp_path / "tiny")
    found: list[SchedulerOptions] = []
    monkeypatch.setattr(ModelConfig, "num_layer_parameters", num_layer_parameters)
    monkeypatch.setattr(cuda_start, "_load", lambda options, scheduler, *rest: found.append(scheduler))
    load_cuda_runner(ModelOptions(), SchedulerOptions(max_num_batched_tokens=given), folder)

    assert [(each.max_num_seqs, each.max_num_batched_tokens) for each in found] == [(256, expected)]
