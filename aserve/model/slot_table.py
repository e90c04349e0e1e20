"""The slot table: what the device knows about each running sequence. The host sends differences, steps write back.

Arrays with a row a slot, so that a decode step gathers by slot and no Python object stands for a row. NumPy's, which
for a few numbers takes a fraction of torch's time between two steps that empty the caches; tensors only where logits
meet them. What only some requests need (counts for penalties, biases, masks, bad words) is allocated when the first of
them comes.

Shape suffixes: S slots, R rows that sample, B block-table entries, E stop ids, V vocabulary, A logit biases,
W bad words, P tokens before a bad word's last, J joins, N edits.
"""

from enum import IntFlag
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aserve.core.plan import BatchPlan, Join
from aserve.core.request import MAX_STOP_IDS, SamplingParams
from aserve.model.sampler import AllowedTokens, Draws, EndRule, LogitEdits, Penalties, SamplingRows

Ints = NDArray[np.int64]

_NO_TOKEN: Final = -1
_ANY: Final = -1
"""In the prefix of a bad word: matches every token, for words shorter than the longest."""
_BEFORE_START: Final = -2
"""In a tail: before the sequence's first token."""
_NEVER: Final = -3
"""In the prefix of an unused bad word: matches no token."""

_IN_PROMPT: Final = 1
_ONE_OUTPUT: Final = 2
"""What ``seen_SV`` holds of a token: 1 if the prompt has it, plus 2 for each time that the output does."""


class Need(IntFlag):
    """What a slot's parameters ask of the sampler; kept on the host, so that a plain batch is known without a look."""

    DRAW = 1
    FILTER = 2
    PENALTY = 4
    BIAS = 8
    BAD_WORDS = 16
    ALLOWED = 32
    MIN_LENGTH = 64

    @classmethod
    def of(cls, join: Join, vocab_size: int) -> "Need":
        params = join.params
        need = cls(0)
        if params.temperature > 0:
            need |= cls.DRAW
            if 0 < params.top_k < vocab_size or params.top_p < 1 or params.min_p > 0:
                need |= cls.FILTER
        if params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0:
            need |= cls.PENALTY
        if params.logit_bias:
            need |= cls.BIAS
        if params.bad_words:
            need |= cls.BAD_WORDS
        if params.allowed_token_ids is not None:
            need |= cls.ALLOWED
        if join.min_length > join.num_prompt_tokens and join.stop_ids:
            need |= cls.MIN_LENGTH
        return need


class SlotTable:
    """Mutable device state, written only by the thread that runs the steps.

    ``position_S`` is the next position to compute: the tokens of the sequence whose K/V are in the cache. A slot that
    is done, or bound to nobody, is inert: its rows compute into the trash block and change nothing here.
    """

    def __init__(self, *, num_slots: int, max_num_blocks: int, vocab_size: int) -> None:
        self.num_slots = num_slots
        self.vocab_size = vocab_size
        self.done_S = np.ones(num_slots, np.bool_)
        self.epoch_S = np.zeros(num_slots, np.int64)
        self.last_token_S = np.zeros(num_slots, np.int64)
        self.position_S = np.zeros(num_slots, np.int64)
        self.block_table_SB = np.zeros((num_slots, max_num_blocks), np.int32)
        self.stop_ids_SE = np.full((num_slots, MAX_STOP_IDS), _NO_TOKEN, np.int64)
        self.min_length_S = np.zeros(num_slots, np.int64)
        self.max_length_S = np.zeros(num_slots, np.int64)
        self.seed_S = np.zeros(num_slots, np.uint64)
        self.temperature_S = np.zeros(num_slots, np.float32)
        self.top_k_S = np.zeros(num_slots, np.int64)
        self.top_p_S = np.ones(num_slots, np.float64)
        self.min_p_S = np.zeros(num_slots, np.float32)
        self.repetition_S = np.ones(num_slots, np.float32)
        self.presence_S = np.zeros(num_slots, np.float32)
        self.frequency_S = np.zeros(num_slots, np.float32)
        self.seen_SV: Tensor | None = None
        self.allowed_SV: Tensor | None = None
        self.bias_ids_SA = _full(0, (num_slots, 0), torch.int64)
        self.bias_values_SA = _full(0.0, (num_slots, 0), torch.float32)
        self.bad_prefix_SWP = _full(_NEVER, (num_slots, 0, 1), torch.int64)
        self.bad_last_SW = _full(0, (num_slots, 0), torch.int64)
        self.tail_SP = _full(_BEFORE_START, (num_slots, 1), torch.int64)
        self._needs = np.zeros(num_slots, np.uint8)

    # --- the host's differences

    def apply(self, plan: BatchPlan) -> None:
        """Leaves, joins, table writes, token writes, in this order. Mutates; nothing of it depends on the forward."""
        if len(plan.leaves):
            self.unbind(plan.leaves)
        if plan.joins:
            self._join(plan.joins)
        if len(plan.table_writes):
            slots, indices, blocks = plan.table_writes.T
            self.block_table_SB[slots, indices] = blocks
        if len(plan.token_writes):
            slots, positions, tokens = plan.token_writes.T.astype(np.int64)
            self.last_token_S[slots] = tokens
            self.position_S[slots] = positions
            self._remember(slots, tokens, np.ones(len(slots), np.bool_))

    def unbind(self, slots: NDArray[np.int32]) -> None:
        """Make slots inert until somebody joins there. Their block-table rows point to the trash block again."""
        self.done_S[slots] = True
        self.block_table_SB[slots] = 0
        self._needs[slots] = 0

    def _join(self, joins: tuple[Join, ...]) -> None:
        for join in joins:
            slot, params = join.slot, join.params
            self.done_S[slot] = False
            self.block_table_SB[slot] = 0
            self.epoch_S[slot] = join.epoch
            self.position_S[slot] = join.position
            self.stop_ids_SE[slot] = _NO_TOKEN
            self.stop_ids_SE[slot, : len(join.stop_ids)] = join.stop_ids
            self.min_length_S[slot] = join.min_length
            self.max_length_S[slot] = join.max_length
            self.seed_S[slot] = join.seed & 0xFFFF_FFFF_FFFF_FFFF
            self.temperature_S[slot] = params.temperature
            self.top_k_S[slot] = params.top_k if params.top_k > 0 else self.vocab_size
            self.top_p_S[slot] = params.top_p
            self.min_p_S[slot] = params.min_p
            self.repetition_S[slot] = params.repetition_penalty
            self.presence_S[slot] = params.presence_penalty
            self.frequency_S[slot] = params.frequency_penalty
            need = self._needs[join.slot] = Need.of(join, self.vocab_size)
            if need & Need.PENALTY:
                self._join_penalties(join)
            if need & Need.BIAS:
                self._join_bias(join.slot, join.params)
            if need & Need.ALLOWED:
                self._join_allowed(join.slot, join.params)
            if need & Need.BAD_WORDS:
                self._join_bad_words(join)

    def _join_penalties(self, join: Join) -> None:
        """Rebuild what was seen from the history, whose prompt ends at ``num_prompt_tokens``."""
        if self.seen_SV is None:
            self.seen_SV = _full(0, (self.num_slots, self.vocab_size), torch.int32)
        history = _tensor(join.history)
        prompt, output = history[: join.num_prompt_tokens], history[join.num_prompt_tokens :]
        seen_V = torch.bincount(output, minlength=self.vocab_size).to(torch.int32) * _ONE_OUTPUT
        seen_V[prompt] += _IN_PROMPT  # once, however often the prompt holds it
        self.seen_SV[join.slot] = seen_V

    def _join_bias(self, slot: int, params: SamplingParams) -> None:
        bias = [(token, value) for token, value in params.logit_bias if 0 <= token < self.vocab_size]
        width = len(bias)
        self.bias_ids_SA = _widened(self.bias_ids_SA, 1, width, 0)
        self.bias_values_SA = _widened(self.bias_values_SA, 1, width, 0.0)
        self.bias_values_SA[slot] = 0.0  # entries beyond this slot's own add nothing to token 0
        self.bias_ids_SA[slot] = 0
        self.bias_ids_SA[slot, :width] = _tensor([token for token, _ in bias])
        self.bias_values_SA[slot, :width] = _tensor([value for _, value in bias], torch.float32)

    def _join_allowed(self, slot: int, params: SamplingParams) -> None:
        if self.allowed_SV is None:
            self.allowed_SV = _full(False, (self.num_slots, self.vocab_size), torch.bool)
        allowed = [token for token in params.allowed_token_ids or () if 0 <= token < self.vocab_size]
        self.allowed_SV[slot] = False
        self.allowed_SV[slot, _tensor(allowed)] = True

    def _join_bad_words(self, join: Join) -> None:
        words = [word for word in join.params.bad_words if word and 0 <= word[-1] < self.vocab_size]
        length = max((len(word) for word in words), default=1) - 1
        self.bad_prefix_SWP = _widened(self.bad_prefix_SWP, 2, length, _ANY, at_end=False)
        self.bad_prefix_SWP = _widened(self.bad_prefix_SWP, 1, len(words), _NEVER)
        self.bad_last_SW = _widened(self.bad_last_SW, 1, len(words), 0)
        self.tail_SP = _widened(self.tail_SP, 1, length, _BEFORE_START, at_end=False)
        width = self.tail_SP.shape[1]
        prefixes = np.full(self.bad_prefix_SWP.shape[1:], _NEVER, np.int64)
        for row, word in zip(prefixes, words, strict=False):
            row[:] = _ANY
            row[width - len(word) + 1 :] = word[:-1]
        self.bad_prefix_SWP[join.slot] = _tensor(prefixes)
        self.bad_last_SW[join.slot] = 0
        self.bad_last_SW[join.slot, : len(words)] = _tensor([word[-1] for word in words])
        tail = join.history[-width:]
        self.tail_SP[join.slot] = _BEFORE_START
        self.tail_SP[join.slot, width - len(tail) :] = _tensor(tail)

    # --- what a step reads

    def check_positions(self, slots: NDArray[np.int64], expected: NDArray[np.int64]) -> None:
        """Host and device count alike: asserted for all slots that are not done, where assertions are on."""
        differs = (self.position_S[slots] != expected) & ~self.done_S[slots]
        if differs.any():
            row = int(differs.argmax())
            raise AssertionError(
                f"slot {slots[row]} (epoch {int(self.epoch_S[slots[row]])}) is at position "
                f"{int(self.position_S[slots[row]])}, the plan says {expected[row]}"
            )

    def sampling_rows(self, slots: NDArray[np.int64], positions: NDArray[np.int64]) -> SamplingRows:
        """Gather what the sampler needs for R rows, each about to sample the token after ``positions``.

        A snapshot: later changes of the table do not show in it, so that it may be used in another thread.
        """
        needs = self._needs[slots]
        needed = int(np.bitwise_or.reduce(needs)) if len(needs) else 0

        def rows(need: Need) -> NDArray[np.int64]:
            return np.flatnonzero(needs & need)

        filtered = rows(Need.FILTER) if needed & Need.FILTER else np.empty(0, np.int64)
        plain = np.flatnonzero((needs & (Need.DRAW | Need.FILTER)) == Need.DRAW) if needed & Need.DRAW else filtered[:0]
        return SamplingRows(
            end=EndRule(
                stop_ids_RE=self.stop_ids_SE[slots],
                min_length_R=self.min_length_S[slots],
                max_length_R=self.max_length_S[slots],
                length_R=positions + 2,
                done_R=self.done_S[slots],
            ),
            plain=self._draws(plain, slots, positions) if len(plain) else None,
            filtered=self._draws(filtered, slots, positions) if len(filtered) else None,
            edits=self._edits(needs, slots, positions) if needed & _EDITS else None,
            allowed=self._allowed(rows(Need.ALLOWED), slots) if needed & Need.ALLOWED else None,
            penalties=self._penalties(rows(Need.PENALTY), slots) if needed & Need.PENALTY else None,
        )

    def _draws(self, rows: NDArray[np.int64], slots: NDArray[np.int64], positions: NDArray[np.int64]) -> Draws:
        drawing = slots[rows]
        return Draws(
            rows_D=rows,
            seeds_D=self.seed_S[drawing],
            positions_D=positions[rows] + 1,
            temperature_D=torch.from_numpy(self.temperature_S[drawing]),
            top_k_D=torch.from_numpy(self.top_k_S[drawing]),
            top_p_D=torch.from_numpy(self.top_p_S[drawing]),
            min_p_D=torch.from_numpy(self.min_p_S[drawing]),
        )

    def _penalties(self, rows: NDArray[np.int64], slots: NDArray[np.int64]) -> Penalties:
        assert self.seen_SV is not None
        seen_PV = self.seen_SV[slots[rows]]
        which_N, ids_N = seen_PV.nonzero(as_tuple=True)
        return Penalties(
            rows_N=torch.from_numpy(rows)[which_N],
            ids_N=ids_N,
            num_outputs_N=seen_PV[which_N, ids_N] // _ONE_OUTPUT,
            repetition_N=torch.from_numpy(self.repetition_S[slots[rows]])[which_N],
            presence_N=torch.from_numpy(self.presence_S[slots[rows]])[which_N],
            frequency_N=torch.from_numpy(self.frequency_S[slots[rows]])[which_N],
        )

    def _allowed(self, rows: NDArray[np.int64], slots: NDArray[np.int64]) -> AllowedTokens:
        assert self.allowed_SV is not None
        return AllowedTokens(rows_P=torch.from_numpy(rows), mask_PV=self.allowed_SV[slots[rows]])

    def _edits(self, needs: NDArray[np.uint8], slots_R: Ints, positions_R: Ints) -> LogitEdits:
        """Logit biases, stop ids below the least length and bad words as one list of additions."""
        parts: list[tuple[Ints, Tensor, Tensor]] = []
        if len(rows := np.flatnonzero(needs & Need.BIAS)):
            slots = slots_R[rows]
            parts.append((rows, self.bias_ids_SA[slots], self.bias_values_SA[slots]))
        if len(rows := np.flatnonzero(needs & Need.MIN_LENGTH)):
            slots = slots_R[rows]
            ids = self.stop_ids_SE[slots]
            short = (positions_R[rows] + 1 < self.min_length_S[slots])[:, None]
            valid = (ids >= 0) & (ids < self.vocab_size)
            forbidden = _minus_infinity_where(torch.from_numpy(short & valid))
            parts.append((rows, torch.from_numpy(np.where(valid, ids, 0)), forbidden))
        if len(rows := np.flatnonzero(needs & Need.BAD_WORDS)):
            slots = slots_R[rows]
            prefix, tail = self.bad_prefix_SWP[slots], self.tail_SP[slots][:, None, :]
            matches = ((prefix == _ANY) | (prefix == tail)).all(-1)
            parts.append((rows, self.bad_last_SW[slots], _minus_infinity_where(matches)))
        return LogitEdits(
            rows_N=torch.cat([torch.from_numpy(rows)[:, None].expand_as(ids).reshape(-1) for rows, ids, _ in parts]),
            ids_N=torch.cat([ids.reshape(-1) for _, ids, _ in parts]),
            values_N=torch.cat([values.reshape(-1) for _, _, values in parts]),
        )

    # --- what a step writes back

    def advance(self, slots: Ints, positions: Ints) -> None:
        """Chunks were computed: ``positions`` is now the next one. Inert slots stay as they are."""
        self.position_S[slots] = np.where(self.done_S[slots], self.position_S[slots], positions)

    def commit(
        self, slots: Ints, positions: Ints, tokens_R: Ints, ended_R: NDArray[np.bool_], writes_R: NDArray[np.bool_]
    ) -> None:
        """The rows at ``positions`` sampled ``tokens_R``. Rows outside ``writes_R`` and inert slots change nothing."""
        live = writes_R & ~self.done_S[slots]
        self.last_token_S[slots] = np.where(live, tokens_R, self.last_token_S[slots])
        self.position_S[slots] = np.where(live, positions + 1, self.position_S[slots])
        self._remember(slots, tokens_R, live)
        self.done_S[slots] |= live & ended_R

    def retire(self, slots: Ints) -> None:
        """Make slots inert whose sequences the host is about to fail; a later join revives them."""
        self.done_S[slots] = True

    def _remember(self, slots: Ints, tokens: Ints, live: NDArray[np.bool_]) -> None:
        """Count output tokens for penalties and append them to the tails of bad words."""
        needs = self._needs[slots]
        if not needs.any():
            return
        if len(rows := np.flatnonzero(needs & Need.PENALTY)):
            assert self.seen_SV is not None
            counts = torch.from_numpy(live[rows].astype(np.int32) * _ONE_OUTPUT)
            self.seen_SV[slots[rows], tokens[rows]] += counts
        if len(rows := np.flatnonzero(needs & Need.BAD_WORDS)):
            tail = self.tail_SP[slots[rows]]
            longer = torch.cat([tail[:, 1:], torch.from_numpy(tokens[rows, None])], dim=1)
            self.tail_SP[slots[rows]] = longer.where(torch.from_numpy(live[rows, None]), tail)


_EDITS: Final = Need.BIAS | Need.MIN_LENGTH | Need.BAD_WORDS


def _full(value: float, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.full(size, value, dtype=dtype)


def _tensor(values: Any, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def _minus_infinity_where(condition: Tensor) -> Tensor:
    return torch.zeros(condition.shape).masked_fill_(condition, float("-inf"))


def _widened(tensor: Tensor, dim: int, size: int, fill: float, *, at_end: bool = True) -> Tensor:
    """``tensor`` with at least ``size`` entries along ``dim``, new ones (``fill``) at the end or the beginning."""
    missing = size - tensor.shape[dim]
    if missing <= 0:
        return tensor
    more = list(tensor.shape)
    more[dim] = missing
    extension = torch.full(more, fill, dtype=tensor.dtype)
    return torch.cat([tensor, extension] if at_end else [extension, tensor], dim=dim)
