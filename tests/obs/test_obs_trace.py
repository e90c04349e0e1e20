"""What is drawn is what happened, within the window, and whatever is drawn obeys the rules of the format."""

import json

from hypothesis import given
from hypothesis import strategies as st
from trace_rules import read_trace

from aserve.obs.trace import PIECE_EVENTS, Mark, Phase, Slice, Timeline, Track, pieces, render

times = st.floats(0.0, 2.0) | st.integers(0, 20).map(lambda number: number / 10)


def timeline(name: str = "run", start_s: float = 100.0, end_s: float = 101.0, **fields: object) -> Timeline:
    return Timeline(name=name, start_s=start_s, end_s=end_s, **fields)  # type: ignore[arg-type]


def test_lanes_are_threads_of_complete_events() -> None:
    """A slice keeps name, times in microseconds from the window's start, and arguments; lanes keep their order."""
    drawn = timeline(
        lanes={
            "cpu": [Slice(name="compose", start_s=100.0000014, end_s=100.0000026)],
            "device": [Slice(name="step 7", start_s=100.25, end_s=100.5, args={"rows": 3, "late": False})],
        },
    )

    [process] = read_trace(render([drawn]))

    assert process.name == "run"
    assert list(process.lanes.items()) == [
        ("cpu", [("compose", 1, 3, {})]),
        ("device", [("step 7", 250_000, 500_000, {"rows": 3, "late": False})]),
    ]


def test_track_is_a_nest_of_asynchronous_events() -> None:
    """A request has its phases and moments inside of it."""
    drawn = timeline(
        tracks=[
            Track(
                id=5,
                name="chatcmpl-1",
                start_s=100.1,
                end_s=100.9,
                args={"finish_reason": "stop"},
                phases=[
                    Phase(name="queued", start_s=100.1, end_s=100.2),
                    Phase(name="prefill", start_s=100.2, end_s=100.2),
                    Phase(name="decode", start_s=100.2, end_s=100.9, args={"tokens": 7}),
                ],
                marks=[Mark(name="first token", at_s=100.2)],
            )
        ]
    )

    [track] = read_trace(render([drawn]))[0].tracks

    assert (track.name, track.start_us, track.end_us) == ("chatcmpl-1", 100_000, 900_000)
    assert track.args == {"finish_reason": "stop"}
    assert track.phases == [
        ("queued", 100_000, 200_000, {}),
        ("prefill", 200_000, 200_000, {}),
        ("decode", 200_000, 900_000, {"tokens": 7}),
    ]
    assert track.marks == [("first token", 200_000, {})]


def test_window_cuts() -> None:
    """What lies outside is left out; what reaches over an edge is cut there and says so."""
    drawn = timeline(
        lanes={
            "cpu": [
                Slice(name="before", start_s=99.0, end_s=99.9),
                Slice(name="over the start", start_s=99.9, end_s=100.1),
                Slice(name="over the end", start_s=100.9, end_s=101.1),
                Slice(name="after", start_s=101.2, end_s=101.3),
            ],
            "device": [Slice(name="still on", start_s=100.5, end_s=None)],
        },
        tracks=[
            Track(id=1, name="gone", start_s=98.0, end_s=99.0),
            Track(
                id=2,
                name="open",
                start_s=90.0,
                phases=[
                    Phase(name="queued", start_s=90.0, end_s=95.0),
                    Phase(name="prefill", start_s=95.0, end_s=100.5),
                    Phase(name="decode", start_s=100.5),
                ],
                marks=[Mark(name="resumed", at_s=95.0)],
            ),
            Track(id=3, name="later", start_s=101.5),
        ],
    )

    [process] = read_trace(render([drawn]))

    assert process.lanes["cpu"] == [
        ("over the start", 0, 100_000, {"cut": True}),
        ("over the end", 900_000, 1_000_000, {"cut": True}),
    ]
    assert process.lanes["device"] == [("still on", 500_000, 1_000_000, {"cut": True})]
    [track] = process.tracks
    assert (track.name, track.start_us, track.end_us, track.args) == ("open", 0, 1_000_000, {"cut": True})
    assert track.phases == [
        ("prefill", 0, 500_000, {"cut": True}),
        ("decode", 500_000, 1_000_000, {"cut": True}),
    ]
    assert track.marks == []


def test_overlapping_slices_are_shown_one_after_the_other() -> None:
    """Viewers drop or misplace a slice that begins inside another of its lane."""
    drawn = timeline(
        lanes={
            "cpu": [
                Slice(name="first", start_s=100.1, end_s=100.3),
                Slice(name="inside", start_s=100.15, end_s=100.2),
                Slice(name="second", start_s=100.2, end_s=100.4),
            ]
        }
    )

    [process] = read_trace(render([drawn]))

    assert process.lanes["cpu"] == [
        ("first", 100_000, 300_000, {}),
        ("inside", 300_000, 300_000, {}),
        ("second", 300_000, 400_000, {}),
    ]


def test_runs_side_by_side() -> None:
    """Each timeline is a process from the same zero, and equal ids of two of them are two tracks."""
    runs = [
        timeline(name, start_s=start_s, end_s=start_s + 1, tracks=[Track(id=1, name="a", start_s=start_s + 0.5)])
        for name, start_s in (("sync", 0.0), ("late", 50.0))
    ]

    processes = read_trace(render(runs))

    assert [(p.name, [t.start_us for t in p.tracks]) for p in processes] == [("sync", [500_000]), ("late", [500_000])]


def test_large_files_come_in_pieces() -> None:
    """Which are the file when joined, and each is made of some events only."""
    num = 3 * PIECE_EVENTS
    drawn = timeline(
        lanes={"cpu": [Slice(name=f"s{i}", start_s=100 + i / num, end_s=100 + i / num) for i in range(num)]}
    )

    parts = list(pieces([drawn]))

    assert [name for name, *_ in read_trace(b"".join(parts))[0].lanes["cpu"]] == [f"s{i}" for i in range(num)]
    assert b"".join(parts) == render([drawn])
    assert max(map(len, parts)) < 120 * PIECE_EVENTS


def test_facts_on_the_file() -> None:
    """They go where the format has a place for them."""
    document = json.loads(render([], about={"version": "1.0"}))

    assert document == {"displayTimeUnit": "ms", "otherData": {"version": "1.0"}, "traceEvents": []}


spans = st.tuples(times, times).map(sorted)
phases = st.builds(
    lambda span, is_open: Phase(name="p", start_s=span[0], end_s=None if is_open else span[1]), spans, st.booleans()
)
tracks = st.lists(
    st.builds(
        lambda span, is_open, phases, marks: Track(
            id=0,
            name="t",
            start_s=span[0],
            end_s=None if is_open else span[1],
            phases=phases,
            marks=[Mark(name="m", at_s=at_s) for at_s in marks],
        ),
        spans,
        st.booleans(),
        st.lists(phases, max_size=4),
        st.lists(times, max_size=3),
    ),
    max_size=4,
)
slices = st.lists(st.builds(lambda span: Slice(name="s", start_s=span[0], end_s=span[1]), spans), max_size=12)
lanes = st.dictionaries(st.sampled_from("ab"), slices)


@given(window=spans, lanes=lanes, tracks=tracks)
def test_whatever_is_recorded_obeys_the_format(
    window: list[float], lanes: dict[str, list[Slice]], tracks: list[Track]
) -> None:
    """Any records, cut anywhere, also those that contradict each other."""
    numbered = [
        Track(id=number, name=t.name, start_s=t.start_s, end_s=t.end_s, phases=t.phases, marks=t.marks)
        for number, t in enumerate(tracks, 1)
    ]

    [process] = read_trace(
        render([Timeline(name="run", start_s=window[0], end_s=window[1], lanes=lanes, tracks=numbered)])
    )

    length_us = round((window[1] - window[0]) * 1e6)
    assert all(end <= length_us for lane in process.lanes.values() for _, _, end, _ in lane)
    assert all(0 <= t.start_us <= t.end_us <= length_us for t in process.tracks)
