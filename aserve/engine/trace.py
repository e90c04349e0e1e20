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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from operator import attrgetter
from typing import Any, Final

from aserve.core.ids import SequenceId
from aserve.engine.ports import NullObserver, Observer, RequestMove, StepLanding, StepLaunch
from aserve.obs.trace import Args, Mark, Phase, Slice, Timeline, Track, pieces

MAX_PHASES: Final = 64
"""Phases that are kept of a sequence, the newest: one that is preempted or parked for ever must not fill memory."""

_LAUNCH_NAMES: Final = tuple(entry.name for entry in dataclasses.fields(StepLaunch))
_LANDING_NAMES: Final = tuple(entry.name for entry in dataclasses.fields(StepLanding))
_launch_row: Final = attrgetter(*_LAUNCH_NAMES)
_landing_row: Final = attrgetter(*_LANDING_NAMES)
_LAUNCH_STEP, _LAUNCH_STREAM, _COMPOSED, _LAUNCHED = map(
    _LAUNCH_NAMES.index, ("step", "stream", "composed_s", "launched_s")
)
_LANDING_STREAM, _STARTED, _COMMITTED = map(_LANDING_NAMES.index, ("stream", "started_s", "committed_s"))


@dataclass(slots=True, eq=False, kw_only=True)
class _Life:
    """A sequence from its submission to its end. phases: (name, when it began), each until the next one."""

    sequence: SequenceId
    name: str
    submitted_s: float
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    first_token_s: float | None = None
    ended_s: float | None = None
    finish_reason: str = ""
    phases: deque[tuple[str, float]] = field(default_factory=lambda: deque(maxlen=MAX_PHASES))

    def copy(self) -> "_Life":
        return dataclasses.replace(self, phases=self.phases.copy())

    def track(self) -> Track:
        ends_s = [start_s for _, start_s in self.phases][1:]
        args: dict[str, str | int] = {
            "prompt_tokens": self.num_prompt_tokens,
            "cached_tokens": self.num_cached_tokens,
        }
        if self.ended_s is not None:
            args |= {"output_tokens": self.num_output_tokens, "finish_reason": self.finish_reason}
        return Track(
            id=self.sequence,
            name=self.name,
            start_s=self.submitted_s,
            end_s=self.ended_s,
            phases=[
                Phase(name=name, start_s=start_s, end_s=end_s)
                for (name, start_s), end_s in zip(self.phases, [*ends_s, self.ended_s], strict=True)
            ],
            marks=[] if self.first_token_s is None else [Mark(name="first token", at_s=self.first_token_s)],
            args=args,
        )


class Trace:
    """``ports.Observer`` that keeps the last ``num_steps`` steps and as many sequences, and passes all on to ``then``.

    Belongs to the loop. A step costs it 0.65 us and 0.7 KB, a sequence 2 us, a token nothing. What is kept are tuples
    of numbers and words: the garbage collector stops looking at those; as many objects would lengthen its passes.
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
        self._launches: deque[tuple[Any, ...]] = deque(maxlen=num_steps)
        self._landings: deque[tuple[Any, ...]] = deque(maxlen=num_steps)
        self._deliveries: deque[tuple[float, float, int]] = deque(maxlen=num_steps)
        self._lives: dict[SequenceId, _Life] = {}  # bounded by the sequences that admission lets in
        self._ended: deque[_Life] = deque(maxlen=num_steps)
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
        life = self._lives.get(move.sequence)
        if life is None:
            life = self._lives[move.sequence] = _Life(
                sequence=move.sequence,
                # The number first: Perfetto sorts tracks by name, and this is the order in which they came.
                name=f"#{move.sequence} {move.request_id}" + (f" [{move.index}]" if move.index else ""),
                submitted_s=move.at_s,
                num_prompt_tokens=move.num_tokens,
            )
        if move.phase == "ended":
            life.ended_s, life.finish_reason, life.num_output_tokens = move.at_s, move.finish_reason, move.num_tokens
            self._ended.append(self._lives.pop(move.sequence))
            return
        if move.phase == "decode" and life.first_token_s is None:
            life.first_token_s = move.at_s
        elif move.phase == "prefill" and life.first_token_s is None:
            life.num_cached_tokens = move.num_tokens
        life.phases.append((move.phase, move.at_s))

    def cut(self, seconds: float = math.inf) -> "Cut":
        """What is kept of the last ``seconds``, as it stands now. On the loop, for 2 ms at most."""
        return Cut(
            seconds=seconds,
            end_s=self._clock(),
            ended_at=datetime.now(UTC),
            launches=list(self._launches),
            landings=list(self._landings),
            deliveries=list(self._deliveries),
            lives=[*self._ended, *(life.copy() for life in self._lives.values())],
            name=self._name,
            about=self._about,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A part of the trace, which changes no more. Its methods may run in any thread."""

    seconds: float
    end_s: float
    ended_at: datetime
    launches: list[tuple[Any, ...]]
    landings: list[tuple[Any, ...]]
    deliveries: list[tuple[float, float, int]]
    lives: list[_Life]
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
        firsts_s = [life.submitted_s for life in self.lives]
        firsts_s += [row[_COMPOSED] for row in self.launches[:1]] + [row[_STARTED] for row in self.landings[:1]]
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
            tracks=(life.track() for life in self.lives),
        )


def _launch(row: tuple[Any, ...]) -> StepLaunch:
    return StepLaunch(**dict(zip(_LAUNCH_NAMES, row, strict=True)))


def _landing(row: tuple[Any, ...]) -> StepLanding:
    return StepLanding(**dict(zip(_LANDING_NAMES, row, strict=True)))


def _compositions(launches: list[tuple[Any, ...]]) -> Iterator[Slice]:
    for launch in map(_launch, launches):
        args = {"step": launch.step, "rows": launch.num_rows, "prefill_tokens": launch.num_prefill_tokens}
        yield Slice(name="compose", start_s=launch.composed_s, end_s=launch.handed_s, args=args)


def _commitments(landings: list[tuple[Any, ...]]) -> Iterator[Slice]:
    for landing in map(_landing, landings):
        args = {"step": landing.step}
        yield Slice(name="land", start_s=landing.landed_s, end_s=landing.committed_s, args=args)


def _deliveries(deliveries: list[tuple[float, float, int]]) -> Iterator[Slice]:
    for start_s, end_s, num_tokens in deliveries:
        yield Slice(name="deliver", start_s=start_s, end_s=end_s, args={"tokens": num_tokens})


def _launches(launches: list[tuple[Any, ...]]) -> Iterator[Slice]:
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


def _steps(stream: int, launches: list[tuple[Any, ...]], landings: list[tuple[Any, ...]]) -> Iterator[Slice]:
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


def _lane(stream: int) -> str:
    return f"device, stream {stream}" if stream else "device"


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
