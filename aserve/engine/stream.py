"""TokenStream: what a caller reads, and the bounded mailbox between delivery and reader."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Final, Protocol

from aserve.engine.generation import Delta, Usage
from aserve.engine.options import EngineOptions


@dataclass(slots=True)
class Timings:
    """The loop's clock in seconds; None until it happened. Written by the engine's delivery only."""

    submitted_s: float
    started_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None


LOOKS: Final = 10
"""At parts of ``park_after_s`` at which a lagging reader is looked at, and parked if others wait for its place."""


class StreamOwner(Protocol):
    """Whom a stream tells what its reader does: the engine."""

    def others_wait(self) -> bool:
        """Whether some request has no place on the device."""
        ...

    def stream_closed(self, stream: "TokenStream") -> None: ...

    def stream_stalled(self, stream: "TokenStream") -> None:
        """The mailbox has been full for ``park_after_s``, or for less while others waited."""
        ...

    def stream_caught_up(self, stream: "TokenStream") -> None:
        """The reader of a stalled stream took everything."""
        ...

    def stream_given_up(self, stream: "TokenStream") -> None:
        """The mailbox has been full for ``stall_timeout_s``."""
        ...


class TokenStream:
    """The deltas of one call. One reader.

    When the reader lags beyond the mailbox's bounds, further deltas are joined to the last one of their choice; when it
    lags for ``park_after_s``, or a tenth of it where others wait for a place on the device, the request leaves the
    device until it has read, and after ``stall_timeout_s`` it is aborted. Closing it, or leaving it to ``async with``,
    aborts what still runs.
    """

    def __init__(
        self,
        request_id: str,
        num_choices: int,
        options: EngineOptions,
        *,
        owner: StreamOwner,
        now: float,
    ) -> None:
        self.request_id = request_id
        self.num_choices = num_choices
        self.usage = Usage()
        self.timings = Timings(now)
        self._options = options
        self._owner = owner
        self._mail: list[Delta] = []
        self._mail_bytes = 0
        self._num_open = num_choices  # choices whose last delta was not put in yet
        self._num_unread = num_choices  # ... not taken out yet
        self._waiter: asyncio.Future[None] | None = None
        self._sink: Callable[[Delta], bool] | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._is_stalled = False
        self._is_closed = False

    @property
    def finished(self) -> bool:
        """Whether every choice's last delta was taken."""
        return self._num_unread == 0

    @property
    def is_lagging(self) -> bool:
        return self._stall_timer is not None

    # --- the engine's side

    def put(self, delta: Delta) -> None:
        """Add a delta, joining it to an earlier one where the reader lags. Never blocks."""
        if self._is_closed:
            return
        if delta.finish is not None:
            self._num_open -= 1
        elif self._sink is not None and not self._mail and self._sink(delta):
            return
        size = len(delta.text) if delta.logprobs is None else wire_bytes(delta)
        if self._mail and self._is_full():
            self._watch_stall()
            for index in range(len(self._mail) - 1, -1, -1):
                if self._mail[index].index == delta.index:
                    self._mail[index] = join(self._mail[index], delta)
                    break
            else:
                self._mail.append(delta)
        else:
            self._mail.append(delta)
        self._mail_bytes += size
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _is_full(self) -> bool:
        return len(self._mail) >= self._options.mailbox_events or self._mail_bytes >= self._options.mailbox_bytes

    def _watch_stall(self) -> None:
        if self._stall_timer is None:
            self._look_again(LOOKS)

    def _look_again(self, num_left: int) -> None:
        part_s = self._options.park_after_s / LOOKS
        self._stall_timer = asyncio.get_running_loop().call_later(part_s, self._look, num_left - 1)

    def _look(self, num_left: int) -> None:
        """A part of ``park_after_s`` has passed, and the reader has taken nothing."""
        if num_left and not self._owner.others_wait():
            self._look_again(num_left)
            return
        self._is_stalled = True
        lagged_s = self._options.park_after_s * (LOOKS - num_left) / LOOKS
        left_s = max(0.0, self._options.stall_timeout_s - lagged_s)
        self._stall_timer = asyncio.get_running_loop().call_later(left_s, self._owner.stream_given_up, self)
        self._owner.stream_stalled(self)

    def _stop_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    # --- the reader's side

    def push_to(self, sink: Callable[[Delta], bool]) -> None:
        """Hand each further delta but the last ones to ``sink`` as it arrives, in place of waking the reader.

        sink: called from delivery, so it must neither block nor raise; True if it took the delta. One that it does not
        take, and all behind it until the reader has taken them, go to the mailbox.
        """
        self._sink = sink

    def next_nowait(self) -> list[Delta]:
        """What is there, possibly nothing."""
        mail, self._mail, self._mail_bytes = self._mail, [], 0
        for delta in mail:
            if delta.finish is not None:
                self._num_unread -= 1
        self._stop_stall_timer()
        if self._is_stalled:
            self._is_stalled = False
            self._owner.stream_caught_up(self)
        return mail

    async def next(self) -> list[Delta]:
        """Wait for news; an empty list once every choice has finished. Cancelling loses nothing."""
        while not self._mail and not self.finished and not self._is_closed:
            assert self._waiter is None, "a stream has one reader"
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self.next_nowait()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        try:
            while deltas := await self.next():
                for delta in deltas:
                    yield delta
        finally:
            self.close()

    def close(self) -> None:
        """Take no more; abort whatever still runs. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._stop_stall_timer()
        self._sink = None
        self._mail = []
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        self._owner.stream_closed(self)

    async def aclose(self) -> None:
        self.close()

    async def __aenter__(self) -> "TokenStream":
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.close()


def wire_bytes(delta: Delta) -> int:
    """About what the delta takes on the wire: text, and 64 bytes for each logprob that is listed."""
    size = len(delta.text)
    if delta.logprobs is not None:
        size += sum(64 * (1 + len(entry.top)) for entry in delta.logprobs)
    return size


def join(first: Delta, second: Delta) -> Delta:
    """Two deltas of one choice as one."""
    both = (first.logprobs, second.logprobs)
    return Delta(
        index=second.index,
        text=first.text + second.text,
        tokens=first.tokens + second.tokens,
        logprobs=None if both == (None, None) else (first.logprobs or ()) + (second.logprobs or ()),
        prompt_logprobs=first.prompt_logprobs if second.prompt_logprobs is None else second.prompt_logprobs,
        finish=second.finish,
        stop_reason=second.stop_reason,
        error=second.error,
        num_output=second.num_output,
    )
