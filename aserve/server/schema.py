"""Request bodies: which fields exist, their types and ranges, and what becomes of those that we do not serve.

The structs carry types and ranges; what a type cannot say (an id inside the vocabulary, echo with max_tokens 0) is
checked in ``sampling.py`` and ``prompts.py``. null means default everywhere. Every fault is InvalidRequest with the
field's path.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import orjson
from msgspec import Meta

from aserve.errors import InvalidRequest, Unsupported

MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_LOGIT_BIAS = 300
MAX_LOGPROBS = 20
MAX_N = 8
MAX_BAD_WORDS = 256

_Stop = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
_TokenIds = Annotated[list[Annotated[int, Meta(ge=0)]], Meta(min_length=1)]
_NumLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
_NumTokens = Annotated[int, Meta(ge=0)]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    """What chat and completions share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: _NumTokens | None = None
    min_tokens: _NumTokens | None = None
    ignore_eos: bool | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    stop: _Stop | Annotated[list[_Stop], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=MAX_STOPS)] | None = None
    include_stop_str_in_output: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    logit_bias: (
        Annotated[dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=MAX_LOGIT_BIAS)] | None
    ) = None
    bad_words: Annotated[list[_Stop], Meta(max_length=MAX_BAD_WORDS)] | None = None
    allowed_token_ids: _TokenIds | None = None
    prompt_logprobs: _NumLogprobs | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    return_token_ids: bool | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None
    timeout: Annotated[float, Meta(gt=0)] | None = None


class ContentPart(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    text: str | None = None


class Message(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    tool_calls: list[Any] | None = None


_Messages = Annotated[list[Message], Meta(min_length=1)]
_ReasoningEffort = Annotated[str, Meta(max_length=32)]


class ChatRequest(SamplingFields, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: _Messages
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: _ReasoningEffort | None = None
    max_completion_tokens: _NumTokens | None = None
    logprobs: bool | None = None
    top_logprobs: _NumLogprobs | None = None


class CompletionRequest(SamplingFields, frozen=True, kw_only=True):
    """POST /v1/completions. The prompt's four shapes are told apart in ``prompts.py``."""

    prompt: str | list[Any]
    echo: bool | None = None
    logprobs: _NumLogprobs | None = None
    best_of: Annotated[int, Meta(ge=1)] | None = None
    add_special_tokens: bool | None = None


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /tokenize: a text (``prompt``, or ``content`` as another server calls it) or messages."""

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    messages: _Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: _ReasoningEffort | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[Annotated[int, Meta(ge=0)]]


class ApplyTemplateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /apply-template."""

    model: str | None = None
    messages: _Messages
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: _ReasoningEffort | None = None


IGNORED = frozenset(
    {
        "user",
        "metadata",
        "store",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "service_tier",
        "include_obfuscation",
        "parallel_tool_calls",  # without tools there are no calls
        "prediction",  # changes the speed, never the answer
        "spaces_between_special_tokens",  # of slow tokenizers only
    }
)
"""Known, without effect on the answer."""

UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "json_schema": (),
    "grammar": ("",),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "verbosity": ("medium",),
    "chat_template": (),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
    "logits_processors": ([],),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "suffix": ("",),
    "echo": (False,),
    "best_of": (1,),
    "add_special_tokens": (False,),
    "kv_transfer_params": (),
}
"""Known and not served, with the values that ask for nothing. A field that a request type has itself is not looked
up."""

_PATH = re.compile(r" - at `\$\.?(.*)`$")
_MISSING = re.compile(r"missing required field `([^`]+)`")

T = TypeVar("T", bound=msgspec.Struct)


def parse_json(body: bytes, max_depth: int) -> dict[str, Any]:
    """The body's object. Every other body is InvalidRequest: not JSON, not an object, nested deeper than
    ``max_depth``."""
    try:
        raw = orjson.loads(body)
    except ValueError as error:  # also for invalid UTF-8, lone surrogates, NaN, and numbers beyond a double
        raise InvalidRequest(f"The body is not valid JSON: {error}.") from None
    if type(raw) is not dict:
        raise InvalidRequest("The body must be a JSON object.")
    # Brackets bound the depth from above, strings included: the walk is needed for few bodies.
    if body.count(b"[") + body.count(b"{") > max_depth and _is_deeper(raw, max_depth):
        raise InvalidRequest(f"The body is nested deeper than {max_depth} levels.")
    return raw


def _is_deeper(value: Any, max_depth: int) -> bool:
    level: list[Any] = [value]
    for _ in range(max_depth):
        level = [
            child
            for container in level
            for child in (container.values() if type(container) is dict else container)
            if type(child) is dict or type(child) is list
        ]
        if not level:
            return False
    return True


def convert(raw: dict[str, Any], request_type: type[T], unsupported: Mapping[str, tuple[Any, ...]] = UNSUPPORTED) -> T:
    """``raw`` as a ``request_type``; ``unsupported`` fields are refused, unknown ones left out."""
    try:
        request = msgspec.convert(raw, request_type)
    except msgspec.ValidationError as error:
        raise _as_invalid_request(str(error)) from None
    own = request_type.__struct_fields__
    for name in raw.keys() & unsupported.keys():
        value = raw[name]
        if name not in own and value is not None and value not in unsupported[name]:
            raise Unsupported(f"'{name}' is not supported by this server.", param=name)
    return request


def unknown_fields(raw: dict[str, Any], request_type: type[msgspec.Struct]) -> list[str]:
    """Names in ``raw`` that mean nothing to us, as the client spelt them."""
    own = request_type.__struct_fields__
    return [name for name in raw if name not in own and name not in IGNORED and name not in UNSUPPORTED]


def _as_invalid_request(text: str) -> InvalidRequest:
    path = ""
    if match := _PATH.search(text):
        path = match[1].removesuffix("[...]")
        text = text[: match.start()]
    if missing := _MISSING.search(text):
        path = f"{path}.{missing[1]}" if path else missing[1]
        return InvalidRequest(f"'{path}' is required.", param=path)
    return InvalidRequest(f"'{path}': {text[:1].lower()}{text[1:].replace('`', '')}.", param=path or None)


def plain_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """Messages as a chat template takes them: role and text. Text parts are joined by line feeds."""
    return [_plain_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _plain_message(message: Message, path: str) -> dict[str, Any]:
    if message.role in ("tool", "function"):
        raise Unsupported(
            f"Messages of role '{message.role}' are not supported: tools are not served.", param=f"{path}.role"
        )
    if message.tool_calls:
        raise Unsupported("Tool calls are not supported by this server.", param=f"{path}.tool_calls")
    return plain_turn(message.role, message.content, path, ("text",))


def plain_turn(
    role: str, content: str | list[ContentPart] | None, path: str, part_types: tuple[str, ...]
) -> dict[str, Any]:
    """A message as a chat template takes it. part_types: what a part of text is called in this API."""
    if content is None:
        raise InvalidRequest(f"'{path}.content' must be a string or a list of text parts.", param=f"{path}.content")
    if not isinstance(content, str):
        texts = [_part_text(part, f"{path}.content[{i}]", part_types) for i, part in enumerate(content)]
        content = "\n".join(texts)
    # Templates know no 'developer'; the official API defines it as the newer name of 'system'.
    return {"role": "system" if role == "developer" else role, "content": content}


def _part_text(part: ContentPart, path: str, part_types: tuple[str, ...]) -> str:
    if part.type not in part_types:
        raise Unsupported(
            f"Content parts of type '{part.type[:64]}' are not supported: this server takes text only.",
            param=f"{path}.type",
        )
    if part.text is None:
        raise InvalidRequest(f"'{path}.text' is required.", param=f"{path}.text")
    return part.text
