"""What metrics are made of: plain numbers on the hot path, and how each becomes a family of a Prometheus page.

Observing costs a bisection and two additions (0.16 us); prometheus-client's own histogram takes a lock and several
calls. Labels come from closed sets, or from sets that are cut at a bound, so that no client can make the page grow.
Written on the event loop's thread; ``family`` may run in another one: a histogram's counts are then of one moment, its
sum perhaps one observation later.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.utils import floatToGoString

OTHER: Final = "other"
"""The label of what is beyond a set's bound."""


class Instrument(Protocol):
    """Something measured."""

    def family(self, name: str, text: str, labels: Mapping[str, str]) -> Metric:
        """What the page says of it now. labels: those that each of its samples gets, before the instrument's own."""
        ...


class Counter:
    """A number that only grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0

    def add(self, num: float = 1) -> None:
        self.value += num

    def family(self, name: str, text: str, labels: Mapping[str, str]) -> Metric:
        family = CounterMetricFamily(name, text, labels=list(labels))
        family.add_metric(list(labels.values()), self.value)
        return family


class Gauge:
    """A number as of now."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0

    def family(self, name: str, text: str, labels: Mapping[str, str]) -> Metric:
        family = GaugeMetricFamily(name, text, labels=list(labels))
        family.add_metric(list(labels.values()), self.value)
        return family


class LabelledCounter:
    """One counter for each value of a label; a value outside of the set counts as its last one."""

    __slots__ = ("_fallback", "_label", "values")

    def __init__(self, label: str, values: Sequence[str]) -> None:
        self.values = dict.fromkeys(values, 0)
        self._label = label
        self._fallback = values[-1]

    def add(self, value: str, num: int = 1) -> None:
        self.values[value if value in self.values else self._fallback] += num

    def family(self, name: str, text: str, labels: Mapping[str, str], *, label: str = "") -> Metric:
        """label: another name for the label."""
        family = CounterMetricFamily(name, text, labels=[*labels, label or self._label])
        for value, num in self.values.items():
            family.add_metric([*labels.values(), value], num)
        return family


class BoundedCounter:
    """One counter for each combination of labels that came up; beyond ``num_max`` of them, further ones are "other"."""

    __slots__ = ("_labels", "_num_max", "values")

    def __init__(self, labels: tuple[str, ...], num_max: int) -> None:
        self.values: dict[tuple[str, ...], int] = {}
        self._labels = labels
        self._num_max = num_max

    def add(self, *key: str) -> None:
        if key not in self.values and len(self.values) >= self._num_max:
            key = (OTHER,) * len(self._labels)
        self.values[key] = self.values.get(key, 0) + 1

    def family(self, name: str, text: str, labels: Mapping[str, str]) -> Metric:
        family = CounterMetricFamily(name, text, labels=[*labels, *self._labels])
        for key, num in list(self.values.items()):
            family.add_metric([*labels.values(), *key], num)
        return family


class Histogram:
    """Counts of observations by upper bound; the last count is of what exceeds every bound."""

    __slots__ = ("_bounds_array", "bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0
        self._bounds_array = np.asarray(bounds)

    def observe(self, value: float, num: int = 1) -> None:
        """Count ``value``, ``num`` times."""
        self.counts[bisect_left(self.bounds, value)] += num
        self.sum += value * num

    def observe_many(self, values: NDArray[np.floating[Any]]) -> None:
        """Count an array at once: cheaper than ``observe`` for each from about 50 values on."""
        nums = np.bincount(np.searchsorted(self._bounds_array, values), minlength=len(self.counts))
        self.counts = [count + num for count, num in zip(self.counts, nums.tolist(), strict=True)]
        self.sum += float(values.sum())

    @property
    def count(self) -> int:
        return sum(self.counts)

    def family(self, name: str, text: str, labels: Mapping[str, str]) -> Metric:
        family = HistogramMetricFamily(name, text, labels=list(labels))
        self.add_to(family, list(labels.values()))
        return family

    def add_to(self, family: HistogramMetricFamily, values: list[str]) -> None:
        """Add the buckets as they are to a family, under the values of its labels."""
        bounds = [*map(floatToGoString, self.bounds), "+Inf"]
        family.add_metric(values, list(zip(bounds, accumulate(self.counts[:]), strict=True)), self.sum)


class BoundedHistogram:
    """One histogram for each value of a label that came up; beyond ``num_max`` of them, further ones are "other"."""

    __slots__ = ("_bounds", "_label", "_num_max", "histograms")

    def __init__(self, label: str, num_max: int, bounds: Sequence[float]) -> None:
        self.histograms: dict[str, Histogram] = {}
        self._label = label
        self._num_max = num_max
        self._bounds = bounds

    def observe(self, key: str, value: float) -> None:
        if key not in self.histograms:
            if len(self.histograms) >= self._num_max:
                key = OTHER
            self.histograms.setdefault(key, Histogram(self._bounds))
        self.histograms[key].observe(value)

    @property
    def count(self) -> int:
        return sum(histogram.count for histogram in self.histograms.values())

    @property
    def sum(self) -> float:
        return sum(histogram.sum for histogram in self.histograms.values())

    def family(self, name: str, text: str, labels: Mapping[str, str]) -> Metric:
        family = HistogramMetricFamily(name, text, labels=[*labels, self._label])
        for key, histogram in list(self.histograms.items()):
            histogram.add_to(family, [*labels.values(), key])
        return family


class Info:
    """Facts as labels of a gauge that is always 1."""

    __slots__ = ("facts",)

    def __init__(self, facts: Mapping[str, object]) -> None:
        self.facts = {key: str(value) for key, value in facts.items()}

    def family(self, name: str, text: str, labels: Mapping[str, str]) -> Metric:
        family = GaugeMetricFamily(name, text, labels=[*labels, *self.facts])
        family.add_metric([*labels.values(), *self.facts.values()], 1)
        return family
