"""Instruments count right, keep their labels bounded, and cost the hot path next to nothing."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from aserve.obs.instruments import (
    BoundedCounter,
    BoundedHistogram,
    Counter,
    Gauge,
    Histogram,
    Info,
    Instrument,
    LabelledCounter,
    family,
)


def samples(instrument: Instrument, **labels: str) -> dict[tuple[str, ...], float]:
    """What the page would say of it: the sample's ending and the values of its labels -> value."""
    page = "".join(family(instrument, "m", "text", labels))
    [found] = text_string_to_metric_families(page)
    assert found.documentation == "text"
    return {(sample.name.removeprefix("m"), *sample.labels.values()): sample.value for sample in found.samples}


def test_label_outside_of_its_set() -> None:
    """An unknown value counts as the last of the set."""
    counter = LabelledCounter("why", ("a", "other"))
    counter.add("a")
    counter.add("b", 2)

    assert samples(counter, model_name="smol") == {("_total", "smol", "a"): 1, ("_total", "smol", "other"): 2}


def test_combinations_beyond_the_bound() -> None:
    """Those that were there first go on counting; the rest is "other" altogether."""
    counter = BoundedCounter(("route", "status"), 2)
    for route, status in (("/a", "200"), ("/b", "200"), ("/a", "404"), ("/c", "200"), ("/a", "200")):
        counter.add(route, status)

    assert samples(counter) == {
        ("_total", "/a", "200"): 2,
        ("_total", "/b", "200"): 1,
        ("_total", "other", "other"): 2,
    }


def test_histograms_beyond_the_bound() -> None:
    """Labels that came too late share one histogram; count and sum are over all."""
    histogram = BoundedHistogram("route", 1, (1.0,))
    for route, seconds in (("/a", 0.5), ("/b", 2.0), ("/c", 0.25), ("/a", 3.0)):
        histogram.observe(route, seconds)

    assert (histogram.count, histogram.sum) == (4, 5.75)
    assert samples(histogram) == {
        ("_bucket", "1.0", "/a"): 1, ("_bucket", "+Inf", "/a"): 2, ("_count", "/a"): 2, ("_sum", "/a"): 3.5,
        ("_bucket", "1.0", "other"): 1, ("_bucket", "+Inf", "other"): 2, ("_count", "other"): 2,
        ("_sum", "other"): 2.25,
    }  # fmt: skip


def test_whole_bounds_are_written_like_others() -> None:
    """A bound of 1 is "1.0" on the page, as every client of Prometheus writes it."""
    assert ("_bucket", "1.0") in samples(Histogram((1, 2)))


@pytest.mark.parametrize("value", [0, 3, 0.1, 1e-9, 12_345_678_901, 1e22, float("inf")])
def test_numbers_come_back(value: float) -> None:
    """Whatever their size, whole or not."""
    gauge, counter = Gauge(), Counter()
    gauge.value = value
    counter.add(value)

    assert (samples(gauge), samples(counter)) == ({("",): value}, {("_total",): value})


@given(st.text())
def test_labels_come_back(value: str) -> None:
    """Whatever a label's value is, the page stays whole."""
    counter = LabelledCounter("why", ("a",))

    assert samples(counter, model_name=value) == {("_total", value, "a"): 0}


def test_labels_are_sorted() -> None:
    """A bucket's own label stands among the others, as in the pages of other servers."""
    lines = list(Histogram((1,)).samples("m", {"model_name": "smol", "engine": "0"}))

    assert lines == [
        'm_bucket{engine="0",le="1.0",model_name="smol"} 0.0\n',
        'm_bucket{engine="0",le="+Inf",model_name="smol"} 0.0\n',
        'm_count{engine="0",model_name="smol"} 0.0\n',
        'm_sum{engine="0",model_name="smol"} 0.0\n',
    ]


def test_another_name_of_a_label() -> None:
    """The counts are the same ones."""
    counter = LabelledCounter("why", ("a", "other"))
    other = counter.labelled("reason")
    counter.add("a")

    assert list(other.samples("m", {})) == ['m{reason="a"} 1.0\n', 'm{reason="other"} 0.0\n']


def test_facts() -> None:
    """Whatever they are, they are told in words."""
    assert samples(Info({"block_size": 16, "enable_prefix_caching": True})) == {("", "16", "True"): 1}


@given(st.lists(st.floats(0, 20), max_size=100))
def test_observe_many_is_observe_each(values: list[float]) -> None:
    """An array gives the counts and the sum that its values give one by one."""
    one_by_one, at_once = Histogram((0.5, 1.0, 10.0)), Histogram((0.5, 1.0, 10.0))
    for each in values:
        one_by_one.observe(each)
    at_once.observe_many(np.array(values, np.float64))

    assert at_once.counts == one_by_one.counts
    assert at_once.sum == pytest.approx(one_by_one.sum)
    assert at_once.count == len(values)


def test_observe_several_at_once() -> None:
    """``num`` counts one value several times."""
    histogram = Histogram((1.0,))
    histogram.observe(0.5, num=3)

    assert (histogram.counts, histogram.sum) == ([3, 0], 1.5)


def test_observing_a_token_is_cheap() -> None:
    """One token's latency costs at most a few tenths of a microsecond (2 here, for busy machines)."""
    observe = Histogram(tuple(0.001 * 1.4**power for power in range(30))).observe
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(10_000):
            observe(0.0123)
        best = min(best, (time.perf_counter() - start) / 10_000)

    assert best < 2e-6
