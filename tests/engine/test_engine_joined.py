"""Steps whose tokens go out together, where the loop is busy: when they do, and that nothing of them is lost."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from engine_builders import read, request, running, text, tokens

from aserve.core.actions import DeliverTokens, Finish
from aserve.core.ids import SequenceId, StepNumber
from aserve.core.options import SchedulerOptions
from aserve.core.request import FinishReason
from aserve.engine import joining
from aserve.engine.deliver import Choice, Deliverable, Deliverer
from aserve.engine.engine import Engine
from aserve.engine.generation import Delta
from aserve.engine.joining import MIN_STREAMS, SHARE, Joining
from aserve.engine.options import EngineOptions
from aserve.engine.ports import NullObserver
from aserve.engine.stream import TokenStream
from aserve.errors import DeviceLost
from aserve.testing import ByteTokenizer, ScriptedRunner
from aserve.text.stops import StopMatcher

PERIOD_S = 1.0
MANY = 2 * MIN_STREAMS


class Owner:
    """Whom streams tell, and who does nothing."""

    def others_wait(self) -> bool:
        return False

    def stream_closed(self, stream: TokenStream) -> None: ...
    def stream_stalled(self, stream: TokenStream) -> None: ...
    def stream_caught_up(self, stream: TokenStream) -> None: ...
    def stream_given_up(self, stream: TokenStream) -> None: ...


class Gaps(NullObserver):
    """Keeps what delivery says of the times between tokens."""

    def __init__(self) -> None:
        self.gaps_s: list[float] = []

    def inter_token(self, seconds: float, num: int = 1) -> None:
        self.gaps_s += [seconds] * num


class Delivery:
    """A deliverer on a clock that every token moves on, with streams that have their first token; a step a period."""

    def __init__(self, *, num_streams: int = MANY, share: float, steps: int, stop: tuple[str, ...] = ()) -> None:
        self.now_s = 0.0
        self.cost_s = share * PERIOD_S / num_streams
        self.observer = Gaps()
        self.stopped: list[tuple[int, int]] = []
        self.deliverer = Deliverer(
            1000, steps, self.observer,
            on_stop=lambda sequence, index: self.stopped.append((sequence, index)),
            on_end=lambda choice, reason: None,
            clock=lambda: self.now_s,
        )  # fmt: skip
        self.sequences = [SequenceId(number) for number in range(1, num_streams + 1)]
        self.streams = {
            sequence: TokenStream(str(sequence), 1, EngineOptions(), owner=Owner(), now=0.0)
            for sequence in self.sequences
        }
        for sequence, stream in self.streams.items():
            self.deliverer.choices[sequence] = Choice(
                sequence=sequence, index=0, request=request(stop=stop), stream=stream, is_first=True, decoder=self,
                matcher=StopMatcher(stop) if stop else None, eos_ids=frozenset(), stop_ids=frozenset(), is_plain=True,
            )  # fmt: skip
        self._num_landed = 0

    def push(self, token: int) -> str:
        """As the decoder of all of them: letters, which take time."""
        self.now_s += self.cost_s
        return chr(token)

    def finish(self) -> str:
        return ""

    async def land(self, letter: str | None, **landing: Any) -> None:
        """``post`` a step a period after the last one; the deliverer does what it wants."""
        self._num_landed += 1
        self.now_s = self._num_landed * PERIOD_S
        self.post(letter, **landing)
        await self.turn()

    def post(
        self,
        letter: str | None,
        *,
        sequences: Sequence[SequenceId] | None = None,
        ends: Sequence[SequenceId] = (),
        is_next_short: bool = True,
    ) -> None:
        """A step lands that brings all sequences, or those that are named, a letter, and ends some."""
        named = list(self.sequences if sequences is None else sequences)
        actions: list[Deliverable] = []
        if letter is not None:
            step = StepNumber(self._num_landed)
            rows = list(range(len(named)))
            actions.append(DeliverTokens(step, named, [ord(letter)] * len(named), rows, len(named), None))
        actions += [Finish(sequence, FinishReason.LENGTH) for sequence in ends]
        self.deliverer.post_landing(actions, self.now_s, is_next_short=is_next_short)

    async def turn(self) -> None:
        for _ in range(4):
            await asyncio.sleep(0)

    def taken(self, sequence: int = 1) -> list[Delta]:
        return self.streams[SequenceId(sequence)].next_nowait()


@asynccontextmanager
async def delivering(
    *, num_streams: int = MANY, share: float = 2 * SHARE, steps: int = 2, stop: tuple[str, ...] = ()
) -> AsyncIterator[Delivery]:
    """A delivery that has seen two steps, "a" and "b", and knows what a token costs and how often steps land."""
    delivery = Delivery(num_streams=num_streams, share=share, steps=steps, stop=stop)
    task = asyncio.create_task(delivery.deliverer.run())
    try:
        await delivery.land("a", is_next_short=False)
        await delivery.land("b", is_next_short=False)
        for sequence in delivery.sequences:
            assert [delta.text for delta in delivery.taken(sequence)] == ["a", "b"]
        yield delivery
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_the_cost_of_a_token_is_that_of_one_that_is_written() -> None:
    """Those that leave their text to the next step are no measure."""
    async with delivering() as delivery:
        delivery.cost_s /= 100
        await delivery.land("c")
        delivery.post("d")
        delivery.cost_s *= 100
        await delivery.turn()
        joined = delivery.taken()
        await delivery.land("e")
        waiting = delivery.taken()

    assert ([delta.text for delta in joined], waiting) == (["cd"], [])


def few_streams() -> dict[str, int]:
    return {"num_streams": MIN_STREAMS - 1}


async def test_two_steps_go_out_together_where_delivery_takes_long() -> None:
    """The first waits, and comes with the second as one delta with the text and tokens of both."""
    async with delivering() as delivery:
        await delivery.land("c")
        waiting = delivery.taken()
        await delivery.land("d")
        both = delivery.taken()

    assert waiting == []
    assert [(delta.text, delta.tokens, delta.num_output) for delta in both] == [("cd", (ord("c"), ord("d")), 4)]


@pytest.mark.parametrize(
    ("share", "steps", "expected"), [(0.6, 3, 3), (0.6, 1, 1), (2.0, 2, 2), (0.3, 3, 2), (0.2, 3, 1)]
)
async def test_as_many_steps_wait_as_delivery_takes_quarters_of_the_time(
    share: float, steps: int, expected: int
) -> None:
    """Never more than the option allows."""
    async with delivering(share=share, steps=steps) as delivery:
        num_landed = 0
        while not (deltas := delivery.taken()):
            await delivery.land(chr(ord("c") + num_landed))
            num_landed += 1

    assert num_landed == expected
    assert [delta.text for delta in deltas] == ["cdefg"[:expected]]


@pytest.mark.parametrize(
    ("built", "landing"),
    [({}, {"is_next_short": False}), (few_streams(), {})],
    ids=["a prompt's step comes next", "few streams"],
)
async def test_a_step_does_not_wait(built: dict[str, int], landing: dict[str, bool]) -> None:
    """For a long step, or for the sake of a few streams."""
    async with delivering(**built) as delivery:  # type: ignore[arg-type]
        await delivery.land("c", **landing)  # type: ignore[arg-type]
        deltas = delivery.taken()

    assert [delta.text for delta in deltas] == ["c"]


async def test_a_landing_without_tokens_lets_out_what_waits() -> None:
    """A step whose rows were all over, or one that failed."""
    async with delivering() as delivery:
        await delivery.land("c")
        await delivery.land(None)
        deltas = delivery.taken()

    assert [delta.text for delta in deltas] == ["c"]


async def test_what_comes_from_elsewhere_lets_out_what_waits() -> None:
    """A sequence that ends between two landings is not kept, and its tokens come first."""
    async with delivering() as delivery:
        await delivery.land("c")
        delivery.deliverer.post(Finish(SequenceId(1), FinishReason.ABORT))
        await delivery.turn()
        deltas, others = delivery.taken(), delivery.taken(2)

    assert [(delta.text, delta.finish) for delta in deltas] == [("c", None), ("", FinishReason.ABORT)]
    assert [delta.text for delta in others] == ["c"]


async def test_one_that_ends_waits_with_the_others() -> None:
    """Its last token and its end go out with the next step, in which it has no token; the others' tokens are joined."""
    async with delivering() as delivery:
        await delivery.land("c", ends=[SequenceId(1)])
        waiting = delivery.taken()
        await delivery.land("d", sequences=delivery.sequences[1:])
        ended, others = delivery.taken(), delivery.taken(2)

    assert waiting == []
    assert (text(ended), tokens(ended)) == ("c", [ord("c")])
    assert [delta.finish for delta in ended] == [None, FinishReason.LENGTH]
    assert [delta.text for delta in others] == ["cd"]


async def test_what_the_loop_was_late_for_goes_out_at_once() -> None:
    """Steps that lie in the queue are joined, also where they would not have been made to wait: no more than allowed,
    or a loop that is always late would never write."""
    async with delivering(share=0.01, steps=3) as delivery:
        for letter in "cdefg":
            delivery.post(letter)
        await delivery.turn()
        deltas = delivery.taken()

    assert [(delta.text, delta.num_output) for delta in deltas] == [("cde", 5), ("fg", 7)]


@pytest.mark.parametrize("built", [{"steps": 1}, few_streams()], ids=["never, by the option", "few streams"])
async def test_what_the_loop_was_late_for_may_stay_apart(built: dict[str, int]) -> None:
    """A delta for each token."""
    async with delivering(**built) as delivery:  # type: ignore[arg-type]
        for letter in "cde":
            delivery.post(letter)
        await delivery.turn()
        deltas = delivery.taken()

    assert [delta.text for delta in deltas] == ["c", "d", "e"]


async def test_a_stop_string_in_the_first_of_two_joined_tokens_ends_it_there() -> None:
    """What came before it is text, the second token is not, and the scheduler is told of the first."""
    async with delivering(stop=("d",), steps=3) as delivery:
        for letter in "cde":
            delivery.post(letter)
        await delivery.turn()
        deltas = delivery.taken()

    assert (text(deltas), deltas[-1].finish, deltas[-1].stop_reason) == ("c", FinishReason.STOP, "d")
    assert tokens(deltas) == [ord("c"), ord("d")]
    assert delivery.stopped[0] == (1, 3)


async def test_text_that_waits_is_not_lost_where_a_decoder_fails() -> None:
    """The error comes with the text before it."""

    def fails_at(letter: str, push: Callable[[int], str]) -> Callable[[int], str]:
        def pushed(token: int) -> str:
            if chr(token) == letter:
                raise ValueError("no such token")
            return push(token)

        return pushed

    async with delivering() as delivery:
        delivery.push = fails_at("d", delivery.push)  # type: ignore[method-assign]
        await delivery.land("c")
        await delivery.land("d")
        deltas = delivery.taken()

    assert (text(deltas), deltas[-1].finish) == ("c", FinishReason.ERROR)


@pytest.mark.parametrize("steps", [2, 3])
async def test_times_between_tokens_are_shared_out(steps: int) -> None:
    """Tokens that came together count the same part of the time since the one before: the mean stays what it was."""
    async with delivering(share=0.9, steps=steps) as delivery:
        delivery.observer.gaps_s.clear()
        delivery.cost_s = 0.0
        for letter in "cde"[:steps]:
            await delivery.land(letter)
        gaps_s = delivery.observer.gaps_s

    assert gaps_s == [pytest.approx(PERIOD_S)] * steps * MANY


@pytest.mark.parametrize("is_next_short", [False, True], ids=["apart", "joined"])
async def test_tokens_travel_with_their_text(is_next_short: bool) -> None:
    """Where the second of two tokens is half a character, it stays behind with its half."""
    async with delivering() as delivery:
        push = delivery.push
        halves = {"d": "", "e": "(de)"}
        delivery.push = lambda token: halves.get(push(token), chr(token))  # type: ignore[method-assign]
        for letter in "cdef":
            await delivery.land(letter, is_next_short=is_next_short)
        await delivery.land("g", is_next_short=False)
        deltas = delivery.taken()

    assert "".join(delta.text for delta in deltas) == "c(de)fg"
    for delta in deltas:
        assert delta.text.strip("()").replace("(", "").replace(")", "") == "".join(map(chr, delta.tokens))
    assert [delta.num_output for delta in deltas] == [
        2 + sum(len(each.tokens) for each in deltas[: index + 1]) for index in range(len(deltas))
    ]


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps wait for one another wherever they may, however few streams there are; two of them are joined."""
    monkeypatch.setattr(joining, "MIN_STREAMS", 1)
    monkeypatch.setattr(Joining, "should_wait", lambda self, num_streams, num_queued: num_queued < 8)


@pytest.mark.usefixtures("always")
async def test_a_stream_is_the_same_text_in_fewer_deltas() -> None:
    """In a running engine: nothing waits for ever, the last tokens come with the end."""
    async with running(ScriptedRunner(b"abcdefgh")) as engine:
        deltas = await read(engine.submit_nowait(request(max_tokens=8)))

    assert (text(deltas), tokens(deltas)) == ("abcdefgh", list(b"abcdefgh"))
    assert max(len(delta.tokens) for delta in deltas) == 2


@pytest.mark.usefixtures("always")
async def test_tokens_do_not_wait_for_a_prompts_step() -> None:
    """Which may take long: they go out although it is on its way."""
    runner = ScriptedRunner(b"abcdefgh")
    async with running(runner, policy="overlap") as engine:
        runner.hold()
        stream = engine.submit_nowait(request(max_tokens=4))
        await turn()
        runner.release()  # the prompt
        await turn()
        other = engine.submit_nowait(request("another prompt", max_tokens=1))
        await turn()
        runner.release()  # a row, behind which another is out
        await turn()
        waiting = tokens(stream.next_nowait())
        runner.release()  # that one; what comes next holds the other's prompt
        await turn()
        got = tokens(stream.next_nowait())
        runner.resume()
        rest = await read(stream)
        await read(other)

    assert (waiting, got) == ([ord("a")], [ord("b"), ord("c")])
    assert text(rest) == "d"


@pytest.mark.usefixtures("always")
async def test_what_landed_comes_before_the_engines_death() -> None:
    """A token that waits for the next step is delivered when that step takes the device with it."""
    runner = ScriptedRunner(b"abcdefgh")
    runner.fail_step(3, DeviceLost("gone"))
    engine = Engine(runner, ByteTokenizer(), SchedulerOptions(max_num_seqs=4, block_size=runner.info.block_size))
    await engine.start()
    runner.hold()
    stream = engine.submit_nowait(request(max_tokens=8))
    await turn()
    for _ in range(2):
        runner.release()
        await turn()
    runner.release()
    deltas = await read(stream)
    await engine.aclose()

    assert (text(deltas), deltas[-1].finish) == ("ab", FinishReason.ERROR)


async def turn() -> None:
    for _ in range(20):
        await asyncio.sleep(0)
