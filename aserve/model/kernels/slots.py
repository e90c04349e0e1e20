"""The slot table as the kernels read it: a record a slot in one cache line, and beside it what only some requests need.

A join writes one record, so binding a slot is one small copy however many parameters a request has.

Shape suffixes: S slots, W words of a record, B block-table entries, V vocabulary, A logit additions, M words of a mask.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntFlag
from typing import Final

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from aserve.core.plan import Join
from aserve.core.request import MAX_STOP_IDS

NO_TOKEN: Final = -1
_INT32_MAX: Final = 2**31 - 1

RECORD: Final = np.dtype(
    [
        ("last_token", "<i4"),
        ("position", "<i4"),  # of the next token to compute
        ("done", "<i4"),  # nobody's or finished: computes into the trash block and changes nothing
        ("needs", "<i4"),
        ("min_length", "<i4"),
        ("max_length", "<i4"),
        ("seed", "<i8"),
        ("temperature", "<f4"),
        ("top_k", "<i4"),
        ("top_p", "<f4"),
        ("min_p", "<f4"),
        ("repetition", "<f4"),
        ("presence", "<f4"),
        ("frequency", "<f4"),
        ("epoch", "<i4"),
        ("stop_ids", "<i4", MAX_STOP_IDS),
    ]
)
NUM_WORDS: Final = RECORD.itemsize // 4


def _word(name: str) -> tl.constexpr:
    fields = RECORD.fields
    assert fields is not None
    return tl.constexpr(fields[name][1] // 4)


WORDS = tl.constexpr(NUM_WORDS)
STOP_IDS = tl.constexpr(MAX_STOP_IDS)
LAST_TOKEN = _word("last_token")
POSITION = _word("position")
DONE = _word("done")
NEEDS = _word("needs")
MIN_LENGTH = _word("min_length")
MAX_LENGTH = _word("max_length")
SEED = _word("seed")
TEMPERATURE = _word("temperature")
TOP_K = _word("top_k")
TOP_P = _word("top_p")
MIN_P = _word("min_p")
REPETITION = _word("repetition")
PRESENCE = _word("presence")
FREQUENCY = _word("frequency")
FIRST_STOP_ID = _word("stop_ids")


class SlotNeeds(IntFlag):
    """What the sampler has to do to a row's logits before it chooses."""

    PENALTY = 1
    ADDITION = 2
    ALLOWED = 4
    MIN_LENGTH = 8
    BAD_WORDS = 16


NEEDS_PENALTY = tl.constexpr(int(SlotNeeds.PENALTY))
NEEDS_ADDITION = tl.constexpr(int(SlotNeeds.ADDITION))
NEEDS_ALLOWED = tl.constexpr(int(SlotNeeds.ALLOWED))
NEEDS_MIN_LENGTH = tl.constexpr(int(SlotNeeds.MIN_LENGTH))
NEEDS_BAD_WORDS = tl.constexpr(int(SlotNeeds.BAD_WORDS))

NUM_BAD_WORDS: Final = 512
"""Of more than one token, that a slot holds: each that a request may name, alone and behind a space."""
NUM_HASHES: Final = 2048
"""Positions whose hashes a slot keeps, a power of two: a bad word has fewer tokens."""
HASH_BASE: Final = 0x9E3779B97F4A7C15 - (1 << 64)
"""Of the polynomial hash of a sequence's tokens, modulo 2**64, as an int64."""

ONE_OUTPUT: Final = 2
"""``seen_SV`` holds 1 for a token that the prompt has, plus 2 for each time that the output does."""


def slot_records(joins: Sequence[Join], vocab_size: int) -> NDArray[np.void]:
    """The records of the slots that these sequences join, column by column: a join costs 3 µs."""
    params = [join.params for join in joins]
    records = np.zeros(len(joins), RECORD)
    records["position"] = [join.position for join in joins]
    records["needs"] = [_needs(join) for join in joins]
    records["min_length"] = [join.min_length for join in joins]
    records["max_length"] = [min(join.max_length, _INT32_MAX) for join in joins]
    records["seed"] = np.array([join.seed & 0xFFFF_FFFF_FFFF_FFFF for join in joins], np.uint64).view(np.int64)
    records["temperature"] = [p.temperature for p in params]
    records["top_k"] = [p.top_k if 0 < p.top_k < vocab_size else 0 for p in params]
    records["top_p"] = [p.top_p for p in params]
    records["min_p"] = [p.min_p for p in params]
    records["repetition"] = [p.repetition_penalty for p in params]
    records["presence"] = [p.presence_penalty for p in params]
    records["frequency"] = [p.frequency_penalty for p in params]
    records["epoch"] = [join.epoch for join in joins]
    records["stop_ids"] = NO_TOKEN
    for row, join in zip(records["stop_ids"], joins, strict=True):
        if join.stop_ids:
            row[: len(join.stop_ids)] = join.stop_ids
    return records


def _needs(join: Join) -> int:
    params, needs = join.params, 0  # a plain int: an IntFlag's "or" takes a microsecond
    if params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0:
        needs |= SlotNeeds.PENALTY.value
    if params.logit_bias:
        needs |= SlotNeeds.ADDITION.value
    for word in params.bad_words:
        needs |= SlotNeeds.ADDITION.value if len(word) == 1 else SlotNeeds.BAD_WORDS.value
    if params.allowed_token_ids is not None:
        needs |= SlotNeeds.ALLOWED.value
    if join.min_length > join.num_prompt_tokens and join.stop_ids:
        needs |= SlotNeeds.MIN_LENGTH.value
    return needs


def additions(join: Join, vocab_size: int) -> dict[int, float]:
    """What is added to single logits: biases, -inf for bad words of one token."""
    found = {token: value for token, value in join.params.logit_bias if 0 <= token < vocab_size}
    found |= {word[0]: -np.inf for word in join.params.bad_words if len(word) == 1 and 0 <= word[0] < vocab_size}
    return found


def allowed_mask(join: Join, vocab_size: int) -> NDArray[np.int32]:
    """One bit a token, the lowest first; all set where the request does not say."""
    allowed = join.params.allowed_token_ids
    bits = np.full(-(-vocab_size // 32) * 32, allowed is None)
    if allowed is not None:
        bits[[token for token in allowed if 0 <= token < vocab_size]] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


def bad_words(join: Join, vocab_size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """int64 [NUM_BAD_WORDS, 2]: of words of several tokens the number before the last one and, in the upper half, the
    last one; then the hash of those before it. int64 [NUM_HASHES]: hashes of what the sequence holds so far.

    A sequence of p tokens has the hash h(p) = h(p - 1) * HASH_BASE + token + 1; entry p % NUM_HASHES. It may start
    anywhere: that of its last n tokens is h(p) - h(p - n) * HASH_BASE**n.
    """
    words = [word for word in join.params.bad_words if 1 < len(word) < NUM_HASHES and 0 <= word[-1] < vocab_size]
    entries = np.zeros((NUM_BAD_WORDS, 2), np.int64)
    for entry, word in zip(entries, words, strict=False):
        entry[:] = (len(word) - 1) | (word[-1] << 32), _signed(_hashes(word[:-1])[-1])
    longest = max((len(word) - 1 for word in words), default=0)
    tail = join.history[-longest:] if longest else join.history[:0]
    first = len(join.history) - len(tail)
    hashes = np.zeros(NUM_HASHES, np.int64)
    hashes[np.arange(first, first + len(tail) + 1) % NUM_HASHES] = [_signed(h) for h in _hashes(tail.tolist())]
    return entries, hashes


def _hashes(tokens: Sequence[int]) -> list[int]:
    """Of nothing, of the first token, of the first two, ..."""
    found = [0]
    for token in tokens:
        found.append((found[-1] * HASH_BASE + token + 1) & 0xFFFF_FFFF_FFFF_FFFF)
    return found


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >> 63 else bits


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotTensors:
    """Device memory of S slots. The last one is nobody's and done for ever: padding names it.

    records_SW: int32, RECORD. block_tables_SB, seen_SV: int32. addition_ids_SA: int32, NO_TOKEN where unused, ids of a
    slot distinct; addition_values_SA: float32. allowed_SM: int32, one bit a token. bad_words_SF, hashes_SN: int64, what
    ``bad_words`` makes, rows of F = 2 * NUM_BAD_WORDS and N = NUM_HASHES. powers_N: int64, of HASH_BASE.
    """

    records_SW: Tensor
    block_tables_SB: Tensor
    seen_SV: Tensor
    addition_ids_SA: Tensor
    addition_values_SA: Tensor
    allowed_SM: Tensor
    bad_words_SF: Tensor
    hashes_SN: Tensor
    powers_N: Tensor

    @classmethod
    def allocate(
        cls, *, num_slots: int, max_num_blocks: int, vocab_size: int, max_additions: int, device: torch.device | str
    ) -> "SlotTensors":
        """For ``num_slots`` sequences, and the slot that padding names."""

        def full(value: float, *size: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.full((num_slots + 1, *size), value, dtype=dtype, device=device)

        records_SW = full(0, NUM_WORDS)
        records_SW[:, DONE.value] = 1
        powers = [_signed(pow(HASH_BASE, exponent, 1 << 64)) for exponent in range(NUM_HASHES)]
        return cls(
            records_SW=records_SW,
            block_tables_SB=full(0, max_num_blocks),
            seen_SV=full(0, vocab_size),
            addition_ids_SA=full(NO_TOKEN, max_additions),
            addition_values_SA=full(0.0, max_additions, dtype=torch.float32),
            allowed_SM=full(-1, -(-vocab_size // 32)),
            bad_words_SF=full(0, 2 * NUM_BAD_WORDS, dtype=torch.int64),
            hashes_SN=full(0, NUM_HASHES, dtype=torch.int64),
            powers_N=torch.tensor(powers, dtype=torch.int64, device=device),
        )

    @property
    def vocab_size(self) -> int:
        return self.seen_SV.shape[1]
