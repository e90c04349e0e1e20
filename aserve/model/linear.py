"""Matrix products with fixed weights, in the layout that is fastest for their type. The seam for quantised weights.

Shape suffixes: M rows, K inputs, N outputs.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from aserve.errors import ModelError


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


class Int8Linear:
    """Weights in int8 with a scale for each output, which at few rows are half as many bytes to read.

    Activations go in as two int8 parts of 14 bits together, with a scale for each row, as rows of one product: weights
    are read once for both, so the second part costs nothing as long as reading is what takes the time. One part of 8
    bits loses 1.6 % of SmolLM2-135M's likelihood, two parts 0.1 %, which is what rounding the weights loses.

    More rows take a bfloat16 product with the same rounded weights, so that nothing but rounding depends on the batch.

    The product alone of 3,072 x 576, cold, one thread: 0.23 ms at 1 to 16 rows against bfloat16's 0.40, and 0.32 to
    0.70 at 1 to 8 of ``torch._weight_int8pack_mm``, whose time grows with the rows (1.9 ms at 32).
    """

    ROWS_MAX = 8
    ELEMENTS_MIN = 1 << 20
    """The call and the dozen small operators around it cost 100 µs: what reading 0.9 MB less saves."""

    _PARTS_MAX = (126.0, 127.0)
    """The first part's bound leaves room for rounding; the second is of what the first leaves, below one."""

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None = None) -> None:
        weight_NK = weight_NK.float()
        self._scale_N = weight_NK.abs().amax(1).clamp_min_(1e-12) / 127
        int8_NK = (weight_NK / self._scale_N.unsqueeze(1)).round_().to(torch.int8)
        self._zero_N = torch.zeros(len(weight_NK), dtype=torch.int32)
        self._packed: Any = torch.ops.onednn.qlinear_prepack(int8_NK, [2 * self.ROWS_MAX, weight_NK.shape[1]])
        self._multiply: Any = torch.ops.onednn.qlinear_pointwise.default
        self._bias_N = bias_N
        rounded_NK = (int8_NK.float() * self._scale_N.unsqueeze(1)).to(torch.bfloat16)
        self._many_rows = PackedLinear(rounded_NK, bias_N)
        self.num_bytes = self._many_rows.num_bytes + int8_NK.nbytes + self._scale_N.nbytes + self._zero_N.nbytes

    def __call__(self, x_MK: Tensor) -> Tensor:
        num_rows = len(x_MK)
        if num_rows > self.ROWS_MAX:
            return self._many_rows(x_MK)
        first, second = self._PARTS_MAX
        scale_M1 = x_MK.abs().amax(1, keepdim=True).float().div_(first).clamp_min_(1e-12)
        rest_MK = x_MK / scale_M1
        parts_2MK = torch.empty(2, *x_MK.shape, dtype=torch.int8)
        part_MK, second_MK = parts_2MK.unbind(0)
        part_MK.copy_(rest_MK)  # towards zero
        second_MK.copy_(rest_MK.sub_(part_MK).mul_(second))
        y_2MN = self._multiply(
            parts_2MK.view(2 * num_rows, -1),
            1.0,
            0,
            self._packed,
            self._scale_N,
            self._zero_N,
            None,
            1.0,
            0,
            torch.float32,
            "none",
            [],
            "",
        )
        y_MN = torch.add(y_2MN[:num_rows], y_2MN[num_rows:], alpha=1 / second).mul_(scale_M1).to(x_MK.dtype)
        return y_MN if self._bias_N is None else y_MN.add_(self._bias_N)

    @staticmethod
    def is_supported(dtype: torch.dtype, device: torch.device) -> bool:
        return PackedLinear.is_supported(dtype, device) and hasattr(torch.ops.onednn, "qlinear_pointwise")


MakeLinear = Callable[[Tensor, Tensor | None], Linear]
"""From weight_NK and bias_N."""


def make_linear(weight_NK: Tensor, bias_N: Tensor | None = None) -> Linear:
    """The fastest that this weight's type and device have, to the type's own precision."""
    if PackedLinear.is_supported(weight_NK.dtype, weight_NK.device):
        return PackedLinear(weight_NK, bias_N)
    return PlainLinear(weight_NK, bias_N)


def make_int8_linear(weight_NK: Tensor, bias_N: Tensor | None = None) -> Linear:
    """Small matrices stay as they are. Raises ModelError where there are no kernels for it."""
    if not Int8Linear.is_supported(weight_NK.dtype, weight_NK.device):
        raise ModelError("model.quantization int8 needs bfloat16 weights and a CPU that multiplies bfloat16 natively.")
    return (
        make_linear(weight_NK, bias_N) if weight_NK.numel() < Int8Linear.ELEMENTS_MIN else Int8Linear(weight_NK, bias_N)
    )
