"""Stage 1: what may wait. A request that could never run is refused for good, one that finds the queue full for now."""

import math
from dataclasses import dataclass

from aserve.core.waiting import WaitingQueue
from aserve.errors import ContextLengthExceeded, InvalidRequest

MAX_RETRY_AFTER_S = 120.0


@dataclass(frozen=True, slots=True)
class Limits:
    """max_model_len and pool_tokens bound one sequence, the queue's bounds all that wait. 0 of those is no bound."""

    max_model_len: int
    pool_tokens: int
    max_queue_requests: int
    max_queue_tokens: int


@dataclass(frozen=True, slots=True)
class Reject:
    """Refused for now. retry_after_s: when so many places will be free as are missing, at the queue's present pace."""

    reason: str
    retry_after_s: float


def fit_max_tokens(limits: Limits, num_prompt: int, max_tokens: int | None, default: int | None) -> int:
    """The output length to use. Only a length that was sent can be refused; a default is cut to what fits.

    Raises InvalidRequest for an empty prompt, and ContextLengthExceeded if the prompt leaves no room for a token or if
    prompt and sent length exceed context or pool.
    """
    if num_prompt < 1:
        raise InvalidRequest("The prompt is empty: it must have at least one token.", param="prompt")
    room = min(limits.max_model_len, limits.pool_tokens)
    if max_tokens is None:
        if num_prompt >= room:
            raise ContextLengthExceeded(
                f"The prompt has {num_prompt} tokens, but the context holds {room}, one token of output included."
            )
        return min(room - num_prompt, default if default is not None else room)
    if num_prompt + max_tokens > room:
        what = "the model's context" if limits.max_model_len <= limits.pool_tokens else "the KV cache"
        raise ContextLengthExceeded(
            f"The prompt has {num_prompt} tokens and {max_tokens} more were asked for: "
            f"{num_prompt + max_tokens} in all, but {what} holds {room} tokens.",
            param="max_tokens" if num_prompt < room else None,
        )
    return max_tokens


def admit(limits: Limits, waiting: WaitingQueue, num_sequences: int, num_tokens: int, now: float) -> Reject | None:
    """None if ``num_sequences`` with ``num_tokens`` uncached prompt tokens in all may join the queue.

    An empty queue takes anything that can run: a request larger than the bound must not be refused for ever.
    """
    if not len(waiting):
        return None
    excess_requests = len(waiting) + num_sequences - limits.max_queue_requests if limits.max_queue_requests else 0
    excess_tokens = waiting.num_tokens + num_tokens - limits.max_queue_tokens if limits.max_queue_tokens else 0
    if excess_requests <= 0 and excess_tokens <= 0:
        return None
    per_sequence = max(waiting.num_tokens / len(waiting), 1.0)
    missing = max(excess_requests, math.ceil(excess_tokens / per_sequence))
    rate = waiting.departures_per_second(now)
    retry_after_s = missing / rate if rate else MAX_RETRY_AFTER_S / 8
    reason = (
        f"{len(waiting)} requests are waiting, which is the limit"
        if excess_requests > 0
        else f"{waiting.num_tokens} prompt tokens are waiting, and the limit is {limits.max_queue_tokens}"
    )
    return Reject(reason, min(max(retry_after_s, 1.0), MAX_RETRY_AFTER_S))
