"""The trace over the wire: the last seconds as a file, for those with a key, and nothing of what clients wrote."""

import asyncio
import json
import threading
from collections.abc import Iterator

import pytest
from server_builders import http, serving
from trace_rules import read_trace
from wire_builders import PATIENCE_S, until

from aserve.core.ids import SequenceId
from aserve.engine.ports import RequestMove
from aserve.engine.trace import Trace
from aserve.server.trace_route import MAX_READERS
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


class SlowTrace:
    """Each of its files is drawn when the test says ``go_on``, once ``entered`` says that its thread is at it."""

    def __init__(self) -> None:
        self.entered, self.go_on = threading.Semaphore(0), threading.Semaphore(0)
        self.threads: list[int] = []
        self.num_at_once = 0
        self.num_pieces = 0

    def cut(self, seconds: float) -> "SlowTrace":
        assert not self.num_at_once
        return self

    def pieces(self) -> Iterator[bytes]:
        self.threads.append(threading.get_ident())
        self.num_at_once += 1
        self.entered.release()
        self.go_on.acquire()
        self.num_at_once -= 1
        for piece in (b"{", b"}"):
            self.num_pieces += 1
            yield piece


async def test_files_are_made_off_the_loop_one_at_a_time() -> None:
    """The loop answers others meanwhile, and two who want the trace at once get it one after the other."""
    trace = SlowTrace()
    async with serving(trace=trace) as served:
        both = [asyncio.create_task(served.get("/v1/trace")) for _ in range(2)]
        await asyncio.to_thread(trace.entered.acquire)
        health = await served.get("/health")
        trace.go_on.release(2)
        answers = await asyncio.gather(*both)

    assert health.status == 200
    assert [answer.body for answer in answers] == [b"{}", b"{}"]
    assert threading.get_ident() not in trace.threads


async def test_a_client_that_leaves_keeps_no_thread_and_lets_no_second_one_draw() -> None:
    """Its file is given up after the piece that is being made, and only then comes the next client's."""
    trace = SlowTrace()
    async with serving(trace=trace) as served:
        _, writer = await served.connect()
        writer.write(http("GET", "/v1/trace"))
        await asyncio.to_thread(trace.entered.acquire)
        writer.close()
        await until(lambda: [fields["status"] for fields in served.log.fields_of("request.finished")] == [499])
        second = asyncio.create_task(served.get("/v1/trace"))
        for _ in range(2):  # the second client has come by then
            await served.get("/health")
        trace.go_on.release(2)
        answer = await second

    assert (answer.status, answer.body) == (200, b"{}")
    assert trace.num_pieces == 1 + 2


async def test_a_file_that_cannot_be_cut_lets_the_next_one_be_made() -> None:
    """A fault of the trace is that request's alone."""

    class FaultyOnce(SlowTrace):
        def cut(self, seconds: float) -> SlowTrace:
            self.go_on.release()
            if self.num_cuts:
                return self
            self.num_cuts += 1
            raise ValueError("no")

        num_cuts = 0

    async with serving(trace=FaultyOnce()) as served:
        statuses = [(await served.get("/v1/trace")).status for _ in range(2)]

    assert statuses == [500, 200]


async def test_so_many_readers_and_no_more() -> None:
    """Each has a whole file in memory; who comes too many is told to come again."""
    trace = SlowTrace()
    async with serving(trace=trace) as served:
        tasks = [asyncio.create_task(served.get("/v1/trace")) for _ in range(MAX_READERS + 1)]
        done, _ = await asyncio.wait(tasks, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
        trace.go_on.release(len(tasks) + 1)
        answers = await asyncio.gather(*tasks)
        later = await served.get("/v1/trace")

    assert [task.result().status for task in done] == [503]
    assert (done.pop().result().error["code"], later.status) == ("trace_busy", 200)
    assert sorted(answer.status for answer in answers) == [200] * MAX_READERS + [503]


async def test_what_was_sent_is_freed_while_the_reader_sleeps() -> None:
    """Only what it has not taken yet waits for it in memory."""
    num_freed = 0

    class Part(bytes):
        def __del__(self) -> None:
            nonlocal num_freed
            num_freed += 1

    class LargeTrace:
        def cut(self, seconds: float) -> "LargeTrace":
            return self

        def pieces(self) -> Iterator[bytes]:
            return (Part(bytes([number]) * (1 << 18)) for number in range(100))

    async with serving(trace=LargeTrace()) as served:
        reader, writer = await served.connect()
        writer.write(http("GET", "/v1/trace"))
        await until(lambda: num_freed)
        num_freed_early = num_freed
        _, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()

    assert 0 < num_freed_early < 100
    assert body == b"".join(bytes([number]) * (1 << 18) for number in range(100))
