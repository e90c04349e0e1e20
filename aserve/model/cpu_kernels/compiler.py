"""How these kernels are compiled, and the few scalars that all of them need.

Numba rather than a compiled extension: a wheel that works wherever Python does, kernels that a reader can read, and
machine code for the processor at hand. The first start after an installation compiles for some seconds; results are
kept in the user's cache folder, by a digest of this package's source, since numba itself looks at single files only.
"""

import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import llvmlite.binding
import numpy as np


def _use_widest_vectors() -> None:
    """LLVM keeps to 256 bits on many processors that have 512; reading int8 weights is a third faster with all."""
    if "NUMBA_CPU_FEATURES" not in os.environ and "NUMBA_CPU_NAME" not in os.environ:
        features = llvmlite.binding.get_host_cpu_features().flatten()
        os.environ["NUMBA_CPU_NAME"] = llvmlite.binding.get_host_cpu_name()
        os.environ["NUMBA_CPU_FEATURES"] = f"{features},-prefer-256-bit"


_use_widest_vectors()  # numba reads its environment when it is imported

import numba  # noqa: E402
from numba import types  # noqa: E402
from numba.extending import overload  # noqa: E402

FAST_MATH: Final = {"reassoc", "contract", "arcp", "nsz"}
"""Sums in any order, fused products; NaN and infinity stay what they are, lest an invalid row pass as valid."""

_UINT16, _ONE, _HALF_LESS = np.uint32(16), np.uint32(1), np.uint32(0x7FFF)


def _cache_folder() -> str:
    source = b"".join(file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py")))
    try:
        home = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    except RuntimeError:  # a user without a home
        home = tempfile.gettempdir()
    return str(Path(home, "aserve", "kernels", sha256(source).hexdigest()[:12]))


_CACHE_FOLDER: Final = _cache_folder()

HAS_COMPILED_BEFORE: Final = Path(_CACHE_FOLDER).exists()
"""Whether an earlier process of this user kept kernels of this source."""


def kernel(function: Callable[..., Any]) -> Any:
    """One thread's work, for kernels to call; others may run Python beside it.

    Not kept by itself: it is a part of those that call it. Two processes that add to one function's index at a time can
    mix up their entries, and these are what all of them would add to.
    """
    return _compiled(function)


def parallel_kernel(function: Callable[..., Any]) -> Any:
    """With ``numba.prange`` over as many threads as ``numba.set_num_threads`` gave the calling one. Kept on disk."""
    others = numba.config.CACHE_DIR  # of whoever else compiles in this process
    numba.config.CACHE_DIR = others or _CACHE_FOLDER
    try:
        dispatcher = _compiled(function, parallel=True)
        with suppress(RuntimeError):  # nowhere to write: each start compiles
            dispatcher.enable_caching()
    finally:
        numba.config.CACHE_DIR = others
    return dispatcher


def _compiled(function: Callable[..., Any], **options: bool) -> Any:
    return numba.njit(fastmath=FAST_MATH, nogil=True, error_model="numpy", **options)(function)


def inlined(function: Callable[..., Any]) -> Any:
    """Written into the caller before types are known, so that its constants are the caller's."""
    return numba.njit(inline="always")(function)


@kernel
def widen(bits: Any) -> Any:
    """bfloat16, as uint16, to float32."""
    return np.uint32(np.uint32(bits) << _UINT16).view(np.float32)


@kernel
def narrow(value: Any) -> Any:
    """float32 to bfloat16 as uint16, to the nearest, halves to even."""
    bits = np.float32(value).view(np.uint32)
    return np.uint16((bits + _HALF_LESS + ((bits >> _UINT16) & _ONE)) >> _UINT16)


def as_float(value: Any) -> float:
    """An element of a cache or an activation: float32, or bfloat16 as uint16."""
    raise NotImplementedError("only in kernels")


@overload(as_float, strict=False)
def _as_float(value: Any) -> Any:
    if value == types.uint16:
        return lambda value: widen(value)
    return lambda value: value


def put(array: Any, index: int, value: float) -> None:
    """array[index] = value, rounded to the array's type."""
    raise NotImplementedError("only in kernels")


@overload(put, strict=False)
def _put(array: Any, index: Any, value: Any) -> Any:
    if array.dtype == types.uint16:

        def put_bfloat16(array: Any, index: Any, value: Any) -> None:
            array[index] = narrow(value)

        return put_bfloat16

    def put_float32(array: Any, index: Any, value: Any) -> None:
        array[index] = value

    return put_float32


@kernel
def exp(value: Any) -> Any:
    """e ** value for value <= 0, in operations that vectorise; below -87 it is about 1e-38.

    Its relative error is below 3e-7 + 8e-8 * |value|.

    2 ** fraction by a minimax polynomial, 2 ** whole by the exponent's bits.
    """
    turns = max(np.float32(value), np.float32(-87.0)) * np.float32(1.4426950408889634)
    whole = np.floor(turns + np.float32(0.5))
    f = turns - whole
    power = np.float32(1.5403530393381609e-4)
    power = power * f + np.float32(1.3333558146428443e-3)
    power = power * f + np.float32(9.6181291076284772e-3)
    power = power * f + np.float32(5.5504108664821580e-2)
    power = power * f + np.float32(2.4022650695910071e-1)
    power = power * f + np.float32(6.9314718055994531e-1)
    power = power * f + np.float32(1.0)
    scale = np.uint32((np.int32(whole) + np.int32(127)) << np.int32(23)).view(np.float32)
    return power * scale
