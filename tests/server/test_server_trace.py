"""The trace over the wire: the last seconds as a file, for those with a key, and nothing of what clients wrote."""

import asyncio
import json
import threading
from collections.abc import Iterator

import pytest
from server_builders import http, serving
from trace_rules import read_trace

from aserve.core.ids import SequenceId
from aserve.engine.ports import RequestMove
from aserve.engine.trace import Trace
from aserve.testing import ManualClock


def trace_of_requests(clock: ManualClock, *ids: str) -> Trace:
    """One that came each second, the last one just now; none has ended."""
    trace = Trace(64, clock=clock, name="test", about={"version": "1"})
    for number, name in enumerate(ids, 1):
        clock.advance(1.0)
        trace.request_moved(
            RequestMove(sequence=SequenceId(number), request_id=name, index=0, phase="queued", at_s=clock())
        )
    return trace


async def test_the_last_seconds_come_as_a_file() -> None:
    """A JSON file by its name and type, whole, with facts on it."""
    trace = trace_of_requests(ManualClock(), "a", "b", "c")
    async with serving(trace=trace) as served:
        answer = await served.get("/v1/trace?seconds=1.5")

    assert answer.status == 200
    assert answer.headers["Content-Type"] == "application/json"
    assert answer.headers["Content-Disposition"] == 'attachment; filename="aserve-trace.json"'
    assert int(answer.headers["Content-Length"]) == len(answer.body)
    [process] = read_trace(answer.body)
    assert (process.name, [(t.name, t.start_us) for t in process.tracks]) == (
        "test",
        [("#1 a", 0), ("#2 b", 500_000), ("#3 c", 1_500_000)],
    )
    about = json.loads(answer.body)["otherData"]
    assert about["version"] == "1" and about["began_at"].endswith("Z")


@pytest.mark.parametrize(
    "query",
    ["seconds=", "seconds=0", "seconds=-1", "seconds=3601", "seconds=nan", "seconds=inf", "seconds=1e3", "seconds=1_0",
     "seconds=ten", "seconds=1&seconds=2", "seconds=%EF%BC%91", "seconds=" + "9" * 400],
)  # fmt: skip
async def test_seconds_that_are_none_are_refused(query: str) -> None:
    """400, with the parameter's name; also where no trace is kept."""
    async with serving(trace=trace_of_requests(ManualClock(), "a")) as served:
        answer = await served.get(f"/v1/trace?{query}")

    assert (answer.status, answer.error["param"]) == (400, "seconds")


@pytest.mark.parametrize("query", ["", "?seconds=3600", "?seconds=0.5", "?seconds=007&other=1"])
async def test_seconds_that_are_taken(query: str) -> None:
    """None at all is a default; leading zeros and other parameters do no harm."""
    async with serving(trace=trace_of_requests(ManualClock(), "a")) as served:
        answer = await served.get(f"/v1/trace{query}")

    assert answer.status == 200
    assert len(read_trace(answer.body)[0].tracks) == 1


async def test_head_has_the_length_alone() -> None:
    """As the standard wants it of every GET."""
    async with serving(trace=trace_of_requests(ManualClock(), "a")) as served:
        raw = await served.raw(http("HEAD", "/v1/trace"))

    head, _, body = raw.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ") and b"Content-Length: " in head
    assert body == b""


async def test_no_trace_is_kept() -> None:
    """404, and a sentence that names the option."""
    async with serving() as served:
        answer = await served.get("/v1/trace")

    assert (answer.status, answer.error["code"]) == (404, "trace_off")
    assert "trace.num_steps" in answer.error["message"]


async def test_the_trace_needs_a_key() -> None:
    """Like the other routes that tell what everybody does."""
    async with serving(trace=trace_of_requests(ManualClock(), "a"), api_keys=("k",)) as served:
        statuses = [
            (await served.get("/v1/trace", headers=headers)).status
            for headers in ({}, {"Authorization": "Bearer no"}, {"Authorization": "Bearer k"})
        ]

    assert statuses == [401, 401, 200]


async def test_files_are_made_off_the_loop_one_at_a_time() -> None:
    """The loop answers others meanwhile, and two who want the trace at once get it one after the other."""
    threads: list[int] = []
    num_at_once: list[int] = []
    entered, go_on = threading.Semaphore(0), threading.Semaphore(0)

    class SlowCut:
        def pieces(self) -> Iterator[bytes]:
            threads.append(threading.get_ident())
            num_at_once.append(1)
            entered.release()
            go_on.acquire()
            num_at_once.pop()
            yield b"{}"

    class SlowTrace:
        def cut(self, seconds: float) -> SlowCut:
            assert not num_at_once
            return SlowCut()

    async with serving(trace=SlowTrace()) as served:
        both = [asyncio.create_task(served.get("/v1/trace")) for _ in range(2)]
        await asyncio.to_thread(entered.acquire)
        health = await served.get("/health")
        go_on.release(2)
        answers = await asyncio.gather(*both)

    assert health.status == 200
    assert [answer.body for answer in answers] == [b"{}", b"{}"]
    assert threading.get_ident() not in threads
