"""Kernels compiled before they are launched, many at once; Triton keeps them on disk for the next start.

What a step launches is found by running it with a hook in Triton's place, which takes down each kernel's signature and
lets nothing be compiled or launched. The kernels are then compiled by other processes; a file beside them says so to
the next start.
"""

import hashlib
import importlib
import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import triton
from triton import knobs

_PROCESSES_MAX: Final = 14
_WORTH_PROCESSES: Final = 4
"""Fewer kernels are compiled here: a process takes seconds to load torch."""


@dataclass(frozen=True, slots=True)
class KernelVariant:
    """One kernel, specialised: where its function is, its source's hash, and Triton's own description of the rest."""

    module: str
    name: str
    source: str
    specialization: str


def variants_of(run: Callable[[], None]) -> list[KernelVariant]:
    """The kernels that ``run`` launches and that this process has not loaded yet, each once. Launches none of those."""
    found: dict[KernelVariant, None] = {}

    def take_down(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        found[KernelVariant(fn.module, fn.name, fn.jit_function.cache_key, compile["specialization_data"])] = None
        return True  # "do not compile": the launch is left out too

    previous, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, take_down
    try:
        run()
    finally:
        knobs.runtime.jit_cache_hook = previous
    return list(found)


def compile_variants(
    variants: Sequence[KernelVariant], progress: Callable[[int, int], None], *, num_processes: int = 0
) -> None:
    """Compile into Triton's cache on disk whatever an earlier call has not. Raises what a compiler raised.

    progress(done, of): called after each.
    """
    done_file = _done_file(variants)
    if done_file.exists():
        return
    num_processes = min(num_processes or _usable_cores(), len(variants), _PROCESSES_MAX)
    if len(variants) < _WORTH_PROCESSES or num_processes < 2:
        for done, variant in enumerate(variants, 1):
            _compile(variant)
            progress(done, len(variants))
    else:
        # Not forked: a CUDA context does not survive it.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(num_processes, mp_context=context) as pool:
            for done, future in enumerate(as_completed([pool.submit(_compile, each) for each in variants]), 1):
                future.result()
                progress(done, len(variants))
    done_file.parent.mkdir(parents=True, exist_ok=True)
    done_file.touch()


def _done_file(variants: Sequence[KernelVariant]) -> Path:
    """Is there if all of these were compiled for this kind of device by this Triton. (A kernel that somebody removed
    from the cache since is compiled when it is launched first.)"""
    facts = (triton.__version__, torch.cuda.get_device_capability(), sorted(map(repr, variants)))
    return Path(knobs.cache.dir) / f"aserve-{hashlib.sha256(repr(facts).encode()).hexdigest()[:32]}.done"


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _compile(variant: KernelVariant) -> None:
    kernel: Any = importlib.import_module(variant.module)
    for part in variant.name.split("."):
        kernel = getattr(kernel, part)
    kernel.preload(variant.specialization)
