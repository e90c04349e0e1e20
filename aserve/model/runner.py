"""The CPU device: plans in, flights out. Steps run one after another in the device thread.

Shape suffixes: T tokens of a step, S sequences in it (decode rows, then chunks), B block-table entries, R rows that
sample, V vocabulary.
"""

import gc
import importlib.util
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aserve import faults
from aserve.core.ids import NO_STEP, TRASH_BLOCK, Slot, StepNumber
from aserve.core.options import SchedulerOptions
from aserve.core.plan import BatchPlan, BatchResult, Chunk, Logprobs
from aserve.core.request import SamplingParams
from aserve.device import memory, threads
from aserve.device.event import Bell, CpuFlight
from aserve.device.thread import DeviceThread
from aserve.engine.ports import Runner, RunnerInfo
from aserve.errors import ConfigError, DeviceLost, ModelError, NotOnGpu
from aserve.model.batch import ForwardBatch, LanguageModel
from aserve.model.config import ModelConfig
from aserve.model.cpu_decoder import CpuDecoder
from aserve.model.cpu_kernels.compiler import HAS_COMPILED_BEFORE
from aserve.model.host_sampler import HostSampler
from aserve.model.kv_tensors import KVTensors
from aserve.model.loader import load_model
from aserve.model.options import ModelOptions
from aserve.model.sampler import SampledTokens, Sampler, SamplingRows, compute_logprobs
from aserve.model.slot_table import SlotTable
from aserve.model.step_result import SampledPart, StepCounters, in_row_order, kind_of, sampled_part

Ints = NDArray[np.int64]

_UNKNOWN_MODEL_LEN: Final = 2048
"""Context of a model whose config does not say for how many positions it was made."""

_SPARE_BYTES: Final = 128 << 20
"""Of the workspace, for what nobody counts: allocators, libraries' buffers."""


class StepFlight(CpuFlight[BatchResult]):
    """The flight of one step."""

    __slots__ = ("step",)

    def __init__(self, bell: Bell, step: StepNumber) -> None:
        super().__init__(bell)
        self.step = step


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """A plan laid out for the model.

    slots, next_positions: int64 [S], the latter after the step. sampling: int64 [R], indices into S.
    prompt_targets: (chunk index, k, the tokens whose log-probabilities are wanted), in the order of their logits, which
    come after the R that are sampled.
    """

    batch: ForwardBatch
    slots: Ints
    next_positions: Ints
    sampling: Ints
    prompt_targets: tuple[tuple[int, int, NDArray[np.int32]], ...]


class CpuRunner:
    """``engine.ports.Runner`` on the CPU. Owns the device thread, the K/V memory and the slot table.

    ``launch`` belongs to the loop. Slot table, model and sampler belong to the device thread once a step is out.
    """

    def __init__(
        self, *, model: LanguageModel, kv: KVTensors, info: RunnerInfo, device: DeviceThread, num_threads: int
    ) -> None:
        self._model = model
        self._kv = kv
        self._info = info
        self._device = device
        self._num_threads = num_threads
        self._table = SlotTable(
            num_slots=info.max_num_seqs,
            max_num_blocks=math.ceil(info.max_model_len / kv.block_size),
            vocab_size=info.vocab_size,
        )
        self._sampler = Sampler(info.vocab_size)
        self._host_sampler: HostSampler | None = None  # made in the device thread by the first plan with deferred rows
        self._counters = StepCounters()

    @property
    def info(self) -> RunnerInfo:
        return self._info

    def launch(self, plan: BatchPlan) -> StepFlight:
        """Queue the step for the device thread and return, in some µs. Raises DeviceLost after ``aclose``."""
        faults.hit("runner.launch")
        flight = StepFlight(self._device.bell(), plan.step)
        self._device.submit(lambda: self._run(plan, flight))
        return flight

    def go_on(self) -> None:
        """Nothing: a launch leaves nothing."""

    def warm_up(self, max_num_batched_tokens: int) -> None:
        """Run the shapes of a first request and of full steps, so that libraries have made their kernels. Blocks.

        Uses slots that nobody has joined: their rows compute into the trash block and change nothing.
        """
        num_slots = self._info.max_num_seqs
        for num_rows in sorted({1, min(8, num_slots), num_slots}):
            rows = np.stack([np.arange(num_rows), np.zeros(num_rows)], axis=1).astype(np.int32)
            self._device.call(lambda rows=rows: self._warm(BatchPlan(step=NO_STEP, rows=rows)))  # type: ignore[misc]
        length = min(max_num_batched_tokens, self._info.max_model_len - 1)
        chunk = Chunk(slot=Slot(0), start=0, tokens=np.zeros(length, np.int32), last=True)
        self._device.call(lambda: self._warm(BatchPlan(step=NO_STEP, chunks=(chunk,))))
        if num_slots > 1:
            row, short = np.array([[1, 0]], np.int32), replace(chunk, tokens=chunk.tokens[:1])
            self._device.call(lambda: self._warm(BatchPlan(step=NO_STEP, rows=row, chunks=(short,))))

    def _warm(self, plan: BatchPlan) -> None:
        step = self._lay_out(plan)
        logits_RV = self._model.forward(step.batch, self._kv)
        self._sampler.sample(logits_RV, self._table.sampling_rows(step.slots, step.next_positions - 1))

    def statistics(self) -> dict[str, float]:
        """Totals since the start; failed steps have no time. ``last`` is the newest step of its kind."""
        figures = self._counters.figures()
        figures["weight_bytes"] = self._info.weight_bytes
        figures["kv_bytes"] = self._kv.num_bytes
        figures["resident_bytes"] = memory.resident_bytes()
        figures["threads"] = self._num_threads
        return figures

    async def aclose(self) -> None:
        """Run what is queued, then end the threads. Flights still out land before. Idempotent.

        If cancelled, steps that are queued fail with DeviceLost and only the one that runs is waited for. Each part is
        closed even if another's closing fails or is cancelled.
        """
        faults.hit("runner.close")
        try:
            await self._device.end()
        finally:
            try:
                if self._host_sampler is not None:  # which has what the device left for it
                    await self._host_sampler.aclose()
            finally:
                self._device.close_bells()

    # --- in the device thread

    @torch.inference_mode()
    def _run(self, plan: BatchPlan, flight: StepFlight) -> None:
        if self._device.is_hurried:
            self._fail(flight, DeviceLost("The device is closed."))
            return
        started_s = time.perf_counter()
        try:
            # First, and whatever becomes of the step: the host sends each difference once.
            self._table.apply(plan)
            finish = self._step(plan, flight)
            if plan.num_tokens:
                self._counters.times[kind_of(plan)].add(time.perf_counter() - started_s)
            finish()
        except BaseException as error:
            # The host fails these sequences when the step lands. Their rows in steps that are out already must not
            # run on with a token that was never made.
            try:
                slots, _ = _sequences(plan)
                self._table.retire(slots[slots < self._info.max_num_seqs])
            finally:
                self._fail(flight, error)

    def _step(self, plan: BatchPlan, flight: StepFlight) -> Callable[[], None]:
        """Compute and sample. Returns what is left: landing the flight, or handing deferred rows to the host."""
        faults.hit("runner.forward")
        step = self._lay_out(plan)
        if plan.num_tokens:
            logits_RV = self._model.forward(step.batch, self._kv)
        else:
            logits_RV = torch.empty(0, self._info.vocab_size)
        self._counters.num_tokens_computed += plan.num_tokens
        num_rows, num_sampled = len(plan.rows), len(step.sampling)
        self._table.advance(step.slots[num_rows:], step.next_positions[num_rows:])
        prompt_logprobs = _prompt_logprobs(step, logits_RV)
        return self._sample(plan, step, logits_RV[:num_sampled], prompt_logprobs, flight)

    def _lay_out(self, plan: BatchPlan) -> _Step:
        table, block_size = self._table, self._kv.block_size
        slots, expected = _sequences(plan)
        if __debug__:
            table.check_positions(slots, expected)
        num_rows, chunks = len(plan.rows), plan.chunks
        lengths = np.array([1] * num_rows + [len(chunk.tokens) for chunk in chunks], np.int64)
        query_starts = np.concatenate([[0], np.cumsum(lengths)])

        inert = table.done_S[slots]
        starts = np.where(inert, 0, table.position_S[slots])
        context_lens = starts + lengths
        num_columns = math.ceil(int(context_lens.max(initial=1)) / block_size)
        block_tables = np.where(inert[:, None], TRASH_BLOCK, table.block_table_SB[slots, :num_columns])

        sequence = np.repeat(np.arange(len(slots)), lengths)
        positions = np.arange(len(sequence)) + (starts - query_starts[:-1])[sequence]
        blocks = block_tables[sequence, positions // block_size].astype(np.int64)

        sampling = np.array(
            [*range(num_rows), *(num_rows + i for i, chunk in enumerate(chunks) if chunk.last)], np.int64
        )
        logit_rows = [query_starts[sampling + 1] - 1]
        prompt_targets = []
        for index, chunk in enumerate(chunks):
            if chunk.prompt_logprobs_k is not None:
                targets = chunk.tokens[1:] if chunk.last else np.append(chunk.tokens[1:], np.int32(chunk.next_token))
                logit_rows.append(query_starts[num_rows + index] + np.arange(len(targets)))
                prompt_targets.append((index, chunk.prompt_logprobs_k, targets))
        return _Step(
            batch=ForwardBatch(
                token_ids_T=torch.from_numpy(
                    np.concatenate([table.last_token_S[slots[:num_rows]], *(chunk.tokens for chunk in chunks)])
                ),
                positions_T=torch.from_numpy(positions),
                slot_mapping_T=torch.from_numpy(blocks * block_size + positions % block_size),
                block_tables_SB=torch.from_numpy(block_tables),
                context_lens_S=torch.from_numpy(context_lens.astype(np.int32)),
                context_lens=context_lens.tolist(),
                query_starts=query_starts.tolist(),
                num_decode_rows=num_rows,
                logit_rows_R=torch.from_numpy(np.concatenate(logit_rows)),
            ),
            slots=slots,
            next_positions=expected + lengths,
            sampling=sampling,
            prompt_targets=tuple(prompt_targets),
        )

    def _sample(
        self,
        plan: BatchPlan,
        step: _Step,
        logits_RV: Tensor,
        prompt_logprobs: tuple[tuple[int, Logprobs], ...],
        flight: StepFlight,
    ) -> Callable[[], None]:
        faults.hit("runner.sample")
        slots, positions = step.slots[step.sampling], step.next_positions[step.sampling] - 1
        deferred = plan.deferred if len(plan.deferred) else np.zeros(len(slots), np.bool_)
        here, there = np.flatnonzero(~deferred), np.flatnonzero(deferred)
        parts = []
        if len(here) or not len(there):
            rows = self._table.sampling_rows(slots[here], positions[here])
            sampled = self._sampler.sample(logits_RV if not len(there) else logits_RV[here], rows, plan.logprobs_k)
            self._commit(slots[here], positions[here], rows, sampled)
            parts.append(sampled_part(here, rows, sampled))
        if not len(there):
            return lambda: self._land(plan, parts, prompt_logprobs, flight)

        rows_there = self._table.sampling_rows(slots[there], positions[there])
        if self._host_sampler is None:
            self._host_sampler = HostSampler(self._info.vocab_size)
        return partial(
            self._host_sampler.submit,
            logits_RV[there],
            rows_there,
            plan.logprobs_k,
            lambda sampled: self._land(
                plan, [*parts, sampled_part(there, rows_there, sampled)], prompt_logprobs, flight
            ),
            lambda error: self._fail(flight, error),
        )

    def _commit(self, slots: Ints, positions: Ints, rows: SamplingRows, sampled: SampledTokens) -> None:
        invalid_R = sampled.invalid_R
        self._table.commit(slots, positions, sampled.tokens_R, rows.end.ended(sampled.tokens_R), ~invalid_R)
        if invalid_R.any():
            self._table.retire(slots[invalid_R])

    def _land(
        self,
        plan: BatchPlan,
        parts: Sequence[SampledPart],
        prompt_logprobs: tuple[tuple[int, Logprobs], ...],
        flight: StepFlight,
    ) -> None:
        faults.hit("runner.land")
        rows = in_row_order(parts)
        self._counters.num_tokens_sampled += len(rows.tokens)
        flight.land(
            BatchResult(
                step=plan.step,
                tokens=rows.tokens[:, None],
                num_tokens=np.ones(len(rows.tokens), np.int32),
                flags=rows.flags,
                logprobs=rows.logprobs,
                prompt_logprobs=prompt_logprobs,
            )
        )

    def _fail(self, flight: StepFlight, error: BaseException) -> None:
        self._counters.num_failed += 1
        if not isinstance(
            error, Exception
        ):  # a cancellation or an exit that strayed here must not reach the loop as one
            error = RuntimeError(f"{type(error).__name__} in the device thread: {error}")
        flight.fail(error)


def _sequences(plan: BatchPlan) -> tuple[Ints, Ints]:
    """int64 [S]: slots, and the positions at which the plan expects them, of decode rows and chunks."""
    rows = plan.rows.astype(np.int64)
    slots = np.concatenate([rows[:, 0], np.array([chunk.slot for chunk in plan.chunks], np.int64)])
    positions = np.concatenate([rows[:, 1], np.array([chunk.start for chunk in plan.chunks], np.int64)])
    return slots, positions


def _prompt_logprobs(step: _Step, logits_RV: Tensor) -> tuple[tuple[int, Logprobs], ...]:
    """The log-probabilities that chunks asked for, before the sampler changes any logits."""
    start, found = len(step.sampling), []
    for index, k, targets in step.prompt_targets:
        logits = logits_RV[start : start + len(targets)]
        found.append((index, compute_logprobs(logits, torch.from_numpy(targets.astype(np.int64)), k)))
        start += len(targets)
    return tuple(found)


# --- start


def load_runner(options: ModelOptions, scheduler: SchedulerOptions, folder: Path) -> Runner:
    """Load the model in ``folder`` on the device that the options name. Blocks for seconds: call it off the loop.

    device = auto takes CUDA where torch finds a GPU; of the models that need transformers' own code the CPU takes those
    that a GPU does not run, and standard error says why. Raises ModelError or ConfigError.
    """
    if may_use_gpu(options):
        if not has_gpu():
            raise ModelError("model.device is cuda, but torch finds no CUDA device, or Triton is not installed.")
        from aserve.model.cuda_start import load_cuda_runner  # Triton, which only comes with CUDA builds of torch

        try:
            return load_cuda_runner(options, scheduler, folder)
        except NotOnGpu as error:
            if options.device == "cuda":
                raise
            sys.stderr.write(f"aserve: the CPU takes this model: {error.message}\n")
        gc.collect()  # what was loaded, which the error's frames have held so far
        torch.cuda.empty_cache()
    return load_cpu_runner(options, scheduler, folder)


def has_gpu() -> bool:
    """Whether steps can run on a CUDA device here."""
    return torch.cuda.is_available() and importlib.util.find_spec("triton") is not None


def may_use_gpu(options: ModelOptions) -> bool:
    """Whether the options ask for a GPU, or leave it open and there is one."""
    return options.device == "cuda" or (options.device == "auto" and options.quantization != "int8" and has_gpu())


def load_cpu_runner(options: ModelOptions, scheduler: SchedulerOptions, folder: Path) -> CpuRunner:
    """Load the model in ``folder``, size the KV pool, warm up.

    ``info.max_model_len`` is the least of what the scheduler's options ask for, what the model was made for and what
    fits the pool. Everything runs in the device thread, whose compute threads are then there. Raises ModelError, and
    ConfigError for what takes a GPU.
    """
    faults.hit("runner.load")
    if options.reference and options.dtype not in ("auto", "float32"):
        raise ModelError("model.reference computes in float32: leave model.dtype at auto or float32.")
    if options.dtype == "float16":
        raise ModelError("model.dtype = float16 is for GPUs: take bfloat16 or float32 on a CPU.")
    if scheduler.prefill == "streams":
        raise ConfigError(
            "scheduler.prefill is streams, which takes a GPU: a CPU runs one step at a time. Take split or mixed."
        )
    scheduler = scheduler.with_sizes()
    threads.prepare_process()
    num_threads = options.threads or threads.default_num_threads(threads.usable_cores())
    device = DeviceThread("aserve-device", setup=lambda: torch.set_num_threads(num_threads))
    try:
        runner = device.call(lambda: _load(options, scheduler, folder, device, num_threads))
        if not options.reference:  # which has one shape only, and is not in a hurry
            runner.warm_up(scheduler.max_num_batched_tokens)
    except BaseException:
        device.close()
        raise
    memory.trim()
    return runner


def _load(
    options: ModelOptions, scheduler: SchedulerOptions, folder: Path, device: DeviceThread, num_threads: int
) -> CpuRunner:
    available_bytes = memory.available_bytes()
    dtype = _dtype(options)
    model = load_model(
        folder,
        dtype=dtype,
        device="cpu",
        load_format="dummy" if options.load_format == "dummy" else "auto",
        reference=options.reference,
        quantization=options.quantization,
    )
    if isinstance(model, CpuDecoder) and not HAS_COMPILED_BEFORE and sys.stderr.isatty():
        sys.stderr.write("aserve: compiling kernels for this CPU, which only the first start does\n")
    config, kv_shape = model.config, model.kv_shape
    trained_len = config.max_position_embeddings or _UNKNOWN_MODEL_LEN
    size = memory.size_pool(
        memory.MemoryBudget(
            available=available_bytes,
            weights=model.weight_bytes,
            workspace=_workspace_bytes(scheduler, config),
        ),
        bytes_per_token=kv_shape.bytes_per_token,
        block_size=scheduler.block_size,
        max_model_len=min(scheduler.max_model_len or trained_len, trained_len),
        max_num_seqs=scheduler.max_num_seqs,
        num_blocks=scheduler.num_blocks,
        kv_cache_bytes=int(options.kv_cache_gib * memory.GIB),
    )
    kv = KVTensors.allocate(kv_shape, num_blocks=size.num_blocks, block_size=scheduler.block_size)
    is_int8 = isinstance(model, CpuDecoder) and model.is_int8
    precision = str(dtype).removeprefix("torch.") + (", int8 weights" if is_int8 else "")
    about = f"cpu, {precision}, {num_threads} thread{'s' if num_threads > 1 else ''}"
    info = RunnerInfo(
        model_name=next(iter(options.served_model_name), options.model or folder.name),
        device=f"{about}, reference" if options.reference else about,
        vocab_size=config.vocab_size,
        max_model_len=size.max_model_len,
        num_blocks=size.num_blocks,
        block_size=scheduler.block_size,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        eos_ids=config.eos_ids,
        weight_bytes=model.weight_bytes,
        kv_bytes_per_token=kv_shape.bytes_per_token,
    )
    return CpuRunner(model=model, kv=kv, info=info, device=device, num_threads=num_threads)


def _dtype(options: ModelOptions) -> torch.dtype:
    if options.dtype == "auto":
        return torch.bfloat16 if threads.supports_bfloat16() and not options.reference else torch.float32
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[options.dtype]


def _workspace_bytes(scheduler: SchedulerOptions, config: ModelConfig) -> int:
    """An upper bound of what a step takes beside weights and cache: logits, the sampler's tensors, activations.

    A prompt's log-probabilities make logits of a whole chunk; the sampler keeps four tensors of its rows' size.
    """
    logits = (scheduler.max_num_seqs + scheduler.max_num_batched_tokens) * config.vocab_size * 4
    sampler = 4 * scheduler.max_num_seqs * config.vocab_size * 4
    width = 8 * config.decoder.hidden_size + 4 * config.decoder.intermediate_size if config.decoder else 1 << 16
    return logits + sampler + scheduler.max_num_batched_tokens * width * 4 + _SPARE_BYTES


def sampling_defaults(options: ModelOptions, folder: Path) -> SamplingParams:
    """What a request gets where it says nothing: the model's own recommendations, unless they are turned off."""
    if options.generation_config == "off":
        return SamplingParams()
    said = ModelConfig.from_folder(folder).sampling_defaults
    plain = SamplingParams()
    return SamplingParams(
        temperature=plain.temperature if said.temperature is None else said.temperature,
        top_p=plain.top_p if said.top_p is None else said.top_p,
        top_k=plain.top_k if said.top_k is None else said.top_k,
        min_p=plain.min_p if said.min_p is None else said.min_p,
        repetition_penalty=plain.repetition_penalty if said.repetition_penalty is None else said.repetition_penalty,
    )
