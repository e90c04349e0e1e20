"""From logits to tokens, a program a row: a row's token depends on its own logits, parameters and noise alone.

The order of what is done and the noise are those of ``aserve.model.sampler``, the CPU's: allowed tokens, additions,
stop ids below the least length, bad words, penalties; then the maximum, or temperature, min-p, top-k, top-p and a draw
by the Gumbel-max method. Filters look for the smallest logit that they keep by bisection, so ties stay together and no
row is ever sorted.

Shape suffixes: R rows, V vocabulary, S slots, K alternatives.
"""

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from aserve.core.plan import FLAG_INVALID
from aserve.model.kernels.noise import INDICES_PER_COUNTER, log_exponential, noise_words
from aserve.model.kernels.slots import (
    DONE,
    FIRST_STOP_ID,
    FREQUENCY,
    MIN_LENGTH,
    MIN_P,
    NEEDS,
    NEEDS_ADDITION,
    NEEDS_ALLOWED,
    NEEDS_BAD_WORDS,
    NEEDS_MIN_LENGTH,
    NEEDS_PENALTY,
    NUM_BAD_WORDS,
    NUM_HASHES,
    PRESENCE,
    REPETITION,
    SEED,
    STOP_IDS,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    WORDS,
    SlotTensors,
)

_MINUS_INFINITY = tl.constexpr(float("-inf"))
_UNROLL = tl.constexpr(6)
"""Blocks of a pass at once: a pass waits for memory, not for arithmetic."""
_NOBODY = tl.constexpr(2**31 - 1)
_INVALID = tl.constexpr(FLAG_INVALID)
_BAD_WORDS = tl.constexpr(NUM_BAD_WORDS)
_HASHES = tl.constexpr(NUM_HASHES)
_REACH = tl.constexpr(32.0)
"""Noise is within [-2.9, 22.9], so a logit so far below the largest one never wins; filters need not look there."""

_BLOCK_MAX: Final = 8192


@triton.jit
def _parameter(record_ptr, word: tl.constexpr):
    return tl.load(record_ptr + word).to(tl.float32, bitcast=True)


@triton.jit
def _edit(
    raw_ptr, work_ptr, record_ptr, slot, needs, length, seen_ptr, addition_ids_ptr, addition_values_ptr, allowed_ptr,
    bad_words_ptr, hashes_ptr, powers_ptr,
    V: tl.constexpr, A: tl.constexpr, BLOCK_A: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copies a row's logits to ``work_ptr``, changed. Barriers order what one thread writes and another one changes."""
    lane = tl.arange(0, BLOCK)
    for start in tl.range(0, V, BLOCK):
        index = start + lane
        x = tl.load(raw_ptr + index, mask=index < V, other=0.0)
        if needs & NEEDS_ALLOWED:
            word = tl.load(allowed_ptr + slot * M + index // 32, mask=index < V, other=0)
            x = tl.where(((word >> (index % 32)) & 1) != 0, x, _MINUS_INFINITY)
        tl.store(work_ptr + index, x, mask=index < V)
    tl.debug_barrier()
    if needs & NEEDS_ADDITION:
        entry = tl.arange(0, BLOCK_A)
        token = tl.load(addition_ids_ptr + slot * A + entry, mask=entry < A, other=-1)
        value = tl.load(addition_values_ptr + slot * A + entry, mask=entry < A, other=0.0)
        x = tl.load(work_ptr + token, mask=token >= 0, other=0.0)
        tl.store(work_ptr + token, x + value, mask=token >= 0)
        tl.debug_barrier()
    if needs & NEEDS_MIN_LENGTH:
        if length < tl.load(record_ptr + MIN_LENGTH):
            token = tl.load(record_ptr + FIRST_STOP_ID + tl.arange(0, STOP_IDS))
            lowest = tl.full([STOP_IDS], _MINUS_INFINITY, tl.float32)
            tl.store(work_ptr + token, lowest, mask=(token >= 0) & (token < V))
            tl.debug_barrier()
    if needs & NEEDS_BAD_WORDS:
        word_ptr = bad_words_ptr + (slot * _BAD_WORDS + tl.arange(0, _BAD_WORDS)) * 2
        entry = tl.load(word_ptr)
        count = entry & 0x7FFFFFFF
        token = entry >> 32
        expected = tl.load(word_ptr + 1)
        slot_hashes_ptr = hashes_ptr + slot * _HASHES
        here = tl.load(slot_hashes_ptr + length % _HASHES)
        is_long_enough = (count > 0) & (count <= length)
        before = tl.load(slot_hashes_ptr + (length - count) % _HASHES, mask=is_long_enough, other=0)
        found = here - before * tl.load(powers_ptr + count, mask=is_long_enough, other=0)
        lowest = tl.full([_BAD_WORDS], _MINUS_INFINITY, tl.float32)
        tl.store(work_ptr + token, lowest, mask=is_long_enough & (found == expected))
        tl.debug_barrier()
    if needs & NEEDS_PENALTY:
        repetition = _parameter(record_ptr, REPETITION)
        presence = _parameter(record_ptr, PRESENCE)
        frequency = _parameter(record_ptr, FREQUENCY)
        for start in tl.range(0, V, BLOCK):
            index = start + lane
            seen = tl.load(seen_ptr + slot * V + index, mask=index < V, other=0)
            x = tl.load(work_ptr + index, mask=index < V, other=0.0)
            num_outputs = seen // 2
            y = tl.where(x > 0, x / repetition, x * repetition)
            y -= frequency * num_outputs.to(tl.float32)
            y -= tl.where(num_outputs > 0, presence, 0.0)
            tl.store(work_ptr + index, tl.where(seen > 0, y, x), mask=index < V)
        tl.debug_barrier()


@triton.jit
def _measure(row_ptr, temperature, least, largest, V: tl.constexpr, BLOCK: tl.constexpr):
    """Of the scaled logits >= least: how many, and the sum of exp(x - largest)."""
    lane = tl.arange(0, BLOCK)
    count = tl.zeros([BLOCK], tl.int32)
    weight = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, V, BLOCK, loop_unroll_factor=_UNROLL):
        index = start + lane
        x = tl.load(row_ptr + index, mask=index < V, other=_MINUS_INFINITY) / temperature
        count += (x >= least).to(tl.int32)
        weight += tl.where(x >= least, tl.exp(x - largest), 0.0)
    return tl.sum(count), tl.sum(weight)


@triton.jit
def _cut(row_ptr, temperature, floor, largest, target, BY_WEIGHT: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr):
    """A bound t >= floor that keeps (x >= t) the fewest logits that reach ``target`` in number or weight; else floor.

    Bisection between low, which reaches it, and high, which does not; it ends when one logit is left between them, or
    none but equal ones. (Three bounds a pass halve the passes and double their time.)
    """
    low = floor
    high = largest + 1.0
    count_low, weight = _measure(row_ptr, temperature, low, largest, V, BLOCK)
    count_high = tl.zeros_like(count_low)
    reaches = weight >= target if BY_WEIGHT else count_low.to(tl.float32) >= target
    middle = low + (high - low) * 0.5
    while reaches & (count_low - count_high > 1) & (middle > low) & (middle < high):
        count, weight = _measure(row_ptr, temperature, middle, largest, V, BLOCK)
        is_low = weight >= target if BY_WEIGHT else count.to(tl.float32) >= target
        low = tl.where(is_low, middle, low)
        count_low = tl.where(is_low, count, count_low)
        high = tl.where(is_low, high, middle)
        count_high = tl.where(is_low, count_high, count)
        middle = low + (high - low) * 0.5
    return low


@triton.jit
def _consider(score, token, row_ptr, index, word, temperature, least, V: tl.constexpr):
    """Keep the smaller of ``score`` and log E - logit, the lower index among equals."""
    x = tl.load(row_ptr + index, mask=index < V, other=_MINUS_INFINITY) / temperature
    new = tl.where((x >= least) & (index < V), log_exponential(word.to(tl.uint32)) - x, float("inf"))
    better = (new < score) | ((new == score) & (index < token))
    return tl.where(better, new, score), tl.where(better, index, token)


@triton.jit
def _draw(row_ptr, temperature, least, seed, position, V: tl.constexpr, BLOCK: tl.constexpr):
    """The Gumbel-max draw among scaled logits >= least, written as argmin(log E - logit)."""
    NUM_COUNTERS: tl.constexpr = BLOCK // INDICES_PER_COUNTER
    score = tl.full([NUM_COUNTERS], float("inf"), tl.float32)
    token = tl.full([NUM_COUNTERS], _NOBODY, tl.int32)
    for start in tl.range(0, V, BLOCK):
        counter = start // INDICES_PER_COUNTER + tl.arange(0, NUM_COUNTERS)
        index = counter * INDICES_PER_COUNTER
        word_0, word_1, word_2, word_3 = noise_words(seed, position, counter)
        score, token = _consider(score, token, row_ptr, index, word_0, temperature, least, V)
        score, token = _consider(score, token, row_ptr, index + 1, word_0 >> 32, temperature, least, V)
        score, token = _consider(score, token, row_ptr, index + 2, word_1, temperature, least, V)
        score, token = _consider(score, token, row_ptr, index + 3, word_1 >> 32, temperature, least, V)
        score, token = _consider(score, token, row_ptr, index + 4, word_2, temperature, least, V)
        score, token = _consider(score, token, row_ptr, index + 5, word_2 >> 32, temperature, least, V)
        score, token = _consider(score, token, row_ptr, index + 6, word_3, temperature, least, V)
        score, token = _consider(score, token, row_ptr, index + 7, word_3 >> 32, temperature, least, V)
    return tl.min(tl.where(score == tl.min(score), token, _NOBODY))


@triton.jit
def _sample_kernel(
    logits_ptr, work_ptr, slots_ptr, lengths_ptr, records_ptr, seen_ptr, addition_ids_ptr, addition_values_ptr,
    allowed_ptr, bad_words_ptr, hashes_ptr, powers_ptr, tokens_ptr, flags_ptr,
    V: tl.constexpr, A: tl.constexpr, BLOCK_A: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    record_ptr = records_ptr + slot * WORDS
    if tl.load(record_ptr + DONE) != 0:
        tl.store(tokens_ptr + row, 0)
        tl.store(flags_ptr + row, 0)
    else:
        length = tl.load(lengths_ptr + row)
        needs = tl.load(record_ptr + NEEDS)
        row_ptr = logits_ptr + row * V
        if needs != 0:
            work_row_ptr = work_ptr + row * V
            _edit(
                row_ptr, work_row_ptr, record_ptr, slot, needs, length, seen_ptr, addition_ids_ptr,
                addition_values_ptr, allowed_ptr, bad_words_ptr, hashes_ptr, powers_ptr, V, A, BLOCK_A, M, BLOCK,
            )  # fmt: skip
            row_ptr = work_row_ptr

        lane = tl.arange(0, BLOCK)
        best = tl.full([BLOCK], _MINUS_INFINITY, tl.float32)
        where = tl.full([BLOCK], _NOBODY, tl.int32)
        is_nan = tl.zeros([BLOCK], tl.int32)
        for start in tl.range(0, V, BLOCK, loop_unroll_factor=_UNROLL):
            index = start + lane
            x = tl.load(row_ptr + index, mask=index < V, other=_MINUS_INFINITY)
            is_nan |= (x != x).to(tl.int32)
            where = tl.where(x > best, index, where)  # strictly: the lowest index of equals stays
            best = tl.maximum(best, x)
        largest = tl.max(best)
        token = tl.min(tl.where(best == largest, where, _NOBODY))
        is_invalid = (tl.max(is_nan) != 0) | (largest == _MINUS_INFINITY) | (largest == float("inf"))
        token = tl.where(is_invalid, 0, token)

        temperature = _parameter(record_ptr, TEMPERATURE)
        if (temperature > 0) & (is_invalid == 0):
            largest = largest / temperature
            min_p = _parameter(record_ptr, MIN_P)
            top_k = tl.load(record_ptr + TOP_K)
            top_p = _parameter(record_ptr, TOP_P)
            lowest = largest - _REACH
            least = tl.maximum(lowest, tl.where(min_p > 0, largest + tl.log(min_p), lowest))
            if top_k > 0:
                least = _cut(row_ptr, temperature, least, largest, top_k.to(tl.float32), False, V, BLOCK)
            if top_p < 1:
                _, weight = _measure(row_ptr, temperature, least, largest, V, BLOCK)
                least = _cut(row_ptr, temperature, least, largest, top_p * weight, True, V, BLOCK)
            seed = tl.load((record_ptr + SEED).to(tl.pointer_type(tl.int64))).to(tl.uint64, bitcast=True)
            token = _draw(row_ptr, temperature, least, seed, length, V, BLOCK)
        tl.store(tokens_ptr + row, token)
        tl.store(flags_ptr + row, tl.where(is_invalid, _INVALID, 0))


def sample(
    logits_RV: Tensor,
    work_RV: Tensor,
    slots_R: Tensor,
    lengths_R: Tensor,
    table: SlotTensors,
    *,
    tokens_R: Tensor,
    flags_R: Tensor,
) -> None:
    """Choose R tokens by their slots' parameters. Reads the table only.

    logits: float32, unchanged. work: float32 of the same shape, for rows whose logits have to be changed first.
    lengths: int32, tokens of the sequence before the new one, which is the new one's position. tokens, flags: int32;
    FLAG_INVALID where logits were NaN, infinite or all -inf (the token is then 0). Rows of done slots get 0 and 0.
    """
    num_rows, vocab_size = logits_RV.shape
    num_additions = table.addition_ids_SA.shape[1]
    block = min(_BLOCK_MAX, max(128, triton.next_power_of_2(vocab_size)))
    _sample_kernel[(num_rows,)](
        logits_RV, work_RV, slots_R, lengths_R, table.records_SW, table.seen_SV, table.addition_ids_SA,
        table.addition_values_SA, table.allowed_SM, table.bad_words_SF, table.hashes_SN, table.powers_N,
        tokens_R, flags_R,
        V=vocab_size, A=num_additions, BLOCK_A=triton.next_power_of_2(max(1, num_additions)),
        M=table.allowed_SM.shape[1], BLOCK=block, num_warps=16 if block == _BLOCK_MAX else 4,
    )  # fmt: skip


@triton.jit
def _logprobs_kernel(
    logits_ptr, tokens_ptr, token_logprobs_ptr, ranks_ptr, top_ids_ptr, top_logprobs_ptr,
    V: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * V
    lane = tl.arange(0, BLOCK)
    chosen = tl.load(row_ptr + tl.load(tokens_ptr + row))
    best = tl.full([BLOCK], _MINUS_INFINITY, tl.float32)
    rank = tl.full([BLOCK], 0, tl.int32)
    for start in tl.range(0, V, BLOCK):
        index = start + lane
        x = tl.load(row_ptr + index, mask=index < V, other=_MINUS_INFINITY)
        best = tl.maximum(best, x)
        rank += (x > chosen).to(tl.int32)
    largest = tl.max(best)
    total = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, V, BLOCK):
        index = start + lane
        x = tl.load(row_ptr + index, mask=index < V, other=_MINUS_INFINITY)
        total += tl.exp(x - largest)
    normaliser = largest + tl.log(tl.sum(total))
    tl.store(token_logprobs_ptr + row, chosen - normaliser)
    tl.store(ranks_ptr + row, tl.sum(rank) + 1)

    value = tl.full([], float("inf"), tl.float32)
    token = tl.full([], -1, tl.int32)
    for place in tl.range(0, K):
        # The next one in the order of falling logits, and rising ids among equals.
        best = tl.full([BLOCK], _MINUS_INFINITY, tl.float32)
        where = tl.full([BLOCK], _NOBODY, tl.int32)
        for start in tl.range(0, V, BLOCK, loop_unroll_factor=_UNROLL):
            index = start + lane
            x = tl.load(row_ptr + index, mask=index < V, other=_MINUS_INFINITY)
            later = (index < V) & ((x < value) | ((x == value) & (index > token)))
            better = later & ((x > best) | (where == _NOBODY))
            where = tl.where(better, index, where)
            best = tl.where(better, x, best)
        value = tl.max(best)
        token = tl.min(tl.where(best == value, where, _NOBODY))
        tl.store(top_ids_ptr + row * K + place, token)
        tl.store(top_logprobs_ptr + row * K + place, value - normaliser)


def top_logprobs(
    logits_RV: Tensor,
    tokens_R: Tensor,
    *,
    token_logprobs_R: Tensor,
    ranks_R: Tensor,
    top_ids_RK: Tensor,
    top_logprobs_RK: Tensor,
) -> None:
    """Log-probabilities and ranks (1 is the likeliest) of ``tokens`` and the K likeliest, equals lowest id first.

    logits: float32. ids and ranks: int32. K passes over the logits: 20 of 49,152 take some 40 µs, all rows at once.
    """
    num_rows, vocab_size = logits_RV.shape
    block = min(_BLOCK_MAX, max(128, triton.next_power_of_2(vocab_size)))
    _logprobs_kernel[(num_rows,)](
        logits_RV, tokens_R, token_logprobs_R, ranks_R, top_ids_RK, top_logprobs_RK,
        V=vocab_size, K=top_ids_RK.shape[1], BLOCK=block, num_warps=16 if block == _BLOCK_MAX else 4,
    )  # fmt: skip
