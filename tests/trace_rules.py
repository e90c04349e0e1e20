"""Reads a trace as a viewer does and holds it to the rules of the trace event format that both viewers enforce.

The rules: the format's own description ("Trace Event Format"), and what the importers of chrome://tracing and Perfetto
refuse or misplace: complete events of a thread that overlap, asynchronous events without a begin or an end, ends that
name another event than the innermost open one.
"""

import json
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

METADATA = {"process_name": str, "thread_name": str, "process_sort_index": int, "thread_sort_index": int}
"""Metadata that we use, and the type of its one argument, "name" or "sort_index"."""


@dataclass
class ReadTrack:
    """A request as it is shown. phases: (name, begin, end, args); marks: (name, time, args)."""

    name: str
    start_us: int
    args: dict[str, Any]
    end_us: int = -1
    phases: list[tuple[str, int, int, dict[str, Any]]] = field(default_factory=list)
    marks: list[tuple[str, int, dict[str, Any]]] = field(default_factory=list)


@dataclass
class ReadProcess:
    """lanes: a lane's name -> (name, begin, end, args) of its slices in order."""

    name: str = ""
    lanes: dict[str, list[tuple[str, int, int, dict[str, Any]]]] = field(default_factory=dict)
    tracks: list[ReadTrack] = field(default_factory=list)


def read_trace(data: bytes) -> list[ReadProcess]:
    """The processes of a file in their order. Fails an assertion where a rule is broken."""
    document = json.loads(data)
    assert set(document) <= {"traceEvents", "displayTimeUnit", "otherData"}
    assert document["displayTimeUnit"] in ("ms", "ns")
    events = document["traceEvents"]
    for event in events:
        _check_fields(event)
    processes: dict[int, ReadProcess] = defaultdict(ReadProcess)
    threads: dict[tuple[int, int], str] = {}
    for event in events:
        if event["name"] == "process_name":
            processes[event["pid"]].name = event["args"]["name"]
        elif event["name"] == "thread_name":
            threads[event["pid"], event["tid"]] = event["args"]["name"]
    timed = sorted((e for e in events if e["ph"] != "M"), key=lambda event: event["ts"])  # stable, as viewers sort
    for event in timed:
        assert (event["pid"], event["tid"]) in threads, f"a thread without a name: {event}"
    for (pid, tid), name in threads.items():
        lane = [e for e in timed if e["ph"] == "X" and (e["pid"], e["tid"]) == (pid, tid)]
        if lane:
            processes[pid].lanes[name] = _read_lane(lane)
    _read_tracks([e for e in timed if e["ph"] in "bne"], processes)
    return [processes[pid] for pid in sorted(processes)]


def _check_fields(event: dict[str, Any]) -> None:
    assert event["ph"] in ("M", "X", "b", "n", "e"), event
    assert isinstance(event["name"], str) and event["name"], event
    assert type(event["pid"]) is int and type(event["tid"]) is int and event["pid"] > 0, event
    args = event.get("args", {})
    assert all(isinstance(key, str) and isinstance(value, str | int | float | bool) for key, value in args.items()), (
        event
    )
    if event["ph"] == "M":
        kind = METADATA[event["name"]]
        assert [type(value) for value in args.values()] == [kind], event
        assert set(args) == {"name" if kind is str else "sort_index"}, event
        return
    assert type(event["ts"]) in (int, float) and event["ts"] >= 0, event
    assert isinstance(event["cat"], str) and event["cat"], event
    if event["ph"] == "X":
        assert type(event["dur"]) in (int, float) and event["dur"] >= 0, event
        assert "id2" not in event, event
    else:
        assert set(event["id2"]) == {"local"} and int(event["id2"]["local"], 16) > 0, event
        assert "dur" not in event, event


def _read_lane(events: list[dict[str, Any]]) -> list[tuple[str, int, int, dict[str, Any]]]:
    read = [(e["name"], e["ts"], e["ts"] + e["dur"], e["args"]) for e in events]
    for before, after in pairwise(read):
        assert before[2] <= after[1], f"slices of a lane overlap: {before}, {after}"
    return read


def _read_tracks(events: list[dict[str, Any]], processes: dict[int, ReadProcess]) -> None:
    open_events: dict[tuple[int, str, str], list[dict[str, Any]]] = defaultdict(list)
    tracks: dict[tuple[int, str, str], ReadTrack] = {}
    for event in events:
        key = event["pid"], event["cat"], event["id2"]["local"]
        stack = open_events[key]
        if event["ph"] == "b":
            if not stack:
                assert key not in tracks, f"an id begins twice: {event}"
                tracks[key] = ReadTrack(event["name"], event["ts"], event["args"])
                processes[event["pid"]].tracks.append(tracks[key])
            stack.append(event)
        elif event["ph"] == "n":
            assert stack, f"a moment outside of its track: {event}"
            tracks[key].marks.append((event["name"], event["ts"], event["args"]))
        else:
            assert stack and stack[-1]["name"] == event["name"], f"an end without its begin: {event}"
            begin = stack.pop()
            if stack:
                tracks[key].phases.append((begin["name"], begin["ts"], event["ts"], begin["args"]))
            else:
                tracks[key].end_us = event["ts"]
    assert not any(open_events.values()), "begins without an end"
