"""Host memory that the device reads and writes by itself: plans on their way there, log-probabilities on theirs back.

Shape suffixes: R rows that sample, N steps of the ring, V vocabulary, K alternatives.
"""

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
    """The fence of an array for which no event was recorded yet, or because a launch broke off."""

    def __init__(self, device: StepDevice) -> None:
        self._device = device

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        self._device.synchronize()


class Staging:
    """The arrays that plans are written into, in the turn in which launches take them (``kernels.fetch``). One is not
    written again before it was read."""

    def __init__(self, device: StepDevice, arrays_NW: Tensor) -> None:
        """arrays: int32, pinned, of which a launch takes the first next."""
        self._arrays: list[Words] = list(arrays_NW.numpy())
        self._fences: list[DeviceEvent | None] = [None] * len(self._arrays)
        self._whole_stream = _WholeStream(device)
        self._num_sent = 0

    @property
    def num_arrays(self) -> int:
        return len(self._arrays)

    def take(self, num_before: int = 0) -> Words:
        """The array of the launch that comes next, or behind so many others. Waits until it may be written, which is
        long since: there are more arrays than steps in flight."""
        assert num_before < len(self._arrays)
        index = (self._num_sent + num_before) % len(self._arrays)
        fence = self._fences[index]
        if fence is not None and not fence.query():
            fence.synchronize()
        self._fences[index] = None
        return self._arrays[index]

    def sent(self) -> None:
        """What fetches the next array has been enqueued. Until ``fence``, only an empty stream says it was read."""
        self._fences[self._num_sent % len(self._arrays)] = self._whole_stream
        self._num_sent += 1

    def fence(self, event: DeviceEvent) -> None:
        """The array that was sent last may be written when ``event`` has passed."""
        self._fences[(self._num_sent - 1) % len(self._arrays)] = event


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
