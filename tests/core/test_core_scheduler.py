"""What goes into a step: budget, order, chunks, admission, prefix hits and groups."""

import pytest
from core_builders import World

from aserve.core.request import FinishReason
from aserve.core.transitions import BlockState, SequenceState

LENGTH, STOP = FinishReason.LENGTH, FinishReason.STOP


# --- output


@pytest.mark.parametrize("depth", [1, 2, 8])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9, 15, 16, 17])
def test_any_prompt_length_and_depth_gives_the_same_tokens(length, depth):
    """Block edges and chunk edges, one less and one more: as if alone."""
    world = World(block_size=4, max_num_batched_tokens=12, max_inflight=8)
    idents = [world.submit(length, 9) for _ in range(3)]
    world.run(depth=depth)

    assert [world.output(ident) for ident in idents] == [world.expected(ident) for ident in idents]
    assert world.reasons() == [LENGTH] * 3


@pytest.mark.parametrize("policy", ["sync", "overlap", "eager"])
def test_a_policy_decides_how_many_steps_are_out(policy):
    """sync one, overlap two, eager as many as there are permits."""
    world = World(policy=policy, max_inflight=3)
    world.submit(5, 20)
    while world.launch() is not None:
        pass

    assert world.num_inflight == {"sync": 1, "overlap": 2, "eager": 3}[policy]


def test_nothing_to_do_is_no_step():
    """An idle scheduler composes nothing, and no step number is used up."""
    world = World()

    assert world.launch() is None
    world.submit(3, 1)
    assert world.step().step == 1


def test_seeds_and_counts_follow_the_sequence():
    """The key, and for penalties the tokens seen so far, reach the device with the join."""
    world = World()
    prompt = range(10, 19)
    first, second = (world.submit(prompt, 5, seed=seed) for seed in (1, 2))
    third = world.submit(prompt, 5, seed=1, presence_penalty=0.5)
    world.run(depth=2)

    assert world.wrong() == []
    assert world.output(first) != world.output(second)
    assert world.output(first) != world.output(third)


def test_a_stop_id_ends_and_is_told():
    """The stop token belongs to the output; Finish names it."""
    world = World()
    ident = world.submit(6, 9, stop_at=3)
    world.run(depth=3)

    assert world.output(ident) == world.expected(ident)
    assert len(world.output(ident)) == 4
    assert (world.told[ident].finish.reason, world.told[ident].finish.stop_token) == (STOP, world.output(ident)[-1])


def test_no_stop_below_the_minimum():
    """With min_tokens a stop id cannot end the sequence before."""
    world = World()
    ident = world.submit(6, 9, stop_at=0, min_tokens=5)
    world.run(depth=3)

    assert world.wrong() == []
    assert len(world.output(ident)) >= 5


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_rows_beyond_the_length_limit_are_never_launched(max_tokens):
    """The host knows length ends ahead: the chunk samples one token and a row each further one, whatever the depth."""
    world = World(max_inflight=8)
    ident = world.submit(6, max_tokens)
    while world.launch() is not None:
        pass

    assert sum(len(plan.rows) for plan in world.plans.values()) == max_tokens - 1
    world.run()
    assert (world.output(ident), world.reason(ident)) == (world.expected(ident), LENGTH)


def test_no_output_wanted_is_no_output():
    """max_tokens 0 (echo of a prompt with its logprobs) ends in length with no token."""
    world = World()
    ident = world.submit(6, 0, prompt_logprobs=0)
    world.run()

    assert (world.output(ident), world.reason(ident)) == ([], LENGTH)
    assert world.told[ident].prompt_logprobs == [(1, 5)]


def test_the_host_sampler_has_one_row_of_a_sequence_in_flight():
    """Its token goes out with the next plan; other sequences' rows fill the steps between."""
    world = World(sampler="host", max_inflight=4)
    idents = [world.submit(5, 6) for _ in range(2)]
    world.launch()
    assert world.launch() is None
    world.land()
    plan = world.launch()

    assert plan.token_writes.tolist() == [[0, 5, world.output(idents[0])[0]], [1, 5, world.output(idents[1])[0]]]
    world.run(depth=4)
    assert world.wrong() == []
    assert world.reasons() == [LENGTH] * 2


# --- the budget of a step


def test_a_prompt_is_cut_to_the_budget():
    """30 tokens at 16 a step are chunks of 16 and 14, the last one samples."""
    world = World(max_num_batched_tokens=16)
    world.submit(30, 1)
    plans = [world.step(), world.step()]

    assert [world.slots_of(plan)[1] for plan in plans] == [[(0, 0, 16)], [(0, 16, 14)]]
    assert [plan.chunks[0].last for plan in plans] == [False, True]


def test_decode_rows_go_first():
    """A decoding sequence has its row in every step, and a long prompt takes what is left of the budget."""
    world = World(max_num_batched_tokens=16)
    world.submit(4, 20)
    world.step()
    world.submit(40, 1)
    plans = [world.step() for _ in range(3)]

    assert [world.slots_of(plan) for plan in plans] == [
        ([0], [(1, 0, 15)]),
        ([0], [(1, 15, 15)]),
        ([0], [(1, 30, 10)]),
    ]


def test_prompts_share_a_step():
    """What the first prompt leaves of the budget goes to the next ones, in order."""
    world = World(max_num_batched_tokens=16)
    for length in (6, 7, 8):
        world.submit(length, 1)

    assert world.slots_of(world.step())[1] == [(0, 0, 6), (1, 0, 7), (2, 0, 3)]


def test_slots_bound_what_runs():
    """With two slots the third sequence waits for one of them."""
    world = World(max_num_seqs=2)
    idents = [world.submit(4, 3) for _ in range(3)]
    world.step()

    assert [world.state(ident) for ident in idents] == [
        SequenceState.DECODING,
        SequenceState.DECODING,
        SequenceState.WAITING,
    ]
    world.run(depth=2)
    assert world.wrong() == []


def test_low_priorities_go_first():
    """In priority order a smaller number overtakes; ties go by arrival."""
    world = World(queue_order="priority", max_num_seqs=1)
    late, first, second = world.submit(4, 1, priority=5), world.submit(4, 1, priority=1), world.submit(4, 1, priority=1)
    order = []
    while (plan := world.launch()) is not None:
        order += world.listed(plan)
        world.land()

    assert order == [first, second, late]


def test_priorities_are_ignored_in_order_of_arrival():
    """fcfs looks at arrival alone."""
    world = World(queue_order="fcfs", max_num_seqs=1)
    first = world.submit(4, 1, priority=5)
    world.submit(4, 1, priority=1)

    assert world.listed(world.launch()) == [first]


# --- admission by blocks


def test_admission_leaves_the_watermark_free():
    """Blocks for the whole prompt and one token, and a quarter of the pool beside them."""
    world = World(num_blocks=16, block_size=4, watermark=0.25)
    first, second, third = world.submit(19, 8), world.submit(24, 4), world.submit(20, 4)
    world.launch()

    # 16 blocks: 5 for the first; the second wants 7 and 4 stay free; the third would cut into those.
    assert [world.state(ident) for ident in (first, second, third)] == [
        SequenceState.DECODING,
        SequenceState.DECODING,
        SequenceState.WAITING,
    ]
    world.run(depth=2)
    assert world.wrong() == []


def test_alone_a_sequence_may_have_the_whole_pool():
    """The watermark is for those that run; with nobody running it would only starve."""
    world = World(num_blocks=8, block_size=4, watermark=0.5)
    ident = world.submit(28, 4)
    world.run()

    assert world.output(ident) == world.expected(ident)


def test_a_smaller_prompt_passes_one_that_does_not_fit_but_not_for_ever():
    """The large one is overtaken for as many steps as it may be, then nobody passes it any more."""
    world = World(num_blocks=16, block_size=4, prefill_ageing_steps=2, max_num_seqs=8, max_num_batched_tokens=80)
    world.submit(20, 40)
    world.step()
    large = world.submit(48, 2)
    passed = []
    for _ in range(4):
        small = world.submit(3, 1)
        world.step()
        passed.append(world.reason(small) is not None)

    assert passed == [True, True, False, False]
    assert world.state(large) is SequenceState.WAITING
    world.run(depth=2)
    assert world.wrong() == []


def test_at_most_two_long_prompts_prefill_at_once():
    """A third long one waits, and a short one goes past it."""
    world = World(num_blocks=64, max_num_batched_tokens=16, long_prefill_threshold=20)
    longs = [world.submit(40, 1) for _ in range(3)]
    short = world.submit(5, 1)
    world.step()

    assert [world.state(ident) for ident in longs] == [
        SequenceState.PREFILLING,
        SequenceState.PREFILLING,
        SequenceState.WAITING,
    ]
    assert world.reason(short) is LENGTH


def test_short_prompts_pass_a_long_one_until_it_has_aged():
    """Passed over for three steps, the long prompt goes first again and gets the whole budget."""
    world = World(num_blocks=64, max_num_batched_tokens=12, long_prefill_threshold=20, prefill_ageing_steps=3)
    long = world.submit(90, 1)
    world.step()
    got = []
    for _ in range(5):
        world.submit(12, 1)
        plan = world.launch()
        got.append(long in world.listed(plan))
        world.land()

    assert got == [False, False, False, True, False]


# --- prefix hits


@pytest.mark.parametrize(("length", "hit"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (16, 12), (17, 16)])
def test_the_last_prompt_token_is_always_computed(length, hit):
    """The same prompt again takes whole blocks, and never the one that holds its last token."""
    world = World(block_size=4)
    first = world.submit(range(length), 8)
    world.run()
    second = world.submit(range(length), 8)
    world.run()

    assert (world.cached_tokens(first), world.cached_tokens(second)) == ([0], [hit])
    assert world.output(second) == world.output(first) == world.expected(first)


def test_output_is_cached_too():
    """A next turn that repeats prompt and answer takes the blocks of both, all but that of the last token."""
    world = World(block_size=4)
    first = world.submit(6, 7)
    world.run()
    turn = [*world.told[first].spec.prompt, *world.output(first), 1, 2, 3]
    second = world.submit(turn, 2)
    world.run()

    # 13 tokens, of which 12 are computed: three blocks.
    assert world.cached_tokens(second) == [12]
    assert world.wrong() == []


def test_no_hits_with_the_cache_off():
    """Off means that nothing is kept or found."""
    world = World(enable_prefix_caching=False)
    for _ in range(2):
        world.submit(range(20), 2)
        world.run()

    assert [world.cached_tokens(ident) for ident in world.told] == [[0], [0]]
    assert world.scheduler.ledger.num_cached == 0


def test_other_salts_share_nothing():
    """Equal prompts under another salt miss, under the same salt hit."""
    world = World(block_size=4)
    for salt in ("a", "b", "a"):
        world.submit(range(20), 2, salt=salt)
        world.run()

    assert [world.cached_tokens(ident) for ident in world.told] == [[0], [0], [16]]


def test_colliding_keys_share_nothing():
    """With one bit of hash, other content under the same key is never hit and never read."""
    world = World(block_size=2, hash_bits=1)
    for start in range(8):
        world.submit([start, 1, 2, 3, 4, 5, 6], 4)
        world.run(depth=2)

    assert [world.cached_tokens(ident) for ident in world.told] == [[0]] * 8
    assert world.wrong() == []


def test_a_hit_does_not_wait_for_the_fence():
    """The blocks of a sequence that was aborted with steps in flight are taken at once, and read rightly."""
    world = World(block_size=4, max_inflight=4)
    first = world.submit(range(17), 20)
    world.step()
    world.launch()
    world.launch()
    world.end(first)
    second = world.submit(range(17), 5)
    world.launch()

    assert world.cached_tokens(second) == [16]
    while world.num_executable:
        world.execute(ahead=True)
    world.run(depth=2)
    assert world.output(second) == world.expected(second)


def test_a_flush_while_live_changes_no_token():
    """Users keep their blocks; newcomers find nothing."""
    world = World(block_size=4)
    first = world.submit(range(17), 9)
    world.step()
    world.step()
    world.flush()
    second = world.submit(range(17), 9)
    world.run(depth=2)

    assert world.cached_tokens(second) == [0]
    assert world.output(first) == world.output(second) == world.expected(first)


def test_prompt_logprobs_take_no_hits():
    """Every position has to be computed for them, and they come once for each token but the first."""
    world = World(block_size=4, max_num_batched_tokens=12)
    world.submit(range(21), 1)
    world.run()
    ident = world.submit(range(21), 2, prompt_logprobs=1)
    world.run()

    assert world.cached_tokens(ident) == [0]
    assert world.told[ident].prompt_logprobs == [(1, 12), (13, 8)]


# --- prompts in common


@pytest.mark.parametrize("caching", [True, False])
def test_siblings_wait_for_the_leader_and_take_its_full_blocks(caching):
    """The group's prompt is computed once, also with the public cache off; the partial block by each."""
    world = World(block_size=4, max_num_batched_tokens=16, enable_prefix_caching=caching)
    leader = world.submit(range(30), 5, seed=0, leads=True)
    siblings = [world.submit(range(30), 5, seed=seed, leader=leader) for seed in (1, 2, 3)]
    world.step()
    waited = [world.state(ident) for ident in siblings]
    world.run(depth=2)

    assert waited == [SequenceState.WAITING] * 3
    assert [world.cached_tokens(ident) for ident in siblings] == [[28]] * 3
    assert world.wrong() == []
    stranger = world.submit(range(30), 5)
    world.run()
    assert world.cached_tokens(stranger) == [28 if caching else 0]


@pytest.mark.parametrize("steps_before", [0, 1])
def test_siblings_go_on_without_their_leader(steps_before):
    """A leader that is aborted while waiting or prefilling holds nobody up."""
    world = World(block_size=4, max_num_batched_tokens=16)
    leader = world.submit(range(30), 5, leads=True)
    siblings = [world.submit(range(30), 5, seed=seed, leader=leader) for seed in (1, 2)]
    for _ in range(steps_before):
        world.launch()
    world.end(leader)
    world.run(depth=2)

    assert [world.reason(ident) for ident in siblings] == [LENGTH] * 2
    assert world.wrong() == []


def test_sixteen_at_once_compute_a_common_prefix_once():
    """16 prompts of 2,000 common tokens and a tail of their own: the common part costs 2,000 tokens, not 32,000."""
    world = World(
        num_blocks=400,
        block_size=16,
        max_num_seqs=16,
        max_num_batched_tokens=512,
        checked=False,
        long_prefill_threshold=1024,
    )
    idents = [world.submit([*range(2000), 5000 + index, 6000 + index], 3) for index in range(16)]
    world.run(depth=2)

    assert world.wrong() == []
    assert world.scheduler.counters.num_prefill_tokens == 2000 + 16 * 2
    assert [sum(world.cached_tokens(ident)) for ident in idents] == [0] + [2000] * 15


def test_idle_holds_nothing_but_the_cache():
    """After everything has ended blocks are free or cached and all slots are back."""
    world = World(num_blocks=32)
    for index in range(9):
        world.submit(range(index, index + 17), 6, stop_at=index % 3)
    world.run(depth=4)

    assert len(world.blocks(BlockState.FREE)) + len(world.blocks(BlockState.CACHED)) == 32
    assert world.scheduler.slots.num_free == 8
    assert world.scheduler.sequences == {}
