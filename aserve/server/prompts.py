"""From a parsed body to token ids. Runs in a worker thread for large bodies: nothing here touches the loop."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from aserve.errors import InvalidRequest
from aserve.server.ports import Renderer
from aserve.server.schema import Message, plain_messages

MAX_TEMPLATE_KWARGS_BYTES = 16384

_RENDERER_NAMES = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "bos_token",
        "eos_token",
        "unk_token",
        "pad_token",
        "raise_exception",
        "strftime_now",
    }
)
"""What templates get from us; a client's chat_template_kwargs may not replace it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """ids: int32 [P]. text: as the client sent it, None where it sent token ids or messages."""

    ids: NDArray[np.int32]
    text: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateChoices:
    """How a chat becomes a prompt, checked."""

    add_generation_prompt: bool
    continue_final_message: bool
    template_kwargs: dict[str, Any]

    @classmethod
    def of(
        cls,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool | None,
        continue_final_message: bool | None,
        chat_template_kwargs: dict[str, Any] | None,
        reasoning_effort: str | None,
    ) -> "TemplateChoices":
        """Raises InvalidRequest where the fields contradict each other or reach for the renderer's own names."""
        kwargs = dict(chat_template_kwargs or {})
        for name in kwargs:
            if name in _RENDERER_NAMES or not name.isidentifier():
                raise InvalidRequest("This name cannot be set by a client.", param=f"chat_template_kwargs.{name[:64]}")
        if len(orjson.dumps(kwargs)) > MAX_TEMPLATE_KWARGS_BYTES:
            raise InvalidRequest(
                f"'chat_template_kwargs' may hold at most {MAX_TEMPLATE_KWARGS_BYTES} bytes.",
                param="chat_template_kwargs",
            )
        if reasoning_effort is not None:
            kwargs["reasoning_effort"] = reasoning_effort
        if continue_final_message:
            if add_generation_prompt:
                raise InvalidRequest(
                    "'continue_final_message' and 'add_generation_prompt' exclude each other.",
                    param="continue_final_message",
                )
            if messages[-1].role != "assistant":
                raise InvalidRequest(
                    "'continue_final_message' needs a last message of role 'assistant'.", param="continue_final_message"
                )
        return cls(
            add_generation_prompt=not continue_final_message
            if add_generation_prompt is None
            else add_generation_prompt,
            continue_final_message=bool(continue_final_message),
            template_kwargs=kwargs,
        )


def chat_ids(renderer: Renderer, messages: list[Message], choices: TemplateChoices) -> list[int]:
    return renderer.encode_chat(
        plain_messages(messages),
        add_generation_prompt=choices.add_generation_prompt,
        continue_final_message=choices.continue_final_message,
        template_kwargs=choices.template_kwargs,
    )


def chat_text(renderer: Renderer, messages: list[Message], choices: TemplateChoices) -> str:
    return renderer.render_chat(
        plain_messages(messages),
        add_generation_prompt=choices.add_generation_prompt,
        continue_final_message=choices.continue_final_message,
        template_kwargs=choices.template_kwargs,
    )


def completion_prompts(
    renderer: Renderer,
    prompt: str | list[Any],
    *,
    add_special_tokens: bool,
    vocab_size: int,
    max_prompts: int,
    truncate_to: int | None,
) -> tuple[Prompt, ...]:
    """The prompts of a completion in all four shapes: string, strings, token ids, lists of token ids."""
    entries: list[Any]
    if isinstance(prompt, str):
        entries, paths = [prompt], ["prompt"]
    elif not prompt:
        raise InvalidRequest("'prompt' must not be an empty list.", param="prompt")
    elif type(prompt[0]) is str or type(prompt[0]) is list:
        if len(prompt) > max_prompts:
            raise InvalidRequest(
                f"At most {max_prompts} prompts fit in one request, not {len(prompt)}.", param="prompt"
            )
        entries, paths = prompt, [f"prompt[{i}]" for i in range(len(prompt))]
    else:
        entries, paths = [prompt], ["prompt"]
    kind = type(entries[0])
    prompts = []
    for entry, path in zip(entries, paths, strict=True):
        if type(entry) is not kind:
            raise InvalidRequest(f"'{path}' differs in type from 'prompt[0]'.", param=path)
        if isinstance(entry, str):
            ids, text = renderer.encode_prompt(entry, add_special_tokens=add_special_tokens), entry
        else:
            ids, text = check_ids(entry, vocab_size, path), None
        prompts.append(Prompt(ids=as_prompt_ids(ids, path, truncate_to), text=text))
    return tuple(prompts)


def check_ids(ids: list[Any], vocab_size: int, path: str) -> list[int]:
    """Each entry an int (bool is none) inside the vocabulary; the search for the culprit runs only if there is one."""
    if ids and (set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) >= vocab_size):
        at = next(i for i, token in enumerate(ids) if type(token) is not int or not 0 <= token < vocab_size)
        raise InvalidRequest(f"'{path}[{at}]' must be a token id from 0 to {vocab_size - 1}.", param=f"{path}[{at}]")
    return ids


def as_prompt_ids(ids: list[int], path: str, truncate_to: int | None) -> NDArray[np.int32]:
    """int32 [P], the last ``truncate_to`` of them. An empty prompt has no position to continue from: InvalidRequest."""
    if not ids:
        raise InvalidRequest(f"'{path}' is empty: a prompt needs at least one token.", param=path)
    return np.asarray(ids[-truncate_to:] if truncate_to else ids, np.int32)
