"""When several steps' tokens go out in one write to each stream: where writing each by itself keeps the loop too long.

Most of what a token costs the loop is its write to a socket. Where many short steps land, a step's tokens wait for the
next step's; and tokens that lie in the queue together, because the loop was late, go out together too. Pure.
"""

from typing import Final

SHARE: Final = 0.25
"""Of the time between landings: what delivering each by itself may take before steps are joined."""

MIN_STREAMS: Final = 32
"""Where fewer get a token, nobody gains by waiting."""

_NEWEST_WEIGHT: Final = 1 / 8
"""Of the newest of the times whose running means decide."""


class Joining:
    """max_steps: as many go out together at most, however late the loop is; 1 is each by itself."""

    __slots__ = ("_cost_s", "_landed_s", "_max_steps", "_num_followed", "_period_s")

    def __init__(self, max_steps: int) -> None:
        self._max_steps = max_steps
        self._landed_s: float | None = None
        self._period_s: float | None = None
        self._cost_s: float | None = None
        self._num_followed = 0

    def note_landing(self, landed_s: float) -> None:
        """A step landed that brought tokens."""
        if self._landed_s is not None:
            self._period_s = _running_mean(self._period_s, landed_s - self._landed_s)
        self._landed_s = landed_s

    def note_delivery(self, seconds: float, num_tokens: int) -> None:
        """So long it took to deliver tokens that no others followed."""
        self._cost_s = _running_mean(self._cost_s, seconds / num_tokens)

    def should_wait(self, num_streams: int, num_queued: int) -> bool:
        """Whether the newest of ``num_queued`` steps in the queue should wait for the one that lands next."""
        if not self._may_join(num_streams) or num_queued >= self._max_steps:
            return False
        if self._cost_s is None or self._period_s is None:
            return False
        return self._cost_s * num_streams > SHARE * self._period_s * num_queued

    def may_be_followed(self, num_streams: int) -> bool:
        """Whether the step that is delivered now may leave its text to the one behind it."""
        return self._may_join(num_streams) and self._num_followed + 1 < self._max_steps

    def note_followed(self, *, is_followed: bool) -> None:
        """What became of that step. A loop that is always late would never write if it went on for ever."""
        self._num_followed = self._num_followed + 1 if is_followed else 0

    def _may_join(self, num_streams: int) -> bool:
        return num_streams >= MIN_STREAMS and self._max_steps > 1


def _running_mean(mean: float | None, newest: float) -> float:
    return newest if mean is None else mean + (newest - mean) * _NEWEST_WEIGHT
