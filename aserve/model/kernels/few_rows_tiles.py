"""How products of few rows are cut up: tables of what was measured on an H200 (tests/gpu/bench_kernels.py --tune)."""

from dataclasses import dataclass
from typing import Final

import triton

_MAX_PARTS: Final = 8
_MIN_PART: Final = 512
"""Inputs that are worth a program of their own."""
_ONE_ROW_CHANNELS: Final = 4
_MORE_ROWS_CHANNELS: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductTiles:
    """A program computes ``outputs`` columns, going through its inputs ``inputs`` at a time; ``parts`` programs share
    the inputs of a tile. rows: how many a program takes, a power of two.
    """

    rows: int
    outputs: int
    inputs: int
    parts: int
    num_stages: int
    num_warps: int

    @classmethod
    def of(cls, *, num_rows: int, num_outputs: int, num_inputs: int, num_multiprocessors: int) -> "ProductTiles":
        """For a product that is not gate and up."""
        inputs = min(2048, triton.next_power_of_2(num_inputs))
        if num_rows == 1:
            return cls(rows=1, outputs=_ONE_ROW_CHANNELS, inputs=inputs, parts=1, num_stages=2, num_warps=4)
        outputs = _MORE_ROWS_CHANNELS
        num_tiles = triton.cdiv(num_outputs, outputs)
        parts, parts_max = 1, min(_MAX_PARTS, num_inputs // _MIN_PART)
        while 2 * parts <= parts_max and 2 * parts * num_tiles <= parted_programs_max(num_multiprocessors):
            parts *= 2
        return cls(rows=_rows(num_rows), outputs=outputs, inputs=128, parts=parts, num_stages=4, num_warps=4)

    @classmethod
    def of_pairs(cls, *, num_rows: int, num_inputs: int) -> "ProductTiles":
        """For gate and up: ``outputs`` of each."""
        if num_rows == 1:
            inputs = min(2048, triton.next_power_of_2(num_inputs))
            return cls(rows=1, outputs=2, inputs=inputs, parts=1, num_stages=2, num_warps=4)
        return cls(rows=_rows(num_rows), outputs=64, inputs=128, parts=1, num_stages=3, num_warps=4)


def parted_programs_max(num_multiprocessors: int) -> int:
    """Of a product whose inputs are cut into parts: about as many as run at once."""
    return num_multiprocessors * 3 // 2


def channel_tile(num_rows: int) -> int:
    """Channels of the stream whose squares are summed by one program."""
    return _ONE_ROW_CHANNELS if num_rows == 1 else _MORE_ROWS_CHANNELS


def _rows(num_rows: int) -> int:
    return max(16, 1 << (num_rows - 1).bit_length())
