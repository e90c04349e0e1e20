"""What chat and completions do differently once the prompts are known: ids, chunks and answers."""

import secrets
import time
from collections.abc import Sequence
from typing import Any

from aserve.server.answers import AnswerOptions, Choice, chat_answer, text_answer
from aserve.server.ports import Stream, Vocabulary
from aserve.server.prepare import Prepared
from aserve.server.schema import ChatRequest, CompletionRequest
from aserve.server.sse import ChatChunks, ChunkEncoder, ChunkOptions, Echo, TextChunks


class Dialect:
    """One call in one dialect. ``id`` is the engine's name for it, too. prompt_param: the field of the prompt.
    default_tokens: None is all the room there is."""

    prompt_param: str
    default_tokens: int | None = None
    id: str

    def encoder(self, stream: Stream) -> ChunkEncoder:
        raise NotImplementedError

    def answer(self, stream: Stream, choices: Sequence[Choice]) -> bytes:
        raise NotImplementedError


class ChatDialect(Dialect):
    """/v1/chat/completions"""

    prompt_param = "messages"

    def __init__(self, prepared: Prepared[ChatRequest], model: str, tokenizer: Vocabulary) -> None:
        self.id = f"chatcmpl-{secrets.token_hex(16)}"
        self._prepared = prepared
        self._base: dict[str, Any] = {"id": self.id, "created": int(time.time()), "model": model}
        self._token_bytes = tokenizer.token_bytes

    def encoder(self, stream: Stream) -> ChunkEncoder:
        return ChatChunks(
            **self._base,
            num_choices=self._prepared.num_choices,
            usage=stream.usage,
            token_bytes=self._token_bytes,
            options=_chunk_options(self._prepared),
            prompt_token_ids=_token_ids(self._prepared),
        )

    def answer(self, stream: Stream, choices: Sequence[Choice]) -> bytes:
        return chat_answer(
            self._base,
            choices,
            stream.usage,
            _token_ids(self._prepared)[0],
            self._token_bytes,
            _answer_options(self._prepared),
        )


class TextDialect(Dialect):
    """/v1/completions. 16 tokens where no length is sent, as in the official API."""

    prompt_param = "prompt"
    default_tokens = 16

    def __init__(self, prepared: Prepared[CompletionRequest], model: str, tokenizer: Vocabulary) -> None:
        self.id = f"cmpl-{secrets.token_hex(16)}"
        self._prepared = prepared
        self._base: dict[str, Any] = {"id": self.id, "created": int(time.time()), "model": model}
        self._tokenizer = tokenizer

    def encoder(self, stream: Stream) -> ChunkEncoder:
        return TextChunks(
            **self._base,
            num_prompts=len(self._prepared.prompts),
            num_choices=self._prepared.num_choices,
            usage=stream.usage,
            token_bytes=self._tokenizer.token_bytes,
            options=_chunk_options(self._prepared),
            prompt_token_ids=_token_ids(self._prepared),
            echoes=self._echoes(),
        )

    def answer(self, stream: Stream, choices: Sequence[Choice]) -> bytes:
        return text_answer(
            self._base,
            choices,
            stream.usage,
            _token_ids(self._prepared),
            self._echoes(),
            self._tokenizer.token_bytes,
            _answer_options(self._prepared),
        )

    def _echoes(self) -> list[Echo]:
        """What each prompt's choices begin with: the text as it was sent, or what its token ids decode to."""
        if not self._prepared.fields.echo:
            return []
        return [
            Echo(
                text=self._tokenizer.decode(ids, skip_special_tokens=False) if prompt.text is None else prompt.text,
                token_ids=ids,
            )
            for prompt, ids in zip(self._prepared.prompts, _token_ids(self._prepared), strict=True)
        ]


def _token_ids(prepared: Prepared[Any]) -> list[list[int]]:
    return [prompt.ids.tolist() for prompt in prepared.prompts]


def _chunk_options(prepared: Prepared[Any]) -> ChunkOptions:
    options = prepared.fields.stream_options
    include_usage = bool(options and options.include_usage)
    return ChunkOptions(
        include_usage=include_usage,
        continuous_usage=include_usage and bool(options.continuous_usage_stats),
        logprobs=prepared.params.logprobs,
        token_ids=bool(prepared.fields.return_token_ids),
    )


def _answer_options(prepared: Prepared[Any]) -> AnswerOptions:
    return AnswerOptions(
        num_top_logprobs=prepared.params.logprobs,
        num_prompt_logprobs=prepared.fields.prompt_logprobs,
        token_ids=bool(prepared.fields.return_token_ids),
    )
