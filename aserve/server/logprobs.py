"""Log-probabilities in the shapes of chat, completions and prompt_logprobs."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from aserve.engine.generation import TokenLogprob

TokenBytes = Callable[[int], bytes]

FLOOR = -9999.0
"""Stands for minus infinity and NaN, which JSON has not; the official API uses the same figure."""


def _finite(logprob: float) -> float:
    return logprob if logprob > FLOOR else FLOOR  # false for NaN as well


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def chat_logprobs(entries: Iterable[TokenLogprob], token_bytes: TokenBytes, num_top: int) -> list[dict[str, Any]]:
    """The items of ``logprobs.content``."""
    return [
        {
            **_chat_item(entry.token, entry.logprob, token_bytes),
            "top_logprobs": [_chat_item(token, logprob, token_bytes) for token, logprob in entry.top[:num_top]],
        }
        for entry in entries
    ]


def _chat_item(token: int, logprob: float, token_bytes: TokenBytes) -> dict[str, Any]:
    raw = token_bytes(token)
    return {"token": _text(raw), "logprob": _finite(logprob), "bytes": list(raw)}


class TextLogprobs:
    """The four lists of a completion choice; offsets run on over the pieces of a stream."""

    __slots__ = ("_num_top", "_offset", "_token_bytes")

    def __init__(self, token_bytes: TokenBytes, num_top: int) -> None:
        self._token_bytes = token_bytes
        self._num_top = num_top
        self._offset = 0

    def take(self, tokens: Sequence[int], entries: Sequence[TokenLogprob | None]) -> dict[str, Any]:
        """The next tokens of the choice. An entry of None (the first token of a prompt) is null in the answer."""
        texts, offsets, tops = [], [], []
        for token, entry in zip(tokens, entries, strict=True):
            text = _text(self._token_bytes(token))
            texts.append(text)
            offsets.append(self._offset)
            self._offset += len(text)
            tops.append(None if entry is None else self._top(entry, text))
        return {
            "tokens": texts,
            "token_logprobs": [None if entry is None else _finite(entry.logprob) for entry in entries],
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprob, text: str) -> dict[str, float]:
        """Alternatives by text, the chosen token among them. Of tokens with equal text the likeliest stays."""
        top: dict[str, float] = {}
        for token, logprob in entry.top[: self._num_top]:
            top.setdefault(_text(self._token_bytes(token)), _finite(logprob))
        top.setdefault(text, _finite(entry.logprob))
        return top


def of_prompt(token_ids: Sequence[int], entries: Sequence[TokenLogprob | None]) -> list[TokenLogprob | None]:
    """One entry a prompt token: the first tokens have none where fewer came (a prompt of one token has none at all)."""
    return [None] * (len(token_ids) - len(entries)) + list(entries)


def prompt_logprobs(entries: Sequence[TokenLogprob | None], token_bytes: TokenBytes) -> list[dict[str, Any] | None]:
    """One object a prompt token, keyed by token id; null for the first, which nothing precedes."""
    return [None if entry is None else _by_id(entry, token_bytes) for entry in entries]


def _by_id(entry: TokenLogprob, token_bytes: TokenBytes) -> dict[str, Any]:
    ranked = {token: (logprob, rank) for rank, (token, logprob) in enumerate(entry.top, 1)}
    ranked[entry.token] = (entry.logprob, entry.rank)
    return {
        str(token): {"logprob": _finite(logprob), "rank": rank, "decoded_token": _text(token_bytes(token))}
        for token, (logprob, rank) in ranked.items()
    }
