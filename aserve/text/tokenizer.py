"""Tokenizers of Hugging Face folders, through the ``tokenizers`` package: transformers' AutoTokenizer loads torch."""

import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from aserve.errors import InvalidRequest, ModelError
from aserve.text.detokenizer import DecodeRules, DecodeTable, TableDetokenizer, WindowDetokenizer

SPECIAL_TOKEN_NAMES: Final = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
"""Roles that a folder gives to tokens; chat templates know the tokens by these names."""

_MARKER_LENGTH_MIN: Final = 3
"""A shorter special token (a pad token that is "!") is ordinary text as well, and cannot be kept out of prompts."""

_CONVERTIBLE: Final = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt")
"""Files of older tokenizers, from which transformers can make a tokenizer.json."""


class Markers:
    """How control tokens are written in text, and how to see whether text of a client's could be read as one."""

    def __init__(self, markers: Sequence[str], *, normalize: Callable[[str], str] | None = None) -> None:
        """normalize: the tokenizer's own, where it looks for markers behind it; None where it looks at the raw text."""
        self._normalize = normalize
        lookalikes = [*markers, *map(normalize, markers)] if normalize else markers
        self._lookalike = re.compile(_pattern_of(lookalikes))
        self._starts = {marker[:length] for marker in lookalikes for length in range(1, len(marker))}
        self._ends = {marker[length:] for marker in lookalikes for length in range(1, len(marker))}
        self._length_max = max(map(len, lookalikes), default=0)
        self.pattern = re.compile(_pattern_of(markers))
        """Finds any one marker; the longest at each place."""

    def suspects(self, text: str) -> bool:
        """Whether a marker is in ``text``, or could be once a template has put something before or behind it."""
        if self._lookalike.search(text) or self.begins_inside(text) or self.ends_inside(text):
            return True
        return self._normalize is not None and self._lookalike.search(self._normalize(text)) is not None

    def begins_inside(self, text: str) -> bool:
        """Whether ``text`` begins with the rest of a marker."""
        return any(text[:length] in self._ends for length in range(1, min(self._length_max, len(text) + 1)))

    def ends_inside(self, text: str) -> bool:
        """Whether ``text`` ends with the beginning of a marker."""
        return any(text[-length:] in self._starts for length in range(1, min(self._length_max, len(text) + 1)))


class HFTokenizer:
    """A tokenizer.json with what its folder says about special tokens (``engine/ports.py``: Tokenizer).

    Thread-safe: nothing changes after construction. Encoding releases the interpreter's lock. Markers of control
    tokens in a text are plain text unless ``parse_special``; for that there is a second tokenizer, in which those
    tokens are spelled with names that no client can guess.
    """

    def __init__(
        self,
        spec: Mapping[str, Any],
        *,
        eos_ids: Sequence[int] = (),
        bos_id: int | None = None,
        template_text: str = "",
    ) -> None:
        """spec: the content of tokenizer.json.

        template_text: the model's chat template; tokens such as <think> that are added but not special count as
        control tokens if it writes them.
        """
        self._tokenizer = _build(spec)
        added = spec.get("added_tokens") or []
        names = {
            token["content"]: f"<{secrets.token_hex(16)}>"
            for token in added
            if len(token["content"]) >= _MARKER_LENGTH_MIN
            and (token["special"] or (token["content"].strip() and token["content"] in template_text))
        }
        self._names = names
        self._plain_tokenizer = _build(_renamed(spec, names)) if names else self._tokenizer
        normalizer = self._tokenizer.normalizer
        is_normalized = any(token["normalized"] for token in added if token["content"] in names)
        self.markers = Markers(
            list(names), normalize=normalizer.normalize_str if normalizer is not None and is_normalized else None
        )
        self._eos_ids = tuple(dict.fromkeys(eos_ids))
        self._bos_id = bos_id
        self._prefix_id = next(iter(self._ids(self._tokenizer, "", add_special_tokens=True)), None)

        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self._vocab_size = max(vocabulary.values(), default=-1) + 1
        pieces: list[str | None] = [None] * self._vocab_size
        for piece, token in vocabulary.items():
            pieces[token] = piece
        self._pieces = pieces
        decoder = self._tokenizer.decoder
        rules = DecodeRules.from_json(None if decoder is None else json.loads(decoder.__getstate__()))
        self._rules = rules or DecodeRules()
        self._tables: dict[bool, DecodeTable] = {}  # by skip_special_tokens; none for decoders without rules
        if rules is not None:
            whole = DecodeTable(rules, pieces)
            skipping = whole.skipping(token["id"] for token in added if token["special"])
            self._tables = {False: whole, True: skipping}

    @classmethod
    def from_folder(cls, folder: str | Path) -> "HFTokenizer":
        """Read a model's folder. ModelError, in one sentence, if there is no tokenizer in it or it cannot be read."""
        folder = Path(folder)
        config = read_json(folder / "tokenizer_config.json")
        path = folder / "tokenizer.json"
        spec = read_json(path) if path.exists() else _converted(folder)
        special_tokens = read_special_tokens(folder)
        try:
            spec = _with_special_tokens(spec, special_tokens, config)
            ids = {token["content"]: token["id"] for token in spec["added_tokens"]}
            generation, model = read_json(folder / "generation_config.json"), read_json(folder / "config.json")
            model_eos = _as_ids(generation.get("eos_token_id")) or _as_ids(_of_text_model(model, "eos_token_id"))
            eos_id = ids.get(special_tokens.get("eos_token", ""))
            bos_id = ids.get(special_tokens.get("bos_token", ""))
            if bos_id is None and "bos_token" not in config:
                bos_id = next(iter(_as_ids(_of_text_model(model, "bos_token_id"))), None)
            template_path = folder / "chat_template.jinja"
            return cls(
                spec,
                eos_ids=[*model_eos, *([] if eos_id is None else [eos_id])],
                bos_id=bos_id,
                template_text=f"{template_path.read_text('utf-8') if template_path.exists() else ''}"
                f"{config.get('chat_template') or ''}",
            )
        except ModelError:
            raise
        except Exception as error:  # the package raises bare Exception for whatever it cannot read
            raise ModelError(f"the tokenizer in {folder} cannot be read: {_first_line(error)}") from error

    @property
    def vocab_size(self) -> int:
        """Ids below this are decodable; gaps among them decode to nothing."""
        return self._vocab_size

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """End-of-sequence ids of generation_config.json (or config.json), then the tokenizer's own."""
        return self._eos_ids

    @property
    def bos_id(self) -> int | None:
        return self._bos_id

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]:
        """Tokens of ``text``. Markers such as <|im_end|> in it are plain text unless ``parse_special``.

        add_special_tokens: as the model's post-processor says, but never a second BOS before one that ``text`` has.
        Raises InvalidRequest for text with lone surrogates, which is not text.
        """
        if not parse_special:
            return self._ids(self._plain_tokenizer, text, add_special_tokens=add_special_tokens)
        ids = self._ids(self._tokenizer, text, add_special_tokens=add_special_tokens)
        if add_special_tokens and ids[1:2] == [self._prefix_id]:
            del ids[0]
        return ids

    def encode_pieces(self, pieces: Iterable[tuple[str, bool]]) -> list[int]:
        """Tokens of the joined pieces, nothing added. Each is a text, and whether it is a marker meant as its token.

        Markers inside or across the other pieces are plain text. In all else the tokens are those of one ``encode``
        of the whole, spaces around the markers included.
        """
        text = "".join(self._names[piece] if is_marker else piece for piece, is_marker in pieces)
        return self._ids(self._plain_tokenizer, text, add_special_tokens=False)

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ``tokens``: invalid bytes as U+FFFD, ids outside the vocabulary as nothing.

        Equal to the ``tokenizers`` package's, but for runs of byte tokens (<0xE4>) that are not all valid: there every
        byte of the run becomes U+FFFD, here only the invalid ones, as in ByteLevel vocabularies. So what has been
        streamed is never taken back.
        """
        if self._tables:
            return self._tables[skip_special_tokens].decode(tokens)
        known = [token for token in tokens if 0 <= token < self._vocab_size]
        return self._tokenizer.decode(known, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token: int) -> bytes:
        """The raw bytes of one token inside a text, special ones included; empty for ids outside the vocabulary."""
        piece = self._pieces[token] if 0 <= token < self._vocab_size else None
        return b"" if piece is None else self._rules.to_bytes(piece)

    def decoder(self, *, skip_special_tokens: bool = True) -> TableDetokenizer | WindowDetokenizer:
        """A decoder for one sequence, whose text is that of ``decode`` of its tokens."""
        if self._tables:
            return TableDetokenizer(self._tables[skip_special_tokens])
        return WindowDetokenizer(lambda tokens: self.decode(tokens, skip_special_tokens=skip_special_tokens))

    @staticmethod
    def _ids(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            # a batch of one: unlike `encode` it lets other threads run, and needs 30 % less time
            [encoding] = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except (TypeError, UnicodeEncodeError):
            if any("\ud800" <= character <= "\udfff" for character in text):
                raise InvalidRequest(
                    "The text holds half of a surrogate pair, which no character is; it was cut inside a character."
                ) from None
            raise
        ids: list[int] = encoding.ids
        return ids


def read_json(path: Path) -> dict[str, Any]:
    """The object in ``path``, {} where there is no such file. ModelError if it is anything else."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {_first_line(error)}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object.")
    return value


def read_special_tokens(folder: Path) -> dict[str, str]:
    """Name -> token of the folder's special_tokens_map.json and tokenizer_config.json; the latter wins."""
    values = read_json(folder / "special_tokens_map.json") | read_json(folder / "tokenizer_config.json")
    tokens = {name: _content(values.get(name)) for name in SPECIAL_TOKEN_NAMES}
    return {name: token for name, token in tokens.items() if token}


def _content(token: object) -> str:
    """A special token of a config: a string, or an object with the string and its flags."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _with_special_tokens(
    spec: dict[str, Any], special_tokens: Mapping[str, str], config: Mapping[str, Any]
) -> dict[str, Any]:
    """``spec`` with the special tokens that only tokenizer_config.json declares; those without an id are left out."""
    added = {token["content"]: token for token in spec.get("added_tokens") or []}
    for token_id, token in (config.get("added_tokens_decoder") or {}).items():
        added.setdefault(token["content"], _added_token(int(token_id)) | token)
    lists = [config.get("additional_special_tokens") or [], config.get("extra_special_tokens") or []]
    extra = [token for tokens in lists for token in (tokens.values() if isinstance(tokens, dict) else tokens)]
    vocabulary = spec["model"].get("vocab") or {}
    if not isinstance(vocabulary, dict):
        vocabulary = {piece: index for index, (piece, _) in enumerate(vocabulary)}
    for content in (*special_tokens.values(), *filter(None, map(_content, extra))):
        if content in added:
            added[content] = added[content] | {"special": True}
        elif content in vocabulary:
            added[content] = _added_token(vocabulary[content]) | {"content": content}
    return spec | {"added_tokens": sorted(added.values(), key=lambda token: int(token["id"]))}


def _added_token(token_id: int) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, **flags, "special": True}


def _renamed(spec: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """``spec`` with other spellings for the tokens in ``names``, under the same ids.

    In the vocabulary too: Unigram models, and BPE with ignore_merges, would find the old ones there.
    """
    added = [
        token | {"content": names[token["content"]], "normalized": False} if token["content"] in names else token
        for token in spec["added_tokens"]
    ]
    model = dict(spec["model"])
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(piece, piece): token for piece, token in vocabulary.items()}
    elif vocabulary:
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocabulary]
    if merges := model.get("merges"):
        pairs = (merge.split(" ", 1) if isinstance(merge, str) else merge for merge in merges)
        model["merges"] = [pair for pair in pairs if not ({*pair, "".join(pair)} & names.keys())]
    if unknown := model.get("unk_token"):
        model["unk_token"] = names.get(unknown, unknown)
    return {**spec, "added_tokens": added, "model": model}


def _build(spec: Mapping[str, Any]) -> Tokenizer:
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    tokenizer.no_truncation()  # files saved during training may hold either
    tokenizer.no_padding()
    return tokenizer


def _converted(folder: Path) -> dict[str, Any]:
    """A tokenizer.json made of an older tokenizer's files. transformers is loaded only here."""
    if not any((folder / name).exists() for name in _CONVERTIBLE):
        raise ModelError(f"{folder} holds no tokenizer: there is no tokenizer.json in it.")
    try:
        from transformers import AutoTokenizer

        slow = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        spec: dict[str, Any] = json.loads(slow.backend_tokenizer.to_str())
    except Exception as error:  # missing packages, custom code, damaged files: transformers raises anything
        raise ModelError(
            f"{folder} has no tokenizer.json, and its tokenizer cannot be converted to one: {_first_line(error)}"
        ) from error
    return spec


def _as_ids(value: object) -> list[int]:
    """A config's token id, list of ids, or null."""
    values = value if isinstance(value, list) else [value]
    return [token for token in values if type(token) is int]


def _of_text_model(config: Mapping[str, Any], key: str) -> object:
    """``key`` of a config.json, or of the language model in one that describes several."""
    text_config = config.get("text_config")
    return config.get(key) if key in config or not isinstance(text_config, dict) else text_config.get(key)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def _pattern_of(words: Iterable[str]) -> str:
    """A regular expression for the longest of ``words`` at a place, as a trie: some models have 6,000 markers."""
    words = set(words)
    return _trie_pattern(words) if words else "(?!)"


def _trie_pattern(words: set[str]) -> str:
    branches = "|".join(_trie_branches(words - {""}))
    return f"(?:{branches})?" if "" in words else f"(?:{branches})"


def _trie_branches(words: set[str]) -> Iterator[str]:
    by_first: dict[str, set[str]] = {}
    for word in words:
        by_first.setdefault(word[0], set()).add(word[1:])
    for first, rests in sorted(by_first.items()):
        yield re.escape(first) + (_trie_pattern(rests) if rests != {""} else "")
