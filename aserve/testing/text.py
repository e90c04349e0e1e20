"""A tokenizer whose tokens are bytes."""

import codecs
from collections.abc import Sequence
from typing import Final


class _ByteDecoder:
    """Bytes to text, incrementally: an incomplete UTF-8 character is held back, an invalid byte becomes U+FFFD."""

    def __init__(self, specials: dict[int, str], *, skip_special_tokens: bool) -> None:
        self._specials = specials
        self._skip = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        if token < 256:
            return self._utf8.decode(bytes((token,)))
        if self._skip or token not in self._specials:
            return ""
        return self._utf8.decode(b"", True) + self._specials[token]

    def finish(self) -> str:
        return self._utf8.decode(b"", True)


class ByteTokenizer:
    """One token a byte of UTF-8, then <|bos|> (256) and <|eos|> (257)."""

    BOS: Final = 256
    EOS: Final = 257
    _specials: Final = {BOS: "<|bos|>", EOS: "<|eos|>"}

    @property
    def vocab_size(self) -> int:
        return 258

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return (self.EOS,)

    @property
    def bos_id(self) -> int | None:
        return self.BOS

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]:
        tokens = [self.BOS] if add_special_tokens else []
        if not parse_special:
            return tokens + list(text.encode())
        while text:
            start, special = min(
                ((text.find(name), token) for token, name in self._specials.items() if name in text),
                default=(len(text), None),
            )
            tokens += text[:start].encode()
            if special is None:
                break
            tokens.append(special)
            text = text[start + len(self._specials[special]) :]
        return tokens

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        decoder = self.decoder(skip_special_tokens=skip_special_tokens)
        return "".join(map(decoder.push, tokens)) + decoder.finish()

    def token_bytes(self, token: int) -> bytes:
        if 0 <= token < 256:
            return bytes((token,))
        return self._specials.get(token, "").encode()

    def decoder(self, *, skip_special_tokens: bool = True) -> _ByteDecoder:
        return _ByteDecoder(self._specials, skip_special_tokens=skip_special_tokens)
