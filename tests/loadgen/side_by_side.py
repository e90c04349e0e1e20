"""Three clients on one server by turns: ``python tests/loadgen/side_by_side.py --tokenizer DIR --aiperf A --vllm V``.

``aiperf`` and ``vllm bench serve`` live in environments of their own; A and V are their commands. Without
``--base-url`` the server is ``loadgen stub``, begun anew for each so that all meet the same script. Each client sends
the same number of requests of the same lengths in a closed loop, in every round; the table gives the medians of the
rounds in Markdown.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[2]
FIGURES = ("requests/s", "output tokens/s", "TTFT mean", "TTFT p50", "TTFT p99", "TPOT mean", "TPOT p50", "E2E p50")


def quietly(command: list[str], folder: Path) -> None:
    """Run a command; what it says is shown only where it fails."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.stderr.write(done.stdout[-3000:] + done.stderr[-3000:])
        raise SystemExit(f"{command[0]} failed")


def by_loadgen(a: argparse.Namespace, url: str, seed: int, folder: Path) -> list[float]:
    """Latencies from the send, as the others give them."""
    quietly(
        [
            sys.executable, "-m", "loadgen", "run", "--base-url", url, "--model", a.model,
            "--concurrency", str(a.concurrency), "--num-requests", str(a.num_requests), "--seed", str(seed),
            "--words", str(a.input_tokens), "--max-tokens", str(a.output_tokens), "--ignore-eos",
            "--json", "loadgen.json",
        ],
        folder,
    )  # fmt: skip
    found = json.loads((folder / "loadgen.json").read_text())["figures"]
    names = (
        "requests_per_s", "output_tokens_per_s", "ttft_sent_ms_mean", "ttft_sent_ms_p50", "ttft_sent_ms_p99",
        "tpot_ms_mean", "tpot_ms_p50", "e2e_sent_ms_p50",
    )  # fmt: skip
    return [found[name] for name in names]


def by_aiperf(a: argparse.Namespace, url: str, seed: int, folder: Path) -> list[float]:
    """aiperf's own summary; its inter-token latency is what others call TPOT."""
    quietly(
        [
            a.aiperf, "profile", "-m", a.model, "--tokenizer", a.tokenizer, "-u", url, "--endpoint-type", "chat",
            "--streaming", "--concurrency", str(a.concurrency), "--request-count", str(a.num_requests),
            "--isl", str(a.input_tokens), "--osl", str(a.output_tokens), "--extra-inputs", "ignore_eos:true",
            "--use-server-token-count", "--ui", "none", "--output-artifact-dir", str(folder / "aiperf"),
            "--random-seed", str(seed),
        ],
        folder,
    )  # fmt: skip
    found: dict[str, Any] = json.loads((folder / "aiperf" / "profile_export_aiperf.json").read_text())
    paths = (
        ("request_throughput", "avg"), ("output_token_throughput", "avg"), ("time_to_first_token", "avg"),
        ("time_to_first_token", "p50"), ("time_to_first_token", "p99"), ("inter_token_latency", "avg"),
        ("inter_token_latency", "p50"), ("request_latency", "p50"),
    )  # fmt: skip
    return [float(found[name][statistic]) for name, statistic in paths]


def by_vllm(a: argparse.Namespace, url: str, seed: int, folder: Path) -> list[float]:
    """The summary of vLLM's benchmark."""
    quietly(
        [
            a.vllm, "bench", "serve", "--backend", "openai-chat", "--base-url", url,
            "--endpoint", "/v1/chat/completions", "--model", a.model, "--tokenizer", a.tokenizer,
            "--dataset-name", "random", "--random-input-len", str(a.input_tokens),
            "--random-output-len", str(a.output_tokens), "--num-prompts", str(a.num_requests),
            "--max-concurrency", str(a.concurrency), "--ignore-eos", "--seed", str(seed), "--disable-tqdm",
            "--save-result", "--result-dir", str(folder), "--result-filename", "vllm.json",
            "--percentile-metrics", "ttft,tpot,e2el", "--metric-percentiles", "50,99",
        ],
        folder,
    )  # fmt: skip
    found = json.loads((folder / "vllm.json").read_text())
    names = (
        "request_throughput", "output_throughput", "mean_ttft_ms", "median_ttft_ms", "p99_ttft_ms", "mean_tpot_ms",
        "median_tpot_ms", "median_e2el_ms",
    )  # fmt: skip
    return [float(found[name]) for name in names]


@contextmanager
def server(a: argparse.Namespace) -> Iterator[str]:
    """The base URL of the server: the one that was given, or a new stub."""
    if a.base_url is not None:
        yield a.base_url
        return
    stub = subprocess.Popen(
        [
            sys.executable, "-m", "loadgen", "stub", "--port", "0", "--ttft-ms", "100", "--gap-ms", a.gap_ms,
            "--jitter", "0.3",
        ],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert stub.stdout is not None
        yield stub.stdout.readline().strip()
    finally:
        stub.send_signal(signal.SIGTERM)
        stub.wait()


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", help="of a running server; default: the stub")
    parser.add_argument("--model", default="stub")
    parser.add_argument("--tokenizer", required=True, help="folder of a tokenizer, which both others need")
    parser.add_argument("--aiperf", help="its command")
    parser.add_argument("--vllm", help="its command")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--num-requests", type=int, default=256)
    parser.add_argument("--input-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gap-ms", default="20", help="of the stub")
    arguments = parser.parse_args()
    clients: dict[str, Callable[..., list[float]]] = {"loadgen": by_loadgen}
    if arguments.aiperf:
        clients["aiperf"] = by_aiperf
    if arguments.vllm:
        clients["vllm bench"] = by_vllm

    found: dict[str, list[list[float]]] = {name: [] for name in clients}
    for number in range(arguments.rounds):
        order = list(clients) if number % 2 == 0 else list(clients)[::-1]
        for position, name in enumerate(order):
            with tempfile.TemporaryDirectory() as folder, server(arguments) as url:
                seed = 100 * number + position + 1  # no client finds another's prompts in a cache
                found[name].append(clients[name](arguments, url, seed, Path(folder)))

    others = [name for name in clients if name != "loadgen"]
    sys.stdout.write(f"| | loadgen | {' | '.join(f'{name} | over loadgen' for name in others)} |\n")
    sys.stdout.write("|---|" + "---|" * (1 + 2 * len(others)) + "\n")
    for at, figure in enumerate(FIGURES):
        ours = median(values[at] for values in found["loadgen"])
        cells = [f"{ours:,.2f}"]
        for name in others:
            theirs = median(values[at] for values in found[name])
            cells += [f"{theirs:,.2f}", f"{theirs / ours:.3f}"]
        sys.stdout.write(f"| {figure} | {' | '.join(cells)} |\n")


if __name__ == "__main__":
    main()
