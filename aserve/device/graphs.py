"""One CUDA device as steps use it: a stream that runs them, graphs of whole steps, memory that it reads in place.

``StepDevice`` is the seam: tests run the same steps without a GPU, under Triton's interpreter.
"""

import ctypes
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Final, Protocol

import torch
from torch import Tensor

from aserve.device.event import DeviceEvent
from aserve.errors import DeviceLost
from aserve.garbage import NoCollection

Replay = Callable[[], None]

_CUDA_ERROR_OUT_OF_MEMORY: Final = 2


class StepDevice(Protocol):
    """Everything is enqueued inside ``scope``, on one stream, from one thread at a time."""

    @property
    def device(self) -> torch.device: ...

    @property
    def side(self) -> torch.cuda.Stream | None:
        """A second stream, for branches of a captured step; None where there is none."""
        ...

    @property
    def num_multiprocessors(self) -> int: ...

    def scope(self) -> AbstractContextManager[object]:
        """Makes the device's stream the thread's current one."""
        ...

    def pinned(self, *size: int, dtype: torch.dtype) -> Tensor:
        """Zeroed host memory, which the device reads and writes in place."""
        ...

    def capture(self, run: Callable[[], None]) -> tuple[Replay, ...]:
        """What launches ``run``'s kernels again: one call for each part that ``run`` cut itself into, in this order.
        They have run before; ``run`` is called once more."""
        ...

    def cut(self) -> None:
        """Called from within what is captured: what follows is a part of its own. Elsewhere it does nothing."""
        ...

    def forget(self) -> None:
        """All replays are gone: what is captured from now on shares nothing with them."""
        ...

    def record(self, *, blocking: bool = False) -> DeviceEvent:
        """The point that the stream has reached now. blocking: ``synchronize`` sleeps rather than spins."""
        ...

    def synchronize(self) -> None:
        """Block until the stream is empty."""
        ...

    def explain(self, error: Exception) -> Exception:
        """DeviceLost if nothing will run any more after ``error``, else the error itself."""
        ...


class CudaDevice:
    """A StepDevice. Graphs share one memory pool: they run one after another, in any order. Another StepDevice's have
    another pool, and may run at the same time.

    priority: -1 goes before 0 where work of two streams is ready.
    """

    def __init__(self, index: int = 0, *, priority: int = 0) -> None:
        self.device = torch.device("cuda", index)
        torch.cuda.set_device(self.device)
        properties = torch.cuda.get_device_properties(self.device)
        self.name = properties.name
        self.num_multiprocessors = properties.multi_processor_count
        self.side: torch.cuda.Stream | None = torch.cuda.Stream(self.device, priority=priority)  # type: ignore[no-untyped-call]
        self._stream = torch.cuda.Stream(self.device, priority=priority)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._capturing: torch.cuda.CUDAGraph | None = None
        self._captured: list[torch.cuda.CUDAGraph] = []

    def scope(self) -> AbstractContextManager[object]:
        # The stream itself, entered by C: torch.cuda.stream() takes ten times as long, 80 us more with cold caches. It
        # may be entered again within, which streams of torch before 2.11 did not allow.
        return self._stream

    def pinned(self, *size: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(size, dtype=dtype, pin_memory=True)

    def capture(self, run: Callable[[], None]) -> tuple[Replay, ...]:
        self._captured = []
        try:
            with NoCollection():  # which may find an older runner's graph, and break this one by its end
                self._begin_graph()
                try:
                    run()
                finally:
                    self._end_graph()
            return tuple(graph.replay for graph in self._captured)
        finally:
            self._captured = []

    def cut(self) -> None:
        if self._capturing is not None:
            self._end_graph()
            self._begin_graph()

    def _begin_graph(self) -> None:
        graph = torch.cuda.CUDAGraph()
        # Not torch.cuda.graph(), which collects garbage and empties caches each time: 50 ms where a capture takes 10.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._capturing = graph

    def _end_graph(self) -> None:
        graph, self._capturing = self._capturing, None
        if graph is not None:  # else a cut could not begin the next one, which is the fault to tell of
            graph.capture_end()
            self._upload(graph)
            self._captured.append(graph)

    def _upload(self, graph: torch.cuda.CUDAGraph) -> None:
        """Put a graph on the device, which takes time and memory and which its first launch would do else. torch has no
        call for it, the driver has."""
        graph_exec, stream = ctypes.c_void_p(graph.raw_cuda_graph_exec()), ctypes.c_void_p(self._stream.cuda_stream)
        code = self._driver.cuGraphUpload(graph_exec, stream)
        if code == _CUDA_ERROR_OUT_OF_MEMORY:
            raise torch.OutOfMemoryError("The device has no memory left for a captured graph.")
        if code:
            raise RuntimeError(f"The driver could not put a captured graph on the device: CUDA error {code}.")

    def forget(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()  # torch refuses one whose graphs have all gone

    def record(self, *, blocking: bool = False) -> DeviceEvent:
        event = torch.cuda.Event(blocking=blocking)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def synchronize(self) -> None:
        self._stream.synchronize()

    def explain(self, error: Exception) -> Exception:
        try:
            self._stream.query()
        except Exception as fault:
            lost = DeviceLost(f"The device is lost: {fault}")
            lost.__cause__ = error
            return lost
        return error

    def free_bytes(self) -> int:
        """Memory that nobody holds, this process's own caches emptied."""
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.device)[0]


_ROW_STRIDES: Final = ((16, 8), (64, 8), (128, 16), (256, 32), (1 << 30, 64))
_TOKEN_STRIDES: Final = ((32, 16), (64, 32), (512, 64), (1024, 128), (2048, 256), (4096, 512), (1 << 30, 1024))
"""Up to so many, steps of so much. Padding costs little below some 300 tokens, where weights are what takes time."""


def row_buckets(max_num_rows: int) -> list[int]:
    """Numbers of decode rows that graphs are made for; the last is ``max_num_rows``."""
    return [*(size for size in (1, 2, 4) if size < max_num_rows), *_buckets(8, max_num_rows, _ROW_STRIDES)]


def token_buckets(max_num_tokens: int) -> list[int]:
    """Numbers of tokens of steps with chunks; the last is ``max_num_tokens``."""
    return list(_buckets(16, max_num_tokens, _TOKEN_STRIDES))


def _buckets(first: int, last: int, strides: tuple[tuple[int, int], ...]) -> Iterator[int]:
    size = first
    for limit, stride in strides:
        while size < min(limit, last):
            yield size
            size += stride
    yield last


def fitting(buckets: list[int], size: int) -> int:
    """The smallest bucket that holds ``size``; they rise."""
    return buckets[bisect_left(buckets, size)]
