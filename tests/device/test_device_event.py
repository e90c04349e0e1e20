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


class BadBell:
    """Cannot be closed, and notes that somebody tried."""

    def __init__(self, tried: list[str], name: str) -> None:
        self._tried, self._name = tried, name

    def close(self) -> None:
        self._tried.append(self._name)
        raise OSError(self._name)


async def test_every_bell_is_closed_whatever_becomes_of_the_others(
    device: DeviceThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of old loops too, each once, and an error comes out."""
    tried: list[str] = []
    monkeypatch.setattr(device, "_old_bells", [BadBell(tried, "oldest"), BadBell(tried, "old")])
    bell = device.bell()
    with pytest.raises(OSError, match="old"):
        device.close_bells()
    device.close_bells()
    assert (sorted(tried), bell._read_fd) == (["old", "oldest"], -1)


async def test_a_cancelled_closing_ends_once_the_thread_has() -> None:
    """Until then it may ring: what is out lands, then the bells close, then the cancellation comes out."""
    device, gate = DeviceThread("test-device"), threading.Event()
    flight = launch(device, "last", gate=gate)
    bell = device.bell()
    closing = asyncio.create_task(device.aclose())
    states = []
    for _ in range(3):  # the first lets it begin
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.sleep(0)
        states.append((closing.done(), bell._read_fd >= 0))
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert states == [(False, True)] * 3
    assert (flight.done(), bell._read_fd, device.is_hurried) == (True, -1, True)


async def test_a_thread_that_cannot_be_closed_still_lets_go_of_its_bells(
    device: DeviceThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error comes out."""

    def fail() -> None:
        raise RuntimeError("cannot join")

    bell = device.bell()
    with monkeypatch.context() as patch:
        patch.setattr(device, "close", fail)
        with pytest.raises(RuntimeError, match="cannot join"):
            await device.aclose()
    assert bell._read_fd == -1
