"""How products of few rows are cut up: tables of what was measured on an H200 (tests/gpu/bench_kernels.py --tune)."""

from dataclasses import dataclass
from typing import Final

import triton

_ONE_ROW_CHANNELS: Final = 4
_MORE_ROWS_CHANNELS: Final = 64
_MIN_PART: Final = 512
"""Inputs that are worth a program of their own."""


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
        """For a product that is not gate and up. Within 9 % of the best setting tried at 16 and 64 rows."""
        if num_rows == 1:
            has_many = num_outputs > 8 * _ONE_ROW_CHANNELS * num_multiprocessors  # more programs than run at once
            return cls._of_one_row(_ONE_ROW_CHANNELS, num_inputs, whole=4096 if has_many else 2048)
        rows, outputs, inputs = _rows(num_rows), _MORE_ROWS_CHANNELS, 128
        num_tiles = triton.cdiv(num_outputs, outputs)
        # Partial sums are written and read again, which many rows feel.
        parts, parts_max = 1, min(128 // rows, num_inputs // _MIN_PART)
        programs_max = parted_programs_max(num_multiprocessors) if rows == 16 else num_multiprocessors
        while 2 * parts <= parts_max and 2 * parts * num_tiles <= programs_max:
            parts *= 2
        # A program that has its multiprocessor for itself reads far ahead; of more, two share one.
        depth = 6 if parts * num_tiles <= num_multiprocessors else 3
        num_stages = min(depth, max(3, num_inputs // (parts * inputs * 2)))
        return cls(rows=rows, outputs=outputs, inputs=inputs, parts=parts, num_stages=num_stages, num_warps=4)

    @classmethod
    def of_pairs(cls, *, num_rows: int, num_inputs: int) -> "ProductTiles":
        """For gate and up: ``outputs`` of each."""
        if num_rows == 1:
            return cls._of_one_row(2, num_inputs, whole=4096, columns_an_output=2)
        rows = _rows(num_rows)
        return cls(rows=rows, outputs=64, inputs=128, parts=1, num_stages=3 if rows == 16 else 4, num_warps=4)

    @classmethod
    def _of_one_row(cls, outputs: int, num_inputs: int, *, whole: int, columns_an_output: int = 1) -> "ProductTiles":
        """whole: inputs that are gone through at once."""
        if num_inputs > 4096:
            inputs, stages = 1024 if num_inputs > 8192 else 2048, 2
            warps = 4
        else:
            inputs, stages = min(whole, max(128, triton.next_power_of_2(num_inputs))), 1
            warps = min(8, max(1, outputs * columns_an_output * inputs // 1024))
        return cls(rows=1, outputs=outputs, inputs=inputs, parts=1, num_stages=stages, num_warps=warps)


def parted_programs_max(num_multiprocessors: int) -> int:
    """Of a product whose inputs are cut into parts: about as many as run at once."""
    return num_multiprocessors * 3 // 2


def channel_tile(num_rows: int) -> int:
    """Channels of the stream whose squares are summed by one program."""
    return _ONE_ROW_CHANNELS if num_rows == 1 else _MORE_ROWS_CHANNELS


def _rows(num_rows: int) -> int:
    return max(16, 1 << (num_rows - 1).bit_length())
