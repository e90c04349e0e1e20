"""What both fake devices are made of: the slot table, results, and the faults that a test plants."""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from aserve.core.ids import TRASH_BLOCK
from aserve.core.plan import BatchPlan, BatchResult, Logprobs
from aserve.core.request import MAX_STOP_IDS
from aserve.engine.ports import RunnerInfo
from aserve.errors import DeviceLost

Ints = NDArray[np.int64]
Words = NDArray[np.uint64]
MASK_64: Final = (1 << 64) - 1


class SlotTable:
    """The device's slot table: one row a slot, every column an array, read and written by steps only."""

    def __init__(self, info: RunnerInfo) -> None:
        num_slots = info.max_num_seqs
        self.vocab_size = info.vocab_size
        self.position: Ints = np.zeros(num_slots, np.int64)
        self.last_token: Ints = np.zeros(num_slots, np.int64)
        self.blocks = np.zeros((num_slots, -(-info.max_model_len // info.block_size)), np.int64)
        self.seed: Words = np.zeros(num_slots, np.uint64)
        self.stop_ids = np.full((num_slots, MAX_STOP_IDS), -1, np.int64)
        self.min_length: Ints = np.zeros(num_slots, np.int64)
        self.max_length: Ints = np.zeros(num_slots, np.int64)
        self.num_prompt_tokens: Ints = np.zeros(num_slots, np.int64)
        self.done = np.ones(num_slots, np.bool_)

    def bind(self, plan: BatchPlan) -> None:
        """Apply the plan's joins and table writes."""
        for join in plan.joins:
            slot = join.slot
            self.position[slot] = join.position
            self.blocks[slot] = TRASH_BLOCK
            self.seed[slot] = join.seed & MASK_64
            self.stop_ids[slot] = -1
            self.stop_ids[slot, : len(join.stop_ids)] = join.stop_ids
            self.min_length[slot] = join.min_length
            self.max_length[slot] = join.max_length
            self.num_prompt_tokens[slot] = join.num_prompt_tokens
            self.done[slot] = False
        if len(plan.table_writes):
            slots, indices, blocks = plan.table_writes.T
            self.blocks[slots, indices] = blocks

    def release(self, slots: NDArray[Any]) -> None:
        """The owners are gone: whatever still runs there changes nothing."""
        self.done[slots] = True
        self.blocks[slots] = TRASH_BLOCK

    def settle(self, slots: Ints, lengths: Ints, tokens: Ints) -> tuple[Ints, NDArray[np.bool_]]:
        """Tokens with stop ids masked below the minimum, and which of them end their sequence. ``lengths``: before."""
        stop_ids = self.stop_ids[slots]
        early = lengths < self.min_length[slots]
        while early.any() and (masked := early & (tokens[:, None] == stop_ids).any(axis=1)).any():
            tokens = np.where(masked, (tokens + 1) % self.vocab_size, tokens)
        stopped = (tokens[:, None] == stop_ids).any(axis=1)
        return tokens, stopped | (lengths + 1 >= self.max_length[slots])


def listed_slots(plan: BatchPlan) -> Ints:
    """Slots of all rows and chunks."""
    return np.array([*plan.rows[:, 0], *(chunk.slot for chunk in plan.chunks)], np.int64)


def fake_logprobs(tokens: NDArray[Any], k: int, vocab_size: int) -> Logprobs:
    """A distribution in which the token is the likeliest and its successors follow."""
    steps = np.arange(max(k, 0))
    token_logprobs = (-(tokens % 7 + 1) / 8).astype(np.float32)
    return Logprobs(
        token_logprobs=token_logprobs,
        ranks=np.ones(len(tokens), np.int32),
        top_ids=((tokens[:, None] + steps) % vocab_size).astype(np.int32),
        top_logprobs=(token_logprobs[:, None] - steps / 2).astype(np.float32),
    )


def step_result(
    plan: BatchPlan, tokens: NDArray[Any], num_tokens: NDArray[Any], flags: NDArray[Any], vocab_size: int
) -> BatchResult:
    """The step's result, with made-up log-probabilities where the plan asks for them."""
    prompt_logprobs = tuple(
        (
            index,
            fake_logprobs(
                np.append(chunk.tokens[1:], [] if chunk.last else chunk.next_token).astype(np.int32),
                chunk.prompt_logprobs_k,
                vocab_size,
            ),
        )
        for index, chunk in enumerate(plan.chunks)
        if chunk.prompt_logprobs_k is not None
    )
    return BatchResult(
        step=plan.step,
        tokens=tokens.astype(np.int32)[:, None],
        num_tokens=num_tokens.astype(np.int32),
        flags=flags.astype(np.uint8),
        logprobs=fake_logprobs(tokens, plan.logprobs_k, vocab_size) if plan.logprobs_k >= 0 else None,
        prompt_logprobs=prompt_logprobs,
    )


class Faults:
    """What a test planted: faults of launches, of steps and of single rows, by step number."""

    def __init__(self) -> None:
        self.launches: dict[int, BaseException] = {}
        self.steps: dict[int, BaseException] = {}
        self.rows: dict[int, list[int]] = {}
        self.lost: DeviceLost | None = None

    def check_launch(self, step: int) -> None:
        if self.lost is not None:
            raise self.lost
        if (error := self.launches.pop(step, None)) is not None:
            if isinstance(error, DeviceLost):
                self.lost = error
            raise error

    def take_step(self, step: int) -> BaseException | None:
        error = self.lost or self.steps.pop(step, None)
        if isinstance(error, DeviceLost):
            self.lost = error
        return error


class FakeDevice:
    """Base of the fake runners: what they say of themselves, their slot table, and the test's way to plant faults."""

    def __init__(self, info: RunnerInfo) -> None:
        self._info = info
        self._faults = Faults()
        self._slots = SlotTable(info)

    @property
    def info(self) -> RunnerInfo:
        return self._info

    def fail_launch(self, step: int, error: BaseException) -> None:
        """The launch of that step raises and changes nothing."""
        self._faults.launches[step] = error

    def fail_step(self, step: int, error: BaseException) -> None:
        """That step lands with the fault, and the slots that it lists are dead; ``DeviceLost`` stays for every later
        one."""
        self._faults.steps[step] = error

    def invalidate(self, step: int, *rows: int) -> None:
        """Those rows of that step's result come back flagged, as NaN logits would."""
        self._faults.rows.setdefault(step, []).extend(rows)
