"""Readers that stall: their sequences leave the device, and come back with every token once they have read."""

import pytest
from core_builders import World

from aserve.core.request import FinishReason
from aserve.core.transitions import BlockState, SequenceState


@pytest.mark.parametrize("depth", [1, 3])
def test_a_stalled_sequence_leaves_its_slot_when_its_newest_step_has_landed(depth):
    """Tokens in flight are kept; then it owns no slot, and its full blocks are cached for whoever needs them."""
    world = World(policy="eager", max_inflight=4)
    ident = world.submit(21, max_tokens=30)
    for _ in range(depth):
        world.launch()
    world.stall(ident)

    assert world.launch() is None
    while world.num_inflight:
        world.land()
    assert world.state(ident) is SequenceState.PARKED
    assert world.output(ident) == world.expected(ident)[: len(world.output(ident))]
    assert world.scheduler.slots.num_free == world.scheduler.slots.max_num_seqs
    assert not world.blocks(BlockState.WRITING) and not world.blocks(BlockState.PENDING)


def test_it_resumes_from_its_own_cached_blocks():
    """What nobody needed meanwhile is not computed again."""
    world = World(block_size=4)
    ident = world.submit(21, max_tokens=12)
    world.step()
    world.stall(ident)
    world.catch_up(ident)
    world.run()

    assert world.cached_tokens(ident)[-1] == 20
    assert world.output(ident) == world.expected(ident)


def test_a_parked_sequence_is_not_admitted_until_its_reader_has_read():
    """It waits aside, others run past it."""
    world = World()
    parked = world.submit(5, max_tokens=6)
    world.stall(parked)
    other = world.submit(5, max_tokens=6)
    for _ in range(10):
        world.step()

    assert (world.reason(other), world.output(parked)) == (FinishReason.LENGTH, [])
    world.catch_up(parked)
    world.run()
    assert world.output(parked) == world.expected(parked)


def test_catching_up_before_it_has_left_changes_nothing():
    """A reader that reads again while the newest step is in flight: the sequence requeues and goes on."""
    world = World(policy="eager")
    ident = world.submit(9, max_tokens=10)
    world.launch()
    world.launch()
    world.stall(ident)
    world.catch_up(ident)
    world.run()

    assert world.output(ident) == world.expected(ident)


def test_a_parked_sequence_can_be_ended():
    """Abort finds it aside, once."""
    world = World()
    ident = world.submit(5, max_tokens=6)
    world.step()
    world.stall(ident)
    world.end(ident)
    world.end(ident)
    world.catch_up(ident)
    world.run()

    assert world.reason(ident) is FinishReason.ABORT


def test_as_many_stalled_readers_as_slots_leave_room_for_a_newcomer():
    """Every slot is free again for those who read."""
    world = World(max_num_seqs=2, max_num_batched_tokens=40)
    stalled = [world.submit(5, max_tokens=20) for _ in range(3)]
    for ident in stalled:
        world.step()
        world.stall(ident)
    newcomer = world.submit(5, max_tokens=4)
    for _ in range(8):
        world.step()

    assert world.reason(newcomer) is FinishReason.LENGTH
    assert [world.reason(ident) for ident in stalled] == [None, None, None]
