"""A CUDA runner from a folder: weights, kernels, memory, graphs, in this order. Nothing of it happens after ready."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import torch

from aserve import faults
from aserve.core.options import SchedulerOptions
from aserve.device import memory
from aserve.device.graphs import CudaDevice
from aserve.engine.ports import RunnerInfo
from aserve.errors import ModelError, NotOnGpu
from aserve.model.config import ModelConfig
from aserve.model.cuda_decoder import CudaDecoder, StepDecoder
from aserve.model.cuda_runner import CudaRunner
from aserve.model.cuda_steps import CudaSteps, StepLimits
from aserve.model.cuda_streams import CudaStreams, join_lanes, make_lanes
from aserve.model.kernels.compile import compile_variants, variants_of
from aserve.model.kv_tensors import KVTensors
from aserve.model.loader import open_weights
from aserve.model.options import ModelOptions

MAX_NUM_SEQS: Final = 1024
"""One program ends a step of so many rows at most."""

MAX_REFERENCE_TOKENS: Final = 8192
"""Each of a step's tokens is a row of its own there, with up to 32 parts: one program plans them all, and 64 heads of
128 take 8 GiB for them."""

_UNKNOWN_MODEL_LEN: Final = 2048
_TRIAL_GRAPHS: Final = 4


def load_cuda_runner(options: ModelOptions, scheduler: SchedulerOptions, folder: Path) -> CudaRunner | CudaStreams:
    """As ``runner.load_runner``, for the first CUDA device. Blocks for seconds. Raises ModelError, of which NotOnGpu is
    for transformers' own code that a GPU does not run."""
    faults.hit("runner.load")
    config = ModelConfig.from_folder(folder)
    scheduler = scheduler.with_gpu_sizes(config.num_layer_parameters)
    _check(options, scheduler, config)
    try:
        return _load(options, scheduler, folder, config)
    except torch.OutOfMemoryError as error:
        raise ModelError(
            "Too little device memory for weights, a step's tensors and its graphs: lower "
            "scheduler.max_num_batched_tokens, scheduler.max_num_seqs or model.gpu_memory_utilization, or take a "
            "smaller model."
        ) from error


def _load(
    options: ModelOptions, scheduler: SchedulerOptions, folder: Path, config: ModelConfig
) -> CudaRunner | CudaStreams:
    # Of two streams, decode steps go first: they are short, and chunks would leave them no multiprocessor for long.
    has_streams = scheduler.prefill == "streams"
    device = CudaDevice(priority=-1 if has_streams else 0)
    devices = [device, CudaDevice()] if has_streams else [device]
    clock = _Stopwatch()
    budget_bytes = int(device.free_bytes() * options.gpu_memory_utilization)
    free_before = device.free_bytes()
    dtype = _dtype(options)
    with torch.inference_mode(), device.scope():
        decoder = _load_decoder(options, folder, config, device, dtype)
        config = decoder.config
        trained_len = config.max_position_embeddings or _UNKNOWN_MODEL_LEN
        limits = StepLimits(
            max_num_seqs=scheduler.max_num_seqs,
            max_num_tokens=scheduler.max_num_batched_tokens,
            max_model_len=min(scheduler.max_model_len or trained_len, trained_len),
            block_size=scheduler.block_size,
            ring_steps=2 * scheduler.max_inflight,
        )
        lanes = make_lanes(decoder, devices, limits)
        clock.lap("weights")
        trial = KVTensors.allocate(
            decoder.kv_shape, num_blocks=1, block_size=scheduler.block_size, device=device.device
        )
        for lane in lanes:
            lane.use(trial)
        _compile(lanes)
        clock.lap("kernels")
        with _capturing(config):
            graph_bytes = sum(_warm_up(lane, each) for lane, each in zip(lanes, devices, strict=True))
        clock.lap("warm-up")
        for lane in lanes:
            lane.use(None)
        del trial
        size = memory.size_device_pool(
            budget_bytes=budget_bytes,
            spent_bytes=free_before - device.free_bytes(),
            graph_bytes=graph_bytes,
            bytes_per_token=decoder.kv_shape.bytes_per_token,
            block_size=scheduler.block_size,
            max_model_len=limits.max_model_len,
            num_blocks=scheduler.num_blocks,
            kv_cache_bytes=int(options.kv_cache_gib * memory.GIB),
        )
        kv = KVTensors.allocate(
            decoder.kv_shape, num_blocks=size.num_blocks, block_size=scheduler.block_size, device=device.device
        )
        device.synchronize()  # the cache is whole before another stream sees it
        for lane in lanes:
            lane.use(kv)
            with lane.device.scope(), _capturing(config):
                lane.capture_all()
            lane.device.synchronize()
        clock.lap("graphs")
        info = RunnerInfo(
            model_name=next(iter(options.served_model_name), options.model or folder.name),
            device=_about(device, dtype, options.reference),
            vocab_size=config.vocab_size,
            max_model_len=size.max_model_len,
            num_blocks=size.num_blocks,
            block_size=scheduler.block_size,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            eos_ids=config.eos_ids,
            weight_bytes=decoder.weight_bytes,
            kv_bytes_per_token=decoder.kv_shape.bytes_per_token,
        )
        runner = join_lanes(
            lanes,
            kv,
            info,
            watcher=options.device_wait,
            samples_on_host=scheduler.sampler == "host",
            begins_later=scheduler.policy != "late",
            start_seconds=clock.laps,
        )
        runner.warm_up()
    return runner


def _check(options: ModelOptions, scheduler: SchedulerOptions, config: ModelConfig) -> None:
    if config.decoder is None and options.reference:
        raise NotOnGpu(
            f"This model needs transformers' own code ({config.fallback_reason}), which has no reference mode on a "
            "GPU: set model.device to cpu."
        )
    if options.reference and options.dtype not in ("auto", "float32"):
        raise ModelError("model.reference computes in float32: leave model.dtype at auto or float32.")
    if options.reference and scheduler.max_num_batched_tokens > MAX_REFERENCE_TOKENS:
        raise ModelError(
            f"scheduler.max_num_batched_tokens is {scheduler.max_num_batched_tokens}; model.reference computes at most "
            f"{MAX_REFERENCE_TOKENS} tokens a step on a GPU."
        )
    if options.quantization == "int8":
        raise ModelError("model.quantization is for CPUs: leave it at none, or set model.device to cpu.")
    if scheduler.max_num_seqs > MAX_NUM_SEQS:
        raise ModelError(f"scheduler.max_num_seqs is {scheduler.max_num_seqs}; a GPU runs at most {MAX_NUM_SEQS}.")
    if scheduler.max_num_batched_tokens < scheduler.max_num_seqs:
        raise ModelError("scheduler.max_num_batched_tokens must not be less than scheduler.max_num_seqs.")


def _load_decoder(
    options: ModelOptions, folder: Path, config: ModelConfig, device: CudaDevice, dtype: torch.dtype
) -> StepDecoder:
    is_dummy = options.load_format == "dummy"
    if config.decoder is not None:
        read = open_weights(folder, config, dtype=dtype, device=device.device, is_dummy=is_dummy)
        return CudaDecoder(config, read, dtype=dtype, reference=options.reference)
    from aserve.model.cuda_fallback import load_cuda_fallback  # transformers' modelling code, which takes seconds

    decoder = load_cuda_fallback(folder, config, dtype=dtype, device=device.device, dummy=is_dummy)
    decoder.try_out(device.num_multiprocessors)
    return decoder


def _dtype(options: ModelOptions) -> torch.dtype:
    if options.reference:
        return torch.float32
    if options.dtype == "auto":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    return {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[options.dtype]


def _about(device: CudaDevice, dtype: torch.dtype, reference: bool) -> str:
    about = f"{device.device} ({device.name}), {str(dtype).removeprefix('torch.')}"
    return f"{about}, reference" if reference else about


def _compile(lanes: Sequence[CudaSteps]) -> None:
    """All kernels of all sizes, in parallel."""

    def run_all() -> None:
        for lane in lanes:
            for run in _runs(lane):
                run()

    variants = variants_of(run_all)
    compile_variants(variants, _Progress())


def _runs(steps: CudaSteps) -> list[Callable[[], None]]:
    return [steps.apply, *(partial(steps.run, size) for size in steps.sizes())]


@contextmanager
def _capturing(config: ModelConfig) -> Iterator[None]:
    """Raises NotOnGpu where transformers' own code fails within; torch.OutOfMemoryError for what lacked memory."""
    try:
        yield
    except RuntimeError as error:
        # A capture that broke off for want of memory may fail once more as it ends.
        for each in (error, error.__context__):
            if isinstance(each, torch.OutOfMemoryError):
                raise each from None
        if config.decoder is not None:
            raise
        raise NotOnGpu(
            f"This model needs transformers' own code ({config.fallback_reason}), which cannot be captured in a "
            f"CUDA graph ({str(error).partition(chr(10))[0]}): set model.device to cpu."
        ) from error


def _warm_up(steps: CudaSteps, device: CudaDevice) -> int:
    """Run every size once, which loads what it needs. Returns what the graphs of all sizes will take, in bytes.

    The first graph is counted apart, since the others find there what it takes: the pool's memory, which for
    transformers' own code is the activations of the largest step, and what the driver sets up once.
    """
    with device.scope():
        for run in _runs(steps):
            run()
        device.synchronize()
        free_before = device.free_bytes()
        sizes = steps.sizes()
        first, *others = sizes[:: max(1, len(sizes) // _TRIAL_GRAPHS)]
        steps.capture(first)
        free_between = device.free_bytes()
        for size in others:
            steps.capture(size)
        free_after = device.free_bytes()
    of_first, of_others = max(0, free_before - free_between), max(0, free_between - free_after)
    return of_first + of_others * (len(sizes) - 1) // max(1, len(others))


class _Stopwatch:
    """laps: seconds of each part of the start."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._newest_s = time.perf_counter()

    def lap(self, name: str) -> None:
        now_s = time.perf_counter()
        self.laps[name] = now_s - self._newest_s
        self._newest_s = now_s


class _Progress:
    """One line on a terminal, rewritten; elsewhere a line at the end, and none where nothing was compiled."""

    def __init__(self) -> None:
        self._started_s = time.perf_counter()
        self._is_terminal = sys.stderr.isatty()

    def __call__(self, done: int, of: int) -> None:
        if self._is_terminal:
            end = "\n" if done == of else ""
            sys.stderr.write(f"\raserve: compiling kernels, {done} of {of}{end}")
        elif done == of:
            sys.stderr.write(f"aserve: {of} kernels compiled in {time.perf_counter() - self._started_s:.1f} s\n")
        sys.stderr.flush()
