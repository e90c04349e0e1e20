"""The same scenario files on several servers: ``python tests/loadgen/scenarios_table.py SCENARIO... [--llamacpp ...]``.

Servers are started as in ``tests/bench/cpu_table.py``, one after another; each gets every scenario, shortened alike by
``--num-requests``. The table in Markdown has a row for each server and scenario; failed requests are named below it.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "bench")]

# Requests of each that take a small server about half a minute.
SIZES = {"chat": 8, "rag": 8, "agent": 4, "batch": 16, "burst": 24, "hostile": 30, "trace": 10}
# What not every server knows is left out for all: transformers refuses ignore_eos, and not all serve tools.
COMMON = ["request.ignore_eos=false"]
OVERRIDES = {"agent": ["work.body.tools=[]"], "batch": ["arrivals.concurrency=16"]}
SLOTS = 8
COLUMNS = (
    ("output tokens/s", "output_tokens_per_s"),
    ("TTFT p50 ms", "ttft_ms_p50"),
    ("p99", "ttft_ms_p99"),
    ("TPOT p50 ms", "tpot_ms_p50"),
    ("E2E p50 ms", "e2e_ms_p50"),
)


def measure(url: str, model: str, scenario: str) -> dict[str, Any]:
    """Run a scenario and return its report."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "run.json"
        command = [
            sys.executable, "-m", "loadgen", "run", scenario, "--base-url", url, "--model", model,
            "--num-requests", str(SIZES[scenario]), "--warmup-requests", "1", "--allow-errors", "--json", str(report),
        ]  # fmt: skip
        for override in (*COMMON, *OVERRIDES.get(scenario, ())):
            command += ["--set", override]
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
        )
        if not report.exists():
            return {"failure": done.stderr.strip().splitlines()[-1]}
        fields: dict[str, Any] = json.loads(report.read_text())
        return fields


def row(name: str, scenario: str, report: dict[str, Any]) -> str:
    """A server's row of the table."""
    if "failure" in report:
        return f"| {scenario} | {name} | {report['failure']} |" + " |" * (len(COLUMNS) + 1)
    summary, found = report["summary"], report["figures"]
    failed = summary["num_requests"] - summary["num_ok"]
    cells = [f"{found[key]:,.0f}" if key in found else "-" for _, key in COLUMNS]
    goodput = f"{found['goodput_share']:.0%}" if "goodput_share" in found else "-"
    return f"| {scenario} | {name} | {summary['num_ok']} ok, {failed} failed | {' | '.join(cells)} | {goodput} |"


def failures(name: str, scenario: str, report: dict[str, Any]) -> list[str]:
    """What went wrong, by kind and part."""
    if "failure" in report:
        return []
    summary = report["summary"]
    found = [f"{count} × {kind} ({summary['error_details'][kind][:120]})" for kind, count in summary["errors"].items()]
    for part, figures in summary["parts"].items():
        found += [f"{count} × {kind} in *{part}*" for kind, count in figures["errors"].items()]
    return [f"- {scenario}, {name}: {'; '.join(found)}"] if found else []


def main() -> int:
    """Start each server, run all scenarios on it and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scenarios", nargs="+", choices=sorted(SIZES))
    parser.add_argument("--llamacpp", metavar="PYTHON")
    parser.add_argument("--gguf", metavar="FILE")
    parser.add_argument("--transformers", metavar="PYTHON")
    parser.add_argument("--threads", type=int, default=2, help="of each server (default: 2)")
    parser.add_argument("--only", metavar="NAME", help="of the servers")
    arguments = parser.parse_args()
    from cpu_table import contenders, running

    # Told to end, it takes its server along: the exception passes through ``running``.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    os.environ |= {"OMP_NUM_THREADS": str(arguments.threads), "ASERVE_MODEL__THREADS": str(arguments.threads)}
    lines, notes = [], []
    for contender in contenders(arguments):
        if contender.name == "aserve, edge" or (arguments.only and contender.name != arguments.only):
            continue
        # A slot of llama.cpp's has to hold the longest prompt and its answer.
        command = [
            part.replace("1024 * slots", "2048 * slots").replace("n_threads = 2", f"n_threads = {arguments.threads}")
            for part in contender.command
        ]
        with running(replace(contender, command=command), SLOTS) as url:
            for scenario in arguments.scenarios:
                report = measure(url, contender.model, scenario)
                lines.append(row(contender.name, scenario, report))
                notes += failures(contender.name, scenario, report)
                sys.stderr.write(lines[-1] + "\n")
    head = f"| scenario | server | requests | {' | '.join(name for name, _ in COLUMNS)} | goodput |"
    sys.stdout.write("\n".join([head, "|---" * (len(COLUMNS) + 4) + "|", *sorted(lines), "", *notes]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
