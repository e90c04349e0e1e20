"""When requests are due."""

from itertools import islice, pairwise
from math import exp
from statistics import fmean, pstdev

import pytest

from loadgen.arrivals import ClosedLoop, Poisson, share


def gaps(due_s):
    return [b - a for a, b in pairwise([0.0, *due_s])]


@pytest.mark.parametrize("seed", range(5))
def test_poisson_gaps_are_exponential(seed):
    """Mean, spread, shape and independence of 20,000 gaps are those of an exponential, within five standard errors."""
    waits = gaps(Poisson(rate=50.0).due_s(seed=seed, num_requests=20_000, duration_s=None))

    mean = fmean(waits)
    distance = max(abs((i + 1) / 20_000 - (1 - exp(-50 * w))) for i, w in enumerate(sorted(waits)))
    correlation = fmean((a - mean) * (b - mean) for a, b in pairwise(waits)) / pstdev(waits) ** 2
    assert mean == pytest.approx(1 / 50, rel=5 / 20_000**0.5)
    assert pstdev(waits) == pytest.approx(1 / 50, rel=10 / 20_000**0.5)
    assert distance < 1.63 / 20_000**0.5
    assert abs(correlation) < 5 / 20_000**0.5


def test_schedule_repeats_by_seed():
    """The seed alone decides the due times."""
    first, again, other = (Poisson(rate=9).due_s(seed=s, num_requests=50, duration_s=None) for s in (1, 1, 2))

    assert first == again
    assert first != other


def test_schedule_ends_at_the_first_bound():
    """Of a number and a duration the one reached first ends the schedule, and both give the same times before."""
    by_number = Poisson(rate=100).due_s(seed=3, num_requests=50, duration_s=None)
    by_time = Poisson(rate=100).due_s(seed=3, num_requests=1000, duration_s=0.2)

    assert len(by_number) == 50
    assert max(by_time) < 0.2
    assert by_time == by_number[: len(by_time)]


@pytest.mark.parametrize("num_processes", [1, 2, 3, 7])
def test_shares_of_a_schedule_make_the_whole(num_processes):
    """All processes together send each request once, at its time."""
    due_s = Poisson(rate=10).due_s(seed=0, num_requests=100, duration_s=None)

    shares = [pair for process in range(num_processes) for pair in share(due_s, process, num_processes)]

    assert sorted(shares) == list(enumerate(due_s))


@pytest.mark.parametrize("num_processes", [1, 2, 3, 5])
def test_shares_of_a_closed_loop_make_the_whole(num_processes):
    """All processes together play each user and send each request once."""
    loop = ClosedLoop(concurrency=5)

    slots = [loop.slots(process, num_processes) for process in range(num_processes)]
    indices = [i for own in slots for i in loop.indices(own, 23)]

    assert sorted(slot for own in slots for slot in own) == list(range(5))
    assert sorted(indices) == list(range(23))


def test_processes_take_requests_in_proportion_to_their_users():
    """A process with two of three users takes two of three requests."""
    loop = ClosedLoop(concurrency=3)

    assert len(list(loop.indices(loop.slots(0, 2), 300))) == 200


def test_a_closed_loop_bounded_by_time_has_requests_without_end():
    """Without a number the indices go on."""
    loop = ClosedLoop(concurrency=2)

    assert list(islice(loop.indices([1], None), 3)) == [1, 3, 5]
