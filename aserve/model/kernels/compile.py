"""Kernels compiled before they are launched, many at once; Triton keeps them on disk for the next start.

What a step launches is found by running it with a hook in Triton's place, which takes down each kernel's signature and
lets nothing be compiled or launched. Each missing kernel is then compiled by another process.
"""

import importlib
import multiprocessing
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any, Final

from triton import knobs

_PROCESSES_MAX: Final = 14
_WORTH_PROCESSES: Final = 4
"""Fewer kernels are compiled here: a process takes seconds to load torch."""


@dataclass(frozen=True, slots=True)
class KernelVariant:
    """One kernel, specialised: where its function is, and Triton's own description of the rest."""

    module: str
    name: str
    specialization: str


def variants_of(run: Callable[[], None]) -> list[KernelVariant]:
    """The kernels that ``run`` launches and that this process has not loaded yet, each once. Launches none of those."""
    found: dict[KernelVariant, None] = {}

    def take_down(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        found[KernelVariant(fn.module, fn.name, compile["specialization_data"])] = None
        return True  # "do not compile": the launch is left out too

    previous, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, take_down
    try:
        run()
    finally:
        knobs.runtime.jit_cache_hook = previous
    return list(found)


def compile_variants(
    variants: Iterable[KernelVariant], progress: Callable[[int, int], None], *, num_processes: int = 0
) -> None:
    """Compile into Triton's cache on disk, those that are there already included, which takes a few ms each.

    progress(done, of): called after each. Raises what a compiler raised.
    """
    todo = list(variants)
    num_processes = min(num_processes or _usable_cores(), len(todo), _PROCESSES_MAX)
    if len(todo) < _WORTH_PROCESSES or num_processes < 2:
        for done, variant in enumerate(todo, 1):
            _compile(variant)
            progress(done, len(todo))
        return
    # Not forked: a CUDA context does not survive it.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_processes, mp_context=context) as pool:
        for done, future in enumerate(as_completed([pool.submit(_compile, variant) for variant in todo]), 1):
            future.result()
            progress(done, len(todo))


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _compile(variant: KernelVariant) -> None:
    kernel: Any = importlib.import_module(variant.module)
    for part in variant.name.split("."):
        kernel = getattr(kernel, part)
    kernel.preload(variant.specialization)
