"""Bodies of the Responses API, for text: which fields exist, what becomes of the others, and the prompt they stand for.

A body is read twice: ``read_body`` needs nothing but the body, ``ResponsePreparer.prepare`` the conversation that it
goes on from. Both are thread-safe: large bodies are prepared in a worker thread.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from aserve.errors import ContextLengthExceeded, InvalidRequest, Unsupported
from aserve.server.ports import Renderer
from aserve.server.prepare import Prepared, Preparer
from aserve.server.prompts import Prompt, TemplateChoices, as_prompt_ids
from aserve.server.sampling import sampling_params
from aserve.server.schema import UNSUPPORTED, ContentPart, SamplingFields, convert, plain_turn, unknown_fields

LOGPROBS: Final = "message.output_text.logprobs"
INCLUDABLE: Final = frozenset(
    {
        LOGPROBS,
        "reasoning.encrypted_content",
        "file_search_call.results",
        "web_search_call.results",
        "web_search_call.action.sources",
        "message.input_image.image_url",
        "computer_call_output.output.image_url",
        "code_interpreter_call.outputs",
    }
)
"""Values of ``include``. All but logprobs name parts of items that never occur here, so they add nothing."""

IGNORED_HERE: Final = frozenset({"type", "stream_id", "max_tool_calls", "background_options"})
"""Known besides ``schema.IGNORED``; type and stream_id are the websocket's envelope."""

UNSUPPORTED_HERE: Mapping[str, tuple[Any, ...]] = {
    **UNSUPPORTED,
    "tool_choice": ("none", "auto"),  # without tools they mean the same
    "background": (False,),
    "conversation": (),
    "prompt": (),
    "context_management": ([],),
    "moderation": (),
    "image": (),
    "access_programs": (),
}

_NEEDLESS: Mapping[str, tuple[Any, ...]] = {
    "max_tokens": (),
    "n": (1,),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "return_token_ids": (False,),
    "bad_words": ([],),
}
"""Fields of chat and completions that have no place here, with the values that ask for nothing."""

PART_TYPES: Final = ("input_text", "output_text", "text")
"""Of content parts that carry text."""

Turn = dict[str, Any]
"""A message as a chat template takes it: role and content."""


class InputItem(msgspec.Struct, frozen=True, kw_only=True):
    """A message, as a client writes it or as it came out of an earlier response."""

    type: str = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[ContentPart] | None = None


class TextOptions(msgspec.Struct, frozen=True, kw_only=True):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ReasoningOptions(msgspec.Struct, frozen=True, kw_only=True):
    effort: Annotated[str, Meta(max_length=32)] | None = None
    summary: str | None = None
    generate_summary: str | None = None


class CacheOptions(msgspec.Struct, frozen=True, kw_only=True):
    prewarm: bool | None = None


_Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]


class ResponsesRequest(SamplingFields, frozen=True, kw_only=True):
    """POST /v1/responses and ``response.create``. ``generate`` false warms the prefix cache and says nothing."""

    input: str | list[InputItem] | None = None
    instructions: str | None = None
    previous_response_id: Annotated[str, Meta(max_length=256)] | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    include: list[str] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    generate: bool | None = None
    prompt_cache_options: CacheOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    store: bool | None = None
    metadata: _Metadata | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def generates(self) -> bool:
        prewarm = self.prompt_cache_options is not None and bool(self.prompt_cache_options.prewarm)
        return self.generate is not False and not prewarm

    @property
    def num_top_logprobs(self) -> int | None:
        """None where logprobs are off; a number of alternatives asks for them by itself."""
        if LOGPROBS in (self.include or ()) or self.top_logprobs:
            return self.top_logprobs or 0
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """A checked body. unknown: names of fields that mean nothing to us. num_bytes: its size on the wire."""

    fields: ResponsesRequest
    unknown: list[str]
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What a later response goes on from: all turns but the instructions, which are each response's own.

    num_bytes counts every turn, though conversations that go on from each other share theirs.
    """

    turns: tuple[Turn, ...] = ()
    num_bytes: int = 0

    def plus(self, turns: tuple[Turn, ...]) -> "Conversation":
        added = sum(len(turn["content"].encode()) for turn in turns)
        return Conversation(turns=(*self.turns, *turns), num_bytes=self.num_bytes + added)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedResponse:
    """Ready for the engine. conversation: with this request's input, without its output."""

    prepared: Prepared[ResponsesRequest]
    conversation: Conversation


def read_body(raw: dict[str, Any], num_bytes: int) -> Body:
    """Every fault is InvalidRequest with the field's path."""
    fields = convert(raw, ResponsesRequest, UNSUPPORTED_HERE)
    for name, harmless in _NEEDLESS.items():
        value = getattr(fields, name)
        if value is not None and value not in harmless:
            hint = "; the field is 'max_output_tokens'" if name == "max_tokens" else ""
            raise Unsupported(f"'{name}' is not supported by the Responses API{hint}.", param=name)
    for index, name in enumerate(fields.include or ()):
        if name not in INCLUDABLE:
            raise InvalidRequest(f"'include[{index}]' is not known.", param=f"include[{index}]")
    _check_text(fields.text)
    _check_reasoning(fields.reasoning)
    return Body(
        fields=fields,
        unknown=[name for name in unknown_fields(raw, ResponsesRequest) if name not in _KNOWN_HERE],
        num_bytes=num_bytes,
    )


_KNOWN_HERE: Final = IGNORED_HERE | UNSUPPORTED_HERE.keys()


def _check_text(text: TextOptions | None) -> None:
    if text is None:
        return
    if text.format is not None and text.format.get("type") != "text":
        raise Unsupported("Only texts are generated: structured output is not supported.", param="text.format")
    if text.verbosity not in (None, "medium"):
        raise Unsupported("'text.verbosity' is not supported by this server.", param="text.verbosity")


def _check_reasoning(reasoning: ReasoningOptions | None) -> None:
    if reasoning is not None and (reasoning.summary or reasoning.generate_summary):
        raise Unsupported("Summaries of reasoning are not supported by this server.", param="reasoning.summary")


def input_turns(given: str | list[InputItem] | None) -> tuple[Turn, ...]:
    """The input as turns. Text parts are joined by line feeds, as in chat."""
    if given is None:
        return ()
    if isinstance(given, str):
        return ({"role": "user", "content": given},)
    return tuple([_turn(item, f"input[{index}]") for index, item in enumerate(given)])


def _turn(item: InputItem, path: str) -> Turn:
    if item.type != "message":
        raise Unsupported(
            f"Items of type '{item.type[:64]}' are not supported: this server takes messages only.",
            param=f"{path}.type",
        )
    if item.role is None:
        raise InvalidRequest(f"'{path}.role' is required.", param=f"{path}.role")
    return plain_turn(item.role, item.content, path, PART_TYPES)


class ResponsePreparer:
    """Bodies to prompts, for one model."""

    def __init__(self, preparer: Preparer) -> None:
        self._preparer = preparer

    def prepare(self, body: Body, previous: Conversation | None) -> PreparedResponse:
        """Every fault is InvalidRequest or a child of it, or ModelNotFound."""
        fields = body.fields
        self._preparer.check_model(fields.model)
        conversation = (previous or Conversation()).plus(input_turns(fields.input))
        params = sampling_params(
            fields,
            self._preparer.facts,
            self._preparer.tokenizer,
            logprobs=fields.num_top_logprobs if fields.generates else None,
            prompt_logprobs=None,
        )
        ids = self._prompt_ids(fields, conversation)
        prepared = Prepared(
            fields=fields,
            unknown=body.unknown,
            prompts=(Prompt(ids=as_prompt_ids(ids, "input", None)),),
            params=params,
            n=1,
            max_tokens=fields.max_output_tokens if fields.generates else 0,
            max_tokens_param="max_output_tokens",
        )
        return PreparedResponse(prepared=prepared, conversation=conversation)

    def _prompt_ids(self, fields: ResponsesRequest, conversation: Conversation) -> list[int]:
        instructions: list[Turn] = []
        if fields.instructions is not None:
            instructions = [{"role": "system", "content": fields.instructions}]
        turns = [*instructions, *conversation.turns]
        if not turns:
            raise InvalidRequest("'input' is required.", param="input")
        choices = TemplateChoices.of(
            [],
            # A warmed prefix goes on with another turn, not with an answer.
            add_generation_prompt=fields.generates,
            continue_final_message=None,
            chat_template_kwargs=fields.chat_template_kwargs,
            reasoning_effort=fields.reasoning.effort if fields.reasoning is not None else None,
        )
        renderer = self._preparer.renderer
        ids = _encode(renderer, turns, choices)
        room = self._preparer.facts.max_model_len - (fields.max_output_tokens or 1)
        if fields.truncation != "auto" or len(ids) <= room:
            return ids
        return _truncated(renderer, turns, choices, room)


def _encode(renderer: Renderer, turns: list[Turn], choices: TemplateChoices) -> list[int]:
    return renderer.encode_chat(
        turns,
        add_generation_prompt=choices.add_generation_prompt,
        continue_final_message=choices.continue_final_message,
        template_kwargs=choices.template_kwargs,
    )


def _truncated(renderer: Renderer, turns: list[Turn], choices: TemplateChoices, room: int) -> list[int]:
    """The longest end of the conversation that begins with a user's turn and fits, behind its leading system turns.

    Raises ContextLengthExceeded if not even the last one does. A binary search: each try tokenises what it keeps.
    """
    first = next((i for i, turn in enumerate(turns) if turn["role"] != "system"), len(turns))
    head = turns[:first]
    starts = [i for i in range(first + 1, len(turns)) if turns[i]["role"] == "user"]
    kept: list[int] | None = None
    low, high = 0, len(starts)
    while low < high:
        middle = (low + high) // 2
        ids = _encode(renderer, [*head, *turns[starts[middle] :]], choices)
        if len(ids) <= room:
            kept, high = ids, middle
        else:
            low = middle + 1
    if kept is None:
        raise ContextLengthExceeded(
            f"Not even the last turn of the conversation fits the {room} tokens that the context has for the prompt.",
            param="input",
        )
    return kept
