"""What the trace costs: a step and a request on the hot path, memory, and the loop's lag while a full one is made.

python tests/bench/trace_cost.py [--steps 16384]
"""

import argparse
import asyncio
import gc
import sys
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from aserve.core.ids import SequenceId, StepNumber
from aserve.engine.ports import NullObserver, Observer, RequestMove, RequestPhase, StepLanding, StepLaunch
from aserve.engine.trace import DELIVERIES_A_STEP, Trace
from aserve.testing import ManualClock

STEP_S = 0.001
PHASES: tuple[RequestPhase, ...] = ("queued", "prefill", "decode", "ended")
NUM_OPEN = 16384
"""Sequences that wait in the queue when the trace is cut."""


def launch(number: int) -> StepLaunch:
    start_s = number * STEP_S
    return StepLaunch(
        step=StepNumber(number),
        stream=0,
        composed_s=start_s,
        handed_s=start_s + 0.0001,
        launched_s=start_s + 0.0002,
        num_rows=64,
        num_chunks=1,
        num_prefill_tokens=448,
        num_inflight=2,
        reason="lead",
        lead_s=number * 1e-9,
        predicted_end_s=start_s + STEP_S,
        bubble_s=number * 1e-9,
    )


def landing(number: int) -> StepLanding:
    start_s = number * STEP_S
    return StepLanding(
        step=StepNumber(number),
        stream=0,
        launched_s=start_s + 0.0002,
        started_s=start_s + 0.0003,
        landed_s=start_s + 0.0012,
        committed_s=start_s + 0.00125,
        num_rows=64,
        num_chunks=1,
        num_prefill_tokens=448,
        num_eligible=64,
        num_wasted_rows=0,
        predicted_s=number * 1e-9,
        failed=False,
    )


def move(number: int, phase: RequestPhase) -> RequestMove:
    return RequestMove(
        sequence=SequenceId(number),
        request_id=f"chatcmpl-{number:032x}",
        index=0,
        phase=phase,
        at_s=number * STEP_S + PHASES.index(phase) * 1e-4,
        num_tokens=1000 + number,
        finish_reason="stop" if phase == "ended" else "",
    )


def step_us(observer: Observer, num: int = 20_000) -> float:
    """The best of some rounds: three calls a step with records that the engine makes anyway."""
    launched, landed = launch(1), landing(1)

    def round_s() -> float:
        start_s = time.perf_counter()
        for _ in range(num):
            observer.step_launched(launched)
            observer.step_landed(landed)
            observer.delivered(1.0, 2.0, 64)
        return time.perf_counter() - start_s

    return min(round_s() for _ in range(7)) / num * 1e6


def request_us(observer: Observer, num: int = 5_000) -> float:
    """The same for a request's four moves."""
    moves = [move(number, phase) for number in range(num) for phase in PHASES]

    def round_s() -> float:
        start_s = time.perf_counter()
        for each in moves:
            observer.request_moved(each)
        return time.perf_counter() - start_s

    return min(round_s() for _ in range(5)) / num * 1e6


@contextmanager
def traced_bytes() -> Iterator[list[int]]:
    sizes: list[int] = []
    tracemalloc.start()
    yield sizes
    sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


async def make(trace: Trace) -> tuple[int, float, list[float]]:
    """Size of the file, seconds that it takes in a thread, and how late a timer of the loop is meanwhile."""
    cut = trace.cut()
    start_s = time.perf_counter()
    making = asyncio.create_task(asyncio.to_thread(lambda: sum(map(len, cut.pieces()))))
    lags_s = []
    while not making.done():
        due_s = time.perf_counter() + STEP_S
        await asyncio.sleep(STEP_S)
        lags_s.append(time.perf_counter() - due_s)
    return await making, time.perf_counter() - start_s, lags_s


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=16384)
    num = parser.parse_args().steps
    sys.setswitchinterval(0.0005)  # as the server does
    say(f"a step: {step_us(Trace(num)) - step_us(NullObserver()):.2f} us")
    say(f"a request: {request_us(Trace(num)) - request_us(NullObserver()):.2f} us")
    trace = Trace(num, clock=ManualClock((num + NUM_OPEN) * STEP_S + 1.0))
    with traced_bytes() as sizes:
        for number in range(num):
            trace.step_launched(launch(number))
            trace.step_landed(landing(number))
            trace.delivered(number * STEP_S + 0.0013, number * STEP_S + 0.0014, 64)
    say(f"memory: {sizes[0] / num:.0f} bytes a step")
    for number in range(0, num, 8):
        for phase in PHASES:
            trace.request_moved(move(number, phase))
    say_file("one delivery a step, a sequence each 8 steps", trace)

    trace = Trace(num, clock=ManualClock((num + NUM_OPEN) * STEP_S + 1.0))
    for number in range(num):
        trace.step_launched(launch(number))
        trace.step_landed(landing(number))
    with traced_bytes() as sizes:
        for number in range(num):
            for part in range(DELIVERIES_A_STEP):
                start_s = number * STEP_S + part * 1e-4
                trace.delivered(start_s, start_s + 5e-5, 1000 + number)
    say(f"memory: {sizes[0] / num / DELIVERIES_A_STEP:.0f} bytes a delivery")
    with traced_bytes() as sizes:
        for number in range(num):
            for phase in PHASES:
                trace.request_moved(move(number, phase))
    say(f"memory: {sizes[0] / num:.0f} bytes a sequence")
    for number in range(num, num + NUM_OPEN):
        trace.request_moved(move(number, "queued"))
    say_file(f"{DELIVERIES_A_STEP} deliveries a step, a sequence each step, {NUM_OPEN} open ones", trace)


def say_file(title: str, trace: Trace) -> None:
    gc.collect()
    cuts_ms = []
    for _ in range(7):
        bytes(64 << 20).count(1)  # a loop that served others since has other things in its caches
        start_s = time.perf_counter()
        cut = trace.cut()
        cuts_ms.append((time.perf_counter() - start_s) * 1e3)
        del cut
    say(f"with {title}, a cut: {min(cuts_ms):.2f} to {max(cuts_ms):.2f} ms on the loop")
    size, seconds, lags_s = asyncio.run(make(trace))
    p50_ms, p99_ms, max_ms = (float(np.quantile(lags_s, q)) * 1e3 for q in (0.5, 0.99, 1.0))
    say(f"  a file of {size / 1e6:.1f} MB: {seconds:.2f} s in a thread")
    say(f"  the loop's lag meanwhile: p50 {p50_ms:.2f}, p99 {p99_ms:.2f}, max {max_ms:.2f} ms")


if __name__ == "__main__":
    main()
