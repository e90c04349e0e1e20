"""The ends of a step on the device: tokens and their places go in; positions, finishes and result words come out."""

import numpy as np
import pytest
import torch
from kernel_builders import DEVICE, change_slots, ints

from aserve.core.ids import Epoch, Slot
from aserve.core.plan import FLAG_DONE, FLAG_INVALID, Join
from aserve.core.request import SamplingParams
from aserve.model.kernels.slot_update import FROM_SLOT, commit, lay_out, lay_out_rows, unpack_words
from aserve.model.kernels.slots import DONE, LAST_TOKEN, POSITION, SlotTensors

pytestmark = pytest.mark.torch

BLOCK_SIZE = 4
VOCAB = 64


def join(
    slot: int,
    position: int,
    *,
    stop_ids: tuple[int, ...] = (),
    min_length: int = 0,
    max_length: int = 100,
    **params: float,
) -> Join:
    return Join(
        slot=Slot(slot),
        epoch=Epoch(1),
        position=position,
        params=SamplingParams(temperature=0, **params),
        seed=0,
        stop_ids=stop_ids,
        min_length=min_length,
        max_length=max_length,
        num_prompt_tokens=0,
        history=np.array([9, 9, 5], np.int32),
    )


def table(*joins: Join) -> SlotTensors:
    """Slots 0 .. 5; the block table of slot s is 10 s + 1, 10 s + 2, ..."""
    slots = SlotTensors.allocate(num_slots=6, max_num_blocks=8, vocab_size=VOCAB, max_additions=1, device=DEVICE)
    change_slots(slots, joins=joins)
    for bound in joins:
        slots.block_tables_SB[bound.slot] = ints([10 * bound.slot + 1 + i for i in range(8)])
    return slots


def column(slots: SlotTensors, word: object) -> list[int]:
    return slots.records_SW[:, word.value].tolist()


def test_what_a_steps_tokens_are() -> None:
    """Rows go on from their slots, chunks bring their tokens; done slots and padding compute at slot 0 of block 0."""
    slots = table(join(2, 5), join(4, 6), join(1, 3))
    slots.records_SW[2, LAST_TOKEN.value] = 33
    slots.records_SW[1, DONE.value] = 1
    token_ids, positions, mapping = (ints([-9] * 8) for _ in range(3))
    context_lens, last_rows = ints([-9] * 4), ints([-9] * 4)

    lay_out(
        ints([FROM_SLOT, 50, 51, 52, FROM_SLOT, 60, 60, 60]), ints([2, 4, 1, 6]), ints([0, 1, 4, 5, 5]),
        slots, BLOCK_SIZE, token_ids_T=token_ids, positions_T=positions, slot_mapping_T=mapping,
        context_lens_S=context_lens, last_rows_S=last_rows,
    )  # fmt: skip

    assert token_ids.tolist() == [33, 50, 51, 52, 0, 0, 0, 0]
    assert positions.tolist() == [5, 6, 7, 8, 0, 0, 0, 0]
    assert mapping.tolist() == [22 * 4 + 1, 42 * 4 + 2, 42 * 4 + 3, 43 * 4, 0, 0, 0, 0]
    assert context_lens.tolist() == [6, 9, 0, 0]
    assert last_rows.tolist() == [0, 3, 4, 4]


def end_step(
    slots: SlotTensors,
    sequences: list[int],
    tokens: list[int],
    *,
    flags: list[int] | None = None,
    samples: list[int] | None = None,
    queries: list[int] | None = None,
    step: int = 7,
    ring_rows: int = 8,
) -> tuple[list[int], list[int], list[int]]:
    """``commit`` for these slots; the words' steps, flags and tokens."""
    count = len(sequences)
    queries = queries or [1] * count
    starts = [0, *np.cumsum(queries).tolist()]
    positions, done = column(slots, POSITION), column(slots, DONE)
    context = [0 if done[s] else positions[s] + n for s, n in zip(sequences, queries, strict=True)]
    ring_NS = torch.zeros(4, ring_rows, dtype=torch.int64, device=DEVICE)
    step_1 = torch.tensor([step], dtype=torch.int64, device=DEVICE)

    commit(
        ints(tokens), ints(flags or [0] * count), ints(sequences), ints(starts), ints(context),
        ints(samples or [1] * count), slots, ring_NS=ring_NS, step_1=step_1,
    )  # fmt: skip

    assert step_1.item() == step + 1
    assert ring_NS[step % 4, count:].tolist() == [0] * (ring_rows - count)
    return tuple(part.tolist() for part in unpack_words(ring_NS[step % 4, :count].cpu().numpy()))


def test_a_row_moves_on() -> None:
    """Token and position are written back, and the word carries step and token."""
    slots = table(join(2, 5), join(4, 6))

    assert end_step(slots, [4, 2], [11, 12]) == ([7, 7], [0, 0], [11, 12])
    assert column(slots, POSITION)[:5] == [0, 0, 6, 0, 7]
    assert column(slots, LAST_TOKEN)[:5] == [0, 0, 12, 0, 11]
    assert column(slots, DONE) == [1, 1, 0, 1, 0, 1, 1]


def test_stop_ids_and_lengths_end_a_sequence() -> None:
    """A stop id counts only in a sequence longer than its least length; the limit counts the new token."""
    slots = table(
        join(0, 5, stop_ids=(3, 4), min_length=6),
        join(1, 5, stop_ids=(3, 4), min_length=7),
        join(2, 5, max_length=7),
        join(3, 5, max_length=8),
    )

    assert end_step(slots, [0, 1, 2, 3], [4, 4, 9, 9])[1] == [FLAG_DONE, 0, FLAG_DONE, 0]
    assert column(slots, DONE) == [1, 0, 1, 0, 1, 1, 1]


def test_done_slots_and_padding_change_nothing() -> None:
    """Their words say done."""
    slots = table(join(0, 5, stop_ids=(1,)), join(1, 5, presence_penalty=1.0))
    end_step(slots, [0], [1])
    before = slots.records_SW.clone(), slots.seen_SV.clone()

    assert end_step(slots, [0, 6], [20, 21])[1:] == ([FLAG_DONE, FLAG_DONE], [0, 0])
    assert torch.equal(slots.records_SW, before[0])
    assert torch.equal(slots.seen_SV, before[1])


def test_an_invalid_row_ends_without_a_token() -> None:
    """Its slot is inert from then on; its neighbour goes on."""
    slots = table(join(0, 5), join(1, 5))

    assert end_step(slots, [0, 1], [0, 8], flags=[FLAG_INVALID, 0])[1] == [FLAG_INVALID, 0]
    assert column(slots, DONE)[:2] == [1, 0]
    assert column(slots, LAST_TOKEN)[:2] == [0, 8]


def test_a_chunk_that_does_not_sample_moves_its_position_only() -> None:
    """The last one samples like a row."""
    slots = table(join(0, 0, max_length=4), join(1, 8))

    assert end_step(slots, [0, 1], [30, 31], queries=[4, 3], samples=[0, 1])[1:] == ([0, 0], [0, 31])
    assert column(slots, POSITION)[:2] == [4, 11]
    assert column(slots, LAST_TOKEN)[:2] == [0, 31]


def test_output_tokens_are_counted_where_penalties_want_them() -> None:
    """On top of what the history held: 1 for the prompt's, 2 for each of the output's."""
    slots = table(join(0, 5, frequency_penalty=0.5), join(1, 5))

    end_step(slots, [0, 1], [5, 5])

    assert slots.seen_SV[0, [5, 9]].tolist() == [4, 4]
    assert slots.seen_SV[1].tolist() == [0] * VOCAB


def test_leaving_makes_a_slot_inert() -> None:
    """The others go on."""
    slots = table(join(0, 5), join(1, 5))

    change_slots(slots, leaves=np.array([0], np.int32))

    assert column(slots, DONE)[:2] == [1, 0]


def test_differences_are_applied_in_their_order() -> None:
    """A slot left and joined at once is its new owner's, whose table holds what is written for it and else nothing."""
    slots = table(join(0, 5), join(3, 5))

    change_slots(
        slots,
        leaves=np.array([0, 3], np.int32),
        joins=(join(0, 9, presence_penalty=1.0),),
        table_writes=np.array([(0, 1, 77), (2, 0, 78)], np.int32),
        token_writes=np.array([(2, 4, 50)], np.int32),
    )

    assert column(slots, DONE)[:4] == [0, 1, 1, 1]
    assert column(slots, POSITION)[:4] == [9, 0, 4, 5]
    assert column(slots, LAST_TOKEN)[2] == 50
    assert slots.block_tables_SB[0].tolist() == [0, 77, 0, 0, 0, 0, 0, 0]
    assert slots.block_tables_SB[2, 0] == 78
    assert slots.seen_SV[0].nonzero().flatten().tolist() == [5, 9]


def test_tokens_from_the_host_count_for_penalties() -> None:
    """As output, once for each time."""
    slots = table(join(0, 5, frequency_penalty=0.5))

    for position in (5, 6):
        change_slots(slots, token_writes=np.array([(0, position, 7)], np.int32))

    assert slots.seen_SV[0, 7] == 2 * 2


def test_each_token_as_a_row() -> None:
    """Its slot, and what it sees; a done sequence's tokens and padding see nothing."""
    slots, contexts = ints([-1] * 8), ints([-1] * 8)

    lay_out_rows(ints([4, 2, 5]), ints([0, 3, 4, 6]), ints([10, 0, 2]), row_slots_T=slots, row_contexts_T=contexts)

    assert slots.tolist() == [4, 4, 4, 2, 5, 5, 5, 5]
    assert contexts.tolist() == [8, 9, 10, 0, 1, 2, 0, 0]


def test_words_carry_large_steps_and_tokens() -> None:
    """Steps count modulo 2**32; a token has 24 bits."""
    slots = table(join(0, 5))

    assert end_step(slots, [0], [VOCAB - 1], step=2**33 + 2**31 + 3) == ([2**31 + 3], [0], [VOCAB - 1])
