"""Counter-based noise: a row's random numbers are a function of (seed, position, vocabulary index) and of nothing else.

The generator is Philox4x64-10 (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC'11).
Key = (seed, 0). Counter = (1 + index // 8, position, 0, 0). Its four 64-bit words hold the 32-bit values of eight
indices, lower half first. That is how NumPy's generator counts, whose C loop makes 49,152 of them in 75 µs; its stream
is fixed by NumPy's compatibility policy and by a test against published answers. The same words come out of a few lines
of CUDA, so a seed gives the same noise on any device.
"""

from typing import Final

import numpy as np
import torch
from numpy.random import Philox
from numpy.typing import NDArray
from torch import Tensor

_SCALE: Final = -(2.0**-32) * (1 - 2.0**-24)
_OFFSET: Final = torch.tensor(-(2.0**-33))


def noise_bits(seed: int, position: int, size: int) -> NDArray[np.uint32]:
    """uint32 [size]: the noise of vocabulary indices 0 .. size - 1. seed: 0 .. 2**64 - 1."""
    key = np.array((seed, 0), np.uint64)
    counter = np.array((0, position, 0, 0), np.uint64)
    words = Philox(key=key, counter=counter).random_raw(-(-size // 2))
    return words.astype("<u8", copy=False).view("<u4")[:size]


def log_exponential_(bits: Tensor) -> Tensor:
    """Turn noise bits (their value as float32) into log E, E exponential with mean 1, in place. ``-log E`` is Gumbel.

    E = -log(1 - u) with u = (bits + 1/2) / 2**32: the small E, which decide who wins, keep their relative precision.
    u is scaled to stay below 1 - 2**-24, so that log E is always finite.
    """
    return torch.add(_OFFSET, bits, alpha=_SCALE, out=bits).log1p_().neg_().log_()
