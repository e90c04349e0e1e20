"""Builders for the tests of the core: a ``World`` of one scheduler and one ``MemoryRunner``, without asyncio.

The naive model that everything is held against is ``expected_tokens``: what a sequence outputs alone.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from aserve.core.actions import DeliverPromptLogprobs, DeliverTokens, Finish, Launch, NoteRequeue, StartPrefill
from aserve.core.events import (
    CacheFlushed,
    Event,
    LaunchFailed,
    LaunchPossible,
    ReaderCaughtUp,
    ReaderStalled,
    SequenceEnded,
    SequenceSubmitted,
    StepFailed,
    StepLanded,
    StepLaunched,
    StopMatched,
)
from aserve.core.ids import BlockId, SequenceId, StepNumber
from aserve.core.invariants import check
from aserve.core.options import SchedulerOptions
from aserve.core.plan import BatchPlan
from aserve.core.request import FinishReason, SamplingParams, SequenceSpec
from aserve.core.scheduler import Scheduler
from aserve.core.transitions import BlockState, SequenceState
from aserve.testing import DeviceBugs, MemoryRunner, expected_tokens

NORMAL = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(slots=True, eq=False)
class Told:
    """What the scheduler said about one sequence, and what it should have said."""

    spec: SequenceSpec
    expected: list[int]
    output: list[int] = field(default_factory=list)
    finish: Finish | None = None
    starts: list[StartPrefill] = field(default_factory=list)
    requeues: list[float] = field(default_factory=list)
    prompt_logprobs: list[tuple[int, int]] = field(default_factory=list)
    matched: int | None = None
    """Output index at which a stop string was found."""

    @property
    def text(self) -> list[int]:
        """The output up to a stop match: what the client gets."""
        return self.output if self.matched is None else self.output[: self.matched + 1]

    @property
    def is_right(self) -> bool:
        """Whether every token is the one expected, and none is missing where the end is a normal one."""
        if self.output != self.expected[: len(self.output)]:
            return False
        whole = self.finish is not None and self.finish.reason in NORMAL and self.matched is None
        return not whole or len(self.output) == len(self.expected)


class World:
    """A scheduler, its device and what came out. Options are those of ``SchedulerOptions``; small by default.

    checked: recount everything after every event, and hold each executed step's reads and writes against the ledger.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_model_len: int | None = None,
        vocab_size: int = 32000,
        checked: bool = True,
        bugs: DeviceBugs | None = None,
        **options: object,
    ) -> None:
        self.options = SchedulerOptions(
            **{
                "max_num_seqs": 8,
                "max_num_batched_tokens": 64,
                "block_size": block_size,
                "policy": "eager",
                "watermark": 0.0,
                "check_invariants_every": int(checked),
                **options,
            }
        )
        self.max_model_len = max_model_len or num_blocks * block_size
        self.vocab_size = vocab_size
        self.checked = checked
        self.scheduler = Scheduler(
            self.options, num_blocks=num_blocks, max_model_len=self.max_model_len, vocab_size=vocab_size
        )
        self.runner = MemoryRunner(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=self.options.max_num_seqs,
            max_model_len=self.max_model_len,
            vocab_size=vocab_size,
            max_inflight=self.options.max_inflight,
            manual=True,
            verify=checked,
            record=checked,
            bugs=bugs,
        )
        self.plans: dict[int, BatchPlan] = {}
        self.told: dict[SequenceId, Told] = {}
        self.now = 0.0
        self._num_submitted = 0
        self._flying: list[tuple[StepNumber, int, bool]] = []
        self._generations: dict[int, np.ndarray] = {}

    # --- events

    def handle(self, event: Event) -> list[object]:
        self.now += 0.001
        actions = self.scheduler.handle(event, self.now)
        for action in actions:
            self._carry_out(action)
        if self.checked:
            check(self.scheduler)
        return actions

    def submit(
        self,
        prompt: Iterable[int] | int,
        max_tokens: int = 4,
        *,
        seed: int = 0,
        priority: int = 0,
        salt: str = "",
        leader: SequenceId | None = None,
        leads: bool = False,
        stop_at: int | None = None,
        **params: object,
    ) -> SequenceId:
        """A prompt, or the length of one that shares nothing with any other.

        stop_at: make the token expected at that output index a stop id.
        """
        self._num_submitted += 1
        ident = SequenceId(self._num_submitted)
        if isinstance(prompt, int):
            prompt = range(1000 * ident, 1000 * ident + prompt)
        tokens = np.array(list(prompt), np.int32)
        sampling = SamplingParams(max_tokens=max_tokens, **params)
        if stop_at is not None:
            sampling = replace(sampling, stop_token_ids=(self._expect(tokens, sampling, seed)[stop_at],))
        spec = SequenceSpec(
            id=ident,
            prompt=tokens,
            params=sampling,
            seed=seed,
            priority=priority,
            arrival_s=self.now,
            cache_salt=salt,
            leader=leader,
            leads=leads,
        )
        self.told[ident] = Told(spec, self._expect(tokens, sampling, seed))
        self.handle(SequenceSubmitted(spec))
        return ident

    def end(self, ident: SequenceId, reason: FinishReason = FinishReason.ABORT) -> None:
        self.handle(SequenceEnded(ident, reason))

    def match_stop(self, ident: SequenceId, index: int) -> None:
        """Delivery found a stop string that ends with output token ``index``."""
        if (told := self.told[ident]).finish is None:
            told.matched = index
        self.handle(StopMatched(ident, index))

    def stall(self, ident: SequenceId) -> None:
        self.handle(ReaderStalled(ident))

    def catch_up(self, ident: SequenceId) -> None:
        self.handle(ReaderCaughtUp(ident))

    def flush(self) -> None:
        self.handle(CacheFlushed())

    def launch(self) -> BatchPlan | None:
        """The plan that was launched (or whose launch failed), or None if nothing was due."""
        num_steps = self.scheduler.counters.num_steps
        self.handle(LaunchPossible())
        newest = self.scheduler.counters.num_steps
        return self.plans[newest] if newest > num_steps else None

    def execute(self, *, ahead: bool = False, stream: int | None = None) -> None:
        """Run the oldest step that has not run; with ``ahead`` as much of the newer ones before it as slots allow."""
        self.runner.execute(ahead=ahead, stream=stream)
        if self.checked:
            self._check_accesses()

    def land(self, *, stream: int | None = None) -> None:
        """Land the oldest step, of all or of a stream, executing what has to be."""
        flying = next(each for each in self._flying if stream in (None, each[1]))
        self._flying.remove(flying)
        step, stream, reached_device = flying
        if not reached_device:
            self.handle(StepFailed(step, "not launched"))
            return
        if not self.runner.num_executed_on(stream):
            self.execute(stream=stream)
        flight = self.runner.land(stream=stream)
        assert flight.step == step
        try:
            result = flight.result()
        except MemoryError as error:
            self.handle(StepFailed(step, str(error)))
        else:
            self.handle(StepLanded(result))

    def step(self) -> BatchPlan | None:
        """Launch one step and land it."""
        plan = self.launch()
        if plan is not None:
            self.land()
        return plan

    def run(self, *, depth: int = 1, max_steps: int = 10_000) -> None:
        """Launch and land, ``depth`` steps in flight, until everything is over. A deadlock fails the test."""
        for _ in range(max_steps):
            while self.num_inflight < depth and self.launch() is not None:
                pass
            if not self.num_inflight:
                break
            self.land()
        assert self.scheduler.is_idle, "no progress: sequences wait and nothing can be launched"
        check(self.scheduler)

    # --- looking

    def reasons(self) -> list[FinishReason | None]:
        """How each sequence ended, in order of submission."""
        return [self.reason(ident) for ident in self.told]

    @property
    def num_inflight(self) -> int:
        return len(self._flying)

    @property
    def num_executable(self) -> int:
        return self.runner.num_launched

    @property
    def streams_inflight(self) -> list[int]:
        """Streams of steps that have not landed."""
        return sorted({stream for _, stream, _ in self._flying})

    @property
    def streams_executable(self) -> list[int]:
        return [stream for stream in self.scheduler.streams if self.runner.num_launched_on(stream)]

    @property
    def live(self) -> list[SequenceId]:
        return [ident for ident, told in self.told.items() if told.finish is None]

    def output(self, ident: SequenceId) -> list[int]:
        return self.told[ident].output

    def expected(self, ident: SequenceId) -> list[int]:
        return self.told[ident].expected

    def reason(self, ident: SequenceId) -> FinishReason | None:
        finish = self.told[ident].finish
        return finish.reason if finish is not None else None

    def state(self, ident: SequenceId) -> SequenceState | None:
        sequence = self.scheduler.sequences.get(ident)
        return sequence.state if sequence is not None else None

    def cached_tokens(self, ident: SequenceId) -> list[int]:
        """Prompt tokens taken from the cache at each start."""
        return [start.cached_tokens for start in self.told[ident].starts]

    def blocks(self, state: BlockState) -> list[BlockId]:
        ledger = self.scheduler.ledger
        return [BlockId(b) for b in range(1, ledger.num_blocks + 1) if ledger.state(BlockId(b)) is state]

    def wrong(self) -> list[SequenceId]:
        """Sequences with a token that is not the one expected, or too few of them."""
        return [ident for ident, told in self.told.items() if not told.is_right]

    def slots_of(self, plan: BatchPlan | None) -> tuple[list[int], list[tuple[int, int, int]]]:
        """Of a plan: slots of its rows; (slot, start, number of tokens) of its chunks."""
        assert plan is not None, "nothing was launched"
        return plan.rows[:, 0].tolist(), [(c.slot, c.start, len(c.tokens)) for c in plan.chunks]

    def listed(self, plan: BatchPlan | None) -> list[SequenceId]:
        """The sequences of a plan still in flight, rows first."""
        assert plan is not None, "nothing was launched"
        record = self.scheduler.inflight.get(plan.step)
        return record.rows.idents[: len(plan.rows)] + [s.id for s in record.chunks]

    # --- inside

    def _expect(self, prompt: np.ndarray, params: SamplingParams, seed: int) -> list[int]:
        return expected_tokens(
            prompt,
            params.max_tokens,
            vocab_size=self.vocab_size,
            seed=seed,
            stop_ids=params.stop_token_ids,
            min_tokens=params.min_tokens,
            needs_history=params.needs_history,
        )

    def _carry_out(self, action: object) -> None:
        match action:
            case Launch(plan):
                self._launch(plan)
            case StartPrefill(ident):
                self.told[ident].starts.append(action)
            case NoteRequeue(ident, at_s):
                self.told[ident].requeues.append(at_s)
            case DeliverTokens(_, sequences, tokens):
                for ident, token in zip(sequences, tokens, strict=True):
                    assert self.told[ident].finish is None, f"sequence {ident} got a token after its end"
                    self.told[ident].output.append(token)
            case DeliverPromptLogprobs(ident, first, logprobs):
                self.told[ident].prompt_logprobs.append((first, len(logprobs.token_logprobs)))
            case Finish(ident):
                assert self.told[ident].finish is None, f"sequence {ident} ended twice"
                self.told[ident].finish = action

    def _launch(self, plan: BatchPlan) -> None:
        self.plans[plan.step] = plan
        for ident in self.listed(plan):
            assert self.told[ident].finish is None, f"step {plan.step} lists sequence {ident}, which is over"
        for (_, position), ident in zip(plan.rows.tolist(), self.listed(plan), strict=False):
            spec = self.told[ident].spec
            longest = len(spec.prompt) + spec.params.max_tokens
            assert position + 2 <= longest, f"step {plan.step} samples beyond the length limit of sequence {ident}"
        if self.checked:
            self._generations[plan.step] = self.scheduler.ledger.generation.copy()
        try:
            self.runner.launch(plan)
        except MemoryError as error:
            self._flying.append((plan.step, plan.stream, False))
            self.handle(LaunchFailed(plan.step, str(error)))
        else:
            self._flying.append((plan.step, plan.stream, True))
            self.scheduler.handle(StepLaunched(plan.step), self.now)

    def _check_accesses(self) -> None:
        """I8 of what the device touched just now: nothing handed out again or foreign, no shared block written."""
        step, (reads, writes) = self.runner.accesses.popitem()
        ledger, generations = self.scheduler.ledger, self._generations.pop(step)
        owned = {block for s in self.scheduler.inflight.get(StepNumber(step)).sequences() for block in s.blocks}
        touched = np.union1d(reads, writes)
        assert (ledger.generation[touched] == generations[touched]).all(), (
            f"step {step} touched a block of somebody else"
        )
        for block in reads.tolist():
            state = ledger.state(BlockId(block))
            assert state is not BlockState.FREE, f"step {step} read free block {block}"
            assert state is not BlockState.WRITING or block in owned, (
                f"step {step} read block {block} while it is written"
            )
        for block in writes.tolist():
            state = ledger.state(BlockId(block))
            assert state in (BlockState.WRITING, BlockState.PENDING), (
                f"step {step} wrote block {block}, which is {state}"
            )
