"""Loop lag and garbage-collection pauses are measured, and their hooks leave nothing behind."""

import asyncio
import gc
import time

import numpy as np
import pytest

from aserve.obs.instruments import Histogram
from aserve.obs.loop_watch import IDLE_FACTOR, GcWatch, LoopLag, LoopWatch, freeze_heap


def histogram() -> Histogram:
    return Histogram((0.001, 0.01, 0.1))


def test_statistics_over_the_window() -> None:
    """Percentiles and maximum are of the newest samples only."""
    watch = LoopWatch(histogram(), window=100)
    watch.observe(5.0)
    for lateness_ms in range(1, 101):
        watch.observe(lateness_ms / 1000)

    lag = watch.statistics()
    assert lag.num_samples == 100
    assert (lag.p50_ms, lag.p99_ms, lag.max_ms) == pytest.approx((50.5, 99.01, 100.0))


def test_no_samples() -> None:
    """Before the first sample everything is 0."""
    assert LoopWatch(histogram()).statistics() == LoopLag()


def test_early_timer_is_on_time() -> None:
    """A timer that fires early counts as lateness 0."""
    lag = histogram()
    LoopWatch(lag).observe(-0.5)

    assert (lag.counts, lag.sum) == ([1, 0, 0, 0], 0.0)


class AnnouncingHistogram(Histogram):
    """Sets ``observed`` at the first observation."""

    def __init__(self) -> None:
        super().__init__((0.001, 0.01, 0.1))
        self.observed = asyncio.Event()

    def observe(self, value: float, num: int = 1) -> None:
        super().observe(value, num)
        self.observed.set()


async def test_blocked_loop_is_seen() -> None:
    """A callback that blocks the loop for 50 ms shows as a sample of about that."""
    lag = AnnouncingHistogram()
    watch = LoopWatch(lag, interval_s=0.001)
    watch.start()
    await asyncio.sleep(0)
    time.sleep(0.05)  # noqa: ASYNC251 - the fault to be measured
    await lag.observed.wait()
    await watch.aclose()

    assert watch.statistics().max_ms >= 40
    assert sum(lag.counts[2:]) >= 1


async def test_nothing_is_sampled_after_aclose() -> None:
    """Closing twice is harmless; a timer of the same interval fires after the one that was cancelled would have."""
    watch = LoopWatch(histogram(), interval_s=0.001)
    watch.start()
    await watch.aclose()
    await watch.aclose()
    later = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(0.002, later.set_result, None)
    await later

    assert watch.statistics().num_samples == 0


async def test_idle_loop_is_looked_at_less_often() -> None:
    """Many times as rarely for as long as the owner says that it is idle."""
    asked = iter([False, True])
    times = iter([100.0, 100.5, 100.5, 100.5 + 0.5 * IDLE_FACTOR + 2.0, 0.0])
    watch = LoopWatch(histogram(), interval_s=0.5, is_idle=lambda: next(asked, False), clock=lambda: next(times))
    watch.start()
    for _ in range(2):
        watch._on_timer()
    await watch.aclose()

    assert watch.statistics().max_ms == pytest.approx(2000)


def test_collections_are_counted() -> None:
    """Each collection while installed is one observation; afterwards none."""
    pause = histogram()
    watch = GcWatch(pause)
    watch.install()
    gc.collect()
    watch.remove()
    watch.remove()
    num = pause.count
    gc.collect()

    assert num >= 1
    assert pause.count == num
    assert 0 < watch.max_s <= pause.sum


def test_pause_is_from_start_to_stop() -> None:
    """The clock's difference between the two callbacks is what counts; a stop alone counts nothing."""
    times = iter([10.0, 10.004])
    pause = histogram()
    watch = GcWatch(pause, clock=lambda: next(times))
    watch._on_gc("stop", {})
    watch._on_gc("start", {})
    watch._on_gc("stop", {})

    assert pause.counts == [0, 1, 0, 0]
    assert np.isclose(watch.max_s, 0.004)


def test_freeze_heap() -> None:
    """What lives is exempt from collection; the program can go back."""
    try:
        assert freeze_heap() > 1000
    finally:
        gc.unfreeze()
