"""Server-sent events as bytes, pure: deltas in, frames out.

Almost every event of a stream differs from the last in its text alone, so each choice keeps the bytes before and after
the text; only the text is encoded per token. A frame with more in it (logprobs, token ids, running usage) is built
whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from aserve.engine.generation import Delta, TokenLogprob, Usage
from aserve.errors import AserveError
from aserve.server.logprobs import TextLogprobs, TokenBytes, chat_logprobs, of_prompt
from aserve.server.problems import error_body

DONE: Final = b"data: [DONE]\n\n"
KEEP_ALIVE: Final = b": keep-alive\n\n"

_MARK: Final = "\0"


def json_text(text: str) -> bytes:
    """``text`` as a JSON string. Clients that split lines the Unicode way break on U+0085, U+2028 and U+2029:
    escaped."""
    encoded = orjson.dumps(text)
    return encoded if text.isascii() else escape_line_breaks(encoded)


def escape_line_breaks(json: bytes) -> bytes:
    return (
        json.replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029").replace(b"\xc2\x85", b"\\u0085")
    )


def frame(payload: dict[str, Any]) -> bytes:
    """One event. ``payload`` holds no text with lone surrogates (decoders give U+FFFD)."""
    return b"data: " + escape_line_breaks(orjson.dumps(payload)) + b"\n\n"


def error_event(error: AserveError) -> bytes:
    """The last event of an answer that was cut; no [DONE] follows it."""
    return b"data: " + escape_line_breaks(error_body(error)) + b"\n\n"


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkOptions:
    """What a stream's chunks carry. logprobs: None is off, else how many alternatives a token."""

    include_usage: bool = False
    continuous_usage: bool = False
    logprobs: int | None = None
    token_ids: bool = False

    @property
    def text_only(self) -> bool:
        return self.logprobs is None and not self.token_ids and not self.continuous_usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Echo:
    """The prompt that a completion choice repeats before its own text; logprobs are filled in as they arrive."""

    text: str
    token_ids: Sequence[int]
    logprobs: list[TokenLogprob | None] = field(default_factory=list)


@dataclass(slots=True)
class _Choice:
    index: int
    prefix: bytes
    suffix: bytes
    started: bool = False
    held_tokens: list[int] = field(default_factory=list)  # of tokens that have no text yet
    held_logprobs: list[TokenLogprob] = field(default_factory=list)


class ChunkEncoder:
    """One stream's deltas to events. Base of the two dialects, which differ in what a choice looks like."""

    object: str

    def __init__(
        self,
        *,
        id: str,
        created: int,
        model: str,
        num_prompts: int = 1,
        num_choices: int,
        usage: Usage,
        token_bytes: TokenBytes,
        options: ChunkOptions,
        prompt_token_ids: Sequence[Sequence[int]] = (),
    ) -> None:
        """num_choices: of all prompts together, those of one prompt side by side. usage: the stream's own, read when a
        usage is written. prompt_token_ids: by prompt, needed for ``token_ids`` only."""
        self._base = {"id": id, "object": self.object, "created": created, "model": model}
        self._usage = usage
        self._token_bytes = token_bytes
        self._options = options
        self._text_only = options.text_only
        self._prompt_token_ids = prompt_token_ids
        self._num_children = num_choices // num_prompts
        self._choices = [self._make_choice(index) for index in range(num_choices)]

    def _make_choice(self, index: int) -> _Choice:
        # The mark comes after id and model, so that a mark in those would not be the last one.
        template = self._chunk([self._choice(index, _MARK, None, None)], None)
        prefix, _, suffix = template.rpartition(orjson.dumps(_MARK))
        return _Choice(index, prefix, suffix)

    def encode(self, delta: Delta) -> bytes:
        """The events of one delta, possibly none: text that is still held back makes no empty chunk."""
        choice = self._choices[delta.index]
        if self._text_only and choice.started and delta.finish is None:
            return choice.prefix + json_text(delta.text) + choice.suffix if delta.text else b""
        return self._encode_whole(choice, delta)

    def _encode_whole(self, choice: _Choice, delta: Delta) -> bytes:
        out = []
        if not choice.started and (delta.tokens or delta.text or delta.finish is not None):
            choice.started = True
            if (first := self._first(choice)) is not None:
                out.append(self._chunk([first], delta))
        choice.held_tokens += delta.tokens
        choice.held_logprobs += delta.logprobs or ()
        if delta.text:
            out.append(
                choice.prefix + json_text(delta.text) + choice.suffix
                if self._text_only
                else self._chunk([self._detailed(choice, delta.text, None)], delta)
            )
        if delta.finish is not None:
            last = self._detailed(choice, None, delta.finish.value)
            last["stop_reason"] = delta.stop_reason
            out.append(self._chunk([last], delta))
        return b"".join(out)

    def _detailed(self, choice: _Choice, text: str | None, finish: str | None) -> dict[str, Any]:
        """A choice with what was held for it."""
        logprobs = None
        if self._options.logprobs is not None and choice.held_logprobs:
            logprobs = self._logprobs(choice)
        entry = self._choice(choice.index, text, finish, logprobs)
        if self._options.token_ids:
            entry["token_ids"] = choice.held_tokens
        choice.held_tokens, choice.held_logprobs = [], []
        return entry

    def usage(self) -> bytes:
        """The usage chunk, right once the stream has ended; nothing where the client did not ask for it."""
        if not self._options.include_usage:
            return b""
        return frame({**self._base, "choices": [], "usage": usage_object(self._usage)})

    def _chunk(self, choices: list[dict[str, Any]], delta: Delta | None) -> bytes:
        payload = {**self._base, "choices": choices}
        if self._options.continuous_usage and delta is not None:
            payload["usage"] = usage_object(
                Usage(
                    prompt_tokens=self._usage.prompt_tokens,
                    cached_tokens=self._usage.cached_tokens,
                    completion_tokens=delta.num_output,
                )
            )
        elif self._options.include_usage:
            payload["usage"] = None
        return frame(payload)

    def _first(self, choice: _Choice) -> dict[str, Any] | None:
        """The choice entry that opens a choice, or None."""
        raise NotImplementedError

    def _choice(self, index: int, text: str | None, finish: str | None, logprobs: Any) -> dict[str, Any]:
        raise NotImplementedError

    def _logprobs(self, choice: _Choice) -> dict[str, Any]:
        raise NotImplementedError


class ChatChunks(ChunkEncoder):
    """chat.completion.chunk"""

    object = "chat.completion.chunk"

    def _first(self, choice: _Choice) -> dict[str, Any]:
        entry: dict[str, Any] = {
            "index": choice.index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        if self._options.token_ids:
            entry["prompt_token_ids"] = list(self._prompt_token_ids[choice.index // self._num_children])
        return entry

    def _choice(self, index: int, text: str | None, finish: str | None, logprobs: Any) -> dict[str, Any]:
        delta = {} if text is None else {"content": text}
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}

    def _logprobs(self, choice: _Choice) -> dict[str, Any]:
        content = chat_logprobs(choice.held_logprobs, self._token_bytes, self._options.logprobs or 0)
        return {"content": content, "refusal": None}


class TextChunks(ChunkEncoder):
    """text_completion. ``echoes``: by prompt, what each of its choices starts with."""

    object = "text_completion"

    def __init__(self, *, echoes: Sequence[Echo] = (), **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._echoes = echoes
        self._lists = [TextLogprobs(self._token_bytes, self._options.logprobs or 0) for _ in self._choices]

    def encode(self, delta: Delta) -> bytes:
        if delta.prompt_logprobs and self._echoes and delta.index % self._num_children == 0:
            self._echoes[delta.index // self._num_children].logprobs.extend(delta.prompt_logprobs)
        return super().encode(delta)

    def _first(self, choice: _Choice) -> dict[str, Any] | None:
        if not self._echoes and not self._options.token_ids:
            return None
        text, logprobs = "", None
        if self._echoes:
            echo = self._echoes[choice.index // self._num_children]
            text = echo.text
            if self._options.logprobs is not None:
                logprobs = self._lists[choice.index].take(echo.token_ids, of_prompt(echo.token_ids, echo.logprobs))
        entry = self._choice(choice.index, text, None, logprobs)
        if self._options.token_ids:
            entry["prompt_token_ids"] = list(self._prompt_token_ids[choice.index // self._num_children])
        return entry

    def _choice(self, index: int, text: str | None, finish: str | None, logprobs: Any) -> dict[str, Any]:
        return {"index": index, "text": text or "", "logprobs": logprobs, "finish_reason": finish}

    def _logprobs(self, choice: _Choice) -> dict[str, Any]:
        return self._lists[choice.index].take([entry.token for entry in choice.held_logprobs], choice.held_logprobs)
