"""The drain writes what it can, drops and counts the rest, and outlives every fault of its sink."""

import asyncio
import errno
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import orjson
import pytest

from aserve import faults
from aserve.errors import ConfigError
from aserve.obs.drain import FdSink, FileSink, Log, LogDrain, Sink, open_log
from aserve.obs.log import Logger, Record
from aserve.obs.options import LogOptions
from aserve.obs.render import json_renderer
from aserve.obs.ring import Ring


class MemorySink:
    """Keeps what is written. Each outcome planned serves one write: bytes to take, an error, an event to wait for."""

    def __init__(self, *plan: int | Exception | threading.Event) -> None:
        self.data = b""
        self.plan = list(plan)
        self.calls: SimpleQueue[bytes] = SimpleQueue()
        self.closed = False

    def write(self, data: bytes) -> int:
        self.calls.put(data)
        outcome = self.plan.pop(0) if self.plan else len(data)
        if isinstance(outcome, Exception):
            raise outcome
        if isinstance(outcome, threading.Event):
            outcome.wait()
            outcome = len(data)
        self.data += data[:outcome]
        return min(outcome, len(data))

    def close(self) -> None:
        self.closed = True

    def wait_for_write(self) -> None:
        self.calls.get(timeout=20)

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [orjson.loads(line) for line in self.data.splitlines()]


def full() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


def drained(ring: Ring[Record], sink: Sink, **options: Any) -> LogDrain:
    """A drain that writes only when it is closed or flushed by hand."""
    return LogDrain(ring, sink, json_renderer(), flush_interval_s=3600, **options)


def push(ring: Ring[Record], num: int, first: int = 0) -> None:
    log = Logger(ring)
    for number in range(first, first + num):
        log.info("e", number=number)


def numbers(sink: MemorySink) -> list[int]:
    return [line["number"] for line in sink.lines if line["event"] == "e"]


def counts(drain: LogDrain | Log) -> tuple[int, int, int, int]:
    """(pushed, written, dropped, waiting)."""
    s = drain.statistics()
    return s.num_pushed, s.num_written, s.num_dropped, s.num_waiting


@pytest.fixture(autouse=True)
def nothing_armed() -> Iterator[None]:
    yield
    faults.disarm_all()


def test_close_writes_everything() -> None:
    """What was pushed is written in order by the time that ``close`` returns, and the sink is closed."""
    ring: Ring[Record] = Ring(1000)
    sink = MemorySink()
    drain = drained(ring, sink)
    drain.start()
    push(ring, 100)
    drain.close()

    assert numbers(sink) == list(range(100))
    assert counts(drain) == (100, 100, 0, 0)
    assert sink.closed


def test_writes_on_its_own() -> None:
    """Without being closed, the drain writes within its interval."""
    ring: Ring[Record] = Ring(1000)
    sink = MemorySink()
    drain = LogDrain(ring, sink, json_renderer(), flush_interval_s=0.005)
    drain.start()
    push(ring, 1)
    sink.wait_for_write()
    push(ring, 1, first=1)
    sink.wait_for_write()

    drain.close()
    assert numbers(sink) == [0, 1]


def test_sleeps_while_there_is_nothing_to_write() -> None:
    """An interval without a record ends in a sleep, which the next push or ``close`` ends."""

    class WatchedRing(Ring[Record]):
        def wait(self) -> None:
            waits.put(None)
            super().wait()

    waits: SimpleQueue[None] = SimpleQueue()
    ring = WatchedRing(10)
    sink = MemorySink()
    drain = LogDrain(ring, sink, json_renderer(), flush_interval_s=0.001)
    drain.start()
    for number in range(2):
        waits.get(timeout=20)
        push(ring, 1, first=number)
        sink.wait_for_write()
    waits.get(timeout=20)
    drain.close(timeout_s=20)

    assert numbers(sink) == [0, 1]
    assert sink.closed


def test_ten_rings_worth() -> None:
    """An overrun writes the newest records, counts the others, and says at the gap how many they were."""
    ring: Ring[Record] = Ring(50)
    sink = MemorySink()
    drain = drained(ring, sink)
    drain.start()
    push(ring, 500)
    drain.close()

    assert numbers(sink) == list(range(450, 500))
    assert counts(drain) == (500, 50, 450, 0)
    first = sink.lines[0]
    assert (first["event"], first["num_dropped"]) == ("log.dropped", 450)


def test_close_is_idempotent_and_takes_late_pushes() -> None:
    """A drain that was never started writes at ``close``; a second ``close`` does nothing."""
    ring: Ring[Record] = Ring(10)
    sink = MemorySink()
    drain = drained(ring, sink)
    push(ring, 2)
    drain.close()
    drain.close()

    assert numbers(sink) == [0, 1]
    assert counts(drain) == (2, 2, 0, 0)


def test_full_disk_costs_only_what_it_holds_up() -> None:
    """While the disk is full batches are dropped; afterwards lines go on, led by the number of lost ones."""
    ring: Ring[Record] = Ring(1000)
    sink = MemorySink(full(), full())
    said: list[str] = []
    drain = drained(ring, sink, complain=said.append)
    push(ring, 10)
    drain._flush()
    push(ring, 10, first=10)
    drain._flush()
    push(ring, 10, first=20)
    drain.close()

    assert numbers(sink) == list(range(20, 30))
    assert counts(drain) == (30, 10, 20, 0)
    assert (sink.lines[0]["event"], sink.lines[0]["num_dropped"]) == ("log.dropped", 20)
    assert said == [
        "The log cannot be written (No space left on device); records are dropped and counted until it can be."
    ]


def test_torn_line_spoils_no_other() -> None:
    """A disk that fills up in the middle of a line: whole lines count as written and the next one starts afresh."""
    ring: Ring[Record] = Ring(1000)
    line_length = len(json_renderer()({"t": 0.25, "level": "info", "event": "e", "number": 0}))
    sink = MemorySink(2 * line_length + 10, full())
    drain = drained(ring, sink)
    push(ring, 5)
    drain._flush()
    push(ring, 1, first=5)
    drain.close()

    raw = sink.data.splitlines()
    assert len(raw[2]) == 10
    assert [orjson.loads(line)["event"] for line in (*raw[:2], *raw[3:])] == ["e", "e", "log.dropped", "e"]
    assert counts(drain) == (6, 3, 3, 0)


def test_short_writes_are_continued() -> None:
    """A sink that takes a few bytes at a time gets them all."""
    ring: Ring[Record] = Ring(1000)
    sink = MemorySink(*[7] * 30)
    drain = drained(ring, sink)
    push(ring, 10)
    drain.close()

    assert numbers(sink) == list(range(10))
    assert counts(drain) == (10, 10, 0, 0)


@pytest.mark.parametrize("error", [ValueError("bug"), MemoryError(), full()])
def test_any_fault_of_a_write_leaves_the_drain_alive(error: Exception) -> None:
    """Whatever a write raises, the thread goes on with the next batch."""
    ring: Ring[Record] = Ring(1000)
    sink = MemorySink(error)
    drain = LogDrain(ring, sink, json_renderer(), flush_interval_s=0.005)
    drain.start()
    push(ring, 1)
    sink.wait_for_write()
    push(ring, 1, first=1)
    sink.wait_for_write()
    drain.close()

    assert [line["event"] for line in sink.lines] == ["log.dropped", "e"]
    assert counts(drain) == (2, 1, 1, 0)


def test_fault_point_of_the_write() -> None:
    """An armed "log.write" fails a write to a descriptor."""
    read_end, write_end = os.pipe()
    with faults.armed("log.write", error=full()), pytest.raises(OSError, match="No space left"):
        FdSink(write_end).write(b"x")
    os.close(read_end)
    os.close(write_end)


def test_unserialisable_records_do_not_cost_their_neighbours() -> None:
    """Records that cannot be rendered are written as what is known of them."""
    ring: Ring[Record] = Ring(10)
    sink = MemorySink()
    drain = drained(ring, sink)
    push(ring, 1)
    ring.push({"t": "no time", "level": "info", "event": "odd"})
    ring.push({})
    push(ring, 1, first=1)
    drain.close()

    assert [line["event"] for line in sink.lines] == ["e", "log.unrenderable", "log.unrenderable", "e"]
    assert counts(drain) == (4, 4, 0, 0)


def test_hung_write_cannot_hold_up_the_end() -> None:
    """``close`` gives up after its limit; what is left counts as dropped."""
    ring: Ring[Record] = Ring(10)
    disk_comes_back = threading.Event()
    sink = MemorySink(disk_comes_back)
    drain = LogDrain(ring, sink, json_renderer(), flush_interval_s=0.005)
    drain.start()
    push(ring, 1)
    sink.wait_for_write()
    push(ring, 2, first=1)
    drain.close(timeout_s=0.05)

    assert counts(drain) == (3, 0, 3, 0)
    disk_comes_back.set()
    drain._thread.join(10)
    assert counts(drain) == (3, 0, 3, 0)


async def test_cancelled_aclose_still_writes() -> None:
    """Cancelling ``aclose`` does not lose the rest."""
    ring: Ring[Record] = Ring(100)
    sink = MemorySink()
    drain = drained(ring, sink)
    drain.start()
    push(ring, 50)
    closing = asyncio.create_task(drain.aclose())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.gather(closing, return_exceptions=True)
    await drain.aclose()

    assert numbers(sink) == list(range(50))


def test_removed_and_rotated_file(tmp_path: Path) -> None:
    """A log file that is removed or moved away is made anew; nothing goes to the old one."""
    path = tmp_path / "log"
    sink = FileSink(str(path))
    sink.write(b"one\n")
    path.unlink()
    sink.write(b"two\n")
    path.rename(tmp_path / "log.1")
    sink.write(b"three\n")
    sink.close()

    assert (tmp_path / "log.1").read_bytes() == b"two\n"
    assert path.read_bytes() == b"three\n"


def test_vanished_folder(tmp_path: Path) -> None:
    """Without its folder nothing can be written; when it is back, lines go on."""
    folder = tmp_path / "logs"
    folder.mkdir()
    ring: Ring[Record] = Ring(10)
    drain = drained(ring, FileSink(str(folder / "log")))
    (folder / "log").unlink()
    folder.rmdir()
    push(ring, 1)
    drain._flush()
    folder.mkdir()
    push(ring, 1, first=1)
    drain.close()

    assert [orjson.loads(line)["event"] for line in (folder / "log").read_bytes().splitlines()] == ["log.dropped", "e"]
    assert counts(drain) == (2, 1, 1, 0)


def test_read_only_file(tmp_path: Path) -> None:
    """A descriptor that cannot be written to costs its records and nothing else."""
    path = tmp_path / "log"
    path.touch()
    fd = os.open(path, os.O_RDONLY)
    ring: Ring[Record] = Ring(10)
    drain = drained(ring, FdSink(fd))
    push(ring, 3)
    drain.close()
    os.close(fd)

    assert counts(drain) == (3, 0, 3, 0)


def test_real_full_device() -> None:
    """/dev/full refuses every write; every record is counted."""
    ring: Ring[Record] = Ring(10)
    drain = drained(ring, FileSink("/dev/full"))
    push(ring, 3)
    drain.close()

    assert counts(drain) == (3, 0, 3, 0)


def test_pushes_from_threads_are_all_accounted_for() -> None:
    """Four threads push into a small ring while the drain writes: written + dropped == pushed."""
    ring: Ring[Record] = Ring(64)
    sink = MemorySink()
    drain = LogDrain(ring, sink, json_renderer(), flush_interval_s=0.001)
    drain.start()
    threads = [threading.Thread(target=push, args=(ring, 1000)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    drain.close()

    pushed, written, dropped, waiting = counts(drain)
    assert (pushed, waiting) == (4000, 0)
    assert written + dropped == 4000
    assert written == len(numbers(sink))


def test_open_log_writes_json_lines_to_its_file(tmp_path: Path) -> None:
    """The log as a whole: our records and the standard library's, one JSON object a line."""
    path = tmp_path / "aserve.log"
    log = open_log(LogOptions(file=str(path)))
    log.logger.info("server.started", port=8000)
    logging.getLogger("asyncio").error("slow")
    log.logger.debug("not this")
    log.close()
    log.close()

    lines = [orjson.loads(line) for line in path.read_bytes().splitlines()]
    assert [(line["level"], line["event"]) for line in lines] == [("info", "server.started"), ("error", "slow")]
    assert counts(log) == (2, 2, 0, 0)


def test_open_log_refuses_a_hopeless_file(tmp_path: Path) -> None:
    """A path that cannot be opened at start is the operator's fault, told in a sentence."""
    with pytest.raises(ConfigError, match=r"^The log file '.*/no/log' cannot be opened: No such file or directory\.$"):
        open_log(LogOptions(file=str(tmp_path / "no" / "log")))


@pytest.mark.parametrize("ending", ["", "raise SystemExit(3)", "1 / 0"])
def test_exit_without_close_writes_the_rest(tmp_path: Path, ending: str) -> None:
    """A program that ends in any ordinary way without closing its log loses no record."""
    path = tmp_path / "log"
    program = (
        "from aserve.obs.drain import open_log\n"
        "from aserve.obs.options import LogOptions\n"
        f"log = open_log(LogOptions(file={str(path)!r}, flush_interval_ms=60000))\n"
        "for number in range(100):\n"
        "    log.logger.info('e', number=number)\n"
        f"{ending}\n"
    )
    subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, timeout=60)

    assert [orjson.loads(line)["number"] for line in path.read_bytes().splitlines()] == list(range(100))
