"""The slot table: the host's differences come in, steps write back, inert slots change nothing."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from aserve.core.ids import NO_STEP, Epoch, Slot
from aserve.core.plan import BatchPlan, Join
from aserve.core.request import SamplingParams
from aserve.model.sampler import Sampler
from aserve.model.slot_table import SlotTable

pytestmark = pytest.mark.torch

VOCAB_SIZE = 20


def table(num_slots: int = 4) -> SlotTable:
    return SlotTable(num_slots=num_slots, max_num_blocks=3, vocab_size=VOCAB_SIZE)


def join(slot: int, *, prompt: Sequence[int] = (), output: Sequence[int] = (), **changes: Any) -> Join:
    arguments: dict[str, Any] = {
        "epoch": Epoch(1),
        "position": 0,
        "params": SamplingParams(temperature=0),
        "seed": 0,
        "stop_ids": (),
        "min_length": 0,
        "max_length": 100,
    }
    history = np.array([*prompt, *output], np.int32)
    return Join(slot=Slot(slot), num_prompt_tokens=len(prompt), history=history, **arguments | changes)


def apply(table: SlotTable, *joins: Join, **differences: Sequence[Any]) -> None:
    arrays = {name: np.array(values, np.int32) for name, values in differences.items()}
    table.apply(BatchPlan(step=NO_STEP, joins=joins, **arrays))


def commit(table: SlotTable, slots: list[int], positions: list[int], tokens: list[int], *, writes: bool = True) -> None:
    index, at = np.array(slots, np.int64), np.array(positions, np.int64)
    end = table.sampling_rows(index, at).end
    sampled = np.array(tokens)
    table.commit(index, at, sampled, end.ended(sampled), np.full(len(slots), writes))


def state(table: SlotTable, slot: int) -> tuple[int, int, bool]:
    """(last token, position, done)."""
    return int(table.last_token_S[slot]), int(table.position_S[slot]), bool(table.done_S[slot])


def greedy(table: SlotTable, slot: int, position: int, logits: Sequence[float]) -> int:
    rows = table.sampling_rows(np.array([slot]), np.array([position]))
    padded = torch.tensor([[*logits, *[-50.0] * (VOCAB_SIZE - len(logits))]])
    return int(Sampler(VOCAB_SIZE).sample(padded, rows).tokens_R[0])


def test_every_slot_is_inert_until_somebody_joins() -> None:
    """Unbound slots are done and point to the trash block."""
    slots = table()
    assert bool(slots.done_S.all())
    assert int(slots.block_table_SB.sum()) == 0


def test_differences_apply_in_their_order() -> None:
    """One plan takes a slot from its owner, binds it anew, fills its table and gives it a token."""
    slots = table()
    apply(slots, join(1, position=5), table_writes=[(1, 0, 7), (1, 1, 8)])
    apply(
        slots,
        join(1, epoch=Epoch(2), position=2),
        leaves=[1],
        table_writes=[(1, 0, 4)],
        token_writes=[(1, 9, 17)],
    )
    assert slots.block_table_SB[1].tolist() == [4, 0, 0]
    assert state(slots, 1) == (17, 9, False)
    assert int(slots.epoch_S[1]) == 2


def test_a_leave_makes_the_slot_inert() -> None:
    """Its table points to the trash block and no step changes it."""
    slots = table()
    apply(slots, join(0, position=3), table_writes=[(0, 0, 5)])
    apply(slots, leaves=[0])
    commit(slots, [0], [3], [11])
    slots.advance(np.array([0]), np.array([8]))
    assert state(slots, 0) == (0, 3, True)
    assert slots.block_table_SB[0].tolist() == [0, 0, 0]


def test_a_committed_token_moves_the_slot_on() -> None:
    """The token and the next position; other slots stay."""
    slots = table()
    apply(slots, join(0, position=3), join(2, position=6))
    commit(slots, [2], [6], [11])
    assert (state(slots, 0), state(slots, 2)) == ((0, 3, False), (11, 7, False))


@pytest.mark.parametrize(
    ("token", "position", "is_done"),
    [(5, 3, True), (6, 3, False), (6, 7, False), (6, 8, True), (5, 1, False)],
)
def test_a_stop_id_or_the_length_limit_ends_a_sequence(token: int, position: int, is_done: bool) -> None:
    """At position p the new token is number p + 2; stop ids count once the least length is there."""
    slots = table()
    apply(slots, join(0, position=position, stop_ids=(9, 5), min_length=3, max_length=10))
    commit(slots, [0], [position], [token])
    assert state(slots, 0) == (token, position + 1, is_done)


def test_a_done_slot_changes_nothing() -> None:
    """Token, position and counts stay as the last token left them."""
    slots = table()
    penalised = SamplingParams(temperature=0, frequency_penalty=1.0)
    apply(slots, join(0, params=penalised, prompt=[1], output=[2], position=1, stop_ids=(5,)))
    commit(slots, [0], [1], [5])
    assert slots.seen_SV is not None
    before = slots.seen_SV.clone()
    commit(slots, [0], [2], [7])
    assert state(slots, 0) == (5, 2, True)
    assert torch.equal(slots.seen_SV, before)


def test_rows_that_do_not_write_change_nothing() -> None:
    """Deferred and invalid rows."""
    slots = table()
    apply(slots, join(0, position=4))
    commit(slots, [0], [4], [9], writes=False)
    assert state(slots, 0) == (0, 4, False)


def test_positions_of_host_and_device_are_compared() -> None:
    """A slot that is done may differ: the host does not know yet."""
    slots = table()
    apply(slots, join(0, position=4), join(1, position=4))
    slots.retire(np.array([1]))
    slots.check_positions(np.array([0, 1]), np.array([4, 9]))
    with pytest.raises(AssertionError, match=r"slot 0 \(epoch 1\) is at position 4, the plan says 5"):
        slots.check_positions(np.array([1, 0]), np.array([4, 5]))


def test_counts_follow_committed_and_written_tokens() -> None:
    """Frequency counts what the device sampled and what the host did, but not the prompt."""
    slots = table()
    apply(slots, join(0, params=SamplingParams(temperature=0, frequency_penalty=1.0), prompt=[3, 3, 3, 4], position=3))
    assert greedy(slots, 0, 3, [0, 0, 0, 1.5, 1.0]) == 3
    commit(slots, [0], [3], [3])
    assert greedy(slots, 0, 4, [0, 0, 0, 1.5, 1.0]) == 4
    apply(slots, token_writes=[(0, 5, 4)])
    assert greedy(slots, 0, 5, [0, 0, 0, 1.5, 1.0]) == 3


def test_a_join_tells_prompt_from_output() -> None:
    """After a preemption earlier output is still output: presence penalises it and not the prompt."""
    params = SamplingParams(temperature=0, presence_penalty=1.0)
    slots = table()
    apply(slots, join(0, params=params, prompt=[1, 2], output=[3]), join(1, params=params, prompt=[1, 2, 3]))
    assert [greedy(slots, slot, 2, [0, 0.4, 0, 0.5]) for slot in (0, 1)] == [1, 3]


def test_nothing_of_an_earlier_owner_stays() -> None:
    """Counts, biases, allowed ids and bad words are those of the new owner only."""
    slots = table()
    demanding = SamplingParams(
        temperature=0,
        presence_penalty=2.0,
        logit_bias=((1, 9.0), (2, 9.0), (0, 9.0)),
        allowed_token_ids=(2,),
        bad_words=((1,), (4, 4, 3)),
    )
    apply(slots, join(0, params=demanding, prompt=[1], output=[3]))
    milder = SamplingParams(
        temperature=0, presence_penalty=0.1, logit_bias=((1, 1.0),), allowed_token_ids=(1, 3), bad_words=((7,),)
    )
    apply(slots, join(0, params=milder, prompt=[9]), leaves=[0])
    assert [greedy(slots, 0, 1, [0.5, 0.0, 5.0, 1.5]), greedy(slots, 0, 1, [0.5, 0.6, 5.0, 1.5])] == [3, 1]


def test_longer_bad_words_of_a_newcomer_leave_the_others_alone() -> None:
    """The tails grow; what a slot had seen stays, and new tokens are seen by all."""
    slots = table()
    apply(slots, join(0, params=SamplingParams(temperature=0, bad_words=((5, 6, 1),)), prompt=[5], position=1))
    apply(slots, join(1, params=SamplingParams(temperature=0, bad_words=((9, 9, 9, 9, 2), (3, 2))), prompt=[9, 9, 9]))
    assert greedy(slots, 0, 1, [0, 1]) == 1
    commit(slots, [0, 1], [1, 2], [6, 9])
    assert (greedy(slots, 0, 2, [0, 1]), greedy(slots, 1, 3, [0, 0.5, 1])) == (0, 1)


def test_a_snapshot_does_not_follow_the_table() -> None:
    """The host's sampler works on the rows as they were."""
    params = SamplingParams(temperature=0, frequency_penalty=1.0, bad_words=((7, 1),), stop_token_ids=(2,))
    slots = table()
    apply(slots, join(0, params=params, stop_ids=(2,), prompt=[3], output=[7], position=1))
    snapshot = slots.sampling_rows(np.array([0]), np.array([1]))
    commit(slots, [0], [1], [4])
    apply(slots, leaves=[0])
    logits = torch.full((1, VOCAB_SIZE), -50.0)
    logits[0, [0, 1, 4]] = torch.tensor([0.0, 5.0, 1.0])
    sampled = Sampler(VOCAB_SIZE).sample(logits, snapshot)
    assert sampled.tokens_R.tolist() == [4]
    assert snapshot.end.ended(np.array([2])).tolist() == [True]


def test_arrays_of_a_plan_may_be_read_only() -> None:
    """A plan that came over the wire is a view of bytes."""
    leaves, writes = np.array([0], np.int32), np.array([(1, 0, 3)], np.int32)
    for array in (leaves, writes):
        array.flags.writeable = False
    slots = table()
    apply(slots, join(0), join(1))
    slots.apply(BatchPlan(step=NO_STEP, leaves=leaves, table_writes=writes))
    assert (bool(slots.done_S[0]), int(slots.block_table_SB[1, 0])) == (True, 3)
