"""What the engine did lately: recorded for next to nothing, and drawn when somebody asks (``GET /v1/trace``).

Lanes: "loop" is the event loop's own work on steps (composing, landing, delivering), "launch" what ``Runner.launch``
takes, "device" each step from when the device began with it, as far as the host saw, to its landing; a second stream of
the device has a lane of its own. Each sequence is a track with the phases that it went through.

A run on a virtual clock is drawn the same way: give the engine a ``Trace`` as its observer and both the clock. Then
``obs.trace.render([trace.cut().timeline("late"), ...])``, a timeline for each run, is a file that compares them.
"""

import dataclasses
import heapq
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain, islice
from operator import attrgetter
from typing import Any, Final, Generic, TypeVar

from aserve.core.ids import SequenceId
from aserve.engine.ports import NullObserver, Observer, RequestMove, StepLanding, StepLaunch
from aserve.obs.trace import Args, Mark, Phase, Slice, Timeline, Track, pieces

MAX_PHASES: Final = 64
"""Phases that are kept of a sequence, the newest: one that is preempted or parked for ever must not fill memory."""

DELIVERIES_A_STEP: Final = 4
"""Slices of delivery that there is room for beside each step: 256 rows at the default ``engine.fan_out_slice``."""

CHUNK_ROWS: Final = 256
"""As many are copied at most when the trace is cut, of each kind."""

T = TypeVar("T")

_LAUNCH_NAMES: Final = tuple(entry.name for entry in dataclasses.fields(StepLaunch))
_LANDING_NAMES: Final = tuple(entry.name for entry in dataclasses.fields(StepLanding))
_launch_row: Final = attrgetter(*_LAUNCH_NAMES)
_landing_row: Final = attrgetter(*_LANDING_NAMES)
_LAUNCH_STEP, _LAUNCH_STREAM, _COMPOSED, _LAUNCHED = map(
    _LAUNCH_NAMES.index, ("step", "stream", "composed_s", "launched_s")
)
_LANDING_STREAM, _STARTED, _COMMITTED = map(_LANDING_NAMES.index, ("stream", "started_s", "committed_s"))

_Record = tuple[Any, ...]
"""The fields of a StepLaunch or StepLanding, in order."""

_Delivery = tuple[float, float, int]
"""Begin and end of a slice of delivery, and its tokens."""

_Life = tuple[
    SequenceId,
    str,  # name
    float,  # submitted_s
    int,  # num_prompt_tokens
    int,  # num_cached_tokens
    float | None,  # first_token_s
    tuple[str, ...],  # phases
    tuple[float, ...],  # when each began; it lasts until the next one
    tuple[float, int, str] | None,  # where it has ended: when, num_output_tokens, finish_reason
]
"""A sequence, as far as it has come. Each move makes a new one, so that a list of them changes no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows(Generic[T]):
    """The newest ``num_rows`` of what the chunks hold, oldest first."""

    chunks: list[tuple[T, ...]]
    num_rows: int

    def __iter__(self) -> Iterator[T]:
        num_too_old = max(0, sum(map(len, self.chunks)) - self.num_rows)
        return islice((row for chunk in self.chunks for row in chunk), num_too_old, None)


class _Kept(Generic[T]):
    """The newest ``num_rows`` rows, and up to a chunk of older ones.

    A full chunk is a tuple: a cut shares it instead of copying its rows, each of which would be a miss of the cache,
    and the garbage collector stops looking at it and at them.
    """

    __slots__ = ("_chunks", "_newest", "_num_rows")

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._chunks: deque[tuple[T, ...]] = deque(maxlen=math.ceil(num_rows / CHUNK_ROWS))
        self._newest: list[T] = []

    def append(self, row: T) -> None:
        newest = self._newest
        newest.append(row)
        if len(newest) == CHUNK_ROWS:
            self._chunks.append(tuple(newest))
            newest.clear()

    def cut(self) -> _Rows[T]:
        """They change no more."""
        return _Rows(chunks=[*self._chunks, tuple(self._newest)], num_rows=self._num_rows)


class Trace:
    """``ports.Observer`` that keeps the last ``num_steps`` steps and as many sequences, and passes all on to ``then``.

    Belongs to the loop. A step costs it 1 us and 0.7 KB, each delivery beyond its first 0.15 KB, a sequence 2.4 us and
    0.6 KB, a token nothing. What is kept are tuples of numbers and words: the garbage collector stops looking at those;
    as many objects would lengthen its passes.
    """

    def __init__(
        self,
        num_steps: int,
        *,
        then: Observer | None = None,
        clock: Callable[[], float] = time.monotonic,
        name: str = "aserve",
        about: Args | None = None,
    ) -> None:
        """clock: the engine's. name, about: what ``Cut.pieces`` calls the run, and facts on it."""
        then = then or NullObserver()
        self._then = then
        self._clock = clock
        self._name = name
        self._about = dict(about or {})
        self._launches: _Kept[_Record] = _Kept(num_steps)
        self._landings: _Kept[_Record] = _Kept(num_steps)
        self._deliveries: _Kept[_Delivery] = _Kept(num_steps * DELIVERIES_A_STEP)
        self._lives: dict[SequenceId, _Life] = {}  # bounded by the sequences that admission lets in
        self._ended: _Kept[_Life] = _Kept(num_steps)
        # What the trace does not show goes straight on.
        self.request_started = then.request_started
        self.first_token = then.first_token
        self.inter_token = then.inter_token
        self.request_rejected = then.request_rejected
        self.request_finished = then.request_finished

    def step_launched(self, launch: StepLaunch) -> None:
        self._launches.append(_launch_row(launch))
        self._then.step_launched(launch)

    def step_landed(self, landing: StepLanding) -> None:
        self._landings.append(_landing_row(landing))
        self._then.step_landed(landing)

    def delivered(self, start_s: float, end_s: float, num_tokens: int) -> None:
        self._deliveries.append((start_s, end_s, num_tokens))
        self._then.delivered(start_s, end_s, num_tokens)

    def request_moved(self, move: RequestMove) -> None:
        self._then.request_moved(move)
        sequence, phase, at_s, num_tokens = move.sequence, move.phase, move.at_s, move.num_tokens
        life = self._lives.get(sequence)
        if life is None:
            # The number first: Perfetto sorts tracks by name, and this is the order in which they came.
            name = f"#{sequence} {move.request_id}" + (f" [{move.index}]" if move.index else "")
            life = (sequence, name, at_s, num_tokens, 0, None, (), (), None)
        _, name, submitted_s, num_prompt_tokens, num_cached_tokens, first_token_s, phases, starts_s, _ = life
        end = None
        if phase == "ended":
            end = (at_s, num_tokens, move.finish_reason)
        else:
            if first_token_s is None:
                if phase == "decode":
                    first_token_s = at_s
                elif phase == "prefill":
                    num_cached_tokens = num_tokens
            # First tokens are told of by when they were delivered, what comes of their landing by when it was.
            at_s = max(at_s, starts_s[-1]) if starts_s else at_s
            phases, starts_s = (*phases[1 - MAX_PHASES :], phase), (*starts_s[1 - MAX_PHASES :], at_s)
        life = (
            sequence, name, submitted_s, num_prompt_tokens, num_cached_tokens, first_token_s, phases, starts_s, end
        )  # fmt: skip
        if end is None:
            self._lives[sequence] = life
        else:
            self._lives.pop(sequence, None)
            self._ended.append(life)

    def cut(self, seconds: float = math.inf) -> "Cut":
        """What is kept of the last ``seconds``, as it stands now. On the loop: a reference to each chunk and to each
        open sequence, 16,384 of which take 0.2 ms, 1 to 3 where other work has driven them from the cache."""
        return Cut(
            seconds=seconds,
            end_s=self._clock(),
            ended_at=datetime.now(UTC),
            launches=self._launches.cut(),
            landings=self._landings.cut(),
            deliveries=self._deliveries.cut(),
            ended=self._ended.cut(),
            open=list(self._lives.values()),
            name=self._name,
            about=self._about,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A part of the trace, which changes no more. Its methods may run in any thread."""

    seconds: float
    end_s: float
    ended_at: datetime
    launches: _Rows[_Record]
    landings: _Rows[_Record]
    deliveries: _Rows[_Delivery]
    ended: _Rows[_Life]
    open: list[_Life]
    name: str
    about: Args

    def pieces(self) -> Iterator[bytes]:
        """The file in parts. "began_at" in it is the wall clock's time of its zero, by which the log can be found."""
        timeline = self.timeline(self.name)
        began_at = self.ended_at.timestamp() - (timeline.end_s - timeline.start_s)
        stamp = datetime.fromtimestamp(began_at, UTC).isoformat(timespec="milliseconds")
        return pieces([timeline], about={**self.about, "began_at": stamp.replace("+00:00", "Z")})

    def timeline(self, name: str) -> Timeline:
        """From ``seconds`` ago to the cut, or from the first step or submission that is kept, if that is later."""
        firsts_s = chain(
            (submitted_s for _, _, submitted_s, *_ in chain(self.ended, self.open)),
            (row[_COMPOSED] for row in islice(self.launches, 1)),
            (row[_STARTED] for row in islice(self.landings, 1)),
        )
        start_s = max(self.end_s - self.seconds, min(firsts_s, default=self.end_s))
        launches = [row for row in self.launches if row[_LAUNCHED] >= start_s]
        landings = [row for row in self.landings if row[_COMMITTED] >= start_s]
        streams = {row[_LAUNCH_STREAM] for row in launches} | {row[_LANDING_STREAM] for row in landings} | {0}
        loop = (_commitments(landings), _compositions(launches), _deliveries(self.deliveries))
        return Timeline(
            name=name,
            start_s=start_s,
            end_s=self.end_s,
            lanes={
                "loop": heapq.merge(*loop, key=attrgetter("start_s")),
                "launch": _launches(launches),
                **{_lane(stream): _steps(stream, launches, landings) for stream in sorted(streams)},
            },
            tracks=map(_track, chain(self.ended, self.open)),
        )


def _launch(row: _Record) -> StepLaunch:
    return StepLaunch(**dict(zip(_LAUNCH_NAMES, row, strict=True)))


def _landing(row: _Record) -> StepLanding:
    return StepLanding(**dict(zip(_LANDING_NAMES, row, strict=True)))


def _compositions(launches: list[_Record]) -> Iterator[Slice]:
    for launch in map(_launch, launches):
        args = {"step": launch.step, "rows": launch.num_rows, "prefill_tokens": launch.num_prefill_tokens}
        yield Slice(name="compose", start_s=launch.composed_s, end_s=launch.handed_s, args=args)


def _commitments(landings: list[_Record]) -> Iterator[Slice]:
    for landing in map(_landing, landings):
        args = {"step": landing.step}
        yield Slice(name="land", start_s=landing.landed_s, end_s=landing.committed_s, args=args)


def _deliveries(deliveries: Iterable[_Delivery]) -> Iterator[Slice]:
    for start_s, end_s, num_tokens in deliveries:
        yield Slice(name="deliver", start_s=start_s, end_s=end_s, args={"tokens": num_tokens})


def _launches(launches: list[_Record]) -> Iterator[Slice]:
    for launch in map(_launch, launches):
        args: dict[str, str | int | float] = {
            "step": launch.step,
            "reason": launch.reason,
            "steps_in_flight": launch.num_inflight,
            "bubble_ms": _ms(launch.bubble_s),
        }
        if launch.lead_s is not None:
            args["lead_ms"] = _ms(launch.lead_s)
        yield Slice(name="launch", start_s=launch.handed_s, end_s=launch.launched_s, args=args)


def _steps(stream: int, launches: list[_Record], landings: list[_Record]) -> Iterator[Slice]:
    """A stream's steps, the last of which may still run."""
    out = {row[_LAUNCH_STEP]: row for row in launches if row[_LAUNCH_STREAM] == stream}
    newest_s = -math.inf
    for row in landings:
        if row[_LANDING_STREAM] != stream:
            continue
        landing = _landing(row)
        newest_s = landing.landed_s
        args = _facts(landing)
        args["eligible"] = landing.num_eligible
        args["wasted_rows"] = landing.num_wasted_rows
        args["actual_ms"] = _ms(landing.landed_s - landing.started_s)
        if landing.predicted_s is not None:
            args["predicted_ms"] = _ms(landing.predicted_s)
        if landing.step in out:
            args["reason"] = _launch(out.pop(landing.step)).reason
        if landing.failed:
            args["failed"] = True
        yield Slice(name=_name(landing), start_s=landing.started_s, end_s=landing.landed_s, args=args)
    if out:
        launch = _launch(next(iter(out.values())))  # the others wait behind it
        args = _facts(launch) | {"reason": launch.reason}
        yield Slice(name=_name(launch), start_s=max(launch.launched_s, newest_s), end_s=None, args=args)


def _facts(step: StepLaunch | StepLanding) -> dict[str, str | int | float]:
    return {
        "step": step.step,
        "rows": step.num_rows,
        "chunks": step.num_chunks,
        "prefill_tokens": step.num_prefill_tokens,
    }


def _name(step: StepLaunch | StepLanding) -> str:
    """What the step holds, as short as a narrow slice wants it."""
    parts = [f"decode {step.num_rows}"] if step.num_rows else []
    if step.num_prefill_tokens:
        parts.append(f"prefill {step.num_prefill_tokens}")
    return " + ".join(parts) or "no tokens"


def _track(life: _Life) -> Track:
    sequence, name, submitted_s, num_prompt_tokens, num_cached_tokens, first_token_s, phases, starts_s, end = life
    args: dict[str, str | int] = {"prompt_tokens": num_prompt_tokens, "cached_tokens": num_cached_tokens}
    ended_s = None
    if end is not None:
        ended_s, args["output_tokens"], args["finish_reason"] = end
    return Track(
        id=sequence,
        name=name,
        start_s=submitted_s,
        end_s=ended_s,
        phases=[
            Phase(name=phase, start_s=start_s, end_s=end_s)
            for phase, start_s, end_s in zip(phases, starts_s, (*starts_s[1:], ended_s), strict=True)
        ],
        marks=[] if first_token_s is None else [Mark(name="first token", at_s=first_token_s)],
        args=args,
    )


def _lane(stream: int) -> str:
    return f"device, stream {stream}" if stream else "device"


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
