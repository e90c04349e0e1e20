"""The CUDA device: plans in, flights out. A launch writes one array of words and replays one graph: no more.
Of a long step the graph comes in parts, and the loop gets its turn between any two.

Shape suffixes: S sequences of a step (decode rows, then chunks), R rows that sample, N steps of the ring,
P prompt positions with log-probabilities, V vocabulary, K alternatives.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aserve import faults
from aserve.core.ids import StepNumber
from aserve.core.plan import BatchPlan, BatchResult, Logprobs
from aserve.device.event import DeviceEvent, Flight, Watcher, WatcherName, make_watcher
from aserve.device.graphs import Replay, StepDevice
from aserve.engine.ports import RunnerInfo
from aserve.errors import DeviceLost
from aserve.garbage import NoCollection
from aserve.model.cuda_pinned import LogprobTensors, Staging
from aserve.model.cuda_steps import MAX_ADDITIONS, CudaSteps
from aserve.model.host_sampler import HostSampler
from aserve.model.kernels.differences import HEADER_WORDS, LENGTH
from aserve.model.kernels.slot_update import unpack_words
from aserve.model.kv_tensors import KVTensors
from aserve.model.sampler import MAX_TOP_LOGPROBS, SampledTokens, SamplingRows
from aserve.model.slot_table import SlotTable
from aserve.model.step_result import SampledPart, StepCounters, in_row_order, kind_of, sampled_part
from aserve.model.step_words import Differences, Words, aligned

_Rows = tuple[int, int, int, int]
"""Of a prompt's log-probabilities; what each number is, whoever makes them says."""

_STEP_MASK: Final = (1 << 32) - 1
_NO_DIFFERENCES: Final = Differences.of(BatchPlan(step=StepNumber(0)), 0, 0)


class CudaFlight(Flight[BatchResult]):
    """The flight of one step."""

    __slots__ = ("step",)

    def __init__(self, step: StepNumber) -> None:
        super().__init__()
        self.step = step


@dataclass(frozen=True, slots=True, kw_only=True)
class _Deferred:
    """What the host samples of a step: some of the R rows, their logits (pinned), and all that its sampler needs."""

    rows: NDArray[np.intp]
    logits_RV: Tensor
    params: SamplingRows


@dataclass(frozen=True, slots=True, kw_only=True)
class _Launched:
    """A step that is out.

    number: of the stream's steps, from 1 on: what its result words carry, and its place in the ring.
    sampling: int [R], which sequences the result's rows are. prompts: (index of the chunk, k, first row, rows) of
    log-probabilities that chunks asked for.
    """

    plan: BatchPlan
    flight: CudaFlight
    launched_s: float
    number: int
    sampling: NDArray[np.intp]
    prompts: tuple[_Rows, ...]
    deferred: _Deferred | None


@dataclass(slots=True, eq=False)
class _Rest:
    """What a launch still has to enqueue: parts of the step, and what comes behind it.

    has_words: whether the first part, which fetches them, is among these. key: kind of step, for the prediction of its
    end.
    """

    launched: _Launched
    has_words: bool
    parts: deque[Replay]
    behind: Callable[[], None]
    watcher: Watcher
    key: Hashable


class CudaRunner:
    """``engine.ports.Runner`` on one stream of a GPU. Owns its memory; everything belongs to the loop's thread.

    A failed launch has changed nothing on the device, or has left slots as they are when nobody runs there: the host
    gives up the sequences that it listed.
    """

    def __init__(
        self,
        *,
        steps: CudaSteps,
        kv: KVTensors,
        info: RunnerInfo,
        device: StepDevice,
        watcher: WatcherName = "auto",
        samples_on_host: bool = False,
        host_table: SlotTable | None = None,
        begins_later: bool = True,
        start_seconds: Mapping[str, float] | None = None,
    ) -> None:
        """steps: with all graphs made. samples_on_host: whether plans may defer rows. host_table: that of a runner of
        the same slots. begins_later: whether a step in parts may leave the first one to the loop's next turn, too; not
        where steps are launched just before the work that is out has ended. start_seconds: for statistics."""
        limits = steps.limits
        self._steps = steps
        self._kv = kv
        self._info = info
        self._device = device
        self._watcher_name: WatcherName = watcher
        self._watcher: Watcher | None = None
        self._old_watchers: list[Watcher] = []
        self._is_closed = False
        self._begins_later = begins_later
        with device.scope():
            steps.begin_with_first()
        self._staging = Staging(device, steps.arrays_RW)
        self._ring_NS: NDArray[np.int64] = steps.ring_RS.numpy()
        num_top = min(MAX_TOP_LOGPROBS, info.vocab_size)
        self._num_rows = len(steps.logits_SV)
        self._logprobs = LogprobTensors(device, limits.ring_steps, self._num_rows, num_top)
        num_prompt_rows = aligned(limits.max_num_tokens)
        self._prompt_logprobs = LogprobTensors(device, limits.ring_steps, num_prompt_rows, num_top)
        self._host_sampler = HostSampler(info.vocab_size) if samples_on_host else None
        # What the host knows of the slots, for rows that it samples; their tokens come back through token writes.
        self.host_table = host_table
        if samples_on_host and host_table is None:
            self.host_table = SlotTable(
                num_slots=limits.max_num_seqs,
                max_num_blocks=steps.table.block_tables_SB.shape[1],
                vocab_size=info.vocab_size,
            )
        # In turn: a step is out until the host has sampled its rows, and half of ring_steps are out at most.
        self._host_logits_NRV = (
            device.pinned(limits.ring_steps // 2, self._num_rows, info.vocab_size, dtype=torch.float32)
            if samples_on_host
            else None
        )
        self._counters = StepCounters()
        self._start_seconds = dict(start_seconds or {})
        self._newest_landing_s = 0.0
        self._num_enqueued = 0
        self._rests: deque[_Rest] = deque()  # of the newest launches, in their order
        self._has_turn = False  # whether the loop will come back to them
        self._num_launches = 0
        self._launch_s = 0.0
        self._launch_max_s = 0.0

    @property
    def info(self) -> RunnerInfo:
        return self._info

    def warm_up(self) -> None:
        """Launch once what computes log-probabilities, which no graph holds. Blocks; in inference mode."""
        num_rows = min(self._num_rows, len(self._steps.tokens_S))
        logits_RV, tokens_R = self._steps.logits_SV[:num_rows], self._steps.tokens_S[:num_rows]
        with self._device.scope():
            self._steps.decoder.logits_of(tokens_R.zero_(), self._steps.activations, logits_RV=logits_RV)
            for tensors in (self._logprobs, self._prompt_logprobs):
                tensors.compute(0, 0, logits_RV, tokens_R)
        self._device.synchronize()

    @property
    def num_out(self) -> int:
        """Steps on the stream that have not landed."""
        num_watched = len(self._watcher) if self._watcher is not None else 0
        return num_watched + len(self._rests)

    def launch(self, plan: BatchPlan, *, is_beside: bool = False) -> CudaFlight:
        """Enqueue the step and return. Raises DeviceLost, or whatever kept this step from being begun.

        A long step is enqueued in parts, and the loop gets a turn, or somebody calls ``go_on``, before each but the
        first; before that too behind parts of another step, and where ``begins_later`` allows it, if the step has
        chunks and another is out, so that the device does not wait for it. What fails from then on ends the flight.
        is_beside: another stream is at work, which makes a step longer.
        """
        started_s = time.perf_counter()
        faults.hit("runner.launch")
        watcher, flight = self._watcher_of_loop(), CudaFlight(plan.step)
        try:
            rest = self._prepare(plan, flight, started_s, watcher, is_beside)
            is_in_no_hurry = self._begins_later and len(plan.chunks) > 0 and self.num_out > 0 and len(rest.parts) > 1
            if not self._rests and not is_in_no_hurry:
                self._begin(rest)
        except Exception as error:
            self._counters.num_failed += 1
            raise self._device.explain(error) from error
        self._num_enqueued = rest.launched.number
        self._num_launches += 1
        if rest.parts:
            self._rests.append(rest)
            self._take_turn()
        self._note_go(time.perf_counter() - started_s, plan)
        return flight

    def _begin(self, rest: _Rest) -> None:
        """Enqueue the first part, or raise what kept it from being enqueued."""
        try:
            self._go(rest)
        except Exception as error:
            if rest.has_words:
                raise
            self._break_off(rest, self._device.explain(error))

    def _take_turn(self) -> None:
        if self._rests and not self._has_turn:
            self._has_turn = True
            self._rests[0].watcher.loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        """The loop's turn for the next part, unless all of them were enqueued before it came."""
        self._has_turn = False
        self.go_on()
        self._take_turn()

    def go_on(self) -> None:
        """Enqueue the next part now, if there is one that waits for its turn."""
        if self._rests:
            started_s, plan = time.perf_counter(), self._rests[0].launched.plan
            with NoCollection():
                self._launch_part()
            self._note_go(time.perf_counter() - started_s, plan)

    def _launch_parts(self) -> None:
        while self._rests:
            self._launch_part()

    def _launch_part(self) -> None:
        """The next one of the oldest step that has some left."""
        rest = self._rests[0]
        if rest.watcher.loop.is_closed():
            self._rests.popleft()  # nobody waits for the step, whose slots are given up
            return
        try:
            faults.hit("runner.launch_rest")
            self._go(rest)
        except Exception as error:
            self._rests.popleft()
            self._break_off(rest, self._device.explain(error))
            return
        if not rest.parts:
            self._rests.popleft()

    def _go(self, rest: _Rest) -> None:
        """Enqueue the next part, and behind the last one what belongs there."""
        with self._device.scope():
            if rest.parts:
                rest.parts.popleft()()
            if rest.has_words:
                self._staging.sent()
                rest.has_words = False
            if rest.parts:
                return
            rest.behind()
            event = self._device.record(blocking=rest.watcher.wants_blocking_events)
        self._watch(event, rest.launched, rest.watcher, rest.key)

    def _break_off(self, rest: _Rest, error: Exception) -> None:
        """End a step that was launched. Not before what was enqueued of it has run, since its blocks go to others then;
        and what it changes in the slot table is changed all the same, since the next steps rely on it."""
        fail = partial(self._fail, rest.launched.flight)
        try:
            with self._device.scope():
                if rest.has_words:
                    self._steps.apply_words()
                    self._staging.sent()
                event = self._device.record(blocking=rest.watcher.wants_blocking_events)
        except Exception as fault:
            lost = DeviceLost(f"A step broke off ({error}), and what became of it is not known: {fault}")
            lost.__cause__ = error
            fail(lost)
            while self._rests:  # whose words lie where the device would look for others now
                self._fail(self._rests.popleft().launched.flight, lost)
            return
        self._staging.fence(event)
        rest.watcher.watch(event, partial(fail, error), fail)

    def _watch(self, event: DeviceEvent, launched: _Launched, watcher: Watcher, key: Hashable) -> None:
        self._staging.fence(event)
        watcher.watch(event, partial(self._land, launched), partial(self._fail, launched.flight), key=key)

    def _note_go(self, seconds: float, plan: BatchPlan) -> None:
        """So long the launch of ``plan`` held the loop in one go: all of it, or one part in a turn."""
        self._launch_s += seconds
        self._launch_max_s = max(self._launch_max_s, seconds)

    def statistics(self) -> dict[str, float]:
        """Totals since the start. A step's time runs from its launch, or the landing before it, to its landing."""
        figures = self._counters.figures()
        figures["launches"] = self._num_launches
        figures["launch_seconds"] = self._launch_s
        figures["launch_max_ms"] = self._launch_max_s * 1e3
        figures["weight_bytes"] = self._info.weight_bytes
        figures["kv_bytes"] = self._kv.num_bytes
        figures |= {f"start_{part}_seconds": seconds for part, seconds in self._start_seconds.items()}
        if self._watcher is not None:
            figures |= self._watcher.statistics()
        return figures

    async def aclose(self) -> None:
        """Wait for what is in flight, then let go of the device. Idempotent.

        Each part is closed even if another's closing fails or is cancelled.
        """
        faults.hit("runner.close")
        self._launch_parts()
        self._is_closed = True
        async with AsyncExitStack() as stack:  # the last one first
            if self._host_sampler is not None:  # which has what the device left for it
                stack.push_async_callback(self._host_sampler.aclose)
            for watcher in self._old_watchers:
                stack.callback(watcher.close)
            if self._watcher is not None:
                stack.push_async_callback(self._watcher.aclose)

    def _watcher_of_loop(self) -> Watcher:
        """The running loop's. A runner that outlives a loop gets a new one on the next, and waits for no turn of the
        old one."""
        if self._is_closed:
            raise DeviceLost("The device is closed.")
        if self._watcher is None or self._watcher.loop is not asyncio.get_running_loop():
            if self._watcher is not None:
                self._launch_parts()
                self._has_turn = False
                self._old_watchers.append(self._watcher)
            self._watcher = make_watcher(self._watcher_name)
        return self._watcher

    # --- launching

    def _prepare(
        self, plan: BatchPlan, flight: CudaFlight, started_s: float, watcher: Watcher, is_beside: bool
    ) -> _Rest:
        """Write the plan's words, and say what is to be enqueued. What is more than an array holds, and all that a plan
        without tokens asks for, is enqueued at once."""
        steps = self._steps
        faults.hit("runner.forward")
        size = steps.size_of(plan) if plan.num_tokens else None
        differences = Differences.of(plan, self._info.vocab_size, MAX_ADDITIONS)
        # Not the plan's: of these, another stream's lie between those that are out together.
        number = self._num_enqueued + 1
        deferred = self._deferred_rows(plan, number)
        if size is None or differences.num_words > steps.room:
            self._apply_in_parts(differences)
            differences = _NO_DIFFERENCES
        sampling = np.empty(0, np.intp)
        replays: tuple[Replay, ...] = ()
        prompts: tuple[_Rows, ...] = ()
        pieces: list[_Rows] = []
        if size is not None:
            step = steps.step(size)
            num_waiting = sum(rest.has_words for rest in self._rests)
            if num_waiting == self._staging.num_arrays:
                self._launch_parts()
                num_waiting = 0
            words = self._staging.take(num_waiting)
            words[:2].view(np.int64)[0] = number
            sampling = step.layout.write(words, plan, steps.nobody)
            end = differences.write(words, step.layout.end)
            words[LENGTH], prompts, pieces = self._write_prompt_rows(words, end, plan)
            replays = step.replays
            self._counters.num_tokens_computed += plan.num_tokens
        launched = _Launched(
            plan=plan,
            flight=flight,
            launched_s=started_s,
            number=number,
            sampling=sampling,
            prompts=prompts,
            deferred=deferred,
        )
        return _Rest(
            launched=launched,
            has_words=size is not None,
            parts=deque(replays),
            behind=partial(self._read_logits, launched, pieces),
            watcher=watcher,
            key=(*size, is_beside) if size is not None else None,
        )

    def _read_logits(self, launched: _Launched, pieces: Sequence[_Rows]) -> None:
        """What is wanted of a step's logits beside tokens, behind it on the stream."""
        plan, deferred, steps = launched.plan, launched.deferred, self._steps
        if deferred is None and plan.logprobs_k < 0 and not pieces:
            return
        index = launched.number % steps.limits.ring_steps
        num_sequences = len(plan.rows) + len(plan.chunks)
        with torch.inference_mode():
            if deferred is not None:
                self._copy_logits(deferred, launched.sampling[deferred.rows])
            if plan.logprobs_k >= 0:
                self._logprobs.compute(index, 0, steps.logits_SV[:num_sequences], steps.tokens_S[:num_sequences])
            for first, rows, targets, num_rows in pieces:
                logits_PV = steps.logits_SV[:num_rows]
                steps.decoder.logits_of(steps.words[rows : rows + num_rows], steps.activations, logits_RV=logits_PV)
                self._prompt_logprobs.compute(index, first, logits_PV, steps.words[targets : targets + num_rows])

    def _apply_in_parts(self, differences: Differences) -> None:
        """Change the slot table ahead of a step, or without one; behind all that was launched before."""
        self._launch_parts()
        with self._device.scope():
            for part in differences.parts(self._steps.room):
                words = self._staging.take()
                words[LENGTH] = part.write(words, HEADER_WORDS)
                self._steps.apply_words()
                self._staging.sent()
                self._staging.fence(self._device.record())

    def _write_prompt_rows(self, words: Words, end: int, plan: BatchPlan) -> tuple[int, tuple[_Rows, ...], list[_Rows]]:
        """Which tokens' log-probabilities chunks ask for, behind everything else.

        Returns the end, ``_Launched.prompts``, and the pieces to compute: first row, place of rows, of targets, number.
        """
        prompts, rows, targets = [], [], []
        row, first = len(plan.rows), 0
        for index, chunk in enumerate(plan.chunks):
            if chunk.prompt_logprobs_k is not None:
                wanted = chunk.tokens[1:] if chunk.last else np.append(chunk.tokens[1:], np.int32(chunk.next_token))
                prompts.append((index, chunk.prompt_logprobs_k, first, len(wanted)))
                rows.append(np.arange(row, row + len(wanted)))
                targets.append(wanted)
                first += len(wanted)
            row += len(chunk.tokens)
        if not first:
            return end, tuple(prompts), []
        room = aligned(first)
        words[end : end + first] = np.concatenate(rows)
        words[end + room : end + room + first] = np.concatenate(targets)
        pieces = [
            (start, end + start, end + room + start, min(self._num_rows, first - start))
            for start in range(0, first, self._num_rows)
        ]
        return end + 2 * room, tuple(prompts), pieces

    def _deferred_rows(self, plan: BatchPlan, number: int) -> "_Deferred | None":
        """What the host's sampler has to know of this plan's deferred rows; the table follows every plan."""
        table, logits_NRV = self.host_table, self._host_logits_NRV
        if table is None or logits_NRV is None:
            if plan.deferred.any():
                raise ValueError("the plan defers rows to a runner that was made to sample on the device")
            return None
        with torch.inference_mode():  # in which its tensors were made
            return self._followed(table, plan, logits_NRV[number % len(logits_NRV)])

    @staticmethod
    def _followed(table: SlotTable, plan: BatchPlan, logits_RV: Tensor) -> "_Deferred | None":
        table.apply(plan)
        rows = np.flatnonzero(plan.deferred)
        if not len(rows):
            return None
        last = [(chunk.slot, chunk.start + len(chunk.tokens) - 1) for chunk in plan.chunks if chunk.last]
        places = np.concatenate([plan.rows, np.array(last, np.int32).reshape(-1, 2)]).astype(np.int64)[rows]
        params = table.sampling_rows(places[:, 0], places[:, 1])
        return _Deferred(rows=rows, logits_RV=logits_RV[: len(rows)], params=params)

    def _copy_logits(self, deferred: _Deferred, sequences: NDArray[np.intp]) -> None:
        """Enqueue a copy for each run of neighbours: of decode rows there is one, few chunks lie between others."""
        row = 0
        for run in np.split(sequences, np.flatnonzero(np.diff(sequences) != 1) + 1):
            logits_RV = self._steps.logits_SV[run[0] : run[-1] + 1]
            deferred.logits_RV[row : row + len(run)].copy_(logits_RV, non_blocking=True)
            row += len(run)

    # --- landing

    def _land(self, launched: _Launched) -> None:
        """The step's event has passed."""
        plan, flight = launched.plan, launched.flight
        now_s = time.perf_counter()
        self._counters.times[kind_of(plan)].add(now_s - max(launched.launched_s, self._newest_landing_s))
        self._newest_landing_s = now_s
        try:
            faults.hit("runner.land")
            here, prompts = self._read(launched)
            deferred = launched.deferred
            if deferred is None:
                flight.land(self._result(plan, here, prompts))
            else:
                assert self._host_sampler is not None
                self._submit(self._host_sampler, launched, deferred, here, prompts)
        except Exception as error:
            self._fail(flight, error)

    def _read(self, launched: _Launched) -> tuple[SampledPart, tuple[tuple[int, Logprobs], ...]]:
        """The result as the device wrote it, all R rows."""
        plan, sampling = launched.plan, launched.sampling
        number = launched.number
        index = number % len(self._ring_NS)
        numbers, flags, tokens = unpack_words(self._ring_NS[index, sampling])
        if not (numbers == number & _STEP_MASK).all():
            raise DeviceLost(f"The device ended step {plan.step} without its result words.")
        logprobs = self._logprobs.read(index, sampling, plan.logprobs_k) if plan.logprobs_k >= 0 else None
        prompts = tuple(
            (chunk, self._prompt_logprobs.read(index, slice(first, first + num_rows), k))
            for chunk, k, first, num_rows in launched.prompts
        )
        return SampledPart(rows=np.arange(len(tokens)), tokens=tokens, flags=flags, logprobs=logprobs), prompts

    def _submit(
        self,
        sampler: HostSampler,
        launched: _Launched,
        deferred: _Deferred,
        here: SampledPart,
        prompts: Sequence[tuple[int, Logprobs]],
    ) -> None:
        """Sample the deferred rows in the host sampler's thread; the flight lands when they are there."""
        loop, plan, flight = asyncio.get_running_loop(), launched.plan, launched.flight
        kept = np.setdiff1d(np.arange(len(here.tokens)), deferred.rows)
        parts = [_rows_of(here, kept)] if len(kept) else []

        def sampled(tokens: SampledTokens) -> None:
            part = in_row_order([*parts, sampled_part(deferred.rows, deferred.params, tokens)])
            loop.call_soon_threadsafe(flight.land, self._result(plan, part, prompts))

        def failed(error: BaseException) -> None:
            loop.call_soon_threadsafe(self._fail, flight, error)

        sampler.submit(deferred.logits_RV, deferred.params, plan.logprobs_k, sampled, failed)

    def _result(self, plan: BatchPlan, rows: SampledPart, prompts: Sequence[tuple[int, Logprobs]]) -> BatchResult:
        self._counters.num_tokens_sampled += len(rows.tokens)
        return BatchResult(
            step=plan.step,
            tokens=rows.tokens[:, None],
            num_tokens=np.ones(len(rows.tokens), np.int32),
            flags=rows.flags,
            logprobs=rows.logprobs,
            prompt_logprobs=tuple(prompts),
        )

    def _fail(self, flight: CudaFlight, error: BaseException) -> None:
        self._counters.num_failed += 1
        if not isinstance(error, Exception):
            error = RuntimeError(f"{type(error).__name__} in the sampler's thread: {error}")
        flight.fail(error)


def _rows_of(part: SampledPart, rows: NDArray[np.intp]) -> SampledPart:
    logprobs = part.logprobs
    return SampledPart(
        rows=part.rows[rows],
        tokens=part.tokens[rows],
        flags=part.flags[rows],
        logprobs=logprobs
        and Logprobs(
            token_logprobs=logprobs.token_logprobs[rows],
            ranks=logprobs.ranks[rows],
            top_ids=logprobs.top_ids[rows],
            top_logprobs=logprobs.top_logprobs[rows],
        ),
    )
