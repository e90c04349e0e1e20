"""What metrics are made of: plain numbers on the hot path, and how each is written in Prometheus' text format.

Observing costs a bisection and two additions (0.16 us); prometheus-client's own histogram takes a lock and several
calls. Its writer takes 4.5 us a line where this one takes 0.4: a page of 1,400 lines would hold the interpreter for
longer than most steps. Labels come from closed sets, or from sets that are cut at a bound, so that no client can make
the page grow. Written on the event loop's thread; ``samples`` may run in another one: a histogram's counts are then of
one moment, its sum perhaps one observation later.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, ClassVar, Final, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from prometheus_client.utils import floatToGoString

Kind = Literal["counter", "gauge", "histogram"]

OTHER: Final = "other"
"""The label of what is beyond a set's bound."""

_ESCAPES: Final = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def pairs(labels: Mapping[str, str]) -> str:
    """Labels as the page has them between braces: sorted, as prometheus-client writes them and some readers expect."""
    return ",".join(f'{label}="{value.translate(_ESCAPES)}"' for label, value in sorted(labels.items()))


def _sample(name: str, labels: str, value: float) -> str:
    return f"{name}{{{labels}}} {float(value)!r}\n" if labels else f"{name} {float(value)!r}\n"


class Instrument(Protocol):
    """Something measured."""

    kind: ClassVar[Kind]

    def samples(self, name: str, labels: Mapping[str, str]) -> Iterator[str]:
        """The lines that say what it is now. labels: those that each of them gets, before the instrument's own."""
        ...


def family(instrument: Instrument, name: str, text: str, labels: Mapping[str, str]) -> Iterator[str]:
    """The instrument's part of the page: its descriptions and its samples, a counter's with ``_total`` at their end."""
    if instrument.kind == "counter":
        name += "_total"
    yield f"# HELP {name} {text}\n# TYPE {name} {instrument.kind}\n"
    yield from instrument.samples(name, labels)


class Counter:
    """A number that only grows."""

    __slots__ = ("value",)
    kind: ClassVar[Kind] = "counter"

    def __init__(self) -> None:
        self.value: float = 0

    def add(self, num: float = 1) -> None:
        self.value += num

    def samples(self, name: str, labels: Mapping[str, str]) -> Iterator[str]:
        yield _sample(name, pairs(labels), self.value)


class Gauge:
    """A number as of now."""

    __slots__ = ("value",)
    kind: ClassVar[Kind] = "gauge"

    def __init__(self) -> None:
        self.value: float = 0

    def samples(self, name: str, labels: Mapping[str, str]) -> Iterator[str]:
        yield _sample(name, pairs(labels), self.value)


class LabelledCounter:
    """One counter for each value of a label; a value outside of the set counts as its last one."""

    __slots__ = ("_fallback", "_label", "values")
    kind: ClassVar[Kind] = "counter"

    def __init__(self, label: str, values: Sequence[str]) -> None:
        self.values = dict.fromkeys(values, 0)
        self._label = label
        self._fallback = values[-1]

    def add(self, value: str, num: int = 1) -> None:
        self.values[value if value in self.values else self._fallback] += num

    def labelled(self, label: str) -> "LabelledCounter":
        """The same counts under another name of the label."""
        other = LabelledCounter(label, tuple(self.values))
        other.values = self.values
        return other

    def samples(self, name: str, labels: Mapping[str, str]) -> Iterator[str]:
        for value, num in self.values.items():
            yield _sample(name, pairs({**labels, self._label: value}), num)


class BoundedCounter:
    """One counter for each combination of labels that came up; beyond ``num_max`` of them, further ones are "other"."""

    __slots__ = ("_labels", "_num_max", "values")
    kind: ClassVar[Kind] = "counter"

    def __init__(self, labels: tuple[str, ...], num_max: int) -> None:
        self.values: dict[tuple[str, ...], int] = {}
        self._labels = labels
        self._num_max = num_max

    def add(self, *key: str) -> None:
        if key not in self.values and len(self.values) >= self._num_max:
            key = (OTHER,) * len(self._labels)
        self.values[key] = self.values.get(key, 0) + 1

    def samples(self, name: str, labels: Mapping[str, str]) -> Iterator[str]:
        for key, num in list(self.values.items()):
            yield _sample(name, pairs({**labels, **dict(zip(self._labels, key, strict=True))}), num)


class Histogram:
    """Counts of observations by upper bound; the last count is of what exceeds every bound."""

    __slots__ = ("_bounds_array", "_bounds_text", "bounds", "counts", "sum")
    kind: ClassVar[Kind] = "histogram"

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0
        self._bounds_array = np.asarray(bounds)
        self._bounds_text = (*map(floatToGoString, bounds), "+Inf")

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

    def samples(self, name: str, labels: Mapping[str, str]) -> Iterator[str]:
        own = pairs(labels)
        before = pairs({label: value for label, value in labels.items() if label < "le"})
        after = pairs({label: value for label, value in labels.items() if label > "le"})
        head = f"{name}_bucket{{{before}{',' if before else ''}le="
        tail = f"{',' if after else ''}{after}"
        num = 0
        for bound, num in zip(self._bounds_text, accumulate(self.counts[:]), strict=True):
            yield f'{head}"{bound}"{tail}}} {num}.0\n'
        yield _sample(f"{name}_count", own, num)
        yield _sample(f"{name}_sum", own, self.sum)


class BoundedHistogram:
    """One histogram for each value of a label that came up; beyond ``num_max`` of them, further ones are "other"."""

    __slots__ = ("_bounds", "_label", "_num_max", "histograms")
    kind: ClassVar[Kind] = "histogram"

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

    def samples(self, name: str, labels: Mapping[str, str]) -> Iterator[str]:
        for key, histogram in list(self.histograms.items()):
            yield from histogram.samples(name, {**labels, self._label: key})


class Info:
    """Facts as labels of a gauge that is always 1."""

    __slots__ = ("facts",)
    kind: ClassVar[Kind] = "gauge"

    def __init__(self, facts: Mapping[str, object]) -> None:
        self.facts = {key: str(value) for key, value in facts.items()}

    def samples(self, name: str, labels: Mapping[str, str]) -> Iterator[str]:
        yield _sample(name, pairs({**labels, **self.facts}), 1)
