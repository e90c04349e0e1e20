"""What is asked: the prompts of every arrival by its number and the seed, and the bodies made of them. Pure.

An arrival is a session of one or more turns. A source is any value that says how many turns arrival ``index`` has and
what each of them asks; equal arguments give equal answers, in every process. ``read_jsonl`` alone reads a file, once.
"""

import json
import random
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, Protocol

from loadgen import codec, words
from loadgen.errors import UsageError
from loadgen.lengths import IN_WORDS, NOTHING, Calibration, Lengths
from loadgen.traces import BLOCK_TOKENS, Trace

Endpoint = Literal["chat", "completions", "responses", "responses-ws"]
ENDPOINTS: tuple[Endpoint, ...] = ("chat", "completions", "responses", "responses-ws")
Usage = Literal["final", "continuous", "off"]
USAGES: tuple[Usage, ...] = ("final", "continuous", "off")
History = Literal["served", "drawn"]
HISTORIES: tuple[History, ...] = ("served", "drawn")

JSONL_BYTES_MAX = 1 << 30

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """What a client does besides reading its answer to the end as fast as it comes."""

    abort_after_tokens: int | None = None  # leave after so many content events; 0 is just after the send
    read_bytes_per_s: float | None = None  # read no faster than this, on a small socket buffer of its own
    is_on_new_connection: bool = False
    expect_status: int = 200  # the answer that counts as success; a refusal has no tokens


READS_ALL = Behaviour()
"""The ordinary client's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One turn. ``messages`` are those that it adds to the conversation.

    ``max_tokens`` None takes the template's; ``raw_body`` is sent as it is, in place of any body made of the rest.
    """

    messages: tuple[Message, ...]
    max_tokens: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    raw_body: str | None = None
    think_s: float = 0.0  # after this turn's answer, before the next turn
    behaviour: Behaviour = READS_ALL
    part: str = ""  # of a mixture

    @property
    def text(self) -> str:
        """The contents that are text, joined by newlines: what the completions endpoint gets."""
        return text_of(self.messages)


def text_of(messages: Sequence[Message]) -> str:
    """Return the contents that are text, joined by newlines."""
    return "\n".join(m["content"] for m in messages if isinstance(m.get("content"), str))


class Source(Protocol):
    """What arrivals ask, by number."""

    def num_turns(self, index: int, seed: int) -> int: ...

    def ask(self, index: int, turn: int, seed: int) -> Ask: ...


def _rng(what: str, *key: int) -> random.Random:
    return random.Random(f"{what}/{'/'.join(map(str, key))}")


def _user(text: str) -> tuple[Message, ...]:
    return ({"role": "user", "content": text},)


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomWords:
    """Words drawn anew for each turn, so that no two prompts share a prefix that a cache could serve.

    Each arrival speaks one of ``languages``; ``calibrations`` belong to them in order.
    """

    lengths: Lengths
    languages: tuple[str, ...] = ("en",)
    calibrations: tuple[Calibration, ...] = (IN_WORDS,)

    def num_turns(self, index: int, seed: int) -> int:
        """Return 1."""
        return 1

    def ask(self, index: int, turn: int, seed: int) -> Ask:
        """Draw a length and the words."""
        rng = _rng("words", seed, index, turn)
        number = int(rng.random() * len(self.languages))
        num_words = self.calibrations[number].words(self.lengths.draw(rng), is_whole_prompt=turn == 0)
        return Ask(messages=_user(words.draw(rng, num_words, self.languages[number])))


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefixes:
    """Groups of prompts that begin alike, as a system message, and end in words of their own.

    Group g, counted from 1, is drawn with a weight of 1 / g ** ``zipf``: 0 is all groups alike.
    """

    num_groups: int
    zipf: float
    prefix: Lengths
    lengths: Lengths
    calibration: Calibration = IN_WORDS

    def num_turns(self, index: int, seed: int) -> int:
        """Return 1."""
        return 1

    def ask(self, index: int, turn: int, seed: int) -> Ask:
        """Draw a group and the words of the rest; a later turn stays in its conversation and has no prefix."""
        rng = _rng("suffix", seed, index, turn)
        suffix = words.draw(rng, self.calibration.words(self.lengths.draw(rng), is_whole_prompt=False))
        if turn:
            return Ask(messages=_user(suffix))
        cumulative = _zipf(self.num_groups, self.zipf)
        group = bisect_right(cumulative, _rng("group", seed, index).random() * cumulative[-1])
        prefix_rng = _rng("prefix", seed, group)
        num_words = self.calibration.words(self.prefix.draw(prefix_rng))
        prefix = _drawn_text(f"prefix/{seed}/{group}", num_words)
        return Ask(messages=({"role": "system", "content": prefix}, *_user(suffix)))


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedPrompts:
    """Conversations from a file, in its order, beginning again at the end; at most ``num_turns_max`` turns of each."""

    conversations: Sequence[tuple[tuple[Message, ...], ...]] = field(repr=False)
    num_turns_max: int = 1

    def num_turns(self, index: int, seed: int) -> int:
        """Return how many turns of the conversation are played."""
        return min(self.num_turns_max, len(self.conversations[index % len(self.conversations)]))

    def ask(self, index: int, turn: int, seed: int) -> Ask:
        """Return the file's words at ``index``, counted around."""
        return Ask(messages=self.conversations[index % len(self.conversations)][turn])


@dataclass(frozen=True, slots=True, kw_only=True)
class TracePrompts:
    """Random words in the lengths of a trace, request by request, and its shared blocks where it knows them.

    ``scale`` multiplies all lengths; what is then longer than ``input_max`` is cut at its end, so that prefixes stay
    shared.
    """

    trace: Trace
    scale: float = 1.0
    input_max: int | None = None
    output_max: int | None = None
    calibration: Calibration = IN_WORDS

    def num_turns(self, index: int, seed: int) -> int:
        """Return 1."""
        return 1

    def ask(self, index: int, turn: int, seed: int) -> Ask:
        """Make the words of the trace's request at ``index``, counted around."""
        at = index % len(self.trace.due_s)
        num_tokens = _at_most(round(self.trace.input_tokens[at] * self.scale), self.input_max)
        num_words = self.calibration.words(num_tokens)
        pieces: list[str] = []
        block_words = self.calibration.words(round(BLOCK_TOKENS * self.scale), is_whole_prompt=False)
        for block_id in self.trace.block_ids[at]:
            if num_words <= 0:
                break
            block = _drawn_text(f"block/{seed}/{block_id}", block_words)
            pieces.append(block if num_words >= block_words else " ".join(block.split(" ")[:num_words]))
            num_words -= block_words
        if num_words > 0:
            pieces.append(words.draw(_rng("trace", seed, index), num_words))
        return Ask(
            messages=_user(" ".join(pieces)),
            max_tokens=max(1, _at_most(round(self.trace.output_tokens[at] * self.scale), self.output_max)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Shaped:
    """Another source's prompts with everything else that a turn can have."""

    source: Source
    part: str = ""
    turns: Lengths | None = None  # None leaves the number of turns to the source
    think_ms: Lengths = NOTHING
    output: Lengths | None = None
    system: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    raw_body: str | None = None
    behaviour: Behaviour = READS_ALL

    def num_turns(self, index: int, seed: int) -> int:
        """Draw the number of turns, or ask the source."""
        if self.turns is None:
            return self.source.num_turns(index, seed)
        return max(1, self.turns.draw(_rng("turns", seed, index)))

    def ask(self, index: int, turn: int, seed: int) -> Ask:
        """Return the source's turn with the rest laid over it."""
        ask = self.source.ask(index, turn, seed)
        rng = _rng("shape", seed, index, turn)
        messages = ask.messages
        if self.system is not None and turn == 0:
            messages = ({"role": "system", "content": self.system}, *messages)
        return replace(
            ask,
            messages=messages,
            max_tokens=ask.max_tokens if self.output is None else max(1, self.output.draw(rng)),
            extra=self.extra,
            raw_body=self.raw_body,
            think_s=self.think_ms.draw(rng) / 1e3,
            behaviour=self.behaviour,
            part=self.part,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """Several sources, each drawn with its weight."""

    parts: tuple[tuple[float, Source], ...]

    def num_turns(self, index: int, seed: int) -> int:
        """Return the turns of the part that is drawn."""
        return self._part(index, seed).num_turns(index, seed)

    def ask(self, index: int, turn: int, seed: int) -> Ask:
        """Return the turn of the part that is drawn."""
        return self._part(index, seed).ask(index, turn, seed)

    def _part(self, index: int, seed: int) -> Source:
        cumulative = list(accumulate(weight for weight, _ in self.parts))
        at = bisect_right(cumulative, _rng("part", seed, index).random() * cumulative[-1])
        return self.parts[min(at, len(self.parts) - 1)][1]


def read_jsonl(path: Path, *, num_turns_max: int = 1) -> RecordedPrompts:
    """Read one conversation a line: ``messages`` (one turn, as they are), ``turns``, ``prompt``, or ``question``.

    Raises UsageError with the line's number for anything else, for an empty file and for one over 1 GiB.
    """
    conversations: list[tuple[tuple[Message, ...], ...]] = []
    try:
        if path.stat().st_size > JSONL_BYTES_MAX:
            raise UsageError(f"{path} is larger than 1 GiB")
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    conversations.append(_conversation_of_line(line, f"{path}:{number}"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    if not conversations:
        raise UsageError(f"{path} holds no prompts")
    return RecordedPrompts(conversations=conversations, num_turns_max=num_turns_max)


def _conversation_of_line(line: str, where: str) -> tuple[tuple[Message, ...], ...]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{where} is not JSON: {error}") from error
    match record:
        case {"messages": [*messages]} if messages and all(isinstance(m, dict) for m in messages):
            return (tuple(messages),)
        case {"turns": [*turns]} if turns and all(isinstance(turn, str) for turn in turns):
            return tuple(_user(turn) for turn in turns)
        case {"prompt": str(text)} | {"question": str(text)}:
            return (_user(text),)
    raise UsageError(f"{where} has none of messages, turns, prompt and question in a shape that makes a prompt")


def drawn_answer(index: int, turn: int, seed: int, num_words: int) -> str:
    """Return words that stand for the answer to a turn, where what was served shall not be sent back."""
    return words.draw(_rng("answer", seed, index, turn), num_words)


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyTemplate:
    """Everything in a request's body that is not of its turn."""

    model: str
    endpoint: Endpoint
    max_tokens: int
    temperature: float | None = 0.0  # None leaves it to the server
    is_streamed: bool = True
    ignore_eos: bool = False
    usage: Usage = "final"
    extra: Mapping[str, Any] = field(default_factory=dict)  # laid over all other fields, so it can replace them

    def body(self, ask: Ask, conversation: Sequence[Message] = ()) -> bytes:
        """Return the JSON body of a turn after the messages of ``conversation``."""
        if ask.raw_body is not None:
            return ask.raw_body.encode()
        messages = [*conversation, *ask.messages]
        max_tokens = self.max_tokens if ask.max_tokens is None else ask.max_tokens
        fields: dict[str, Any] = {"model": self.model}
        match self.endpoint:
            case "chat":
                fields |= {"messages": messages, "max_tokens": max_tokens}
            case "completions":
                fields |= {"prompt": text_of(messages), "max_tokens": max_tokens}
            case "responses" | "responses-ws":
                fields |= {"input": messages, "max_output_tokens": max_tokens}
        if self.temperature is not None:
            fields["temperature"] = self.temperature
        if self.ignore_eos:
            fields["ignore_eos"] = True
        if self.endpoint == "responses-ws":
            fields = {"type": "response.create", **fields}
        else:
            fields["stream"] = self.is_streamed
        if self.usage != "off" and self.is_streamed and self.endpoint in ("chat", "completions"):
            fields["stream_options"] = {"include_usage": True}
            if self.usage == "continuous":
                fields["stream_options"]["continuous_usage_stats"] = True
        return codec.dumps(fields | dict(self.extra) | dict(ask.extra))


def _at_most(value: int, bound: int | None) -> int:
    return value if bound is None else min(value, bound)


@lru_cache(maxsize=16)
def _zipf(num_groups: int, exponent: float) -> list[float]:
    return list(accumulate(group**-exponent for group in range(1, num_groups + 1)))


@lru_cache(maxsize=4096)
def _drawn_text(key: str, num_words: int) -> str:
    return words.draw(random.Random(key), num_words)
