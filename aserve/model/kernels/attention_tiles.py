"""How attention is cut up, by shape: tables of what was measured on an H200 (tests/gpu/bench_kernels.py --tune).

All in bfloat16, heads of 64 and 128, 32 query heads over 8; other shapes take what is next to them.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTiles:
    """How a program goes through its item: ``tokens`` at a time."""

    tokens: int
    num_stages: int
    num_warps: int

    @classmethod
    def of(cls, *, head_dim: int, dtype: torch.dtype) -> "DecodeTiles":
        """Within 2 % of the best setting at 1 to 256 rows; up to 19 % off it for one row of 16,384 tokens."""
        if dtype == torch.float32 or head_dim > 128:
            return cls(tokens=32, num_stages=2, num_warps=4)
        return cls(tokens=64, num_stages=2, num_warps=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkTiles:
    """How a program goes through a tile of ``rows`` (queries times the heads of a kv head): ``tokens`` at a time."""

    rows: int
    tokens: int
    num_stages: int
    num_warps: int

    @classmethod
    def of(cls, *, head_dim: int, dtype: torch.dtype, num_tokens: int) -> "ChunkTiles":
        """num_tokens: of all chunks together. Large tiles read the cache less often, small ones fill the device."""
        if dtype == torch.float32:
            return cls(rows=64, tokens=32, num_stages=1, num_warps=4)
        if head_dim > 128:
            return cls(rows=64, tokens=32, num_stages=2, num_warps=4)
        if head_dim > 64:
            if num_tokens >= 4096:
                return cls(rows=256, tokens=64, num_stages=3, num_warps=8)
            return cls(rows=64, tokens=64, num_stages=2, num_warps=4)
        if num_tokens > 1024:
            return cls(rows=128, tokens=64, num_stages=2, num_warps=8)
        return cls(rows=64, tokens=128, num_stages=2, num_warps=4)


def target_programs(num_rows: int, num_multiprocessors: int) -> int:
    """How many programs should share the tokens of so many rows: of fewer rows, fewer parts, for they are merged."""
    return num_multiprocessors * (2 if num_rows <= 4 else 4)
