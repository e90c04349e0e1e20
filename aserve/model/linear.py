"""Matrix products with fixed weights, in the layout that is fastest for their type.

Shape suffixes: M rows, K inputs, N outputs.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Linear(Protocol):
    """y_MN = x_MK @ weight_NK^T + bias_N."""

    def __call__(self, x_MK: Tensor) -> Tensor: ...

    @property
    def num_bytes(self) -> int: ...


class PlainLinear:
    """The weight as it is: float32, where oneDNN's packed layout gains at 4 to 32 rows only and loses at one."""

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None = None) -> None:
        self.weight_NK = weight_NK
        self.bias_N = bias_N

    def __call__(self, x_MK: Tensor) -> Tensor:
        return F.linear(x_MK, self.weight_NK, self.bias_N)

    @property
    def num_bytes(self) -> int:
        return self.weight_NK.nbytes + (0 if self.bias_N is None else self.bias_N.nbytes)


class PackedLinear:
    """The weight in oneDNN's own blocked layout, so that it is not laid out anew at each call.

    SmolLM2-135M's matrices together, bfloat16, 2 threads with AMX: 13.5 ms against 20 at 1 to 32 rows, equal at 512.
    The plain copy is not kept.
    """

    PACKED_FOR_NUM_ROWS = 16  # the layout for 16 rows was as good as any other from 1 to 512

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None = None) -> None:
        self._packed: Any = torch.ops.mkldnn._reorder_linear_weight(weight_NK.contiguous(), self.PACKED_FOR_NUM_ROWS)
        self._bias_N = bias_N
        self._multiply: Any = torch.ops.mkldnn._linear_pointwise.default
        self.num_bytes = weight_NK.nbytes + (0 if bias_N is None else bias_N.nbytes)

    def __call__(self, x_MK: Tensor) -> Tensor:
        y_MN: Tensor = self._multiply(x_MK, self._packed, self._bias_N, "none", [], "")
        return y_MN

    @staticmethod
    def is_available(device: torch.device) -> bool:
        return device.type == "cpu" and hasattr(torch.ops.mkldnn, "_linear_pointwise")

    @staticmethod
    def is_supported(dtype: torch.dtype, device: torch.device) -> bool:
        """Whether this is the fastest layout for the type: float32 gains at 4 to 32 rows only, and loses at one."""
        return (
            PackedLinear.is_available(device)
            and dtype == torch.bfloat16
            and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        )


MakeLinear = Callable[[Tensor, Tensor | None], Linear]
"""From weight_NK and bias_N."""


def make_linear(weight_NK: Tensor, bias_N: Tensor | None = None) -> Linear:
    """The fastest that this weight's type and device have, to the type's own precision."""
    if PackedLinear.is_supported(weight_NK.dtype, weight_NK.device):
        return PackedLinear(weight_NK, bias_N)
    return PlainLinear(weight_NK, bias_N)
