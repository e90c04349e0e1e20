"""Writes the log: one thread of its own takes records from the ring, renders them and appends them to the sink.

A thread and not a task, because the log must still be written when the loop is stuck, dead or cancelled, and because a
write to a full or slow disk blocks. A daemon thread, so that a hung disk cannot keep the process from ending.
"""

import asyncio
import atexit
import contextlib
import os
import sys
import threading
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from time import time
from typing import Final, Protocol

from aserve import faults
from aserve.errors import ConfigError
from aserve.obs.log import Level, Logger, Record, StdlibRoute
from aserve.obs.options import LogOptions
from aserve.obs.render import Renderer, json_renderer, pretty_renderer
from aserve.obs.ring import Ring

BATCH: Final = 32
"""Records rendered at a time: 0.2 to 0.3 ms, which is what rendering can add to the lateness of the loop."""

PAUSE_S: Final = 0.0005
"""Between two batches, until the log is closed. A write lets go of the interpreter's lock too, but takes it back before
a waiting loop has woken up. (20,000 records a second on two busy cores: lateness p99 8 ms with the pause, 23 without,
4 with no records at all.)"""

LIBRARIES: Final = ("transformers", "huggingface_hub")
"""Loggers that print by themselves unless adopted."""


class Sink(Protocol):
    """Where bytes go. Called by the drain's thread only."""

    def write(self, data: bytes) -> int:
        """Write some bytes, at least one, and return how many. Raises OSError."""
        ...

    def close(self) -> None: ...


class FdSink:
    """A file descriptor that somebody else owns, such as standard error."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def write(self, data: bytes) -> int:
        faults.hit("log.write")
        return os.write(self._fd, data)

    def close(self) -> None:
        pass


class FileSink:
    """Appends to a path. A file that was moved, removed or could not be opened is opened anew at the next write."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd: int | None = self._open()

    def write(self, data: bytes) -> int:
        if self._fd is not None and self._was_moved(self._fd):
            self.close()
        if self._fd is None:
            self._fd = self._open()
        faults.hit("log.write")
        return os.write(self._fd, data)

    def close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def _open(self) -> int:
        faults.hit("log.open")
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)

    def _was_moved(self, fd: int) -> bool:
        try:
            there = os.stat(self._path)
        except OSError:
            return True
        here = os.fstat(fd)
        return (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogStatistics:
    """Records: pushed == written + dropped + waiting, and none waits once the log is closed."""

    num_pushed: int = 0
    num_written: int = 0
    num_dropped: int = 0
    num_waiting: int = 0


class LogDrain:
    """Takes from ``ring`` and writes to ``sink``, from ``start`` until ``close``.

    Every ``flush_interval_s`` while there is something to write; an interval without a record ends in a sleep that the
    next push ends. So a burst costs its first push a wake-up, and an idle server costs nothing.
    What cannot be written (disk full, read-only, torn pipe) is dropped and counted, said once through ``complain``, and
    tried again with the next batch; the first line afterwards is ``log.dropped`` with their number.
    """

    def __init__(
        self,
        ring: Ring[Record],
        sink: Sink,
        render: Renderer,
        *,
        flush_interval_s: float = 0.1,
        complain: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self._ring = ring
        self._sink = sink
        self._render = render
        self._flush_interval_s = flush_interval_s
        self._complain = complain
        self._written = 0
        self._reported_dropped = 0
        self._failing = False
        self._torn = False
        self._statistics = LogStatistics()
        self._stopping = threading.Event()
        self._closing = threading.Lock()
        self._closed = False
        self._given_up = False
        self._thread = threading.Thread(target=self._run, name="aserve-log", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def statistics(self) -> LogStatistics:
        """As of the newest flush. From any thread."""
        return self._statistics

    def close(self, timeout_s: float = 2.0) -> None:
        """Write what waits and end the thread, within ``timeout_s``; what is left counts as dropped. Idempotent."""
        self._stopping.set()
        self._ring.wake()
        with self._closing:
            if self._closed:
                return
            self._closed = True
            if self._thread.ident is not None:
                self._thread.join(timeout_s)
            if self._thread.is_alive():
                self._given_up = True
                pushed = self._ring.pushed
                self._statistics = LogStatistics(
                    num_pushed=pushed, num_written=self._written, num_dropped=pushed - self._written
                )
                return
            self._flush()  # what was pushed while the thread ended
            self._sink.close()

    async def aclose(self, timeout_s: float = 2.0) -> None:
        """``close`` without holding up the loop. A cancelled wait does not keep the rest from being written."""
        await asyncio.to_thread(self.close, timeout_s)

    def _run(self) -> None:
        while not self._stopping.wait(self._flush_interval_s):
            if len(self._ring):
                self._flush()
            else:
                self._ring.wait()
        self._flush()

    def _flush(self) -> None:
        num_batches = self._ring.capacity // BATCH + 1  # a bound: whoever pushes without end must not keep us here
        for _ in range(num_batches):
            self._count()
            records = self._ring.take(BATCH)
            if not records:
                break
            try:
                self._write([self._render(record) for record in records])
            except Exception as error:  # whatever it is, the next batch must still be written
                self._fail(error)
            self._stopping.wait(PAUSE_S)
        self._count()

    def _write(self, lines: list[bytes]) -> None:
        notice = self._notice()
        data = b"".join([notice, *lines])
        ends = list(accumulate(map(len, lines), initial=len(notice)))[1:]
        offset = 0
        try:
            while offset < len(data):
                offset += self._sink.write(data[offset:] if offset else data)
        finally:
            num_whole = bisect_right(ends, offset)
            self._written += num_whole
            if offset:
                self._torn = data[offset - 1 : offset] != b"\n"
            if notice and offset >= len(notice):
                self._reported_dropped = self._statistics.num_dropped
        self._failing = False

    def _notice(self) -> bytes:
        """What has to come before the next lines: the end of a torn one, and how many were dropped."""
        notice = b"\n" if self._torn else b""
        num_dropped = self._statistics.num_dropped - self._reported_dropped
        if num_dropped:
            notice += self._render(
                {"t": time(), "level": "warning", "event": "log.dropped", "num_dropped": num_dropped}
            )
        return notice

    def _fail(self, error: Exception) -> None:
        self._count()
        if not self._failing:
            self._failing = True
            reason = error.strerror if isinstance(error, OSError) and error.strerror else repr(error)
            self._complain(f"The log cannot be written ({reason}); records are dropped and counted until it can be.")

    def _count(self) -> None:
        if self._given_up:
            return  # a hung write came back after close() had counted what was left
        pushed, num_waiting = self._ring.pushed, len(self._ring)
        dropped = max(self._statistics.num_dropped, pushed - self._written - num_waiting)
        self._statistics = LogStatistics(
            num_pushed=pushed, num_written=self._written, num_dropped=dropped, num_waiting=num_waiting
        )


class Log:
    """The log as one resource: ring, logger, the standard library's route and the drain. Made by ``open_log``."""

    def __init__(self, ring: Ring[Record], level: Level, drain: LogDrain, close_timeout_s: float) -> None:
        self.logger = Logger(ring, level)
        self._drain = drain
        self._close_timeout_s = close_timeout_s
        self._route = StdlibRoute(ring, level)
        drain.start()
        atexit.register(self.close)

    def adopt_libraries(self) -> None:
        """Silence the handlers that libraries bring. Call it once they are imported, after the model was loaded."""
        self._route.adopt(*LIBRARIES)

    def statistics(self) -> LogStatistics:
        return self._drain.statistics()

    def close(self) -> None:
        """Give ``logging`` back, write what waits, end the thread. Blocks up to ``close_timeout_s``. Idempotent."""
        self._route.remove()
        self._drain.close(self._close_timeout_s)
        atexit.unregister(self.close)

    async def aclose(self) -> None:
        """``close`` without holding up the loop."""
        await asyncio.to_thread(self.close)


def open_log(options: LogOptions) -> Log:
    """Open the destination, route ``logging`` into the ring and start the drain. Raises ConfigError."""
    sink: Sink
    if options.file:
        try:
            sink = FileSink(options.file)
        except OSError as error:
            raise ConfigError(f"The log file {options.file!r} cannot be opened: {error.strerror}.") from error
        is_terminal = False
    else:
        sink = FdSink(2)
        is_terminal = os.isatty(2)
    pretty = options.format == "pretty" or (options.format == "auto" and is_terminal)
    render = pretty_renderer(colors=is_terminal) if pretty else json_renderer()
    ring: Ring[Record] = Ring(options.ring_size)
    drain = LogDrain(
        ring, sink, render, flush_interval_s=options.flush_interval_ms / 1000, complain=_complain_on_standard_error
    )
    return Log(ring, options.level, drain, options.close_timeout_s)


def _complain_on_standard_error(sentence: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # standard error may be what cannot be written
        sys.stderr.write(f"aserve: {sentence}\n")
