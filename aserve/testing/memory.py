"""A device made of memory: every token depends on everything that its step read."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from aserve.core.ids import TRASH_BLOCK
from aserve.core.plan import FLAG_DONE, FLAG_INVALID, MAIN_STREAM, PREFILL_STREAM, BatchPlan
from aserve.engine.ports import RunnerInfo
from aserve.testing.device import MASK_64, FakeDevice, Ints, Words, listed_slots, step_result
from aserve.testing.manual import ManualEvent

_POSITION: Final = np.uint64(0x9E3779B97F4A7C15)
_PROMPT: Final = np.uint64(0xD1B54A32D192ED03)
_OUTPUT: Final = np.uint64(0xABC98388FB8FAC03)
_LAYER: Final = np.uint64(0x8CB92BA72F3D8DD7)
_GRAPH_ROWS: Final = 8
"""Rows of a step are padded to a multiple of this, as captured graphs are."""


def _mix(x: Words) -> Words:
    """Scramble 64-bit words, one to one (the finaliser of splitmix64)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _cells(positions: Ints, tokens: Ints) -> Words:
    """First-layer content of the cells of tokens at positions."""
    return _mix((positions.astype(np.uint64) + np.uint64(1)) * _POSITION + tokens.astype(np.uint64))


def _draw(sums: Words, seeds: Words, lengths: Ints, counts: Words, vocab_size: int) -> Ints:
    """Tokens from the second-layer sums of all cells read, the key, the position and the counts of tokens seen."""
    keys = _mix(seeds + lengths.astype(np.uint64) * _POSITION)
    return (_mix(sums ^ keys ^ counts) % np.uint64(vocab_size)).astype(np.int64)


def _count(tokens: NDArray[Any], num_prompt_tokens: int) -> int:
    """Counts of tokens seen, prompt and output apart, folded to a word: any order, each occurrence counts."""
    words = tokens.astype(np.uint64)
    words = _mix(np.concatenate((words[:num_prompt_tokens] + _PROMPT, words[num_prompt_tokens:] + _OUTPUT)))
    return int(words.sum(dtype=np.uint64))


def expected_tokens(
    prompt: Sequence[int] | NDArray[Any],
    num_tokens: int,
    *,
    vocab_size: int = 32000,
    seed: int = 0,
    stop_ids: Sequence[int] = (),
    min_tokens: int = 0,
    needs_history: bool = False,
) -> list[int]:
    """What a sequence outputs on a ``MemoryRunner`` alone: at most ``num_tokens``, up to the first stop id included.

    Pure, and written apart from the device: no blocks, chunks or batches.
    """
    tokens = np.array(prompt, np.int64)
    num_prompt = len(tokens)
    first = np.cumsum(_cells(np.arange(num_prompt), tokens), dtype=np.uint64)
    first_sum, second_sum = first[-1:], _mix(first + _LAYER).sum(keepdims=True, dtype=np.uint64)
    counts = np.array([_count(tokens, num_prompt) if needs_history else 0], np.uint64)
    seeds = np.array([seed & MASK_64], np.uint64)
    output: list[int] = []
    while len(output) < num_tokens:
        length = np.array([num_prompt + len(output)])
        token = _draw(second_sum, seeds, length, counts, vocab_size)
        while len(output) < min_tokens and token[0] in stop_ids:
            token = (token + 1) % vocab_size
        output.append(int(token[0]))
        if output[-1] in stop_ids:
            break
        if needs_history:
            counts = counts + _mix(token.astype(np.uint64) + _OUTPUT)
        first_sum = first_sum + _cells(length, token)
        second_sum = second_sum + _mix(first_sum + _LAYER)
    return output


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBugs:
    """Faults that can be planted in a ``MemoryRunner``; each must show as wrong output.

    staging_reused: one staging buffer for all steps, so that a plan overwrites one that has not run.
    done_rows_write: done rows and padding write K/V, token and position as live rows do.
    stale_result_words: a landing reads its ring row as it was before the step wrote it.
    """

    staging_reused: bool = False
    done_rows_write: bool = False
    stale_result_words: bool = False


class _Staging:
    """One pinned buffer: plans are copied in at launch and read at execution."""

    def __init__(self, num_rows: int) -> None:
        self.rows = np.zeros((num_rows, 2), np.int64)
        self.deferred = np.zeros(num_rows, np.bool_)
        self.chunks = np.zeros((num_rows, 2), np.int64)
        self.chunk_tokens: list[Ints] = [np.empty(0, np.int64)] * num_rows
        self.token_writes: dict[int, tuple[int, int]] = {}

    def write(self, plan: BatchPlan) -> None:
        num_rows = len(plan.rows)
        self.rows[:num_rows] = plan.rows
        self.deferred[: len(plan.deferred)] = plan.deferred
        self.deferred[len(plan.deferred) :] = False
        for index, chunk in enumerate(plan.chunks):
            self.chunks[index] = chunk.slot, chunk.start
            self.chunk_tokens[index] = chunk.tokens.astype(np.int64)
        self.token_writes = {slot: (position, token) for slot, position, token in plan.token_writes.tolist()}


@dataclass(slots=True, eq=False)
class _Touched:
    """Slots that a step reads or writes, blocks that it reads, and blocks that it writes."""

    slots: set[int]
    reads: set[int]
    writes: set[int]

    def collides(self, other: "_Touched") -> bool:
        """Whether it matters which of two steps comes first."""
        return bool(self.slots & other.slots or self.writes & (other.reads | other.writes) or self.reads & other.writes)


@dataclass(slots=True, eq=False)
class _Launched:
    """A step on its way. Written by the runner only.

    staging, ring_words: its places in its stream's buffers and ring. words: what the landing reads, where not those.
    is_racing: nothing orders it behind a step of the other stream that it collides with.
    """

    plan: BatchPlan
    flight: ManualEvent
    staging: _Staging
    ring_words: NDArray[np.int64]
    touched: _Touched
    is_racing: bool
    rows_left: NDArray[np.bool_]
    chunks_left: NDArray[np.bool_]
    chunk_results: Ints
    words: NDArray[np.int64] | None = None
    error: BaseException | None = None
    reads: list[NDArray[Any]] = field(default_factory=list)
    writes: list[NDArray[Any]] = field(default_factory=list)


class _Lane:
    """One stream: its own staging and ring, and its steps in their order, those that have executed in ``ready``."""

    def __init__(self, num_buffers: int, num_ring_steps: int, num_rows: int) -> None:
        self.pending: deque[_Launched] = deque()
        self.ready: deque[_Launched] = deque()
        self._staging = [_Staging(num_rows) for _ in range(num_buffers)]
        self._ring = np.zeros((num_ring_steps, num_rows), np.int64)
        self._num_launched = 0

    def next_places(self) -> tuple[_Staging, NDArray[np.int64]]:
        """Where the next step's plan and result words go."""
        self._num_launched += 1
        return (
            self._staging[self._num_launched % len(self._staging)],
            self._ring[self._num_launched % len(self._ring)],
        )

    def out(self) -> Iterator[_Launched]:
        """Steps that have not landed."""
        yield from self.ready
        yield from self.pending


class MemoryRunner(FakeDevice):
    """A device of simulated blocks, slot table, staging and result ring, on which the order of things shows.

    Each block has ``block_size`` cells of two words: the first says position and token, the second depends on every
    first word up to its position, as K/V of a deeper layer do. A step reads all cells of a row's context through the
    block table *when it executes*, and the token is a hash of what it read, of the seed, and of the counts where a
    penalty needs them; ``expected_tokens`` gives what must come out. The device takes every liberty that the ledger's
    fences allow:

    - joins and table writes reach the slot table when they are launched, ahead of steps that have not run;
    - leaves reach it as late as their step;
    - steps in flight that share no slot may run in any order (``execute(ahead=True)`` runs the newest first);
    - the steps of two streams run and land as the test says, and a step that is launched while one of the other stream
      is out that it collides with (a slot of both; a block that one of them writes) computes nonsense, in any order;
    - no row sees what another row of its step writes.

    With ``manual`` a test calls ``execute`` and ``land``; otherwise a launched step does both on the next tick. verify:
    raise AssertionError where host and device disagree (positions, tags of result words, unmapped blocks) and where
    streams race; turned off where a planted fault has to show in the output. record: keep the blocks that each step
    touched in ``accesses``.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 256,
        block_size: int = 16,
        max_num_seqs: int = 16,
        max_model_len: int = 1024,
        vocab_size: int = 32000,
        eos_ids: tuple[int, ...] = (),
        max_inflight: int = 8,
        manual: bool = False,
        verify: bool = True,
        record: bool = False,
        bugs: DeviceBugs | None = None,
    ) -> None:
        info = RunnerInfo(
            model_name="memory",
            device="memory",
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            eos_ids=eos_ids,
        )
        super().__init__(info)
        self.bugs = bugs or DeviceBugs()
        self.accesses: dict[int, tuple[Ints, Ints]] = {}
        self._manual = manual
        self._verify = verify
        self._record = record
        self._joined_by = np.zeros(max_num_seqs, np.int64)
        self._counts: Words = np.zeros(max_num_seqs, np.uint64)
        self._counting = np.zeros(max_num_seqs, np.bool_)
        # Content that no step wrote: a cell read before its time is as wrong as a foreign one.
        garbage = np.arange((num_blocks + 1) * block_size * 2, dtype=np.uint64)
        self._cells: Words = _mix(garbage + _LAYER).reshape(num_blocks + 1, block_size, 2)
        num_rows = max_num_seqs + _GRAPH_ROWS
        num_buffers = 1 if self.bugs.staging_reused else 2 * max_inflight
        self._lanes = [_Lane(num_buffers, 2 * max_inflight, num_rows) for _ in (MAIN_STREAM, PREFILL_STREAM)]
        self._num_steps = 0

    @property
    def num_launched(self) -> int:
        """Steps that have not executed."""
        return sum(len(lane.pending) for lane in self._lanes)

    @property
    def num_executed(self) -> int:
        """Steps that have executed and not landed."""
        return sum(len(lane.ready) for lane in self._lanes)

    def num_launched_on(self, stream: int) -> int:
        return len(self._lanes[stream].pending)

    def num_executed_on(self, stream: int) -> int:
        return len(self._lanes[stream].ready)

    # --- the Runner protocol

    def launch(self, plan: BatchPlan) -> ManualEvent:
        self._faults.check_launch(plan.step)
        self._num_steps += 1
        self._join(plan)
        lane = self._lanes[plan.stream]
        touched = self._touched(plan)
        others = (other for each in self._lanes if each is not lane for other in each.out())
        is_racing = any(touched.collides(other.touched) for other in others)
        if self._verify:
            assert not is_racing, f"step {plan.step} does not wait for a step of the other stream that it collides with"
        staging, ring_words = lane.next_places()
        staging.write(plan)
        results = np.cumsum([chunk.last for chunk in plan.chunks], dtype=np.int64) - 1 + len(plan.rows)
        launched = _Launched(
            plan=plan,
            flight=ManualEvent(plan.step),
            staging=staging,
            ring_words=ring_words,
            touched=touched,
            is_racing=is_racing,
            rows_left=np.ones(len(plan.rows), np.bool_),
            chunks_left=np.ones(len(plan.chunks), np.bool_),
            chunk_results=np.where([chunk.last for chunk in plan.chunks], results, -1),
        )
        if self.bugs.stale_result_words:
            launched.words = ring_words[: plan.num_sampled].copy()
        lane.pending.append(launched)
        if not self._manual:
            asyncio.get_running_loop().call_soon(self._run_oldest)
        return launched.flight

    def go_on(self) -> None:
        """Nothing: a launch leaves nothing."""

    def statistics(self) -> dict[str, float]:
        return {"num_steps": self._num_steps}

    async def aclose(self) -> None:
        while self.num_launched or self.num_executed:
            self._run_oldest()

    # --- the test's hands

    def execute(self, *, ahead: bool = False, stream: int | None = None) -> None:
        """Run the oldest step that has not run, of all or of a stream. ``ahead``: newer steps of its stream first, as
        far as slots allow."""
        lane = self._oldest_lane(stream, lambda lane: lane.pending)
        left: list[tuple[_Launched, NDArray[np.bool_], NDArray[np.bool_]]] = []
        busy = np.zeros(self._info.max_num_seqs, np.bool_)
        for launched in lane.pending if ahead else [lane.pending[0]]:
            staging = launched.staging
            row_slots = staging.rows[: len(launched.rows_left), 0]
            chunk_slots = staging.chunks[: len(launched.chunks_left), 0]
            left.append((launched, launched.rows_left & ~busy[row_slots], launched.chunks_left & ~busy[chunk_slots]))
            busy[row_slots[launched.rows_left]] = True
            busy[chunk_slots[launched.chunks_left]] = True
            if launched.plan.step in self._faults.steps:
                # The fault may need slots of this step, so nothing behind it runs before it.
                break
        for launched, rows, chunks in reversed(left):
            if launched is lane.pending[0]:
                self._finish_step(launched, rows, chunks)
            elif launched.plan.step not in self._faults.steps:
                self._run(launched, rows, chunks)
        lane.ready.append(lane.pending.popleft())

    def land(self, *, stream: int | None = None) -> ManualEvent:
        """Complete the flight of the oldest executed step, of all or of a stream, and return it."""
        launched = self._oldest_lane(stream, lambda lane: lane.ready).ready.popleft()
        if launched.error is not None:
            launched.flight.fail(launched.error)
            return launched.flight
        plan = launched.plan
        words = launched.words
        if words is None:
            words = launched.ring_words[: plan.num_sampled]
        if self._verify:
            assert np.all(words >> 40 == plan.step), f"a result word of step {plan.step} is of another step"
        flags = (words >> 32) & 0xFF
        tokens = words & 0xFFFFFFFF
        launched.flight.set(step_result(plan, tokens, np.ones(len(tokens)), flags, self._info.vocab_size))
        return launched.flight

    # --- inside

    def _run_oldest(self) -> None:
        if self.num_launched:
            self.execute()
        if self.num_executed:
            self.land()

    def _oldest_lane(self, stream: int | None, steps_of: Callable[[_Lane], deque[_Launched]]) -> _Lane:
        """The stream's, or that of the oldest of all such steps."""
        if stream is not None:
            return self._lanes[stream]
        return min((lane for lane in self._lanes if steps_of(lane)), key=lambda lane: steps_of(lane)[0].plan.step)

    def _touched(self, plan: BatchPlan) -> _Touched:
        """By what the plan says, once its joins and table writes have been made; done slots touch less."""
        size, tables = self._info.block_size, self._slots.blocks
        spans = [(slot, position, position + 1) for slot, position in plan.rows.tolist()]
        spans += [(chunk.slot, chunk.start, chunk.start + len(chunk.tokens)) for chunk in plan.chunks]
        reads = [block for slot, _, end in spans for block in tables[slot, : -(-end // size)].tolist()]
        writes = [
            block for slot, start, end in spans for block in tables[slot, start // size : -(-end // size)].tolist()
        ]
        slots = [slot for slot, _, _ in spans] + [join.slot for join in plan.joins]
        for array in (plan.leaves, plan.table_writes[:, 0], plan.token_writes[:, 0]):
            slots += array.tolist()
        return _Touched(set(slots), set(reads) - {TRASH_BLOCK}, set(writes) - {TRASH_BLOCK})

    def _join(self, plan: BatchPlan) -> None:
        self._slots.bind(plan)
        for join in plan.joins:
            self._joined_by[join.slot] = plan.step
            self._counting[join.slot] = join.params.needs_history
            if self._verify and join.params.needs_history:
                assert len(join.history) >= join.num_prompt_tokens, f"slot {join.slot} joins without its history"
            self._counts[join.slot] = _count(join.history, join.num_prompt_tokens) if len(join.history) else 0

    def _finish_step(self, launched: _Launched, rows: NDArray[np.bool_], chunks: NDArray[np.bool_]) -> None:
        """Run what is left of a step, then what belongs to the step as a whole."""
        plan, slots = launched.plan, self._slots
        launched.error = self._faults.take_step(plan.step)
        if launched.error is None:
            self._run(launched, rows, chunks)
            if self.bugs.done_rows_write:
                self._run_padding(launched)
        else:
            listed = listed_slots(plan)
            listed = listed[self._joined_by[listed] <= plan.step]
            slots.done[listed] = True
        gone = plan.leaves[self._joined_by[plan.leaves] < plan.step]
        slots.release(gone)
        if self._record:
            empty = [np.empty(0, np.int64)]
            self.accesses[plan.step] = (
                np.unique(np.concatenate([*empty, *launched.reads])),
                np.unique(np.concatenate([*empty, *launched.writes])),
            )

    def _run(self, launched: _Launched, rows: NDArray[np.bool_], chunks: NDArray[np.bool_]) -> None:
        """Run those rows and chunks of a step: read everything, draw, then write everything."""
        if not rows.any() and not chunks.any():
            return
        plan, slots, block_size, staging = launched.plan, self._slots, self._info.block_size, launched.staging
        (row_indices,) = np.nonzero(rows)
        row_slots = staging.rows[row_indices, 0]
        for slot in row_slots.tolist() if staging.token_writes else ():
            if slot in staging.token_writes:
                slots.position[slot], slots.last_token[slot] = staging.token_writes[slot]
        positions, tokens = slots.position[row_slots], slots.last_token[row_slots]
        live = ~slots.done[row_slots]
        if self._verify:
            wrong = live & (positions != staging.rows[row_indices, 1])
            assert not wrong.any(), f"step {plan.step}: the device is elsewhere in slots {row_slots[wrong]}"

        first, second = self._read(launched, row_slots, positions)
        first = first + _cells(positions, tokens)
        row_cells = np.stack([first, _mix(first + _LAYER)], axis=1)
        writes = [(np.where(live, row_slots, -1), positions, _cells(positions, tokens), row_cells[:, 1])]
        sampled, lengths, sums = [row_slots], [positions + 1], [second + row_cells[:, 1]]
        results = [row_indices]
        for index in np.nonzero(chunks)[0].tolist():
            slot, start = staging.chunks[index].tolist()
            chunk_tokens = staging.chunk_tokens[index]
            span = np.arange(start, start + len(chunk_tokens))
            if self._verify:
                assert slots.done[slot] or slots.position[slot] == start, (
                    f"step {plan.step}: slot {slot} is at {slots.position[slot]}, its chunk starts at {start}"
                )
            first_base, second_base = self._read(launched, np.array([slot]), np.array([start]))
            first_words = _cells(span, chunk_tokens)
            second_words = _mix(first_base + np.cumsum(first_words, dtype=np.uint64) + _LAYER)
            target = -1 if slots.done[slot] else slot
            writes.append((np.full(len(span), target), span, first_words, second_words))
            if target >= 0:
                slots.position[slot] = start + len(span)
            if launched.chunk_results[index] >= 0:
                sampled.append(np.array([slot]))
                lengths.append(np.array([start + len(span)]))
                sums.append(second_base + second_words.sum(keepdims=True, dtype=np.uint64))
                results.append(launched.chunk_results[index : index + 1])
        for target_slots, span, first_words, second_words in writes:
            # A clip keeps a planted fault's wild position inside the table.
            indices = np.minimum(span // block_size, slots.blocks.shape[1] - 1)
            blocks = np.where(target_slots >= 0, slots.blocks[target_slots, indices], TRASH_BLOCK)
            if self._verify:
                assert np.all((blocks != TRASH_BLOCK) | (target_slots < 0)), (
                    f"step {plan.step} writes positions that no block holds, in slots {np.unique(target_slots)}"
                )
            if self._record:
                launched.writes.append(blocks[blocks != TRASH_BLOCK])
            self._cells[blocks, span % block_size, 0] = first_words
            self._cells[blocks, span % block_size, 1] = second_words
        self._sample(
            launched,
            np.concatenate(results),
            np.concatenate(sampled),
            np.concatenate(lengths),
            np.concatenate(sums),
            staging.deferred,
        )
        launched.rows_left &= ~rows
        launched.chunks_left &= ~chunks

    def _read(self, launched: _Launched, slots: Ints, lengths: Ints) -> tuple[Words, Words]:
        """Sums of both words over the cells [0, length) of each slot's context."""
        block_size = self._info.block_size
        width = min(-(-int(lengths.max(initial=0)) // block_size), self._slots.blocks.shape[1])
        blocks = self._slots.blocks[slots, :width]
        inside = np.arange(width * block_size) < lengths[:, None]
        if self._record:
            used = (np.arange(width) * block_size < lengths[:, None]) & ~self._slots.done[slots][:, None]
            launched.reads.append(blocks[used])
        cells = self._cells[blocks].reshape(len(slots), width * block_size, 2)
        sums = (cells * inside[:, :, None]).sum(axis=1, dtype=np.uint64)
        return sums[:, 0], sums[:, 1]

    def _sample(
        self, launched: _Launched, results: Ints, sampled: Ints, lengths: Ints, sums: Words, deferred: NDArray[np.bool_]
    ) -> None:
        """Draw one token a row, write it back to the slot unless the host samples, and put the result word out."""
        plan, slots = launched.plan, self._slots
        live = ~slots.done[sampled]
        if launched.is_racing:
            sums = _mix(sums)
        tokens = _draw(sums, slots.seed[sampled], lengths, self._counts[sampled], self._info.vocab_size)
        tokens, ends = slots.settle(sampled, lengths, tokens)
        planted = self._faults.rows.get(plan.step)
        invalid = np.isin(results, planted) & live if planted else np.zeros(len(results), np.bool_)
        flags = np.where(invalid, FLAG_INVALID, np.where(ends | ~live, FLAG_DONE, 0))
        writes = live & ~invalid & ~deferred[results]
        written, new_tokens = sampled[writes], tokens[writes]
        slots.last_token[written] = new_tokens
        slots.position[written] = lengths[writes]
        slots.done[written] = ends[writes]
        slots.done[sampled[invalid]] = True
        counted = live & ~invalid & self._counting[sampled]
        self._counts[sampled[counted]] += _mix(tokens[counted].astype(np.uint64) + _OUTPUT)
        launched.ring_words[results] = (int(plan.step) << 40) | (flags << 32) | tokens

    def _run_padding(self, launched: _Launched) -> None:
        """The planted fault: done rows, and what an earlier plan left in the padding, advance their slots."""
        slots, block_size = self._slots, self._info.block_size
        staging, num_rows = launched.staging, len(launched.plan.rows)
        padded = np.unique(staging.rows[num_rows : -(-num_rows // _GRAPH_ROWS) * _GRAPH_ROWS, 0])
        idle = np.unique(np.concatenate([padded, staging.rows[:num_rows, 0][slots.done[staging.rows[:num_rows, 0]]]]))
        positions, tokens = slots.position[idle], slots.last_token[idle]
        indices = np.minimum(positions // block_size, slots.blocks.shape[1] - 1)
        words = _cells(positions, tokens)
        self._cells[slots.blocks[idle, indices], positions % block_size] = words[:, None]
        slots.last_token[idle] = (words % np.uint64(self._info.vocab_size)).astype(np.int64)
        slots.position[idle] += 1
