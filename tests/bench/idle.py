"""What the server costs while nobody asks it anything: CPU share and wake-ups a second, by thread.

    python tests/bench/idle.py [--seconds 10] [-- FLAGS OF aserve]

The whole process with its log, metrics and watchdogs, over a scripted device.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
SETTLING_S = 3.0
"""After "ready": the imports' pages are touched, the first collections done."""


def threads(pid: int) -> dict[str, tuple[str, float, int]]:
    """By thread id: its name, CPU seconds so far, and how often it has gone to sleep."""
    found = {}
    for folder in Path(f"/proc/{pid}/task").iterdir():
        status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
        cpu_s = int((folder / "schedstat").read_text().split()[0]) / 1e9
        found[folder.name] = (status["Name"].strip(), cpu_s, int(status["voluntary_ctxt_switches"]))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("flags", nargs="*", help="flags of the server, behind --")
    arguments = parser.parse_args()
    server = subprocess.Popen(
        [sys.executable, ROOT / "tests/reliability/scripted_process.py", "{}", "--port", "0", *arguments.flags],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    try:
        assert server.stdout is not None
        server.stdout.readline()
        time.sleep(SETTLING_S)
        before, start_s = threads(server.pid), time.monotonic()
        time.sleep(arguments.seconds)
        after, seconds = threads(server.pid), time.monotonic() - start_s
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(10)
    rows = [
        {
            "thread": name,
            "cpu_percent": round(100 * (cpu_s - before.get(ident, ("", 0.0, 0))[1]) / seconds, 3),
            "wakeups_per_s": round((sleeps - before.get(ident, ("", 0.0, 0))[2]) / seconds, 1),
        }
        for ident, (name, cpu_s, sleeps) in after.items()
    ]
    total = round(sum(float(row["cpu_percent"]) for row in rows), 3)
    sys.stdout.write(json.dumps({"cpu_percent": total, "threads": rows}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
