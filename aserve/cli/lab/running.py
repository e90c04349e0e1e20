"""One run: requests that arrive at given times, through the whole engine, and everything that was seen of it."""

import asyncio
import itertools
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from aserve.core.options import SchedulerOptions
from aserve.core.plan import MAIN_STREAM
from aserve.core.request import SamplingParams
from aserve.engine.engine import Engine
from aserve.engine.generation import Delta, GenerationRequest
from aserve.engine.loop import MakeAlarm
from aserve.engine.options import EngineOptions
from aserve.engine.ports import NullObserver, RequestMove, Runner, StepLanding, StepLaunch, Tokenizer
from aserve.engine.trace import Trace
from aserve.obs.trace import Slice, Timeline
from aserve.testing import HostCosts, StepCosts, VirtualAlarm, VirtualDevice, VirtualStep, idle_share, run_virtual

_PROMPT_IDS: Final = range(32, 1 << 15)
"""Prompts are random ids of these, as far as the vocabulary goes."""

ENGINE_OPTIONS: Final = EngineOptions(max_queue_requests=1 << 14, max_queue_tokens=1 << 30, watchdog_s=3600.0)
"""Nothing is refused, and a step may take long: the laboratory asks what happens, not what a server should allow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request: when it comes, in seconds from the run's start, and how long it is."""

    at_s: float = 0.0
    num_prompt_tokens: int = 1
    num_output_tokens: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How a run is scheduled, and on what. name: what tables and plots call it.

    costs, host: of the virtual device and its processor, alarm_late_s how late its alarms ring, shared_rate how two
    streams share it; a real device has its own.
    """

    name: str
    policy: Any
    max_inflight: int = 4
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 1024
    prefill: Any = "mixed"
    sampler: Any = "device"
    costs: StepCosts
    host: HostCosts
    shared_rate: float = 0.5
    alarm_late_s: float = 0.0

    def scheduler_options(self, block_size: int) -> SchedulerOptions:
        return SchedulerOptions(
            block_size=block_size,
            policy=self.policy,
            max_inflight=self.max_inflight,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            prefill=self.prefill,
            sampler=self.sampler,
            enable_prefix_caching=False,
        )


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One request's way, by the engine's clock in seconds. read_s: when its reader got each token."""

    arrival: Arrival
    arrived_s: float
    composed_s: float = float("nan")
    read_s: list[float] = field(default_factory=list)

    @property
    def queue_s(self) -> float:
        """From its arrival to the moment in which its first step was composed."""
        return self.composed_s - self.arrived_s

    @property
    def ttft_s(self) -> float:
        return self.read_s[0] - self.arrived_s

    @property
    def latency_s(self) -> float:
        return self.read_s[-1] - self.arrived_s

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in itertools.pairwise(self.read_s)]


@dataclass(slots=True, eq=False, kw_only=True)
class Run:
    """What was seen of one run. idle: share of the time in which the device did nothing. timeline: where wanted."""

    setup: Setup
    began_s: float
    requests: list[RequestRecord]
    launches: list[StepLaunch]
    landings: list[StepLanding]
    idle: float
    timeline: Timeline | None = None

    @property
    def total_s(self) -> float:
        """From the first arrival to the last token read."""
        return max(r.read_s[-1] for r in self.requests) - min(r.arrived_s for r in self.requests)

    @property
    def requests_per_s(self) -> float:
        return len(self.requests) / self.total_s

    @property
    def tokens_per_s(self) -> float:
        return sum(len(r.read_s) for r in self.requests) / self.total_s

    @property
    def latency_ms(self) -> float:
        return statistics.fmean(r.latency_s for r in self.requests) * 1e3

    @property
    def queue_ms(self) -> float:
        return statistics.fmean(r.queue_s for r in self.requests) * 1e3

    @property
    def ttft_ms(self) -> float:
        return statistics.fmean(r.ttft_s for r in self.requests) * 1e3

    def ttft_ms_at(self, share: float) -> float:
        return quantile_ms([r.ttft_s for r in self.requests], share)

    def gap_ms_at(self, share: float) -> float:
        """Quantile of the times between a stream's tokens."""
        return quantile_ms([gap for r in self.requests for gap in r.gaps_s], share)

    def tpot_ms_at(self, share: float) -> float:
        """Quantile over the requests of their mean time a token after the first."""
        return quantile_ms([statistics.fmean(r.gaps_s) for r in self.requests if len(r.read_s) > 1], share)

    @property
    def num_launches(self) -> int:
        return len(self.launches)

    @property
    def batch_sizes(self) -> list[int]:
        """Sequences of each step."""
        return [launch.num_rows + launch.num_chunks for launch in self.launches]

    @property
    def mean_batch_size(self) -> float:
        return statistics.fmean(self.batch_sizes)

    @property
    def idle_percent(self) -> float:
        return 100 * self.idle

    @property
    def prediction_error(self) -> float | None:
        """Median of |predicted - actual| / actual over the steps whose time the policy predicted, if any."""
        errors = [
            abs(step.predicted_s / took_s - 1)
            for step in self.landings
            if step.predicted_s is not None and (took_s := step.landed_s - step.started_s) > 0
        ]
        return statistics.median(errors) if errors else None


def quantile_ms(seconds: Sequence[float], share: float) -> float:
    return float(np.quantile(np.array(seconds), share)) * 1e3 if len(seconds) else float("nan")


class Bench(Protocol):
    """Something to run on. is_virtual: the setup's costs are what a run takes. has_streams: two steps run at once."""

    @property
    def is_virtual(self) -> bool: ...

    @property
    def has_streams(self) -> bool: ...

    def run(
        self,
        setup: Setup,
        arrivals: Sequence[Arrival],
        *,
        warm_up: Sequence[Arrival] = (),
        seed: int = 0,
        with_timeline: bool = False,
    ) -> Run:
        """All arrivals to their ends, after those of ``warm_up``, which teach the policy and are not counted.

        seed: of the device's noise and the prompts.
        """
        ...


class VirtualBench:
    """Each run is a new virtual device on a new virtual loop, and takes what its callbacks take."""

    is_virtual = True
    has_streams = True
    _BLOCK_SIZE: Final = 32

    def run(
        self,
        setup: Setup,
        arrivals: Sequence[Arrival],
        *,
        warm_up: Sequence[Arrival] = (),
        seed: int = 0,
        with_timeline: bool = False,
    ) -> Run:
        longest = max(a.num_prompt_tokens + a.num_output_tokens for a in (*arrivals, *warm_up))
        blocks_each = -(-(longest + 1) // self._BLOCK_SIZE) + 1

        async def main() -> Run:
            device = VirtualDevice(
                setup.costs,
                setup.host,
                seed=seed,
                shared_rate=setup.shared_rate,
                max_num_seqs=setup.max_num_seqs,
                max_model_len=longest + 1,
                num_blocks=2 * setup.max_num_seqs * blocks_each + 8,
                block_size=self._BLOCK_SIZE,
                log_steps=1 << 20,
            )
            driver = Driver(
                device,
                device.tokenizer(),
                setup,
                clock=asyncio.get_running_loop().time,
                make_alarm=partial(VirtualAlarm, late_s=setup.alarm_late_s),
                with_timeline=with_timeline,
            )
            run = await driver.run(arrivals, warm_up, seed)
            counted = [step for step in device.history if step.composed_s >= run.began_s]
            run.idle = idle_share(counted)
            if run.timeline is not None:
                run.timeline = _with_device(run.timeline, counted)
            return run

        return run_virtual(main())


class Driver:
    """An engine of its own for one run, on the running loop. The engine closes the runner."""

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer,
        setup: Setup,
        *,
        clock: Callable[[], float],
        make_alarm: MakeAlarm,
        with_timeline: bool,
    ) -> None:
        self._setup = setup
        self._clock = clock
        self._vocab_size = min(_PROMPT_IDS.stop, runner.info.vocab_size)
        self._recorder = _Recorder()
        self._trace = Trace(1 << 16, then=self._recorder, clock=clock) if with_timeline else None
        self._engine = Engine(
            runner,
            tokenizer,
            setup.scheduler_options(runner.info.block_size),
            ENGINE_OPTIONS,
            observer=self._trace or self._recorder,
            clock=clock,
            make_alarm=make_alarm,
        )

    async def run(self, arrivals: Sequence[Arrival], warm_up: Sequence[Arrival], seed: int) -> Run:
        random = np.random.default_rng(seed)
        await self._engine.start()
        try:
            await self._send(warm_up, "warm-up", random)
            self._recorder.clear()
            began_s = self._clock()
            records = await self._send(arrivals, "request", random)
            timeline = None
            if self._trace is not None:
                timeline = _whole(self._trace.cut(self._clock() - began_s).timeline(self._setup.name))
        finally:
            await self._engine.aclose()
        return Run(
            setup=self._setup,
            began_s=began_s,
            requests=records,
            launches=self._recorder.launches,
            landings=self._recorder.landings,
            idle=_idle_share(self._recorder.launches, self._recorder.landings),
            timeline=timeline,
        )

    async def _send(self, arrivals: Sequence[Arrival], name: str, random: np.random.Generator) -> list[RequestRecord]:
        began_s = self._clock()
        async with asyncio.TaskGroup() as readers:
            tasks = [
                readers.create_task(
                    self._read(
                        f"{name} {index}",
                        random.integers(_PROMPT_IDS.start, self._vocab_size, arrival.num_prompt_tokens, dtype=np.int32),
                        RequestRecord(arrival, began_s + arrival.at_s),
                    )
                )
                for index, arrival in enumerate(arrivals)
            ]
        return [task.result() for task in tasks]

    async def _read(self, name: str, prompt: NDArray[np.int32], record: RequestRecord) -> RequestRecord:
        """A request that comes at its time even where the loop is too busy to see it."""
        if (wait_s := record.arrived_s - self._clock()) > 0:
            await asyncio.sleep(wait_s)
        self._recorder.records[name] = record

        def note(delta: Delta) -> bool:
            record.read_s += [self._clock()] * len(delta.tokens)
            return True

        stream = self._engine.submit_nowait(
            GenerationRequest(
                request_id=name,
                prompts=(prompt,),
                params=SamplingParams(temperature=0.0, max_tokens=record.arrival.num_output_tokens),
                seed=0,
                ignore_eos=True,
            )
        )
        stream.push_to(note)  # as the server writes to its sockets: in delivery itself
        async for delta in stream:
            if delta.error is not None:
                raise RuntimeError(f"a request of the run failed: {delta.error}")
            note(delta)
        return record


class _Recorder(NullObserver):
    """records: by request id, filled in as their requests move."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.records: dict[str, RequestRecord] = {}
        self.launches: list[StepLaunch] = []
        self.landings: list[StepLanding] = []

    def step_launched(self, launch: StepLaunch) -> None:
        self.launches.append(launch)

    def step_landed(self, landing: StepLanding) -> None:
        self.landings.append(landing)

    def request_moved(self, move: RequestMove) -> None:
        if move.phase == "prefill":
            self.records[move.request_id].composed_s = move.at_s


def _idle_share(launches: Sequence[StepLaunch], landings: Sequence[StepLanding]) -> float:
    """As the host saw the device: from each step's start to its landing it was busy."""
    if not landings:
        return 0.0
    busy_s, until_s = 0.0, 0.0
    for landing in sorted(landings, key=lambda landing: landing.started_s):
        busy_s += max(0.0, landing.landed_s - max(landing.started_s, until_s))
        until_s = max(until_s, landing.landed_s)
    return 1.0 - busy_s / (until_s - min(launch.composed_s for launch in launches))


def _whole(timeline: Timeline) -> Timeline:
    """With lists for what may be read once only, so that it can be sent to another process and drawn twice."""
    return replace(
        timeline,
        lanes={lane: list(slices) for lane, slices in timeline.lanes.items()},
        tracks=list(timeline.tracks),
    )


def _with_device(timeline: Timeline, history: Iterable[VirtualStep]) -> Timeline:
    """The device's lanes as the device itself knows them, one a stream, in place of what the host saw of them."""
    lanes = {lane: slices for lane, slices in timeline.lanes.items() if not lane.startswith("device")}
    by_device: dict[str, list[Slice]] = {"device": []}
    for step in history:
        lane = "device" if step.stream == MAIN_STREAM else f"device, stream {step.stream}"
        by_device.setdefault(lane, []).append(
            Slice(
                name=" + ".join(
                    f"{what} {number}"
                    for what, number in (("decode", step.shape.num_rows), ("prefill", step.shape.num_prefill_tokens))
                    if number
                ),
                start_s=step.started_s,
                end_s=step.ended_s,
                args={"step": step.step, "rows": step.shape.num_rows, "prompt_tokens": step.shape.num_prefill_tokens},
            )
        )
    return replace(timeline, lanes=lanes | by_device)
