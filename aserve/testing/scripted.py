"""A device that follows a script."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from aserve.core.ids import TRASH_BLOCK
from aserve.core.plan import FLAG_DONE, FLAG_INVALID, BatchPlan, BatchResult
from aserve.engine.ports import RunnerInfo
from aserve.testing.device import FakeDevice, Ints, listed_slots, step_result
from aserve.testing.manual import ManualEvent
from aserve.testing.text import ByteTokenizer

Script = Sequence[int] | Callable[[NDArray[np.int32], int], int]
"""Output token i is item i (from the start again at its end), or what the function makes of (context, i)."""


@dataclass(slots=True, eq=False)
class _Flying:
    """A step on its way."""

    flight: ManualEvent
    outcome: BatchResult | BaseException
    step_time_s: float
    stream: int


class ScriptedRunner(FakeDevice):
    """A device whose tokens, times and faults a test decides.

    script: see ``Script``; a function may raise, which fails the step, and an id outside the vocabulary makes its row
    invalid. step_time_s: how long a step takes, or a function of its plan; steps of a stream run one after another,
    and 0 lands on the loop's next tick.
    log: the plans launched, the newest ``log_steps`` of them.

    A stop id that the script wants below the minimum length becomes the next id that is none, as masking would do.
    """

    def __init__(
        self,
        script: Script = b"ok ",
        *,
        vocab_size: int = 258,
        max_num_seqs: int = 256,
        max_model_len: int = 2048,
        num_blocks: int = 4096,
        block_size: int = 16,
        eos_ids: tuple[int, ...] = (ByteTokenizer.EOS,),
        step_time_s: float | Callable[[BatchPlan], float] = 0.0,
        log_steps: int = 4096,
    ) -> None:
        info = RunnerInfo(
            model_name="scripted",
            device="script",
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            eos_ids=eos_ids,
        )
        super().__init__(info)
        self._script: Script = script if callable(script) else np.array(list(script), np.int64)  # type: ignore[assignment]
        self._step_time_s = step_time_s
        self.log: deque[BatchPlan] = deque(maxlen=log_steps)
        self.closed = False
        self._context = np.zeros((max_num_seqs, max_model_len + 1), np.int32)
        self._block_tokens = np.zeros((num_blocks + 1, block_size), np.int32)
        self._flying: deque[_Flying] = deque()
        self._held = False
        self._ticks: dict[int, asyncio.Handle] = {}
        self._num_steps = 0
        self._num_tokens = 0

    @property
    def num_inflight(self) -> int:
        """Steps launched and not landed."""
        return len(self._flying)

    # --- gates

    def hold(self) -> None:
        """Close the gate: from now on steps stay in flight."""
        self._held = True
        self._stop_timers()

    def release(self, num_steps: int = 1) -> None:
        """Land that many of the oldest steps at once, the gate stays closed."""
        for _ in range(num_steps):
            self._land(self._flying[0])

    def release_step(self, step: int) -> None:
        """Land one step, older ones stay in flight: completions out of order."""
        self._land(next(flying for flying in self._flying if flying.flight.step == step))

    def resume(self) -> None:
        """Open the gate."""
        self._held = False
        for stream in {flying.stream for flying in self._flying}:
            self._start_timer(stream)

    # --- the Runner protocol

    def launch(self, plan: BatchPlan) -> ManualEvent:
        assert not self.closed, "launched on a closed device"
        self._faults.check_launch(plan.step)
        self.log.append(plan)
        self._num_steps += 1
        self._num_tokens += plan.num_tokens
        self._bind(plan)
        outcome: BatchResult | BaseException | None = self._faults.take_step(plan.step)
        if outcome is None:
            try:
                outcome = self._compute(plan)
            except Exception as error:
                outcome = error
        if isinstance(outcome, BaseException):
            self._slots.done[listed_slots(plan)] = True
        flight = ManualEvent(plan.step)
        step_time_s = self._step_time_s(plan) if callable(self._step_time_s) else self._step_time_s
        self._flying.append(_Flying(flight, outcome, step_time_s, plan.stream))
        self._start_timer(plan.stream)
        return flight

    def go_on(self) -> None:
        """Nothing: a launch leaves nothing."""

    def statistics(self) -> dict[str, float]:
        return {"num_steps": self._num_steps, "num_tokens": self._num_tokens}

    async def aclose(self) -> None:
        """Lands whatever is in flight, held or not."""
        self._stop_timers()
        self.release(len(self._flying))
        self.closed = True

    # --- inside

    def _oldest_on(self, stream: int) -> _Flying | None:
        return next((flying for flying in self._flying if flying.stream == stream), None)

    def _start_timer(self, stream: int) -> None:
        oldest = self._oldest_on(stream)
        if self._held or stream in self._ticks or oldest is None:
            return
        loop, step_time_s = asyncio.get_running_loop(), oldest.step_time_s
        self._ticks[stream] = (
            loop.call_later(step_time_s, self._tick, stream) if step_time_s else loop.call_soon(self._tick, stream)
        )

    def _stop_timers(self) -> None:
        for timer in self._ticks.values():
            timer.cancel()
        self._ticks.clear()

    def _tick(self, stream: int) -> None:
        del self._ticks[stream]
        is_first = True
        while (oldest := self._oldest_on(stream)) is not None and (is_first or not oldest.step_time_s):
            self._land(oldest)
            is_first = False
        self._start_timer(stream)

    def _land(self, flying: _Flying) -> None:
        self._flying.remove(flying)
        if isinstance(flying.outcome, BatchResult):
            flying.flight.set(flying.outcome)
        else:
            flying.flight.fail(flying.outcome)

    def _bind(self, plan: BatchPlan) -> None:
        slots = self._slots
        if len(plan.leaves):
            slots.release(plan.leaves)
        slots.bind(plan)
        for join in plan.joins:
            if join.position:
                tokens = self._block_tokens[slots.blocks[join.slot]].reshape(-1)
                self._context[join.slot, : join.position] = tokens[: join.position]
        if len(plan.token_writes):
            written, positions, tokens = plan.token_writes.T
            self._context[written, positions] = tokens

    def _compute(self, plan: BatchPlan) -> BatchResult:
        slots, block_size = self._slots, self._info.block_size
        row_slots, positions = plan.rows.T.astype(np.int64)
        row_blocks = np.where(slots.done[row_slots], TRASH_BLOCK, slots.blocks[row_slots, positions // block_size])
        self._block_tokens[row_blocks, positions % block_size] = self._context[row_slots, positions]
        for chunk in plan.chunks:
            span = np.arange(chunk.start, chunk.start + len(chunk.tokens))
            self._context[chunk.slot, span] = chunk.tokens
            self._block_tokens[slots.blocks[chunk.slot, span // block_size], span % block_size] = chunk.tokens
        last = [(chunk.slot, chunk.start + len(chunk.tokens)) for chunk in plan.chunks if chunk.last]
        sampled = np.concatenate([row_slots, np.array([slot for slot, _ in last], np.int64)])
        lengths = np.concatenate([positions + 1, np.array([length for _, length in last], np.int64)])

        live = ~slots.done[sampled]
        tokens = self._ask_script(sampled, lengths, live)
        invalid = live & ((tokens < 0) | (tokens >= self._info.vocab_size))
        invalid[self._faults.rows.pop(plan.step, [])] = True
        tokens = np.where(invalid | ~live, 0, tokens)
        tokens, ends = slots.settle(sampled, lengths, tokens)
        flags = np.where(invalid, FLAG_INVALID, np.where(ends | ~live, FLAG_DONE, 0))
        writes = live & ~invalid
        if len(plan.deferred):
            writes &= ~plan.deferred
        written = sampled[writes]
        self._context[written, lengths[writes]] = tokens[writes]
        slots.done[sampled[invalid]] = True
        slots.done[written] = ends[writes]
        return step_result(plan, tokens, live, flags, self._info.vocab_size)

    def _ask_script(self, slots: Ints, lengths: Ints, live: NDArray[np.bool_]) -> Ints:
        script = self._script
        outputs = lengths - self._slots.num_prompt_tokens[slots]
        if not callable(script):
            items = cast(Ints, script)
            picked: Ints = items[outputs % len(items)]
            return picked
        return np.array(
            [
                script(self._context[slot, :length].copy(), output) if is_live else 0
                for slot, length, output, is_live in zip(
                    slots.tolist(), lengths.tolist(), outputs.tolist(), live.tolist(), strict=True
                )
            ],
            np.int64,
        )
