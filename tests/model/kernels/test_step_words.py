"""A plan as words: fixed sections, and differences in one part or several."""

import numpy as np
import pytest
from cuda_builders import chunk_of, join

from aserve.core.ids import StepNumber
from aserve.core.plan import BatchPlan
from aserve.core.request import SamplingParams
from aserve.model.kernels.differences import HEADER_WORDS, JOINS, TABLE_WRITES
from aserve.model.kernels.slot_update import FROM_SLOT
from aserve.model.step_words import Differences, StepLayout, room_needed

pytestmark = pytest.mark.torch

NOBODY = 99
VOCAB = 64


def section(words: np.ndarray, start: int, count: int) -> list[int]:
    return words[start : start + count].tolist()


def test_rows_alone_take_two_sections() -> None:
    """Slots and whether the device samples; the rest of the graph's rows are nobody's."""
    layout = StepLayout.of(4, 4, has_chunks=False)
    words = np.full(layout.end, -7, np.int32)
    plan = BatchPlan(step=StepNumber(1), rows=np.array([(5, 10), (3, 11)], np.int32), deferred=np.array([False, True]))

    sampling = layout.write(words, plan, NOBODY)

    assert sampling.tolist() == [0, 1]
    assert section(words, layout.slots, 4) == [5, 3, NOBODY, NOBODY]
    assert section(words, layout.samples, 4) == [1, 0, 0, 0]


def test_chunks_come_behind_rows() -> None:
    """Tokens and where each sequence's begin; padding has none, and only last chunks sample."""
    layout = StepLayout.of(5, 8, has_chunks=True)
    words = np.full(layout.end, -7, np.int32)
    chunks = (chunk_of(2, [40, 41, 42], 0, 2), chunk_of(4, [50, 51, 52], 0, 3))
    plan = BatchPlan(step=StepNumber(1), rows=np.array([(5, 10)], np.int32), chunks=chunks)

    sampling = layout.write(words, plan, NOBODY)

    assert sampling.tolist() == [0, 2]
    assert section(words, layout.slots, 5) == [5, 2, 4, NOBODY, NOBODY]
    assert section(words, layout.samples, 5) == [1, 0, 1, 0, 0]
    assert section(words, layout.starts, 6) == [0, 1, 3, 6, 6, 6]
    assert section(words, layout.tokens, 8) == [FROM_SLOT, 40, 41, 50, 51, 52, 0, 0]


def test_sections_are_aligned() -> None:
    """To 16 bytes, for which kernels are compiled."""
    layout = StepLayout.of(5, 9, has_chunks=True)
    assert {part % 4 for part in (layout.slots, layout.samples, layout.starts, layout.tokens, layout.end)} == {0}


def large_plan() -> BatchPlan:
    params = SamplingParams(temperature=0, presence_penalty=1.0, logit_bias=((1, 2.0),), allowed_token_ids=(1, 2))
    joins = tuple(join(slot, [1, 2, 3], params=params) for slot in range(4))
    writes = np.array([(slot, index, 1 + index) for slot in range(4) for index in range(50)], np.int32)
    return BatchPlan(step=StepNumber(1), leaves=np.arange(4, dtype=np.int32), joins=joins, table_writes=writes)


@pytest.mark.parametrize("room", [300, 1 << 14])
def test_parts_fit_their_room_and_lose_nothing(room: int) -> None:
    """However little there is, as long as the largest part fits."""
    whole = Differences.of(large_plan(), VOCAB, 8)

    parts = list(whole.parts(room))

    for part in parts:
        words = np.zeros(HEADER_WORDS + room, np.int32)
        assert part.write(words, HEADER_WORDS) <= HEADER_WORDS + part.num_words
    assert all(part.num_words <= room for part in parts)
    assert np.concatenate([part.table_writes.reshape(-1, 3) for part in parts]).tolist() == whole.table_writes.tolist()
    assert sum(len(part.join_slots) for part in parts) == 4
    assert sum(len(part.extras) for part in parts) == 4 * 3


def test_extras_share_parts() -> None:
    """Many small ones are a few launches: each takes one of the arrays that plans are written into in turn."""
    parts = list(Differences.of(large_plan(), VOCAB, 8).parts(300))

    assert sum(len(part.extras) > 0 for part in parts) == 1


def test_the_header_names_what_is_there() -> None:
    """Counts and places; nothing of an earlier plan is left."""
    words = np.full(HEADER_WORDS + 1000, 55, np.int32)
    plan = BatchPlan(step=StepNumber(1), table_writes=np.array([(1, 2, 3)], np.int32))

    Differences.of(plan, VOCAB, 8).write(words, 20)

    assert section(words, TABLE_WRITES, 2) == [1, 20]
    assert section(words, 20, 3) == [1, 2, 3]
    assert words[JOINS] == 0


def test_there_is_room_for_the_largest_part() -> None:
    """The longest history, all joins at once."""
    sizes = {"max_num_seqs": 256, "max_model_len": 131_072, "vocab_size": 200_000, "max_additions": 1024}
    assert room_needed(**sizes) > 131_072


def test_more_biases_than_a_slot_holds_are_refused() -> None:
    """Rather than left out."""
    params = SamplingParams(logit_bias=tuple((token, 1.0) for token in range(9)))

    with pytest.raises(ValueError, match="a slot holds 8"):
        Differences.of(BatchPlan(step=StepNumber(1), joins=(join(0, [1], params=params),)), VOCAB, 8)
