"""The live table: how a run is getting on, redrawn in place on a terminal. It costs the run nothing but the glances."""

import os
import shutil
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from loadgen.driver import Progress
from loadgen.metrics import percentile
from loadgen.options import RunOptions

RECENT = 200
"""Latencies are of so many requests that ended last."""
_BARS = " ▁▂▃▄▅▆▇█"
_HISTORY = 60


class LiveTable:
    """Adds up the processes' glances and draws them; ``write`` gets whole redraws."""

    def __init__(self, options: RunOptions, *, write: Callable[[str], object], width: int = 100) -> None:
        self._options = options
        self._write = write
        self._width = width
        self._latest: dict[int, Progress] = {}
        self._recent_ttft_ms: deque[float] = deque(maxlen=RECENT)
        self._recent_e2e_ms: deque[float] = deque(maxlen=RECENT)
        self._rates: deque[float] = deque(maxlen=_HISTORY)
        self._last: tuple[float, int] = (0.0, 0)
        self._num_lines = 0

    def tell(self, progress: Progress) -> None:
        """Take a glance, and draw when every process has given its own."""
        self._latest[progress.process] = progress
        self._recent_ttft_ms.extend(progress.ttft_ms)
        self._recent_e2e_ms.extend(progress.e2e_ms)
        if progress.process == max(self._latest):
            self._draw()

    def clear(self) -> None:
        """Take the table away; the report takes its place."""
        if self._num_lines:
            self._write(f"\x1b[{self._num_lines}F\x1b[J")
            self._num_lines = 0

    def _draw(self) -> None:
        glances = self._latest.values()
        at_s, num_events = max(p.at_s for p in glances), sum(p.num_events for p in glances)
        then_s, then_events = self._last
        if at_s > then_s:
            self._rates.append((num_events - then_events) / (at_s - then_s))
        self._last = at_s, num_events
        num_ok, num_failed = sum(p.num_ok for p in glances), sum(p.num_failed for p in glances)
        lines = [
            f"{self._how_far(at_s, num_ok + num_failed)}  {num_ok:,} ok  {num_failed:,} failed  "
            f"{sum(p.num_out for p in glances):,} out",
            f"{self._rates[-1] if self._rates else 0:>9,.0f} events/s  {_spark(self._rates)}",
        ]
        for name, values in (("TTFT", self._recent_ttft_ms), ("E2E", self._recent_e2e_ms)):
            if values:
                ascending = sorted(values)
                p50, p99 = percentile(ascending, 50), percentile(ascending, 99)
                lines.append(
                    f"{name:<5} of the last {len(ascending):>3}: p50 {p50:,.0f} ms, p99 {p99:,.0f} ms, intended"
                )
        up = f"\x1b[{self._num_lines}F\x1b[J" if self._num_lines else ""
        self._write(up + "".join(line[: self._width] + "\n" for line in lines))
        self._num_lines = len(lines)

    def _how_far(self, at_s: float, num_ended: int) -> str:
        options = self._options
        if options.duration_s is not None:
            return f"{at_s:,.0f} of {options.duration_s:g} s"
        return f"{at_s:,.0f} s, {num_ended:,} of {options.num_requests:,}"


def _spark(values: "deque[float]") -> str:
    top = max(values, default=0.0)
    return "".join(_BARS[round(value / top * (len(_BARS) - 1))] for value in values) if top > 0 else ""


@contextmanager
def view(
    options: RunOptions, *, is_wanted: bool, stream: TextIO = sys.stderr
) -> Iterator[Callable[[Progress], None] | None]:
    """Show a live table while the block runs, where ``stream`` is a terminal that can; else give None."""
    if not is_wanted or not stream.isatty() or os.environ.get("TERM", "dumb") == "dumb":
        yield None
        return

    def write(text: str) -> None:
        stream.write(text)
        stream.flush()

    table = LiveTable(options, write=write, width=shutil.get_terminal_size().columns - 1)
    try:
        yield table.tell
    finally:
        table.clear()
