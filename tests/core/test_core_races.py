"""Races: {land, abort, disconnect, preempt, finish} x two sequences, in every order of up to four of the ten.

That is 5,860 cases at each of ``max_inflight`` 1 to 4, in three settings. A run plays all of up to two events, and a
third of the others, each in one setting; with ``ASERVE_TEST_RACES=all`` it plays everything in every setting, with
``pairs`` none of the others. What each event means is in ``race_builders``.

Longer races of three sequences are drawn by hypothesis, under every policy, the same ones each time;
``ASERVE_TEST_LONG_RACES=5000`` draws so many at random.
"""

import os
from typing import get_args, get_type_hints
from zlib import crc32

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings
from race_builders import CASES, SETTINGS, WHAT, Case, Grid, Race

from aserve.core import landing, leaving
from aserve.core.actions import Finish
from aserve.core.blocks import BlockLedger
from aserve.core.done import DoneQueue
from aserve.core.ids import NO_STEP
from aserve.core.options import SchedulerOptions
from aserve.core.scheduler import Scheduler
from aserve.core.slots import SlotBook

SHARE = os.environ.get("ASERVE_TEST_RACES", "third")
NUM_LONG_RACES = int(os.environ.get("ASERVE_TEST_LONG_RACES", "60"))
POLICIES = get_args(get_type_hints(SchedulerOptions)["policy"])
PREFILLS = get_args(get_type_hints(SchedulerOptions)["prefill"])
PAIRS = [case for case in CASES if len(case) <= 2]


def is_chosen(case: Case, max_inflight: int, setting: str) -> bool:
    """Each of the longer cases in one setting at most, a third of them in all."""
    if len(case) <= 2 or SHARE != "third":
        return len(case) <= 2 or SHARE == "all"
    draw = crc32(f"{max_inflight} {' '.join(case)}".encode()) % (3 * len(SETTINGS))
    return draw == list(SETTINGS).index(setting)


def test_the_grid_is_whole():
    """Ten events in every order, without repetition: 10, 90, 720 and 5,040 cases of one to four."""
    by_length = [sum(len(case) == length for case in CASES) for length in range(1, 5)]

    assert by_length == [10, 90, 720, 5040]
    assert len(set(CASES)) == 5860


@pytest.mark.slow
@pytest.mark.timeout(600)  # for those who play all
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("max_inflight", [1, 2, 3, 4])
def test_every_order_of_up_to_four_events(max_inflight, setting):
    """After each event recount and tokens are right; at the end all have ended as they must, and all is back."""
    grid = Grid(setting, max_inflight)
    for case in CASES:
        if is_chosen(case, max_inflight, setting):
            grid.play(case)

    assert grid.num_played > 50


happenings = st.lists(
    st.tuples(st.sampled_from([*WHAT, "land", "land", "return", "wait"]), st.sampled_from("ABC")).map(" ".join),
    max_size=30,
)


@pytest.mark.parametrize("policy", POLICIES)
def test_longer_races(policy):
    """Three sequences whose readers may also come back: any events in any order, whatever the policy."""

    @settings(
        max_examples=NUM_LONG_RACES,
        derandomize="ASERVE_TEST_LONG_RACES" not in os.environ,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(
        events=happenings,
        lengths=st.tuples(*[st.integers(1, 9)] * 3),
        max_tokens=st.tuples(*[st.integers(1, 9)] * 3),
        stops=st.sets(st.sampled_from("ABC"), max_size=2),
        is_shared=st.booleans(),
        knobs=st.fixed_dictionaries({
            "max_inflight": st.integers(1, 8),
            "num_blocks": st.integers(9, 14),
            "max_num_seqs": st.integers(1, 3),
            "max_num_batched_tokens": st.sampled_from([5, 8, 32]),
            "enable_prefix_caching": st.booleans(),
            "sampler": st.sampled_from(["device", "device", "host"]),
            "prefill": st.sampled_from(PREFILLS),
        }),
    )  # fmt: skip
    def play(events, lengths, max_tokens, stops, is_shared, knobs):
        names = "ABCD"
        race = Race({name: max_tokens[names.index(name)] // 2 for name in stops}, policy=policy, checked=True, **knobs)
        for index, (name, length, most) in enumerate(zip("ABC", lengths, max_tokens, strict=True)):
            race.submit(name, [0 if is_shared else index, *range(1, length)], most)
        race.submit("D", [0, 1, 2, 3], 2)
        race.launch()
        for event in events:
            race.happen(event)
            race.verify()
        race.drain()
        race.verify_end()

    play()


# --- planted faults


def free_blocks_at_once(monkeypatch):
    """A block has no fence."""
    release = BlockLedger.release
    monkeypatch.setattr(BlockLedger, "release", lambda ledger, block, last_step: release(ledger, block, NO_STEP))


def free_slots_at_once(monkeypatch):
    """A slot is bound again while steps in flight still list it."""
    retire = SlotBook.retire

    def retire_at_once(book, slot, landed):
        last_step = int(book.last_step[slot])
        retire(book, slot, last_step)
        return last_step

    monkeypatch.setattr(SlotBook, "retire", retire_at_once)


def keep_the_length(monkeypatch):
    """Who takes a slot takes its length, too."""
    bind = SlotBook.bind

    def bind_without_reset(book, sequence):
        before = book.length.copy()
        slot = bind(book, sequence)
        book.length[slot] = before[slot] or book.length[slot]
        return slot

    monkeypatch.setattr(SlotBook, "bind", bind_without_reset)


def forget_an_abort(monkeypatch):
    """The client is told that its sequence is over, which runs on."""

    def only_say_so(scheduler, event, now, actions):
        actions.append(Finish(event.sequence, event.reason))

    monkeypatch.setattr(Scheduler, "_on_ended", only_say_so)


def forget_a_stop_string(monkeypatch):
    """What delivery found is lost on the way."""
    monkeypatch.setattr(Scheduler, "_on_stop_matched", lambda *args: None)


def launch_a_victims_next_row(monkeypatch):
    """A preempted sequence goes on to decode."""
    mark = leaving.mark

    def mark_late(state, sequence, *args):
        mark(state, sequence, *args)
        if sequence.slot is not None:
            state.slots.decoding[sequence.slot] = True

    monkeypatch.setattr(leaving, "mark", mark_late)


def publish_a_token_early(monkeypatch):
    """A block is hashed once its last token is known, though no step has written that token's keys and values."""
    vacate = leaving._vacate

    def publish_and_vacate(state, sequence):
        state.sharing.publish(sequence, state.length_of(sequence))
        vacate(state, sequence)

    monkeypatch.setattr(leaving, "_vacate", publish_and_vacate)


def hash_before_the_landing(monkeypatch):
    """A preempted sequence's blocks are hashed though steps that write them are in flight."""
    mark = leaving.mark

    def publish_and_mark(state, sequence, *args):
        state.sharing.publish(sequence, int(state.slots.position[sequence.slot]))
        mark(state, sequence, *args)

    monkeypatch.setattr(leaving, "mark", publish_and_mark)


def forget_that_a_reader_stalled(monkeypatch):
    """A parked sequence waits with the others and is admitted again."""
    requeue = leaving._requeue

    def requeue_all(state, sequence, *args):
        is_stalled, sequence.is_stalled = sequence.is_stalled, False
        requeue(state, sequence, *args)
        sequence.is_stalled = is_stalled

    monkeypatch.setattr(leaving, "_requeue", requeue_all)


def share_without_counting(monkeypatch):
    """A prefix hit takes no reference."""
    acquire = BlockLedger.acquire

    def acquire_uncounted(ledger, block):
        before = ledger.references(block)
        acquire(ledger, block)
        ledger._references[block] = max(before, 1)

    monkeypatch.setattr(BlockLedger, "acquire", acquire_uncounted)


def give_back_without_counting(monkeypatch):
    """Who leaves a shared block keeps its reference."""
    release = BlockLedger.release

    def release_uncounted(ledger, block, last_step):
        before = ledger.references(block)
        release(ledger, block, last_step)
        if before > 1:
            ledger._references[block] = before

    monkeypatch.setattr(BlockLedger, "release", release_uncounted)


def forget_the_other_stream(monkeypatch):
    """Fences fall up to the step that has landed, though the other stream is behind."""
    pop = landing._pop_landed

    def pop_and_advance(state, number):
        step = pop(state, number)
        state.ledger.advance(max(number, state.landed))
        state.slots.advance(state.landed)
        return step

    monkeypatch.setattr(landing, "_pop_landed", pop_and_advance)


def forget_who_is_over(monkeypatch):
    """A sequence that is over is forgotten at the next landing, though later steps list it."""
    pop = DoneQueue.pop_landed
    monkeypatch.setattr(DoneQueue, "pop_landed", lambda queue, landed: pop(queue, 10**6))


def leave_in_silence(monkeypatch):
    """The device is not told that a slot's owner is gone."""
    vacate = leaving._vacate

    def vacate_in_silence(state, sequence):
        vacate(state, sequence)
        state.leaves.pop()

    monkeypatch.setattr(leaving, "_vacate", vacate_in_silence)


PLANTED = {
    "a block without a fence": (free_blocks_at_once, "slots", 3, r"^C got \["),
    "a fence that knows one stream": (forget_the_other_stream, "streams", 3, r"^C got \["),
    "a slot reused before its fence": (free_slots_at_once, "streams", 4, r"^C got \["),
    "a length not reset": (keep_the_length, "slots", 2, "1 rows in flight, not"),
    "an abort forgotten": (forget_an_abort, "slots", 4, "got a token after its end"),
    "a stop string forgotten": (forget_a_stop_string, "slots", 4, "^A ended in length, not stop"),
    "a victim's next row": (launch_a_victims_next_row, "slots", 4, "which is preempting"),
    "a block hashed a token early": (publish_a_token_early, "slots", 2, r"^B got \["),
    "a block hashed before its step landed": (hash_before_the_landing, "slots", 4, "blocks that are not computed"),
    "a parked sequence admitted": (forget_that_a_reader_stalled, "slots", 4, "which nobody reads"),
    "a hit without a reference": (share_without_counting, "blocks", 1, "1 references, 2 users"),
    "a reference not given back": (give_back_without_counting, "blocks", 1, "references, 0 users"),
    "a sequence forgotten early": (forget_who_is_over, "slots", 4, "which are forgotten"),
    "a slot left in silence": (leave_in_silence, "slots", 4, "not told of each slot"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_faults_are_found(name, monkeypatch):
    """Some order of at most two events shows the fault for what it is."""
    plant, setting, max_inflight, sentence = PLANTED[name]
    plant(monkeypatch)
    grid = Grid(setting, max_inflight)

    with pytest.raises(AssertionError, match=sentence):
        for case in PAIRS:
            grid.play(case)
