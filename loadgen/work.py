"""What is asked: prompts by index and seed, and the bodies made of them. Pure, but for reading a JSONL file once.

A prompt source is any value with ``prompt(index, seed) -> Prompt``; the same index and seed give the same prompt in
every process. Lengths are in words: the server's own usage says how many tokens they were.
"""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from loadgen import codec
from loadgen.errors import UsageError

Endpoint = Literal["chat", "completions"]
Usage = Literal["final", "continuous", "off"]

JSONL_BYTES_MAX = 1 << 30

# Short and frequent, so that most tokenizers give about one token a word.
WORDS = tuple(
    """
    able about above act add after again age ago air all also always and animal answer any area arm ask away back bad
    ball bank base be bear beat because bed before begin being best better big bird black blue boat body book both box
    boy bring brother build busy but buy by call came can car care carry case catch cause center change check child
    city class clean clear close cold color come common cook cool copy corner could count country course cover cross
    cry cut dark day deep did do dog done door down draw dream drive drop dry each early earth east easy eat edge eight
    end enough even ever every eye face fact fall family far farm fast father feel feet few field fill find fine finger
    fire first fish five floor fly follow food foot for force form four free friend from front full game gave get girl
    give glass go gold good got great green ground group grow had hair half hand happy hard has hat have he head hear
    heart heat help her here high hill him his hold home hope horse hot hour house how idea if in island it job join
    jump just keep key kind king knew know land language large last late laugh lead learn leave left leg less let
    letter life light like line list listen little live long look lost lot love low machine made make man many map mark
    """.split()
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What one request asks: chat messages, of which the completions endpoint gets the joined text."""

    messages: tuple[Mapping[str, Any], ...]

    @property
    def text(self) -> str:
        """The contents that are text, joined by newlines."""
        return "\n".join(m["content"] for m in self.messages if isinstance(m.get("content"), str))


class PromptSource(Protocol):
    """Prompts by number; equal arguments give equal prompts, in every process."""

    def prompt(self, index: int, seed: int) -> Prompt: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomWords:
    """``num_words`` words drawn anew for each index, so that no two prompts share a prefix that a cache could serve."""

    num_words: int

    def prompt(self, index: int, seed: int) -> Prompt:
        """Draw the words of prompt ``index``."""
        words = random.Random(f"words/{seed}/{index}").choices(WORDS, k=self.num_words)
        return _user(" ".join(words))


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedPrompts:
    """Prompts from a file, in its order, beginning again at the end."""

    prompts: Sequence[Prompt]

    def prompt(self, index: int, seed: int) -> Prompt:
        """Return the file's prompt at ``index``, counted around."""
        return self.prompts[index % len(self.prompts)]


def read_jsonl(path: str) -> RecordedPrompts:
    """Read one prompt a line: ``messages`` (as they are), ``turns`` (MT-Bench; the first), ``prompt``, or ``question``.

    Raises UsageError with the line's number for anything else, for an empty file and for one over 1 GiB.
    """
    prompts: list[Prompt] = []
    try:
        if Path(path).stat().st_size > JSONL_BYTES_MAX:
            raise UsageError(f"{path} is larger than 1 GiB")
        with Path(path).open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    prompts.append(_prompt_of_line(line, f"{path}:{number}"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    if not prompts:
        raise UsageError(f"{path} holds no prompts")
    return RecordedPrompts(prompts=prompts)


def _prompt_of_line(line: str, where: str) -> Prompt:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{where} is not JSON: {error}") from error
    match record:
        case {"messages": [*messages]} if messages and all(isinstance(m, dict) for m in messages):
            return Prompt(messages=tuple(messages))
        case {"turns": [str(text), *_]} | {"prompt": str(text)} | {"question": str(text)}:
            return _user(text)
    raise UsageError(f"{where} has none of messages, turns, prompt and question in a shape that makes a prompt")


def _user(text: str) -> Prompt:
    return Prompt(messages=({"role": "user", "content": text},))


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyTemplate:
    """Everything in a request's body but its prompt."""

    model: str
    endpoint: Endpoint
    max_tokens: int
    temperature: float
    ignore_eos: bool = False
    usage: Usage = "final"
    extra: Mapping[str, Any]  # laid over all other fields, so it can replace them

    def body(self, prompt: Prompt) -> bytes:
        """Return the JSON body that asks for ``prompt`` as an event stream."""
        fields: dict[str, Any] = {
            "model": self.model,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "stream": True,
        }
        if self.endpoint == "chat":
            fields["messages"] = prompt.messages
        else:
            fields["prompt"] = prompt.text
        if self.ignore_eos:
            fields["ignore_eos"] = True
        if self.usage != "off":
            fields["stream_options"] = {"include_usage": True}
            if self.usage == "continuous":
                fields["stream_options"]["continuous_usage_stats"] = True
        return codec.dumps(fields | dict(self.extra))
