"""Fault points: no-ops until armed, exact in what they do afterwards."""

import ast
import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from aserve import faults
from aserve.errors import ConfigError, DeviceLost

ASERVE = Path(faults.__file__).parent


@pytest.fixture(autouse=True)
def nothing_armed() -> Iterator[None]:
    yield
    faults.disarm_all()


def outcomes(name: str, num: int) -> str:
    """One letter a hit: "." passed, "x" raised."""
    letters = []
    for _ in range(num):
        try:
            faults.hit(name)
            letters.append(".")
        except faults.FaultInjected:
            letters.append("x")
    return "".join(letters)


def test_unarmed_point_costs_next_to_nothing() -> None:
    """A hit of an unarmed point takes well under a microsecond."""
    start = time.perf_counter()
    for _ in range(100_000):
        faults.hit("pool.alloc")

    assert (time.perf_counter() - start) / 100_000 < 0.5e-6


@pytest.mark.parametrize(
    ("after", "times", "expected"), [(0, 1, "x...."), (2, 1, "..x.."), (1, 2, ".xx.."), (0, None, "xxxxx")]
)
def test_after_and_times(after: int, times: int | None, expected: str) -> None:
    """The first ``after`` hits pass, then ``times`` raise, then all pass."""
    fault = faults.arm("pool.alloc", after=after, times=times)

    assert outcomes("pool.alloc", 5) == expected
    assert (fault.num_hits, fault.num_trips) == (5, expected.count("x"))


def test_other_points_pass() -> None:
    """Arming one name leaves the others alone."""
    with faults.armed("pool.alloc", times=None):
        assert outcomes("pool.free", 2) == ".."
    assert outcomes("pool.alloc", 2) == ".."


def test_chosen_error() -> None:
    """An error may be given as an instance or as a class."""
    with faults.armed("runner.forward", error=DeviceLost), pytest.raises(DeviceLost, match=r"runner\.forward"):
        faults.hit("runner.forward")
    with faults.armed("runner.forward", error=MemoryError("out")), pytest.raises(MemoryError, match=r"^out$"):
        faults.hit("runner.forward")


def test_unknown_name_is_refused_with_the_nearest() -> None:
    """A misspelt name is an error wherever it is used, once anything is armed."""
    with pytest.raises(ValueError, match=r"'pool\.aloc'; the nearest is 'pool\.alloc'"):
        faults.arm("pool.aloc")
    with faults.armed("pool.alloc"), pytest.raises(ValueError, match="no fault point"):
        faults.hit("pool.aloc")


async def test_cancel_takes_effect_at_the_await() -> None:
    """An armed cancel ends the task at ``hit_async``."""
    reached = []

    async def work() -> None:
        reached.append("before")
        await faults.hit_async("stream.next")
        reached.append("after")

    with faults.armed("stream.next", "cancel"):
        outcome = await asyncio.gather(asyncio.create_task(work()), return_exceptions=True)

    assert reached == ["before"]
    assert isinstance(outcome[0], asyncio.CancelledError)


async def test_synchronous_cancel_waits_for_the_next_await() -> None:
    """A plain hit cancels its task too, at whatever that task awaits next."""
    reached = []

    async def work() -> None:
        faults.hit("loop.launch")
        reached.append("after the hit")
        await asyncio.sleep(0)
        reached.append("after the await")

    with faults.armed("loop.launch", "cancel"):
        outcome = await asyncio.gather(asyncio.create_task(work()), return_exceptions=True)

    assert reached == ["after the hit"]
    assert isinstance(outcome[0], asyncio.CancelledError)


async def test_hang_ends_at_disarm() -> None:
    """A task hangs at its point until the name is disarmed; the loop goes on meanwhile."""
    with faults.armed("lander.await", "hang"):
        task = asyncio.create_task(faults.hit_async("lander.await"))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not task.done()

    await asyncio.wait_for(task, 5)


def test_hanging_thread_ends_at_disarm() -> None:
    """A thread hangs at a plain hit until the name is disarmed."""
    with faults.armed("log.write", "hang"):
        thread = threading.Thread(target=faults.hit, args=("log.write",))
        thread.start()
        thread.join(0.05)
        assert thread.is_alive()

    thread.join(5)
    assert not thread.is_alive()


def test_environment() -> None:
    """The variable arms several points, each with its action, argument, after and times."""
    text = "runner.forward=raise:MemoryError,after=2,times=all; log.write=delay:0.5; lander.await=hang"

    armed = faults.arm_from_environment({"ASERVE_FAULTS": text})

    assert [(f.name, f.action, f.after, f.times) for f in armed] == [
        ("runner.forward", "raise", 2, None),
        ("log.write", "delay", 0, 1),
        ("lander.await", "hang", 0, 1),
    ]
    assert armed[0].error is MemoryError
    assert armed[1].delay_s == 0.5


@pytest.mark.parametrize(
    "text",
    [
        "pool.aloc=raise",
        "pool.alloc",
        "pool.alloc=explode",
        "pool.alloc=raise:NoSuchError",
        "pool.alloc=raise,often=3",
        "pool.alloc=raise,after=x",
        "pool.alloc=delay:long",
        "pool.alloc=hang:1",
    ],
)
def test_bad_environment_is_a_config_error(text: str) -> None:
    """What the variable cannot mean is told in one sentence that quotes it."""
    with pytest.raises(ConfigError, match=f"^ASERVE_FAULTS: '{text.partition('=')[0]}"):
        faults.arm_from_environment({"ASERVE_FAULTS": text})


def test_every_name_in_the_source_is_declared() -> None:
    """Every literal given to ``hit`` and ``hit_async`` anywhere in the package is a declared name."""
    used = {
        node.args[0].value
        for path in ASERVE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("hit", "hit_async")
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "faults"
        and node.args
        and isinstance(node.args[0], ast.Constant)
    }

    assert used - faults.NAMES == set()
