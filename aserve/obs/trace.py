"""Timelines in Chrome's trace event format, which Perfetto and chrome://tracing open. Pure: plain records in, JSON out.

A ``Timeline`` becomes a process of the file. Its lanes become threads with complete events ("X"), each of its tracks a
group of nestable asynchronous events ("b", "n", "e") under one id. Rules of the format that hold for whatever records
are given: times are whole microseconds (so that no viewer's rounding makes neighbours overlap), slices of a lane do not
overlap, every begin has its end and inner pairs lie within outer ones, ids are local to a process, metadata come first.

Nothing here knows the server, so a run on a virtual clock is written the same way: a timeline for each policy that was
tried, ``render`` of them all, and one file shows them below each other from the same zero.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

import orjson

Args = Mapping[str, str | int | float | bool]
"""Figures and words that a viewer shows beside an event. No None: Perfetto and the older viewer differ about it."""

CUT: Final = {"cut": True}
"""Arguments that mark an event which began before the window or had not ended by its end."""

PIECE_EVENTS: Final = 256
"""Events of a piece: some 40 KB, made in about 1.5 ms, of which the encoder holds the interpreter for 0.1 in one go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Work of one lane. end_s: None while it goes on."""

    name: str
    start_s: float
    end_s: float | None
    args: Args = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A part of a track, such as the decoding of a request. end_s: None while it goes on."""

    name: str
    start_s: float
    end_s: float | None = None
    args: Args = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A moment of a track."""

    name: str
    at_s: float
    args: Args = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """The life of one request: phases one after another, and moments. id: above 0, unique in its timeline.

    start_s may lie before the first phase that is known. end_s: None while it goes on. args: shown on the whole.
    """

    id: int
    name: str
    start_s: float
    end_s: float | None = None
    phases: Sequence[Phase] = ()
    marks: Sequence[Mark] = ()
    args: Args = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """What one run did from ``start_s``, the file's zero, to ``end_s``; what lies outside is cut off.

    lanes: from top to bottom, the slices of each in order of their beginnings; where two overlap, the later one is
    shown from the earlier one's end on. tracks: in any order. Both are read once, so generators will do.
    """

    name: str
    start_s: float
    end_s: float
    lanes: Mapping[str, Iterable[Slice]] = field(default_factory=dict)
    tracks: Iterable[Track] = ()


def render(timelines: Sequence[Timeline], *, about: Args | None = None) -> bytes:
    """The file. about: facts on the whole of it (its "otherData")."""
    return b"".join(pieces(timelines, about=about))


def pieces(timelines: Sequence[Timeline], *, about: Args | None = None) -> Iterator[bytes]:
    """The file in parts, which take some 6 us an event to make: in a worker thread, beside a loop that must go on.

    Encoded at once, 100,000 events would keep the loop from the interpreter for 50 ms.
    """
    head = orjson.dumps({"displayTimeUnit": "ms", "otherData": dict(about or {})})
    yield head[:-1] + b',"traceEvents":['
    events = (event for process, timeline in enumerate(timelines, 1) for event in _Writer(process, timeline).events())
    separator = b""
    while batch := list(islice(events, PIECE_EVENTS)):
        yield separator + orjson.dumps(batch)[1:-1]
        separator = b","
    yield b"]}"


class _Writer:
    """One timeline's events. Of two asynchronous events at one microsecond the first in the file comes first."""

    def __init__(self, process: int, timeline: Timeline) -> None:
        self._process = process
        self._timeline = timeline

    def events(self) -> Iterator[dict[str, Any]]:
        timeline = self._timeline
        yield self._metadata("process_name", 1, {"name": timeline.name})
        yield self._metadata("process_sort_index", 1, {"sort_index": self._process})
        for thread, lane in enumerate([*timeline.lanes, "requests"], 1):
            yield self._metadata("thread_name", thread, {"name": lane})
            yield self._metadata("thread_sort_index", thread, {"sort_index": thread})
        for thread, (lane, slices) in enumerate(timeline.lanes.items(), 1):
            yield from self._lane(lane, slices, thread)
        for track in timeline.tracks:
            if self._is_in_window(track):
                yield from self._track(track, len(timeline.lanes) + 1)

    def _metadata(self, name: str, thread: int, args: dict[str, Any]) -> dict[str, Any]:
        return {"ph": "M", "name": name, "pid": self._process, "tid": thread, "args": args}

    def _lane(self, lane: str, slices: Iterable[Slice], thread: int) -> Iterator[dict[str, Any]]:
        busy_until_us = 0
        for each in slices:
            if not self._is_in_window(each):
                continue
            start_us, end_us, args = self._within(each.start_s, each.end_s, each.args)
            start_us = max(start_us, busy_until_us)
            busy_until_us = end_us = max(start_us, end_us)
            yield {
                "ph": "X",
                "name": each.name,
                "cat": lane,
                "pid": self._process,
                "tid": thread,
                "ts": start_us,
                "dur": end_us - start_us,
                "args": args,
            }

    def _track(self, track: Track, thread: int) -> Iterator[dict[str, Any]]:
        common = {"cat": "request", "id2": {"local": f"{track.id:#x}"}, "pid": self._process, "tid": thread}
        start_us, end_us, args = self._within(track.start_s, track.end_s, track.args)
        inner: list[tuple[int, dict[str, Any]]] = []
        now_us = start_us
        for phase in sorted(track.phases, key=lambda phase: phase.start_s):
            if not self._is_in_window(phase):
                continue
            phase_start_us, phase_end_us, phase_args = self._within(phase.start_s, phase.end_s, phase.args)
            phase_start_us = min(max(phase_start_us, now_us), end_us)
            now_us = min(max(phase_start_us, phase_end_us), end_us)
            inner.append((phase_start_us, {"ph": "b", "name": phase.name, "ts": phase_start_us, "args": phase_args}))
            inner.append((now_us, {"ph": "e", "name": phase.name, "ts": now_us}))
        for mark in track.marks:
            if self._timeline.start_s <= mark.at_s <= self._timeline.end_s:
                at_us = min(max(self._us(mark.at_s), start_us), end_us)
                inner.append((at_us, {"ph": "n", "name": mark.name, "ts": at_us, "args": dict(mark.args)}))
        inner.sort(key=lambda entry: entry[0])  # stable: the end of a phase stays before the begin of the next
        yield {"ph": "b", "name": track.name, "ts": start_us, "args": args, **common}
        for _, event in inner:
            yield {**event, **common}
        yield {"ph": "e", "name": track.name, "ts": end_us, **common}

    def _is_in_window(self, event: Slice | Phase | Track) -> bool:
        is_over = event.end_s is not None and event.end_s < self._timeline.start_s
        return not is_over and event.start_s <= self._timeline.end_s

    def _us(self, at_s: float) -> int:
        return round((at_s - self._timeline.start_s) * 1e6)

    def _within(self, start_s: float, end_s: float | None, args: Args) -> tuple[int, int, dict[str, Any]]:
        """Begin and end in the window, and the arguments, marked if either was cut."""
        timeline = self._timeline
        is_cut = start_s < timeline.start_s or end_s is None or end_s > timeline.end_s
        start_us = self._us(max(start_s, timeline.start_s))
        end_us = self._us(timeline.end_s if end_s is None else min(end_s, timeline.end_s))
        return start_us, max(start_us, end_us), {**args, **CUT} if is_cut else dict(args)
