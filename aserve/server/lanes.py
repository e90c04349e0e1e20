"""Lanes of one websocket: first in first out within a lane, side by side across. Pure; the socket runs what is due."""

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from aserve.errors import RateLimited

T = TypeVar("T")


@dataclass(slots=True)
class _Lane(Generic[T]):
    waiting: deque[tuple[T, int]] = field(default_factory=deque)


class Lanes(Generic[T]):
    """Which request of which lane may run. A lane exists while something of it runs; None is the default lane's name.

    Bounded in lanes, in waiting requests and in their bytes: what a client sends ahead lies in our memory.
    """

    def __init__(self, *, max_lanes: int, max_waiting: int, max_waiting_bytes: int) -> None:
        self._max_lanes = max_lanes
        self._max_waiting = max_waiting
        self._max_waiting_bytes = max_waiting_bytes
        self._lanes: dict[str | None, _Lane[T]] = {}
        self._num_waiting = 0
        self._num_waiting_bytes = 0

    @property
    def num_open(self) -> int:
        """Lanes in which something runs."""
        return len(self._lanes)

    @property
    def num_waiting(self) -> int:
        return self._num_waiting

    def add(self, name: str | None, request: T, num_bytes: int) -> bool:
        """True: the lane was empty, and the request runs now. False: it waits for its turn. Raises RateLimited, with
        nothing changed, where a bound is reached."""
        lane = self._lanes.get(name)
        if lane is None:
            if len(self._lanes) >= self._max_lanes:
                raise RateLimited(f"This socket has {self._max_lanes} lanes open already.", param="stream_id")
            self._lanes[name] = _Lane()
            return True
        if self._num_waiting >= self._max_waiting or self._num_waiting_bytes + num_bytes > self._max_waiting_bytes:
            raise RateLimited(f"{self._num_waiting} requests wait on this socket already; a further one is too many.")
        lane.waiting.append((request, num_bytes))
        self._num_waiting += 1
        self._num_waiting_bytes += num_bytes
        return False

    def next(self, name: str | None) -> T | None:
        """What ran in this lane has ended: the request that runs now, or None, and the lane is gone."""
        lane = self._lanes[name]
        if not lane.waiting:
            del self._lanes[name]
            return None
        request, num_bytes = lane.waiting.popleft()
        self._num_waiting -= 1
        self._num_waiting_bytes -= num_bytes
        return request

    def take_waiting(self) -> list[tuple[str | None, T]]:
        """All that waits, by lane in order, none of which will run."""
        taken = [(name, request) for name, lane in self._lanes.items() for request, _ in lane.waiting]
        for lane in self._lanes.values():
            lane.waiting.clear()
        self._num_waiting = self._num_waiting_bytes = 0
        return taken
