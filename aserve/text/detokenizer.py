"""Tokens to text, one at a time: what is pushed and finished joins to exactly what decoding all ids at once gives.

For the decoders of nearly all language models (ByteLevel, byte fallback, Metaspace) every token stands for fixed bytes.
Those are tabulated once, so that a push is a list lookup and no more than three bytes of an unfinished character are
ever held. (``tokenizers.decoders.DecodeStream`` costs several times as much, loses a truncated last character and
withholds runs of invalid bytes without bound.) Other decoders go through a window of the last tokens.
"""

import re
from codecs import utf_8_decode
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Final

HELD_TOKENS_MAX: Final = 16
"""Tokens a WindowDetokenizer withholds before it shows them as they are; a character has at most 4 bytes."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[int, int]:
    """How a ByteLevel vocabulary writes bytes, for ``str.translate``: its character -> the byte's Latin-1 character.

    Printable bytes stand for themselves, the others for U+0100 and up in order. Characters below U+0100 outside the
    alphabet become U+FFFF, so that Latin-1 refuses a piece that holds them.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return dict.fromkeys(others, 0xFFFF) | {0x100 + index: byte for index, byte in enumerate(others)}


_BYTE_LEVEL_ALPHABET: Final = _byte_level_alphabet()


def _byte_level_bytes(piece: str) -> bytes:
    try:
        return piece.translate(_BYTE_LEVEL_ALPHABET).encode("latin-1")
    except UnicodeEncodeError:
        return piece.encode()  # an added token in plain letters


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRules:
    """A decoder of tokenizer.json, as far as it treats every token alone.

    replacements: applied in order. byte_level: pieces are written in the ByteLevel alphabet. byte_fallback: <0x41> is
    a byte. dropped_in_first: the space mark that Metaspace drops from the first token. strip: a character and how many
    of it are taken off the start of the text.
    """

    replacements: tuple[tuple[str, str], ...] = ()
    byte_level: bool = False
    byte_fallback: bool = False
    dropped_in_first: str = ""
    strip: tuple[str, int] = ("", 0)

    @classmethod
    def from_json(cls, decoder: Mapping[str, Any] | None) -> "DecodeRules | None":
        """None for a decoder whose text of a token depends on its neighbours, or that is not known here."""
        if decoder is None:
            return None
        replacements: list[tuple[str, str]] = []
        byte_level = byte_fallback = fused = False
        dropped_in_first, strip = "", ("", 0)
        for part in decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]:
            match part:
                case {"type": "Replace", "pattern": {"String": old}, "content": new} if not (fused or byte_fallback):
                    replacements.append((old, new))
                case {"type": "Metaspace", "replacement": mark, "prepend_scheme": scheme} if not fused:
                    replacements.append((mark, " "))
                    dropped_in_first = "" if scheme == "never" else mark
                case {"type": "ByteFallback"} if not fused:
                    byte_fallback = True
                case {"type": "ByteLevel"} if not (fused or byte_fallback):
                    byte_level = fused = True
                case {"type": "Fuse"}:
                    fused = True
                case {"type": "Strip", "content": mark, "start": count, "stop": 0} if fused and not strip[1]:
                    strip = (mark, count)
                case _:
                    return None
        return cls(
            replacements=tuple(replacements),
            byte_level=byte_level,
            byte_fallback=byte_fallback,
            dropped_in_first=dropped_in_first,
            strip=strip,
        )

    def to_bytes(self, piece: str, *, first: bool = False) -> bytes:
        """What a vocabulary entry adds to the text. first: nothing came before it."""
        if self.byte_fallback and (byte := _BYTE_TOKEN.fullmatch(piece)):
            return bytes.fromhex(byte[1])
        if first and self.dropped_in_first:
            piece = piece.replace(self.dropped_in_first, "")
        for old, new in self.replacements:
            piece = piece.replace(old, new)
        return _byte_level_bytes(piece) if self.byte_level else piece.encode()


class DecodeTable:
    """What each id adds to the text; shared by all streams of a tokenizer, never changed once made.

    raw[i]: the bytes of id i, empty for gaps of the vocabulary and skipped ids. texts[i]: the same as text, or None
    where they are not whole characters. present[i]: whether i counts as a token at all (known and not skipped).
    """

    __slots__ = ("pieces", "present", "raw", "rules", "texts")

    def __init__(self, rules: DecodeRules, pieces: Sequence[str | None]) -> None:
        """pieces[i]: how the vocabulary writes id i; None for gaps."""
        self.rules = rules
        self.pieces = pieces
        self.raw = [b"" if piece is None else rules.to_bytes(piece) for piece in pieces]
        self.texts = list(map(_whole_text, self.raw))
        self.present = [piece is not None for piece in pieces]

    def skipping(self, tokens: Iterable[int]) -> "DecodeTable":
        """A table that leaves these ids out of the text."""
        table = copy(self)
        table.raw, table.texts, table.present = self.raw.copy(), self.texts.copy(), self.present.copy()
        for token in tokens:
            table.raw[token], table.texts[token], table.present[token] = b"", "", False
        return table

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of all ``tokens``: invalid bytes as U+FFFD, ids outside the vocabulary as nothing."""
        num_tokens = len(self.raw)
        kept = [token for token in tokens if 0 <= token < num_tokens and self.present[token]]
        raw = [self.raw[token] for token in kept]
        if kept:
            raw[0] = self.raw_first(kept[0])
        return self.strip_start(b"".join(raw).decode("utf-8", "replace"))

    def raw_first(self, token: int) -> bytes:
        """The bytes of ``token`` where it is the first of the text; it must be present."""
        piece = self.pieces[token] if self.rules.dropped_in_first else None
        return self.raw[token] if piece is None else self.rules.to_bytes(piece, first=True)

    def strip_start(self, text: str) -> str:
        """``text``, the beginning of an output, without the characters that the decoder takes off there."""
        mark, count = self.rules.strip
        while count and text.startswith(mark):
            text, count = text[len(mark) :], count - 1
        return text


def _whole_text(raw: bytes) -> str | None:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None


class TableDetokenizer:
    """One sequence's tokens to text by a DecodeTable. Constant time a token; holds at most three bytes."""

    __slots__ = ("_held", "_num_tokens", "_plain", "_strip_left", "_table", "_texts", "_waits_for_first")

    def __init__(self, table: DecodeTable) -> None:
        self._table = table
        self._texts = table.texts
        self._num_tokens = len(table.texts)
        self._held = b""  # the valid beginning of a character
        self._waits_for_first = bool(table.rules.dropped_in_first)
        self._strip_left = table.rules.strip[1]
        self._plain = not (self._waits_for_first or self._strip_left)  # the next whole text needs no further look

    def push(self, token: int) -> str:
        """Text that this token completes; empty while it holds half a character, and for ids outside the vocabulary."""
        if not 0 <= token < self._num_tokens:
            return ""
        if self._plain and (text := self._texts[token]) is not None:
            return text
        return self._push_slow(token)

    def finish(self) -> str:
        """What is still held, as U+FFFD. Once, at the end."""
        held, self._held = self._held, b""
        return self._strip(held.decode("utf-8", "replace"))

    def _push_slow(self, token: int) -> str:
        table = self._table
        if not table.present[token]:
            return ""
        raw = table.raw_first(token) if self._waits_for_first else table.raw[token]
        self._waits_for_first = False
        raw = self._held + raw
        text, num_decoded = utf_8_decode(raw, "replace", False)
        self._held = raw[num_decoded:]
        text = self._strip(text)
        self._plain = not (self._held or self._strip_left)
        return text

    def _strip(self, text: str) -> str:
        mark = self._table.rules.strip[0]
        while self._strip_left and text:
            if not text.startswith(mark):
                self._strip_left = 0
                break
            text = text[len(mark) :]
            self._strip_left -= 1
        return text


class WindowDetokenizer:
    """The same for any decoder, by decoding the last few tokens with and without the new one.

    decode: ids -> text, never raising. Right for decoders that look at a token's neighbours and at whether it is the
    first (WordPiece, BPE suffixes); withholds at most HELD_TOKENS_MAX tokens.
    """

    __slots__ = ("_decode", "_pending", "_shown", "_shown_text")

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._shown: list[int] = []  # the tokens shown last: the context of the next
        self._shown_text = ""  # self._decode(self._shown)
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        """Text that this token completes, possibly none."""
        self._pending.append(token)
        text = self._decode(self._shown + self._pending)
        if len(self._pending) < HELD_TOKENS_MAX and (len(text) <= len(self._shown_text) or text.endswith("�")):
            return ""
        return self._show(text)

    def finish(self) -> str:
        """What is still held. Once, at the end."""
        return self._show(self._decode(self._shown + self._pending))

    def _show(self, text: str) -> str:
        news = text[len(self._shown_text) :]
        if news:
            self._shown, self._shown_text = self._pending, self._decode(self._pending)
        self._pending = []
        return news
