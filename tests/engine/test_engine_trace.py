"""The trace shows every step in its three lanes and every sequence with its phases, and costs the hot path little."""

import asyncio
import gc
import time
import tracemalloc
from itertools import pairwise
from typing import Any

import pytest
from engine_builders import read, request, running, settle
from trace_rules import ReadProcess, read_trace
from wire_builders import until

from aserve.config import RANGES
from aserve.core.ids import SequenceId, StepNumber
from aserve.core.request import FinishReason
from aserve.engine.observe import MetricsObserver
from aserve.engine.ports import NullObserver, RequestEnd, RequestMove, RequestPhase, StepLanding, StepLaunch
from aserve.engine.trace import DELIVERIES_A_STEP, MAX_PHASES, Trace
from aserve.obs.metrics import Metrics
from aserve.testing import ManualClock, ScriptedRunner


def read_cut(trace: Trace, seconds: float = 3600.0) -> ReadProcess:
    [process] = read_trace(b"".join(trace.cut(seconds).pieces()))
    return process


def launch(step: int, at_s: float, **fields: Any) -> StepLaunch:
    """Composed at ``at_s``, with the device a millisecond later."""
    return StepLaunch(
        **{
            "step": StepNumber(step),
            "stream": 0,
            "composed_s": at_s,
            "handed_s": at_s + 0.0005,
            "launched_s": at_s + 0.001,
            "num_rows": 1,
            "num_chunks": 0,
            "num_prefill_tokens": 0,
            "num_inflight": 1,
            "reason": "idle",
            "lead_s": None,
            "predicted_end_s": None,
            "bubble_s": 0.0,
        }
        | fields
    )


def landing(step: int, started_s: float, landed_s: float, **fields: Any) -> StepLanding:
    """Committed within half a millisecond."""
    return StepLanding(
        **{
            "step": StepNumber(step),
            "stream": 0,
            "launched_s": started_s,
            "started_s": started_s,
            "landed_s": landed_s,
            "committed_s": landed_s + 0.0005,
            "num_rows": 1,
            "num_chunks": 0,
            "num_prefill_tokens": 0,
            "num_eligible": 1,
            "num_wasted_rows": 0,
            "predicted_s": None,
            "failed": False,
        }
        | fields
    )


def move(sequence: int, phase: RequestPhase, at_s: float, **fields: Any) -> RequestMove:
    return RequestMove(
        **{"sequence": SequenceId(sequence), "request_id": f"r{sequence}", "index": 0, "phase": phase, "at_s": at_s}
        | fields
    )


def test_a_step_in_its_lanes() -> None:
    """Composing and landing on the loop, the launch, the time on the device, with the figures of each."""
    clock = ManualClock(10.0)
    trace = Trace(16, clock=clock)
    trace.step_launched(
        launch(7, 10.0, num_rows=3, num_chunks=1, num_prefill_tokens=9, reason="lead", lead_s=0.002, bubble_s=0.0001)
    )
    trace.step_landed(
        landing(
            7, 10.001, 10.005, num_rows=3, num_chunks=1, num_prefill_tokens=9, num_wasted_rows=2, predicted_s=0.0035
        )
    )
    trace.delivered(10.006, 10.007, 4)
    clock.advance(0.01)

    lanes = read_cut(trace).lanes

    of_launch = {"step": 7, "reason": "lead", "steps_in_flight": 1, "bubble_ms": 0.1, "lead_ms": 2.0}
    of_device = {
        "step": 7, "rows": 3, "chunks": 1, "prefill_tokens": 9, "wasted_rows": 2, "eligible": 1, "actual_ms": 4.0,
        "predicted_ms": 3.5, "reason": "lead",
    }  # fmt: skip
    assert list(lanes) == ["loop", "launch", "device"]
    assert lanes["loop"] == [
        ("compose", 0, 500, {"step": 7, "rows": 3, "prefill_tokens": 9}),
        ("land", 5000, 5500, {"step": 7}),
        ("deliver", 6000, 7000, {"tokens": 4}),
    ]
    assert lanes["launch"] == [("launch", 500, 1000, of_launch)]
    assert lanes["device"] == [("decode 3 + prefill 9", 1000, 5000, of_device)]


def test_the_step_that_runs_is_shown_up_to_the_cut() -> None:
    """Behind the newest landing; what waits behind it has not begun."""
    clock = ManualClock(10.0)
    trace = Trace(16, clock=clock)
    for step in (1, 2, 3):
        trace.step_launched(launch(step, 10.0 + step / 1000))
    trace.step_landed(landing(1, 10.002, 10.008))
    clock.advance(0.02)

    device = read_cut(trace).lanes["device"]

    assert [(args["step"], start, end, args.get("cut")) for _, start, end, args in device] == [
        (1, 1000, 7000, None),
        (2, 7000, 19000, True),
    ]


def test_each_stream_of_the_device_has_a_lane() -> None:
    """Their steps overlap in time, so one lane could not show them."""
    clock = ManualClock(10.0)
    trace = Trace(16, clock=clock)
    trace.step_launched(launch(1, 10.0))
    trace.step_launched(launch(2, 10.001, stream=1))
    trace.step_landed(landing(2, 10.002, 10.004, stream=1))
    clock.advance(0.01)

    lanes = read_cut(trace).lanes

    assert [(args["step"], start, end) for _, start, end, args in lanes["device"]] == [(1, 1000, 10_000)]
    assert [(args["step"], start, end) for _, start, end, args in lanes["device, stream 1"]] == [(2, 2000, 4000)]


def test_a_failed_step_says_so() -> None:
    """Also one that never reached the device, which has no launch."""
    trace = Trace(16, clock=ManualClock(10.0))
    trace.step_landed(landing(1, 9.0, 9.0, failed=True))

    [(_, _, _, args)] = read_cut(trace).lanes["device"]

    assert args["failed"] is True


def test_phases_of_a_request() -> None:
    """Queued, prefilling, decoding, parked, and back; what is known of its tokens; why it ended."""
    clock = ManualClock(10.0)
    trace = Trace(16, clock=clock)
    for phase, at_s, num_tokens in (
        ("queued", 10.0, 40),
        ("prefill", 10.1, 32),
        ("decode", 10.2, 0),
        ("parked", 10.3, 0),
        ("queued", 10.4, 0),
        ("prefill", 10.5, 64),
        ("decode", 10.6, 0),
    ):
        trace.request_moved(move(1, phase, at_s, num_tokens=num_tokens))  # type: ignore[arg-type]
    trace.request_moved(move(1, "ended", 10.7, num_tokens=25, finish_reason="length"))
    clock.advance(1.0)

    [track] = read_cut(trace).tracks

    assert (track.name, track.start_us, track.end_us) == ("#1 r1", 0, 700_000)
    assert track.args == {"prompt_tokens": 40, "cached_tokens": 32, "output_tokens": 25, "finish_reason": "length"}
    assert [name for name, *_ in track.phases] == [
        "queued", "prefill", "decode", "parked", "queued", "prefill", "decode",
    ]  # fmt: skip
    assert [start for _, start, _, _ in track.phases] == [0, 100_000, 200_000, 300_000, 400_000, 500_000, 600_000]
    assert track.marks == [("first token", 200_000, {})]


def test_open_requests_live_until_the_cut() -> None:
    """However long ago they began; and a cut does not change with what happens afterwards."""
    clock = ManualClock(0.0)
    trace = Trace(16, clock=clock)
    trace.request_moved(move(1, "queued", 0.0))
    trace.request_moved(move(1, "prefill", 1.0))
    clock.advance(100.0)
    cut = trace.cut(5.0)
    trace.request_moved(move(1, "decode", 100.0))

    [track] = read_trace(b"".join(cut.pieces()))[0].tracks

    assert (track.start_us, track.end_us) == (0, 5_000_000)
    assert track.phases == [("prefill", 0, 5_000_000, {"cut": True})]
    assert "finish_reason" not in track.args


def test_all_bounds_hold() -> None:
    """Steps, slices, requests that have ended, and the phases of one that is preempted for ever."""
    trace = Trace(8, clock=ManualClock(1000.0))
    for number in range(500):
        trace.step_launched(launch(number, number))
        trace.step_landed(landing(number, number + 0.2, number + 0.4))
        for part in range(DELIVERIES_A_STEP):
            trace.delivered(number + 0.5 + part / 100, number + 0.505 + part / 100, 64)
        trace.request_moved(move(number, "queued", number))
        trace.request_moved(move(number, "ended", number + 0.9))
        trace.request_moved(move(1_000_000, "prefill", number))

    process = read_cut(trace)

    assert [len(process.lanes[lane]) for lane in ("loop", "launch", "device")] == [48, 8, 8]
    assert sorted(len(track.phases) for track in process.tracks) == [1] * 8 + [MAX_PHASES]


@pytest.mark.parametrize("n", [1, 3])
async def test_an_engine_in_a_trace(n: int) -> None:
    """Each step once a lane, each choice a track, every token told of, all within the rules of the format."""
    trace = Trace(1024)
    async with running(observer=trace, max_num_seqs=8) as engine:
        streams = [
            engine.submit_nowait(request("a" * 60, n=n, max_tokens=12, request_id=f"r{number}")) for number in range(3)
        ]
        await asyncio.gather(*map(read, streams))
        await settle(engine)
        num_steps = engine.statistics().num_steps

    process = read_cut(trace)

    steps = list(range(1, num_steps + 1))
    assert [args["step"] for _, _, _, args in process.lanes["launch"]] == steps
    assert [args["step"] for _, _, _, args in process.lanes["device"]] == steps
    loop = process.lanes["loop"]
    assert [args["step"] for name, _, _, args in loop if name == "land"] == steps
    num_delivered = sum(args["tokens"] for name, _, _, args in loop if name == "deliver")
    assert num_delivered == 3 * n * 11  # first tokens go out with the landing
    names = [f"r{number} [{index}]" if index else f"r{number}" for number in range(3) for index in range(n)]
    assert {track.name for track in process.tracks} == {f"#{id} {name}" for id, name in enumerate(names, 1)}
    for track in process.tracks:
        assert track.args == {
            "prompt_tokens": 60, "cached_tokens": track.args["cached_tokens"], "output_tokens": 12,
            "finish_reason": "length",
        }  # fmt: skip
        assert [name for name, *_ in track.phases] == ["queued", "prefill", "decode"]
        assert [name for name, *_ in track.marks] == ["first token"]


async def test_a_queued_step_starts_with_the_landing_before_it() -> None:
    """Not with the launch behind it, which that landing leads to."""
    landings: list[StepLanding] = []

    class Landings(NullObserver):
        def step_landed(self, landing: StepLanding) -> None:
            landings.append(landing)

    async with running(ScriptedRunner(step_time_s=0.001), observer=Landings()) as engine:
        await read(engine.submit_nowait(request(max_tokens=8)))

    begins_s = [max(after.launched_s, before.landed_s) for before, after in pairwise(landings)]
    assert [landing.started_s for landing in landings[1:]] == begins_s


async def test_preempted_and_parked_requests_in_a_trace() -> None:
    """One that lost its blocks waits and prefills again; one whose reader sleeps is parked until it reads."""
    trace = Trace(1024)
    async with running(
        observer=trace, force_preempt_every=5, max_num_seqs=2, mailbox_events=1, park_after_s=0.001
    ) as engine:
        slow = engine.submit_nowait(request("reads", max_tokens=40, request_id="slow"))
        await read(engine.submit_nowait(request("x", max_tokens=40, request_id="fast")))
        await until(lambda: engine.statistics().num_parked == 1)
        await read(slow)

    tracks = {track.name.split()[1]: [name for name, *_ in track.phases] for track in read_cut(trace).tracks}

    fast = tracks["fast"]
    assert fast.count("prefill") > 1
    assert [before for before, phase in pairwise(fast) if phase == "prefill"] == ["queued"] * fast.count("prefill")
    assert "parked" in tracks["slow"]
    after = tracks["slow"].index("parked") + 1
    assert tracks["slow"][after : after + 3] == ["queued", "prefill", "decode"]


async def test_requests_end_in_a_trace_however_they_end() -> None:
    """Aborted before anything ran, ended by a step's fault: no track stays open."""

    def script(context: Any, index: int) -> int:
        if index == 3:
            raise ValueError("no")
        return 97

    trace = Trace(1024)
    async with running(ScriptedRunner(script), observer=trace) as engine:
        engine.submit_nowait(request(request_id="aborted"))
        engine.abort("aborted")
        await read(engine.submit_nowait(request(request_id="failed")))

    ends = {track.name.split()[1]: track.args["finish_reason"] for track in read_cut(trace).tracks}

    assert ends == {"aborted": FinishReason.ABORT, "failed": FinishReason.ERROR}


def test_what_it_hears_it_passes_on() -> None:
    """To the metrics behind it, as if it were not there."""
    metrics = Metrics("m", process=False)
    trace = Trace(8, then=MetricsObserver(metrics))

    trace.request_started(1.0, 40, 32)
    trace.first_token(1.0)
    trace.inter_token(1.0, 3)
    trace.request_rejected("server_overloaded")
    trace.request_finished(
        RequestEnd(
            reason=FinishReason.STOP,
            submitted_s=0.0,
            started_s=0.2,
            first_token_s=0.5,
            last_token_s=0.9,
            ended_s=1.0,
            num_prompt_tokens=40,
            num_cached_tokens=32,
            num_output_tokens=2,
            max_tokens=8,
            n=1,
            num_output_tokens_max=2,
        )
    )
    trace.step_landed(landing(1, 1.0, 2.0))

    counted = (metrics.queue_time, metrics.time_to_first_token, metrics.inter_token_latency, metrics.step_duration)
    assert [histogram.count for histogram in counted] == [1, 1, 3, 1]
    assert metrics.rejected.values["server_overloaded"] == 1 and metrics.finished.values["stop"] == 1


def test_memory_is_bounded_and_invisible_to_the_garbage_collector() -> None:
    """A kept step takes less than 2 KB, with the deliveries of a large one, and a collection looks at none of it."""
    trace = Trace(1000)
    tracemalloc.start()
    num_before = len(gc.get_objects())
    for number in range(3000):
        trace.step_launched(launch(number, number + 0.5))
        trace.step_landed(landing(number, number + 0.2, number + 0.4))
        for part in range(DELIVERIES_A_STEP):
            trace.delivered(number + 0.5 + part, number + 0.6 + part, 300)
    gc.collect()
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert size < 1000 * 2048
    assert len(gc.get_objects()) - num_before < 100


def test_sequences_are_small_and_invisible_to_the_garbage_collector_too() -> None:
    """Less than 1 KB each, those that have ended and those that go on."""
    trace = Trace(1000, clock=ManualClock(4000.0))
    phases: tuple[RequestPhase, ...] = ("queued", "prefill", "decode", "ended")
    tracemalloc.start()
    num_before = len(gc.get_objects())
    for number in range(4000):
        for part, phase in enumerate(phases if number < 3000 else phases[:3]):
            trace.request_moved(move(number, phase, number + part / 10, num_tokens=300 + number))
    for _ in range(3):  # each frees it of what holds only what the one before freed it of
        gc.collect()
    num_looked_at = len(gc.get_objects()) - num_before
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert len(read_cut(trace, 4000.0).tracks) == 2000
    assert (size < 2000 * 1024, num_looked_at < 100) == (True, True)


def test_a_cut_is_short_however_many_sequences_are_open() -> None:
    """16,384 that wait in the queue do not keep the loop from the others."""
    trace = Trace(16, clock=ManualClock(20_000.0))
    for number in range(16_384):
        trace.request_moved(move(number, "queued", number))

    def cut_s() -> float:
        start_s = time.perf_counter()
        trace.cut()
        return time.perf_counter() - start_s

    assert min(cut_s() for _ in range(5)) < 0.004  # many times what it takes: the machine may be busy


def test_a_cut_of_the_largest_trace_is_short() -> None:
    """The option's greatest value is one whose copy the loop can bear."""
    num = int(RANGES["trace.num_steps"][1])
    trace = Trace(num)
    launched, landed, queued, ended = (
        launch(1, 1.0),
        landing(1, 1.0, 2.0),
        move(1, "queued", 1.0),
        move(1, "ended", 2.0),
    )
    for _ in range(num):
        trace.step_launched(launched)
        trace.step_landed(landed)
        for _ in range(DELIVERIES_A_STEP):
            trace.delivered(1.0, 2.0, 64)
        trace.request_moved(queued)
        trace.request_moved(ended)

    def cut_s() -> float:
        start_s = time.perf_counter()
        trace.cut()
        return time.perf_counter() - start_s

    assert min(cut_s() for _ in range(5)) < 0.004


def test_a_failed_step_counts_in_no_duration() -> None:
    """It may have been lost before it reached the device, which takes no time."""
    metrics = Metrics("m", process=False)

    MetricsObserver(metrics).step_landed(landing(1, 1.0, 1.0, failed=True))

    assert (metrics.step_duration.count, metrics.step_prediction_error.count) == (0, 0)


def test_a_step_costs_little() -> None:
    """The three records of a step, made by the engine anyway, are kept in less than 2 us."""
    trace, num = Trace(4096), 5000
    launched, landed = launch(1, 1.0), landing(1, 1.0, 2.0)

    def seconds(observer: Trace | NullObserver) -> float:
        start_s = time.perf_counter()
        for _ in range(num):
            observer.step_launched(launched)
            observer.step_landed(landed)
            observer.delivered(1.0, 2.0, 3)
        return time.perf_counter() - start_s

    cost_s = min(seconds(trace) for _ in range(5)) / num

    assert cost_s < 4e-6  # twice what is promised: the machine may be busy
