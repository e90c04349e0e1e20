"""Which cores this process may use, and how its compute threads share them with the event loop.

Nothing here imports torch: ``prepare_process`` has to run before torch is loaded, because the OpenMP run time reads its
environment once.
"""

import contextlib
import os
import sys
import threading
from pathlib import Path
from typing import Final

SWITCH_INTERVAL_S: Final = 0.0005
"""How long a thread may keep the interpreter from the loop; Python's own 5 ms would be the loop's worst lag."""

DEVICE_NICENESS: Final = 5
"""Compute threads yield to the loop when cores are short; the loop's work is short and everybody waits for it."""

_OPENMP: Final = {
    "OMP_WAIT_POLICY": "PASSIVE",  # GNU's, which torch's wheels bring
    "GOMP_SPINCOUNT": "3000",
    "KMP_BLOCKTIME": "0",  # Intel's and LLVM's
}
"""OpenMP threads sleep between steps: by default they spin for up to 200 ms, on the loop's core too.

Between the regions of one step they spin, for some tens of microseconds: a step has hundreds of them, and to be woken
takes as long as many a region does. Steps of SmolLM2-135M through the engine on 2 cores, ms at 1 and 16 rows: 36 and 95
without spinning, 23 and 71 with 3,000 turns, 23 and 64 with 30,000, 26 and 64 with 300,000 (``tests/bench/spin.py``).
"""


def prepare_process() -> None:
    """Set what holds for the whole process: passive OpenMP waits (unless the user set them) and the switch interval.

    Must run before torch is imported for the first to have an effect. Idempotent.
    """
    for name, value in _OPENMP.items():
        os.environ.setdefault(name, value)
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def _cgroup_quota(root: Path) -> float | None:
    """CPUs that the cgroup's bandwidth limit allows, None without one. Version 2 first, then version 1."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = (root / "cpu.max").read_text().split()
        if quota != "max":
            return int(quota) / int(period)
    with contextlib.suppress(OSError, ValueError):
        quota_us = int((root / "cpu" / "cpu.cfs_quota_us").read_text())
        if quota_us > 0:
            return quota_us / int((root / "cpu" / "cpu.cfs_period_us").read_text())
    return None


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """CPUs that the process may run on at once: its affinity, cut to the cgroup's quota; at least 1."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        cores = os.cpu_count() or 1
    quota = _cgroup_quota(cgroup)
    return max(1, cores if quota is None else min(cores, int(quota + 0.5)))


def default_num_threads(cores: int) -> int:
    """Threads of a forward on ``cores`` CPUs: all of one or two, else one less, so that the loop has its own.

    On two cores the second thread is worth more than the loop's peace (with both, the loop ran 2.4-2.8 ms late at p99
    beside a 512-token chunk; with one, 0.4-0.7). Decoding is bound by memory bandwidth, which 16 threads use up.
    """
    return max(1, min(cores if cores <= 2 else cores - 1, 16))


def lower_priority(niceness: int = DEVICE_NICENESS) -> None:
    """Make the calling thread, and with it the threads that it starts, nicer than the process by ``niceness``. Where a
    thread has no priority, nothing."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, os.getpid()) + niceness)


def supports_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this CPU multiplies bfloat16 matrices natively (AMX, AVX512-BF16); elsewhere float32 is faster.

    Read from Linux' list of CPU flags; False where there is none.
    """
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return False
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    return "amx_bf16" in flags or "avx512_bf16" in flags
