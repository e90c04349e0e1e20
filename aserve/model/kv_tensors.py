"""The KV cache's memory: which block belongs to whom is the ledger's business, never this module's.

Shape suffixes: N blocks (trash block included), P tokens of a block, H kv heads, D head_dim, T tokens of the step.
"""

import contextlib
import mmap
import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from aserve.model.batch import KVShape

_HUGE_PAGE_BYTES = 2 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTensors:
    """K and V of all layers, in one of three orders, ``shape.layout``.

    heads: a layer is [2, H, N, P, D], K first. Blocks selected along N lie behind one another as [H, B * P, D]: what is
    gathered is a matmul's operand without a further copy.

    rows: a block's K and V of all layers lie together, [N, layers, 2, H, P * D], and keys lie in it as [D, P]: what
    ``cpu_kernels`` reads of a block is one stretch of memory, a vector's width at a time. Memory is touched as blocks
    are handed out, in huge pages where the system has them.

    blocks: a layer is [2, H, N, P, D] by its strides, and in memory [N, 2, H, P, D]: what a GPU reads of one block
    lies in one page of its memory.

    keys, values: a layer's as [N, P, H, D], strided; written through.
    blocks: a layer's rows of P * D elements, a head's K or V of one block; ``block_rows`` says which. Not for blocks.
    layers: the tensors themselves, not for rows.
    """

    layers: tuple[Tensor, ...]
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    blocks: tuple[Tensor, ...]
    memory: Tensor
    shape: KVShape
    num_blocks: int
    block_size: int

    @classmethod
    def allocate(
        cls, shape: KVShape, *, num_blocks: int, block_size: int, device: torch.device | str = "cpu"
    ) -> "KVTensors":
        """Memory for blocks 0 .. num_blocks: block 0 is the trash block, the ledger hands out the others.

        Zeroed. On the CPU the system does so page by page when they are first touched: the pool takes no time at start,
        and resident memory grows with use.
        """
        heads, layers, dim = shape.num_kv_heads, shape.num_layers, shape.head_dim
        num_elements = (num_blocks + 1) * block_size * heads * dim * 2 * layers
        memory = _zeros(num_elements, shape.dtype, torch.device(device), huge_pages=shape.layout == "rows")
        if shape.layout == "heads":
            layers_2HNPD = memory.view(layers, 2, heads, num_blocks + 1, block_size, dim).unbind(0)
            return cls(
                layers=layers_2HNPD,
                keys=tuple(layer[0].permute(1, 2, 0, 3) for layer in layers_2HNPD),
                values=tuple(layer[1].permute(1, 2, 0, 3) for layer in layers_2HNPD),
                blocks=tuple(layer.view(-1, block_size * dim) for layer in layers_2HNPD),
                memory=memory,
                shape=shape,
                num_blocks=num_blocks,
                block_size=block_size,
            )
        if shape.layout == "blocks":
            layers_N2HPD = memory.view(layers, num_blocks + 1, 2, heads, block_size, dim).unbind(0)
            layers_2HNPD = tuple(layer.permute(1, 2, 0, 3, 4) for layer in layers_N2HPD)
            return cls(
                layers=layers_2HNPD,
                keys=tuple(layer[0].permute(1, 2, 0, 3) for layer in layers_2HNPD),
                values=tuple(layer[1].permute(1, 2, 0, 3) for layer in layers_2HNPD),
                blocks=(),
                memory=memory,
                shape=shape,
                num_blocks=num_blocks,
                block_size=block_size,
            )
        per_head = (num_blocks + 1, heads)
        by_head = memory.view(num_blocks + 1, layers, 2, heads, block_size * dim)
        return cls(
            layers=(),
            keys=tuple(by_head[:, i, 0].view(*per_head, dim, block_size).permute(0, 3, 1, 2) for i in range(layers)),
            values=tuple(by_head[:, i, 1].view(*per_head, block_size, dim).permute(0, 2, 1, 3) for i in range(layers)),
            blocks=tuple(memory.view(-1, block_size * dim)[i * 2 * heads :] for i in range(layers)),
            memory=memory,
            shape=shape,
            num_blocks=num_blocks,
            block_size=block_size,
        )

    @property
    def num_bytes(self) -> int:
        return self.memory.nbytes

    def slots(self, slot_mapping_T: Tensor) -> tuple[Tensor, Tensor]:
        """What ``put`` takes, the same for all layers of a step: blocks, and places in them."""
        return slot_mapping_T // self.block_size, slot_mapping_T % self.block_size

    def put(self, layer: int, slots: tuple[Tensor, Tensor], k_THD: Tensor, v_THD: Tensor) -> None:
        """Each token's K and V into its slot; where several share one of block 0, any of them wins."""
        self.keys[layer].index_put_(slots, k_THD)
        self.values[layer].index_put_(slots, v_THD)

    def write(self, layer: int, slot_mapping_T: Tensor, kv_T2HD: Tensor) -> None:
        """``put`` for a single layer."""
        self.put(layer, self.slots(slot_mapping_T), kv_T2HD[:, 0], kv_T2HD[:, 1])

    def block_rows(self, blocks: Tensor) -> Tensor:
        """int64 [2 * H, ...]: where ``blocks[layer]`` holds these blocks' K of each head, then their V."""
        num_rows = 2 * self.shape.num_kv_heads
        row = torch.arange(num_rows, device=blocks.device).view(-1, *[1] * blocks.dim())
        if self.shape.layout == "heads":
            return row * (self.num_blocks + 1) + blocks
        return blocks * (num_rows * self.shape.num_layers) + row

    def poison(self, blocks: list[int] | None = None) -> None:
        """Debugging: fill the blocks (None: all of them) with NaN, so that a stale read shows as an invalid row."""
        if blocks is None:
            self.memory.fill_(float("nan"))
            return
        for part in (*self.keys, *self.values):
            part[blocks] = float("nan")


def _zeros(num_elements: int, dtype: torch.dtype, device: torch.device, *, huge_pages: bool) -> Tensor:
    """torch's own zeros would touch every page."""
    if device.type != "cpu":
        return torch.zeros(num_elements, dtype=dtype, device=device)
    num_bytes = num_elements * dtype.itemsize
    # Shared memory, which is what mmap makes unasked, has no huge pages on most systems.
    flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if sys.platform != "win32" else {}
    pages = mmap.mmap(-1, num_bytes + _HUGE_PAGE_BYTES, **flags)
    if huge_pages and sys.platform == "linux":
        with contextlib.suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(pages, dtype=torch.uint8)  # which keeps the mapping
    start = -memory.data_ptr() % _HUGE_PAGE_BYTES
    return memory[start : start + num_bytes].view(dtype)
