"""No reply carries a token of another: a short ghost hunt, and the proof that the hunt finds ghosts.

Each planted fault is one of a kind that real servers had. It must show as wrong output alone: the generation check, the
recount and the device's own assertions are off.

``ASERVE_TEST_GHOSTS`` is the number of requests of a hunt; ``ghost_hunt.py`` hunts for as long as you like.
"""

import os

import pytest
from ghost_hunt import hunt

from aserve.core import composing, landing
from aserve.core.blocks import BlockLedger
from aserve.core.ids import StepNumber
from aserve.core.slots import SlotBook
from aserve.testing import DeviceBugs

NUM_REQUESTS = int(os.environ.get("ASERVE_TEST_GHOSTS", "2000"))


@pytest.mark.slow
@pytest.mark.parametrize(("prefill", "max_inflight"), [("mixed", 4), ("mixed", 8), ("split", 8), ("streams", 8)])
def test_no_ghosts(prefill, max_inflight):
    """Many requests with shared prefixes, aborts, failures and preemptions: not one wrong token."""
    catch = hunt(NUM_REQUESTS, seed=max_inflight, max_inflight=max_inflight, prefill=prefill)

    assert catch.wrong == []
    assert catch.num_requests == NUM_REQUESTS
    assert min(catch.num_aborted, catch.num_failed, catch.num_preemptions, catch.num_prefix_hits) > NUM_REQUESTS // 100


def hash_at_launch(monkeypatch):
    """The planted fault: a block is published when its writer is composed, not when it has landed."""
    take_chunk = composing._take_chunk

    def take_and_publish(state, sequence, *args):
        chunk = take_chunk(state, sequence, *args)
        state.sharing.publish(sequence, chunk.start + len(chunk.tokens))
        return chunk

    monkeypatch.setattr(composing, "_take_chunk", take_and_publish)


def free_blocks_early(monkeypatch):
    """The planted fault: a block's fence is one step short."""
    release = BlockLedger.release

    def release_early(ledger, block, last_step):
        release(ledger, block, StepNumber(max(last_step - 1, 0)))

    monkeypatch.setattr(BlockLedger, "release", release_early)


def free_slots_early(monkeypatch):
    """The planted fault: a slot is free as soon as its sequence has left it."""
    retire = SlotBook.retire

    def retire_at_once(book, slot, landed):
        last_step = StepNumber(int(book.last_step[slot]))
        retire(book, slot, last_step)
        return last_step

    monkeypatch.setattr(SlotBook, "retire", retire_at_once)


def decode_early(monkeypatch):
    """The planted fault: with two streams, a row goes out while the last chunk of its sequence is in flight."""
    take_chunk = composing._take_chunk

    def take_and_decode(state, sequence, *args):
        chunk = take_chunk(state, sequence, *args)
        state.slots.decoding[chunk.slot] |= chunk.last
        return chunk

    monkeypatch.setattr(composing, "_take_chunk", take_and_decode)


def forget_the_other_stream(monkeypatch):
    """The planted fault: a landing lets fences fall up to its own step, though the other stream is behind."""
    pop = landing._pop_landed

    def pop_and_advance(state, number):
        step = pop(state, number)
        state.ledger.advance(max(number, state.landed))
        state.slots.advance(state.landed)
        return step

    monkeypatch.setattr(landing, "_pop_landed", pop_and_advance)


def leave_on_any_stream(monkeypatch):
    """The planted fault: with two streams, leaves go out with whatever step comes next."""

    def take_all(state, *, is_prefill):
        leaves, state.leaves = state.leaves, []
        return leaves

    monkeypatch.setattr(composing, "_take_leaves", take_all)


STREAMS = {"prefill": "streams"}
PLANTED = {
    "a block freed a step early": (free_blocks_early, {}),
    "a slot reused without its fence": (free_slots_early, {}),
    "staging reused": (None, {"bugs": DeviceBugs(staging_reused=True)}),
    "a hash entered at launch": (hash_at_launch, {}),
    "a done row writing": (None, {"bugs": DeviceBugs(done_rows_write=True)}),
    "a stale result word": (None, {"bugs": DeviceBugs(stale_result_words=True)}),
    "a row before its chunk has landed": (decode_early, STREAMS),
    "a fence that knows one stream": (forget_the_other_stream, STREAMS),
    "a leave on the wrong stream": (leave_on_any_stream, STREAMS),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_faults_show_in_the_output(name, monkeypatch):
    """Every planted fault brings a wrong token within a thousand requests."""
    plant, knobs = PLANTED[name]
    if plant is not None:
        plant(monkeypatch)
    catch = hunt(1000, max_inflight=8, stop_at_first=True, **knobs)

    assert catch.wrong, f"{name}: {catch.num_requests} requests and nothing wrong"
