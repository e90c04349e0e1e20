"""Races in the engine: {land, abort, disconnect, preempt, finish} x two requests, any two of the ten in any order.

Each pair happens in one tick of the loop with completions out of launch order, and with turns of the loop in between.
``engine_race_builders`` says what each event means. The core's races (``tests/core``) go to four events; here the
streams, the readers, the tasks in between and three devices are real.
"""

import asyncio
from typing import Any

import pytest
from engine_builders import running
from engine_race_builders import (
    CASES,
    Case,
    Ends,
    Launches,
    MemoryHands,
    ScriptedHands,
    StopTokenizer,
    StreamRace,
    memory_alone,
    script,
    scripted_alone,
)

from aserve.core.actions import DeliverTokens, Finish
from aserve.core.events import SequenceEnded
from aserve.core.request import FinishReason
from aserve.engine.deliver import Deliverer
from aserve.engine.engine import Engine
from aserve.testing import MemoryRunner, ScriptedRunner, StepCosts, VirtualAlarm, VirtualDevice, run_virtual

SIZES = {"max_num_seqs": 2, "num_blocks": 10, "block_size": 2, "max_model_len": 20}
OPTIONS = {"max_num_batched_tokens": 4, "max_inflight": 4, "watermark": 0.0}


async def play(case: Case, *, apart: bool, device: str, **options: Any) -> None:
    """One case on a new engine. A finishes by a stop string; B by an end of sequence, on a MemoryRunner as A does."""
    ends, launches = Ends(), Launches()
    match device:
        case "memory":
            runner = MemoryRunner(**SIZES, vocab_size=258, manual=True)
            hands, alone, names = MemoryHands(runner), memory_alone, "AB"
        case "scripted":
            runner = ScriptedRunner(script(ends, "B"), **SIZES)
            hands, alone, names = ScriptedHands(runner), scripted_alone, "A"
        case _:
            runner = VirtualDevice(StepCosts(fixed_s=0.004, row_s=0.0001), script=script(ends, "B"), **SIZES)
            hands, alone, names = ScriptedHands(runner, turn_s=0.001), scripted_alone, "A"
            options |= {"clock": asyncio.get_running_loop().time, "make_alarm": VirtualAlarm}
    tokenizer = StopTokenizer(ends, names)
    async with running(runner, tokenizer, observer=launches, **OPTIONS | options) as engine:
        race = StreamRace(engine, hands, ends, launches, alone, takes_newest=not apart)
        await race.start()
        for event in case:
            race.happen(event)
            if apart:
                await asyncio.sleep(0)
        await race.verify()


async def play_all(**options: Any) -> None:
    for apart in (False, True):
        for case in CASES:
            try:
                await play(case, apart=apart, **options)
            except Exception as error:
                error.add_note(f"{', '.join(case)}: {'apart' if apart else 'together'}, {options}")
                raise


@pytest.mark.parametrize(
    ("device", "policy", "prefill"),
    [
        ("scripted", "eager", "mixed"),
        ("scripted", "eager", "streams"),
        ("memory", "sync", "split"),
        ("memory", "eager", "mixed"),
    ],
)
async def test_any_two_events(device, policy, prefill):
    """Each reader gets its own tokens in order, and one end for the right reason; nothing is left behind."""
    await play_all(device=device, policy=policy, prefill=prefill)


@pytest.mark.parametrize("prefill", ["mixed", "streams"])
def test_any_two_events_on_the_virtual_device(prefill):
    """The same where steps take time, and the policy launches by it."""
    run_virtual(play_all(device="virtual", policy="late", prefill=prefill))


# --- planted faults


def tell_ends_first(monkeypatch):
    """An end goes to its stream past the tokens that are queued for it."""
    queue = Deliverer._queue

    def queue_or_end(deliverer, action):
        if not isinstance(action, Finish):
            return queue(deliverer, action)
        deliverer.deliver_now(action)
        return False

    monkeypatch.setattr(Deliverer, "_queue", queue_or_end)


def swap_tokens(monkeypatch):
    """Two rows of a landing change places on their way to the streams."""
    queue = Deliverer._queue

    def queue_swapped(deliverer, action):
        if isinstance(action, DeliverTokens):
            action.tokens.reverse()
        return queue(deliverer, action)

    monkeypatch.setattr(Deliverer, "_queue", queue_swapped)


def lose_rows_beside_a_first_token(monkeypatch):
    """Where a landing brings somebody's first token, that one alone is delivered."""
    take = Deliverer.take_first_tokens

    def take_and_lose(deliverer, parcel):
        rest = take(deliverer, parcel)
        return rest if rest is parcel else None

    monkeypatch.setattr(Deliverer, "take_first_tokens", take_and_lose)


def forget_to_abort_at_close(monkeypatch):
    """A reader leaves, and its request runs on."""

    def end_choices_only(engine, stream):
        for choice in [each for each in engine._deliverer.choices.values() if each.stream is stream]:
            engine._deliverer.end(choice, FinishReason.ABORT)

    monkeypatch.setattr(Engine, "stream_closed", end_choices_only)


def forget_to_stop(monkeypatch):
    """A stop string ends the stream, and its request runs on."""
    monkeypatch.setattr(Engine, "_on_stop_matched", lambda *args: None)


def tell_nobody_of_an_abort(monkeypatch):
    """An aborted request is gone, and its reader waits for ever."""

    def end_call(engine, call, reason, sentence):
        for sequence in call.sequences:
            engine.scheduler.handle(SequenceEnded(sequence, reason, sentence), 0.0)

    monkeypatch.setattr(Engine, "_end_call", end_call)


PLANTED = {
    "an end before its tokens": (tell_ends_first, "^[ABC] got"),
    "tokens to the wrong stream": (swap_tokens, "^[ABC] got"),
    "rows beside a first token lost": (lose_rows_beside_a_first_token, "^[ABC] got"),
    "a close that aborts nothing": (forget_to_abort_at_close, "is gone since step"),
    "a stop string that stops nothing": (forget_to_stop, "is gone since step"),
    "an abort that nobody is told of": (tell_nobody_of_an_abort, "was not told its end"),
}


@pytest.mark.parametrize("name", PLANTED)
async def test_planted_faults_are_found(name, monkeypatch):
    """Some order of at most two events shows the fault for what it is."""
    plant, sentence = PLANTED[name]
    plant(monkeypatch)

    with pytest.raises(AssertionError, match=sentence):
        await play_all(device="scripted", policy="eager", prefill="mixed")
