"""Steps of the default model while OpenMP's threads spin for so many turns between two regions before they sleep.

    python tests/bench/spin.py [--turns 0 3000 300000] [--rows 1 16] [--seconds 6]

Through the embedded engine, whose device thread and scheduler are a server's. A process for each number of turns, which
is in its environment as GOMP_SPINCOUNT: ``aserve/device/threads.py`` sets 3,000 where nothing is, GNU's own is 300,000.
"""

import argparse
import asyncio
import os
import subprocess
import sys
from pathlib import Path

from aserve.cli.bench_points import Points
from aserve.config import load_config
from aserve.embedding import Engine

ROOT = Path(__file__).parents[2]


async def measure(rows: list[int], seconds: float) -> list[float]:
    """Milliseconds a step, for each number of rows, in this process."""
    config = load_config()
    async with Engine.from_config(config) as engine:
        points = Points(engine, config)
        return [(await points.decode(num_rows, seconds)).token_ms for num_rows in rows]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, nargs="+", default=[0, 3000, 300_000])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--seconds", type=float, default=6.0, help="of decoding, for each number of rows")
    parser.add_argument("--here", action="store_true", help="in this process, with the turns that its environment says")
    arguments = parser.parse_args()
    if arguments.here:
        times_ms = asyncio.run(measure(arguments.rows, arguments.seconds))
        sys.stdout.write(" ".join(f"{time_ms:9.1f}" for time_ms in times_ms) + "\n")
        return 0
    sys.stdout.write("ms a step\n  turns   " + " ".join(f"{rows:4} rows" for rows in arguments.rows) + "\n")
    for turns in arguments.turns:
        environment = os.environ | {"GOMP_SPINCOUNT": str(turns), "PYTHONPATH": str(ROOT)}
        command = [sys.executable, __file__, "--here", "--seconds", str(arguments.seconds), "--rows"]
        line = subprocess.run(
            command + [str(rows) for rows in arguments.rows],
            env=environment, capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        sys.stdout.write(f"{turns:7,} {line}")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
