"""The engine's facade: calls in, streams out, and the tasks in between."""

import asyncio
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from aserve.core import events
from aserve.core.actions import Action, DeliverTokens, Launch, WakeAt
from aserve.core.admission import Limits, admit, fit_max_tokens
from aserve.core.ids import SequenceId
from aserve.core.options import SchedulerOptions
from aserve.core.plan import MAIN_STREAM, BatchPlan
from aserve.core.request import MAX_STOP_IDS, FinishReason, SamplingParams, SequenceSpec
from aserve.core.scheduler import Scheduler
from aserve.engine.deliver import Choice, Deliverable, Deliverer
from aserve.engine.generation import GenerationRequest
from aserve.engine.group import sequence_specs
from aserve.engine.lander import Flying, Lander
from aserve.engine.loop import LaunchLoop, LoopAlarm, MakeAlarm
from aserve.engine.options import EngineOptions
from aserve.engine.permits import Permits
from aserve.engine.ports import (
    NullObserver,
    Observer,
    RequestEnd,
    RequestMove,
    RequestPhase,
    Runner,
    RunnerInfo,
    StepLanding,
    Tokenizer,
)
from aserve.engine.statistics import EngineStatistics, Health
from aserve.engine.stream import TokenStream
from aserve.errors import AserveError, ConfigError, DeviceLost, Draining, EngineDead, InvalidRequest, Overloaded
from aserve.faults import hit
from aserve.obs.log import Logger
from aserve.text.stops import StopMatcher

_QUEUED_POOLS = 8  # default bound of the waiting prompt tokens, in KV pools


@dataclass(slots=True, eq=False)
class _Call:
    """One open request. num_output: of each sequence that has ended, else 0."""

    request: GenerationRequest
    stream: TokenStream
    sequences: list[SequenceId]
    num_output: list[int]
    deadline: asyncio.TimerHandle | None = None


class Engine:
    """Owns the scheduler, three tasks (launching, landing, delivering) and every open stream.

    Everything runs on the loop of ``start``; no method blocks. After a sticky device error or a fault of its own the
    engine is dead: every open stream ends in ERROR, every later submit raises EngineDead, ``wait_dead`` returns.
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer,
        scheduler_options: SchedulerOptions | None = None,
        engine_options: EngineOptions | None = None,
        *,
        observer: Observer | None = None,
        log: Logger | None = None,
        clock: Callable[[], float] = time.monotonic,
        make_alarm: MakeAlarm | None = None,
    ) -> None:
        """clock: seconds, finer than a step (uvloop's own counts whole milliseconds). make_alarm: what wakes the launch
        loop at a time that the policy gives, by default the loop's timers (``loop.LoopAlarm``)."""
        info = runner.info
        scheduler_options = scheduler_options or SchedulerOptions(block_size=info.block_size)
        if scheduler_options.block_size != info.block_size:
            raise ConfigError(
                f"scheduler.block_size is {scheduler_options.block_size}, the runner's blocks have {info.block_size}."
            )
        for option in ("max_num_seqs", "max_num_batched_tokens"):
            wanted, most = getattr(scheduler_options, option), getattr(info, option)
            if 0 < most < wanted:
                raise ConfigError(f"scheduler.{option} is {wanted}, the runner was made for {most}.")
        self.options = engine_options or EngineOptions()
        self.info: RunnerInfo = info
        self.tokenizer = tokenizer
        self.scheduler = Scheduler(
            scheduler_options.with_sizes(num_seqs=info.max_num_seqs, num_batched_tokens=info.max_num_batched_tokens),
            num_blocks=info.num_blocks,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
        )
        self._runner = runner
        self._observer = observer or NullObserver()
        self._log = log or Logger.silent()
        self._clock = clock
        self._permits = Permits(self.scheduler.options.max_inflight)
        num_streams = len(self.scheduler.streams)
        self._lander = Lander(self._commit, self._count_eligible, clock, num_streams=num_streams)
        self._launcher = LaunchLoop(
            self.scheduler,
            runner,
            self._permits,
            self._lander,
            self._observer,
            carry_out=self._carry_out,
            clock=clock,
            make_alarm=make_alarm or LoopAlarm,
        )
        self._deliverer = Deliverer(
            self.options.fan_out_slice,
            self.options.max_joined_steps,
            self._observer,
            on_stop=self._on_stop_matched,
            on_end=self._on_choice_ended,
            clock=self._clock,
        )
        self._eos_ids = frozenset(info.eos_ids)
        self._calls: dict[str, _Call] = {}
        self._sequence_ids = itertools.count(1)
        self._num_accepted = 0
        self._num_eligible_rows = 0
        self._num_left_out_rows = 0
        self._num_rejected = 0
        self._num_finished = dict.fromkeys((reason.value for reason in FinishReason), 0)
        self._is_draining = False
        self._has_no_calls = asyncio.Event()
        self._has_no_calls.set()
        self._death: BaseException | None = None
        self._died = asyncio.Event()
        self._main: asyncio.Task[None] | None = None

    # --- life

    async def start(self) -> None:
        hit("engine.start")
        self._main = asyncio.create_task(self._run(), name="aserve engine")

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._launcher.run(), name="aserve launch")
                for stream in self.scheduler.streams:
                    tasks.create_task(self._lander.run(stream), name=f"aserve land {stream}")
                tasks.create_task(self._deliverer.run(), name="aserve deliver")
                tasks.create_task(self._watch(), name="aserve watchdog")
        except BaseExceptionGroup as group:  # native code that panics raises no Exception
            error = group.exceptions[0]
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            self._die(error)
        finally:
            self._launcher.close()

    async def _watch(self) -> None:
        """Raise if the oldest step is overdue: a device that hangs raises nothing by itself."""
        while True:
            age_s = self._lander.oldest_age_s()
            if age_s >= self.options.watchdog_s:
                raise DeviceLost(f"A step has been on the device for {age_s:.1f} s: the device hangs.")
            await asyncio.sleep(self.options.watchdog_s - age_s)  # none is overdue earlier

    def _die(self, error: BaseException) -> None:
        self._death = error
        self._log.error("engine.died", error=f"{type(error).__name__}: {error}", exc_info=error)
        self._end_all(FinishReason.ERROR, f"The engine has stopped: {error}")
        self._died.set()

    def _end_all(self, reason: FinishReason, sentence: str) -> None:
        """End every choice, behind the tokens that have landed for it."""
        try:
            self._deliverer.deliver_rest()
        except Exception as fault:  # of what is broken already: the ends are what counts
            self._log.error("engine.tokens_lost", error=f"{type(fault).__name__}: {fault}", exc_info=fault)
        for choice in list(self._deliverer.choices.values()):
            self._deliverer.end(choice, reason, error=sentence)

    async def wait_dead(self) -> BaseException:
        """Until the engine dies of a fault; returns the fault."""
        await self._died.wait()
        assert self._death is not None
        return self._death

    async def drain(self, timeout_s: float) -> None:
        """Take nothing new, let what is open finish for up to ``timeout_s``, then end the rest in ABORT."""
        hit("engine.drain")
        self._is_draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._has_no_calls.wait()
        except TimeoutError:
            for call in list(self._calls.values()):
                self._end_call(call, FinishReason.ABORT, "The server is shutting down.")
            await asyncio.sleep(0)

    async def aclose(self) -> None:
        """Stop the tasks, end what is still open, wait for the device. Idempotent."""
        self._is_draining = True
        try:
            if self._main is not None:
                self._main.cancel()
                await asyncio.gather(self._main, return_exceptions=True)
                self._main = None
        finally:
            try:
                self._end_all(FinishReason.ABORT, "The server is shutting down.")
            finally:
                await self._runner.aclose()

    # --- calls

    @property
    def caches_prefixes(self) -> bool:
        return self.scheduler.options.enable_prefix_caching

    @property
    def _limits(self) -> Limits:
        pool_tokens = self.info.num_blocks * self.info.block_size
        return self.scheduler.limits(
            self.options.max_queue_requests, self.options.max_queue_tokens or _QUEUED_POOLS * pool_tokens
        )

    def fit(self, num_prompt_tokens: int, max_tokens: int | None, default: int | None = None) -> int:
        """The output length to use, as ``core.admission.fit_max_tokens``."""
        try:
            return fit_max_tokens(self._limits, num_prompt_tokens, max_tokens, default)
        except InvalidRequest as error:
            self._refused(error)
            raise

    def _refused(self, error: AserveError) -> AserveError:
        """Counts a call that is turned away with this error, and returns it."""
        self._observer.request_rejected(error.code or "invalid_request")
        return error

    def submit_nowait(self, request: GenerationRequest) -> TokenStream:
        """Take a call and return its stream.

        Raises EngineDead, Draining, Overloaded (with ``retry_after_s``), ContextLengthExceeded or InvalidRequest;
        nothing is held after a raise.
        """
        hit("engine.submit")
        now = self._clock()
        if self._death is not None:
            raise self._refused(EngineDead(f"The engine has stopped: {self._death}"))
        if self._is_draining:
            raise self._refused(Draining("The server is shutting down.", retry_after_s=1.0))
        if request.request_id in self._calls:
            raise self._refused(InvalidRequest(f"A request with the id {request.request_id!r} is open already."))
        params = self._params(request)
        for prompt in request.prompts:
            self.fit(len(prompt), params.max_tokens)
        specs = sequence_specs(request, params, self._sequence_ids, now)
        waiting = self.scheduler.waiting
        num_tokens = sum(self.scheduler.num_uncached(spec) for spec in specs) if len(waiting) else 0
        reject = admit(self._limits, waiting, len(specs), num_tokens, now)
        if reject is not None:
            self._num_rejected += len(specs)
            sentence = f"The server is at its limit: {reject.reason}."
            raise self._refused(Overloaded(sentence, retry_after_s=reject.retry_after_s))
        return self._open(request, specs, now)

    def _params(self, request: GenerationRequest) -> SamplingParams:
        stop_ids = dict.fromkeys(request.params.stop_token_ids)
        if not request.ignore_eos:
            stop_ids |= dict.fromkeys(self.info.eos_ids)
        if len(stop_ids) > MAX_STOP_IDS:
            room = MAX_STOP_IDS - len(self.info.eos_ids)
            sentence = f"At most {room} stop token ids are possible here."
            raise self._refused(InvalidRequest(sentence, param="stop_token_ids"))
        return replace(request.params, stop_token_ids=tuple(stop_ids))

    def _open(self, request: GenerationRequest, specs: list[SequenceSpec], now: float) -> TokenStream:
        stream = TokenStream(
            request.request_id,
            len(specs),
            self.options,
            owner=self,
            now=now,
        )
        eos_ids = frozenset() if request.ignore_eos else self._eos_ids
        stop_ids = eos_ids | frozenset(request.params.stop_token_ids)
        stream.usage.prompt_tokens = sum(len(prompt) for prompt in request.prompts)
        call = _Call(request, stream, [spec.id for spec in specs], [0] * len(specs))
        limits = [limit for limit in (request.deadline_s, self.options.request_timeout_s) if limit]
        if limits:
            loop = asyncio.get_running_loop()
            call.deadline = loop.call_later(min(limits), self._on_deadline, call)
        self._calls[request.request_id] = call
        self._has_no_calls.clear()
        self._num_accepted += len(specs)
        for index, spec in enumerate(specs):
            self._deliverer.choices[spec.id] = Choice(
                sequence=spec.id,
                index=index,
                request=request,
                stream=stream,
                is_first=index % request.n == 0,
                decoder=self.tokenizer.decoder(skip_special_tokens=request.skip_special_tokens),
                matcher=StopMatcher(request.stop, include=request.include_stop_str_in_output) if request.stop else None,
                eos_ids=eos_ids,
                stop_ids=stop_ids,
                is_plain=request.params.logprobs is None and request.params.prompt_logprobs is None,
            )
            self.scheduler.handle(events.SequenceSubmitted(spec), now)
            self._observer.request_moved(
                RequestMove(
                    sequence=spec.id,
                    request_id=request.request_id,
                    index=index,
                    phase="queued",
                    at_s=now,
                    num_tokens=len(spec.prompt),
                )
            )
        self._launcher.wake()
        return stream

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT, *, owner: str | None = None) -> bool:
        """End a call. False if there is none with this id, or if ``owner`` is given and it belongs to another."""
        hit("engine.abort")
        call = self._calls.get(request_id)
        if call is None or (owner is not None and call.request.owner != owner):
            return False
        self._end_call(call, reason, "The request was aborted.")
        return True

    def _end_call(self, call: _Call, reason: FinishReason, sentence: str) -> None:
        """The outside ends what is left of a call: nothing of it is composed any more, its stream is told in order."""
        for sequence in call.sequences:
            self._carry_out(self.scheduler.handle(events.SequenceEnded(sequence, reason, sentence), self._clock()))
        self._launcher.wake()

    def _on_deadline(self, call: _Call) -> None:
        self._end_call(call, FinishReason.TIMEOUT, "The request's time limit has passed.")

    # --- what a stream's reader does (``stream.StreamOwner``)

    def others_wait(self) -> bool:
        return len(self.scheduler.waiting) > 0

    def stream_stalled(self, stream: TokenStream) -> None:
        self._tell_scheduler(stream, events.ReaderStalled, "parked")

    def stream_caught_up(self, stream: TokenStream) -> None:
        self._tell_scheduler(stream, events.ReaderCaughtUp, "queued")

    def _tell_scheduler(
        self,
        stream: TokenStream,
        event: type[events.ReaderStalled] | type[events.ReaderCaughtUp],
        phase: RequestPhase,
    ) -> None:
        call = self._calls.get(stream.request_id)
        now = self._clock()
        for sequence in call.sequences if call is not None else ():
            self._carry_out(self.scheduler.handle(event(sequence), now))
            self._deliverer.note_move(sequence, phase, now)
        self._launcher.wake()

    def stream_given_up(self, stream: TokenStream) -> None:
        call = self._calls.get(stream.request_id)
        if call is not None:
            self._log.warning("request.stalled", request_id=stream.request_id)
            self._end_call(call, FinishReason.ABORT, "The reader did not keep up.")

    def stream_closed(self, stream: TokenStream) -> None:
        call = self._calls.get(stream.request_id)
        if call is None or call.stream is not stream:
            return
        self._end_call(call, FinishReason.ABORT, "The reader left.")
        # Nobody reads what is still queued for delivery: the choices end here and not in their turn.
        for sequence in call.sequences:
            choice = self._deliverer.choices.get(sequence)
            if choice is not None:
                self._deliverer.end(choice, FinishReason.ABORT)

    # --- what the scheduler wants done

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            assert not isinstance(action, Launch | WakeAt), "only the launch loop launches"
            self._deliverer.post(action)

    def _count_eligible(self, plan: BatchPlan) -> int:
        """Of all with work where a step holds rows and chunks, else of those whose kind of work it holds."""
        scheduler = self.scheduler
        num_waiting = len(scheduler.waiting)
        if scheduler.options.prefill == "mixed":
            num = len(scheduler.ready) + num_waiting
        elif plan.chunks:
            num_in_last_chunk = sum(chunk.last for chunk in plan.chunks)  # which count as decoding already
            num = len(scheduler.ready.prefilling()) + num_in_last_chunk + num_waiting
        else:
            num = int(scheduler.slots.decoding.sum())
        return min(num, scheduler.options.max_num_seqs)

    def _commit(self, event: events.StepLanded | events.StepFailed, step: Flying, landed_s: float) -> None:
        """One landing: commit, write out first tokens, launch what is due, queue the rest. No await in between."""
        plan, counters = step.launch.plan, self.scheduler.counters
        num_wasted_before = counters.num_wasted_rows
        actions = self.scheduler.handle(event, landed_s)
        num_wasted_rows = counters.num_wasted_rows - num_wasted_before
        self._permits.release()
        assert self._permits.statistics().num_taken == len(self.scheduler.inflight), "permits and core disagree"
        if isinstance(event, events.StepFailed):
            self._log.error("step.failed", step=plan.step, detail=event.detail)
        rest: list[Deliverable] = []
        for action in actions:
            assert not isinstance(action, Launch | WakeAt), "only the launch loop launches"
            remaining = self._deliverer.take_first_tokens(action) if isinstance(action, DeliverTokens) else action
            if remaining is not None:
                rest.append(remaining)
        # Posted before the launch, which may fail and end some of these sequences: their tokens come first.
        self._deliverer.post_landing(rest, landed_s, is_next_short=self._lander.lands_rows_next())
        committed_s = self._clock()
        self._launcher.launch_due(landed_s)
        self._num_eligible_rows += step.num_eligible
        num_places = len(plan.rows) + len(plan.chunks) - num_wasted_rows
        self._num_left_out_rows += max(step.num_eligible - num_places, 0)
        assert step.started_s is not None, "the oldest step has started"
        self._observer.step_landed(
            StepLanding(
                step=plan.step,
                stream=plan.stream,
                launched_s=step.launched_s,
                started_s=step.started_s,
                landed_s=landed_s,
                committed_s=committed_s,
                num_rows=len(plan.rows),
                num_chunks=len(plan.chunks),
                num_prefill_tokens=plan.num_tokens - len(plan.rows),
                num_eligible=step.num_eligible,
                num_wasted_rows=num_wasted_rows,
                predicted_s=step.launch.predicted_s,
                failed=isinstance(event, events.StepFailed),
            )
        )

    def _on_stop_matched(self, sequence: SequenceId, token_index: int) -> None:
        # The choice has ended by its stop string already: the scheduler's Finish finds nobody, and that is right.
        self.scheduler.handle(events.StopMatched(sequence, token_index), self._clock())
        self._launcher.wake()

    def _on_choice_ended(self, choice: Choice, reason: FinishReason) -> None:
        self._num_finished[reason] += 1
        now, request = self._clock(), choice.request
        call = self._calls[request.request_id]
        call.num_output[choice.index] = choice.num_output
        self._observer.request_finished(
            RequestEnd(
                reason=reason,
                submitted_s=choice.stream.timings.submitted_s,
                started_s=choice.started_s,
                first_token_s=choice.first_token_s,
                last_token_s=choice.last_token_s if choice.num_output else None,
                ended_s=now,
                num_prompt_tokens=len(choice.prompt),
                num_cached_tokens=choice.num_cached,
                num_output_tokens=choice.num_output,
                max_tokens=request.params.max_tokens,
                n=request.n,
                num_output_tokens_max=self._longest_output(call, choice),
            )
        )
        self._observer.request_moved(
            RequestMove(
                sequence=choice.sequence,
                request_id=request.request_id,
                index=choice.index,
                phase="ended",
                at_s=now,
                num_tokens=choice.num_output,
                finish_reason=reason,
            )
        )
        if all(sequence not in self._deliverer.choices for sequence in call.sequences):
            if call.deadline is not None:
                call.deadline.cancel()
            del self._calls[request.request_id]
            if not self._calls:
                self._has_no_calls.set()

    def _longest_output(self, call: _Call, choice: Choice) -> int | None:
        """Of the choice's prompt; None while another of its choices runs."""
        n = call.request.n
        first = choice.index // n * n
        if any(sequence in self._deliverer.choices for sequence in call.sequences[first : first + n]):
            return None
        return max(call.num_output[first : first + n])

    # --- looking

    @property
    def is_idle(self) -> bool:
        """Whether no call is open."""
        return not self._calls

    def flush_prefix_cache(self) -> int:
        """Forget every cached prefix; returns the number of blocks let go. Running requests keep theirs."""
        before = self.scheduler.ledger.num_cached
        self.scheduler.handle(events.CacheFlushed(), self._clock())
        return before

    def statistics(self) -> EngineStatistics:
        scheduler, limits = self.scheduler, self._limits
        ledger, counters = scheduler.ledger, scheduler.counters
        return EngineStatistics(
            num_waiting=len(scheduler.waiting),
            num_queued_tokens=scheduler.waiting.num_tokens,
            max_queue_requests=limits.max_queue_requests,
            max_queue_tokens=limits.max_queue_tokens,
            num_running=len(scheduler.ready),
            num_parked=len(scheduler.parked),
            num_inflight_steps=len(scheduler.inflight),
            num_streams=len(self._calls),
            num_blocks=ledger.num_blocks,
            num_blocks_free=ledger.num_free,
            num_blocks_cached=ledger.num_cached,
            num_blocks_pending=ledger.num_pending,
            kv_cache_usage=1.0 - (ledger.num_free + ledger.num_cached) / ledger.num_blocks,
            num_accepted=self._num_accepted,
            num_rejected=self._num_rejected,
            num_finished=dict(self._num_finished),
            num_steps=counters.num_steps,
            num_failed_steps=counters.num_failed_steps,
            num_rows=counters.num_rows,
            num_prefill_tokens=counters.num_prefill_tokens,
            num_preemptions=counters.num_preemptions,
            num_wasted_rows=counters.num_wasted_rows,
            num_eligible_rows=self._num_eligible_rows,
            num_left_out_rows=self._num_left_out_rows,
            bubble_s=self._launcher.bubble_s,
            prompt_tokens=counters.num_prompt_tokens,
            generation_tokens=counters.num_generated_tokens,
            prefix_cache_queries=counters.num_prefix_queries,
            prefix_cache_hits=counters.num_prefix_hits,
            policy={
                ("" if stream == MAIN_STREAM else "prefill_") + name: value
                for stream, policy in scheduler.policies.items()
                for name, value in policy.statistics().items()
            },
            runner=self._runner.statistics(),
        )

    def health(self) -> Health:
        if self._death is not None:
            return Health(alive=False, ready=False, reason=f"the engine has stopped: {self._death}")
        if self._is_draining:
            return Health(alive=True, ready=False, reason="draining")
        limits = self._limits
        if len(self.scheduler.waiting) >= limits.max_queue_requests:
            return Health(alive=True, ready=False, reason="the queue is full")
        return Health(alive=True, ready=True, reason="ok")
