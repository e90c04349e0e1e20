"""A CudaRunner on whatever there is: the GPU, or the CPU with Triton's interpreter; and a host that makes its plans."""

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kernel_builders import DEVICE
from torch import Tensor

from aserve.core.ids import Epoch, Slot, StepNumber
from aserve.core.plan import BatchPlan, Chunk, Join
from aserve.core.request import SamplingParams
from aserve.device.graphs import CudaDevice, StepDevice
from aserve.engine.ports import RunnerInfo
from aserve.model.config import ModelConfig
from aserve.model.cuda_decoder import CudaDecoder, StepDecoder
from aserve.model.cuda_fallback import load_cuda_fallback
from aserve.model.cuda_runner import CudaFlight, CudaRunner
from aserve.model.cuda_steps import StepLimits
from aserve.model.cuda_streams import CudaStreams, join_lanes, make_lanes
from aserve.model.kernels.attention_backend import AttentionBackend
from aserve.model.kv_tensors import KVTensors
from aserve.model.loader import open_weights

GREEDY = SamplingParams(temperature=0)
RING_STEPS = 8


class PassedEvent:
    """Of a device that does everything at once."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


class EagerDevice:
    """A StepDevice without streams and graphs: kernels run when they are launched, a replay launches them again.

    num_cuts: of every step, into the part in which all is computed and as many that do nothing.
    """

    device = torch.device("cpu")
    side = None
    num_multiprocessors = 2

    def scope(self) -> AbstractContextManager[object]:
        return nullcontext()

    def pinned(self, *size: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(size, dtype=dtype)

    def __init__(self, num_cuts: int = 0) -> None:
        self._num_cuts = num_cuts

    def capture(self, run: Callable[[], None]) -> tuple[Callable[[], None], ...]:
        # A graph's kernels ask for no mode; torch's functions, which stand for some of them here, do.
        return (torch.inference_mode()(run), *[lambda: None] * self._num_cuts)

    def cut(self) -> None: ...

    def forget(self) -> None: ...

    def record(self, *, blocking: bool = False) -> PassedEvent:
        return PassedEvent()

    def synchronize(self) -> None: ...

    def explain(self, error: Exception) -> Exception:
        return error


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of a runner for tests."""

    max_num_seqs: int = 4
    max_num_tokens: int = 32
    max_model_len: int = 64
    block_size: int = 8
    num_blocks: int = 40


def make_runner(
    folder: Path,
    sizes: Sizes | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    reference: bool = False,
    samples_on_host: bool = False,
    has_short_form: bool | None = None,
    attention: AttentionBackend | None = None,
    num_cuts: int = 0,
    begins_later: bool = True,
) -> CudaRunner:
    """All of the cache that no sequence has written is NaN.

    has_short_form: whether few rows take the decoder's short form; by the type, unless given. num_cuts: of
    every step, where there is no GPU; there, those of more layers than ``LAYERS_A_LAUNCH`` are cut.
    """
    device: StepDevice = CudaDevice() if DEVICE == "cuda" else EagerDevice(num_cuts)
    runner = _make(
        folder,
        [device],
        sizes,
        dtype=dtype,
        reference=reference,
        samples_on_host=samples_on_host,
        has_short_form=has_short_form,
        attention=attention,
        begins_later=begins_later,
    )
    assert isinstance(runner, CudaRunner)
    return runner


def make_streams(folder: Path, sizes: Sizes | None = None, *, samples_on_host: bool = False) -> CudaStreams:
    """The same in float32, of two streams."""
    devices: list[StepDevice] = (
        [CudaDevice(priority=-1), CudaDevice()] if DEVICE == "cuda" else [EagerDevice(), EagerDevice()]
    )
    runner = _make(folder, devices, sizes, dtype=torch.float32, samples_on_host=samples_on_host)
    assert isinstance(runner, CudaStreams)
    return runner


def _make(
    folder: Path,
    devices: list[StepDevice],
    sizes: Sizes | None,
    *,
    dtype: torch.dtype,
    reference: bool = False,
    samples_on_host: bool = False,
    has_short_form: bool | None = None,
    attention: AttentionBackend | None = None,
    begins_later: bool = True,
) -> CudaRunner | CudaStreams:
    sizes = sizes or Sizes()
    config = ModelConfig.from_folder(folder)
    device = devices[0]
    with torch.inference_mode(), device.scope():
        decoder: StepDecoder
        if config.decoder is None:
            decoder = load_cuda_fallback(folder, config, dtype=dtype, device=device.device, dummy=False)
            decoder.try_out(device.num_multiprocessors)
        else:
            read = open_weights(folder, config, dtype=dtype, device=device.device)
            forms = {} if has_short_form is None else {"short_dtypes": (dtype,) if has_short_form else ()}
            # Cloned, since memory of its own lies where the short form can read it, as all of a GPU's does.
            decoder = CudaDecoder(
                config,
                lambda name: read(name).clone(),
                dtype=dtype,
                reference=reference,
                attention=attention,
                **forms,
            )
            if has_short_form is not None:
                assert decoder.has_short_form == has_short_form
        limits = StepLimits(
            max_num_seqs=sizes.max_num_seqs,
            max_num_tokens=sizes.max_num_tokens,
            max_model_len=sizes.max_model_len,
            block_size=sizes.block_size,
            ring_steps=RING_STEPS,
        )
        lanes = make_lanes(decoder, devices, limits)
        kv = KVTensors.allocate(
            decoder.kv_shape, num_blocks=sizes.num_blocks, block_size=sizes.block_size, device=device.device
        )
        kv.poison()
        device.synchronize()
        for lane in lanes:
            lane.use(kv)
            with lane.device.scope():
                if DEVICE == "cuda":
                    for size in lane.sizes():
                        lane.run(size)
                lane.capture_all()
                lane.apply()  # as at a start, where kernels have run before the first launch
            lane.device.synchronize()
        kv.poison()
        device.synchronize()
    info = RunnerInfo(
        model_name=folder.name,
        device=str(device.device),
        vocab_size=decoder.config.vocab_size,
        max_model_len=sizes.max_model_len,
        num_blocks=sizes.num_blocks,
        block_size=sizes.block_size,
        max_num_seqs=sizes.max_num_seqs,
    )
    with torch.inference_mode():  # as at a start
        return join_lanes(lanes, kv, info, samples_on_host=samples_on_host, begins_later=begins_later)


class PlanHost:
    """Makes plans and launches them: the bookkeeping of a scheduler, as little as the tests need."""

    def __init__(self, runner: CudaRunner | CudaStreams) -> None:
        self.runner = runner
        self.size = runner.info.block_size
        self._steps = itertools.count(1)
        order = torch.randperm(runner.info.num_blocks, generator=torch.Generator().manual_seed(3)) + 1
        self.free: list[int] = order.tolist()

    def launch(self, **fields: Any) -> CudaFlight:
        for name, shape in (("leaves", (-1,)), ("table_writes", (-1, 3)), ("token_writes", (-1, 3)), ("rows", (-1, 2))):
            if name in fields:
                fields[name] = np.array(fields[name], np.int32).reshape(shape)
        return self.runner.launch(BatchPlan(step=StepNumber(next(self._steps)), **fields))

    @torch.inference_mode()
    def poison(self, blocks: list[int]) -> None:
        """NaN into these blocks, once all that is out has been done."""
        with self.runner._device.scope():
            self.runner._kv.poison(blocks)
        self.runner._device.synchronize()

    def table(self, slot: int, num_tokens: int, blocks: Sequence[int] = ()) -> list[tuple[int, int, int]]:
        """Writes of a table for so many tokens: these blocks first, then fresh ones."""
        fresh = [self.free.pop() for _ in range(-(-num_tokens // self.size) - len(blocks))]
        return [(slot, index, block) for index, block in enumerate([*blocks, *fresh])]

    def prefill(
        self, slot: int, prompt: Sequence[int], *, chunk: int = 64, room: int = 64, **changes: Any
    ) -> list[CudaFlight]:
        """Join ``slot`` and compute the prompt in chunks, all launched at once; the last flight samples."""
        flights = []
        for start in range(0, len(prompt), chunk):
            first = {}
            if not start:
                first = {"joins": (join(slot, prompt, **changes),), "table_writes": self.table(slot, room)}
            flights.append(self.launch(chunks=(chunk_of(slot, prompt, start, start + chunk),), **first))
        return flights

    async def generate(self, slot: int, prompt: Sequence[int], num_tokens: int, **changes: Any) -> list[int]:
        """Tokens of one sequence, up to six steps ahead of the landings."""
        flights = self.prefill(slot, prompt, **changes)[-1:]
        tokens = []
        for step in range(num_tokens - 1):
            flights.append(self.launch(rows=[(slot, len(prompt) + step)]))
            if len(flights) > 6:
                tokens += tokens_of(await flights.pop(0))
        for flight in flights:
            tokens += tokens_of(await flight)
        return tokens


def join(slot: int, prompt: Sequence[int], **changes: Any) -> Join:
    params = changes.pop("params", GREEDY)
    fields: dict[str, Any] = {
        "epoch": Epoch(1),
        "position": 0,
        "params": params,
        "seed": 17 + slot,
        "stop_ids": (),
        "min_length": 0,
        "max_length": 1 << 40,
        "num_prompt_tokens": len(prompt),
        "history": np.array(prompt if params.needs_history else [], np.int32),
    }
    return Join(slot=Slot(slot), **{**fields, **changes})


def chunk_of(slot: int, prompt: Sequence[int], start: int, end: int, k: int | None = None) -> Chunk:
    end = min(end, len(prompt))
    last = end == len(prompt)
    return Chunk(
        slot=Slot(slot),
        start=start,
        tokens=np.array(prompt[start:end], np.int32),
        last=last,
        prompt_logprobs_k=k,
        next_token=-1 if last else prompt[end],
    )


def tokens_of(result: Any) -> list[int]:
    tokens: list[int] = result.tokens[:, 0].tolist()
    return tokens
