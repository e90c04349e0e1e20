"""NVTX ranges: named stretches of time that Nsight Systems shows beside the kernels."""

from typing import Protocol, cast


class _Binding(Protocol):
    def range_push(self, msg: str) -> int: ...

    def range_pop(self) -> int: ...

    def range_start(self, msg: str) -> int: ...

    def range_end(self, range_id: int) -> None: ...


class NvtxRanges:
    """torch's binding. Kernels and graphs that are launched between ``push`` and ``pop`` carry the range on the GPU."""

    def __init__(self, binding: _Binding) -> None:
        self._binding = binding
        self.end = binding.range_end

    def push(self, name: str) -> None:
        """Begin a range of this thread. Ranges of a thread nest."""
        self._binding.range_push(name)

    def pop(self) -> None:
        """End the innermost range of this thread."""
        self._binding.range_pop()

    def start(self, name: str) -> int:
        """Begin a range of the process, which ends by ``end`` of what this returns, whatever began or ended since."""
        return self._binding.range_start(name)


def open_ranges() -> NvtxRanges | None:
    """None without CUDA. Loads torch."""
    import torch

    return NvtxRanges(cast("_Binding", torch.cuda.nvtx)) if torch.cuda.is_available() else None
