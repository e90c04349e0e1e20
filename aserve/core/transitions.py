"""Every state machine of the core as a table. An absent pair is an error: nothing changes and the story is told."""

from collections import deque
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import TypeVar

from aserve.errors import IllegalTransition


class SequenceState(StrEnum):
    WAITING = "waiting"  # admitted, owns no blocks and no slot
    PREFILLING = "prefilling"  # owns blocks and a slot, prompt not launched to its end
    DECODING = "decoding"  # its last chunk is launched
    PREEMPTING = "preempting"  # marked: no more rows, its newest step has not landed
    PARKED = "parked"  # its reader stalled: owns no slot and no blocks, and is not admissible until that one has read
    FINISHED = "finished"  # over; rows of it may still be in flight
    RELEASED = "released"  # nothing on the device refers to it any more


class SequenceMove(StrEnum):
    ADMIT = "admit"
    PREFILL_LAUNCHED = "prefill_launched"
    MARK = "mark"
    REQUEUE = "requeue"
    PARK = "park"
    UNPARK = "unpark"
    FINISH = "finish"
    RELEASE = "release"


SEQUENCE: Mapping[tuple[SequenceState, SequenceMove], SequenceState] = {
    (SequenceState.WAITING, SequenceMove.ADMIT): SequenceState.PREFILLING,
    (SequenceState.PREFILLING, SequenceMove.PREFILL_LAUNCHED): SequenceState.DECODING,
    (SequenceState.PREFILLING, SequenceMove.MARK): SequenceState.PREEMPTING,
    (SequenceState.DECODING, SequenceMove.MARK): SequenceState.PREEMPTING,
    (SequenceState.PREEMPTING, SequenceMove.REQUEUE): SequenceState.WAITING,
    (SequenceState.PREEMPTING, SequenceMove.PARK): SequenceState.PARKED,
    (SequenceState.WAITING, SequenceMove.PARK): SequenceState.PARKED,
    (SequenceState.PARKED, SequenceMove.UNPARK): SequenceState.WAITING,
    (SequenceState.PARKED, SequenceMove.FINISH): SequenceState.FINISHED,
    (SequenceState.WAITING, SequenceMove.FINISH): SequenceState.FINISHED,
    (SequenceState.PREFILLING, SequenceMove.FINISH): SequenceState.FINISHED,
    (SequenceState.DECODING, SequenceMove.FINISH): SequenceState.FINISHED,
    (SequenceState.PREEMPTING, SequenceMove.FINISH): SequenceState.FINISHED,
    (SequenceState.FINISHED, SequenceMove.RELEASE): SequenceState.RELEASED,
}


class BlockState(StrEnum):
    FREE = "free"
    WRITING = "writing"  # one owner, who may write and read it
    READONLY = "readonly"  # full and landed, one reference or more
    CACHED = "cached"  # full, hashed, no references
    PENDING = "pending"  # given up, but a step in flight may still touch it


class BlockMove(StrEnum):
    ALLOCATE = "allocate"
    PUBLISH = "publish"
    ABANDON = "abandon"
    SHARE = "share"
    UNSHARE = "unshare"
    CACHE = "cache"
    DROP = "drop"
    HIT = "hit"
    EVICT = "evict"
    RECLAIM = "reclaim"


BLOCK: Mapping[tuple[BlockState, BlockMove], BlockState] = {
    (BlockState.FREE, BlockMove.ALLOCATE): BlockState.WRITING,
    (BlockState.WRITING, BlockMove.PUBLISH): BlockState.READONLY,
    (BlockState.WRITING, BlockMove.ABANDON): BlockState.PENDING,
    (BlockState.READONLY, BlockMove.SHARE): BlockState.READONLY,
    (BlockState.READONLY, BlockMove.UNSHARE): BlockState.READONLY,
    (BlockState.READONLY, BlockMove.CACHE): BlockState.CACHED,
    (BlockState.READONLY, BlockMove.DROP): BlockState.PENDING,
    (BlockState.CACHED, BlockMove.HIT): BlockState.READONLY,
    (BlockState.CACHED, BlockMove.EVICT): BlockState.PENDING,
    (BlockState.PENDING, BlockMove.RECLAIM): BlockState.FREE,
}


class SlotState(StrEnum):
    FREE = "free"
    BOUND = "bound"  # one sequence's row of the device's table
    RETIRING = "retiring"  # its sequence left, a step in flight may still list it


class SlotMove(StrEnum):
    BIND = "bind"
    RETIRE = "retire"
    RECLAIM = "reclaim"


SLOT: Mapping[tuple[SlotState, SlotMove], SlotState] = {
    (SlotState.FREE, SlotMove.BIND): SlotState.BOUND,
    (SlotState.BOUND, SlotMove.RETIRE): SlotState.RETIRING,
    (SlotState.RETIRING, SlotMove.RECLAIM): SlotState.FREE,
}

S = TypeVar("S", bound=StrEnum)
M = TypeVar("M", bound=StrEnum)


class Story:
    """The recent moves, for the error that a bad one raises. Bounded; entries are tuples and cost next to nothing."""

    __slots__ = ("_entries",)

    def __init__(self, length: int = 128) -> None:
        self._entries: deque[tuple[str, int, str, str]] = deque(maxlen=length)

    def note(self, kind: str, ident: int, state: str, move: str) -> None:
        self._entries.append((kind, ident, state, move))

    def of(self, kind: str, ident: int) -> Iterable[str]:
        """The moves of one thing, oldest first."""
        return [f"{state} -> {move}" for k, i, state, move in self._entries if k == kind and i == ident]


def move(table: Mapping[tuple[S, M], S], kind: str, ident: int, state: S, step: M, story: Story) -> S:
    """The state after ``step``. Raises IllegalTransition, with the recent story, if the table has no such move."""
    after = table.get((state, step))
    if after is None:
        recent = ", ".join(story.of(kind, ident)) or "nothing noted"
        raise IllegalTransition(f"{kind} {ident}: no move {step!s} from {state!s} (recently: {recent})")
    story.note(kind, ident, state, step)
    return after
