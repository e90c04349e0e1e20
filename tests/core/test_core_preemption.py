"""Too few blocks: evict, sit out, preempt, in this order; nobody loses a token and nothing stands still."""

import pytest
from core_builders import World

from aserve.core.leaving import preempt_last
from aserve.core.request import FinishReason
from aserve.core.transitions import BlockState, SequenceState

LENGTH, STOP = FinishReason.LENGTH, FinishReason.STOP


def test_output_in_flight_is_kept_and_delivered():
    """A marked sequence gets no more rows; the tokens of those in flight count, and it resumes behind them."""
    world = World(max_inflight=4)
    world.submit(6, 20)
    victim = world.submit(6, 20)
    world.step()
    world.launch()
    world.launch()
    preempt_last(world.scheduler, world.now, [])
    plan = world.launch()
    rows = world.listed(plan)
    world.land()
    marked = (world.state(victim), len(world.output(victim)))
    world.land()

    assert victim not in rows
    assert marked == (SequenceState.PREEMPTING, 2)
    assert (world.state(victim), len(world.output(victim))) == (SequenceState.WAITING, 3)
    world.run(depth=3)
    assert world.output(victim) == world.expected(victim)
    assert [start.resumed for start in world.told[victim].starts] == [False, True]


def test_a_resumed_sequence_takes_its_own_blocks_from_the_cache():
    """Recomputing is mostly a hit: only what its last partial block held is computed again."""
    world = World(block_size=4)
    world.submit(6, 30)
    victim = world.submit(17, 20)
    for _ in range(8):
        world.step()
    preempt_last(world.scheduler, world.now, [])
    world.run()

    # 17 + 8 tokens, of which 24 are computed and hashed.
    assert world.cached_tokens(victim) == [0, 24]
    assert world.wrong() == []


def test_a_marked_sequence_that_its_last_token_ends_does_not_come_back():
    """The landed token was a stop: it finishes instead of waiting."""
    world = World(max_inflight=4)
    world.submit(6, 20)
    victim = world.submit(6, 20, stop_at=1)
    world.step()
    world.launch()
    preempt_last(world.scheduler, world.now, [])
    world.land()

    assert world.reason(victim) is STOP
    assert world.output(victim) == world.expected(victim)


def test_it_comes_back_to_its_old_place():
    """A preempted sequence waits ahead of those that came after it."""
    world = World(max_num_seqs=2)
    world.submit(6, 20)
    victim = world.submit(6, 20)
    later = world.submit(6, 20)
    world.step()
    preempt_last(world.scheduler, world.now, [])

    assert [sequence.id for sequence in world.scheduler.waiting] == [victim, later]
    world.run(depth=2)
    assert world.wrong() == []


def test_it_waits_from_when_it_gave_back_its_blocks():
    """Nothing is told of a victim before its newest step has landed; then it waits, until it starts again."""
    world = World(max_inflight=4, max_num_seqs=2)
    world.submit(6, 20)
    victim = world.submit(6, 20)
    world.step()
    world.launch()
    marked: list[object] = []
    preempt_last(world.scheduler, world.now, marked)
    world.land()

    assert marked == []
    assert world.told[victim].requeues == [world.now]
    world.launch()
    assert [start.resumed for start in world.told[victim].starts] == [False, True]


def test_counts_and_logprobs_survive_preemption():
    """Penalties still tell prompt from output, and prompt logprobs are delivered once."""
    world = World(block_size=4, max_num_batched_tokens=16, force_preempt_every=4)
    world.submit(6, 30)
    idents = [
        world.submit(20, 12, repetition_penalty=1.5),
        world.submit(20, 12, prompt_logprobs=0),
        world.submit(20, 12, seed=5, bad_words=((1, 2),)),
    ]
    world.run(depth=2)

    assert world.scheduler.counters.num_preemptions > 0
    assert [world.output(ident) for ident in idents] == [world.expected(ident) for ident in idents]
    assert sum(count for _, count in world.told[idents[1]].prompt_logprobs) == 19


def test_only_those_behind_are_preempted():
    """The first in policy order is never the victim, whoever wants blocks."""
    world = World(num_blocks=8, block_size=4, max_inflight=2)
    first, second = world.submit(10, 20), world.submit(10, 20)
    world.run(depth=2)

    assert world.scheduler.counters.num_preemptions > 0
    assert [len(world.told[ident].starts) > 1 for ident in (first, second)] == [False, True]
    assert world.wrong() == []


def test_the_last_in_order_sits_out_instead_of_preempting_those_ahead():
    """With nobody behind it, it waits for blocks, and has no row until they come."""
    world = World(num_blocks=9, block_size=4)
    first, second = world.submit(15, 12), world.submit(13, 12)
    for _ in range(4):
        world.step()
    plan = world.launch()

    # 9 blocks: the first has taken its fifth, the second wants a fifth and there is none.
    assert world.listed(plan) == [first]
    assert world.state(second) is SequenceState.DECODING
    assert world.scheduler.counters.num_preemptions == 0
    world.run(depth=2)
    assert world.wrong() == []


def test_blocks_that_are_coming_are_waited_for():
    """An aborted sequence's blocks are pending: the starved row sits out a step and nobody is preempted."""
    world = World(num_blocks=12, block_size=4, max_inflight=4)
    first, second, gone = world.submit(15, 12), world.submit(13, 4), world.submit(13, 12)
    world.step()
    world.launch()
    world.end(gone)
    available = world.scheduler.ledger.num_available
    plan = world.launch()
    listed = world.listed(plan)
    world.land()

    # The first wants its fifth block; the four of the aborted one come with the landing of its newest step.
    assert (available, listed) == (0, [second])
    assert world.listed(world.launch()) == [first, second]
    world.run(depth=2)
    assert world.scheduler.counters.num_preemptions == 0
    assert world.wrong() == []


def test_cached_blocks_go_before_anybody_is_preempted():
    """Eviction comes first."""
    world = World(num_blocks=12, block_size=4)
    world.submit(24, 1)
    world.run()
    assert len(world.blocks(BlockState.CACHED)) == 6
    idents = [world.submit(8, 15) for _ in range(2)]
    world.run(depth=2)

    assert world.scheduler.counters.num_preemptions == 0
    assert [world.reason(ident) for ident in idents] == [LENGTH] * 2
    assert world.wrong() == []


@pytest.mark.parametrize("depth", [1, 2, 8])
@pytest.mark.parametrize("policy", ["sync", "eager"])
def test_eight_blocks_never_deadlock(depth, policy):
    """Every sequence could fill the pool alone, all come at once, and all end whole."""
    world = World(num_blocks=8, block_size=4, policy=policy, max_inflight=8, max_num_batched_tokens=16)
    for index in range(8):
        world.submit(1 + 3 * index, 31 - 3 * index)
    world.run(depth=depth)

    assert world.wrong() == []
    assert world.reasons() == [LENGTH] * 8


def test_preempted_at_every_second_step_everybody_still_finishes():
    """The hardest knob: progress in every round."""
    world = World(num_blocks=24, block_size=4, force_preempt_every=2, max_inflight=4)
    for index in range(6):
        world.submit(3 + index, 10)
    world.run(depth=2)

    assert world.wrong() == []
    assert world.scheduler.counters.num_preemptions >= 5


@pytest.mark.parametrize("num_failures", [1, 2, 3])
@pytest.mark.parametrize("nth", range(1, 5))
def test_an_allocation_that_fails_is_like_an_empty_pool(nth, num_failures, monkeypatch):
    """Whichever allocation finds nothing, for all decoding sequences or for one and then another: no token is lost."""
    world = World(num_blocks=32, block_size=1, max_inflight=4)
    ledger = world.scheduler.ledger
    allocate, calls = ledger.allocate, []

    def fail_nth(count):
        calls.append(count)
        return None if nth <= len(calls) < nth + num_failures else allocate(count)

    idents = [world.submit(3, 6) for _ in range(2)]
    world.step()
    monkeypatch.setattr(ledger, "allocate", fail_nth)
    world.run(depth=2)

    assert len(calls) > nth
    assert [world.output(ident) for ident in idents] == [world.expected(ident) for ident in idents]
