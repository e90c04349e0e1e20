"""What loadgen says against what was played: ``python tests/loadgen/truth.py`` prints the table of the results page.

``loadgen stub`` plays jittered answers over loopback and stops once for 3 s; ``loadgen run`` measures it with Poisson
arrivals and a bound of requests in flight. The truth is computed here from the script, the schedule and the bound
alone: a request is sent when it is due and there is a place, and answered as the script says. Exit status 1 if a
percentile is more than 2 % off.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from heapq import heappushpop
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import quantiles

sys.path.insert(0, str(Path(__file__).parents[2]))

from loadgen.arrivals import Poisson, due_s
from loadgen.stub import Script

ROOT = Path(__file__).parents[2]
PERCENTILES = (50, 90, 95, 99)
TOLERANCE = 0.02


def simulate(script: Script, times_s: list[float], num_tokens: int, num_places: int) -> dict[str, list[float]]:
    """Every latency in ms by its name in the report."""
    found: dict[str, list[float]] = {name: [] for name in ("ttft_sent", "ttft", "e2e_sent", "e2e", "itl", "tpot")}
    places = [0.0] * num_places  # when each is free; a heap
    origin_s = times_s[0]  # the stub's clock begins with the first request
    for number, due in enumerate(times_s):
        sent_s = max(due, places[0])
        work_s = script.worked(sent_s - origin_s)
        events_s = [
            origin_s + script.when(at_s)
            for at_s in list(accumulate(script.draw(number, num_tokens), initial=work_s))[1:]
        ]
        heappushpop(places, events_s[-1])
        gaps = [b - a for a, b in pairwise(events_s)]
        for name, values_s in (
            ("ttft_sent", [events_s[0] - sent_s]),
            ("ttft", [events_s[0] - due]),
            ("e2e_sent", [events_s[-1] - sent_s]),
            ("e2e", [events_s[-1] - due]),
            ("itl", gaps),
            ("tpot", [sum(gaps) / len(gaps)]),
        ):
            found[name].extend(value * 1e3 for value in values_s)
    return found


def main() -> int:
    """Play, measure and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=100.0)
    parser.add_argument("--num-requests", type=int, default=3000)
    parser.add_argument("--places", type=int, default=24)
    parser.add_argument("--num-tokens", type=int, default=12)
    parser.add_argument("--endpoint", default="chat", choices=("chat", "responses", "responses-ws"))
    parser.add_argument("--html", help="keep the report")
    arguments = parser.parse_args()
    script = Script(ttft_ms=40, gap_ms=10, jitter=0.5, stall_at_s=10, stall_s=3, seed=1)
    command = [sys.executable, "-m", "loadgen"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    stub = subprocess.Popen(
        [
            *command, "stub", "--port", "0", "--ttft-ms", "40", "--gap-ms", "10", "--jitter", "0.5",
            "--stall-at", "10", "--stall", "3", "--seed", "1",
        ],
        env=environment, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert stub.stdout is not None
        url = stub.stdout.readline().strip()
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "run.json"
            subprocess.run(
                [
                    *command, "run", "--base-url", url, "--endpoint", arguments.endpoint,
                    "--rate", str(arguments.rate), "--num-requests", str(arguments.num_requests),
                    "--max-inflight", str(arguments.places), "--max-tokens", str(arguments.num_tokens),
                    "--words", "8", "--json", str(report), "--quiet",
                    *(("--html", arguments.html) if arguments.html else ()),
                ],
                env=environment, check=True, stdout=subprocess.DEVNULL,
            )  # fmt: skip
            fields = json.loads(report.read_text())
    finally:
        stub.send_signal(signal.SIGTERM)
        stub.wait()

    times_s = list(due_s(Poisson(rate=arguments.rate), seed=0, num_requests=arguments.num_requests))
    truth = simulate(script, times_s, arguments.num_tokens, arguments.places)
    worst = 0.0
    lines = [
        f"| ms, truth and measured | {' | '.join(f'p{p}' for p in PERCENTILES)} | max |",
        "|---|---|---|---|---|---|",
    ]
    for name, values in truth.items():
        cuts = quantiles(values, n=100, method="inclusive")
        cells = []
        for label, expected in [*((f"p{p}", cuts[p - 1]) for p in PERCENTILES), ("max", max(values))]:
            measured = fields["figures"][f"{name}_ms_{label}"]
            cells.append(f"{expected:,.1f} {measured:,.1f}")
            if label != "max":
                worst = max(worst, abs(measured / expected - 1))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    client = fields["summary"]["client"]
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.write(f"\nlargest difference of a percentile: {worst:.2%}; client CPU {client['cpu_share']:.0%}\n")
    return 1 if worst > TOLERANCE else 0


if __name__ == "__main__":
    sys.exit(main())
