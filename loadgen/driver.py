"""One process's share of a run: when to send, how many at once, and how well this program itself kept up."""

import asyncio
import gc
from array import array
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from time import perf_counter, process_time

from loadgen.alarm import Alarm, best_alarm
from loadgen.arrivals import ClosedLoop, Schedule, due_s, share
from loadgen.client import Client, Clock, Connect
from loadgen.exchange import Ticket
from loadgen.options import RunOptions
from loadgen.result import DriverResult
from loadgen.sample import Sample
from loadgen.work import Ask, Message, drawn_answer

LAG_PERIOD_S = 0.02
CPU_PERIOD_S = 1.0
PROGRESS_PERIOD_S = 0.5
LAG_SAMPLES_MAX = 1 << 20  # 8 MB, almost six hours
PREPARED_BYTES_MAX = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A glance at one process in the middle of a run; counts are totals since the start."""

    process: int
    at_s: float
    num_ok: int
    num_failed: int
    num_out: int
    num_events: int
    ttft_ms: "array[float]"  # from the intended time, of requests that ended since the last glance
    e2e_ms: "array[float]"  # likewise


class _Turns:
    """What the first turns ask and their bodies, the first PREPARED_BYTES_MAX of them made ahead, so that making them
    delays no request."""

    def __init__(self, options: RunOptions) -> None:
        self._options = options
        self._prepared: dict[int, tuple[Ask, bytes]] = {}

    def prepare(self, indices: list[int]) -> None:
        num_bytes = 0
        for index in indices:
            turn = self._prepared[index] = self.make(index, 0, [])
            num_bytes += len(turn[1])
            if num_bytes > PREPARED_BYTES_MAX:
                break

    def take(self, index: int, turn: int, conversation: list[Message]) -> tuple[Ask, bytes]:
        prepared = self._prepared.pop(index, None) if turn == 0 else None
        return prepared or self.make(index, turn, conversation)

    def make(self, index: int, turn: int, conversation: list[Message]) -> tuple[Ask, bytes]:
        ask = self._options.source.ask(index, turn, self._options.seed)
        return ask, self._options.template.body(ask, conversation)


class Driver:
    """Sends the requests of one process and collects their samples.

    ``agree_start`` is awaited when the warm-up is over and returns the start of the run on ``clock``, the same for all
    processes. ``tell`` is called twice a second with the progress.
    """

    def __init__(
        self,
        options: RunOptions,
        process: int,
        *,
        agree_start: Callable[[], Awaitable[float]],
        tell: Callable[[Progress], None] | None = None,
        clock: Clock = perf_counter,
        connect: Connect | None = None,
        alarm: Callable[[Clock], Alarm] = best_alarm,
    ) -> None:
        self._options = options
        self._process = process
        self._agree_start = agree_start
        self._tell = tell
        self._clock = clock
        self._make_alarm = alarm
        self._alarm: Alarm | None = None
        self._client = Client(
            options.target,
            options.template.endpoint,
            timeout_s=options.timeout_s,
            connect_timeout_s=options.connect_timeout_s,
            clock=clock,
            connect=connect,
        )
        self._turns = _Turns(options)
        num_here = len(range(process, options.max_inflight, options.num_processes))
        self._permits = asyncio.Semaphore(num_here)
        self._start_s = 0.0
        self._samples: list[Sample] = []
        self._num_held_back = 0
        self._num_told = 0  # samples
        self._num_events = 0  # of samples
        self._num_ok = 0
        self._num_out = 0
        self._loop_lag_s: array[float] = array("d")
        self._cpu_shares: array[float] = array("d")
        self._is_stopping = False

    async def run(self) -> DriverResult:
        """Warm up, wait for the common start, send everything and return when the last request has ended."""
        self._alarm = self._make_alarm(self._clock)
        try:
            await self._warm_up()
            self._turns.prepare(self._known_indices())
            gc.collect()
            gc.freeze()  # what was made until here need not be looked at again in the middle of a measurement
            self._start_s = await self._agree_start()
            await self._sleep_until(self._start_s)
            began_s, cpu_began_s = self._clock(), process_time()
            monitors = [asyncio.create_task(self._watch_loop())]
            if self._tell is not None:
                monitors.append(asyncio.create_task(self._report_progress(self._tell)))
            try:
                if isinstance(self._options.arrivals, ClosedLoop):
                    await self._run_closed(self._options.arrivals)
                else:
                    await self._run_open(self._options.arrivals)
            finally:
                for monitor in monitors:
                    monitor.cancel()
            return DriverResult(
                process=self._process,
                samples=self._samples,
                num_held_back=self._num_held_back,
                wall_s=self._clock() - began_s,
                cpu_s=process_time() - cpu_began_s,
                loop_lag_s=self._loop_lag_s,
                cpu_shares=self._cpu_shares,
            )
        finally:
            gc.unfreeze()
            await self._client.aclose()
            self._alarm.close()

    def interrupt(self) -> None:
        """Send nothing more and end what is out; ``run`` then returns what there is."""
        self._is_stopping = True
        self._client.interrupt()
        if self._alarm is not None:
            self._alarm.wake_all()

    async def _warm_up(self) -> None:
        options = self._options
        arrivals = options.arrivals
        num_users = arrivals.concurrency if isinstance(arrivals, ClosedLoop) else options.max_inflight
        # Negative indices: prompts that do not come again in the run.
        indices = iter(range(-1 - self._process, -1 - options.num_warmup_requests, -options.num_processes))
        origin_s = self._clock()

        async def user() -> None:
            for index in indices:
                if self._is_stopping:
                    return
                ask, body = self._turns.make(index, 0, [])
                await self._client.send(body, self._ticket(index, 0, ask, 0.0, lag_s=0.0), origin_s=origin_s)

        num_here = min(-(-num_users // options.num_processes), options.num_warmup_requests)
        async with asyncio.TaskGroup() as group:
            for _ in range(num_here):
                group.create_task(user())

    async def _run_closed(self, arrivals: ClosedLoop) -> None:
        options = self._options
        slots = arrivals.slots(self._process, options.num_processes)
        indices = arrivals.indices(slots, options.num_requests)

        async def user(slot: int) -> None:
            free_s = self._start_s + arrivals.begin_s(slot)
            await self._sleep_until(free_s)
            while not self._is_stopping:
                if options.duration_s is not None and free_s - self._start_s >= options.duration_s:
                    return
                index = next(indices, None)
                if index is None:
                    return
                await self._play(index, free_s - self._start_s, lag_s=self._clock() - free_s)
                free_s = self._clock()

        async with asyncio.TaskGroup() as group:
            for slot in slots:
                group.create_task(user(slot))

    async def _run_open(self, arrivals: Schedule) -> None:
        async with asyncio.TaskGroup() as group:
            for index, at_s in self._schedule(arrivals):
                await self._sleep_until(self._start_s + at_s)
                if self._is_stopping:
                    return
                group.create_task(self._play(index, at_s, lag_s=self._clock() - self._start_s - at_s))

    async def _play(self, index: int, intended_s: float, *, lag_s: float) -> None:
        """Play an arrival: its turns one after another, until one fails or is left."""
        options = self._options
        conversation: list[Message] = []
        num_turns = options.source.num_turns(index, options.seed)
        for turn in range(num_turns):
            ask, body = self._turns.take(index, turn, conversation)
            keeps_text = options.history == "served" and turn + 1 < num_turns
            ticket = self._ticket(index, turn, ask, intended_s, lag_s=lag_s, keeps_text=keeps_text)
            sent = await self._send(body, ticket)
            if sent is None or turn + 1 == num_turns:
                return
            sample, text = sent
            if not sample.is_ok or sample.is_aborted:
                return
            if not keeps_text:
                text = drawn_answer(index, turn, options.seed, ask.max_tokens or options.template.max_tokens)
            conversation += [*ask.messages, {"role": "assistant", "content": text}]
            intended_s = sample.end_s + ask.think_s
            await self._sleep_until(self._start_s + intended_s)
            if self._is_stopping:
                return
            lag_s = self._clock() - self._start_s - intended_s

    async def _send(self, body: bytes, ticket: Ticket) -> tuple[Sample, str] | None:
        """Send one turn when there is a place for it; None where the run was stopped before.

        Keeps its sample and returns it with the answer's text, which is empty unless the ticket asks for it.
        """
        self._num_held_back += self._permits.locked()
        async with self._permits:
            if self._is_stopping:
                return None
            self._num_out += 1
            exchange = await self._client.send(body, ticket, origin_s=self._start_s)
            self._num_out -= 1
        sample = exchange.sample()
        self._samples.append(sample)
        self._num_ok += sample.is_ok
        self._num_events += exchange.num_events
        return sample, exchange.text()

    def _ticket(
        self, index: int, turn: int, ask: Ask, intended_s: float, *, lag_s: float, keeps_text: bool = False
    ) -> Ticket:
        return Ticket(
            index=index,
            turn=turn,
            process=self._process,
            part=ask.part,
            intended_s=intended_s,
            lag_s=lag_s,
            behaviour=ask.behaviour,
            is_streamed=self._options.template.is_streamed,
            keeps_text=keeps_text,
        )

    def _schedule(self, arrivals: Schedule) -> list[tuple[int, float]]:
        options = self._options
        times_s = due_s(arrivals, seed=options.seed, num_requests=options.num_requests, duration_s=options.duration_s)
        return share(times_s, self._process, options.num_processes)

    def _known_indices(self) -> list[int]:
        """The arrivals that are certain to come; of a closed loop bounded by time alone, none."""
        options = self._options
        if not isinstance(options.arrivals, ClosedLoop):
            return [index for index, _ in self._schedule(options.arrivals)]
        if options.num_requests is None:
            return []
        slots = options.arrivals.slots(self._process, options.num_processes)
        return list(options.arrivals.indices(slots, options.num_requests))

    async def _sleep_until(self, when_s: float) -> None:
        """Return at ``when_s`` or just after it, or at once when stopping."""
        assert self._alarm is not None
        while (wait_s := when_s - self._clock()) > 0 and not self._is_stopping:
            await self._alarm.sleep(wait_s)

    async def _report_progress(self, tell: Callable[[Progress], None]) -> None:
        while True:
            await asyncio.sleep(PROGRESS_PERIOD_S)
            tell(self._progress())

    def _progress(self) -> Progress:
        fresh = self._samples[self._num_told :]
        self._num_told += len(fresh)
        ttft_ms: array[float] = array("d")
        e2e_ms: array[float] = array("d")
        for sample in fresh:
            if sample.is_ok and sample.sent_s is not None and sample.answer.event_ns:
                ttft_ms.append((sample.sent_s - sample.intended_s) * 1e3 + sample.answer.event_ns[0] / 1e6)
                e2e_ms.append((sample.end_s - sample.intended_s) * 1e3)
        return Progress(
            process=self._process,
            at_s=self._clock() - self._start_s,
            num_ok=self._num_ok,
            num_failed=len(self._samples) - self._num_ok,
            num_out=self._num_out,
            num_events=self._num_events + self._client.num_events_out,
            ttft_ms=ttft_ms,
            e2e_ms=e2e_ms,
        )

    async def _watch_loop(self) -> None:
        second_s, second_cpu_s = self._clock(), process_time()
        assert self._alarm is not None
        while len(self._loop_lag_s) < LAG_SAMPLES_MAX:
            due = self._clock() + LAG_PERIOD_S
            await self._alarm.sleep(LAG_PERIOD_S)
            now_s = self._clock()
            self._loop_lag_s.append(max(0.0, now_s - due))
            if now_s - second_s >= CPU_PERIOD_S:
                cpu_s = process_time()
                self._cpu_shares.append((cpu_s - second_cpu_s) / (now_s - second_s))
                second_s, second_cpu_s = now_s, cpu_s
