"""The scheduler: one event in, actions out, and the only writer of core state.

It never awaits, reads a clock or touches a tensor; the engine feeds it events and carries out what it returns. Two
moments matter: ``LaunchPossible`` composes a step (rows, chunks, admissions, preemptions), and a landing commits what
the oldest step in flight brought.
"""

import itertools
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aserve.core import events
from aserve.core.actions import Action, DeliverPromptLogprobs, DeliverTokens, Finish, Launch, StartPrefill
from aserve.core.admission import Limits
from aserve.core.blocks import BlockLedger
from aserve.core.counters import Counters
from aserve.core.done import DoneQueue
from aserve.core.ids import NO_SEQUENCE, NO_STEP, BlockId, SequenceId, Slot, StepNumber
from aserve.core.inflight import Inflight, InflightStep
from aserve.core.invariants import check, check_reads
from aserve.core.options import SchedulerOptions
from aserve.core.plan import BatchPlan, BatchResult, Chunk, Join, Logprobs
from aserve.core.policy import POLICIES
from aserve.core.prefix import ROOT, DigestChain, PrefixEntry, PrefixTable
from aserve.core.ready import ReadyQueue
from aserve.core.request import FinishReason, SequenceSpec
from aserve.core.sequence import Sequence
from aserve.core.sharing import PrefixSharing, waits_for
from aserve.core.slots import SlotBook
from aserve.core.transitions import SequenceMove, SequenceState, Story
from aserve.core.verdicts import judge
from aserve.core.waiting import WaitingQueue

MAX_PREEMPTIONS = 3
"""After so many preemptions a sequence is admitted only where it can run to its end."""

_EMPTY = np.empty(0, np.int32)
_NO_WRITES = np.empty((0, 3), np.int32)


class Scheduler:
    """All state of the core. Identity: compare with ``is``.

    num_blocks: KV blocks of the pool. vocab_size bounds the tokens that a landing may bring. Raises IllegalTransition
    or AssertionError only on a fault of ours; what clients do is answered by actions.
    """

    def __init__(self, options: SchedulerOptions, *, num_blocks: int, max_model_len: int, vocab_size: int) -> None:
        self.options = options
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.story = Story()
        self.prefix = PrefixTable(options.hash_bits)
        self.ledger = BlockLedger(num_blocks, self.prefix, self.story)
        self.slots = SlotBook(options.max_num_seqs, self.story)
        self.waiting = WaitingQueue()
        # Where the host samples, the next row needs the token first: one row of a sequence in flight at a time.
        rows_ahead = 1 if options.sampler == "host" else options.max_inflight
        self.ready = ReadyQueue(self.slots, options, rows_ahead)
        self.sharing = PrefixSharing(self.ledger, self.slots, options.block_size)
        self.inflight = Inflight(options.max_inflight)
        self.done = DoneQueue()
        self.sequences: dict[SequenceId, Sequence] = {}
        self.counters = Counters()
        self._is_due = POLICIES[options.policy]
        self._newest_step = NO_STEP
        self.parked: dict[SequenceId, Sequence] = {}
        self._marked: list[Sequence] = []  # PREEMPTING, preempted or on the way to parking: newest step not landed
        self._leaves: list[Slot] = []  # retired slots that no plan has told the device yet
        self._watermark = int(options.watermark * num_blocks)
        self._handlers: dict[type, Callable[[Any, float, list[Action]], None]] = {
            events.SequenceSubmitted: self._on_submitted,
            events.SequenceEnded: self._on_ended,
            events.StopMatched: self._on_stop_matched,
            events.ReaderStalled: self._on_reader_stalled,
            events.ReaderCaughtUp: self._on_reader_caught_up,
            events.LaunchPossible: self._on_launch_possible,
            events.LaunchFailed: self._on_launch_failed,
            events.StepLanded: self._on_step_landed,
            events.StepFailed: self._on_step_failed,
            events.CacheFlushed: self._on_cache_flushed,
        }

    def handle(self, event: events.Event, now: float) -> list[Action]:
        """Apply one event. ``now`` is the engine's clock in seconds. The actions are to be carried out in order."""
        actions: list[Action] = []
        self._handlers[type(event)](event, now, actions)
        return actions

    # --- looking

    @property
    def landed(self) -> StepNumber:
        return self.ledger.landed

    @property
    def is_idle(self) -> bool:
        return not (len(self.waiting) or len(self.ready) or len(self.inflight) or self.parked)

    def limits(self, max_queue_requests: int = 0, max_queue_tokens: int = 0) -> Limits:
        pool_tokens = self.ledger.num_blocks * self.options.block_size
        return Limits(self.max_model_len, pool_tokens, max_queue_requests, max_queue_tokens)

    def num_uncached(self, spec: SequenceSpec) -> int:
        """Prompt tokens that the prefix cache does not hold just now. Changes nothing."""
        return self._num_uncached(self._new_sequence(spec))

    def _num_uncached(self, sequence: Sequence) -> int:
        return sequence.num_prompt - len(self.sharing.match(sequence)) * self.options.block_size

    # --- arrivals and ends from outside

    def _new_sequence(self, spec: SequenceSpec) -> Sequence:
        is_public = self.options.enable_prefix_caching
        salt = spec.cache_salt if is_public else f"group of {spec.leader or spec.id}"
        return Sequence(
            spec=spec,
            order=(spec.priority if self.options.queue_order == "priority" else 0, spec.id),
            chain=DigestChain(salt),
            salt=salt,
            shares_prefix=is_public or spec.leads or spec.leader is not None,
        )

    def _on_submitted(self, event: events.SequenceSubmitted, now: float, actions: list[Action]) -> None:
        spec = event.spec
        assert spec.id not in self.sequences, f"sequence {spec.id} was submitted twice"
        sequence = self._new_sequence(spec)
        sequence.num_uncached_at_door = self._num_uncached(sequence)
        self.sequences[spec.id] = sequence
        self.waiting.push(sequence)

    def _on_ended(self, event: events.SequenceEnded, now: float, actions: list[Action]) -> None:
        sequence = self.sequences.get(event.sequence)
        if sequence is not None and not sequence.is_over:
            self._finish(sequence, event.reason, actions, detail=event.detail)

    def _on_stop_matched(self, event: events.StopMatched, now: float, actions: list[Action]) -> None:
        sequence = self.sequences.get(event.sequence)
        if sequence is not None and not sequence.is_over:
            self.counters.num_wasted_rows += len(sequence.output) - 1 - event.token_index
            self._finish(sequence, FinishReason.STOP, actions)

    def _on_reader_stalled(self, event: events.ReaderStalled, now: float, actions: list[Action]) -> None:
        sequence = self.sequences.get(event.sequence)
        if sequence is None or sequence.is_over or sequence.is_stalled:
            return
        sequence.is_stalled = True
        if sequence.state is SequenceState.WAITING:
            self.waiting.remove(sequence)
            self._park(sequence)
        elif sequence.state is not SequenceState.PREEMPTING:
            self._mark(sequence)

    def _on_reader_caught_up(self, event: events.ReaderCaughtUp, now: float, actions: list[Action]) -> None:
        sequence = self.sequences.get(event.sequence)
        if sequence is None or sequence.is_over:
            return
        sequence.is_stalled = False
        if sequence.state is SequenceState.PARKED:
            sequence.move(SequenceMove.UNPARK, self.story)
            del self.parked[sequence.id]
            self.waiting.push(sequence)

    def _on_cache_flushed(self, event: events.CacheFlushed, now: float, actions: list[Action]) -> None:
        self.ledger.flush()

    # --- composing a step

    def _on_launch_possible(self, event: events.LaunchPossible, now: float, actions: list[Action]) -> None:
        if self._is_due(len(self.inflight), self.options.max_inflight):
            plan = self._compose(now, actions)
            if plan is not None:
                actions.append(Launch(plan))

    def _compose(self, now: float, actions: list[Action]) -> BatchPlan | None:
        step = StepNumber(self._newest_step + 1)
        if self.options.force_preempt_every and step % self.options.force_preempt_every == 0:
            self._preempt_last()
        table_writes: list[tuple[int, int, int]] = []
        slots, num_sat_out = self._pick_rows(table_writes)
        budget = self.options.max_num_batched_tokens - len(slots)
        # While a running row waits for a block, a newcomer must not take it.
        if not num_sat_out:
            self._admit(budget, now, actions)
        picked = self._pick_chunks(budget)
        if not len(slots) and not picked:
            return None

        rows, positions = self._take_rows(slots, step)
        joins: list[Join] = []
        chunks = [self._take_chunk(sequence, count, step, joins, table_writes) for sequence, count in picked]
        chunk_sequences = [sequence for sequence, _ in picked]
        rows += [sequence for sequence, chunk in zip(chunk_sequences, chunks, strict=True) if chunk.last]
        last_slots = [chunk.slot for chunk in chunks if chunk.last]
        decode_rows = np.empty((len(slots), 2), np.int32)
        decode_rows[:, 0], decode_rows[:, 1] = slots, positions
        row_slots = np.concatenate((decode_rows[:, 0], np.array(last_slots, np.int32)))
        on_host = self.options.sampler == "host"
        plan = BatchPlan(
            step=step,
            leaves=np.array(self._leaves, np.int32),
            joins=tuple(joins),
            table_writes=np.array(table_writes, np.int32).reshape(-1, 3),
            token_writes=np.column_stack((decode_rows, self.slots.last_token[slots])) if on_host else _NO_WRITES,
            rows=decode_rows,
            chunks=tuple(chunks),
            deferred=np.full(len(rows), on_host, np.bool_),
            logprobs_k=int(self.slots.logprobs_k[row_slots].max(initial=-1)) if self.slots.num_with_logprobs else -1,
        )
        self._leaves.clear()
        self._newest_step = step
        record = InflightStep(
            plan=plan,
            row_slots=row_slots,
            row_epochs=self.slots.epoch[row_slots],
            rows=rows,
            chunks=chunk_sequences,
        )
        if self.options.check_invariants_every:
            blocks = np.array(sorted({block for s in record.sequences() for block in s.blocks}), np.int64)
            record.reads = (blocks, self.ledger.generation[blocks])
        self.inflight.push(record)
        self.counters.num_steps += 1
        self.counters.num_rows += len(rows)
        self.counters.num_prefill_tokens += plan.num_tokens - len(slots)
        return plan

    def _pick_rows(self, table_writes: list[tuple[int, int, int]]) -> tuple[NDArray[np.intp], int]:
        """Slots with a decode row in this step and a block for it, and how many sat out for want of one."""
        book = self.slots
        slots = self.ready.decode_slots()
        starved = slots[book.position[slots] >= book.capacity[slots]]
        if not len(starved):
            return slots, 0
        num_sat_out = self._grow(starved, table_writes)
        # Growing may have preempted some of the slots picked before.
        return slots[book.decoding[slots] & (book.position[slots] < book.capacity[slots])], num_sat_out

    def _grow(self, starved: NDArray[np.intp], table_writes: list[tuple[int, int, int]]) -> int:
        """One more block for each starved slot, in policy order. Returns how many got none."""
        num_sat_out = 0
        owners = [owner for slot in starved.tolist() if (owner := self.slots.owner[slot]) is not None]
        for sequence in sorted(owners, key=lambda sequence: sequence.order):
            if sequence.state is not SequenceState.DECODING:
                continue  # preempted for one ahead of it
            blocks = self.ledger.allocate(1)
            # Blocks that come anyway are waited for; only what they do not cover is taken from somebody behind.
            while blocks is None and self._num_coming() <= num_sat_out:
                victim = self.ready.last_behind(sequence.order)
                if victim is None:
                    break
                self._preempt(victim)
                blocks = self.ledger.allocate(1)
            if blocks is None:
                num_sat_out += 1
                continue
            table_writes.append((self._slot(sequence), len(sequence.blocks), blocks[0]))
            sequence.blocks += blocks
            self.slots.capacity[sequence.slot] += self.options.block_size
        return num_sat_out

    def _num_coming(self) -> int:
        """Blocks that landings will bring: fenced ones, and those that only a marked victim still holds."""
        held = sum(self._is_sole_owner(block) for victim in self._marked for block in victim.blocks)
        return self.ledger.num_coming + held

    def _is_sole_owner(self, block: BlockId) -> bool:
        return self.ledger.references(block) <= 1

    def _pick_chunks(self, budget: int) -> list[tuple[Sequence, int]]:
        """Prompt tokens for this step: (sequence, count), never more than ``budget`` in all."""
        picked: list[tuple[Sequence, int]] = []
        for sequence in self.ready.prefill_order():
            if budget <= 0:
                sequence.num_passed_over += 1
                continue
            count = min(self.ready.num_prefill_left(sequence), budget)
            sequence.num_passed_over = 0
            picked.append((sequence, count))
            budget -= count
        return picked

    def _take_rows(self, slots: NDArray[np.intp], step: StepNumber) -> tuple[list[Sequence], NDArray[np.int32]]:
        book = self.slots
        positions = book.position[slots]
        book.position[slots] += 1
        book.num_unlanded[slots] += 1
        book.last_step[slots] = step
        return [owner for slot in slots.tolist() if (owner := book.owner[slot]) is not None], positions

    def _take_chunk(
        self,
        sequence: Sequence,
        count: int,
        step: StepNumber,
        joins: list[Join],
        table_writes: list[tuple[int, int, int]],
    ) -> Chunk:
        book, slot, params = self.slots, self._slot(sequence), sequence.spec.params
        start = int(book.position[slot])
        end = start + count
        if sequence.join_due:
            sequence.join_due = False
            joins.append(
                Join(
                    slot=slot,
                    epoch=book.epoch_of(slot),
                    position=start,
                    params=params,
                    seed=sequence.spec.seed,
                    stop_ids=params.stop_token_ids,
                    min_length=int(book.min_length[slot]),
                    max_length=sequence.max_length,
                    num_prompt_tokens=sequence.num_prompt,
                    history=sequence.tokens(0, len(sequence)) if params.needs_history else _EMPTY,
                )
            )
            table_writes += [(slot, index, block) for index, block in enumerate(sequence.blocks)]
        last = end == sequence.goal
        wants_logprobs = params.prompt_logprobs is not None and sequence.num_prompt_logprobs < sequence.num_prompt - 1
        book.position[slot] = end
        book.last_step[slot] = step
        if last:
            sequence.move(SequenceMove.PREFILL_LAUNCHED, self.story)
            book.decoding[slot] = True
            book.num_unlanded[slot] = 1
        return Chunk(
            slot=slot,
            start=start,
            tokens=sequence.tokens(start, end),
            last=last,
            prompt_logprobs_k=params.prompt_logprobs if wants_logprobs else None,
            next_token=-1 if last else int(sequence.tokens(end, end + 1)[0]),
        )

    # --- waiting -> ready

    def _admit(self, budget: int, now: float, actions: list[Action]) -> None:
        """Take sequences from the waiting queue while slots, blocks and this step's budget allow.

        Policy order, with three exceptions: one that waits for blocks that another is writing lets others pass; so does
        a long prompt while enough long ones prefill; and one too large for the blocks at hand, until it has been passed
        over for ``prefill_ageing_steps`` steps.
        """
        if not len(self.waiting) or not self.slots.num_free:
            return
        size = self.options.block_size
        writers = [sequence for sequence in self.ready if sequence.num_published < sequence.goal // size]
        lefts = [self.ready.num_prefill_left(sequence) for sequence in self.ready.prefilling()]
        budget -= sum(left for left in lefts if not self.ready.is_long(left))
        num_long = sum(self.ready.is_long(left) for left in lefts)
        too_large: list[Sequence] = []
        # A bound on the scan: beyond it nothing could be admitted in this step anyway, but for a queue of waiters.
        for sequence in list(itertools.islice(self.waiting, 4 * self.options.max_num_seqs)):
            if budget <= 0 or not self.slots.num_free:
                break
            if waits_for(self.sequences.get(sequence.spec.leader or NO_SEQUENCE), sequence, size):
                continue
            hits = self.sharing.match(sequence)
            left = len(sequence) - len(hits) * size
            if self.sharing.is_being_written(sequence, len(hits), writers):
                continue
            if self.ready.is_long(left) and num_long >= self.options.max_long_partial_prefills:
                continue
            if not self._fits(sequence, hits):
                if sequence.num_passed_over >= self.options.prefill_ageing_steps:
                    break
                too_large.append(sequence)
                continue
            self._start(sequence, hits, now, actions)
            writers.append(sequence)
            num_long += self.ready.is_long(left)
            if not self.ready.is_long(left):
                budget -= left
            for other in too_large:
                other.num_passed_over += 1

    def _num_blocks_to_start(self, sequence: Sequence) -> int:
        """Blocks for all its tokens and the next one, unless that one is never computed."""
        return self._num_blocks(max(len(sequence), min(len(sequence) + 1, sequence.max_length)))

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.options.block_size)

    def _fits(self, sequence: Sequence, hits: list[PrefixEntry]) -> bool:
        # Hits that are cached count as available until they are taken.
        available = self.ledger.num_available - sum(self.ledger.is_evictable(entry.block) for entry in hits)
        needed = self._num_blocks_to_start(sequence) - len(hits)
        if not len(self.ready):
            return needed <= available  # alone, it may have the watermark's blocks too
        if sequence.num_preemptions >= MAX_PREEMPTIONS:
            needed = self._num_blocks(sequence.max_length) - len(hits)
            needed += sum(self._num_blocks(other.max_length) - len(other.blocks) for other in self.ready)
        return needed + self._watermark <= available

    def _start(self, sequence: Sequence, hits: list[PrefixEntry], now: float, actions: list[Action]) -> None:
        self.waiting.depart(sequence, now)
        sequence.move(SequenceMove.ADMIT, self.story)
        for entry in hits:
            self.ledger.acquire(entry.block)
        fresh = self.ledger.allocate(self._num_blocks_to_start(sequence) - len(hits))
        assert fresh is not None, "admitted without the blocks that were counted"
        slot = self.slots.bind(sequence)
        num_cached = len(hits) * self.options.block_size
        sequence.slot = slot
        sequence.blocks = [entry.block for entry in hits] + fresh
        sequence.goal = len(sequence)
        sequence.num_published = len(hits)
        sequence.prefix_tip = hits[-1].prefix_id if hits else ROOT
        sequence.join_due = True
        sequence.num_passed_over = 0
        sequence.num_admissions += 1
        self.slots.position[slot] = self.slots.num_computed[slot] = num_cached
        self.slots.capacity[slot] = len(sequence.blocks) * self.options.block_size
        self.ready.push(sequence)
        if sequence.num_admissions == 1:
            self.counters.num_prompt_tokens += sequence.num_prompt
        self.counters.num_prefix_queries += len(sequence)
        self.counters.num_prefix_hits += num_cached
        actions.append(StartPrefill(sequence.id, num_cached, sequence.num_admissions > 1))

    # --- landings

    def _on_step_landed(self, event: events.StepLanded, now: float, actions: list[Action]) -> None:
        result = event.result
        step = self._pop_landed(result.step)
        for index, logprobs in result.prompt_logprobs:
            self._deliver_prompt_logprobs(step.chunks[index], step.plan.chunks[index], logprobs, actions)
        for sequence, chunk in zip(step.chunks, step.plan.chunks, strict=True):
            if not sequence.is_over:
                self.slots.num_computed[chunk.slot] = chunk.start + len(chunk.tokens)
                self.sharing.publish(sequence)
        finishes = self._accept_tokens(step, result, actions)
        for finish in finishes:
            self._finish(self.sequences[finish.sequence], finish.reason, actions, finish.stop_token, finish.detail)
        self._after_landing()

    def _accept_tokens(self, step: InflightStep, result: BatchResult, actions: list[Action]) -> list[Finish]:
        """Commit one token a row, skipping rows whose sequence is over. Returns who ended, by the one rule there is."""
        book, slots, tokens = self.slots, step.row_slots, result.tokens[:, 0]
        alive = book.live[slots] & (book.epoch[slots] == step.row_epochs)
        book.num_unlanded[slots[alive]] -= 1
        decode = alive[: len(step.plan.rows)]
        book.num_computed[step.plan.rows[decode, 0]] = step.plan.rows[decode, 1] + 1
        verdicts = judge(book, slots, result, self.vocab_size)
        self.counters.num_wasted_rows += len(slots) - int(alive.sum())

        finishes: list[Finish] = []
        # nonzero, not flatnonzero, whose wrappers cost eight times as much where there are few rows.
        for row in (alive & verdicts.is_last).nonzero()[0].tolist():
            sequence = step.rows[row]
            finish = verdicts.finish(row, sequence, int(tokens[row]))
            finishes.append(finish)
            if finish.reason is FinishReason.ERROR or not sequence.spec.params.max_tokens:
                alive[row] = False  # its token does not count
        accepted = alive.nonzero()[0]
        if not len(accepted):
            return finishes
        slots, tokens = slots[accepted], tokens[accepted]
        book.length[slots] += 1
        book.last_token[slots] = tokens
        # Lists, since a numpy scalar costs more to look at than all else that most rows need.
        rows, values = accepted.tolist(), tokens.tolist()
        for row, token in zip(rows, values, strict=True):
            step.rows[row].output.append(token)
        for row in accepted[book.num_computed[slots] % self.options.block_size == 0].tolist():
            self.sharing.publish(step.rows[row])
        self.counters.num_generated_tokens += len(rows)
        num_decoded = bisect_left(rows, len(step.plan.rows))
        actions.append(
            DeliverTokens(result.step, book.ident[slots].tolist(), values, rows, num_decoded, result.logprobs)
        )
        return finishes

    def _deliver_prompt_logprobs(
        self, sequence: Sequence, chunk: Chunk, logprobs: Logprobs, actions: list[Action]
    ) -> None:
        """Only what was not delivered before (a preempted prompt is computed again), and nothing beyond the prompt."""
        first = chunk.start + 1
        skip = max(0, sequence.num_prompt_logprobs + 1 - first)
        count = min(len(logprobs.token_logprobs), sequence.num_prompt - first)
        if sequence.is_over or skip >= count:
            return
        part = Logprobs(
            token_logprobs=logprobs.token_logprobs[skip:count],
            ranks=logprobs.ranks[skip:count],
            top_ids=logprobs.top_ids[skip:count],
            top_logprobs=logprobs.top_logprobs[skip:count],
        )
        sequence.num_prompt_logprobs = first + count - 1
        actions.append(DeliverPromptLogprobs(sequence.id, first + skip, part))

    def _on_step_failed(self, event: events.StepFailed, now: float, actions: list[Action]) -> None:
        step = self._pop_landed(event.step)
        self.counters.num_failed_steps += 1
        if not step.lost:
            self._fail(step, event.detail, actions)
        self._after_landing()

    def _on_launch_failed(self, event: events.LaunchFailed, now: float, actions: list[Action]) -> None:
        # The device never saw the plan: not its joins and tables (their sequences end here), and not its leaves.
        step = self.inflight.get(event.step)
        step.lost = True
        self._leaves += [Slot(slot) for slot in step.plan.leaves.tolist()]
        self._fail(step, event.detail, actions)

    def _fail(self, step: InflightStep, detail: str, actions: list[Action]) -> None:
        for sequence in step.sequences():
            if not sequence.is_over:
                self._finish(sequence, FinishReason.ERROR, actions, detail=detail)

    def _pop_landed(self, number: StepNumber) -> InflightStep:
        step = self.inflight.pop(number)
        if step.reads is not None:
            check_reads(self, step)
        self.ledger.advance(number)
        self.slots.advance(number)
        return step

    def _after_landing(self) -> None:
        for sequence in [s for s in self._marked if self.slots.last_step[s.slot] <= self.landed]:
            self._marked.remove(sequence)
            self._requeue(sequence)
        for sequence in self.done.pop_landed(self.landed):
            self._release(sequence)
        every = self.options.check_invariants_every
        if every and (self.landed % every == 0 or self.is_idle):
            check(self)

    # --- preemption and the end

    def _preempt_last(self) -> None:
        first = next(iter(self.ready), None)
        victim = self.ready.last_behind(first.order) if first is not None else None
        if victim is not None:
            self._preempt(victim)

    def _preempt(self, sequence: Sequence) -> None:
        sequence.num_preemptions += 1
        self.counters.num_preemptions += 1
        self._mark(sequence)

    def _mark(self, sequence: Sequence) -> None:
        """No more rows; its tokens in flight are kept, its slot and blocks go when its newest step has landed."""
        sequence.move(SequenceMove.MARK, self.story)
        self.slots.decoding[sequence.slot] = False
        if self.slots.last_step[sequence.slot] <= self.landed:
            self._requeue(sequence)
        else:
            self._marked.append(sequence)

    def _requeue(self, sequence: Sequence) -> None:
        """Back to its old place in the waiting queue, or aside while its reader stalls.

        Full blocks stay in the prefix cache, from which it takes them as hits when it resumes, unless somebody needed
        them meanwhile. So a parked sequence keeps what nobody misses, and ``max_num_seqs`` readers that never read
        cannot stop the others.
        """
        self._vacate(sequence)
        if sequence.is_stalled:
            self._park(sequence)
        else:
            sequence.move(SequenceMove.REQUEUE, self.story)
            self.waiting.push(sequence)

    def _park(self, sequence: Sequence) -> None:
        sequence.move(SequenceMove.PARK, self.story)
        self.parked[sequence.id] = sequence

    def _vacate(self, sequence: Sequence) -> None:
        """Give back slot and blocks, behind the fence of its newest step."""
        self.ready.remove(sequence)
        slot = self._slot(sequence)
        sequence.last_step = self.slots.retire(slot, self.landed)
        self._leaves.append(slot)
        # From the last to the first, so that a cached prefix is evicted from its end.
        for block in reversed(sequence.blocks):
            self.ledger.release(block, sequence.last_step)
        sequence.slot = None
        sequence.blocks = []
        sequence.num_published = 0
        sequence.prefix_tip = ROOT
        sequence.join_due = False

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        actions: list[Action],
        stop_token: int | None = None,
        detail: str = "",
    ) -> None:
        """The one way to end: from any live state, once, giving everything back."""
        before = sequence.state
        sequence.move(SequenceMove.FINISH, self.story)
        if before is SequenceState.WAITING:
            self.waiting.remove(sequence)
        elif before is SequenceState.PARKED:
            del self.parked[sequence.id]
        else:
            if before is SequenceState.PREEMPTING:
                self._marked.remove(sequence)
            self._vacate(sequence)
        actions.append(Finish(sequence.id, reason, stop_token, detail))
        if sequence.last_step <= self.landed:
            self._release(sequence)
        else:
            self.done.push(sequence)

    def _release(self, sequence: Sequence) -> None:
        sequence.move(SequenceMove.RELEASE, self.story)
        del self.sequences[sequence.id]

    def _slot(self, sequence: Sequence) -> Slot:
        assert sequence.slot is not None, f"sequence {sequence.id} owns no slot"
        return sequence.slot
