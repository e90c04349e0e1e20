"""Host memory that the device reads and writes by itself: plans on their way there, log-probabilities on theirs back.

Shape suffixes: R rows that sample, N steps of the ring, V vocabulary, K alternatives.
"""

from bisect import bisect_left

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aserve.core.plan import Logprobs
from aserve.device.event import DeviceEvent
from aserve.device.graphs import StepDevice
from aserve.model.kernels.sampler import top_logprobs
from aserve.model.step_words import Words


class _WholeStream:
    """The fence of an array for which no event was recorded, because a launch broke off behind its copy."""

    def __init__(self, device: StepDevice) -> None:
        self._device = device

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        self._device.synchronize()


class Staging:
    """Pinned arrays that plans are written into, in turn. One is not written again before its copy has been made."""

    def __init__(self, device: StepDevice, num_arrays: int, target: Tensor) -> None:
        """target: where they are copied to, as long as each of them."""
        self._device = device
        tensors = [device.pinned(len(target), dtype=torch.int32) for _ in range(num_arrays)]
        self._words: list[Words] = [tensor.numpy() for tensor in tensors]
        # A few sizes, whose views are made here: to make two takes as long as to enqueue a copy of some kilobytes.
        self._sizes = [*(1 << bits for bits in range(8, 64) if 1 << bits < len(target)), len(target)]
        self._targets = [target[:size] for size in self._sizes]
        self._sources = [[tensor[:size] for size in self._sizes] for tensor in tensors]
        self._fences: list[DeviceEvent | None] = [None] * num_arrays
        self._unknown = _WholeStream(device)
        self._index = -1

    def take(self) -> Words:
        """The next array. Waits for its copy, which was made long ago: there are more arrays than steps in flight."""
        self._index = (self._index + 1) % len(self._words)
        fence = self._fences[self._index]
        if fence is not None and not fence.query():
            fence.synchronize()
        return self._words[self._index]

    def send(self, num_words: int) -> None:
        """Enqueue the copy of the array that was taken last, at least so much of it. Until ``fence``, only an empty
        stream says it was made."""
        self._fences[self._index] = self._unknown
        size = bisect_left(self._sizes, num_words)
        self._targets[size].copy_(self._sources[self._index][size], non_blocking=True)

    def fence(self, event: DeviceEvent) -> None:
        """The array that was taken last may be written when ``event`` has passed."""
        self._fences[self._index] = event


class LogprobTensors:
    """Pinned memory into which kernels write log-probabilities of up to ``num_rows`` rows, a set for each ring row."""

    def __init__(self, device: StepDevice, ring_steps: int, num_rows: int, num_top: int) -> None:
        self.token_logprobs_NR = device.pinned(ring_steps, num_rows, dtype=torch.float32)
        self.ranks_NR = device.pinned(ring_steps, num_rows, dtype=torch.int32)
        self.top_ids_NRK = device.pinned(ring_steps, num_rows, num_top, dtype=torch.int32)
        self.top_logprobs_NRK = device.pinned(ring_steps, num_rows, num_top, dtype=torch.float32)

    def compute(self, index: int, first: int, logits_RV: Tensor, tokens_R: Tensor) -> None:
        """Enqueue: rows from ``first`` on of set ``index``."""
        rows = slice(first, first + len(logits_RV))
        top_logprobs(
            logits_RV,
            tokens_R,
            token_logprobs_R=self.token_logprobs_NR[index, rows],
            ranks_R=self.ranks_NR[index, rows],
            top_ids_RK=self.top_ids_NRK[index, rows],
            top_logprobs_RK=self.top_logprobs_NRK[index, rows],
        )

    def read(self, index: int, rows: NDArray[np.intp] | slice, k: int) -> Logprobs:
        """Copies, once the step has landed."""
        return Logprobs(
            token_logprobs=self.token_logprobs_NR[index].numpy()[rows].copy(),
            ranks=self.ranks_NR[index].numpy()[rows].copy(),
            top_ids=self.top_ids_NRK[index].numpy()[rows, :k].copy(),
            top_logprobs=self.top_logprobs_NRK[index].numpy()[rows, :k].copy(),
        )
