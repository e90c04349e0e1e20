"""Shipped fakes: a clock, a completion, a tokenizer and two devices that a test controls. No torch.

``ScriptedRunner`` says what a test tells it to, when the test lets it. ``MemoryRunner`` is a device without arithmetic:
it has blocks, a slot table, staging buffers and a result ring, and makes each token from everything that it reads, so
that a stale or foreign read changes the output.
"""

import asyncio
import codecs
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from aserve.core.ids import NO_STEP, TRASH_BLOCK, StepNumber
from aserve.core.plan import FLAG_DONE, FLAG_INVALID, BatchPlan, BatchResult, Logprobs
from aserve.core.request import MAX_STOP_IDS
from aserve.engine.ports import RunnerInfo
from aserve.errors import DeviceLost

Ints = NDArray[np.int64]
Words = NDArray[np.uint64]


class ManualClock:
    """Seconds that pass only when told to. Call it for the time."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def __call__(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError("a monotonic clock does not go back")
        self._now_s += seconds


class ManualEvent:
    """The flight of a step that completes when, and in the order in which, somebody says so.

    Awaiting it any number of times gives the same result or raises the same fault; cancelling an await leaves it alone.
    """

    def __init__(self, step: StepNumber = NO_STEP) -> None:
        self.step = step
        self._done = False
        self._result: BatchResult | None = None
        self._error: BaseException | None = None
        self._waiters: list[asyncio.Future[None]] = []

    def done(self) -> bool:
        return self._done

    def set(self, result: BatchResult | None = None) -> None:
        """Complete; wakes whoever awaits. Completing twice is a fault of the test."""
        self._complete(result, None)

    def fail(self, error: BaseException) -> None:
        """Complete with a fault that every await raises."""
        self._complete(None, error)

    def result(self) -> BatchResult:
        """The outcome without waiting: the result, or the fault raised."""
        assert self._done, f"step {self.step} has not completed"
        if self._error is not None:
            raise self._error
        return cast(BatchResult, self._result)

    def __await__(self) -> Generator[Any, None, BatchResult]:
        if not self._done:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            try:
                yield from waiter
            finally:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)
        return self.result()

    def _complete(self, result: BatchResult | None, error: BaseException | None) -> None:
        assert not self._done, f"step {self.step} completed twice"
        self._done, self._result, self._error = True, result, error
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()


# --- text


class _ByteDecoder:
    """Bytes to text, incrementally: an incomplete UTF-8 character is held back, an invalid byte becomes U+FFFD."""

    def __init__(self, specials: dict[int, str], *, skip_special_tokens: bool) -> None:
        self._specials = specials
        self._skip = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        if token < 256:
            return self._utf8.decode(bytes((token,)))
        if self._skip or token not in self._specials:
            return ""
        return self._utf8.decode(b"", True) + self._specials[token]

    def finish(self) -> str:
        return self._utf8.decode(b"", True)


class ByteTokenizer:
    """One token a byte of UTF-8, then <|bos|> (256) and <|eos|> (257)."""

    BOS: Final = 256
    EOS: Final = 257
    _specials: Final = {BOS: "<|bos|>", EOS: "<|eos|>"}

    @property
    def vocab_size(self) -> int:
        return 258

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return (self.EOS,)

    @property
    def bos_id(self) -> int | None:
        return self.BOS

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]:
        tokens = [self.BOS] if add_special_tokens else []
        if not parse_special:
            return tokens + list(text.encode())
        while text:
            start, special = min(
                ((text.find(name), token) for token, name in self._specials.items() if name in text),
                default=(len(text), None),
            )
            tokens += text[:start].encode()
            if special is None:
                break
            tokens.append(special)
            text = text[start + len(self._specials[special]) :]
        return tokens

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        decoder = self.decoder(skip_special_tokens=skip_special_tokens)
        return "".join(map(decoder.push, tokens)) + decoder.finish()

    def token_bytes(self, token: int) -> bytes:
        if 0 <= token < 256:
            return bytes((token,))
        return self._specials.get(token, "").encode()

    def decoder(self, *, skip_special_tokens: bool = True) -> _ByteDecoder:
        return _ByteDecoder(self._specials, skip_special_tokens=skip_special_tokens)


# --- what both devices share


class _SlotTable:
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
            self.seed[slot] = join.seed & _MASK_64
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


def _listed_slots(plan: BatchPlan) -> Ints:
    """Slots of all rows and chunks."""
    return np.array([*plan.rows[:, 0], *(chunk.slot for chunk in plan.chunks)], np.int64)


def _fake_logprobs(tokens: NDArray[Any], k: int, vocab_size: int) -> Logprobs:
    """A distribution in which the token is the likeliest and its successors follow."""
    steps = np.arange(max(k, 0))
    token_logprobs = (-(tokens % 7 + 1) / 8).astype(np.float32)
    return Logprobs(
        token_logprobs=token_logprobs,
        ranks=np.ones(len(tokens), np.int32),
        top_ids=((tokens[:, None] + steps) % vocab_size).astype(np.int32),
        top_logprobs=(token_logprobs[:, None] - steps / 2).astype(np.float32),
    )


def _result(
    plan: BatchPlan, tokens: NDArray[Any], num_tokens: NDArray[Any], flags: NDArray[Any], vocab_size: int
) -> BatchResult:
    """The step's result, with made-up log-probabilities where the plan asks for them."""
    prompt_logprobs = tuple(
        (
            index,
            _fake_logprobs(
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
        logprobs=_fake_logprobs(tokens, plan.logprobs_k, vocab_size) if plan.logprobs_k >= 0 else None,
        prompt_logprobs=prompt_logprobs,
    )


class _Faults:
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


# --- a device that follows a script

Script = Sequence[int] | Callable[[NDArray[np.int32], int], int]
"""Output token i is item i (from the start again at its end), or what the function makes of (context, i)."""


class ScriptedRunner:
    """A device whose tokens, times and faults a test decides.

    script: see ``Script``; a function may raise, which fails the step, and an id outside the vocabulary makes its row
    invalid. step_time_s: how long a step takes, or a function of its plan; steps run one after another, and 0 lands on
    the loop's next tick.
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
        self._info = RunnerInfo(
            model_name="scripted",
            device="script",
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            eos_ids=eos_ids,
        )
        self._script: Script = script if callable(script) else np.array(list(script), np.int64)  # type: ignore[assignment]
        self._step_time_s = step_time_s
        self.log: deque[BatchPlan] = deque(maxlen=log_steps)
        self.closed = False
        self._faults = _Faults()
        self._slots = _SlotTable(self._info)
        self._context = np.zeros((max_num_seqs, max_model_len + 1), np.int32)
        self._block_tokens = np.zeros((num_blocks + 1, block_size), np.int32)
        self._flying: deque[tuple[ManualEvent, BatchResult | BaseException, float]] = deque()
        self._held = False
        self._timer: asyncio.Handle | None = None
        self._num_steps = 0
        self._num_tokens = 0

    @property
    def info(self) -> RunnerInfo:
        return self._info

    @property
    def num_inflight(self) -> int:
        """Steps launched and not landed."""
        return len(self._flying)

    # --- faults and gates

    def fail_launch(self, step: int, error: BaseException) -> None:
        """The launch of that step raises."""
        self._faults.launches[step] = error

    def fail_step(self, step: int, error: BaseException) -> None:
        """That step lands with the fault; ``DeviceLost`` stays for every later one."""
        self._faults.steps[step] = error

    def invalidate(self, step: int, *rows: int) -> None:
        """Those rows of that step's result come back flagged, as NaN logits would."""
        self._faults.rows.setdefault(step, []).extend(rows)

    def hold(self) -> None:
        """Close the gate: from now on steps stay in flight."""
        self._held = True
        self._stop_timer()

    def release(self, num_steps: int = 1) -> None:
        """Land that many of the oldest steps at once, the gate stays closed."""
        for _ in range(num_steps):
            self._land(0)

    def release_step(self, step: int) -> None:
        """Land one step, older ones stay in flight: completions out of order."""
        self._land(next(i for i, (flight, _, _) in enumerate(self._flying) if flight.step == step))

    def resume(self) -> None:
        """Open the gate."""
        self._held = False
        self._start_timer()

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
            self._slots.done[_listed_slots(plan)] = True
        flight = ManualEvent(plan.step)
        step_time_s = self._step_time_s(plan) if callable(self._step_time_s) else self._step_time_s
        self._flying.append((flight, outcome, step_time_s))
        self._start_timer()
        return flight

    def statistics(self) -> dict[str, float]:
        return {"num_steps": self._num_steps, "num_tokens": self._num_tokens}

    async def aclose(self) -> None:
        """Lands whatever is in flight, held or not."""
        self._stop_timer()
        self.release(len(self._flying))
        self.closed = True

    # --- inside

    def _start_timer(self) -> None:
        if self._held or self._timer is not None or not self._flying:
            return
        loop, step_time_s = asyncio.get_running_loop(), self._flying[0][2]
        self._timer = loop.call_later(step_time_s, self._tick) if step_time_s else loop.call_soon(self._tick)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        self._timer = None
        self._land(0)
        while self._flying and not self._flying[0][2]:
            self._land(0)
        self._start_timer()

    def _land(self, index: int) -> None:
        flight, outcome, _ = self._flying[index]
        del self._flying[index]
        if isinstance(outcome, BatchResult):
            flight.set(outcome)
        else:
            flight.fail(outcome)

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
        return _result(plan, tokens, live, flags, self._info.vocab_size)

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


# --- a device made of memory

_MASK_64: Final = (1 << 64) - 1
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
    seeds = np.array([seed & _MASK_64], np.uint64)
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
class _Launched:
    """A step on its way. Written by the runner only."""

    plan: BatchPlan
    flight: ManualEvent
    rows_left: NDArray[np.bool_]
    chunks_left: NDArray[np.bool_]
    chunk_results: Ints
    words: NDArray[np.int64] | None = None
    error: BaseException | None = None
    reads: list[NDArray[Any]] = field(default_factory=list)
    writes: list[NDArray[Any]] = field(default_factory=list)


class MemoryRunner:
    """A device of simulated blocks, slot table, staging and result ring, on which the order of things shows.

    Each block has ``block_size`` cells of two words: the first says position and token, the second depends on every
    first word up to its position, as K/V of a deeper layer do. A step reads all cells of a row's context through the
    block table *when it executes*, and the token is a hash of what it read, of the seed, and of the counts where a
    penalty needs them; ``expected_tokens`` gives what must come out. The device takes every liberty that the ledger's
    fences allow:

    - joins and table writes reach the slot table when they are launched, ahead of steps that have not run;
    - leaves reach it as late as their step;
    - steps in flight that share no slot may run in any order (``execute(ahead=True)`` runs the newest first);
    - no row sees what another row of its step writes.

    With ``manual`` a test calls ``execute`` and ``land``; otherwise a launched step does both on the next tick. verify:
    raise AssertionError where host and device disagree (positions, tags of result words, unmapped blocks); turned off
    where a planted fault has to show in the output. record: keep the blocks that each step touched in ``accesses``.
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
        self._info = RunnerInfo(
            model_name="memory",
            device="memory",
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            eos_ids=eos_ids,
        )
        self.bugs = bugs or DeviceBugs()
        self.accesses: dict[int, tuple[Ints, Ints]] = {}
        self._manual = manual
        self._verify = verify
        self._record = record
        self._faults = _Faults()
        self._slots = _SlotTable(self._info)
        self._joined_by = np.zeros(max_num_seqs, np.int64)
        self._counts: Words = np.zeros(max_num_seqs, np.uint64)
        self._counting = np.zeros(max_num_seqs, np.bool_)
        # Content that no step wrote: a cell read before its time is as wrong as a foreign one.
        garbage = np.arange((num_blocks + 1) * block_size * 2, dtype=np.uint64)
        self._cells: Words = _mix(garbage + _LAYER).reshape(num_blocks + 1, block_size, 2)
        num_rows = max_num_seqs + _GRAPH_ROWS
        num_buffers = 1 if self.bugs.staging_reused else 2 * max_inflight
        self._staging = [_Staging(num_rows) for _ in range(num_buffers)]
        self._ring = np.zeros((2 * max_inflight, num_rows), np.int64)
        self._pending: deque[_Launched] = deque()
        self._ready: deque[_Launched] = deque()
        self._num_steps = 0

    @property
    def info(self) -> RunnerInfo:
        return self._info

    @property
    def num_launched(self) -> int:
        """Steps that have not executed."""
        return len(self._pending)

    @property
    def num_executed(self) -> int:
        """Steps that have executed and not landed."""
        return len(self._ready)

    # --- faults

    def fail_launch(self, step: int, error: BaseException) -> None:
        """The launch of that step raises and changes nothing."""
        self._faults.launches[step] = error

    def fail_step(self, step: int, error: BaseException) -> None:
        """That step lands with the fault: what of it had not run does not run, and the slots that it lists are dead."""
        self._faults.steps[step] = error

    def invalidate(self, step: int, *rows: int) -> None:
        """Those rows of that step's result come back flagged, as NaN logits would."""
        self._faults.rows.setdefault(step, []).extend(rows)

    # --- the Runner protocol

    def launch(self, plan: BatchPlan) -> ManualEvent:
        self._faults.check_launch(plan.step)
        self._num_steps += 1
        self._join(plan)
        self._staging[plan.step % len(self._staging)].write(plan)
        results = np.cumsum([chunk.last for chunk in plan.chunks], dtype=np.int64) - 1 + len(plan.rows)
        launched = _Launched(
            plan=plan,
            flight=ManualEvent(plan.step),
            rows_left=np.ones(len(plan.rows), np.bool_),
            chunks_left=np.ones(len(plan.chunks), np.bool_),
            chunk_results=np.where([chunk.last for chunk in plan.chunks], results, -1),
        )
        if self.bugs.stale_result_words:
            launched.words = self._ring[plan.step % len(self._ring), : plan.num_sampled].copy()
        self._pending.append(launched)
        if not self._manual:
            asyncio.get_running_loop().call_soon(self._run_oldest)
        return launched.flight

    def statistics(self) -> dict[str, float]:
        return {"num_steps": self._num_steps}

    async def aclose(self) -> None:
        while self._pending or self._ready:
            self._run_oldest()

    # --- the test's hands

    def execute(self, *, ahead: bool = False) -> None:
        """Run the oldest step that has not run. ``ahead``: newer steps first, as far as slots allow."""
        left: list[tuple[_Launched, NDArray[np.bool_], NDArray[np.bool_]]] = []
        busy = np.zeros(self._info.max_num_seqs, np.bool_)
        for launched in self._pending if ahead else [self._pending[0]]:
            staging = self._staging[launched.plan.step % len(self._staging)]
            row_slots = staging.rows[: len(launched.rows_left), 0]
            chunk_slots = staging.chunks[: len(launched.chunks_left), 0]
            left.append((launched, launched.rows_left & ~busy[row_slots], launched.chunks_left & ~busy[chunk_slots]))
            busy[row_slots[launched.rows_left]] = True
            busy[chunk_slots[launched.chunks_left]] = True
            if launched.plan.step in self._faults.steps:
                # The fault may need slots of this step, so nothing behind it runs before it.
                break
        for launched, rows, chunks in reversed(left):
            if launched is self._pending[0]:
                self._finish_step(launched, rows, chunks)
            elif launched.plan.step not in self._faults.steps:
                self._run(launched, rows, chunks)
        self._ready.append(self._pending.popleft())

    def land(self) -> ManualEvent:
        """Complete the flight of the oldest executed step and return it."""
        launched = self._ready.popleft()
        if launched.error is not None:
            launched.flight.fail(launched.error)
            return launched.flight
        plan = launched.plan
        words = launched.words
        if words is None:
            words = self._ring[plan.step % len(self._ring), : plan.num_sampled]
        if self._verify:
            assert np.all(words >> 40 == plan.step), f"a result word of step {plan.step} is of another step"
        flags = (words >> 32) & 0xFF
        tokens = words & 0xFFFFFFFF
        launched.flight.set(_result(plan, tokens, np.ones(len(tokens)), flags, self._info.vocab_size))
        return launched.flight

    # --- inside

    def _run_oldest(self) -> None:
        if self._pending:
            self.execute()
        if self._ready:
            self.land()

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
                self._run_padding(plan)
        else:
            listed = _listed_slots(plan)
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
        plan, slots, block_size = launched.plan, self._slots, self._info.block_size
        staging = self._staging[plan.step % len(self._staging)]
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
        self._ring[plan.step % len(self._ring), results] = (int(plan.step) << 40) | (flags << 32) | tokens

    def _run_padding(self, plan: BatchPlan) -> None:
        """The planted fault: done rows, and what an earlier plan left in the padding, advance their slots."""
        slots, block_size = self._slots, self._info.block_size
        staging = self._staging[plan.step % len(self._staging)]
        num_rows = len(plan.rows)
        padded = np.unique(staging.rows[num_rows : -(-num_rows // _GRAPH_ROWS) * _GRAPH_ROWS, 0])
        idle = np.unique(np.concatenate([padded, staging.rows[:num_rows, 0][slots.done[staging.rows[:num_rows, 0]]]]))
        positions, tokens = slots.position[idle], slots.last_token[idle]
        indices = np.minimum(positions // block_size, slots.blocks.shape[1] - 1)
        words = _cells(positions, tokens)
        self._cells[slots.blocks[idle, indices], positions % block_size] = words[:, None]
        slots.last_token[idle] = (words % np.uint64(self._info.vocab_size)).astype(np.int64)
        slots.position[idle] += 1
