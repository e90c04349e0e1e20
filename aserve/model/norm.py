"""Root mean square norm, by the operators that cost least on a CPU.

Shape suffixes: T tokens, C hidden size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

_FEW_ROWS = 32


class RmsNorm:
    """y_TC = x_TC / sqrt(mean(x_TC^2) + eps) * gain_C, computed in float32 and rounded once.

    torch's own is made of ten operators here: 15 µs for one row of 576 in bfloat16, 565 for 512 rows. A row with its
    negative behind it has no mean, so that the layer norm, which is one operator, is what is wanted: 5 µs for one row.
    For 512 rows the norms and two products in float32 take 290. float32 stays with torch's: there a row must not
    depend on how many others there are.
    """

    def __init__(self, gain_C: Tensor, eps: float) -> None:
        self._gain_C = gain_C
        self._eps = eps
        self._shape = (len(gain_C),)
        self._is_plain = gain_C.dtype == torch.float32 or gain_C.device.type != "cpu"
        if not self._is_plain:
            self._gain_2C = torch.cat((gain_C, torch.zeros_like(gain_C)))
            self._wide_gain_C = gain_C.float()

    def __call__(self, x_TC: Tensor) -> Tensor:
        if self._is_plain:
            return F.rms_norm(x_TC, self._shape, self._gain_C, self._eps)
        size = self._shape[0]
        if len(x_TC) <= _FEW_ROWS:
            both_T2C = torch.cat((x_TC, x_TC.neg()), 1)
            return F.layer_norm(both_T2C, (2 * size,), self._gain_2C, None, self._eps)[:, :size]
        wide_TC = x_TC.float()
        norm_T1 = torch.linalg.vector_norm(wide_TC, dim=1, keepdim=True)
        scale_T1 = norm_T1.square_().div_(size).add_(self._eps).rsqrt_()
        return wide_TC.mul_(scale_T1).mul_(self._wide_gain_C).to(x_TC.dtype)

    @property
    def num_bytes(self) -> int:
        return self._gain_C.nbytes
