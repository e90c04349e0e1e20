"""Events of a device: seen on the loop, in the order of launches, without blocking it."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import numpy as np
import pytest
import uvloop

from aserve.device import alarm
from aserve.device.event import (
    Flight,
    PollWatcher,
    ThreadWatcher,
    TimerWatcher,
    Watcher,
    WatcherName,
    WordEvent,
    make_watcher,
)
from aserve.errors import DeviceLost
from aserve.testing import ManualClock

NAMES: tuple[WatcherName, ...] = (*(("timer",) if alarm.is_supported() else ()), "thread", "poll")
WORD = 1 << 32


class FakeEvent:
    """Reached, or broken, when the test says so."""

    def __init__(self) -> None:
        self.num_queries = 0
        self._over = threading.Event()
        self._error: Exception | None = None

    def reach(self) -> None:
        self._over.set()

    def break_down(self, error: Exception) -> None:
        self._error = error
        self._over.set()

    def query(self) -> bool:
        self.num_queries += 1
        if self._error is not None:
            raise self._error
        return self._over.is_set()

    def synchronize(self) -> None:
        self._over.wait()
        if self._error is not None:
            raise self._error


def run(main: Coroutine[Any, Any, Any], new_loop: Callable[[], asyncio.AbstractEventLoop]) -> Any:
    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(main)


class Story:
    """What a watcher told, in order, and a way to wait for so much of it."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._news = asyncio.Event()

    def watch(self, watcher: Watcher, event: FakeEvent, name: str, *, then: Callable[[], None] | None = None) -> None:
        def on_done() -> None:
            self._add(name)
            if then is not None:
                then()

        watcher.watch(event, on_done, lambda error: self._add(f"{name}: {error}"))

    def _add(self, line: str) -> None:
        self.lines.append(line)
        self._news.set()

    async def first(self, num_lines: int) -> list[str]:
        while len(self.lines) < num_lines:
            self._news.clear()
            await self._news.wait()
        return self.lines


@pytest.fixture(params=NAMES)
async def watcher(request: pytest.FixtureRequest) -> AsyncIterator[Watcher]:
    made = make_watcher(request.param)
    yield made
    made.close()


# --- every watcher


async def test_events_are_told_in_the_order_of_launches(watcher: Watcher) -> None:
    """A later step that has ended first waits for the earlier one."""
    story, events = Story(), [FakeEvent() for _ in range(3)]
    for number, event in enumerate(events):
        story.watch(watcher, event, str(number))
    events[2].reach()
    events[1].reach()
    await asyncio.sleep(0)
    assert story.lines == []
    events[0].reach()
    assert await story.first(3) == ["0", "1", "2"]


async def test_nothing_is_told_before_watch_returns(watcher: Watcher) -> None:
    """Also of an event that has been reached already."""
    story, event = Story(), FakeEvent()
    event.reach()
    story.watch(watcher, event, "step")
    assert (story.lines, len(watcher)) == ([], 1)
    assert (await story.first(1), len(watcher)) == (["step"], 0)


async def test_a_callback_may_watch_the_next_event(watcher: Watcher) -> None:
    """As a landing does that launches: each of these steps launches the next."""
    story = Story()

    def launch(number: int) -> None:
        event = FakeEvent()
        event.reach()
        story.watch(watcher, event, str(number), then=lambda: launch(number + 1) if number < 99 else None)

    launch(0)
    assert await story.first(100) == [str(number) for number in range(100)]


async def test_a_fault_is_told_to_everything_that_is_out_and_to_what_comes_later(watcher: Watcher) -> None:
    """One sticky error: the steps behind the broken one cannot be trusted, nor can any later one."""
    story, events = Story(), [FakeEvent() for _ in range(3)]
    for number, event in enumerate(events):
        story.watch(watcher, event, str(number))
    events[0].reach()
    await story.first(1)
    events[1].break_down(RuntimeError("an illegal memory access"))
    lost = "The device is lost: RuntimeError: an illegal memory access"
    assert await story.first(3) == ["0", f"1: {lost}", f"2: {lost}"]
    for event in events:
        event.reach()
    story.watch(watcher, FakeEvent(), "3")
    assert await story.first(4) == ["0", f"1: {lost}", f"2: {lost}", f"3: {lost}"]


async def test_a_fault_keeps_its_cause(watcher: Watcher) -> None:
    """What the device said is behind the DeviceLost that the engine dies of."""
    told: asyncio.Future[DeviceLost] = asyncio.get_running_loop().create_future()
    event, cause = FakeEvent(), RuntimeError("ECC")
    watcher.watch(event, lambda: None, told.set_result)
    event.break_down(cause)
    assert (await told).__cause__ is cause


async def test_a_callback_that_raises_holds_up_nobody(watcher: Watcher) -> None:
    """Its error goes to the loop's exception handler; the next step is told."""
    story, events, errors = Story(), [FakeEvent(), FakeEvent()], []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(str(context["exception"])))

    def fail() -> None:
        raise KeyError("row")

    story.watch(watcher, events[0], "0", then=fail)
    story.watch(watcher, events[1], "1")
    for event in events:
        event.reach()
    assert await story.first(2) == ["0", "1"]
    assert errors == ["'row'"]


async def test_closing_fails_what_is_out_and_refuses_more(watcher: Watcher) -> None:
    """Closing never waits: the device may hang. What ends afterwards is told to nobody."""
    story, event = Story(), FakeEvent()
    story.watch(watcher, event, "step")
    watcher.close()
    watcher.close()
    event.reach()
    assert await story.first(1) == ["step: The device is closed."]
    with pytest.raises(DeviceLost, match=r"The device is closed\."):
        story.watch(watcher, FakeEvent(), "late")
    assert story.lines == ["step: The device is closed."]


async def test_what_is_out_fails_though_the_release_does(watcher: Watcher, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever awaits a step is told, and the error comes out."""
    story, release = Story(), watcher._release
    for name in ("0", "1"):
        story.watch(watcher, FakeEvent(), name)

    def release_badly() -> None:
        release()
        raise OSError("no such descriptor")

    monkeypatch.setattr(watcher, "_release", release_badly)
    with pytest.raises(OSError, match="no such descriptor"):
        watcher.close()
    assert await story.first(2) == ["0: The device is closed.", "1: The device is closed."]


async def test_a_callback_may_close(watcher: Watcher) -> None:
    """The others fail, and nobody looks any more."""
    story, events = Story(), [FakeEvent(), FakeEvent()]
    story.watch(watcher, events[0], "0", then=watcher.close)
    story.watch(watcher, events[1], "1")
    events[0].reach()
    assert await story.first(2) == ["0", "1: The device is closed."]
    events[1].reach()


async def test_aclose_waits_for_what_is_out(watcher: Watcher) -> None:
    """A runner that ends lets its last step land."""
    story, event = Story(), FakeEvent()
    story.watch(watcher, event, "last")
    closing = asyncio.create_task(watcher.aclose())
    await asyncio.sleep(0)
    assert not closing.done()
    event.reach()
    await closing
    assert story.lines == ["last"]


async def test_a_cancelled_aclose_closes_at_once(watcher: Watcher) -> None:
    """The way out of a device that hangs."""
    story, event = Story(), FakeEvent()
    story.watch(watcher, event, "hangs")
    closing = asyncio.create_task(watcher.aclose())
    await asyncio.sleep(0)
    closing.cancel()
    assert await story.first(1) == ["hangs: The device is closed."]
    event.reach()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_thousand_steps_two_deep(name: WatcherName, new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """The pipeline's shape on both loops: each landing launches the step after next."""

    async def main() -> list[int]:
        watcher, flights = make_watcher(name), []

        def launch(number: int) -> None:
            flight: Flight[int] = Flight()
            event = FakeEvent()
            flights.append(flight)
            watcher.watch(event, lambda: flight.land(number), flight.fail, key="decode", expected_s=1e-5)
            event.reach()

        launch(0)
        launch(1)
        landed = []
        for number in range(2, 1000):
            landed.append(await flights[number - 2])
            launch(number)
        await watcher.aclose()
        return landed

    assert run(main(), new_loop) == list(range(998))


@pytest.mark.parametrize("name", NAMES)
def test_a_watcher_may_be_closed_after_its_loop(name: WatcherName) -> None:
    """Nothing is told, and every descriptor goes back."""
    before = set(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else set()
    event = FakeEvent()

    async def main() -> Watcher:
        watcher = make_watcher(name)
        watcher.watch(event, lambda: None, lambda error: None)
        return watcher

    watcher = run(main(), uvloop.new_event_loop)
    watcher.close()
    event.reach()
    assert len(watcher) == 0
    if before:
        assert set(os.listdir("/proc/self/fd")) == before


def test_the_factory_takes_the_timer_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere a thread waits; a name that is given is taken as it is."""

    async def kinds() -> list[type[Watcher]]:
        watchers = [make_watcher("auto"), make_watcher("poll"), make_watcher("thread")]
        for watcher in watchers:
            watcher.close()
        return [type(watcher) for watcher in watchers]

    monkeypatch.setattr(alarm, "is_supported", lambda: False)
    assert asyncio.run(kinds()) == [ThreadWatcher, PollWatcher, ThreadWatcher]
    monkeypatch.undo()
    assert asyncio.run(kinds())[0] is (TimerWatcher if alarm.is_supported() else ThreadWatcher)


async def test_only_a_thread_wants_events_that_sleep() -> None:
    """An event that is only ever queried need not pay for an interrupt."""
    assert [kind.wants_blocking_events for kind in (TimerWatcher, PollWatcher, ThreadWatcher)] == [False, False, True]


# --- the timer


class FakeAlarm:
    """Rings when the manual clock has come that far."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.due_s: float | None = None
        self.on_ring: Callable[[], None] = lambda: None

    def set(self, delay_s: float) -> None:
        self.due_s = self.clock() + delay_s

    def close(self) -> None:
        self.due_s = None


class Bench:
    """A timer watcher in manual time: ``pass_time`` rings its alarm and runs the loop as often as it wants."""

    def __init__(self, *, lead_s: float = 0.001) -> None:
        self.clock = ManualClock(1000.0)
        self.alarm = FakeAlarm(self.clock)
        self.told: list[tuple[str, float]] = []

        def make_alarm(_loop: asyncio.AbstractEventLoop, on_ring: Callable[[], None]) -> FakeAlarm:
            self.alarm.on_ring = on_ring
            return self.alarm

        self.watcher = TimerWatcher(lead_s=lead_s, clock=self.clock, make_alarm=make_alarm)

    def launch(self, name: str = "step", *, key: str = "decode", expected_s: float | None = None) -> FakeEvent:
        event = FakeEvent()
        self.watcher.watch(
            event,
            lambda: self.told.append((name, round(self.clock() - 1000.0, 6))),
            lambda error: None,
            key=key,
            expected_s=expected_s,
        )
        return event

    @property
    def sleeps_s(self) -> float | None:
        """For how long the watcher sleeps now; None while it looks in every tick or has nothing to look at."""
        return None if self.alarm.due_s is None else round(self.alarm.due_s - self.clock(), 6)

    async def pass_time(self, seconds: float) -> None:
        """Let time pass, with the alarm rung when it is due and a tick of the loop every 50 µs while nothing sleeps."""
        end_s = self.clock() + seconds
        while True:
            await self._tick()
            rest_s = end_s - self.clock()
            if rest_s < 1e-9:
                return
            nap_s = 50e-6 if self.alarm.due_s is None else max(self.alarm.due_s - self.clock(), 1e-6)
            self.clock.advance(min(rest_s, nap_s))

    async def stall(self, seconds: float) -> None:
        """Let time pass while the loop does something else."""
        self.clock.advance(seconds)
        await self._tick()

    async def _tick(self) -> None:
        await asyncio.sleep(0)
        if self.alarm.due_s is not None and self.alarm.due_s <= self.clock() + 1e-9:
            self.alarm.due_s = None
            self.alarm.on_ring()
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def run_steps(self, num_steps: int, seconds: float) -> None:
        """Steps of that length, one after another."""
        for _ in range(num_steps):
            event = self.launch()
            await self.pass_time(seconds)
            event.reach()
            while len(self.watcher):
                await self.pass_time(50e-6)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    yield made
    made.watcher.close()


async def test_it_sleeps_until_just_before_the_expected_end_and_then_looks(bench: Bench) -> None:
    """Not one look while it sleeps, then one in every tick, and the landing at once."""
    event = bench.launch(expected_s=0.032)
    await bench.pass_time(0)
    assert (event.num_queries, bench.sleeps_s) == (0, 0.027)  # a lead of 1 ms and twice a spread of 1/16
    await bench.pass_time(0.027)
    assert (event.num_queries > 2, bench.sleeps_s) == (True, None)
    await bench.pass_time(0.002)
    event.reach()
    await bench.pass_time(0)
    assert bench.told == [("step", 0.029)]


async def test_a_step_behind_another_is_expected_from_the_others_end(bench: Bench) -> None:
    """Two in flight: the second begins when the first has ended, not when it was launched."""
    first, second = bench.launch("first", expected_s=0.032), bench.launch("second")
    await bench.pass_time(0.031)
    first.reach()
    await bench.pass_time(0.0)
    assert bench.told == [("first", 0.031)]
    assert bench.sleeps_s == pytest.approx(0.027, abs=0.001)
    second.reach()


async def test_steps_of_one_kind_teach_it_their_length(bench: Bench) -> None:
    """The next one of a kind that was seen is slept through; of another kind nothing is known."""
    await bench.run_steps(20, 0.020)
    event = bench.launch()
    await bench.pass_time(0.010)
    other = bench.launch(key="prefill")
    assert (event.num_queries, bench.sleeps_s) == (0, pytest.approx(0.009, abs=0.001))
    event.reach()
    await bench.pass_time(0.010)
    assert other.num_queries > 0


async def test_a_step_of_unknown_length_is_looked_at_more_rarely_as_it_ages(bench: Bench) -> None:
    """A sixteenth of its age, so that its end is never seen later than by that; at most a millisecond."""
    bench.launch()
    await bench.pass_time(0)
    sleeps = []
    for age_s in (0.001, 0.004, 0.100):
        await bench.stall(1000.0 + age_s - bench.clock())
        sleeps.append(bench.sleeps_s)
    assert sleeps == [pytest.approx(0.0000625, abs=1e-6), 0.00025, 0.001]


async def test_a_step_that_takes_longer_than_expected_is_not_looked_at_for_ever(bench: Bench) -> None:
    """Looks in every tick end a margin behind the prediction: the core belongs to others."""
    event = bench.launch(expected_s=0.032)
    await bench.pass_time(0)
    await bench.stall(0.040)
    assert bench.sleeps_s == 0.001
    event.reach()


async def test_steps_that_become_shorter_are_found_out(bench: Bench) -> None:
    """Whoever looks too late learns only that it was too late, so it looks earlier until it sees the end come."""
    await bench.run_steps(20, 0.020)
    await bench.run_steps(40, 0.005)
    started_s = bench.clock()
    await bench.run_steps(1, 0.005)
    assert bench.clock() - started_s == pytest.approx(0.005, abs=0.0003)


async def test_a_late_loop_does_not_shorten_the_prediction(bench: Bench) -> None:
    """The alarm was heard 20 ms late because the loop was busy: that says nothing of the step."""
    event = bench.launch(expected_s=0.032)
    await bench.pass_time(0)
    event.reach()
    await bench.stall(0.047)
    bench.launch()
    await bench.pass_time(0)
    assert bench.sleeps_s == 0.027


async def test_the_looks_and_sleeps_are_counted(bench: Bench) -> None:
    """For the statistics of the runner, and for whoever chooses a watcher."""
    event = bench.launch(expected_s=0.032)
    await bench.pass_time(0)
    event.reach()
    await bench.pass_time(0.032)
    assert bench.watcher.statistics() == {"events_out": 0, "events_landed": 1, "event_looks": 1, "event_sleeps": 1}


# --- result words


def words(*steps: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """One word a step number, with a token in it."""
    return np.array([(step % WORD) << 32 | 42 for step in steps], np.uint64).view(np.int64)


@pytest.mark.parametrize(
    ("ring", "step", "expected"),
    [
        (words(7, 7, 7), 7, True),
        (words(7, 6, 7), 7, False),
        (words(7, 7, 6), 7, False),
        (words(0, 0), 3, False),
        (words(WORD + 5), 5, True),
        (words(WORD - 1), WORD - 1, True),
    ],
)
def test_words_tell_that_their_step_has_ended(ring: np.ndarray[Any, Any], step: int, expected: bool) -> None:
    """All of them, in whatever order they come; the number counts modulo 2**32, whatever the sign."""
    assert WordEvent(ring, step).query() == expected


def test_a_device_that_broke_is_found_out_though_no_word_comes() -> None:
    """The step's event is asked now and then, and raises."""
    fence = FakeEvent()
    event = WordEvent(words(6), 7, fence=fence)
    assert not any(event.query() for _ in range(40))
    fence.break_down(RuntimeError("ECC"))
    with pytest.raises(RuntimeError, match="ECC"):
        for _ in range(40):
            event.query()


def test_a_step_that_ended_without_its_words_is_a_fault() -> None:
    """Rather than a wait for ever."""
    fence = FakeEvent()
    fence.reach()
    event = WordEvent(words(7, 6), 7, fence=fence)
    with pytest.raises(DeviceLost, match="Step 7 has ended without its result words"):
        event.synchronize()


def test_words_can_be_waited_for() -> None:
    """In a thread, as the thread watcher does."""
    ring = words(6)
    event = WordEvent(ring, 7)
    writer = threading.Timer(0.0, lambda: ring.__setitem__(0, words(7)[0]))
    writer.start()
    event.synchronize()
    writer.join()
    assert event.query()


# --- the alarm


@pytest.fixture(
    params=[*(["os"] if hasattr(os, "timerfd_create") else []), *(["libc"] if alarm.is_supported() else [])]
)
def alarm_calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every way to the system's timer that there is: Python's own, from 3.13 on, and libc's."""
    if request.param == "libc":
        monkeypatch.delattr(os, "timerfd_create", raising=False)


@pytest.mark.usefixtures("alarm_calls")
@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_an_alarm_rings_once_a_setting(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """A second setting takes the first one's place; after closing it is silent."""

    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        rings: asyncio.Queue[float] = asyncio.Queue()
        clock = alarm.Alarm(loop, lambda: rings.put_nowait(loop.time()))
        clock.set(3600.0)
        clock.set(1e-4)
        heard = [await rings.get()]
        clock.set(0.0)
        heard.append(await rings.get())
        clock.set(1e-9)
        clock.close()
        clock.close()
        await asyncio.sleep(0)
        assert rings.empty()
        return heard

    assert len(run(main(), new_loop)) == 2
