"""What the host changes in the slot table before a step, applied by one launch from one array of words.

The array begins with a header; what it counts lies anywhere behind it. Leaves, joins, table writes and token writes are
applied in this order by the first program, which is all that most steps need. *Extras*, what only some joins bring
(counts for penalties, logit additions, masks, bad words), are spread over the others.

Shape suffixes: S slots, W words of a record, B block-table entries, V vocabulary, A logit additions, M words of a mask.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from aserve.model.kernels.slots import (
    DONE,
    LAST_TOKEN,
    NEEDS,
    NEEDS_PENALTY,
    NUM_BAD_WORDS,
    NUM_HASHES,
    ONE_OUTPUT,
    POSITION,
    WORDS,
    SlotTensors,
)

STEP: Final = 0
"""Words 0 and 1 of the header: the step's number, int64."""
LEAVES: Final = 2
"""Here and below: the number, and one word further the place of the first. Of leaves: slots."""
JOINS: Final = 4
"""Slots; their records lie at the place that the word after the next names."""
JOIN_RECORDS: Final = 6
TABLE_WRITES: Final = 8
"""Triples of slot, index, block."""
TOKEN_WRITES: Final = 10
"""Triples of slot, position, token."""
EXTRAS: Final = 12
"""EXTRA_WORDS each: kind, slot, place of the first value, number of values, number of prompt tokens."""
LENGTH: Final = 14
"""Words that are used, those of the header among them."""
HEADER_WORDS: Final = 16

EXTRA_WORDS: Final = 8
HISTORY: Final = 0
"""An extra's kind. Values: tokens seen so far, the prompt's first; ``seen_SV`` is rebuilt from them."""
ADDITIONS: Final = 1
"""Values: token ids, then as many float32 that are added to their logits."""
ALLOWED: Final = 2
"""Values: the M words of the slot's mask."""
BAD_WORDS: Final = 3
"""Values: the slot's rows of ``bad_words_SF`` and ``hashes_SN``, int64 as two words each."""

_LEAVES = tl.constexpr(LEAVES)
_JOINS = tl.constexpr(JOINS)
_JOIN_RECORDS = tl.constexpr(JOIN_RECORDS)
_TABLE_WRITES = tl.constexpr(TABLE_WRITES)
_TOKEN_WRITES = tl.constexpr(TOKEN_WRITES)
_EXTRAS = tl.constexpr(EXTRAS)
_EXTRA_WORDS = tl.constexpr(EXTRA_WORDS)
_HISTORY = tl.constexpr(HISTORY)
_ADDITIONS = tl.constexpr(ADDITIONS)
_ALLOWED = tl.constexpr(ALLOWED)
_BAD_WORDS_SIZE = tl.constexpr(4 * NUM_BAD_WORDS)
_HASHES_SIZE = tl.constexpr(2 * NUM_HASHES)
_ONE_OUTPUT = tl.constexpr(ONE_OUTPUT)

_NUM_EXTRA_PROGRAMS: Final = 8


@triton.jit
def _join(
    words_ptr, count, records_ptr, tables_ptr, table_stride, num_columns, BLOCK_J: tl.constexpr, BLOCK_B: tl.constexpr
):  # fmt: skip
    """Records of the joining slots, and block tables of nothing but the trash block."""
    slots_ptr = words_ptr + tl.load(words_ptr + _JOINS + 1)
    source_ptr = words_ptr + tl.load(words_ptr + _JOIN_RECORDS)
    word = tl.arange(0, WORDS)
    for start in tl.range(0, count, BLOCK_J):
        join = start + tl.arange(0, BLOCK_J)
        inside = (join < count)[:, None]
        slot = tl.load(slots_ptr + join, mask=join < count, other=0).to(tl.int64)[:, None]
        record = tl.load(source_ptr + join[:, None] * WORDS + word[None, :], mask=inside, other=0)
        tl.store(records_ptr + slot * WORDS + word[None, :], record, mask=inside)
        for first in tl.range(0, num_columns, BLOCK_B):
            column = first + tl.arange(0, BLOCK_B)[None, :]
            nothing = tl.zeros([BLOCK_J, BLOCK_B], tl.int32)
            tl.store(tables_ptr + slot * table_stride + column, nothing, mask=inside & (column < num_columns))


@triton.jit
def _write(words_ptr, records_ptr, tables_ptr, table_stride, seen_ptr, vocab_size, BLOCK: tl.constexpr):
    """Table writes, and tokens that the host sampled."""
    lane = tl.arange(0, BLOCK)
    count = tl.load(words_ptr + _TABLE_WRITES)
    triples_ptr = words_ptr + tl.load(words_ptr + _TABLE_WRITES + 1)
    for start in tl.range(0, count, BLOCK):
        inside = start + lane < count
        triple_ptr = triples_ptr + (start + lane) * 3
        slot = tl.load(triple_ptr, mask=inside, other=0).to(tl.int64)
        index = tl.load(triple_ptr + 1, mask=inside, other=0)
        block = tl.load(triple_ptr + 2, mask=inside, other=0)
        tl.store(tables_ptr + slot * table_stride + index, block, mask=inside)

    count = tl.load(words_ptr + _TOKEN_WRITES)
    triples_ptr = words_ptr + tl.load(words_ptr + _TOKEN_WRITES + 1)
    for start in tl.range(0, count, BLOCK):
        inside = start + lane < count
        triple_ptr = triples_ptr + (start + lane) * 3
        slot = tl.load(triple_ptr, mask=inside, other=0).to(tl.int64)
        position = tl.load(triple_ptr + 1, mask=inside, other=0)
        token = tl.load(triple_ptr + 2, mask=inside, other=0)
        record_ptr = records_ptr + slot * WORDS
        tl.store(record_ptr + POSITION, position, mask=inside)
        tl.store(record_ptr + LAST_TOKEN, token, mask=inside)
        counts = inside & ((tl.load(record_ptr + NEEDS, mask=inside, other=0) & NEEDS_PENALTY) != 0)
        seen_ptrs = seen_ptr + slot * vocab_size + token
        tl.store(seen_ptrs, tl.load(seen_ptrs, mask=counts, other=0) + _ONE_OUTPUT, mask=counts)


@triton.jit
def _copy(source_ptr, target_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    for start in tl.range(0, SIZE, BLOCK):
        index = start + tl.arange(0, BLOCK)
        word = tl.load(source_ptr + index, mask=index < SIZE, other=0)
        tl.store(target_ptr + index, word, mask=index < SIZE)


@triton.jit
def _apply_extra(
    extra_ptr, words_ptr, seen_ptr, addition_ids_ptr, addition_values_ptr, allowed_ptr, bad_words_ptr, hashes_ptr,
    vocab_size,
    A: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, BLOCK)
    kind = tl.load(extra_ptr)
    slot = tl.load(extra_ptr + 1).to(tl.int64)
    values_ptr = words_ptr + tl.load(extra_ptr + 2)
    count = tl.load(extra_ptr + 3)
    if kind == _HISTORY:
        num_prompt_tokens = tl.load(extra_ptr + 4)
        row_ptr = seen_ptr + slot * vocab_size
        for start in tl.range(0, vocab_size, BLOCK):
            tl.store(row_ptr + start + lane, tl.zeros([BLOCK], tl.int32), mask=start + lane < vocab_size)
        tl.debug_barrier()
        for start in tl.range(0, count, BLOCK):
            index = start + lane
            token = tl.load(values_ptr + index, mask=index < count, other=0)
            # The lowest bit, once; what outputs add never touches it.
            tl.atomic_or(row_ptr + token, tl.full([BLOCK], 1, tl.int32), mask=index < num_prompt_tokens)
            is_output = (index >= num_prompt_tokens) & (index < count)
            tl.atomic_add(row_ptr + token, tl.full([BLOCK], _ONE_OUTPUT, tl.int32), mask=is_output)
    elif kind == _ADDITIONS:
        for start in tl.range(0, A, BLOCK):
            index = start + lane
            token = tl.load(values_ptr + index, mask=index < count, other=-1)
            value = tl.load(values_ptr + count + index, mask=index < count, other=0)
            tl.store(addition_ids_ptr + slot * A + index, token, mask=index < A)
            tl.store(addition_values_ptr + slot * A + index, value.to(tl.float32, bitcast=True), mask=index < A)
    elif kind == _ALLOWED:
        _copy(values_ptr, allowed_ptr + slot * M, M, BLOCK)
    else:
        _copy(values_ptr, bad_words_ptr + slot * _BAD_WORDS_SIZE, _BAD_WORDS_SIZE, BLOCK)
        _copy(values_ptr + _BAD_WORDS_SIZE, hashes_ptr + slot * _HASHES_SIZE, _HASHES_SIZE, BLOCK)


@triton.jit(do_not_specialize=["table_stride", "num_columns", "vocab_size"])
def _differences_kernel(
    words_ptr, records_ptr, tables_ptr, table_stride, num_columns, seen_ptr, addition_ids_ptr, addition_values_ptr,
    allowed_ptr, bad_words_ptr, hashes_ptr, vocab_size,
    A: tl.constexpr, M: tl.constexpr, NUM_EXTRA_PROGRAMS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if program == 0:
        num_leaves = tl.load(words_ptr + _LEAVES)
        num_joins = tl.load(words_ptr + _JOINS)
        num_writes = tl.load(words_ptr + _TABLE_WRITES) + tl.load(words_ptr + _TOKEN_WRITES)
        if num_leaves + num_joins > 0:
            slots_ptr = words_ptr + tl.load(words_ptr + _LEAVES + 1)
            lane = tl.arange(0, 256)
            for start in tl.range(0, num_leaves, 256):
                inside = start + lane < num_leaves
                slot = tl.load(slots_ptr + start + lane, mask=inside, other=0).to(tl.int64)
                tl.store(records_ptr + slot * WORDS + DONE, tl.full([256], 1, tl.int32), mask=inside)
            tl.debug_barrier()  # a slot may be left and joined in the same step
            _join(words_ptr, num_joins, records_ptr, tables_ptr, table_stride, num_columns, BLOCK_J=16, BLOCK_B=128)
            tl.debug_barrier()
        if num_writes > 0:
            _write(words_ptr, records_ptr, tables_ptr, table_stride, seen_ptr, vocab_size, BLOCK=512)
    else:
        count = tl.load(words_ptr + _EXTRAS)
        extras_ptr = words_ptr + tl.load(words_ptr + _EXTRAS + 1)
        for index in tl.range(program - 1, count, NUM_EXTRA_PROGRAMS):
            _apply_extra(
                extras_ptr + index * _EXTRA_WORDS, words_ptr, seen_ptr, addition_ids_ptr, addition_values_ptr,
                allowed_ptr, bad_words_ptr, hashes_ptr, vocab_size, A, M, BLOCK=512,
            )  # fmt: skip


def apply_differences(words: Tensor, table: SlotTensors) -> None:
    """Change the table as the words say. Slots of one kind are distinct; extras belong to slots that join here.

    words: int32, a header of HEADER_WORDS and what it names.
    """
    _differences_kernel[(1 + _NUM_EXTRA_PROGRAMS,)](
        words, table.records_SW, table.block_tables_SB, table.block_tables_SB.stride(0),
        table.block_tables_SB.shape[1], table.seen_SV, table.addition_ids_SA, table.addition_values_SA,
        table.allowed_SM, table.bad_words_SF.view(torch.int32), table.hashes_SN.view(torch.int32), table.vocab_size,
        A=table.addition_ids_SA.shape[1], M=table.allowed_SM.shape[1], NUM_EXTRA_PROGRAMS=_NUM_EXTRA_PROGRAMS,
        num_warps=4,
    )  # fmt: skip
