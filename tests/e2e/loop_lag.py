"""How late the event loop of the real server is while streams decode and long prompts prefill one after another.

    python tests/e2e/loop_lag.py --threads 1 2 --seconds 30

Starts ``python -m aserve`` on the default model for each number of threads. Two load generators in processes of their
own send the work: streams that decode all the time, and prompts of 2,000 tokens of which the next one is sent when the
last one has its first token. The figures are the server's own (/v1/stats), over the last three quarters of the time.
A timer of uvloop fires up to a millisecond late on an idle loop.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from aserve_process import ServerProcess, clean_environment, serving

from aserve.obs.loop_watch import WINDOW

MEASURED_SHARE: Final = 0.75
MODEL: Final = "SmolLM2-135M-Instruct"
_TICKS: Final = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Milliseconds late, and what the server did meanwhile. others_cores: cores that other programs kept busy."""

    threads: int
    num_samples: int
    p50_ms: float
    p99_ms: float
    max_ms: float
    gc_max_ms: float
    decoded_per_s: float
    prefilled_per_s: float
    server_cores: float
    others_cores: float

    def __str__(self) -> str:
        return (
            f"{self.threads} thread{'s' if self.threads > 1 else ' '}: loop late by {self.p50_ms:.2f} ms at p50, "
            f"{self.p99_ms:.2f} at p99, {self.max_ms:.1f} at most ({self.num_samples} samples, collector "
            f"{self.gc_max_ms:.1f}); {self.decoded_per_s:.0f} tokens/s decoded, {self.prefilled_per_s:.0f} prefilled; "
            f"{self.server_cores:.2f} cores here, {self.others_cores:.2f} of others"
        )


def measure(*, threads: int, seconds: float, num_streams: int = 16, prompt_tokens: int = 2000) -> Figures:
    """Figures of one server under this load. Raises AssertionError if the load was not what it should be."""
    interval_ms = max(1, round(MEASURED_SHARE * seconds * 1000 / WINDOW))
    arguments = ["--threads", str(threads), "--metrics.loop-lag-interval-ms", str(interval_ms)]
    with serving(*arguments, "--log-level", "warning") as server, ExitStack() as clients:
        base = ["--base-url", server.url, "--model", MODEL, "--duration", str(seconds), "--allow-errors"]
        decoding = ["--concurrency", str(num_streams), "--words", "32", "--max-tokens", "400", "--ignore-eos"]
        prefilling = ["--concurrency", "1", "--words", str(prompt_tokens - 40), "--max-tokens", "1", "--seed", "1"]
        generators = [_load(clients, *base, *decoding), _load(clients, *base, *prefilling)]
        time.sleep((1 - MEASURED_SHARE) * seconds)
        before, before_s = _Snapshot.take(server, generators), time.monotonic()
        time.sleep(MEASURED_SHARE * seconds - 1)  # read while the load is on
        after, measured_s = _Snapshot.take(server, generators), time.monotonic() - before_s
        assert all(generator.poll() is None for generator in generators), "the load ended before it was measured"
    loop, engine = after.stats["loop"], after.stats["engine"]
    assert engine["num_streams"] >= num_streams, "the streams were not all open"
    return Figures(
        threads=threads,
        num_samples=loop["num_samples"],
        p50_ms=loop["p50_ms"],
        p99_ms=loop["p99_ms"],
        max_ms=loop["max_ms"],
        gc_max_ms=after.stats["gc"]["pause_max_ms"],
        decoded_per_s=(engine["generation_tokens"] - before.stats["engine"]["generation_tokens"]) / measured_s,
        prefilled_per_s=(engine["num_prefill_tokens"] - before.stats["engine"]["num_prefill_tokens"]) / measured_s,
        server_cores=(after.server_s - before.server_s) / measured_s,
        others_cores=max(0.0, after.others_s - before.others_s) / measured_s,
    )


def _load(clients: ExitStack, *arguments: str) -> "subprocess.Popen[bytes]":
    generator = subprocess.Popen(
        [sys.executable, "-m", "loadgen", "run", *arguments], env=clean_environment(), stdout=subprocess.DEVNULL
    )
    clients.callback(generator.wait)
    clients.callback(generator.kill)
    return generator


@dataclass(frozen=True, slots=True, kw_only=True)
class _Snapshot:
    """The server's figures, and seconds of CPU: its own, and those of everybody but us."""

    stats: dict[str, Any]
    server_s: float
    others_s: float

    @classmethod
    def take(cls, server: ServerProcess, generators: Sequence["subprocess.Popen[bytes]"]) -> "_Snapshot":
        server_s = _cpu_s(server.child.pid)
        ours_s = server_s + sum(_cpu_s(generator.pid) for generator in generators)
        user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split()[1:11])
        busy_s = (user + nice + system + irq + softirq) / _TICKS
        return cls(stats=server.get("/v1/stats"), server_s=server_s, others_s=busy_s - ours_s)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how late the server's event loop is under load.")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], metavar="N")
    parser.add_argument("--seconds", type=float, default=30.0, metavar="S", help="length of the load")
    parser.add_argument("--streams", type=int, default=16, metavar="N")
    arguments = parser.parse_args()
    for threads in arguments.threads:
        figures = measure(threads=threads, seconds=arguments.seconds, num_streams=arguments.streams)
        sys.stdout.write(f"{figures}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
