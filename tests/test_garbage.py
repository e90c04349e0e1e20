"""What the garbage collector is kept out of."""

import gc
from collections.abc import Iterator
from threading import Event, Thread

import pytest

from aserve.garbage import NoCollection


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    """The collector is the process's."""
    was_on, threshold = gc.isenabled(), gc.get_threshold()
    yield
    (gc.enable if was_on else gc.disable)()
    gc.set_threshold(*threshold)


def test_a_collection_that_comes_due_waits_for_the_end() -> None:
    """It begins with the first object that is made behind the block."""
    starts: list[str] = []
    where = "before"

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            starts.append(where)

    gc.enable()
    gc.set_threshold(10, 10, 10)
    gc.collect()
    gc.callbacks.append(note)
    try:
        with NoCollection():
            where = "within"
            kept = [[index] for index in range(100)]
            where = "behind"
        kept += [[index] for index in range(100)]
    finally:
        gc.callbacks.remove(note)

    assert starts
    assert set(starts) == {"behind"}
    assert len(kept) == 200


def test_another_threads_block_outlasts_this_one() -> None:
    """Collections are on again when both have ended, whichever began first."""
    is_within, may_end = Event(), Event()

    def other() -> None:
        with NoCollection():
            is_within.set()
            may_end.wait(10)

    gc.enable()
    thread = Thread(target=other)
    with NoCollection():
        thread.start()
        assert is_within.wait(10)
    was_on = gc.isenabled()
    may_end.set()
    thread.join()

    assert (was_on, gc.isenabled()) == (False, True)


@pytest.mark.parametrize("is_on", [True, False])
def test_it_leaves_the_collector_as_it_was(is_on: bool) -> None:
    """Nested too, and when the block raises."""
    (gc.enable if is_on else gc.disable)()
    found = []
    with NoCollection():
        found.append(gc.isenabled())
        with pytest.raises(ZeroDivisionError), NoCollection():
            found.append(1 // 0)
        found.append(gc.isenabled())

    assert found == [False, False]
    assert gc.isenabled() == is_on
