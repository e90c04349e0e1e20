"""Flights: work in another thread that the loop awaits."""

import asyncio
import threading
import warnings
from collections.abc import AsyncIterator

import pytest
import uvloop

from aserve.device.event import CpuFlight
from aserve.device.thread import DeviceThread
from aserve.errors import DeviceLost


@pytest.fixture
async def device() -> AsyncIterator[DeviceThread]:
    thread = DeviceThread("test-device")
    yield thread
    await thread.aclose()


def launch(device: DeviceThread, result: object = None, *, gate: threading.Event | None = None) -> CpuFlight[object]:
    """A flight that lands with ``result``, or fails with it if it is an exception, once the gate is open."""
    flight: CpuFlight[object] = CpuFlight(device.bell())

    def job() -> None:
        if gate is not None:
            gate.wait()
        if isinstance(result, Exception):
            try:
                raise result
            except Exception as error:
                flight.fail(error)
        else:
            flight.land(result)

    device.submit(job)
    return flight


async def test_a_flight_gives_its_result_to_every_await(device: DeviceThread) -> None:
    """One outcome, however often and by however many it is awaited."""
    gate = threading.Event()
    flight = launch(device, "tokens", gate=gate)

    async def wait() -> object:
        return await flight

    waiters = [asyncio.create_task(wait()) for _ in range(3)]
    await asyncio.sleep(0)
    assert not flight.done()
    gate.set()
    assert await asyncio.gather(*waiters) == ["tokens"] * 3
    assert (flight.done(), await flight, await flight) == (True, "tokens", "tokens")


async def test_a_fault_is_raised_by_every_await_with_the_same_traceback(device: DeviceThread) -> None:
    """The exception itself comes out, and raising it again does not lengthen its traceback."""
    flight = launch(device, ValueError("no such block"))
    lengths = []
    for _ in range(3):
        with pytest.raises(ValueError, match="no such block") as caught:
            await flight
        lengths.append(len(caught.traceback))
    assert len(set(lengths)) == 1


async def test_a_fault_that_nobody_awaits_makes_no_noise(device: DeviceThread) -> None:
    """No warning about an exception that was never retrieved, and the next flight lands."""
    reported: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))
    launch(device, ValueError("lost"))
    assert await launch(device, 2) == 2
    assert reported == []


async def test_cancelling_an_await_leaves_the_work_alone(device: DeviceThread) -> None:
    """The cancelled task ends; the flight still lands for the others."""
    gate = threading.Event()
    flight = launch(device, "tokens", gate=gate)

    async def wait() -> object:
        return await flight

    first, second = asyncio.create_task(wait()), asyncio.create_task(wait())
    await asyncio.sleep(0)
    first.cancel()
    gate.set()
    assert await second == "tokens"
    assert first.cancelled()


async def test_work_is_done_in_the_order_of_submission(device: DeviceThread) -> None:
    """First in, first out, in one thread."""
    seen: list[int] = []
    for number in range(100):
        device.submit(lambda number=number: seen.append(number))  # type: ignore[misc]
    await launch(device)
    assert seen == list(range(100))


async def test_many_landings_wake_the_loop_once(device: DeviceThread) -> None:
    """Whatever lands while the loop is busy is served by one reading of the pipe."""
    flights = [launch(device, number) for number in range(50)]
    device.call(lambda: None)
    assert [flight.done() for flight in flights] == [True] * 50
    assert [await flight for flight in flights] == list(range(50))


def test_a_loop_that_was_closed_meanwhile_is_harmless() -> None:
    """The flight lands on nobody, and the thread serves the next loop."""
    device = DeviceThread("test-device")
    gate = threading.Event()

    async def start() -> CpuFlight[object]:
        return launch(device, "late", gate=gate)

    async def next_loop() -> object:
        gate.set()
        result = await launch(device, "next")
        await device.aclose()
        return result

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # the abandoned loop still watches its bell
        abandoned = asyncio.run(start())
    assert asyncio.run(next_loop()) == "next"
    assert abandoned.done()


def test_flights_land_on_uvloop() -> None:
    """The loop of production wakes up as the plain one does."""

    async def main() -> list[object]:
        device = DeviceThread("test-device")
        results = [await launch(device, number) for number in range(200)]
        await device.aclose()
        return results

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(main()) == list(range(200))


async def test_call_returns_or_raises_what_the_work_does(device: DeviceThread) -> None:
    """The blocking form, for loading a model from another thread."""

    def fail() -> None:
        raise KeyError("weights")

    assert await asyncio.to_thread(device.call, lambda: 42) == 42
    with pytest.raises(KeyError):
        await asyncio.to_thread(device.call, fail)


async def test_closing_finishes_what_is_queued_and_refuses_more() -> None:
    """A flight that is out lands before the thread ends; closing again is fine."""
    device = DeviceThread("test-device")
    flight = launch(device, "last")
    await device.aclose()
    await device.aclose()
    assert await flight == "last"
    with pytest.raises(DeviceLost):
        device.submit(lambda: None)
