"""The door: what can never run is refused for good, a full queue for now, with an honest time."""

import numpy as np
import pytest

from aserve.core.admission import Limits, Reject, admit, fit_max_tokens
from aserve.core.prefix import DigestChain
from aserve.core.request import SequenceSpec
from aserve.core.sequence import Sequence
from aserve.core.waiting import WaitingQueue
from aserve.errors import ContextLengthExceeded, InvalidRequest


def limits(*, max_model_len=100, pool_tokens=1000, max_queue_requests=0, max_queue_tokens=0):
    return Limits(max_model_len, pool_tokens, max_queue_requests, max_queue_tokens)


def queued(ident: int, *, tokens: int = 10, order: int | None = None) -> Sequence:
    spec = SequenceSpec(id=ident, prompt=np.arange(tokens, dtype=np.int32))
    chain = DigestChain("")
    sequence = Sequence(spec=spec, order=(0, order or ident), chain=chain, salt="", shares_prefix=True)
    sequence.num_uncached_at_door = tokens
    return sequence


def queue(*idents: int) -> WaitingQueue:
    waiting = WaitingQueue()
    for ident in idents:
        waiting.push(queued(ident))
    return waiting


# --- size


@pytest.mark.parametrize(
    ("sent", "default", "expected"), [(20, None, 20), (90, None, 90), (None, None, 90), (None, 16, 16), (None, 500, 90)]
)
def test_a_length_that_was_sent_is_kept_and_a_default_is_cut(sent, default, expected):
    """A prompt of 10 in a context of 100 leaves 90."""
    assert fit_max_tokens(limits(), 10, sent, default) == expected


@pytest.mark.parametrize(("num_prompt", "sent"), [(10, 91), (100, 1), (100, None), (300, None)])
def test_what_does_not_fit_is_refused(num_prompt, sent):
    """A sent length beyond the context, and a prompt that leaves no room for a token."""
    with pytest.raises(ContextLengthExceeded):
        fit_max_tokens(limits(), num_prompt, sent, None)


def test_the_pool_is_a_limit_too():
    """A sequence larger than the whole KV cache could never run."""
    with pytest.raises(ContextLengthExceeded, match="the KV cache holds 32 tokens"):
        fit_max_tokens(limits(pool_tokens=32), 10, 23, None)
    assert fit_max_tokens(limits(pool_tokens=32), 10, 22, None) == 22


def test_an_empty_prompt_is_refused():
    """There is nothing to compute."""
    with pytest.raises(InvalidRequest, match="empty"):
        fit_max_tokens(limits(), 0, 5, None)


# --- the queue


def test_an_empty_queue_takes_anything_that_can_run():
    """A request larger than the bound would otherwise be refused for ever."""
    assert admit(limits(max_queue_requests=1, max_queue_tokens=5), queue(), 8, 1000, 0.0) is None


@pytest.mark.parametrize(("num_sequences", "num_tokens"), [(1, 10), (3, 970)])
def test_up_to_its_bounds_the_queue_takes_more(num_sequences, num_tokens):
    """Exactly at the bound is still in."""
    bounds = limits(max_queue_requests=5, max_queue_tokens=990)

    assert admit(bounds, queue(1, 2), num_sequences, num_tokens, 0.0) is None


@pytest.mark.parametrize(("num_sequences", "num_tokens", "said"), [(4, 10, "2 requests"), (1, 971, "20 prompt tokens")])
def test_beyond_its_bounds_it_refuses_for_now(num_sequences, num_tokens, said):
    """By requests and by uncached prompt tokens; the reason names the one."""
    bounds = limits(max_queue_requests=5, max_queue_tokens=990)

    assert said in admit(bounds, queue(1, 2), num_sequences, num_tokens, 0.0).reason


def test_retry_after_is_what_is_missing_at_the_present_pace():
    """Two places are missing and the queue moves one place in four seconds: eight seconds."""
    waiting = queue(*range(1, 12))
    for second in range(5):
        waiting.depart(next(iter(waiting)), 4.0 * second)

    assert admit(limits(max_queue_requests=6), waiting, 2, 10, 16.0) == Reject(
        reason="6 requests are waiting, which is the limit", retry_after_s=8.0
    )


def test_a_queue_that_stands_still_asks_for_more_patience():
    """The pace falls while nothing leaves, and the answer is bounded."""
    waiting = queue(*range(1, 12))
    for second in range(5):
        waiting.depart(next(iter(waiting)), 4.0 * second)
    times = [admit(limits(max_queue_requests=6), waiting, 2, 10, now).retry_after_s for now in (16.0, 32.0, 9999.0)]

    assert times == [8.0, 16.0, 120.0]


def test_the_queue_keeps_policy_order_and_its_sum():
    """Insertion by order, removal from anywhere, tokens counted as at the door."""
    waiting = WaitingQueue()
    sequences = [queued(ident, tokens=ident, order=10 - ident) for ident in (1, 2, 3)]
    for sequence in sequences:
        waiting.push(sequence)
    waiting.remove(sequences[1])

    assert [sequence.id for sequence in waiting] == [3, 1]
    assert waiting.num_tokens == 4
