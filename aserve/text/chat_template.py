"""A model's chat template: messages to text, and to tokens in which only the template writes control tokens."""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from aserve.errors import InvalidRequest
from aserve.text.tokenizer import HFTokenizer, Markers, read_json, read_special_tokens

_RESERVED: Final = frozenset(
    "messages conversations tools chat_template add_generation_prompt continue_final_message "
    "return_assistant_tokens_mask raise_exception strftime_now range dict namespace lipsum cycler joiner "
    "loop self caller varargs kwargs".split()
)
"""Names of the renderer's own that a client's template arguments must not shadow."""

_MESSAGE_LENGTH_MAX: Final = 300
"""Characters of a template's own error message that a client sees."""


class ChatTemplate:
    """Renders messages in jinja's immutable sandbox, as transformers does. Immutable, hence thread-safe.

    A client can pass arguments but never a template. A range is at most 100,000 long in the sandbox; beyond that the
    run time is that of the model's own template, so rendering belongs into a worker thread.
    """

    def __init__(
        self, templates: str | Mapping[str, str] | None, *, special_tokens: Mapping[str, str] | None = None
    ) -> None:
        """templates: one template, or several by name: "default", and "tool_use" for requests with tools.

        special_tokens: what bos_token, eos_token and so on are in it.
        """
        self._templates = {"default": templates} if isinstance(templates, str) else dict(templates or {})
        self._special_tokens = dict(special_tokens or {})

    @classmethod
    def from_folder(cls, folder: str | Path) -> "ChatTemplate":
        """Read chat_template.jinja (and additional_chat_templates/*.jinja), or what the folder's JSON files hold.

        A folder without a template gives a ChatTemplate that refuses every chat; damaged files raise ModelError.
        """
        folder = Path(folder)
        stored = read_json(folder / "chat_template.json") | read_json(folder / "tokenizer_config.json")
        templates = stored.get("chat_template") or {}
        if isinstance(templates, str):
            templates = {"default": templates}
        elif isinstance(templates, list):
            templates = {entry["name"]: entry["template"] for entry in templates}
        files = {path.stem: path for path in sorted(folder.glob("additional_chat_templates/*.jinja"))}
        if (path := folder / "chat_template.jinja").exists():
            files["default"] = path
        templates |= {name: path.read_text("utf-8") for name, path in files.items()}
        return cls(templates, special_tokens=read_special_tokens(folder))

    @property
    def available(self) -> bool:
        """Whether the model has a template at all."""
        return bool(self._templates)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a chat. Keys of a message whose value is None are left out.

        template_kwargs: the client's variables for the template. Everything that is wrong, in the template too, is
        InvalidRequest.
        """
        template = self._choose(with_tools=tools is not None)
        kwargs = dict(template_kwargs or {})
        if shadowed := kwargs.keys() & (_RESERVED | self._special_tokens.keys()):
            name = min(shadowed)
            raise InvalidRequest(f"{name!r} cannot be set for the chat template.", param=f"chat_template_kwargs.{name}")
        if not messages:
            raise InvalidRequest("A chat needs at least one message.", param="messages")
        for index, message in enumerate(messages):
            if not isinstance(message, Mapping):
                raise InvalidRequest("A message must be an object.", param=f"messages[{index}]")
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message continues the last message and add_generation_prompt starts a new one; "
                "only one of them can be true.",
                param="continue_final_message",
            )
        from transformers.utils.chat_template_utils import render_jinja_template  # takes most of a second to load

        try:
            rendered = render_jinja_template(
                conversations=[[_without_nulls(message) for message in messages]],
                tools=None if tools is None else [dict(tool) for tool in tools],
                chat_template=template,
                continue_final_message=continue_final_message,
                add_generation_prompt=add_generation_prompt,
                **(self._special_tokens | kwargs),
            )
        except Exception as error:  # a template can raise anything, and always because of these messages
            reason = " ".join(str(error).split())[:_MESSAGE_LENGTH_MAX] or type(error).__name__
            raise InvalidRequest(
                f"The model's chat template refuses these messages: {reason}", param="messages"
            ) from error
        text: str = rendered[0][0]
        return text

    def _choose(self, *, with_tools: bool) -> str:
        template = self._templates.get("tool_use") if with_tools else None
        template = template or self._templates.get("default")
        if template is None and len(self._templates) == 1:
            [template] = self._templates.values()
        if template is None:
            raise InvalidRequest("The model has no chat template; use /v1/completions.", param="messages")
        return template


class Encoder(Protocol):
    """Of a tokenizer, what a chat needs."""

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]: ...


def encode_chat(
    tokenizer: Encoder,
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Tokens of a chat. Control tokens are those that the template writes; their markers in any string of the client's
    (contents, roles, tools, arguments, keys of objects) are plain text. The template alone decides about BOS.

    Without such markers the whole text is encoded at once. Otherwise the chat is rendered again with the client's
    markers fenced in random digits, to see which of the markers in the text are the template's.
    Raises InvalidRequest, as ``ChatTemplate.render`` and ``HFTokenizer.encode`` do.
    """

    def render(messages: Any, tools: Any, kwargs: Any) -> str:
        return template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template_kwargs=kwargs,
        )

    inputs = (messages, tools, template_kwargs)
    text = render(*inputs)
    if not isinstance(tokenizer, HFTokenizer) or not any(map(tokenizer.markers.suspects, _strings(inputs))):
        return tokenizer.encode(text, add_special_tokens=False, parse_special=True)
    fence = _Fence(tokenizer.markers)
    return tokenizer.encode_pieces(fence.pieces(text, render(*fence.put_around(inputs))))


class PromptRenderer:
    """Prompts of either kind to tokens, for one model: what the server's routes call, from worker threads too."""

    def __init__(self, tokenizer: Encoder, template: ChatTemplate) -> None:
        self._tokenizer = tokenizer
        self._template = template

    def encode_prompt(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Tokens of a plain prompt; markers in it are text."""
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Tokens of a chat, see the function of this name."""
        return encode_chat(
            self._tokenizer,
            self._template,
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template_kwargs=template_kwargs,
        )

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The text that ``encode_chat`` would encode."""
        return self._template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template_kwargs=template_kwargs,
        )


class _Fence:
    """Random digits around the client's markers, so that they can be told from the template's once rendered.

    Digits, because they survive whatever a template does to strings: JSON, repr, changes of case.
    """

    def __init__(self, markers: Markers) -> None:
        self._open, self._close, self._cut = (f"{secrets.randbits(96):029d}" for _ in range(3))
        self._markers = markers

    def put_around(self, value: Any) -> Any:
        """A copy of ``value`` with every marker in its strings fenced, and every part of one at a string's end cut."""
        if isinstance(value, str):
            fenced = self._markers.pattern.sub(f"{self._open}\\g<0>{self._close}", value)
            before = self._cut if self._markers.begins_inside(value) else ""
            behind = self._cut if self._markers.ends_inside(value) else ""
            return before + fenced + behind
        if isinstance(value, Mapping):
            return {self.put_around(key): self.put_around(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.put_around(item) for item in value]
        return value

    def pieces(self, text: str, fenced_text: str) -> list[tuple[str, bool]]:
        """``text`` in pieces, each with whether it is a marker of the template's.

        A template may look at what a string begins or ends with, and then the fences change the rendering. ``text``,
        rendered without them, stands as long as both hold the same markers and the same text but for white space;
        otherwise the fenced one does, without its fences.
        """
        hits = list(self._markers.pattern.finditer(fenced_text))
        is_own = [
            not (fenced_text.endswith(self._open, 0, hit.start()) and fenced_text.startswith(self._close, hit.end()))
            for hit in hits
        ]
        unfenced_hits = list(self._markers.pattern.finditer(text))
        if [hit[0] for hit in hits] == [hit[0] for hit in unfenced_hits] and _squeezed(text) == _squeezed(
            self._without_digits(fenced_text)
        ):
            hits, fenced_text = unfenced_hits, text
        pieces, end = [], 0
        for hit, own in zip(hits, is_own, strict=True):
            pieces += [(self._without_digits(fenced_text[end : hit.start()]), False), (hit[0], own)]
            end = hit.end()
        return [*pieces, (self._without_digits(fenced_text[end:]), False)]

    def _without_digits(self, text: str) -> str:
        return text.replace(self._open, "").replace(self._close, "").replace(self._cut, "")


def _strings(value: Any) -> Iterator[str]:
    """All strings in a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)


def _without_nulls(message: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if value is not None}


def _squeezed(text: str) -> str:
    return "".join(text.split())
