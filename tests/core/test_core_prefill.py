"""Where chunks of prompts go: beside decode rows, or into steps of their own that take turns with them."""

import pytest
from core_builders import World

from aserve.core.request import FinishReason

LENGTH = FinishReason.LENGTH


def kinds(world: World) -> str:
    """Of each step: decode rows (d), chunks (c) or both (b)."""
    return "".join("b" if len(p.rows) and p.chunks else "d" if len(p.rows) else "c" for p in world.plans.values())


@pytest.mark.parametrize("prefill", ["mixed", "split"])
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
