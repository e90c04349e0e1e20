"""Two requests with real streams, ten things that can happen to them, and what their readers must have got.

In a ``StreamRace`` A decodes, B is in its prompt and C waits for a slot. The device is held: the test says which step
completes. Each event has one meaning:

- ``land X``: the device completes a step that lists X, the oldest, or the newest with everything before it still in
  flight. (A ``MemoryRunner`` completes steps in their order only: those before it complete, too.)
- ``abort X``: ``Engine.abort``.
- ``disconnect X``: the stream is closed while its reader waits.
- ``preempt X``: the scheduler's own ``preempt``.
- ``finish X``: X ends by itself with its next token: the next one delivered completes a stop string, or the next one
  launched is the end of sequence.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any, Final, Protocol
from zlib import crc32

import numpy as np
from engine_builders import end, read, request, tokens
from numpy.typing import NDArray

from aserve.core.ids import SequenceId
from aserve.core.leaving import preempt
from aserve.core.request import FinishReason
from aserve.core.transitions import SequenceState
from aserve.engine.engine import Engine
from aserve.engine.generation import Delta
from aserve.engine.ports import NullObserver, StepLaunch, TextDecoder
from aserve.engine.stream import TokenStream
from aserve.testing import ByteTokenizer, MemoryRunner, ScriptedRunner, expected_tokens

Case = tuple[str, ...]

EVENTS: Final = tuple(f"{what} {who}" for who in "AB" for what in ("land", "abort", "disconnect", "preempt", "finish"))
CASES: Final[list[Case]] = [case for length in (1, 2) for case in permutations(EVENTS, length)]
PROMPTS: Final = {"A": "aaaA", "B": "aaaaB", "C": "aaC"}
"""The last byte says whose it is, the first block is everybody's."""
MAX_TOKENS: Final = {"A": 8, "B": 6, "C": 2}
STOP: Final = "the end"
_RUNNING = (SequenceState.PREFILLING, SequenceState.DECODING)


@dataclass(slots=True, eq=False)
class Ends:
    """Who was asked to finish, and the output index of the last token where it is known.

    on_stop: called with the name before its stop string is delivered.
    """

    asked: set[str] = field(default_factory=set)
    at: dict[str, int] = field(default_factory=dict)
    on_stop: Callable[[str], None] = lambda name: None

    def is_last(self, name: str, index: int) -> bool:
        if name in self.asked:
            self.at.setdefault(name, index)
        return self.at.get(name) == index


def _hash(context: NDArray[np.int32]) -> int:
    """A letter that depends on the whole context."""
    return ord("a") + crc32(context.astype(np.int32).tobytes()) % 26


def script(ends: Ends, names: str) -> Callable[[NDArray[np.int32], int], int]:
    """A letter from everything before it; ``names`` end by their end of sequence."""

    def next_token(context: NDArray[np.int32], index: int) -> int:
        name = chr(context[len(context) - index - 1])
        return ByteTokenizer.EOS if name in names and ends.is_last(name, index) else _hash(context)

    return next_token


def scripted_alone(name: str, *_: Any) -> list[int]:
    """What the script makes of a prompt that nobody asks to finish."""
    context = list(PROMPTS[name].encode())
    for _ in range(MAX_TOKENS[name]):
        context.append(_hash(np.array(context)))
    return context[len(PROMPTS[name]) :]


def memory_alone(name: str, engine: Engine, sequence: SequenceId) -> list[int]:
    prompt = list(PROMPTS[name].encode())
    seed = engine.scheduler.sequences[sequence].spec.seed
    return expected_tokens(prompt, MAX_TOKENS[name], vocab_size=engine.info.vocab_size, seed=seed)


class StopTokenizer(ByteTokenizer):
    """Its first decoder is that of the first of ``names``, and so on; their last token reads as the stop string."""

    def __init__(self, ends: Ends, names: str) -> None:
        self._ends = ends
        self._names = names
        self._owners = iter(PROMPTS)

    def decoder(self, *, skip_special_tokens: bool = True) -> TextDecoder:  # type: ignore[override]
        inner = super().decoder(skip_special_tokens=skip_special_tokens)
        name = next(self._owners)
        return _StopDecoder(inner, self._ends, name) if name in self._names else inner


class _StopDecoder:
    def __init__(self, inner: TextDecoder, ends: Ends, name: str) -> None:
        self._inner = inner
        self._ends = ends
        self._name = name
        self._num_pushed = 0

    def push(self, token: int) -> str:
        self._num_pushed += 1
        text = self._inner.push(token)
        if not self._ends.is_last(self._name, self._num_pushed - 1):
            return text
        self._ends.on_stop(self._name)
        return STOP

    def finish(self) -> str:
        return self._inner.finish()


class Hands(Protocol):
    """The test's hands on a device."""

    def complete(self, step: int) -> None: ...

    async def let_go(self, engine: Engine) -> None:
        """Complete what is in flight and whatever comes, until the engine has nothing left to do."""
        ...


class ScriptedHands:
    """turn_s: how long a turn of the loop is to wait for what is left."""

    def __init__(self, runner: ScriptedRunner, *, turn_s: float = 0.0) -> None:
        self._runner = runner
        self._turn_s = turn_s
        runner.hold()

    def complete(self, step: int) -> None:
        self._runner.release_step(step)

    async def let_go(self, engine: Engine) -> None:
        self._runner.resume()
        while not engine.scheduler.is_idle and engine.health().alive:  # noqa: ASYNC110  # a state that nobody announces
            await asyncio.sleep(self._turn_s)


class MemoryHands:
    def __init__(self, runner: MemoryRunner) -> None:
        self._runner = runner

    def complete(self, step: int) -> None:
        while True:
            self._runner.execute(ahead=True)
            if self._runner.land().step == step:
                return

    async def let_go(self, engine: Engine) -> None:
        while not engine.scheduler.is_idle and engine.health().alive:
            if self._runner.num_launched:
                self._runner.execute(ahead=True)
                self._runner.land()
            await asyncio.sleep(0)


class Launches(NullObserver):
    """Which sequences each step lists."""

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self.listed: dict[int, set[SequenceId]] = {}

    def step_launched(self, launch: StepLaunch) -> None:
        assert self.engine is not None
        step = self.engine.scheduler.inflight.get(launch.step)  # type: ignore[arg-type]
        self.listed[launch.step] = {sequence.id for sequence in step.sequences()}


async def turn(times: int = 12) -> None:
    for _ in range(times):
        await asyncio.sleep(0)


class StreamRace:
    """alone(name, engine, sequence): what a sequence yields alone, to its length limit.

    takes_newest: ``land`` completes the newest step in place of the oldest.
    """

    def __init__(
        self,
        engine: Engine,
        hands: Hands,
        ends: Ends,
        launches: Launches,
        alone: Callable[[str, Engine, SequenceId], list[int]],
        *,
        takes_newest: bool = False,
    ) -> None:
        self._engine = engine
        self._hands = hands
        self._ends = ends
        self._launches = launches
        self._takes_newest = takes_newest
        launches.engine = engine
        ends.on_stop = self._note_gone
        self._streams: dict[str, TokenStream] = {}
        self._ids: dict[str, SequenceId] = {}
        self._alone: dict[str, list[int]] = {}
        for name, prompt in PROMPTS.items():
            self._streams[name] = engine.submit_nowait(request(prompt, max_tokens=MAX_TOKENS[name], stop=(STOP,)))
            self._ids[name] = max(engine.scheduler.sequences)
            self._alone[name] = alone(name, engine, self._ids[name])
        self._readers = {name: asyncio.create_task(read(stream)) for name, stream in self._streams.items()}
        self._completed: set[int] = set()
        self._gone_since: dict[str, int] = {}  # the newest step when it was aborted, closed or found to have stopped
        self._aborted: set[str] = set()
        self._closed: set[str] = set()
        self._may_be_late: set[str] = set()  # aborted when its own end was on its way

    async def start(self) -> None:
        """Until the first step has landed and what is due then is in flight."""
        await turn()
        self._complete(min(self._launches.listed))
        await turn()

    def happen(self, event: str) -> None:
        what, name = event.split()
        match what:
            case "land":
                steps = [s for s in self._launches.listed if s not in self._completed and self._lists(s, name)]
                if steps:
                    self._complete(max(steps) if self._takes_newest else min(steps))
            case "abort":
                is_over = self._is_over(name)
                if self._engine.abort(self._streams[name].request_id):
                    self._note_gone(name)
                    self._aborted.add(name)
                    if is_over or name in self._ends.asked:
                        self._may_be_late.add(name)
            case "disconnect":
                if not self._streams[name].finished:
                    self._closed.add(name)
                    self._note_gone(name)
                self._streams[name].close()
            case "preempt":
                sequence = self._engine.scheduler.sequences.get(self._ids[name])
                if sequence is not None and sequence.state in _RUNNING:
                    preempt(self._engine.scheduler, sequence, 0.0, [])
            case "finish":
                self._ends.asked.add(name)

    async def verify(self) -> None:
        """Let everything end; each reader got its own tokens, all of them where it should, and one end."""
        await self._hands.let_go(self._engine)
        await turn()
        assert self._engine.health().alive, self._engine.health().reason
        for name, reader in self._readers.items():
            assert reader.done(), f"{name} was not told its end"
            self._verify_stream(name, reader.result())
        for name, newest in self._gone_since.items():
            later = [step for step in self._launches.listed if step > newest and self._lists(step, name)]
            assert later == [], f"{name} is gone since step {newest}, and in steps {later}"
        self._engine.flush_prefix_cache()
        statistics = self._engine.statistics()
        assert statistics.num_blocks_free == statistics.num_blocks
        assert statistics.num_inflight_steps == 0

    # --- inside

    def _lists(self, step: int, name: str) -> bool:
        return self._ids[name] in self._launches.listed[step]

    def _complete(self, step: int) -> None:
        self._completed |= {step} if isinstance(self._hands, ScriptedHands) else set(range(step + 1))
        self._hands.complete(step)

    def _is_over(self, name: str) -> bool:
        sequence = self._engine.scheduler.sequences.get(self._ids[name])
        return sequence is None or sequence.is_over

    def _note_gone(self, name: str) -> None:
        self._gone_since.setdefault(name, self._engine.scheduler.newest_step)

    def _verify_stream(self, name: str, deltas: list[Delta]) -> None:
        stream, got = self._streams[name], tokens(deltas)
        expected, reason = self._alone[name], FinishReason.LENGTH
        if (last := self._ends.at.get(name)) is not None:
            expected, reason = expected[: last + 1], FinishReason.STOP
            if got and got[-1] == ByteTokenizer.EOS:
                expected[last] = ByteTokenizer.EOS
        assert got == expected[: len(got)], f"{name} got {got}, not {expected}"
        assert stream.next_nowait() == []
        if name in self._closed:
            assert [delta for delta in deltas if delta.finish] == [], f"{name} was told an end after it had left"
            return
        assert stream.usage.completion_tokens == len(got)
        finish = end(deltas).finish
        if name in self._aborted and (finish == FinishReason.ABORT or name not in self._may_be_late):
            assert finish == FinishReason.ABORT, f"{name} ended in {finish} though it was aborted"
        else:
            assert finish == reason, f"{name} ended in {finish}, not {reason}"
            assert got == expected, f"{name} got {got}, not {expected}"
