"""Where chunks of prompts go: beside decode rows, in steps that take turns with those, or on a stream of their own."""

import pytest
from core_builders import World

from aserve.core.plan import MAIN_STREAM, PREFILL_STREAM
from aserve.core.request import FinishReason
from aserve.core.transitions import BlockState

LENGTH = FinishReason.LENGTH


def kinds(world: World) -> str:
    """Of each step: decode rows (d), chunks (c) or both (b)."""
    return "".join("b" if len(p.rows) and p.chunks else "d" if len(p.rows) else "c" for p in world.plans.values())


@pytest.mark.parametrize("prefill", ["mixed", "split", "streams"])
@pytest.mark.parametrize("depth", [1, 2, 8])
def test_tokens_do_not_depend_on_where_chunks_go(prefill, depth):
    """Prompts of several chunks come while others decode, in a pool that is too small: as if alone."""
    world = World(prefill=prefill, num_blocks=24, max_num_batched_tokens=12, max_inflight=8)
    for length in (3, 17, 9):
        world.submit(length, 12)
    for _ in range(4):
        world.step()
    for length in (30, 5, 21):
        world.submit(length, 9)
    world.run(depth=depth)

    assert world.wrong() == []
    assert world.reasons() == [LENGTH] * 6
    assert world.scheduler.counters.num_preemptions


def test_split_alternates_while_both_are_wanted():
    """A prompt of three chunks comes while another sequence decodes; then rows again."""
    world = World(prefill="split", max_num_batched_tokens=12)
    world.submit(4, 9)
    world.step()
    world.step()
    world.submit(30, 1)
    world.run()

    assert kinds(world) == "cdcdcdcddddd"[: len(world.plans)]
    assert "b" not in kinds(world)


def test_rows_go_first_when_both_begin_to_be_wanted():
    """After a step of chunks the turn is the rows', though a newcomer waits."""
    world = World(prefill="split")
    world.submit(4, 4)
    world.step()
    world.submit(4, 4)
    world.run()

    assert kinds(world).startswith("cdcd")


def test_neither_waits_for_more_than_one_step_of_the_other():
    """Prompts that never stop coming do not stop those that decode, nor the other way round."""
    world = World(prefill="split", max_num_batched_tokens=12, num_blocks=64)
    for _ in range(3):
        world.submit(4, 40)
    for _ in range(40):
        world.submit(10, 1)
        world.step()

    assert "dd" not in kinds(world)[1:]
    assert "cc" not in kinds(world)[1:]


def test_a_step_of_chunks_has_the_whole_budget():
    """Rows that take a turn of their own take nothing of it."""
    world = World(prefill="split", max_num_batched_tokens=16)
    world.submit(4, 9)
    world.step()
    world.submit(40, 1)
    world.step()

    assert world.step().num_tokens == 16


def test_a_newcomer_leaves_running_rows_the_blocks_that_they_want_next():
    """In a step of chunks nobody asked for a row's next block yet; it stays there for the asking."""
    world = World(prefill="split", num_blocks=8, block_size=4)
    first = world.submit(15, 8)
    world.step()
    world.step()
    world.submit(12, 4)
    world.run()

    assert world.scheduler.counters.num_preemptions == 0
    assert world.output(first) == world.expected(first)


# --- streams


def test_each_kind_of_step_has_its_stream():
    """Chunks, and with them joins and leaves, on the prefill stream; rows and what they grow by on the main one."""
    world = World(prefill="streams", max_num_batched_tokens=12)
    for _ in range(4):
        world.submit(30, 9)
    world.run(depth=4)

    assert {(plan.stream, len(plan.rows) > 0, len(plan.chunks) > 0) for plan in world.plans.values()} == {
        (MAIN_STREAM, True, False),
        (PREFILL_STREAM, False, True),
    }
    assert {plan.stream for plan in world.plans.values() if plan.joins} == {PREFILL_STREAM}
    assert {plan.stream for plan in world.plans.values() if len(plan.leaves)} <= {PREFILL_STREAM}


def test_rows_land_beside_a_chunk_that_takes_longer():
    """Whatever is out on the prefill stream, decode steps are launched and landed, and their tokens delivered."""
    world = World(prefill="streams", policy="overlap", max_num_batched_tokens=12)
    first = world.submit(4, 9)
    world.step()
    world.submit(40, 1)
    while len(world.output(first)) < 9:
        while world.launch() is not None:
            pass
        world.land(stream=MAIN_STREAM)

    assert world.streams_inflight == [PREFILL_STREAM]
    assert world.output(first) == world.expected(first)


def test_the_first_row_waits_for_the_last_chunk():
    """Launched sooner, it would have to wait on the device, and the rows of all others with it."""
    world = World(prefill="streams", max_inflight=8)
    world.submit(6, 3)
    world.launch()

    assert world.launch() is None
    world.land()
    assert world.launch().rows.tolist() == [[0, 6]]
    world.run()
    assert world.wrong() == []


def test_blocks_and_slots_wait_for_every_older_step_on_any_stream():
    """A sequence that ended in a decode step gives its blocks back when the older step of chunks has landed too."""
    world = World(prefill="streams", max_num_batched_tokens=12, enable_prefix_caching=False)
    first = world.submit(4, 3)
    world.step()
    world.submit(40, 1)
    for _ in range(3):
        world.launch()
    for _ in range(2):
        world.land(stream=MAIN_STREAM)

    assert (world.reason(first), len(world.blocks(BlockState.PENDING))) == (LENGTH, 2)
    world.land(stream=PREFILL_STREAM)
    assert world.blocks(BlockState.PENDING) == []
    world.run()
    assert world.wrong() == []


@pytest.mark.parametrize(("max_inflight", "expected"), [(1, [1, 0]), (2, [1, 1]), (3, [2, 1]), (8, [4, 4])])
def test_streams_share_the_permits(max_inflight, expected):
    """Neither can take them all from the other."""
    world = World(prefill="streams", policy="eager", max_inflight=max_inflight, max_num_batched_tokens=12)
    world.submit(4, 40)
    world.step()
    world.submit(200, 1)
    while world.launch() is not None:
        pass

    assert [world.scheduler.inflight.num_on(stream) for stream in (MAIN_STREAM, PREFILL_STREAM)] == expected


def test_with_one_permit_streams_take_turns():
    """As steps of one stream would."""
    world = World(prefill="streams", max_inflight=1, max_num_batched_tokens=12)
    world.submit(4, 6)
    world.step()
    world.submit(30, 1)
    world.run()

    assert kinds(world).startswith("cdcdcdcd")
