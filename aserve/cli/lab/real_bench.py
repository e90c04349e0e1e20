"""Runs on a real device: the model is loaded once, and each run has an engine of its own on one loop."""

import asyncio
import gc
import time
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Final

import uvloop

from aserve.cli.lab.running import Arrival, Driver, Run, Setup
from aserve.config import Config
from aserve.core.plan import BatchPlan
from aserve.device.alarm import Alarm, is_supported
from aserve.embedding import Parts, load_parts
from aserve.engine.loop import LoopAlarm
from aserve.engine.ports import Flight, Runner, RunnerInfo

MAX_NUM_SEQS: Final = 128
MAX_BATCHED_TOKENS: Final = 2048
MAX_INFLIGHT: Final = 8
"""The most that any experiment asks of one runner; an eager pipeline without a bound does not fit a device's ring."""


class _Kept:
    """A runner that outlives the engines that close it."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    @property
    def info(self) -> RunnerInfo:
        return self._runner.info

    def launch(self, plan: BatchPlan) -> Flight:
        return self._runner.launch(plan)

    def go_on(self) -> None:
        self._runner.go_on()

    def statistics(self) -> dict[str, float]:
        return self._runner.statistics()

    async def aclose(self) -> None:
        """Nothing: the next run needs it."""


class RealBench:
    """``with RealBench(config) as bench``. Raises ConfigError or ModelError. Loads torch at the first run.

    device: the model and what it runs on, for people, once there was a run.

    Costs of a setup are ignored. The model is loaded anew where a setup samples elsewhere or prefills on other streams,
    which a runner decides at start.
    """

    is_virtual = False

    def __init__(self, config: Config) -> None:
        self._config = config
        self._loop = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._made_for: tuple[str, bool] | None = None
        self._parts: Parts | None = None
        self.has_streams = config.model.device == "cuda"
        self.device = ""

    def __enter__(self) -> "RealBench":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._unload()
        self._loop.close()

    def _unload(self) -> None:
        if self._parts is not None:
            self._loop.run(self._parts.runner.aclose())
            self._parts = None
            gc.collect()  # the device's memory goes with its tensors

    def _parts_for(self, setup: Setup) -> Parts:
        wanted = (setup.sampler, setup.prefill == "streams")
        if self._parts is None or self._made_for != wanted:
            self._unload()
            scheduler = replace(
                self._config.scheduler,
                policy="overlap",
                max_num_seqs=MAX_NUM_SEQS,
                max_num_batched_tokens=MAX_BATCHED_TOKENS,
                max_inflight=MAX_INFLIGHT,
                sampler=setup.sampler,
                prefill=setup.prefill,
            )
            self._parts = load_parts(replace(self._config, scheduler=scheduler))
            self._made_for = wanted
            self.device = f"{self._parts.name}, {self._parts.runner.info.device}"
        return self._parts

    def run(
        self,
        setup: Setup,
        arrivals: Sequence[Arrival],
        *,
        warm_up: Sequence[Arrival] = (),
        seed: int = 0,
        with_timeline: bool = False,
    ) -> Run:
        parts = self._parts_for(setup)
        setup = replace(setup, max_inflight=min(setup.max_inflight, MAX_INFLIGHT))

        async def main() -> Run:
            driver = Driver(
                _Kept(parts.runner),
                parts.tokenizer,
                setup,
                clock=time.monotonic,
                make_alarm=Alarm if is_supported() else LoopAlarm,
                with_timeline=with_timeline,
            )
            return await driver.run(arrivals, warm_up, seed)

        return self._loop.run(main())
