"""Prefix table: content of a full block -> the block that holds it, and the order in which cached blocks are evicted.

Keys are SHA-256 chained over (parent, tokens, salt), cut to ``hash_bits``. A key only finds a candidate: a hit compares
parent, tokens and salt themselves, so equal keys of different content never share a block.
"""

import hashlib
from collections import OrderedDict
from dataclasses import dataclass

from aserve.core.ids import BlockId, StepNumber

ROOT = 0
"""The prefix id of the empty prefix."""


@dataclass(slots=True, eq=False)
class PrefixEntry:
    """One hashed block. ``prefix_id`` names the whole prefix up to and with it, and is never used twice.

    Never changed, but not frozen: making one would cost three times as much.
    """

    key: int
    prefix_id: int
    parent: int
    tokens: bytes
    salt: str
    block: BlockId

    def holds(self, parent: int, tokens: bytes, salt: str) -> bool:
        return self.parent == parent and self.tokens == tokens and self.salt == salt


class DigestChain:
    """The digests of a sequence's full blocks, whose content never changes: each is computed once."""

    __slots__ = ("_digests", "_salt")

    def __init__(self, salt: str) -> None:
        self._salt = salt.encode()
        self._digests: list[bytes] = []

    def digest(self, index: int, content: bytes) -> bytes:
        """Digest of block ``index``, which holds the tokens in ``content``; blocks are first asked for in order."""
        if index == len(self._digests):
            parent = self._digests[-1] if index else self._salt
            self._digests.append(hashlib.sha256(b"%d:%b%b" % (len(parent), parent, content)).digest())
        return self._digests[index]


class PrefixTable:
    """Written by the ledger only: entries follow the states of their blocks."""

    __slots__ = ("_by_block", "_by_key", "_hash_bits", "_next_id")

    def __init__(self, hash_bits: int = 256) -> None:
        self._hash_bits = hash_bits
        self._by_key: dict[int, PrefixEntry] = {}
        self._by_block: dict[BlockId, PrefixEntry] = {}
        self._next_id = ROOT + 1

    def __len__(self) -> int:
        return len(self._by_key)

    def _key(self, digest: bytes) -> int:
        return int.from_bytes(digest, "big") >> (256 - self._hash_bits)

    def find(self, digest: bytes, parent: int, tokens: bytes, salt: str) -> PrefixEntry | None:
        """The entry of exactly this content, or None."""
        entry = self._by_key.get(self._key(digest))
        return entry if entry is not None and entry.holds(parent, tokens, salt) else None

    def enter(self, digest: bytes, parent: int, tokens: bytes, salt: str, block: BlockId) -> PrefixEntry | None:
        """The entry of this content from now on: another block's where there is one, else the new one of ``block``.

        None if the key is taken by other content; ``block`` stays private then, as behind another block's entry.
        """
        key = self._key(digest)
        entry = self._by_key.get(key)
        if entry is not None:
            return entry if entry.holds(parent, tokens, salt) else None
        entry = PrefixEntry(key, self._next_id, parent, tokens, salt, block)
        self._next_id += 1
        self._by_key[key] = self._by_block[block] = entry
        return entry

    def remove(self, block: BlockId) -> None:
        entry = self._by_block.pop(block)
        del self._by_key[entry.key]

    def has(self, block: BlockId) -> bool:
        return block in self._by_block

    def blocks(self) -> list[BlockId]:
        return list(self._by_block)


class EvictionOrder:
    """The cached blocks, least recently released first. Those with a fence ahead wait apart: evicting frees none.

    A sequence releases its blocks from the last to the first, so a prefix is evicted from its end and no block outlives
    the parent that leads to it.
    """

    __slots__ = ("_evictable", "_fenced")

    def __init__(self) -> None:
        self._evictable: OrderedDict[BlockId, None] = OrderedDict()
        self._fenced: dict[BlockId, StepNumber] = {}

    @property
    def num_evictable(self) -> int:
        return len(self._evictable)

    @property
    def num_fenced(self) -> int:
        return len(self._fenced)

    def add(self, block: BlockId, fence: StepNumber, landed: StepNumber) -> None:
        if fence > landed:
            self._fenced[block] = fence
        else:
            self._evictable[block] = None

    def discard(self, block: BlockId) -> None:
        if self._fenced.pop(block, None) is None:
            del self._evictable[block]

    def oldest(self) -> BlockId:
        return next(iter(self._evictable))

    def advance(self, landed: StepNumber) -> None:
        if not self._fenced:
            return
        for block in [block for block, fence in self._fenced.items() if fence <= landed]:
            del self._fenced[block]
            self._evictable[block] = None
