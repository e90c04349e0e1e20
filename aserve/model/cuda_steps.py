"""Whole steps on the device, from the plan's words to the result's: the memory they share, and a graph for each size.

Shape suffixes: S sequences of a step (decode rows, then chunks), T tokens, R ring rows (steps), V vocabulary,
W words, K alternatives.
"""

import dataclasses
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

from aserve.core.plan import BatchPlan
from aserve.device.graphs import Replay, StepDevice, fitting, row_buckets, token_buckets
from aserve.model.cuda_decoder import ForwardTensors, StepDecoder
from aserve.model.kernels.attention_plan import ITEM_TOKENS, AttentionPlan
from aserve.model.kernels.differences import apply_differences
from aserve.model.kernels.fetch import ALIGNMENT, fetch_words
from aserve.model.kernels.sampler import sample
from aserve.model.kernels.slot_update import FROM_SLOT, commit, lay_out, lay_out_rows
from aserve.model.kernels.slots import SlotTensors
from aserve.model.kv_tensors import KVTensors
from aserve.model.step_words import StepLayout, aligned, room_needed

MAX_ADDITIONS: Final = 1024
"""Logit biases and forbidden tokens that a slot holds."""

_FEW_SEQUENCES: Final = (16, 64)
"""Sizes of mixed steps below the largest: each sequence costs a row of logits."""

_REFERENCE_ITEMS: Final = 32
"""In reference mode, the parts that attention over the longest context is cut into."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """max_num_tokens: of a step. ring_steps: how many steps' inputs and results are kept apart. contents: what a step
    may hold: rows, chunks, or both."""

    max_num_seqs: int
    max_num_tokens: int
    max_model_len: int
    block_size: int
    ring_steps: int
    contents: Literal["rows", "chunks", "both"] = "both"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One size of step. replays: launch it part by part, on the words of the array whose turn it is."""

    layout: StepLayout
    replays: tuple[Replay, ...]

    def replay(self) -> None:
        """The whole of it."""
        for replay in self.replays:
            replay()


class CudaSteps:
    """Memory for the largest step and steps of all sizes over it. Belongs to the thread that launches.

    arrays_RW: int32, pinned, where ``StepLayout`` and ``Differences`` write; each launch of a step, or of the change of
    the slot table alone, takes the next one. words: the newest of them, on the device. ring_RS: int64, pinned, the
    result words of the newest steps. logits_SV, work_SV: float32, the newest step's and scratch. tokens_S: int32.
    """

    def __init__(
        self, decoder: StepDecoder, device: StepDevice, limits: StepLimits, *, table: SlotTensors | None = None
    ) -> None:
        """table: of other steps, to be shared; they may run at the same time where they touch other slots and blocks.

        Everything else that a step writes to is these steps' own.
        """
        self.limits = limits
        self.decoder = decoder
        self.device = device
        num_tokens = limits.max_num_tokens
        # Reading logits of any rows, kernels find them in groups of whole 16 bytes.
        num_rows = aligned(limits.max_num_seqs)
        vocab_size = decoder.config.vocab_size
        decoder.prepare(limits.max_model_len)
        self.table = table or SlotTensors.allocate(
            num_slots=limits.max_num_seqs,
            max_num_blocks=-(-limits.max_model_len // limits.block_size),
            vocab_size=vocab_size,
            max_additions=MAX_ADDITIONS,
            device=device.device,
        )
        self.nobody = limits.max_num_seqs
        self.room = room_needed(
            max_num_seqs=limits.max_num_seqs,
            max_model_len=limits.max_model_len,
            vocab_size=vocab_size,
            max_additions=MAX_ADDITIONS,
        )
        largest = StepLayout.of(limits.max_num_seqs, num_tokens, has_chunks=True)
        # Behind a step's own sections and differences: rows and targets of the prompt's log-probabilities.
        num_words = largest.end + self.room + 2 * aligned(num_tokens + num_rows)
        num_words = -(-num_words // ALIGNMENT) * ALIGNMENT
        self.arrays_RW = device.pinned(limits.ring_steps, num_words, dtype=torch.int32)
        self._turn_1 = torch.zeros(1, dtype=torch.int64, device=device.device)
        self.words = self._ints(num_words)
        self.ring_RS = device.pinned(limits.ring_steps, limits.max_num_seqs, dtype=torch.int64)
        self.logits_SV = self._floats(num_rows, vocab_size)
        self.work_SV = self._floats(num_rows, vocab_size)
        self.tokens_S = self._ints(limits.max_num_seqs)
        self.activations = decoder.allocate(max(num_tokens, num_rows), num_multiprocessors=device.num_multiprocessors)
        self._flags_S = self._ints(limits.max_num_seqs)
        self._context_lens_S = self._ints(limits.max_num_seqs)
        self._last_rows_S = self._ints(limits.max_num_seqs)
        self._token_ids_T, self._positions_T, self._slot_mapping_T = (self._ints(num_tokens) for _ in range(3))
        self._row_slots_T, self._row_contexts_T = self._ints(num_tokens), self._ints(num_tokens)
        self._rising_T = torch.arange(num_tokens + 1, dtype=torch.int32, device=device.device)
        self._from_slot_S = self._ints(limits.max_num_seqs).fill_(FROM_SLOT)
        self._scratch: AttentionPlan | None = None
        self._kv_layers: tuple[Tensor, ...] = ()
        self._row_sizes = row_buckets(limits.max_num_seqs)
        self._token_sizes = token_buckets(num_tokens)
        self._sequence_sizes = [*(size for size in _FEW_SEQUENCES if size < limits.max_num_seqs), limits.max_num_seqs]
        self._steps: dict[tuple[int, int, bool], Step] = {}
        self._apply: tuple[Replay, ...] = (self.apply,)

    def _ints(self, *size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int32, device=self.device.device)

    def _floats(self, *size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.float32, device=self.device.device)

    # --- sizes

    def sizes(self) -> list[tuple[int, int, bool]]:
        """(sequences, tokens, whether some are chunks) of all graphs, the largest first."""
        decode = [(size, size, False) for size in self._row_sizes if self.limits.contents != "chunks"]
        mixed = {
            (min(num_sequences, num_tokens), num_tokens, True)
            for num_tokens in self._token_sizes
            for num_sequences in self._sequence_sizes
            if self.limits.contents != "rows"
        }
        return [*sorted(mixed, key=lambda size: (size[1], size[0]), reverse=True), *reversed(decode)]

    def size_of(self, plan: BatchPlan) -> tuple[int, int, bool]:
        """The size whose graph runs ``plan``, which has at least one token."""
        num_sequences = len(plan.rows) + len(plan.chunks)
        if not plan.chunks:
            size = fitting(self._row_sizes, num_sequences)
            return size, size, False
        num_tokens = fitting(self._token_sizes, plan.num_tokens)
        return min(fitting(self._sequence_sizes, num_sequences), num_tokens), num_tokens, True

    # --- graphs

    def use(self, kv: KVTensors | None) -> None:
        """Compute over this cache from now on. Graphs made before go: they hold the old one's addresses."""
        self._steps.clear()
        self._apply = (self.apply,)
        self.device.forget()
        self._kv_layers = kv.layers if kv is not None else ()

    def run(self, size: tuple[int, int, bool]) -> None:
        """Launch a step's kernels one by one, over one layer of each kind: all that it needs is loaded then."""
        self._body(size, each_kind_once=True)()

    def capture(self, size: tuple[int, int, bool]) -> None:
        """Make the graph of a size that has been run."""
        num_sequences, num_tokens, has_chunks = size
        layout = StepLayout.of(num_sequences, num_tokens, has_chunks=has_chunks)
        self._steps[size] = Step(layout=layout, replays=self.device.capture(self._body(size)))

    def capture_all(self) -> None:
        """Make all graphs."""
        self._apply = self.device.capture(self.apply)
        for size in self.sizes():
            self.capture(size)

    def step(self, size: tuple[int, int, bool]) -> Step:
        return self._steps[size]

    def begin_with_first(self) -> None:
        """The next launch takes the first array. Nothing may be out."""
        with torch.inference_mode():
            self._turn_1.zero_()

    def apply_words(self) -> None:
        """Launch the change of the slot table alone, as the words of the next array say."""
        for replay in self._apply:
            replay()

    def apply(self) -> None:
        fetch_words(self.arrays_RW, self._turn_1, words_W=self.words)
        apply_differences(self.words, self.table)

    # --- what a graph consists of

    def _body(self, size: tuple[int, int, bool], *, each_kind_once: bool = False) -> Replay:
        num_sequences, num_tokens, has_chunks = size
        layout = StepLayout.of(num_sequences, num_tokens, has_chunks=has_chunks)
        reference = self.decoder.reference
        words, table = self.words, self.table
        slots_S = words[layout.slots : layout.slots + num_sequences]
        samples_S = words[layout.samples : layout.samples + num_sequences]
        if has_chunks:
            starts = words[layout.starts : layout.starts + num_sequences + 1]
            tokens_in_T = words[layout.tokens : layout.tokens + num_tokens]
        else:
            starts, tokens_in_T = self._rising_T[: num_sequences + 1], self._from_slot_S[:num_sequences]
        context_lens_S, last_rows_S = self._context_lens_S[:num_sequences], self._last_rows_S[:num_sequences]
        tokens_S, flags_S = self.tokens_S[:num_sequences], self._flags_S[:num_sequences]
        plans = {
            window: self._attention_plan(num_sequences, num_tokens, has_chunks, window)
            for window in self.decoder.windows
        }
        forward = ForwardTensors(
            token_ids_T=self._token_ids_T[:num_tokens],
            positions_T=self._positions_T[:num_tokens],
            slot_mapping_T=self._slot_mapping_T[:num_tokens],
            last_rows_S=last_rows_S,
            block_tables_SB=table.block_tables_SB,
            plans=plans,
            has_chunks=has_chunks and not reference,
            side=self.device.side,
            cut=self.device.cut,
        )
        logits_SV = self.logits_SV[:num_sequences]

        def body() -> None:
            self.apply()
            lay_out(
                tokens_in_T, slots_S, starts, table, self.limits.block_size, token_ids_T=forward.token_ids_T,
                positions_T=forward.positions_T, slot_mapping_T=forward.slot_mapping_T, context_lens_S=context_lens_S,
                last_rows_S=last_rows_S,
            )  # fmt: skip
            rows = (slots_S, starts, context_lens_S)
            if reference:
                row_slots_T, row_contexts_T = self._row_slots_T[:num_tokens], self._row_contexts_T[:num_tokens]
                lay_out_rows(*rows, row_slots_T=row_slots_T, row_contexts_T=row_contexts_T)
                rows = (row_slots_T, self._rising_T[: num_tokens + 1], row_contexts_T)
            for plan in plans.values():
                plan.fill(*rows)
            self.decoder.forward(
                forward, self._kv_layers, self.activations, logits_SV=logits_SV, each_kind_once=each_kind_once
            )
            sample(
                logits_SV, self.work_SV[:num_sequences], slots_S, context_lens_S, table, tokens_R=tokens_S,
                flags_R=flags_S,
            )  # fmt: skip
            # The ring's place and the words' number are the host's: the step number with which the words begin.
            commit(
                tokens_S, flags_S, slots_S, starts, context_lens_S, samples_S, table, ring_NS=self.ring_RS,
                step_1=words[:2].view(torch.int64),
            )  # fmt: skip

        return body

    def _attention_plan(self, num_sequences: int, num_tokens: int, has_chunks: bool, window: int) -> AttentionPlan:
        shape, reference = self.decoder.shape, self.decoder.reference
        context_max = self.limits.max_model_len
        fixed_tokens = -(-context_max // (_REFERENCE_ITEMS * ITEM_TOKENS)) * ITEM_TOKENS
        plan = AttentionPlan.allocate(
            num_sequences=num_tokens if reference else num_sequences,
            num_chunk_tokens=num_tokens if has_chunks and not reference else 0,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            num_multiprocessors=self.device.num_multiprocessors,
            dtype=self.decoder.dtype,
            window=window,
            fixed_tokens=fixed_tokens if reference else 0,
            context_max=context_max,
            device=self.device.device,
        )
        # Attention's scratch memory is free again when a layer ends: all sizes and windows share the largest.
        largest = self._scratch
        if (
            largest is None
            or len(plan.lse_WHG) > len(largest.lse_WHG)
            or len(plan.arrivals_SH) > len(largest.arrivals_SH)
        ):
            self._scratch = plan
            return plan
        return dataclasses.replace(
            plan,
            partial_WHGD=largest.partial_WHGD[: len(plan.partial_WHGD)],
            lse_WHG=largest.lse_WHG[: len(plan.lse_WHG)],
            arrivals_SH=largest.arrivals_SH[: len(plan.arrivals_SH)],
        )
