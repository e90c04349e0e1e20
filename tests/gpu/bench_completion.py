"""How late the loop learns that a step has ended, and at what CPU cost, for each way of waiting; on uvloop.

    python tests/gpu/bench_completion.py [--device cuda|simulated] [--steps-ms 0.7 4] [--seconds 2]

Steps are a captured graph of matrix products of about the asked length, launched one after another ("alone": the next
one when the last one's end is known, so that every wait shows) and two deep (the way of the overlap policy).
Late: from the step's end to the callback, the step's own time by device events taken off, and the least that a spinning
``synchronize`` reaches taken off too. "words" are a result word that the step's last kernel writes to pinned memory, in
place of the step's event. --device simulated needs no GPU: steps end when the host's clock says so.
"""

import argparse
import asyncio
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Literal, Protocol

import triton
import triton.language as tl
import uvloop

from aserve.device.event import DeviceEvent, PollWatcher, ThreadWatcher, TimerWatcher, Watcher, WordEvent

Kind = Literal["event", "blocking event", "word"]
RING = 8

WARM_UP_STEPS = 50
CPU_SHARE_MAX = 0.5
"""The choice is the least late of those that take no more than this of a core on a 4 ms step."""


@dataclass(frozen=True, slots=True)
class Launched:
    """event: what is watched. took_s: the step's own time, to be asked for once it has ended."""

    event: DeviceEvent
    took_s: Callable[[], float]


class Steps(Protocol):
    def launch(self, kind: Kind) -> Launched: ...


class SimulatedSteps:
    """Steps that end by the host's clock, one after another, each a little longer or shorter than the last."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._random = Random(1)
        self._busy_until_s = 0.0

    def launch(self, kind: Kind) -> Launched:
        started_s = max(time.perf_counter(), self._busy_until_s)
        took_s = self._step_s * self._random.gauss(1, 0.005)
        self._busy_until_s = started_s + took_s
        return Launched(_Moment(self._busy_until_s), lambda: took_s)


class _Moment:
    def __init__(self, at_s: float) -> None:
        self._at_s = at_s

    def query(self) -> bool:
        return time.perf_counter() >= self._at_s

    def synchronize(self) -> None:
        while (rest_s := self._at_s - time.perf_counter()) > 0:
            time.sleep(rest_s)


@triton.jit
def _write_word(step_ptr, ring_ptr, N: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's, not Python's types
    step = tl.load(step_ptr)
    tl.store(ring_ptr + step % N, step << 32)
    tl.store(step_ptr, step + 1)


class GraphSteps:
    """A captured graph of as many bf16 matrix products as take about ``step_s``, and a result word."""

    def __init__(self, step_s: float) -> None:
        import torch

        self._torch = torch
        self._stream = torch.cuda.Stream()
        self._step = torch.ones(1, dtype=torch.int64, device="cuda")
        self._ring = torch.zeros(RING, dtype=torch.int64, pin_memory=True)
        self._a, self._b = (torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        self._out = torch.empty_like(self._a)
        one_s = min(self._time(self._capture(100)) for _ in range(5)) / 100
        self._graph = self._capture(max(1, round(step_s / one_s)))
        self._number = int(self._step.item())  # of the next step; what ran before counted too

    def _capture(self, num_products: int) -> Any:
        torch = self._torch
        with torch.cuda.stream(self._stream):
            self._work(1)
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream):
            self._work(num_products)
        return graph

    def _work(self, num_products: int) -> None:
        for _ in range(num_products):
            self._torch.mm(self._a, self._b, out=self._out)
        _write_word[(1,)](self._step, self._ring, RING)

    def _time(self, graph: Any) -> float:
        with self._torch.cuda.stream(self._stream):
            graph.replay()
            self._stream.synchronize()
            started_s = time.perf_counter()
            graph.replay()
            self._stream.synchronize()
        return time.perf_counter() - started_s

    def launch(self, kind: Kind) -> Launched:
        torch = self._torch
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True, blocking=kind == "blocking event")
        with torch.cuda.stream(self._stream):
            start.record()
            self._graph.replay()
            end.record()
        number, self._number = self._number, self._number + 1
        return Launched(
            end if kind != "word" else WordEvent(self._ring.numpy()[number % RING :][:1], number, fence=end),
            partial(self._elapsed_s, start, end),
        )

    @staticmethod
    def _elapsed_s(start: Any, end: Any) -> float:
        end.synchronize()  # a word is there some microseconds before its step's event
        return float(start.elapsed_time(end)) / 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Of one way at one length: late is in µs, cpu a share of a core, deep_ms the time a step takes two deep."""

    way: str
    step_ms: float
    late_us_p50: float
    late_us_p99: float
    cpu: float
    looks: float
    deep_ms: float
    deep_cpu: float


def least_late_s(steps: Steps, seconds: float) -> float:
    """What a thread that does nothing else sees: launch, spin, and the return of both. The median."""
    over_s, end_s = [], time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        started_s = time.perf_counter()
        launched = steps.launch("event")
        while not launched.event.query():
            pass
        over_s.append(time.perf_counter() - started_s - launched.took_s())
    return statistics.median(over_s)


async def drive(
    watcher: Watcher, steps: Steps, kind: Kind, depth: int, seconds: float
) -> tuple[list[float], float, float]:
    """Keep ``depth`` steps out. Returns each step's time from launch to callback beyond its own, CPU share, step time.

    Times beyond the step's own mean something at depth 1 only.
    """
    loop = asyncio.get_running_loop()
    finished: asyncio.Future[None] = loop.create_future()
    over_s: list[float] = []
    num_landed, marks = 0, [0.0, 0.0]
    end_s = math.inf

    def launch() -> None:
        started_s = time.perf_counter()
        launched = steps.launch(kind)
        watcher.watch(launched.event, partial(landed, started_s, launched), finished.set_exception, key="step")

    def landed(started_s: float, launched: Launched) -> None:
        nonlocal num_landed, end_s
        now_s = time.perf_counter()
        num_landed += 1
        if num_landed == WARM_UP_STEPS:
            marks[:] = now_s, time.process_time()
            end_s = now_s + seconds
        if now_s < end_s:
            launch()
        elif not len(watcher) and not finished.done():
            finished.set_result(None)
        if num_landed > WARM_UP_STEPS:
            over_s.append(now_s - started_s - launched.took_s())

    for _ in range(depth):
        launch()
    await finished
    wall_s, cpu_s = time.perf_counter() - marks[0], time.process_time() - marks[1]
    return over_s, cpu_s / wall_s, wall_s / max(1, len(over_s))


@dataclass(frozen=True, slots=True)
class Way:
    name: str
    make: Callable[[], Watcher]
    kind: Kind = "event"


def ways(leads_us: Sequence[float], *, words: bool) -> list[Way]:
    found = [Way(f"timer, lead {lead:g} µs", partial(TimerWatcher, lead_s=lead / 1e6)) for lead in leads_us]
    found += [Way("thread", ThreadWatcher, "blocking event"), Way("poll", PollWatcher)]
    if words:
        found += [Way("timer, words", TimerWatcher, "word"), Way("poll, words", PollWatcher, "word")]
    return found


async def measure(way: Way, steps: Steps, step_ms: float, seconds: float) -> Row:
    least_s = least_late_s(steps, seconds / 4)
    watcher = way.make()
    over_s, cpu, _ = await drive(watcher, steps, way.kind, 1, seconds)
    looks = watcher.statistics()["event_looks"] / watcher.statistics()["events_landed"]
    await watcher.aclose()
    watcher = way.make()
    _, deep_cpu, deep_s = await drive(watcher, steps, way.kind, 2, seconds)
    await watcher.aclose()
    late_us = sorted((over - least_s) * 1e6 for over in over_s)
    return Row(
        way=way.name,
        step_ms=step_ms,
        late_us_p50=late_us[len(late_us) // 2],
        late_us_p99=late_us[int(len(late_us) * 0.99)],
        cpu=cpu,
        looks=looks,
        deep_ms=deep_s * 1e3,
        deep_cpu=deep_cpu,
    )


def choice(rows: Sequence[Row]) -> str:
    """The least late at p50 at the longest step among those whose CPU share is bearable."""
    longest = max(row.step_ms for row in rows)
    bearable = [row for row in rows if row.step_ms == longest and row.cpu <= CPU_SHARE_MAX]
    return min(bearable, key=lambda row: row.late_us_p50, default=rows[0]).way


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "simulated"), default="cuda")
    parser.add_argument("--steps-ms", type=float, nargs="+", default=(0.7, 4.0))
    parser.add_argument("--leads-us", type=float, nargs="+", default=(50, 100, 200))
    parser.add_argument("--seconds", type=float, default=2.0, help="for each depth of each way")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    print("| way | step ms | late µs p50 | p99 | CPU | looks a step | two deep: ms a step | CPU |")  # noqa: T201
    print("|---|---|---|---|---|---|---|---|")  # noqa: T201
    for step_ms in arguments.steps_ms:
        steps: Steps = (GraphSteps if arguments.device == "cuda" else SimulatedSteps)(step_ms / 1e3)
        for way in ways(arguments.leads_us, words=arguments.device == "cuda"):
            row = uvloop.run(measure(way, steps, step_ms, arguments.seconds))
            rows.append(row)
            print(  # noqa: T201
                f"| {row.way} | {row.step_ms:g} | {row.late_us_p50:.0f} | {row.late_us_p99:.0f} | {row.cpu:.0%} "
                f"| {row.looks:.1f} | {row.deep_ms:.3f} | {row.deep_cpu:.0%} |",
                flush=True,
            )
    print(f"choice: {choice(rows)}")  # noqa: T201
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
