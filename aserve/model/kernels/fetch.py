"""A plan's words, from the pinned arrays that the host writes in turn to the memory where a step's kernels find them.

That a step brings its own words spares its launch a copy: enqueued from Python with cold caches, one takes the loop as
long as half of the replay behind it. Host and device count the arrays each for itself: every launch takes one.

Shape suffixes: N arrays, W words.
"""

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from aserve.model.kernels.differences import LENGTH

_LENGTH = tl.constexpr(LENGTH)

BLOCK: Final = 2048
"""Words that are read in one go, which is all that most steps of rows have."""

ALIGNMENT: Final = 16
"""An array's length is a multiple of so many words, or the kernel would read words one by one."""


@triton.jit
def _fetch_kernel(arrays_ptr, turn_ptr, words_ptr, N, W, BLOCK: tl.constexpr):
    turn = tl.load(turn_ptr)
    array_ptr = arrays_ptr + turn % N * W
    index = tl.arange(0, BLOCK)
    # Over the bus, where a second look takes as long as the first: the length is not waited for.
    length = tl.load(array_ptr + _LENGTH)
    word = tl.load(array_ptr + index, mask=index < W)
    tl.store(words_ptr + index, word, mask=index < W)
    for start in tl.range(BLOCK, length, BLOCK):
        inside = start + index < W  # and not the length, of which nobody knows that it ends with sixteen bytes
        word = tl.load(array_ptr + start + index, mask=inside)
        tl.store(words_ptr + start + index, word, mask=inside)
    tl.debug_barrier()  # all warps have read it
    tl.store(turn_ptr, turn + 1)


def fetch_words(arrays_NW: Tensor, turn_1: Tensor, *, words_W: Tensor) -> None:
    """Copy the array whose turn it is, at least as much of it as its header says, and count.

    arrays: int32, pinned, W a multiple of ALIGNMENT. turn: int64, the number of arrays that were fetched so far.
    """
    num_arrays, num_words = arrays_NW.shape
    _fetch_kernel[(1,)](arrays_NW, turn_1, words_W, num_arrays, num_words, BLOCK=BLOCK, num_warps=8)
