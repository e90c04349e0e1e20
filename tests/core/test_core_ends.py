"""How sequences end from outside or by a fault: once, with no row afterwards and everything given back in time."""

import pytest
from core_builders import World

from aserve.core.actions import Finish
from aserve.core.events import StepLanded
from aserve.core.plan import FLAG_DONE, BatchResult
from aserve.core.request import FinishReason
from aserve.core.transitions import BlockState, SequenceState

ABORT, ERROR, LENGTH, STOP, TIMEOUT = (FinishReason(name) for name in ("abort", "error", "length", "stop", "timeout"))


# --- aborts


def test_an_abort_while_waiting_leaves_no_trace():
    """It never had a block, a slot or a row."""
    world = World(max_num_seqs=1)
    world.submit(4, 5)
    world.step()
    ident = world.submit(4, 5)
    world.end(ident)

    assert (world.reason(ident), world.state(ident)) == (ABORT, None)
    world.run()
    assert world.output(ident) == []


def test_an_abort_while_prefilling_gives_blocks_back_when_its_chunk_has_landed():
    """No chunk in any later plan; its blocks are pending until the newest step that lists it has landed."""
    world = World(block_size=4, max_num_batched_tokens=12, max_inflight=4)
    ident = world.submit(40, 5)
    world.launch()
    world.launch()
    world.end(ident)
    held = []
    for _ in range(2):
        held.append(len(world.blocks(BlockState.PENDING)))
        world.land()

    assert held == [11, 11]
    assert world.scheduler.ledger.num_free == 64
    assert world.launch() is None


def test_an_abort_while_decoding_gives_blocks_back_when_its_newest_row_has_landed():
    """Rows in flight are dropped and counted; blocks and slot come back at the last of them."""
    world = World(block_size=4, max_inflight=4)
    ident, other = world.submit(6, 20), world.submit(6, 20)
    world.step()
    for _ in range(3):
        world.launch()
    world.end(ident)
    seen = []
    while world.num_inflight:
        seen.append((world.scheduler.slots.num_retiring, len(world.blocks(BlockState.PENDING)) > 0))
        world.land()

    assert seen == [(1, True)] * 3
    assert world.scheduler.slots.num_retiring == 0
    assert world.output(ident) == world.expected(ident)[:1]
    assert world.scheduler.counters.num_wasted_rows == 3
    assert world.listed(world.launch()) == [other]


def test_an_abort_while_preempting_ends_it():
    """A marked sequence does not come back."""
    world = World(force_preempt_every=2, max_inflight=4)
    world.submit(6, 20)
    ident = world.submit(6, 20)
    world.launch()
    world.launch()
    state = world.state(ident)
    world.end(ident)
    world.run()

    assert state is SequenceState.PREEMPTING
    assert (world.reason(ident), len(world.told[ident].starts)) == (ABORT, 1)


@pytest.mark.parametrize("reason", [ABORT, TIMEOUT, ERROR])
def test_the_reason_is_that_of_whoever_ended_it(reason):
    """Client gone, deadline and fault take the same way."""
    world = World()
    ident = world.submit(6, 20)
    world.step()
    world.end(ident, reason)

    assert world.reason(ident) is reason
    assert world.output(ident) == world.expected(ident)[:1]


def test_only_the_first_end_counts():
    """A second abort, an abort after the end and one of an unknown id do nothing."""
    world = World()
    done, aborted = world.submit(6, 1), world.submit(6, 20)
    world.step()
    world.end(aborted)
    world.end(aborted, TIMEOUT)
    world.end(done)
    world.end(999)

    assert world.reasons() == [LENGTH, ABORT]


def test_an_abort_in_the_tick_of_admission_or_finish():
    """Right after submission it never runs; right after the last landing it comes too late."""
    world = World()
    early, late = world.submit(6, 1), world.submit(6, 1)
    world.end(early)
    plan = world.launch()
    listed = world.listed(plan)
    world.land()
    world.end(late)

    assert listed == [late]
    assert world.reasons() == [ABORT, LENGTH]


# --- stop strings


def test_a_stop_match_ends_and_later_tokens_are_waste():
    """Two tokens had come behind the match and two rows were in flight: four are counted, none is delivered late."""
    world = World(max_inflight=4)
    ident = world.submit(6, 20)
    for _ in range(5):
        world.step()
    world.launch()
    world.launch()
    world.match_stop(ident, 2)
    world.run()

    assert world.reason(ident) is STOP
    assert world.told[ident].text == world.expected(ident)[:3]
    assert world.scheduler.counters.num_wasted_rows == 2 + 2


def test_a_stop_match_after_the_end_is_ignored():
    """The sequence ended in length before delivery found the match: the scheduler says nothing more."""
    world = World()
    ident = world.submit(6, 2)
    world.run()
    world.match_stop(ident, 0)

    assert world.reason(ident) is LENGTH


# --- faults


def test_a_failed_step_ends_all_that_it_lists_and_no_others():
    """Rows and chunks alike end in error, their later rows are dropped; a sequence of another step goes on."""
    world = World(max_num_batched_tokens=12, max_inflight=4)
    decoding, prefilling = world.submit(6, 20), world.submit(30, 2)
    world.step()
    world.runner.fail_step(2, MemoryError("out of memory"))
    world.launch()
    world.launch()
    other = world.submit(6, 3)
    world.run()

    assert world.reasons() == [ERROR, ERROR, LENGTH]
    assert world.told[decoding].finish.detail == world.told[prefilling].finish.detail == "out of memory"
    assert world.output(decoding) == world.expected(decoding)[:1]
    assert world.output(other) == world.expected(other)
    assert world.scheduler.counters.num_failed_steps == 1


def test_a_failed_launch_ends_all_that_it_lists():
    """The failed step takes its place among the landings, and the next one is launched all the same."""
    world = World(max_inflight=4)
    first = world.submit(6, 20)
    world.step()
    world.launch()
    world.runner.fail_launch(3, MemoryError("no memory for the launch"))
    world.launch()
    second = world.submit(6, 3)
    world.run(depth=2)

    assert world.reasons() == [ERROR, LENGTH]
    assert world.told[first].finish.detail == "no memory for the launch"
    assert world.output(second) == world.expected(second)


def test_a_step_that_fails_under_a_finished_sequence_changes_nothing_for_it():
    """It had ended already; exactly one end is told."""
    world = World(max_inflight=4)
    ident = world.submit(6, 20)
    world.step()
    world.runner.fail_step(2, MemoryError("late"))
    world.launch()
    world.end(ident)
    world.run()

    assert world.reason(ident) is ABORT


def test_blocks_of_a_failed_step_are_never_hit():
    """What the step should have written is not there: the same prompt again computes it."""
    world = World(block_size=4)
    world.runner.fail_step(1, MemoryError("out of memory"))
    world.submit(range(17), 3)
    world.step()
    second = world.submit(range(17), 3)
    world.run()

    assert world.cached_tokens(second) == [0]
    assert world.output(second) == world.expected(second)


def test_an_invalid_row_fails_alone():
    """NaN logits of one row end one sequence; its neighbour in the step does not notice."""
    world = World(max_inflight=4)
    bad, good = world.submit(6, 6), world.submit(6, 6)
    world.runner.invalidate(3, 0)
    world.run(depth=3)

    assert world.reasons() == [ERROR, LENGTH]
    assert world.output(bad) == world.expected(bad)[:2]
    assert world.output(good) == world.expected(good)


@pytest.mark.parametrize(("token", "flags"), [(-1, 0), (32000, 0), (5, FLAG_DONE)])
def test_a_result_that_cannot_be_is_an_error_of_its_row(token, flags):
    """An id outside the vocabulary, or an end that the host does not see."""
    world = World()
    bad, good = world.submit(6, 6), world.submit(6, 6)
    world.step()
    plan = world.launch()
    world.execute()
    true = world.runner.land().result()
    tokens, new_flags = true.tokens.copy(), true.flags.copy()
    tokens[0], new_flags[0] = token, flags
    world._flying.clear()
    actions = world.handle(
        StepLanded(BatchResult(step=plan.step, tokens=tokens, num_tokens=true.num_tokens, flags=new_flags))
    )

    assert [(a.sequence, a.reason) for a in actions if isinstance(a, Finish)] == [(bad, ERROR)]
    world.run()
    assert world.output(good) == world.expected(good)


def test_landings_out_of_order_are_refused():
    """A lander that commits step 2 before step 1 has a fault, and is told so."""
    world = World(max_inflight=4)
    world.submit(6, 6)
    world.launch()
    world.launch()
    world.execute()
    world.execute()
    world.runner.land()
    second = world.runner.land().result()

    with pytest.raises(AssertionError, match="step 2 landed before step 1"):
        world.handle(StepLanded(second))
