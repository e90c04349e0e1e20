"""Request fields to SamplingParams, with the checks that need the model: vocabulary, end-of-sequence ids, tokenizer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from aserve.core.request import MAX_STOP_IDS, SamplingParams
from aserve.errors import InvalidRequest
from aserve.server.ports import Vocabulary
from aserve.server.schema import SamplingFields

MIN_TEMPERATURE = 0.01
"""Below it, other than 0, the division overflows half precision for no gain: such temperatures are greedy in all but
name."""
MIN_TOP_P = 1e-6
"""top_p 0 means the likeliest token alone."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the checks need to know. max_prompts: sequences a call may create. defaults: the model's generation_config,
    or SamplingParams' own."""

    vocab_size: int
    eos_ids: tuple[int, ...]
    max_model_len: int
    max_prompts: int
    defaults: SamplingParams


def sampling_params(
    fields: SamplingFields,
    facts: ModelFacts,
    tokenizer: Vocabulary,
    *,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """Everything but ``max_tokens``, which only the engine can settle. Raises InvalidRequest with the field's path."""
    defaults = facts.defaults
    temperature = _or(fields.temperature, defaults.temperature)
    if 0 < temperature < MIN_TEMPERATURE:
        temperature = MIN_TEMPERATURE
    top_k = _or(fields.top_k, defaults.top_k)
    return SamplingParams(
        temperature=temperature,
        top_p=max(MIN_TOP_P, _or(fields.top_p, defaults.top_p)),
        top_k=top_k if 0 < top_k < facts.vocab_size else 0,
        min_p=_or(fields.min_p, defaults.min_p),
        repetition_penalty=_or(fields.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=_or(fields.presence_penalty, defaults.presence_penalty),
        frequency_penalty=_or(fields.frequency_penalty, defaults.frequency_penalty),
        logit_bias=_logit_bias(fields.logit_bias or {}, facts.vocab_size),
        bad_words=_bad_words(fields.bad_words or (), tokenizer),
        allowed_token_ids=_allowed(fields.allowed_token_ids, facts.vocab_size),
        stop_token_ids=_stop_ids(fields, facts),
        min_tokens=fields.min_tokens or 0,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def with_length(params: SamplingParams, max_tokens: int) -> SamplingParams:
    """``params`` with the length that ``Engine.fit`` gave. Raises InvalidRequest if the least length exceeds it."""
    if params.min_tokens > max_tokens:
        raise InvalidRequest(
            f"'min_tokens' is {params.min_tokens}, more than the {max_tokens} tokens to generate.", param="min_tokens"
        )
    return replace(params, max_tokens=max_tokens)


def stop_strings(fields: SamplingFields) -> tuple[str, ...]:
    stop = fields.stop
    return () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)


def truncate_to(fields: SamplingFields, facts: ModelFacts) -> int | None:
    """Prompt tokens to keep; -1 keeps what fits beside the output that was asked for."""
    match fields.truncate_prompt_tokens:
        case None:
            return None
        case 0:
            raise InvalidRequest("'truncate_prompt_tokens' must be -1 or at least 1.", param="truncate_prompt_tokens")
        case -1:
            return max(1, facts.max_model_len - max(1, fields.max_tokens or 0))
        case count:
            return count


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


def _logit_bias(bias: dict[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    pairs = {}
    for key, value in bias.items():
        token = int(key) if key.isascii() and key.isdecimal() and len(key) <= 10 else -1
        if not 0 <= token < vocab_size:
            raise InvalidRequest(
                f"Keys of 'logit_bias' must be token ids from 0 to {vocab_size - 1}.", param="logit_bias"
            )
        pairs[token] = value
    return tuple(pairs.items())


def _bad_words(words: Sequence[str], tokenizer: Vocabulary) -> tuple[tuple[int, ...], ...]:
    """Each word as it is tokenised at the start of a text and after a space."""
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word, f" {word.lstrip()}"):
            if ids := tuple(tokenizer.encode(text, add_special_tokens=False)):
                sequences[ids] = None
    return tuple(sequences)


def _allowed(ids: list[int] | None, vocab_size: int) -> tuple[int, ...] | None:
    if ids is None:
        return None
    if max(ids) >= vocab_size:
        raise InvalidRequest(f"'allowed_token_ids' must be below {vocab_size}.", param="allowed_token_ids")
    return tuple(dict.fromkeys(ids))


def _stop_ids(fields: SamplingFields, facts: ModelFacts) -> tuple[int, ...]:
    ids = tuple(dict.fromkeys(fields.stop_token_ids or ()))
    if ids and max(ids) >= facts.vocab_size:
        raise InvalidRequest(f"'stop_token_ids' must be below {facts.vocab_size}.", param="stop_token_ids")
    room = MAX_STOP_IDS - (0 if fields.ignore_eos else len(facts.eos_ids))
    if len(set(ids) - set(() if fields.ignore_eos else facts.eos_ids)) > room:
        raise InvalidRequest(f"'stop_token_ids' may hold at most {room} ids.", param="stop_token_ids")
    return ids
