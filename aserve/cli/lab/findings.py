"""What an experiment found: tables, claims and charts, plain values that ``report`` writes."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from aserve.obs.trace import Timeline

Cell = str | int | float | None
Agreement = Literal["agrees", "contradicts"]

_STUDENT_95: Final = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145)
_NORMAL_95: Final = 1.96
"""Quantiles of Student's distribution for 1, 2, ... degrees of freedom, and their limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """columns: with the unit in the name. rows: a cell for each column; None is left empty."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Something that was expected, and what was found. reason: why, where the two do not agree."""

    expected: str
    found: str
    agreement: Agreement
    reason: str = ""

    @classmethod
    def of(cls, expected: str, holds: bool, found: str, reason: str = "") -> "Claim":
        """reason is kept only where the claim does not hold."""
        return cls(
            expected=expected,
            found=found,
            agreement="agrees" if holds else "contradicts",
            reason="" if holds else reason,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One small plot. kind: "bars" has one value a series and x; "lines" joins them. series: name -> values, by x.

    low: where the axis of lines begins; that of bars begins at 0.
    """

    title: str
    unit: str
    x: tuple[str, ...]
    series: Mapping[str, Sequence[float]]
    kind: Literal["bars", "lines"] = "bars"
    x_title: str = ""
    low: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """about: what was asked and how. timelines: one run for each policy, for one file."""

    number: int
    title: str
    about: str
    tables: tuple[Table, ...]
    claims: tuple[Claim, ...]
    panels: tuple[Panel, ...] = ()
    timelines: tuple[Timeline, ...] = field(default=(), repr=False)

    @property
    def name(self) -> str:
        """Of its files."""
        return f"{self.number:02}" if self.number else "sweep"

    @property
    def heading(self) -> str:
        return f"{self.number}. {self.title}" if self.number else self.title


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and half the width of its 95 % interval; the half is nan for a single value."""

    mean: float
    half: float

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half

    def __str__(self) -> str:
        return f"{self.mean:.3f} ± {self.half:.3f}"


def interval(values: Sequence[float]) -> Interval:
    """Of independent values, by Student's distribution."""
    mean, count = statistics.fmean(values), len(values)
    if count < 2:
        return Interval(mean, math.nan)
    quantile = _STUDENT_95[count - 2] if count - 2 < len(_STUDENT_95) else _NORMAL_95 + 2.4 / (count - 1)
    return Interval(mean, quantile * statistics.stdev(values) / math.sqrt(count))
