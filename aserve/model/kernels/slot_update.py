"""The two ends of a step on the device: what its tokens are and where they go, and what they change in the slot table.

Shape suffixes: S sequences of the step, T tokens, N ring slots, W words of a record, B block-table entries.
"""

from typing import Final

import numpy as np
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from aserve.core.plan import FLAG_DONE, FLAG_INVALID
from aserve.model.kernels.slots import (
    DONE,
    FIRST_STOP_ID,
    HASH_BASE,
    LAST_TOKEN,
    MAX_LENGTH,
    MIN_LENGTH,
    NEEDS,
    NEEDS_BAD_WORDS,
    NEEDS_PENALTY,
    NUM_HASHES,
    ONE_OUTPUT,
    POSITION,
    STOP_IDS,
    WORDS,
    SlotTensors,
)

FROM_SLOT: Final = -1
"""As a token id: the device knows it, it is the last one of the slot."""

_TOKEN_BITS: Final = 24
_FLAG_BITS: Final = 8

_FLAG_DONE = tl.constexpr(FLAG_DONE)
_FLAG_INVALID = tl.constexpr(FLAG_INVALID)
_TOKEN_SHIFT = tl.constexpr(_TOKEN_BITS)
_STEP_SHIFT = tl.constexpr(_TOKEN_BITS + _FLAG_BITS)
_ONE_OUTPUT = tl.constexpr(ONE_OUTPUT)
_HASHES = tl.constexpr(NUM_HASHES)
_HASH_BASE = tl.constexpr(HASH_BASE)


@triton.jit(do_not_specialize=["table_stride", "num_sequences", "num_tokens"])
def _lay_out_kernel(
    tokens_in_ptr, slots_ptr, starts_ptr, records_ptr, tables_ptr, table_stride,
    token_ids_ptr, positions_ptr, slot_mapping_ptr, context_lens_ptr, last_rows_ptr, num_sequences, num_tokens,
    P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0)
    start = tl.load(starts_ptr + sequence)
    end = tl.load(starts_ptr + sequence + 1)
    slot = tl.load(slots_ptr + sequence).to(tl.int64)
    record_ptr = records_ptr + slot * WORDS
    is_live = tl.load(record_ptr + DONE) == 0
    first_position = tl.where(is_live, tl.load(record_ptr + POSITION), 0)
    last_token = tl.load(record_ptr + LAST_TOKEN)
    tl.store(context_lens_ptr + sequence, tl.where(is_live & (end > start), first_position + end - start, 0))
    tl.store(last_rows_ptr + sequence, tl.maximum(end - 1, 0))
    # The last sequence's program also takes the padding behind it.
    stop = tl.where(sequence == num_sequences - 1, num_tokens, end)
    for first in tl.range(start, stop, BLOCK):
        row = first + tl.arange(0, BLOCK)
        inside = row < stop
        is_own = (row < end) & is_live
        token = tl.load(tokens_in_ptr + row, mask=inside, other=0)
        token = tl.where(token < 0, last_token, token)
        position = tl.where(is_own, first_position + row - start, 0)
        block = tl.load(tables_ptr + slot * table_stride + position // P, mask=is_own, other=0)
        tl.store(token_ids_ptr + row, tl.where(is_own, token, 0), mask=inside)
        tl.store(positions_ptr + row, position, mask=inside)
        tl.store(slot_mapping_ptr + row, tl.where(is_own, block * P + position % P, 0), mask=inside)


def lay_out(
    tokens_in_T: Tensor,
    slots_S: Tensor,
    query_starts: Tensor,
    table: SlotTensors,
    block_size: int,
    *,
    token_ids_T: Tensor,
    positions_T: Tensor,
    slot_mapping_T: Tensor,
    context_lens_S: Tensor,
    last_rows_S: Tensor,
) -> None:
    """The step's tokens from what the host says (tokens of chunks, FROM_SLOT for rows) and the table knows. All int32.

    query_starts: [S + 1], the first is 0; sequences that the step does not need have no tokens. Rows of done slots and
    tokens behind the last sequence are padding: token 0 at position 0, written to slot 0, in the trash block.
    context_lens: tokens in the cache after the step, 0 for done ones. last_rows: the row of a sequence's last token.
    """
    _lay_out_kernel[(len(slots_S),)](
        tokens_in_T, slots_S, query_starts, table.records_SW, table.block_tables_SB, table.block_tables_SB.stride(0),
        token_ids_T, positions_T, slot_mapping_T, context_lens_S, last_rows_S, len(slots_S), len(tokens_in_T),
        P=block_size, BLOCK=256, num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_sequences", "num_tokens"])
def _lay_out_rows_kernel(
    slots_ptr, starts_ptr, context_lens_ptr, row_slots_ptr, row_contexts_ptr, num_sequences, num_tokens,
    BLOCK: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0)
    start = tl.load(starts_ptr + sequence)
    end = tl.load(starts_ptr + sequence + 1)
    slot = tl.load(slots_ptr + sequence)
    context = tl.load(context_lens_ptr + sequence)
    stop = tl.where(sequence == num_sequences - 1, num_tokens, end)
    for first in tl.range(start, stop, BLOCK):
        row = first + tl.arange(0, BLOCK)
        is_own = (row < end) & (context > 0)
        tl.store(row_slots_ptr + row, tl.zeros_like(row) + slot, mask=row < stop)
        tl.store(row_contexts_ptr + row, tl.where(is_own, context - (end - 1 - row), 0), mask=row < stop)


def lay_out_rows(
    slots_S: Tensor, query_starts: Tensor, context_lens_S: Tensor, *, row_slots_T: Tensor, row_contexts_T: Tensor
) -> None:
    """Each token as a row of its own: its slot, and the tokens that it sees, itself included; 0 for padding.

    Reference mode computes a prompt's tokens as it computes decoded ones. All int32; arguments as ``lay_out``'s.
    """
    _lay_out_rows_kernel[(len(slots_S),)](
        slots_S, query_starts, context_lens_S, row_slots_T, row_contexts_T, len(slots_S), len(row_slots_T),
        BLOCK=256, num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_sequences", "vocab_size"])
def _commit_kernel(
    tokens_ptr, flags_ptr, slots_ptr, starts_ptr, context_lens_ptr, samples_ptr, records_ptr, seen_ptr, hashes_ptr,
    ring_ptr, step_ptr, num_sequences, vocab_size,
    N: tl.constexpr, RING_ROWS: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    sequence = tl.arange(0, BLOCK_S)
    inside = sequence < num_sequences
    slot = tl.load(slots_ptr + sequence, mask=inside, other=0).to(tl.int64)
    record_ptr = records_ptr + slot * WORDS
    was_done = tl.load(record_ptr + DONE, mask=inside, other=1) != 0
    num_queries = tl.load(starts_ptr + sequence + 1, mask=inside, other=0)
    num_queries -= tl.load(starts_ptr + sequence, mask=inside, other=0)
    is_live = inside & (num_queries > 0) & (was_done == 0)
    samples = is_live & (tl.load(samples_ptr + sequence, mask=inside, other=0) != 0)
    token = tl.load(tokens_ptr + sequence, mask=samples, other=0)
    is_invalid = samples & ((tl.load(flags_ptr + sequence, mask=samples, other=0) & _FLAG_INVALID) != 0)
    writes = samples & (is_invalid == 0)

    context = tl.load(context_lens_ptr + sequence, mask=inside, other=0)
    length = context + 1  # with the new token
    stop_id = tl.load(
        record_ptr[:, None] + FIRST_STOP_ID + tl.arange(0, STOP_IDS)[None, :], mask=writes[:, None], other=-1
    )  # fmt: skip
    is_stop = tl.max((stop_id == token[:, None]).to(tl.int32), 1) != 0
    min_length = tl.load(record_ptr + MIN_LENGTH, mask=writes, other=0)
    max_length = tl.load(record_ptr + MAX_LENGTH, mask=writes, other=0)
    ended = writes & ((is_stop & (length > min_length)) | (length >= max_length))

    tl.store(record_ptr + POSITION, context, mask=is_live)
    tl.store(record_ptr + LAST_TOKEN, token, mask=writes)
    tl.store(record_ptr + DONE, tl.full([BLOCK_S], 1, tl.int32), mask=ended | is_invalid)
    needs = tl.load(record_ptr + NEEDS, mask=writes, other=0)
    counts = writes & ((needs & NEEDS_PENALTY) != 0)
    seen_ptrs = seen_ptr + slot * vocab_size + token
    tl.store(seen_ptrs, tl.load(seen_ptrs, mask=counts, other=0) + _ONE_OUTPUT, mask=counts)

    hashes = writes & ((needs & NEEDS_BAD_WORDS) != 0)
    hash = tl.load(hashes_ptr + slot * _HASHES + context % _HASHES, mask=hashes, other=0)
    hash = hash * tl.full([BLOCK_S], _HASH_BASE, tl.int64) + token + 1
    tl.store(hashes_ptr + slot * _HASHES + length % _HASHES, hash, mask=hashes)

    step = tl.load(step_ptr)
    flags = tl.where(ended | was_done, _FLAG_DONE, 0) | tl.where(is_invalid, _FLAG_INVALID, 0)
    word = (step << _STEP_SHIFT) | (flags.to(tl.int64) << _TOKEN_SHIFT) | token.to(tl.int64)
    tl.store(ring_ptr + (step % N) * RING_ROWS + sequence, word, mask=inside)
    tl.debug_barrier()
    tl.store(step_ptr, step + 1)


def commit(
    tokens_S: Tensor,
    flags_S: Tensor,
    slots_S: Tensor,
    query_starts: Tensor,
    context_lens_S: Tensor,
    samples_S: Tensor,
    table: SlotTensors,
    *,
    ring_NS: Tensor,
    step_1: Tensor,
) -> None:
    """End a step: positions, last tokens, counts and done flags of live slots; a word a sequence to the host.

    tokens, flags: the sampler's. samples: int32, 0 for chunks that are not the last and for rows that the host samples:
    of those only the position moves. A slot may occur once. A stop id ends a sequence that is longer than its least
    length with it, as the length limit does; invalid rows end too. A done slot changes nothing; its word says done.
    ring: int64 [N, at least S], pinned host memory or the device's; a step's words lie in row step % N. step: int64
    [1], the number that words carry, one higher after each step. At most 1,024 sequences.
    """
    num_sequences = len(slots_S)
    _commit_kernel[(1,)](
        tokens_S, flags_S, slots_S, query_starts, context_lens_S, samples_S, table.records_SW, table.seen_SV,
        table.hashes_SN, ring_NS, step_1, num_sequences, table.vocab_size,
        N=ring_NS.shape[0], RING_ROWS=ring_NS.shape[1], BLOCK_S=max(16, triton.next_power_of_2(num_sequences)),
        num_warps=4,
    )  # fmt: skip


def unpack_words(words: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.uint8], NDArray[np.int32]]:
    """Steps modulo 2**32, flags and tokens of result words. A word of zeros is step 0, which no step has."""
    bits = words.view(np.uint64)
    return (
        (bits >> np.uint64(_TOKEN_BITS + _FLAG_BITS)).astype(np.int64),
        (bits >> np.uint64(_TOKEN_BITS)).astype(np.uint8),
        (bits & np.uint64((1 << _TOKEN_BITS) - 1)).astype(np.int32),
    )
