"""What a caller asks for, in tokens: values that never change after submission."""

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from aserve.core.ids import SequenceId

MAX_STOP_IDS = 16
"""Stop ids a slot holds on the device, end-of-sequence ids included."""


class FinishReason(StrEnum):
    """The one way in which an accepted sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    TIMEOUT = "timeout"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen. Ranges are checked where the request enters, not here.

    temperature: 0 is greedy. top_k: 0 is off. logprobs: None is off, otherwise how many alternatives (0..20).
    prompt_logprobs: the same for the prompt's own tokens; such a request takes no prefix hits.
    stop_token_ids: already joined with the model's end-of-sequence ids unless ignore_eos; at most MAX_STOP_IDS.
    bad_words: token sequences that must not be completed. allowed_token_ids: None allows all.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    max_tokens: int = 16
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def needs_history(self) -> bool:
        """Whether the sampler needs the tokens seen so far (penalties, multi-token bad words)."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or any(len(word) > 1 for word in self.bad_words)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSpec:
    """One sequence as the scheduler takes it.

    prompt: int32 [P], P >= 1. seed: the 64-bit sampling key, child index mixed in already.
    priority: lower goes first. arrival_s: the engine's clock at submission, ties broken by id.
    cache_salt: prefix hits only among equal salts. leader: the sequence whose prompt this one shares and waits for
    (a group's first child), or None. leads: others name this one as their leader; within such a group full blocks of
    the prompt are shared even where the public prefix cache is off.
    """

    id: SequenceId
    prompt: NDArray[np.int32]
    params: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    priority: int = 0
    arrival_s: float = 0.0
    cache_salt: str = ""
    leader: SequenceId | None = None
    leads: bool = False
