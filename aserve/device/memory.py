"""How much memory there is, and how much of it the KV pool gets. Knows nothing of torch."""

import contextlib
import ctypes
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from aserve.errors import ModelError

GIB: Final = 1 << 30

MIN_NUM_BLOCKS: Final = 8
"""Fewer blocks than these cannot hold a conversation; tests run with exactly so many."""

CPU_POOL_SHARE: Final = 0.4
"""Share of what the weights leave that the pool takes on a CPU, whose memory is everybody's."""

CPU_POOL_BYTES_MAX: Final = 4 * GIB
"""The pool's bound on a CPU unless the user names a size."""

USUAL_LEN: Final = 1024
"""Tokens that a sequence usually takes (the median of public traces); a pool for more is touched at start in vain."""

_UNLIMITED: Final = 1 << 60
"""Version 1 of cgroups says "no limit" with a number of pages near 2^63 bytes."""


def _read_int(path: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text())
    return None


def _reclaimable(stat: Path) -> int:
    """Bytes of the page cache that count as used but are given back on demand (both versions name the key alike)."""
    with contextlib.suppress(OSError, ValueError):
        for line in stat.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key in ("inactive_file", "total_inactive_file"):
                return int(value)
    return 0


def _cgroup_folders(root: Path, proc: Path) -> Iterator[tuple[Path, str, str]]:
    """(folder, limit file, usage file) of the process's memory cgroups, from its own up to the mount.

    Inside a container the path of /proc/self/cgroup often lies outside the mount; then only the mount itself counts.
    """
    with contextlib.suppress(OSError):
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                mount, limit, usage = root, "memory.max", "memory.current"
            elif "memory" in controllers.split(","):
                mount, limit, usage = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            else:
                continue
            folder = mount / path.lstrip("/")
            while folder != mount:
                yield folder, limit, usage
                folder = folder.parent
            yield mount, limit, usage


def cgroup_available_bytes(root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> int | None:
    """What the tightest memory cgroup (version 1 or 2) of this process still allows; None without a limit."""
    available = []
    for folder, limit_file, usage_file in _cgroup_folders(root, proc):
        limit, usage = _read_int(folder / limit_file), _read_int(folder / usage_file)
        if limit is not None and usage is not None and limit < _UNLIMITED:
            available.append(max(0, limit - usage + _reclaimable(folder / "memory.stat")))
    return min(available, default=None)


def available_bytes(root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> int:
    """Memory that this process may still take without swapping: the machine's, cut to what its cgroups allow."""
    machine = None
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = (proc / "meminfo").read_text().splitlines()
        machine = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    if machine is None:  # not Linux: half of what is built in
        machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    cgroup = cgroup_available_bytes(root, proc)
    return machine if cgroup is None else min(machine, cgroup)


def resident_bytes(proc: Path = Path("/proc")) -> int:
    """Memory that this process holds now (RSS); 0 where /proc does not say."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int((proc / "self" / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def trim() -> None:
    """Give the allocator's free memory back to the system, where it is glibc's, which keeps what loading took for good.

    After SmolLM2-135M's load 66 MiB in bfloat16, 214 with int8 weights. Takes some milliseconds.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """What is spent before the pool, in bytes. ``available`` is measured before the weights are loaded.

    workspace: activations of the largest step, logits (rows * V * 4) and what the sampler keeps beside them.
    """

    available: int
    weights: int
    workspace: int

    @property
    def rest(self) -> int:
        return self.available - self.weights - self.workspace


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSize:
    """The pool: ``num_blocks`` without the trash block, and the context length that fits it."""

    num_blocks: int
    max_model_len: int


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"


def size_pool(
    budget: MemoryBudget,
    *,
    bytes_per_token: int,
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    num_blocks: int = 0,
    kv_cache_bytes: int = 0,
    share: float = CPU_POOL_SHARE,
    bytes_max: int = CPU_POOL_BYTES_MAX,
) -> PoolSize:
    """Blocks for the KV pool, and ``max_model_len`` cut to what they hold.

    In order of precedence: ``num_blocks`` (at least 8), ``kv_cache_bytes``, else what ``max_num_seqs`` sequences of
    usual or two of full length take, at most ``share`` of the rest and ``bytes_max``. Raises ModelError, saying
    what to lower, when weights and workspace leave too little.
    """
    bytes_per_block = bytes_per_token * block_size
    if num_blocks:
        if num_blocks < MIN_NUM_BLOCKS:
            raise ModelError(
                f"scheduler.num_blocks is {num_blocks}; the KV pool needs at least {MIN_NUM_BLOCKS} blocks."
            )
        blocks, limit = num_blocks, budget.rest
    elif kv_cache_bytes:
        blocks, limit = kv_cache_bytes // bytes_per_block, budget.rest
    else:
        limit = min(int(budget.rest * share), bytes_max)
        full, usual = (-(-length // block_size) for length in (max_model_len, min(max_model_len, USUAL_LEN)))
        blocks = min(limit // bytes_per_block, max(min(max_num_seqs, 2) * full, max_num_seqs * usual, MIN_NUM_BLOCKS))
    needed = max(blocks, MIN_NUM_BLOCKS) * bytes_per_block
    if needed > limit or blocks < MIN_NUM_BLOCKS:
        raise ModelError(
            f"Too little memory: {_gib(budget.available)} are free, the weights take {_gib(budget.weights)} and a step "
            f"{_gib(budget.workspace)}, and a KV pool of {max(blocks, MIN_NUM_BLOCKS)} blocks needs {_gib(needed)}. "
            "Lower scheduler.max_num_seqs, scheduler.max_num_batched_tokens, scheduler.num_blocks or "
            "model.kv_cache_gib, or take a smaller model."
        )
    return PoolSize(num_blocks=blocks, max_model_len=min(max_model_len, blocks * block_size))


def size_device_pool(
    *,
    budget_bytes: int,
    spent_bytes: int,
    graph_bytes: int,
    bytes_per_token: int,
    block_size: int,
    max_model_len: int,
    num_blocks: int = 0,
    kv_cache_bytes: int = 0,
) -> PoolSize:
    """Blocks for a GPU's KV pool, whose memory is nobody else's: all that is left, unless a number or a size is given.

    budget_bytes: what the process may hold. spent_bytes: what it holds now, measured: weights, workspace, libraries.
    graph_bytes: what the graphs that are still to be made will take. Raises ModelError, saying what to lower.
    """
    bytes_per_block = bytes_per_token * block_size
    left = budget_bytes - spent_bytes - graph_bytes
    if num_blocks and num_blocks < MIN_NUM_BLOCKS:
        raise ModelError(f"scheduler.num_blocks is {num_blocks}; the KV pool needs at least {MIN_NUM_BLOCKS} blocks.")
    blocks = num_blocks or (kv_cache_bytes or max(left, 0)) // bytes_per_block
    needed = (max(blocks, MIN_NUM_BLOCKS) + 1) * bytes_per_block  # with the trash block
    if not num_blocks and not kv_cache_bytes:
        blocks -= 1
    if blocks < MIN_NUM_BLOCKS or ((num_blocks or kv_cache_bytes) and needed > left):
        raise ModelError(
            f"Too little device memory: aserve may fill {_gib(budget_bytes)}, weights and workspace take "
            f"{_gib(spent_bytes)}, CUDA graphs {_gib(graph_bytes)}, and a KV pool of {max(blocks, MIN_NUM_BLOCKS)} "
            f"blocks needs {_gib(needed)}. Lower scheduler.max_num_batched_tokens, scheduler.max_num_seqs, "
            "scheduler.max_model_len, scheduler.num_blocks or model.kv_cache_gib, raise model.gpu_memory_utilization, "
            "or take a smaller model."
        )
    return PoolSize(num_blocks=blocks, max_model_len=min(max_model_len, blocks * block_size))
