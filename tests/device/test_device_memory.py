"""Free memory under cgroups of both versions, and the size of the KV pool."""

import ctypes
from pathlib import Path

import pytest

from aserve.device.memory import (
    GIB,
    MemoryBudget,
    PoolSize,
    available_bytes,
    cgroup_available_bytes,
    resident_bytes,
    size_device_pool,
    size_pool,
    trim,
)
from aserve.errors import ModelError


def machine(tmp_path: Path, *, cgroup: str, free_gib: float = 16, files: dict[str, str]) -> tuple[Path, Path]:
    """The roots of a made-up /sys/fs/cgroup and /proc."""
    root, proc = tmp_path / "cgroup", tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(cgroup)
    (proc / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable: {int(free_gib * GIB) // 1024} kB\n")
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root, proc


def test_version_2_counts_the_limit_less_what_cannot_be_reclaimed(tmp_path: Path) -> None:
    """The page cache that the kernel would give back is free memory."""
    root, proc = machine(
        tmp_path,
        cgroup="0::/app\n",
        files={
            "app/memory.max": f"{4 * GIB}\n",
            "app/memory.current": f"{3 * GIB}\n",
            "app/memory.stat": f"anon {GIB}\ninactive_file {2 * GIB}\n",
        },
    )
    assert available_bytes(root, proc) == 3 * GIB


def test_version_1_takes_the_tightest_of_the_nested_groups(tmp_path: Path) -> None:
    """A parent's limit holds for its children."""
    root, proc = machine(
        tmp_path,
        cgroup="5:cpu:/other\n4:memory:/outer/inner\n0::/\n",
        files={
            "memory/outer/inner/memory.limit_in_bytes": "9223372036854771712",
            "memory/outer/inner/memory.usage_in_bytes": f"{GIB}",
            "memory/outer/memory.limit_in_bytes": f"{3 * GIB}",
            "memory/outer/memory.usage_in_bytes": f"{GIB}",
        },
    )
    assert available_bytes(root, proc) == 2 * GIB


def test_a_container_sees_its_own_limit_at_the_mount(tmp_path: Path) -> None:
    """The path of /proc/self/cgroup may not exist inside the container."""
    files = {"memory.max": f"{2 * GIB}", "memory.current": f"{GIB // 2}"}
    root, proc = machine(tmp_path, cgroup="0::/kubepods/pod1/abc\n", files=files)
    assert cgroup_available_bytes(root, proc) == 2 * GIB - GIB // 2


@pytest.mark.parametrize("files", [{}, {"memory.max": "max", "memory.current": "1"}])
def test_without_a_limit_the_machine_counts(tmp_path: Path, files: dict[str, str]) -> None:
    """No cgroup files, or no limit in them."""
    root, proc = machine(tmp_path, cgroup="0::/\n", free_gib=7, files=files)
    assert (cgroup_available_bytes(root, proc), available_bytes(root, proc)) == (None, 7 * GIB)


def test_this_machine_has_memory() -> None:
    """The real files are read too."""
    assert available_bytes() > 0
    assert resident_bytes() > 1 << 20


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="not glibc")
def test_freed_memory_goes_back_to_the_system() -> None:
    """Small pieces that the allocator would keep, since the newest of them is still in use."""
    pieces = [bytearray(64 << 10) for _ in range(2000)]
    last = bytearray(64 << 10)
    full = resident_bytes()
    del pieces
    trim()
    assert resident_bytes() < full - (100 << 20)
    assert len(last) == 64 << 10


def budget(available_gib: float = 8, weights_gib: float = 1) -> MemoryBudget:
    return MemoryBudget(available=int(available_gib * GIB), weights=int(weights_gib * GIB), workspace=GIB)


def pool(budget: MemoryBudget, **changes: int) -> tuple[int, int]:
    arguments = {"bytes_per_token": 1 << 16, "block_size": 16, "max_model_len": 8192, "max_num_seqs": 64} | changes
    size = size_pool(budget, **arguments)
    return size.num_blocks, size.max_model_len


def test_the_pool_takes_a_bounded_share_of_the_rest() -> None:
    """Two fifths of what weights and workspace leave, at most 4 GiB."""
    assert pool(budget(available_gib=7)) == (int(0.4 * 5 * 1024), 8192)
    assert pool(budget(available_gib=100), max_num_seqs=1000) == (4 * 1024, 8192)


@pytest.mark.parametrize(
    ("max_num_seqs", "max_model_len", "num_blocks"),
    [(4, 100, 4 * 7), (32, 8192, 32 * 64), (4, 8192, 2 * 512), (1, 20, 8)],
)
def test_the_pool_is_no_larger_than_sequences_usually_use(
    max_num_seqs: int, max_model_len: int, num_blocks: int
) -> None:
    """Each of them short, each of usual length, two of full length, or the least pool."""
    assert pool(budget(100), max_num_seqs=max_num_seqs, max_model_len=max_model_len)[0] == num_blocks


def test_the_context_is_cut_to_the_pool() -> None:
    """8 blocks of 16 tokens hold no more than 128."""
    assert pool(budget(), num_blocks=8) == (8, 128)


def test_a_named_size_may_exceed_the_share() -> None:
    """5 GiB where the share would be 2.4."""
    assert pool(budget(), kv_cache_bytes=5 * GIB)[0] == 5 * 1024


@pytest.mark.parametrize(
    ("available_gib", "changes"),
    [(2.0, {}), (1.0, {}), (2.1, {"num_blocks": 1000}), (3.0, {"kv_cache_bytes": 2 * GIB}), (8, {"kv_cache_bytes": 1})],
)
def test_too_little_memory_says_what_to_lower(available_gib: float, changes: dict[str, int]) -> None:
    """Weights alone, a fixed pool or a named size that does not fit, or one too small for 8 blocks."""
    with pytest.raises(ModelError, match=r"Too little memory: .* Lower scheduler.max_num_seqs"):
        pool(budget(available_gib), **changes)


def test_fewer_than_eight_blocks_are_refused() -> None:
    """The least pool that tests run with."""
    with pytest.raises(ModelError, match="at least 8 blocks"):
        pool(budget(), num_blocks=7)


def device_pool(**changes: int) -> PoolSize:
    """A device of 1,000 bytes, blocks of 4 bytes."""
    fields = {
        "budget_bytes": 1000,
        "spent_bytes": 300,
        "graph_bytes": 100,
        "bytes_per_token": 1,
        "block_size": 4,
        "max_model_len": 10_000,
    }
    return size_device_pool(**(fields | changes))


def test_a_devices_pool_takes_what_is_left() -> None:
    """All but the trash block, and the context is cut to it."""
    assert device_pool() == PoolSize(num_blocks=149, max_model_len=596)


def test_a_devices_pool_may_be_named() -> None:
    """By its blocks, or else by its bytes."""
    assert device_pool(num_blocks=20, kv_cache_bytes=400).num_blocks == 20
    assert device_pool(kv_cache_bytes=400).num_blocks == 100


@pytest.mark.parametrize(
    "changes", [{"spent_bytes": 880}, {"spent_bytes": 2000}, {"num_blocks": 150}, {"kv_cache_bytes": 600}]
)
def test_too_little_device_memory_says_what_to_lower(changes: dict[str, int]) -> None:
    """With what was asked for, and what there is."""
    with pytest.raises(ModelError, match=r"Too little device memory.*Lower scheduler\.max_num_batched_tokens"):
        device_pool(**changes)
