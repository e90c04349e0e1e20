"""Plain answers: all deltas of a call gathered by choice, then one JSON body."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from aserve.engine.generation import Delta, TokenLogprob, Usage
from aserve.errors import GenerationFailed
from aserve.server.logprobs import TextLogprobs, TokenBytes, chat_logprobs, of_prompt, prompt_logprobs
from aserve.server.ports import Stream
from aserve.server.problems import fault_of
from aserve.server.sse import Echo, escape_line_breaks, usage_object


@dataclass(slots=True)
class Choice:
    """One finished continuation."""

    texts: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def take(self, delta: Delta) -> None:
        self.texts.append(delta.text)
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs or ()
        self.prompt_logprobs += delta.prompt_logprobs or ()
        if delta.finish is not None:
            self.finish_reason, self.stop_reason = delta.finish.value, delta.stop_reason

    @property
    def text(self) -> str:
        return "".join(self.texts)


async def collect(stream: Stream, num_choices: int, *, is_draining: Callable[[], bool]) -> list[Choice]:
    """Every choice to its end. Raises the first choice's fault; the caller closes the stream, which aborts the
    others."""
    choices = [Choice() for _ in range(num_choices)]
    while deltas := await stream.next():
        for delta in deltas:
            if delta.finish is not None and (fault := fault_of(delta, draining=is_draining())) is not None:
                raise fault
            choices[delta.index].take(delta)
    if any(choice.finish_reason is None for choice in choices):
        raise GenerationFailed("The answer ended without a reason.")
    return choices


def num_logprobs(choices: Sequence[Choice]) -> int:
    """Entries that an answer of these lists, alternatives included."""
    return sum(
        1 + len(entry.top)
        for choice in choices
        for entry in (*choice.logprobs, *choice.prompt_logprobs)
        if entry is not None
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """What a plain answer carries beside its text. num_top_*: None is off."""

    num_top_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    token_ids: bool = False


def chat_answer(
    base: dict[str, Any],
    choices: Sequence[Choice],
    usage: Usage,
    prompt_token_ids: Sequence[int],
    token_bytes: TokenBytes,
    options: AnswerOptions,
) -> bytes:
    """chat.completion. ``base`` is id, created and model."""
    entries = []
    for index, choice in enumerate(choices):
        logprobs = None
        if options.num_top_logprobs is not None:
            content = chat_logprobs(choice.logprobs, token_bytes, options.num_top_logprobs)
            logprobs = {"content": content, "refusal": None}
        entry = {
            "index": index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if options.token_ids:
            entry["token_ids"] = choice.tokens
        entries.append(entry)
    answer = {**base, "object": "chat.completion", "choices": entries, "usage": usage_object(usage)}
    if options.num_prompt_logprobs is not None:
        entries_of_prompt = of_prompt(prompt_token_ids, choices[0].prompt_logprobs)
        answer["prompt_logprobs"] = prompt_logprobs(entries_of_prompt, token_bytes)
    if options.token_ids:
        answer["prompt_token_ids"] = list(prompt_token_ids)
    return _json(answer)


def text_answer(
    base: dict[str, Any],
    choices: Sequence[Choice],
    usage: Usage,
    prompt_token_ids: Sequence[Sequence[int]],
    echoes: Sequence[Echo],
    token_bytes: TokenBytes,
    options: AnswerOptions,
) -> bytes:
    """text_completion. ``echoes``: by prompt, empty where the prompt is not repeated."""
    num_children = len(choices) // len(prompt_token_ids)
    entries = []
    for index, choice in enumerate(choices):
        prompt = index // num_children
        echo = echoes[prompt] if echoes else None
        # The same for each child; the first one has them.
        from_prompt = of_prompt(prompt_token_ids[prompt], choices[prompt * num_children].prompt_logprobs)
        logprobs = None
        if options.num_top_logprobs is not None:
            tokens: list[int] = [*echo.token_ids, *choice.tokens] if echo else choice.tokens
            of_tokens = [*from_prompt, *choice.logprobs] if echo else choice.logprobs
            logprobs = TextLogprobs(token_bytes, options.num_top_logprobs).take(tokens, of_tokens)
        entry = {
            "index": index,
            "text": echo.text + choice.text if echo else choice.text,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if options.num_prompt_logprobs is not None:
            entry["prompt_logprobs"] = prompt_logprobs(from_prompt, token_bytes)
        if options.token_ids:
            entry["token_ids"] = choice.tokens
            entry["prompt_token_ids"] = list(prompt_token_ids[prompt])
        entries.append(entry)
    return _json({**base, "object": "text_completion", "choices": entries, "usage": usage_object(usage)})


def _json(answer: dict[str, Any]) -> bytes:
    return escape_line_breaks(orjson.dumps(answer))
