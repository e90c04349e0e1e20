"""Every (state, event) pair of every table moves or raises, and a pair that raises changes nothing."""

from itertools import product

import numpy as np
import pytest

from aserve.core.blocks import BlockLedger
from aserve.core.ids import BlockId, StepNumber
from aserve.core.prefix import ROOT, DigestChain, PrefixTable
from aserve.core.request import SamplingParams, SequenceSpec
from aserve.core.sequence import Sequence
from aserve.core.slots import SlotBook
from aserve.core.transitions import (
    BLOCK,
    SEQUENCE,
    SLOT,
    BlockMove,
    BlockState,
    SequenceMove,
    SequenceState,
    SlotMove,
    SlotState,
    Story,
    move,
)
from aserve.errors import IllegalTransition

TABLES = {
    "sequence": (SEQUENCE, SequenceState, SequenceMove),
    "block": (BLOCK, BlockState, BlockMove),
    "slot": (SLOT, SlotState, SlotMove),
}
PAIRS = [(kind, *pair) for kind, (_, states, moves) in TABLES.items() for pair in product(states, moves)]
NEWEST = StepNumber(9)


@pytest.mark.parametrize(("kind", "state", "step"), PAIRS)
def test_every_pair_moves_or_raises(kind, state, step):
    """A pair in the table gives its state and is noted; any other raises, names what was asked, and is not noted."""
    table, states, _ = TABLES[kind]
    story = Story()

    if (state, step) in table:
        assert move(table, kind, 7, state, step, story) in states
        assert len(list(story.of(kind, 7))) == 1
    else:
        with pytest.raises(IllegalTransition, match=f"{kind} 7: no move {step} from {state}"):
            move(table, kind, 7, state, step, story)
        assert list(story.of(kind, 7)) == []


def test_the_moves_of_blocks_are_those_of_the_design():
    """A frozen list: never from readonly back to writing, never from pending to readonly."""
    assert {(before, after) for (before, _), after in BLOCK.items()} == {
        ("free", "writing"),
        ("writing", "readonly"),
        ("writing", "pending"),
        ("readonly", "readonly"),
        ("readonly", "cached"),
        ("readonly", "pending"),
        ("cached", "readonly"),
        ("cached", "pending"),
        ("pending", "free"),
    }


def test_the_moves_of_slots_are_those_of_the_design():
    """free, bound, retiring and round again."""
    assert {(before, after) for (before, _), after in SLOT.items()} == {
        ("free", "bound"),
        ("bound", "retiring"),
        ("retiring", "free"),
    }


def test_every_state_is_reached_and_only_released_is_final():
    """No state of a table is dead, and nothing but a released sequence stays where it is for ever."""
    for table, states, _ in TABLES.values():
        left = {before for before, _ in table}
        assert left | set(table.values()) == set(states)
        assert set(states) - left <= {SequenceState.RELEASED}


def test_an_illegal_move_tells_the_recent_story():
    """The error says what became of the thing before."""
    story = Story()
    state = move(SLOT, "slot", 3, SlotState.FREE, SlotMove.BIND, story)
    move(SLOT, "slot", 4, SlotState.FREE, SlotMove.BIND, story)

    with pytest.raises(IllegalTransition, match=r"recently: free -> bind\)"):
        move(SLOT, "slot", 3, state, SlotMove.BIND, story)


@pytest.mark.parametrize(("state", "step"), list(product(SequenceState, SequenceMove)))
def test_sequences_obey_their_table(state, step):
    """The object itself: its state afterwards is the table's, or the one it had."""
    spec = SequenceSpec(id=1, prompt=np.arange(3, dtype=np.int32), params=SamplingParams())
    sequence = Sequence(
        spec=spec, order=(0, 1), chain=DigestChain(""), salt="", shares_prefix=True, num_uncached_at_door=3
    )
    sequence.state = state

    if (state, step) in SEQUENCE:
        sequence.move(step, Story())
        assert sequence.state is SEQUENCE[state, step]
    else:
        with pytest.raises(IllegalTransition):
            sequence.move(step, Story())
        assert sequence.state is state


def ledger_with_block_in(state: BlockState) -> tuple[BlockLedger, BlockId]:
    """A ledger of 8 blocks in which the first one went the shortest way to ``state``."""
    prefix = PrefixTable()
    ledger = BlockLedger(8, prefix, Story())
    if state is BlockState.FREE:
        return ledger, BlockId(1)
    [block] = ledger.allocate(1)
    if state in (BlockState.READONLY, BlockState.CACHED):
        ledger.publish(block)
        prefix.enter(b"digest", ROOT, b"tokens", "", block)
    if state in (BlockState.CACHED, BlockState.PENDING):
        ledger.release(block, NEWEST)
    assert ledger.state(block) is state
    return ledger, block


CALLS = {
    "publish": (lambda ledger, block: ledger.publish(block), {BlockState.WRITING}),
    "acquire": (lambda ledger, block: ledger.acquire(block), {BlockState.READONLY, BlockState.CACHED}),
    "release": (lambda ledger, block: ledger.release(block, NEWEST + 1), {BlockState.WRITING, BlockState.READONLY}),
}


def picture(ledger: BlockLedger) -> list[object]:
    blocks = [BlockId(block) for block in range(1, ledger.num_blocks + 1)]
    return [
        [(ledger.state(b), ledger.references(b), ledger.fence(b), ledger.prefix.has(b)) for b in blocks],
        ledger.generation.tolist(),
        (ledger.num_free, ledger.num_cached, ledger.num_pending, ledger.num_available, ledger.num_coming),
    ]


@pytest.mark.parametrize(("call", "state"), list(product(CALLS, BlockState)))
def test_the_ledger_refuses_what_its_table_lacks(call, state):
    """A call on a block in the wrong state raises and leaves states, references, fences and counts as they were."""
    ledger, block = ledger_with_block_in(state)
    run, allowed = CALLS[call]
    before = picture(ledger)

    if state in allowed:
        run(ledger, block)
        assert picture(ledger) != before
    else:
        with pytest.raises(IllegalTransition):
            run(ledger, block)
        assert picture(ledger) == before


def test_a_slot_is_not_retired_twice():
    """A free slot cannot retire, and the attempt changes nothing."""
    book = SlotBook(2, 16, Story())

    with pytest.raises(IllegalTransition):
        book.retire(0, StepNumber(0))
    assert (book.num_free, book.num_retiring, book.state) == (2, 0, [SlotState.FREE] * 2)
