"""When requests are due."""

from array import array
from itertools import islice, pairwise
from math import exp
from statistics import fmean, pstdev

import pytest

from loadgen.arrivals import Bursts, ClosedLoop, Constant, Gamma, Poisson, Ramp, Recorded, due_s, share


def gaps(times_s):
    return [b - a for a, b in pairwise([0.0, *times_s])]


@pytest.mark.parametrize("seed", range(5))
def test_poisson_gaps_are_exponential(seed):
    """Mean, spread, shape and independence of 20,000 gaps are those of an exponential, within five standard errors."""
    waits = gaps(due_s(Poisson(rate=50.0), seed=seed, num_requests=20_000))

    mean = fmean(waits)
    distance = max(abs((i + 1) / 20_000 - (1 - exp(-50 * w))) for i, w in enumerate(sorted(waits)))
    correlation = fmean((a - mean) * (b - mean) for a, b in pairwise(waits)) / pstdev(waits) ** 2
    assert mean == pytest.approx(1 / 50, rel=5 / 20_000**0.5)
    assert pstdev(waits) == pytest.approx(1 / 50, rel=10 / 20_000**0.5)
    assert distance < 1.63 / 20_000**0.5
    assert abs(correlation) < 5 / 20_000**0.5


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gamma_gaps_have_the_mean_of_the_rate_and_the_spread_of_the_burstiness(burstiness):
    """The mean is 1 / rate, and the squared spread over it is 1 / burstiness, within five standard errors or so."""
    waits = gaps(due_s(Gamma(rate=20, burstiness=burstiness), seed=1, num_requests=40_000))

    mean = fmean(waits)
    assert mean == pytest.approx(1 / 20, rel=5 * (1 / burstiness) ** 0.5 / 200)
    assert (pstdev(waits) / mean) ** 2 == pytest.approx(1 / burstiness, rel=0.12)


def test_constant_arrivals_are_even():
    """Every gap is the period, and the first is at 0."""
    assert due_s(Constant(rate=4), seed=0, num_requests=4).tolist() == [0.0, 0.25, 0.5, 0.75]


def test_bursts_come_together():
    """So many at the same moment, then nothing for a while."""
    assert due_s(Bursts(size=3, every_s=2), seed=0, num_requests=7).tolist() == [0, 0, 0, 2, 2, 2, 4]


@pytest.mark.parametrize(("rate_from", "rate_to"), [(0.0, 100.0), (100.0, 10.0), (50.0, 50.0)])
def test_a_ramp_has_the_rate_of_its_moment(rate_from, rate_to):
    """In each second of the ramp and after it come about as many as the line says, within five standard deviations."""
    times_s = due_s(Ramp(rate_from=rate_from, rate_to=rate_to, over_s=10), seed=2, duration_s=15)

    for second in range(15):
        middle = min(second + 0.5, 10)
        expected = rate_from + (rate_to - rate_from) * middle / 10
        assert abs(sum(second <= at < second + 1 for at in times_s) - expected) < 5 * expected**0.5


def test_a_recorded_schedule_ends_with_its_trace():
    """A trace's own times are the due times, and no more of them."""
    recorded = Recorded(recorded_s=array("d", [0.0, 0.5, 3.0]))

    assert due_s(recorded, seed=0, num_requests=100).tolist() == [0.0, 0.5, 3.0]


def test_the_users_of_a_ramp_begin_one_after_another():
    """The first user begins at once, the last one just before the end of the ramp."""
    loop = ClosedLoop(concurrency=4, ramp_s=8)

    assert [loop.begin_s(slot) for slot in range(4)] == [0, 2, 4, 6]


def test_schedule_repeats_by_seed():
    """The seed alone decides the due times."""
    first, again, other = (due_s(Poisson(rate=9), seed=s, num_requests=50) for s in (1, 1, 2))

    assert first == again
    assert first != other


def test_schedule_ends_at_the_first_bound():
    """Of a number and a duration the one reached first ends the schedule, and both give the same times before."""
    by_number = due_s(Poisson(rate=100), seed=3, num_requests=50)
    by_time = due_s(Poisson(rate=100), seed=3, num_requests=1000, duration_s=0.2)

    assert len(by_number) == 50
    assert max(by_time) < 0.2
    assert by_time == by_number[: len(by_time)]


@pytest.mark.parametrize("num_processes", [1, 2, 3, 7])
def test_shares_of_a_schedule_make_the_whole(num_processes):
    """All processes together send each request once, at its time."""
    times_s = due_s(Poisson(rate=10), seed=0, num_requests=100)

    shares = [pair for process in range(num_processes) for pair in share(times_s, process, num_processes)]

    assert sorted(shares) == list(enumerate(times_s))


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
