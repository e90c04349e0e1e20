"""The loop on a virtual clock: when it jumps, when it stands, and what it does where a real one would hang."""

import asyncio
import time

import pytest

from aserve.testing import NothingWillHappen, VirtualAlarm, VirtualLoop, run_virtual


async def loop_and_time() -> tuple[VirtualLoop, float]:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop, loop.time()


def test_an_hour_takes_no_time() -> None:
    """Sleeping jumps to the timer, exactly."""

    async def main() -> float:
        await asyncio.sleep(3600)
        return (await loop_and_time())[1]

    began_s = time.perf_counter()

    assert run_virtual(main()) == 3600
    assert time.perf_counter() - began_s < 5


def test_time_stands_while_callbacks_run() -> None:
    """Thousands of turns of the loop without a timer take no virtual time."""

    async def main() -> float:
        for _ in range(5000):
            await asyncio.sleep(0)
        return (await loop_and_time())[1]

    assert run_virtual(main()) == 0


def test_timers_run_in_their_order() -> None:
    """Later timers after earlier ones, each at its own time."""

    async def main() -> list[tuple[str, float]]:
        rang: list[tuple[str, float]] = []
        loop, _ = await loop_and_time()
        for name, delay_s in (("late", 0.3), ("early", 0.1), ("middle", 0.2)):
            loop.call_later(delay_s, lambda name=name: rang.append((name, loop.time())))
        await asyncio.sleep(1)
        return rang

    assert run_virtual(main()) == [("early", 0.1), ("middle", 0.2), ("late", 0.3)]


def test_work_holds_the_loop_up() -> None:
    """A callback that works for a second makes a timer of that second late."""

    async def main() -> float:
        loop, _ = await loop_and_time()
        rang = loop.create_future()
        loop.call_later(0.2, lambda: rang.set_result(loop.time()))
        loop.work(1.0)
        return await rang

    assert run_virtual(main()) == 1.0


def test_waiting_for_nothing_is_told() -> None:
    """Where a real loop would wait for ever, this one raises."""

    async def main() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(NothingWillHappen):
        run_virtual(main())


def test_waiting_for_nothing_beside_a_timer_that_recurs_is_told_too() -> None:
    """A watchdog's ticks are no progress: after a week of them the program counts as hanging."""

    async def main() -> None:
        loop, _ = await loop_and_time()

        def tick() -> None:
            loop.call_later(60, tick)

        tick()
        await loop.create_future()

    with pytest.raises(NothingWillHappen):
        run_virtual(main())


@pytest.mark.parametrize(("late_s", "expected"), [(0.0, 0.5), (0.002, 0.502)])
def test_an_alarm_rings_once_and_as_late_as_told(late_s: float, expected: float) -> None:
    """Setting it anew forgets the earlier setting; closing it twice is no fault."""

    async def main() -> list[float]:
        loop, _ = await loop_and_time()
        rang: list[float] = []
        alarm = VirtualAlarm(loop, lambda: rang.append(loop.time()), late_s=late_s)
        alarm.set(0.25)
        alarm.set(0.5)
        await asyncio.sleep(1)
        alarm.set(0.5)
        alarm.close()
        alarm.close()
        await asyncio.sleep(1)
        return rang

    assert run_virtual(main()) == [expected]
