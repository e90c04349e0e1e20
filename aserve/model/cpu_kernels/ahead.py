"""Compiles the kernels of larger steps in another process while this one compiles that of few rows, the slowest.

    python -m aserve.model.cpu_kernels.ahead GROUP HEAD_DIM BLOCK_SIZE

A process, since numba compiles one function at a time in each. They meet in the cache folder; what is not there in time
is compiled twice, and nobody waits for the other.

On 2 cores SmolLM2-135M starts in 17.8 s with an empty cache, in 21.5 without this.
"""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from threading import Thread

import numpy as np

import aserve
from aserve.model.cpu_kernels.attention import make_attend
from aserve.model.cpu_kernels.elementwise import add_rms_norm, rotate_and_cache, silu_mul


def begin(group: int, head_dim: int, block_size: int) -> None:
    """Start the process and return. Nothing is lost where it cannot start or fails."""
    arguments = [str(number) for number in (group, head_dim, block_size)]
    Thread(target=_run, args=(arguments,), name="aserve-compile", daemon=True).start()


def _run(arguments: list[str]) -> None:
    root = str(Path(aserve.__file__).parents[1])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    with suppress(OSError):
        subprocess.run(
            [sys.executable, "-m", __name__, *arguments],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
        )


def compile_larger_steps(group: int, head_dim: int, block_size: int) -> None:
    """Call each kernel with arguments of the types that ``CpuDecoder`` gives it, and no tokens."""
    number, num_threads = np.float32(1), 1
    q_TAD, x_TC = np.empty((0, group, head_dim), np.uint16), np.empty((0, 16), np.uint16)
    memory = np.empty((1, 1, 2, 1, block_size * head_dim), np.uint16)
    table_TB, context_T, slots_T = np.empty((0, 1), np.int32), np.empty(0, np.int32), np.empty(0, np.int64)
    angles_TF, gains_MD = np.empty((0, head_dim // 2), np.float32), np.empty((0, head_dim), np.float32)
    # From the end of a layer to its beginning: a step that does not find the first ones yet compiles those.
    silu_mul(x_TC, num_threads, x_TC)
    make_attend(group, head_dim, block_size)(q_TAD, memory, table_TB, context_T, 0, 0, number, num_threads, q_TAD)
    rotate_and_cache(
        x_TC, angles_TF, angles_TF, gains_MD, number, np.bool_(True), slots_T, memory, 0, block_size, num_threads
    )
    add_rms_norm(x_TC, x_TC, gains_MD.ravel(), number, num_threads, x_TC)


if __name__ == "__main__":
    compile_larger_steps(*map(int, sys.argv[1:]))
