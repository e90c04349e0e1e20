"""Cores, priorities and the environment of the compute threads."""

import os
import sys
import threading
from pathlib import Path

import pytest

from aserve.device import threads
from aserve.device.thread import DeviceThread


def test_openmp_waits_are_passive_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spinning threads would take the loop's core; an explicit setting stays."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setenv("KMP_BLOCKTIME", "7")
    interval_s = sys.getswitchinterval()
    try:
        threads.prepare_process()
        assert (os.environ["OMP_WAIT_POLICY"], os.environ["KMP_BLOCKTIME"]) == ("PASSIVE", "7")
        assert sys.getswitchinterval() == pytest.approx(0.0005)
    finally:
        sys.setswitchinterval(interval_s)
        monkeypatch.setenv("OMP_WAIT_POLICY", "")  # so that monkeypatch takes it back


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cpu.max": "max 100000"}, None),
        ({"cpu.max": "100000 100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}, 1),
        ({}, None),
    ],
)
def test_usable_cores_are_cut_to_the_quota(tmp_path: Path, files: dict[str, str], expected: int | None) -> None:
    """Both versions of cgroups; no quota leaves the affinity."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    affinity = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    assert threads.usable_cores(tmp_path) == (expected or affinity)


def test_the_loop_keeps_a_core_from_three_on() -> None:
    """Both of two, one less of more, and never more than memory bandwidth can feed."""
    assert [threads.default_num_threads(cores) for cores in (1, 2, 3, 8, 64)] == [1, 2, 2, 7, 16]


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own on Linux only")
def test_only_the_device_thread_is_niced() -> None:
    """The loop's thread keeps its priority."""
    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    device = DeviceThread("test-device")
    there = device.call(lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
    device.close()
    assert there >= threads.DEVICE_NICENESS
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before


def test_bfloat16_is_taken_from_the_flags_of_the_cpu(tmp_path: Path) -> None:
    """AMX or AVX512-BF16; no list of flags means no."""
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor : 0\nflags : fpu avx2 amx_bf16\n")
    plain = tmp_path / "plain"
    plain.write_text("processor : 0\nflags : fpu avx2\n")
    answers = [threads.supports_bfloat16(path) for path in (cpuinfo, plain, tmp_path / "missing")]
    assert answers == [True, False, False]
