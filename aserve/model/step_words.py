"""A plan as the device takes it: one array of int32 words, written without a Python object a row.

The words of a step begin with the header of ``kernels.differences``; sections of fixed size follow, which the step's
graph finds at fixed places, then what differs from step to step. What lies far behind the end does not travel.

Shape suffixes: S sequences of the step (decode rows, then chunks), T tokens, R rows that sample.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from aserve.core.plan import BatchPlan, Join
from aserve.model.kernels import differences
from aserve.model.kernels.slot_update import FROM_SLOT
from aserve.model.kernels.slots import (
    NUM_BAD_WORDS,
    NUM_HASHES,
    NUM_WORDS,
    SlotNeeds,
    additions,
    allowed_mask,
    bad_words,
    slot_records,
)

Words = NDArray[np.int32]

_ALIGNMENT: Final = 4
"""Sections begin at multiples of 16 bytes, which kernels are compiled for."""


def aligned(num_words: int) -> int:
    return -(-num_words // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLayout:
    """Where a step of S sequences and T tokens finds its sections. Decode rows alone need no starts and tokens.

    slots: S, padding names ``nobody``. samples: S, whether the device samples there. starts: S + 1. tokens: T.
    """

    num_sequences: int
    num_tokens: int
    has_chunks: bool
    slots: int
    samples: int
    starts: int
    tokens: int
    end: int

    @classmethod
    def of(cls, num_sequences: int, num_tokens: int, *, has_chunks: bool) -> "StepLayout":
        slots = differences.HEADER_WORDS
        samples = slots + aligned(num_sequences)
        starts = samples + aligned(num_sequences)
        tokens = starts + aligned(num_sequences + 1)
        return cls(
            num_sequences=num_sequences,
            num_tokens=num_tokens,
            has_chunks=has_chunks,
            slots=slots,
            samples=samples,
            starts=starts,
            tokens=tokens,
            end=tokens + aligned(num_tokens) if has_chunks else starts,
        )

    def write(self, words: Words, plan: BatchPlan, nobody: int) -> NDArray[np.intp]:
        """Fill the sections for ``plan``, which has to fit. Returns which sequences are the result's R rows."""
        num_rows, num_sequences = len(plan.rows), len(plan.rows) + len(plan.chunks)
        slots = words[self.slots : self.slots + self.num_sequences]
        samples = words[self.samples : self.samples + self.num_sequences]
        slots[:num_rows] = plan.rows[:, 0]
        slots[num_sequences:] = nobody
        samples[:num_rows] = 1
        samples[num_rows:] = 0
        sampling = np.arange(num_rows)
        if self.has_chunks:
            starts = words[self.starts : self.starts + self.num_sequences + 1]
            tokens = words[self.tokens : self.tokens + self.num_tokens]
            starts[: num_rows + 1] = np.arange(num_rows + 1)
            tokens[:num_rows] = FROM_SLOT
            last, end = [], num_rows
            for sequence, chunk in enumerate(plan.chunks, num_rows):
                slots[sequence] = chunk.slot
                start, end = end, end + len(chunk.tokens)
                tokens[start:end] = chunk.tokens
                starts[sequence + 1] = end
                if chunk.last:
                    last.append(sequence)
            starts[num_sequences + 1 :] = end
            tokens[end:] = 0
            sampling = np.concatenate([sampling, np.array(last, np.intp)])
        samples[sampling] = ~plan.deferred if len(plan.deferred) else 1
        return sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Extra:
    """See ``kernels.differences``."""

    kind: int
    slot: int
    values: Words
    count: int
    num_prompt_tokens: int = 0

    @property
    def num_words(self) -> int:
        return aligned(self.values.size) + differences.EXTRA_WORDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    """What a plan changes in the slot table. table_writes, token_writes: int32 [n, 3]."""

    leaves: Words
    join_slots: Words
    join_records: Words
    table_writes: Words
    token_writes: Words
    extras: tuple[Extra, ...]

    @classmethod
    def of(cls, plan: BatchPlan, vocab_size: int, max_additions: int) -> "Differences":
        joins = plan.joins
        if not joins:
            return cls(
                leaves=plan.leaves,
                join_slots=_NOTHING,
                join_records=_NOTHING,
                table_writes=plan.table_writes,
                token_writes=plan.token_writes,
                extras=(),
            )
        records = slot_records(joins, vocab_size)
        needing = np.flatnonzero(records["needs"] & ~np.int32(SlotNeeds.MIN_LENGTH)).tolist()
        return cls(
            leaves=plan.leaves,
            join_slots=np.array([join.slot for join in joins], np.int32),
            join_records=records.view(np.int32),
            table_writes=plan.table_writes,
            token_writes=plan.token_writes,
            extras=tuple(
                extra
                for index in needing
                for extra in _extras(joins[index], int(records["needs"][index]), vocab_size, max_additions)
            ),
        )

    @property
    def num_words(self) -> int:
        """At most so many, alignment included."""
        num_plain = self.leaves.size + self.join_slots.size + self.table_writes.size + self.token_writes.size
        num_extra = sum(extra.num_words for extra in self.extras)
        return num_plain + self.join_records.size + num_extra + _NUM_SECTIONS * _ALIGNMENT

    def write(self, words: Words, start: int) -> int:
        """Write header and contents, the latter from ``start`` on, where there is room. Returns the end."""
        words[differences.LEAVES : differences.HEADER_WORDS] = 0
        end = start
        for field, array in (
            (differences.LEAVES, self.leaves),
            (differences.JOINS, self.join_slots),
            (differences.TABLE_WRITES, self.table_writes),
            (differences.TOKEN_WRITES, self.token_writes),
        ):
            if len(array):
                words[field], words[field + 1] = len(array), end
                end = _put(words, end, array)
        if len(self.join_slots):
            words[differences.JOIN_RECORDS] = end
            end = _put(words, end, self.join_records)
        if self.extras:
            words[differences.EXTRAS], words[differences.EXTRAS + 1] = len(self.extras), end
            entry, end = end, end + len(self.extras) * differences.EXTRA_WORDS
            for extra in self.extras:
                words[entry : entry + 5] = (extra.kind, extra.slot, end, extra.count, extra.num_prompt_tokens)
                entry += differences.EXTRA_WORDS
                end = _put(words, end, extra.values)
        return end

    def parts(self, room: int) -> Iterator["Differences"]:
        """The same in parts of at most ``room`` words, to be applied in this order."""
        if self.num_words <= room:
            yield self
            return
        joins = (self.leaves, self.join_slots, self.join_records)
        yield _part(leaves=joins[0], join_slots=joins[1], join_records=joins[2])
        size = (room - _NUM_SECTIONS * _ALIGNMENT) // 3
        for first in range(0, len(self.table_writes), size):
            yield _part(table_writes=self.table_writes[first : first + size])
        yield _part(token_writes=self.token_writes)
        together: list[Extra] = []
        left = room - _NUM_SECTIONS * _ALIGNMENT
        for extra in self.extras:
            if together and extra.num_words > left:
                yield _part(extras=tuple(together))
                together, left = [], room - _NUM_SECTIONS * _ALIGNMENT
            together.append(extra)
            left -= extra.num_words
        if together:
            yield _part(extras=tuple(together))


def room_needed(*, max_num_seqs: int, max_model_len: int, vocab_size: int, max_additions: int) -> int:
    """Words that the largest part of any plan's differences takes; usual plans are one part."""
    joins = max_num_seqs * (2 + NUM_WORDS)
    token_writes = 3 * max_num_seqs
    bad_words_size = 4 * NUM_BAD_WORDS + 2 * NUM_HASHES
    extra = max(max_model_len, 2 * max_additions, -(-vocab_size // 32), bad_words_size) + differences.EXTRA_WORDS
    return max(_USUAL_ROOM, joins, token_writes, extra) + 16 * _ALIGNMENT


_NUM_SECTIONS: Final = 6
"""That differences are written into, each of which begins aligned: leaves, joins, their records, writes, extras."""

_USUAL_ROOM: Final = 1 << 16
"""Histories of 30 prompts of 2,000 tokens, which penalties need: what joins at once should fit the arrays in turn."""

_NOTHING: Final = np.empty(0, np.int32)


def _part(
    *,
    leaves: Words = _NOTHING,
    join_slots: Words = _NOTHING,
    join_records: Words = _NOTHING,
    table_writes: Words = _NOTHING,
    token_writes: Words = _NOTHING,
    extras: tuple[Extra, ...] = (),
) -> Differences:
    return Differences(
        leaves=leaves,
        join_slots=join_slots,
        join_records=join_records,
        table_writes=table_writes,
        token_writes=token_writes,
        extras=extras,
    )


def _extras(join: Join, needs: int, vocab_size: int, max_additions: int) -> Iterator[Extra]:
    """Raises ValueError for what the slot table has no room for."""
    if needs & SlotNeeds.PENALTY:
        yield Extra(
            kind=differences.HISTORY,
            slot=join.slot,
            values=join.history,
            count=len(join.history),
            num_prompt_tokens=min(join.num_prompt_tokens, len(join.history)),
        )
    if needs & SlotNeeds.ADDITION:
        added = additions(join, vocab_size)
        if len(added) > max_additions:
            raise ValueError(f"{len(added)} biased or forbidden tokens; a slot holds {max_additions}")
        ids = np.fromiter(added.keys(), np.int32, len(added))
        values = np.fromiter(added.values(), np.float32, len(added))
        yield Extra(
            kind=differences.ADDITIONS,
            slot=join.slot,
            values=np.concatenate([ids, values.view(np.int32)]),
            count=len(added),
        )
    if needs & SlotNeeds.ALLOWED:
        mask = allowed_mask(join, vocab_size)
        yield Extra(kind=differences.ALLOWED, slot=join.slot, values=mask, count=len(mask))
    if needs & SlotNeeds.BAD_WORDS:
        words = np.concatenate([part.ravel() for part in bad_words(join, vocab_size)]).view(np.int32)
        yield Extra(kind=differences.BAD_WORDS, slot=join.slot, values=words, count=len(words))


def _put(words: Words, start: int, array: Words) -> int:
    """Returns where the next section may begin."""
    words[start : start + array.size] = array.ravel()
    return start + aligned(array.size)
