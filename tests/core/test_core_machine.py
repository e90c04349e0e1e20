"""The scheduler against a naive model, by a state machine that does whatever can happen in any order.

The naive model knows nothing of blocks, slots, steps or caches: a sequence's output is a function of its prompt, and
what was delivered must be a prefix of it, all of it at a normal end. After every rule the recount runs (I1, I4), ends
are counted (I2), and what the device touched is held against the ledger (I8, in ``World``).

50,000 steps a run, the same each time. ``ASERVE_TEST_EXPLORE=200`` runs as many random examples a family instead.
"""

import os
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from core_builders import NORMAL, World
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from aserve.core.ids import NO_STEP, SequenceId
from aserve.core.request import FinishReason
from aserve.core.transitions import BlockState

NUM_STEPS = int(os.environ.get("ASERVE_TEST_STEPS", "50000"))
STEPS_AN_EXAMPLE = 100
FAMILIES = {
    "sync": {"policy": "sync"},
    "overlap": {"policy": "overlap"},
    "late": {"policy": "late"},
    "deep": {"policy": "eager", "max_inflight": 8},
    "host sampler": {"policy": "eager", "sampler": "host"},
    "split": {"policy": "eager", "prefill": "split"},
    "streams": {"policy": "eager", "prefill": "streams"},
    "streams, host sampler": {"policy": "overlap", "prefill": "streams", "sampler": "host"},
    "collisions": {"policy": "eager", "hash_bits": 1},
}

small = st.integers(0, 31)


class SchedulerMachine(RuleBasedStateMachine):
    """Rules draw few and small numbers; what they do not fit is cut to what does."""

    fixed: dict[str, object] = {}  # noqa: RUF012 - replaced by each family
    num_rules = 0

    @initialize(
        num_blocks=st.integers(8, 24),
        block_size=st.sampled_from([1, 2, 4]),
        max_num_seqs=st.integers(1, 6),
        extra_tokens=st.integers(0, 24),
        knobs=st.fixed_dictionaries({
            "max_inflight": st.integers(1, 8),
            "enable_prefix_caching": st.booleans(),
            "watermark": st.sampled_from([0.0, 0.1]),
            "queue_order": st.sampled_from(["fcfs", "priority"]),
            "long_prefill_threshold": st.sampled_from([4, 64]),
            "prefill_ageing_steps": st.sampled_from([1, 16]),
            "force_preempt_every": st.sampled_from([0, 0, 5]),
        }),
    )  # fmt: skip
    def build(self, num_blocks, block_size, max_num_seqs, extra_tokens, knobs):
        self.world = World(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + block_size + extra_tokens,
            vocab_size=997,
            **{**knobs, **self.fixed},
        )

    # --- the outside

    def _submit(self, bits: int, length: int, max_tokens: int, flavour: int, **more) -> SequenceId:
        length = 1 + length % (self.world.max_model_len - 1)
        max_tokens = 1 + max_tokens % min(12, self.world.max_model_len - length)
        more |= [
            {},
            {"stop_at": max_tokens // 2},
            {"stop_at": 0, "min_tokens": max_tokens // 2},
            {"frequency_penalty": 0.5},
            {"prompt_logprobs": 1, "logprobs": 2},
            {"salt": "another"},
        ][flavour]
        prompt = [bits >> index & 1 for index in range(length)]
        return self.world.submit(prompt, max_tokens, seed=bits, **more)

    @rule(bits=st.integers(0, 7), length=small, max_tokens=small, flavour=st.integers(0, 5), priority=st.integers(0, 2))
    def submit(self, bits, length, max_tokens, flavour, priority):
        self._submit(bits, length, max_tokens, flavour, priority=priority)

    @rule(bits=st.integers(0, 7), length=small, max_tokens=small, flavour=st.integers(0, 4), siblings=st.integers(1, 3))
    def submit_group(self, bits, length, max_tokens, flavour, siblings):
        leader = self._submit(bits, length, max_tokens, flavour, leads=True)
        for _ in range(siblings):
            self._submit(bits, length, max_tokens, flavour, leader=leader)

    @precondition(lambda self: self.world.live)
    @rule(pick=small, reason=st.sampled_from([FinishReason.ABORT, FinishReason.TIMEOUT]))
    def end(self, pick, reason):
        self.world.end(self.world.live[pick % len(self.world.live)], reason)

    @rule(pick=small)
    def end_one_that_is_over_or_unknown(self, pick):
        before = self.world.reasons()
        over = [ident for ident, told in self.world.told.items() if told.finish is not None]
        self.world.end(SequenceId(over[pick % len(over)] if over else 10**6))
        assert self.world.reasons() == before

    @precondition(lambda self: any(self.world.output(ident) for ident in self.world.live))
    @rule(pick=small, index=small)
    def match_stop(self, pick, index):
        idents = [ident for ident in self.world.live if self.world.output(ident)]
        ident = idents[pick % len(idents)]
        self.world.match_stop(ident, index % len(self.world.output(ident)))

    @precondition(lambda self: self.world.live)
    @rule(pick=small)
    def stall(self, pick):
        self.world.stall(self.world.live[pick % len(self.world.live)])

    @precondition(lambda self: self.world.live)
    @rule(pick=small)
    def catch_up(self, pick):
        self.world.catch_up(self.world.live[pick % len(self.world.live)])

    @rule()
    def flush(self):
        self.world.flush()

    # --- the device

    @rule(times=st.integers(1, 4))
    def launch(self, times):
        for _ in range(times):
            self.world.launch()

    @precondition(lambda self: self.world.num_executable)
    @rule(ahead=st.booleans(), pick=small)
    def execute(self, ahead, pick):
        streams = self.world.streams_executable
        self.world.execute(ahead=ahead, stream=streams[pick % len(streams)])

    @precondition(lambda self: self.world.num_inflight)
    @rule(pick=small)
    def land(self, pick):
        streams = self.world.streams_inflight
        self.world.land(stream=streams[pick % len(streams)])

    @rule(depth=st.integers(1, 4), steps=st.integers(1, 6), pick=small)
    def go_on(self, depth, steps, pick):
        """Some steps in which nothing special happens."""
        for _ in range(steps):
            while self.world.num_inflight < depth and self.world.launch() is not None:
                pass
            if streams := self.world.streams_inflight:
                self.world.land(stream=streams[pick % len(streams)])

    # --- faults and pressure

    @rule()
    def fail_next_launch(self):
        self.world.runner.fail_launch(self.world.scheduler.counters.num_steps + 1, MemoryError("launch"))
        self.world.launch()

    @rule(ahead=st.integers(0, 2))
    def fail_step(self, ahead):
        """The newest step that has not run, or one still to come."""
        newest = self.world.scheduler.counters.num_steps
        self.world.runner.fail_step(newest + ahead if self.world.num_executable else newest + 1, MemoryError("step"))

    @rule(row=st.integers(0, 3))
    def invalidate_row_of_next_step(self, row):
        self.world.runner.invalidate(self.world.scheduler.counters.num_steps + 1, row)

    @rule()
    def preempt(self):
        scheduler = self.world.scheduler
        scheduler.options = replace(self.world.options, force_preempt_every=1)
        self.world.launch()
        scheduler.options = self.world.options

    @rule()
    def evict(self):
        """Everything that can be handed out is, and comes back: every cached block behind its fence is evicted."""
        ledger = self.world.scheduler.ledger
        for block in ledger.allocate(ledger.num_available):
            ledger.release(block, NO_STEP)

    # --- what must hold

    @invariant()
    def every_token_is_the_one_expected(self):
        """Also I2: each sequence is live or ended once, and those that ended are forgotten once they have landed."""
        type(self).num_rules += 1
        assert self.world.wrong() == []
        known = self.world.scheduler.sequences
        assert {ident for ident, sequence in known.items() if not sequence.is_over} == set(self.world.live)

    @invariant()
    def blocks_add_up(self):
        """I1, by the states themselves; the recount in ``World`` has more."""
        ledger = self.world.scheduler.ledger
        counted = sum(len(self.world.blocks(state)) for state in BlockState)
        assert counted == ledger.num_blocks

    def teardown(self):
        """Nothing is stuck, all permits are back (I4), and every normal end is whole."""
        for ident in self.world.live:
            self.world.catch_up(ident)
        self.world.run(depth=2)
        assert self.world.live == []
        assert self.world.num_inflight == 0
        assert self.world.wrong() == []
        assert all(
            told.text == told.expected[: len(told.text)]
            for told in self.world.told.values()
            if told.finish.reason in NORMAL
        )


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_scheduler_machine(family):
    """Admit, chunk, launch, execute, land, abort, preempt, evict, flush and fail in any order: nothing ever breaks."""
    explore = int(os.environ.get("ASERVE_TEST_EXPLORE", "0"))
    wanted = NUM_STEPS // len(FAMILIES)
    name = family.title().replace(" ", "").replace(",", "")
    machine = type(name, (SchedulerMachine,), {"fixed": FAMILIES[family]})
    run_state_machine_as_test(
        machine,
        settings=settings(
            # Hypothesis ends some examples early.
            max_examples=explore or 2 * wanted // STEPS_AN_EXAMPLE,
            stateful_step_count=STEPS_AN_EXAMPLE,
            derandomize=not explore,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )

    assert machine.num_rules >= wanted or explore
