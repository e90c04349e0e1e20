"""The ring drops its oldest records and loses count of none."""

import sys
import threading
import time
from collections import deque
from queue import SimpleQueue

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aserve.obs.ring import Ring


def test_order_is_kept() -> None:
    """Records come out in the order in which they went in."""
    ring: Ring[int] = Ring(8)
    for number in range(5):
        ring.push(number)

    assert ring.take(3) == [0, 1, 2]
    assert ring.take(3) == [3, 4]
    assert ring.take(3) == []


def test_oldest_make_room() -> None:
    """Ten rings' worth leaves the newest ring's worth and counts the rest."""
    ring: Ring[int] = Ring(4)
    for number in range(40):
        ring.push(number)

    assert (ring.pushed, ring.dropped, len(ring)) == (40, 36, 4)
    assert ring.take(100) == [36, 37, 38, 39]
    assert (ring.pushed, ring.dropped, ring.taken) == (40, 36, 4)


@given(st.integers(1, 5), st.lists(st.integers(0, 7), max_size=60))
def test_against_a_plain_list(capacity: int, operations: list[int]) -> None:
    """Any mixture of pushes (0) and takes (of n) agrees with a list that is cut from the left."""
    ring: Ring[int] = Ring(capacity)
    model: list[int] = []
    pushed = taken = 0
    for operation in operations:
        if operation == 0:
            ring.push(pushed)
            model = [*model, pushed][-capacity:]
            pushed += 1
        else:
            expected, model = model[:operation], model[operation:]
            taken += len(expected)
            assert ring.take(operation) == expected

    assert (ring.pushed, ring.taken, ring.dropped) == (pushed, taken, pushed - taken - len(model))


def test_threads_lose_no_count() -> None:
    """Four pushing threads and one that takes: every record is taken, dropped or still there."""
    ring: Ring[int] = Ring(64)
    threads = [threading.Thread(target=lambda: [ring.push(number) for number in range(20_000)]) for _ in range(4)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            ring.take(10)
    finally:
        sys.setswitchinterval(before)

    assert ring.pushed == 80_000
    assert ring.taken + ring.dropped + len(ring) == 80_000


def test_no_wake_up_is_lost() -> None:
    """Two threads that push one record at a time against one that sleeps in between: it always hears of the next."""
    ring: Ring[int] = Ring(1024)
    answers: SimpleQueue[int] = SimpleQueue()

    def take_all(num: int) -> None:
        while ring.taken < num:
            ring.wait()
            for number in ring.take(8):
                answers.put(number)

    def push(numbers: range) -> None:
        for number in numbers:
            ring.push(number)
            answered.append(answers.get(timeout=20))

    answered: list[int] = []
    threads = [
        threading.Thread(target=take_all, args=(4000,)),
        threading.Thread(target=push, args=(range(2000),)),
        threading.Thread(target=push, args=(range(2000, 4000),)),
    ]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)

    assert sorted(answered) == list(range(4000))


def test_push_just_after_the_look_wakes() -> None:
    """A record that comes once the sleeper has seen that there is none ends its sleep all the same."""
    ring: Ring[int] = Ring(8)

    class Items(deque[int]):
        def __len__(self) -> int:
            num_seen = super().__len__()
            if not num_seen:
                ring.push(7)
            return num_seen

    ring._items = Items()
    ring.wait()

    assert ring.take(1) == [7]


def test_wake_ends_a_wait() -> None:
    """A wake-up without a record, before or during a wait, ends that wait."""
    ring: Ring[int] = Ring(8)
    ring.wake()
    ring.wait()

    assert ring.take(8) == []


def test_push_is_cheap() -> None:
    """A push into a full ring takes well under two microseconds even on a busy machine."""
    ring: Ring[int] = Ring(1024)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        for number in range(20_000):
            ring.push(number)
        best = min(best, (time.perf_counter() - start) / 20_000)

    assert best < 2e-6


def test_needs_room_for_one() -> None:
    """A ring without room is a mistake."""
    with pytest.raises(ValueError, match="at least one"):
        Ring(0)
