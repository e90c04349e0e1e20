"""The KV cache's memory: which block belongs to whom is the ledger's business, never this module's.

Shape suffixes: N blocks (trash block included), P tokens of a block, H kv heads, D head_dim, T tokens of the step.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from aserve.model.batch import KVShape


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTensors:
    """One tensor a layer, [2, H, N, P, D], K first, and the same memory in the two shapes that each step needs.

    blocks: [2 * H * N, P * D], a row a head's block, row (k_or_v * H + head) * N + block. slots: [2, H, N * P, D].
    Heads come before blocks, so that blocks selected along N lie behind one another as [H, S * B * P, D]: a gathered
    batch of sequences is then one batched matmul's operand without a further copy.
    """

    layers: tuple[Tensor, ...]
    blocks: tuple[Tensor, ...]
    slots: tuple[Tensor, ...]
    shape: KVShape
    num_blocks: int
    block_size: int

    @classmethod
    def allocate(
        cls, shape: KVShape, *, num_blocks: int, block_size: int, device: torch.device | str = "cpu"
    ) -> "KVTensors":
        """Memory for blocks 0 .. num_blocks: block 0 is the trash block, the ledger hands out the others.

        Zeroed: pages are touched here rather than in the first requests.
        """
        size = (2, shape.num_kv_heads, num_blocks + 1, block_size, shape.head_dim)
        layers = tuple(torch.zeros(size, dtype=shape.dtype, device=device) for _ in range(shape.num_layers))
        return cls(
            layers=layers,
            blocks=tuple(layer.view(-1, block_size * shape.head_dim) for layer in layers),
            slots=tuple(layer.view(2, shape.num_kv_heads, -1, shape.head_dim) for layer in layers),
            shape=shape,
            num_blocks=num_blocks,
            block_size=block_size,
        )

    @property
    def num_bytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    def write(self, layer: int, slot_mapping_T: Tensor, kv_T2HD: Tensor) -> None:
        """Puts each token's K and V where the mapping says; where several share a slot of block 0, any of them wins."""
        self.slots[layer].index_copy_(2, slot_mapping_T, kv_T2HD.permute(1, 2, 0, 3))

    def poison(self, blocks: list[int] | None = None) -> None:
        """Debugging: fill the blocks (None: all of them) with NaN, so that a stale read shows as an invalid row."""
        for layer in self.layers:
            if blocks is None:
                layer.fill_(float("nan"))
            else:
                layer[:, :, blocks] = float("nan")
