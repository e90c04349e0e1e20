"""The sampler: distributions, filters, penalties, log-probabilities, and noise that a counter decides."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.random import Philox
from numpy.typing import NDArray

from aserve.core.ids import NO_STEP, Epoch, Slot
from aserve.core.plan import BatchPlan, Join
from aserve.core.request import SamplingParams
from aserve.model.noise import log_exponential_, noise_bits
from aserve.model.sampler import NUM_CANDIDATES, SampledTokens, Sampler, compute_logprobs
from aserve.model.slot_table import SlotTable

pytestmark = pytest.mark.torch

INFINITY = float("inf")


def join(
    slot: int, params: SamplingParams, *, seed: int = 0, prompt: Sequence[int] = (), output: Sequence[int] = ()
) -> Join:
    return Join(
        slot=Slot(slot),
        epoch=Epoch(1),
        position=0,
        params=params,
        seed=seed,
        stop_ids=params.stop_token_ids,
        min_length=len(prompt) + params.min_tokens,
        max_length=1 << 30,
        num_prompt_tokens=len(prompt),
        history=np.array([*prompt, *output], np.int32),
    )


def sample(
    logits: torch.Tensor, joins: Sequence[Join], positions: Sequence[int] | None = None, *, logprobs_k: int = -1
) -> SampledTokens:
    """One token for each row of ``logits``, row i belonging to the i-th join."""
    vocab_size = logits.shape[1]
    num_slots = max(join.slot for join in joins) + 1
    table = SlotTable(num_slots=num_slots, max_num_blocks=1, vocab_size=vocab_size)
    table.apply(BatchPlan(step=NO_STEP, joins=tuple(joins)))
    slots = np.array([join.slot for join in joins], np.int64)
    lengths = [len(join.history) for join in joins]
    rows = table.sampling_rows(slots, np.array(lengths if positions is None else positions, np.int64) - 1)
    return Sampler(vocab_size).sample(logits.clone(), rows, logprobs_k)


def one(logits: Sequence[float], params: SamplingParams, **history: Any) -> int:
    """The token of a single row."""
    sampled = sample(torch.tensor([logits]), [join(0, params, **history)])
    assert not bool(sampled.invalid_R.any())
    return int(sampled.tokens_R[0])


def draw(logits: NDArray[np.float32], params: SamplingParams, num_draws: int = 100_000) -> NDArray[np.float64]:
    """Frequencies of the tokens in draws at different positions under one seed."""
    table = SlotTable(num_slots=1, max_num_blocks=1, vocab_size=len(logits))
    table.apply(BatchPlan(step=NO_STEP, joins=(join(0, params, seed=1234),)))
    sampler = Sampler(len(logits))
    counts = np.zeros(len(logits))
    for start in range(0, num_draws, 10_000):
        positions = np.arange(start, min(start + 10_000, num_draws))
        rows = table.sampling_rows(np.zeros(len(positions), np.int64), positions)
        batch = torch.from_numpy(logits).expand(len(positions), -1).clone()
        counts += np.bincount(sampler.sample(batch, rows).tokens_R, minlength=len(logits))
    return counts / num_draws


def softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def exact(logits: NDArray[np.float32], params: SamplingParams) -> NDArray[np.float64]:
    """The distribution by the plain definitions: temperature, min-p, top-k, top-p, each on what the last one left."""
    p = softmax(logits.astype(np.float64) / params.temperature)
    p[p < params.min_p * p.max()] = 0
    if params.top_k:
        p[p < np.sort(p)[-params.top_k]] = 0
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    kept = np.cumsum(p[order]) - p[order] < params.top_p
    p[order[~kept]] = 0
    return p / p.sum()


def assert_drawn_from(frequencies: NDArray[np.float64], p: NDArray[np.float64], num_draws: int = 100_000) -> None:
    """Chi-square within 5 standard deviations of its mean, and nothing outside the support."""
    assert frequencies[p == 0].sum() == 0
    common = p * num_draws >= 5
    rare_p, rare_frequency = p[~common].sum(), frequencies[~common].sum()
    chi2 = (num_draws * (frequencies[common] - p[common]) ** 2 / p[common]).sum()
    if rare_p * num_draws >= 5:
        chi2 += num_draws * (rare_frequency - rare_p) ** 2 / rare_p
    freedom = max(1, int(common.sum()) - 1)
    assert chi2 < freedom + 5 * math.sqrt(2 * freedom) + 5


LOGITS = np.random.default_rng(7).normal(0, 2, 64).astype(np.float32)
WIDE_LOGITS = np.random.default_rng(8).normal(0, 0.3, 700).astype(np.float32)
"""So flat that filters keep more than the sampler's candidates."""


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.5),
        SamplingParams(top_k=5),
        SamplingParams(top_p=0.8),
        SamplingParams(min_p=0.1),
        SamplingParams(temperature=1.5, top_k=20, top_p=0.7, min_p=0.02),
        SamplingParams(temperature=0.7, top_k=1),
        SamplingParams(top_p=1e-9),
    ],
    ids=repr,
)
def test_draws_follow_the_exact_distribution(params: SamplingParams) -> None:
    """100,000 draws at different positions, by chi-square."""
    assert_drawn_from(draw(LOGITS, params), exact(LOGITS, params))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_p=0.9),
        SamplingParams(top_k=400),
        SamplingParams(min_p=0.2),
        SamplingParams(top_k=10, top_p=0.5),
    ],
    ids=repr,
)
def test_filters_that_keep_more_than_the_candidates_are_exact_too(params: SamplingParams) -> None:
    """A flat distribution over 700 tokens: some rows are sorted as a whole, others not."""
    assert len(WIDE_LOGITS) > NUM_CANDIDATES
    assert_drawn_from(draw(WIDE_LOGITS, params, 10_000), exact(WIDE_LOGITS, params), 10_000)


@pytest.mark.parametrize("num_equal", [3, 400])
def test_tokens_that_tie_with_the_last_kept_one_are_kept(num_equal: int) -> None:
    """top_k = 2 among equals keeps all of them, whether or not they fit the candidates."""
    logits = np.zeros(600, np.float32)
    logits[100 : 100 + num_equal] = 30
    drawn = np.flatnonzero(draw(logits, SamplingParams(top_k=2), 6_000))
    assert drawn.tolist() == list(range(100, 100 + num_equal))


MIXTURE = [
    SamplingParams(temperature=0),
    SamplingParams(),
    SamplingParams(top_k=40),
    SamplingParams(top_p=0.9, temperature=0.8),
    SamplingParams(min_p=0.05, temperature=2),
    SamplingParams(top_p=0.99, temperature=3),
    SamplingParams(temperature=0, repetition_penalty=1.3),
    SamplingParams(presence_penalty=1.0, logit_bias=((3, 2.0),)),
]


def test_a_row_gets_the_same_token_in_any_batch_and_order() -> None:
    """24 rows at once, in reverse, and each alone: seed and position decide, not the neighbours."""
    num_rows, vocab_size = 24, 1000
    logits = torch.from_numpy(np.random.default_rng(3).normal(0, 2, (num_rows, vocab_size)).astype(np.float32))
    logits = logits.to(torch.bfloat16).to(torch.float32)  # as a model's: full of ties
    joins = [join(row, MIXTURE[row % 8], seed=row // 3, prompt=[row, 5, 9]) for row in range(num_rows)]

    together = sample(logits, joins).tokens_R.tolist()
    reverse = sample(logits.flip(0), joins[::-1]).tokens_R[::-1].tolist()
    alone = [int(sample(logits[row : row + 1], [joins[row]]).tokens_R[0]) for row in range(num_rows)]
    assert (reverse, alone) == (together, together)


def test_seed_and_position_both_change_the_draw() -> None:
    """Rows with equal logits differ by either."""
    logits, params = torch.zeros(1, 5000), SamplingParams()
    tokens = {
        int(sample(logits, [join(0, params, seed=seed)], [position]).tokens_R[0])
        for seed in (0, 1, 2**63, 2**64 - 1)
        for position in (1, 2, 3)
    }
    assert len(tokens) == 12


def test_greedy_takes_the_lowest_of_equal_tokens() -> None:
    """Bit-exact argmax, in a batch with others and alone."""
    logits = torch.zeros(3, 2000)
    logits[:, [700, 1500]] = 1.0
    greedy = SamplingParams(temperature=0)
    tokens = sample(logits, [join(0, greedy), join(1, SamplingParams()), join(2, greedy)]).tokens_R
    assert (int(tokens[0]), int(tokens[2])) == (700, 700)
    assert one(logits[0].tolist(), greedy) == 700


@pytest.mark.parametrize("value", [float("nan"), -INFINITY, INFINITY])
@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_k=3, top_p=0.5)]
)
def test_an_invalid_row_fails_alone(value: float, params: SamplingParams) -> None:
    """NaN, all -inf and infinite logits flag their row; the others get their tokens, and all ids are in range."""
    logits = torch.from_numpy(np.random.default_rng(5).normal(0, 3, (3, 400)).astype(np.float32))
    joins = [join(row, params, seed=row) for row in range(3)]
    whole = sample(logits, joins).tokens_R
    logits[1] = value
    broken = sample(logits, joins)
    assert broken.invalid_R.tolist() == [False, True, False]
    assert broken.tokens_R[[0, 2]].tolist() == whole[[0, 2]].tolist()
    assert 0 <= int(broken.tokens_R[1]) < 400


def test_one_nan_among_finite_logits_is_invalid() -> None:
    """It would spread through any sum."""
    logits = torch.zeros(1, 100)
    logits[0, 50] = float("nan")
    assert sample(logits, [join(0, SamplingParams(temperature=0))]).invalid_R.tolist() == [True]


def test_masks_that_leave_nothing_are_invalid() -> None:
    """The only allowed token is a bad word."""
    params = SamplingParams(temperature=0, allowed_token_ids=(3,), bad_words=((3,),))
    assert sample(torch.zeros(1, 10), [join(0, params)]).invalid_R.tolist() == [True]


def test_logit_bias_adds_and_ids_beyond_the_vocabulary_are_nothing() -> None:
    """Repeated ids add up; a bias of one slot does not reach another."""
    params = SamplingParams(temperature=0, logit_bias=((4, 1.5), (4, 1.5), (99, 50.0), (2, -8.0)))
    logits = torch.tensor([[0.0, 1.0, 2.0, 0.0, 0.0]] * 2)
    tokens = sample(logits, [join(0, params), join(1, SamplingParams(temperature=0, logit_bias=((1, 0.5),)))]).tokens_R
    assert tokens.tolist() == [4, 2]


def test_only_allowed_tokens_are_drawn() -> None:
    """Whatever the others' logits are; ids beyond the vocabulary are ignored."""
    frequencies = draw(LOGITS, SamplingParams(allowed_token_ids=(1, 9, 33, 640)), 10_000)
    p = np.zeros(64)
    p[[1, 9, 33]] = softmax(LOGITS.astype(np.float64)[[1, 9, 33]])
    assert_drawn_from(frequencies, p, 10_000)


@pytest.mark.parametrize(
    ("history", "expected"),
    [([1, 2], 0), ([7, 8], 1), ([5, 7, 8], 1), ([8, 7], 0), ([8], 0), ([], 0)],
)
def test_a_bad_word_is_not_completed(history: list[int], expected: int) -> None:
    """Token 0 is banned after 7, 8; token 2 always."""
    params = SamplingParams(temperature=0, bad_words=((7, 8, 0), (2,), (4, 4, 4, 0)))
    assert one([5.0, 4.0, 9.0, 1.0], params, prompt=history[:1], output=history[1:]) == expected


def test_stop_ids_are_masked_until_the_least_length() -> None:
    """With two tokens of output wanted, the third may be a stop id."""
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=(0, 77))
    logits = torch.tensor([[5.0, 4.0]])
    row = [join(0, params, prompt=[1, 1, 1])]
    assert [int(sample(logits, row, [length]).tokens_R[0]) for length in (3, 4, 5)] == [1, 1, 0]


def penalised(logits: list[float], params: SamplingParams, prompt: list[int], output: list[int]) -> list[float]:
    """The penalties in plain Python."""
    changed = []
    for token, logit in enumerate(logits):
        if token in prompt or token in output:
            logit = logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
        logit -= params.frequency_penalty * output.count(token)
        logit -= params.presence_penalty * (token in output)
        changed.append(logit)
    return changed


def test_penalties_match_their_definitions() -> None:
    """Repetition over prompt and output, frequency and presence over the output, on 50 random rows."""
    random = np.random.default_rng(11)
    for _ in range(50):
        logits = random.normal(0, 2, 12).astype(np.float32).tolist()
        prompt, output = random.integers(0, 12, 4).tolist(), random.integers(0, 12, 6).tolist()
        params = SamplingParams(
            temperature=0,
            repetition_penalty=float(random.uniform(0.6, 1.8)),
            presence_penalty=float(random.uniform(-2, 2)),
            frequency_penalty=float(random.uniform(-2, 2)),
        )
        expected = int(np.argmax(penalised(logits, params, prompt, output)))
        assert one(logits, params, prompt=prompt, output=output) == expected


def test_logprobs_are_the_models_own() -> None:
    """Before temperature, filters, bias and penalties; ranks count from 1."""
    logits = torch.from_numpy(np.random.default_rng(2).normal(0, 3, (2, 300)).astype(np.float32))
    params = SamplingParams(
        temperature=0, logit_bias=((42, 100.0),), repetition_penalty=1.5, allowed_token_ids=(42, 43)
    )
    sampled = sample(logits, [join(0, params, prompt=[42]), join(1, SamplingParams(temperature=0))], logprobs_k=5)
    assert sampled.logprobs is not None
    expected = torch.log_softmax(logits, -1)
    assert sampled.tokens_R[0] == 42
    assert sampled.logprobs.token_logprobs[0] == pytest.approx(float(expected[0, 42]), abs=1e-5)
    assert sampled.logprobs.ranks.tolist() == [1 + int((expected[0] > expected[0, 42]).sum()), 1]
    assert sampled.logprobs.top_ids.tolist() == expected.topk(5).indices.tolist()
    np.testing.assert_allclose(sampled.logprobs.top_logprobs, expected.topk(5).values, atol=1e-5)
    types = [sampled.logprobs.token_logprobs.dtype, sampled.logprobs.ranks.dtype, sampled.logprobs.top_ids.dtype]
    assert types == [np.float32, np.int32, np.int32]


@pytest.mark.parametrize(("num_rows", "k"), [(0, 3), (1, 0), (130, 20), (2, 50)])
def test_logprobs_of_any_number_of_rows_and_alternatives(num_rows: int, k: int) -> None:
    """None at all, more than a block of rows, more alternatives than the vocabulary has."""
    found = compute_logprobs(torch.zeros(num_rows, 40), torch.zeros(num_rows, dtype=torch.int64), k)
    assert found.top_ids.shape == found.top_logprobs.shape == (num_rows, min(k, 40))
    np.testing.assert_allclose(found.token_logprobs, -math.log(40), rtol=1e-6)


def test_equal_alternatives_come_lowest_id_first_whatever_their_number() -> None:
    """Asking for more does not change the order of the first."""
    logits = torch.zeros(1, 60)
    logits[0, [50, 10, 30]] = 2.0
    for k in (2, 3, 20):
        ids = compute_logprobs(logits, torch.tensor([0]), k).top_ids[0].tolist()
        assert ids[:3] == [10, 30, 50][:k]


def test_noise_matches_published_answers() -> None:
    """Philox4x64-10's known answers for a zero counter and key, and for all ones (Random123's kat_vectors)."""
    zeros = Philox(key=np.zeros(2, np.uint64), counter=np.full(4, 2**64 - 1, np.uint64))
    assert [hex(word) for word in zeros.random_raw(4).tolist()] == [
        "0x16554d9eca36314c", "0xdb20fe9d672d0fdc", "0xd7e772cee186176b", "0x7e68b68aec7ba23b",
    ]  # fmt: skip
    ones = Philox(key=np.full(2, 2**64 - 1, np.uint64), counter=np.array([2**64 - 2, *[2**64 - 1] * 3], np.uint64))
    assert [hex(word) for word in ones.random_raw(4).tolist()] == [
        "0x87b092c3013fe90b", "0x438c3c67be8d0224", "0x9cc7d7c69cd777b6", "0xa09caebf594f0ba0",
    ]  # fmt: skip


def test_noise_is_a_function_of_seed_position_and_index() -> None:
    """Philox by hand, from the paper's definition, at a few indices; a longer row begins with the shorter one."""
    seed, position = 0x9E37_79B9_7F4A_7C15, 12_345
    bits = noise_bits(seed, position, 1003)
    for index in (0, 7, 8, 500, 1002):
        words = philox(counter=(1 + index // 8, position, 0, 0), key=(seed, 0))
        assert int(bits[index]) == (words[index % 8 // 2] >> 32 * (index % 2)) & 0xFFFF_FFFF
    assert noise_bits(seed, position, 10).tolist() == bits[:10].tolist()


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x64-10 in plain integers."""
    mask = 2**64 - 1
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        product0, product1 = 0xD2E7_470E_E14C_6C93 * c0, 0xCA5A_8263_9512_1157 * c2
        c0, c1, c2, c3 = product1 >> 64 ^ c1 ^ k0, product1 & mask, product0 >> 64 ^ c3 ^ k1, product0 & mask
        k0, k1 = (k0 + 0x9E37_79B9_7F4A_7C15) & mask, (k1 + 0xBB67_AE85_84CA_A73B) & mask
    return c0, c1, c2, c3


def test_the_exponential_noise_is_finite_at_its_ends_and_has_the_right_moments() -> None:
    """All-zero and all-one bits give finite logarithms; mean and variance of E are 1."""
    ends = log_exponential_(torch.tensor([0.0, 2.0**32 - 1, 2.0**32]))
    assert bool(ends.isfinite().all())
    noise = log_exponential_(torch.from_numpy(noise_bits(1, 2, 1 << 20).astype(np.float32))).exp().double()
    assert float(noise.mean()) == pytest.approx(1, abs=0.005)
    assert float(noise.var()) == pytest.approx(1, abs=0.01)
