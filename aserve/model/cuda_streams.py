"""Two streams of a GPU as one device: decode steps on one, steps of prompt chunks on the other, at the same time.

Each has its runner, with all that a running step writes to: its graphs and their memory, activations, staging, result
words. Weights, slot table and KV cache are shared. Nothing on the device orders a step of one stream behind one of the
other: the scheduler launches no step that touches a slot or a block of one that is out on the other stream, and joins
and leaves go the way of the chunks.
"""

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace

from aserve.core.plan import MAIN_STREAM, PREFILL_STREAM, BatchPlan
from aserve.device.event import WatcherName
from aserve.device.graphs import StepDevice
from aserve.engine.ports import RunnerInfo
from aserve.model.cuda_decoder import StepDecoder
from aserve.model.cuda_runner import CudaFlight, CudaRunner
from aserve.model.cuda_steps import CudaSteps, StepLimits
from aserve.model.kv_tensors import KVTensors

_OF_BOTH = frozenset({"weight_bytes", "kv_bytes"})
"""Figures that are the same thing twice."""


class CudaStreams:
    """``engine.ports.Runner`` of two runners over one slot table and one cache."""

    def __init__(self, main: CudaRunner, prefill: CudaRunner) -> None:
        self._runners = {MAIN_STREAM: main, PREFILL_STREAM: prefill}

    @property
    def info(self) -> RunnerInfo:
        return self._runners[MAIN_STREAM].info

    def warm_up(self) -> None:
        """As ``CudaRunner.warm_up``, of both."""
        for runner in self._runners.values():
            runner.warm_up()

    def launch(self, plan: BatchPlan) -> CudaFlight:
        """As ``CudaRunner.launch``, on the plan's stream."""
        is_beside = any(runner.num_out for stream, runner in self._runners.items() if stream != plan.stream)
        return self._runners[plan.stream].launch(plan, is_beside=is_beside)

    def go_on(self) -> None:
        """As ``CudaRunner.go_on``, of both."""
        for runner in self._runners.values():
            runner.go_on()

    def statistics(self) -> dict[str, float]:
        """Totals of both."""
        total: dict[str, float] = {}
        for runner in self._runners.values():
            for name, figure in runner.statistics().items():
                before = total.get(name, 0.0)
                is_total = name not in _OF_BOTH and "max" not in name
                total[name] = before + figure if is_total else max(before, figure)
        return total

    async def aclose(self) -> None:
        """Wait for what is in flight on both, then let go of the device. Idempotent.

        The second is closed even if the first's closing fails or is cancelled.
        """
        async with AsyncExitStack() as stack:
            for runner in reversed(self._runners.values()):
                stack.push_async_callback(runner.aclose)


def make_lanes(decoder: StepDecoder, devices: Sequence[StepDevice], limits: StepLimits) -> list[CudaSteps]:
    """Steps on each device's stream: of all kinds on the only one, else of rows on the first, of chunks on the second.

    On devices that run side by side, over one slot table.
    """
    if len(devices) == 1:
        return [CudaSteps(decoder, devices[0], limits)]
    main, prefill = devices
    of_rows = replace(limits, max_num_tokens=limits.max_num_seqs, contents="rows")
    rows = CudaSteps(decoder, main, of_rows)
    chunks = CudaSteps(decoder, prefill, replace(limits, contents="chunks"), table=rows.table)
    main.synchronize()  # what was allocated and read so far is there for both
    return [rows, chunks]


def join_lanes(
    lanes: Sequence[CudaSteps],
    kv: KVTensors,
    info: RunnerInfo,
    *,
    watcher: WatcherName = "auto",
    samples_on_host: bool = False,
    begins_later: bool = True,
    start_seconds: Mapping[str, float] | None = None,
) -> CudaRunner | CudaStreams:
    """A runner of what ``make_lanes`` made, all graphs captured. The options are ``CudaRunner``'s."""
    runners: list[CudaRunner] = []
    for lane in lanes:
        runner = CudaRunner(
            steps=lane,
            kv=kv,
            info=info,
            device=lane.device,
            watcher=watcher,
            samples_on_host=samples_on_host,
            begins_later=begins_later,
            host_table=runners[0].host_table if runners else None,
            start_seconds=start_seconds if not runners else None,
        )
        runners.append(runner)
    return runners[0] if len(runners) == 1 else CudaStreams(*runners)
