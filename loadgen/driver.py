"""One process's share of a run: when to send, how many at once, and how well this program itself kept up."""

import asyncio
import gc
from array import array
from collections.abc import Awaitable, Callable
from time import perf_counter, process_time

from loadgen.arrivals import ClosedLoop, Poisson, share
from loadgen.client import Client, Clock, Connect
from loadgen.exchange import Ticket
from loadgen.options import RunOptions
from loadgen.result import DriverResult
from loadgen.sample import Sample

LAG_PERIOD_S = 0.02
CPU_PERIOD_S = 1.0
LAG_SAMPLES_MAX = 1 << 20  # 8 MB, almost six hours
PREPARED_BYTES_MAX = 64 << 20
SLEEP_S_MIN = 0.001  # loops round shorter sleeps to nothing, which would make waiting a busy loop


class _Bodies:
    """The bodies of a run, the first PREPARED_BYTES_MAX of them made ahead, so that making them delays no request."""

    def __init__(self, options: RunOptions) -> None:
        self._options = options
        self._prepared: dict[int, bytes] = {}

    def prepare(self, indices: list[int]) -> None:
        num_bytes = 0
        for index in indices:
            body = self._prepared[index] = self._make(index)
            num_bytes += len(body)
            if num_bytes > PREPARED_BYTES_MAX:
                break

    def take(self, index: int) -> bytes:
        return self._prepared.pop(index, None) or self._make(index)

    def _make(self, index: int) -> bytes:
        return self._options.template.body(self._options.prompts.prompt(index, self._options.seed))


class Driver:
    """Sends the requests of one process and collects their samples.

    ``agree_start`` is awaited when the warm-up is over and returns the start of the run on ``clock``, the same for all
    processes.
    """

    def __init__(
        self,
        options: RunOptions,
        process: int,
        *,
        agree_start: Callable[[], Awaitable[float]],
        clock: Clock = perf_counter,
        connect: Connect | None = None,
    ) -> None:
        self._options = options
        self._process = process
        self._agree_start = agree_start
        self._clock = clock
        self._client = Client(
            options.target,
            options.template.endpoint,
            timeout_s=options.timeout_s,
            connect_timeout_s=options.connect_timeout_s,
            clock=clock,
            connect=connect,
        )
        self._bodies = _Bodies(options)
        self._start_s = 0.0
        self._samples: list[Sample] = []
        self._num_held_back = 0
        self._loop_lag_s: array[float] = array("d")
        self._cpu_shares: array[float] = array("d")
        self._stopping = asyncio.Event()

    async def run(self) -> DriverResult:
        """Warm up, wait for the common start, send everything and return when the last request has ended."""
        try:
            await self._warm_up()
            self._bodies.prepare(self._known_indices())
            gc.collect()
            gc.freeze()  # what was made until here need not be looked at again in the middle of a measurement
            self._start_s = await self._agree_start()
            await self._sleep_until(self._start_s)
            began_s, cpu_began_s = self._clock(), process_time()
            monitor = asyncio.create_task(self._watch_loop())
            try:
                if isinstance(self._options.arrivals, ClosedLoop):
                    await self._run_closed(self._options.arrivals)
                else:
                    await self._run_open(self._options.arrivals)
            finally:
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

    def interrupt(self) -> None:
        """Send nothing more and end what is out; ``run`` then returns what there is."""
        self._stopping.set()
        self._client.interrupt()

    async def _warm_up(self) -> None:
        options = self._options
        arrivals = options.arrivals
        num_users = arrivals.concurrency if isinstance(arrivals, ClosedLoop) else options.max_inflight
        # Negative indices: prompts that do not come again in the run.
        indices = iter(range(-1 - self._process, -1 - options.num_warmup_requests, -options.num_processes))
        origin_s = self._clock()

        async def user() -> None:
            for index in indices:
                if self._stopping.is_set():
                    return
                ticket = Ticket(index=index, process=self._process, intended_s=0.0, lag_s=0.0)
                await self._client.send(self._bodies.take(index), ticket, origin_s=origin_s)

        num_here = min(-(-num_users // options.num_processes), options.num_warmup_requests)
        async with asyncio.TaskGroup() as group:
            for _ in range(num_here):
                group.create_task(user())

    async def _run_closed(self, arrivals: ClosedLoop) -> None:
        options = self._options
        slots = arrivals.slots(self._process, options.num_processes)
        indices = arrivals.indices(slots, options.num_requests)

        async def user() -> None:
            free_s = self._clock()
            while not self._stopping.is_set():
                if options.duration_s is not None and free_s - self._start_s >= options.duration_s:
                    return
                index = next(indices, None)
                if index is None:
                    return
                await self._send(index, free_s - self._start_s, lag_s=self._clock() - free_s)
                free_s = self._clock()

        async with asyncio.TaskGroup() as group:
            for _ in slots:
                group.create_task(user())

    async def _run_open(self, arrivals: Poisson) -> None:
        num_here = len(range(self._process, self._options.max_inflight, self._options.num_processes))
        permits = asyncio.Semaphore(num_here)
        free_s = self._start_s  # until then this coroutine last waited for a place: a delay of the bound's, not its own

        async def send(index: int, due_s: float, lag_s: float) -> None:
            try:
                await self._send(index, due_s, lag_s=lag_s)
            finally:
                permits.release()

        async with asyncio.TaskGroup() as group:
            for index, due_s in self._schedule(arrivals):
                await self._sleep_until(self._start_s + due_s)
                lag_s = self._clock() - max(self._start_s + due_s, free_s)
                is_held_back = permits.locked()
                await permits.acquire()
                if self._stopping.is_set():
                    return
                if is_held_back:
                    free_s = self._clock()
                if self._start_s + due_s < free_s:
                    self._num_held_back += 1
                group.create_task(send(index, due_s, lag_s))

    async def _send(self, index: int, intended_s: float, *, lag_s: float) -> None:
        ticket = Ticket(index=index, process=self._process, intended_s=intended_s, lag_s=lag_s)
        self._samples.append(await self._client.send(self._bodies.take(index), ticket, origin_s=self._start_s))

    def _schedule(self, arrivals: Poisson) -> list[tuple[int, float]]:
        options = self._options
        due_s = arrivals.due_s(seed=options.seed, num_requests=options.num_requests, duration_s=options.duration_s)
        return share(due_s, self._process, options.num_processes)

    def _known_indices(self) -> list[int]:
        """The requests that are certain to be sent; of a closed loop bounded by time alone, none."""
        options = self._options
        if not isinstance(options.arrivals, ClosedLoop):
            return [index for index, _ in self._schedule(options.arrivals)]
        if options.num_requests is None:
            return []
        slots = options.arrivals.slots(self._process, options.num_processes)
        return list(options.arrivals.indices(slots, options.num_requests))

    async def _sleep_until(self, when_s: float) -> None:
        """Return at ``when_s`` or up to SLEEP_S_MIN later, or at once when stopping."""
        while (wait_s := when_s - self._clock()) > 0 and not self._stopping.is_set():
            try:
                async with asyncio.timeout(max(wait_s, SLEEP_S_MIN)):
                    await self._stopping.wait()
            except TimeoutError:
                continue

    async def _watch_loop(self) -> None:
        second_s, second_cpu_s = self._clock(), process_time()
        while len(self._loop_lag_s) < LAG_SAMPLES_MAX:
            due_s = self._clock() + LAG_PERIOD_S
            await asyncio.sleep(LAG_PERIOD_S)
            now_s = self._clock()
            self._loop_lag_s.append(max(0.0, now_s - due_s))
            if now_s - second_s >= CPU_PERIOD_S:
                cpu_s = process_time()
                self._cpu_shares.append((cpu_s - second_cpu_s) / (now_s - second_s))
                second_s, second_cpu_s = now_s, cpu_s
