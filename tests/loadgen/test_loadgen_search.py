"""Searching and comparing, on servers of virtual time."""

import json
from dataclasses import replace

import pytest
from loadgen_stub import ScriptedServer, options, run_virtual, stream

from loadgen import compare, figures, page, sweep
from loadgen.arrivals import ClosedLoop
from loadgen.errors import UsageError
from loadgen.figures import NAMES, broken, parse_limit
from loadgen.metrics import summarise
from loadgen.options import Slo


class Queue:
    """Answers one after another, each in ``service_s``: it keeps up with 1 / service_s requests a second."""

    def __init__(self, service_s):
        self._service_s = service_s

    def __call__(self, run):
        free_s = 0.0

        def answer(number, now):
            nonlocal free_s
            free_s = max(free_s, now) + self._service_s
            return stream([free_s - now - self._service_s / 2, free_s - now])

        return run_virtual(run, ScriptedServer(answer))


def search(run, plan, service_s=0.1):
    return sweep.search(run, plan, show=lambda point: None, run=Queue(service_s))


def test_the_highest_rate_is_found_by_halving():
    """A server of 10 requests a second takes a little less by chance arrivals, and more breaks it."""
    found = search(options(), sweep.Plan(over="rate", low=1, seconds=60.0, precision=0.1))

    assert 7 <= found.best.load <= 11
    assert all(point.holds == (point.load <= found.best.load) for point in found.points)
    assert [point.load for point in found.points] == sorted(point.load for point in found.points)


def test_limits_end_the_search_before_the_server_does():
    """With a bound on the latency the highest rate is lower, and the broken point says which limit it was."""
    run = options(slo=Slo(e2e_ms=1000), limits=(parse_limit("ttft_ms_p90 < 150"),))

    found = search(run, sweep.Plan(over="rate", low=1, seconds=60.0))

    assert 1 <= found.best.load < 7
    assert any("ttft_ms_p90 < 150" in reason for point in found.points for reason in point.broken)


def test_more_users_are_tried_until_they_bring_nothing():
    """A queue is full with one user and a half: two bring no more than one."""
    found = search(options(), sweep.Plan(over="concurrency", low=1, seconds=20.0))

    assert found.best.load <= 2
    assert found.points[-1].load <= 4
    assert "no more tokens/s" in found.points[-1].broken[0]


def test_the_knee_is_where_power_is_highest():
    """Beyond the knee latency grows faster than throughput."""
    found = search(options(), sweep.Plan(over="concurrency", low=1, high=8, seconds=20.0))

    assert found.knee.load == 1


def test_a_load_that_breaks_at_once_gives_nothing():
    """Where the lowest load already breaks there is no best one."""
    found = search(options(limits=(parse_limit("e2e_ms_p50 < 1"),)), sweep.Plan(over="rate", low=1, seconds=5.0))

    assert found.best is None
    assert len(found.points) == 1
    assert "highest load that holds: none" in sweep.table(found)


def test_points_have_prompts_of_their_own():
    """No point finds the last one's prompts in the server's cache."""
    seeds = []

    def once(run):
        seeds.append(run.seed)
        return Queue(0.01)(run)

    sweep.search(options(), sweep.Plan(over="rate", low=10, high=40, seconds=2.0), show=lambda p: None, run=once)

    assert len(set(seeds)) == len(seeds) == 3


def test_a_plan_that_goes_down_is_refused():
    """The highest load has to be above the lowest."""
    with pytest.raises(UsageError, match="below the lowest"):
        search(options(), sweep.Plan(over="rate", low=5, high=2))


def test_a_search_is_written_in_every_form():
    """Markdown and JSON have every point, the page has no loads from elsewhere."""
    found = search(options(), sweep.Plan(over="rate", low=4, seconds=20.0))

    fields = json.loads(sweep.to_json(found))
    assert [point["load"] for point in fields["points"]] == [point.load for point in found.points]
    assert fields["best"] == found.best.load
    assert sweep.markdown(found).count("\n") == 2 + len(found.points)
    assert "highest that holds" in page.sweep_page(found)


def test_a_comparison_finds_the_ratio():
    """B takes a fifth longer: so it says, sure of it, and the order of the two changes from round to round."""
    order = []
    a, b = options(num_requests=20), replace(options(num_requests=20), name="b")

    def once(run):
        order.append(run.name or "a")
        return Queue(0.12 if run.name == "b" else 0.1)(run)

    found = compare.run(a, b, num_rounds=4, show=lambda text: None, once=once)

    ratio = found.ratios["e2e_ms_p50"]
    assert ratio.ratio == pytest.approx(1.2, rel=0.01)
    assert ratio.is_clear
    assert order == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert "e2e_ms_p50" in compare.table(found)
    assert "**1.200**" in compare.markdown(found)
    assert json.loads(compare.to_json(found))["ratios"]["e2e_ms_p50"]["low"] <= 1.2


def test_the_interval_is_students():
    """Logarithms of 1.0, 1.1 and 1.21 have a mean of 1.1 and the spread that three rounds allow."""
    found = compare.ratios([({"e2e_ms_p50": 1.0}, {"e2e_ms_p50": r}) for r in (1.0, 1.1, 1.21)])["e2e_ms_p50"]

    assert found.ratio == pytest.approx(1.1)
    assert (found.low, found.high) == pytest.approx((0.8682, 1.3937), abs=1e-3)
    assert not found.is_clear


def test_a_ratio_breaks_a_limit_only_where_it_is_sure():
    """A limit within the interval is not broken; one outside of it is, and so is one that was not measured."""
    found = compare.run(
        options(num_requests=5),
        replace(options(num_requests=5), name="b"),
        num_rounds=2,
        show=lambda text: None,
        once=lambda run: Queue(0.12 if run.name == "b" else 0.1)(run),
    )

    assert compare.broken(found, (parse_limit("e2e_ms_p50 < 1.3"),)) == []
    assert "it is 1.200" in compare.broken(found, (parse_limit("e2e_ms_p50 < 1.1"),))[0]
    assert "could not be measured" in compare.broken(found, (parse_limit("queue_ms_p50 < 2"),))[0]


def test_limits_are_kept_or_broken():
    """A broken limit says the value; one whose figure is missing is broken too."""
    found = figures.flat(summarise(Queue(0.1)(options(ClosedLoop(concurrency=1)))))

    assert set(found) <= set(NAMES)
    assert broken((parse_limit("e2e_ms_p99 < 150"), parse_limit("requests_per_s > 9")), found) == []
    assert broken((parse_limit("e2e_ms_p99<50"), parse_limit("goodput_share > 0.9")), found) == [
        "e2e_ms_p99 < 50: it is 100",
        "goodput_share > 0.9: could not be measured",
    ]
