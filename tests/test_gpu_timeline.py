"""Host and device on one clock (tests/gpu/timeline.py): when no kernel ran, and what the loop was at then."""

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent / "gpu"))

from timeline import Kernel, idle_by_host, idle_gaps, write

from aserve.engine.ports import StepLaunch
from aserve.engine.trace import Trace
from aserve.obs.trace import Slice


def kernels(*spans: tuple[float, float]) -> list[Kernel]:
    return [Kernel("some kernel", start_s, end_s) for start_s, end_s in spans]


def work(name: str, start_s: float, end_s: float) -> Slice:
    return Slice(name=name, start_s=start_s, end_s=end_s)


def test_gaps_are_what_no_kernel_covers() -> None:
    """Kernels may overlap, and lie in one another; what follows at once is no gap."""
    found = idle_gaps(kernels((0.0, 4.0), (1.0, 2.0), (3.0, 5.0), (5.000001, 6.0), (8.0, 9.0)))

    assert found == [(6.0, 8.0)]
    assert idle_gaps([]) == []


def test_gaps_are_shared_out_to_what_the_loop_was_at() -> None:
    """Work may reach over a gap's edges and over several gaps; the rest is "other"."""
    gaps = [(1.0, 2.0), (4.0, 6.0), (9.0, 10.0)]
    host = [work("land", 0.0, 1.25), work("launch", 1.25, 5.0), work("deliver", 5.5, 5.75), work("land", 7.0, 8.0)]
    found = idle_by_host(gaps, host)

    assert found == pytest.approx({"land": 0.25, "launch": 1.75, "deliver": 0.25, "other": 1.75})
    assert sum(found.values()) == pytest.approx(sum(end_s - start_s for start_s, end_s in gaps))


def test_both_are_one_file(tmp_path: Path) -> None:
    """The engine's lanes, and the kernels below them, by the same clock; the end of it is kept."""
    now_s = [0.0]
    trace = Trace(16, clock=lambda: now_s[0])
    trace.step_launched(
        StepLaunch(
            step=1, stream=0, composed_s=9.0, handed_s=9.25, launched_s=9.5, num_rows=1, num_chunks=0,
            num_prefill_tokens=0, num_inflight=1, reason="idle", lead_s=None, predicted_end_s=None, bubble_s=0.0,
        )  # type: ignore[arg-type]
    )  # fmt: skip
    now_s[0] = 10.0
    write(trace.cut(), kernels((1.0, 2.0), (9.5, 10.0)), tmp_path / "both.json", seconds=2.0)
    events = json.loads((tmp_path / "both.json").read_text())["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    shown = {(lanes[event["tid"]], event["ts"], event["dur"]) for event in events if event["ph"] == "X"}

    assert {("launch", 1_250_000, 250_000), ("kernels", 1_500_000, 500_000)} <= shown
    assert sum(lane == "kernels" for lane, _, _ in shown) == 1
