"""The sampler's kernels against the CPU's sampler: the same parameters, the same noise, the same tokens."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from kernel_builders import DEVICE, change_slots, ints
from numpy.typing import NDArray

from aserve.core.ids import NO_STEP, Epoch, Slot
from aserve.core.plan import FLAG_INVALID, BatchPlan, Join
from aserve.core.request import SamplingParams
from aserve.model.kernels.noise import log_exponential, noise_words
from aserve.model.kernels.sampler import sample, top_logprobs
from aserve.model.kernels.slots import SlotTensors
from aserve.model.noise import log_exponential_, noise_bits
from aserve.model.sampler import Sampler, compute_logprobs
from aserve.model.slot_table import SlotTable

pytestmark = [
    pytest.mark.torch,
    # the interpreter's NumPy speaks up where kernels compute what a mask then leaves out
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
]

VOCAB = 500  # no multiple of a block, of 32 or of 8


def join(slot: int, params: SamplingParams, *, prompt: tuple[int, ...] = (), output: tuple[int, ...] = ()) -> Join:
    return Join(
        slot=Slot(slot),
        epoch=Epoch(1),
        position=0,
        params=params,
        seed=0xFEDC_BA98_7654_3210 + slot,
        stop_ids=params.stop_token_ids,
        min_length=len(prompt) + params.min_tokens,
        max_length=1 << 30,
        num_prompt_tokens=len(prompt),
        history=np.array([*prompt, *output], np.int32),
    )


def tokens_of(logits_RV: torch.Tensor, joins: list[Join], lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel's tokens and flags, row i being the i-th join's."""
    table = SlotTensors.allocate(
        num_slots=max(join.slot for join in joins) + 1,
        max_num_blocks=1,
        vocab_size=logits_RV.shape[1],
        max_additions=8,
        device=DEVICE,
    )
    change_slots(table, joins=tuple(joins))
    logits = logits_RV.to(DEVICE)
    tokens_R, flags_R = ints([-1] * len(joins)), ints([-1] * len(joins))
    before = logits.clone()
    sample(
        logits, torch.full_like(logits, float("nan")), ints([join.slot for join in joins]), ints(lengths), table,
        tokens_R=tokens_R, flags_R=flags_R,
    )  # fmt: skip
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())
    return tokens_R.cpu(), flags_R.cpu()


def reference_tokens(logits_RV: torch.Tensor, joins: list[Join], lengths: list[int]) -> NDArray[np.int64]:
    table = SlotTable(num_slots=len(joins), max_num_blocks=1, vocab_size=logits_RV.shape[1])
    table.apply(BatchPlan(step=NO_STEP, joins=tuple(joins)))
    rows = table.sampling_rows(np.array([join.slot for join in joins]), np.array(lengths) - 1)
    return Sampler(logits_RV.shape[1]).sample(logits_RV.clone(), rows).tokens_R


CASES = {
    "greedy": SamplingParams(temperature=0),
    "temperature": SamplingParams(temperature=0.7),
    "hot": SamplingParams(temperature=3.0),
    "top_k": SamplingParams(top_k=7),
    "top_k of one": SamplingParams(top_k=1),
    "top_k of nearly all": SamplingParams(top_k=499, temperature=5.0),
    "top_p": SamplingParams(top_p=0.8),
    "tiny top_p": SamplingParams(top_p=1e-6),
    "min_p": SamplingParams(min_p=0.2),
    "all filters": SamplingParams(temperature=1.5, top_k=40, top_p=0.7, min_p=0.02),
    "repetition": SamplingParams(temperature=0, repetition_penalty=1.8),
    "presence and frequency": SamplingParams(temperature=0.5, presence_penalty=1.5, frequency_penalty=0.7),
    "bias": SamplingParams(temperature=0, logit_bias=((3, 9.0), (499, -100.0))),
    "bad words": SamplingParams(temperature=0, bad_words=((17,), (18,))),
    "allowed": SamplingParams(temperature=2.0, allowed_token_ids=(1, 33, 499)),
    "least length": SamplingParams(temperature=0, min_tokens=90, stop_token_ids=(5, 6)),
    "everything": SamplingParams(
        temperature=0.9, top_k=30, top_p=0.9, min_p=0.01, repetition_penalty=1.3, presence_penalty=0.2,
        frequency_penalty=0.1, logit_bias=((9, 4.0),), bad_words=((11,),), allowed_token_ids=tuple(range(9, 300)),
        min_tokens=90, stop_token_ids=(12,),
    ),
}  # fmt: skip


@pytest.mark.parametrize("params", CASES.values(), ids=CASES.keys())
def test_the_same_tokens_as_the_cpu(params: SamplingParams) -> None:
    """Over several rows, positions and seeds, with the likeliest tokens where the parameters bite."""
    generator = torch.Generator().manual_seed(5)
    logits_RV = torch.randn(6, VOCAB, generator=generator) * 2
    logits_RV[:, [5, 6, 12, 17, 18, 40, 41]] += 6
    joins = [join(slot, params, prompt=(1, 40, 40), output=(41, 41, 2)) for slot in (3, 0, 5, 1, 2, 4)]
    lengths = [6, 7, 50, 92, 93, 1000]

    tokens, flags = tokens_of(logits_RV, joins, lengths)

    assert tokens.tolist() == reference_tokens(logits_RV, joins, lengths).tolist()
    assert flags.tolist() == [0] * 6


@pytest.mark.parametrize("vocab_size", [8, 128, 9000])
def test_any_vocabulary(vocab_size: int) -> None:
    """Smaller and larger than the block that a pass goes by."""
    logits_RV = torch.randn(2, vocab_size, generator=torch.Generator().manual_seed(3))
    joins = [join(0, SamplingParams(temperature=0)), join(1, SamplingParams(temperature=0.2))]

    assert tokens_of(logits_RV, joins, [4, 5])[0].tolist() == reference_tokens(logits_RV, joins, [4, 5]).tolist()


def test_equal_logits_go_to_the_lowest_id() -> None:
    """Also where the equals lie in different blocks; and a filter keeps all that tie with the last one it keeps."""
    logits_RV = torch.zeros(1, VOCAB)
    logits_RV[0, [77, 78, 400]] = 3.0
    filtered = [join(slot, SamplingParams(top_k=2)) for slot in range(20)]

    assert tokens_of(logits_RV, [join(0, SamplingParams(temperature=0))], [1])[0].tolist() == [77]
    assert set(tokens_of(logits_RV.expand(20, -1).contiguous(), filtered, [1] * 20)[0].tolist()) == {77, 78, 400}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_invalid_logits_fail_their_row_alone(temperature: float, value: float) -> None:
    """One NaN or infinity anywhere, or nothing but -inf."""
    logits_RV = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(3))
    if value == float("-inf"):
        logits_RV[1] = value
    else:
        logits_RV[1, 321] = value
    joins = [join(slot, SamplingParams(temperature=temperature)) for slot in range(3)]

    tokens, flags = tokens_of(logits_RV, joins, [9, 9, 9])

    assert flags.tolist() == [0, FLAG_INVALID, 0]
    valid = tokens_of(logits_RV[[0, 2]], [joins[0], joins[2]], [9, 9])[0]
    assert tokens.tolist() == [int(valid[0]), 0, int(valid[1])]


def test_rows_of_nobody_are_left_out() -> None:
    """A done slot's logits may be anything."""
    table = SlotTensors.allocate(num_slots=2, max_num_blocks=1, vocab_size=VOCAB, max_additions=1, device=DEVICE)
    logits_RV = torch.full((2, VOCAB), float("nan"), device=DEVICE)
    tokens_R, flags_R = ints([7, 7]), ints([7, 7])

    sample(logits_RV, logits_RV.clone(), ints([0, 2]), ints([3, 0]), table, tokens_R=tokens_R, flags_R=flags_R)

    assert tokens_R.tolist() == flags_R.tolist() == [0, 0]


def test_logprobs() -> None:
    """Those of the CPU; equals come lowest id first."""
    logits_RV = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(8))
    logits_RV[1, :10] = logits_RV[1].max() + 1
    logits_RV[2, 30:] = float("-inf")
    tokens_R = torch.tensor([4, 3, 2])
    out = {
        "token_logprobs_R": torch.empty(3, device=DEVICE),
        "ranks_R": ints([0] * 3),
        "top_ids_RK": torch.empty(3, 5, dtype=torch.int32, device=DEVICE),
        "top_logprobs_RK": torch.empty(3, 5, device=DEVICE),
    }

    top_logprobs(logits_RV.to(DEVICE), ints(tokens_R.tolist()), **out)

    expected = compute_logprobs(logits_RV, tokens_R, 5)
    assert out["ranks_R"].tolist() == expected.ranks.tolist()
    assert out["top_ids_RK"].tolist() == expected.top_ids.tolist()
    np.testing.assert_allclose(out["token_logprobs_R"].cpu(), expected.token_logprobs, atol=1e-5)
    np.testing.assert_allclose(out["top_logprobs_RK"].cpu(), expected.top_logprobs, atol=1e-5)


@triton.jit(do_not_specialize=["position"])
def _noise_kernel(seed_ptr, position, words_ptr, logs_ptr, NUM_COUNTERS: tl.constexpr):
    counter = tl.arange(0, NUM_COUNTERS)
    seed = tl.load(seed_ptr).to(tl.uint64, bitcast=True)
    word_0, word_1, word_2, word_3 = noise_words(seed, position, counter)
    tl.store(words_ptr + counter * 4, word_0.to(tl.int64, bitcast=True))
    tl.store(words_ptr + counter * 4 + 1, word_1.to(tl.int64, bitcast=True))
    tl.store(words_ptr + counter * 4 + 2, word_2.to(tl.int64, bitcast=True))
    tl.store(words_ptr + counter * 4 + 3, word_3.to(tl.int64, bitcast=True))
    tl.store(logs_ptr + counter, log_exponential(word_0.to(tl.uint32)))


@pytest.mark.parametrize(("seed", "position"), [(0, 1), (2**64 - 1, 77), (0x1234_5678_9ABC_DEF0, 2**31 - 1)])
def test_noise_is_the_cpus_noise(seed: int, position: int) -> None:
    """To the bit; its logarithms to float32's rounding."""
    words = torch.zeros(256, dtype=torch.int64, device=DEVICE)
    logs = torch.zeros(64, device=DEVICE)
    seed_1 = torch.from_numpy(np.array([seed], np.uint64).view(np.int64)).to(DEVICE)

    _noise_kernel[(1,)](seed_1, position, words, logs, NUM_COUNTERS=64)

    bits = noise_bits(seed, position, 512)
    assert words.cpu().numpy().view(np.uint32).tolist() == bits.tolist()
    expected = log_exponential_(torch.from_numpy(bits[::8].astype(np.float32)))
    np.testing.assert_allclose(logs.cpu(), expected, rtol=1e-5, atol=1e-6)
