"""Tokens a second of a CPU server at 1, 8, 16 and 32 streams: aserve, and peers on the same model where they are given.

    python tests/bench/cpu_table.py
    python tests/bench/cpu_table.py --llamacpp ENV/bin/python --transformers ENV/bin/python

Chat prompts, greedy, 128 tokens each, SSE, driven by ``loadgen``; one server at a time, one run, one table in Markdown.
``--llamacpp`` and ``--transformers`` name Pythons of environments with ``xllamacpp`` and ``transformers[serving]``.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
STREAMS = (1, 8, 16, 32)
LLAMACPP = """
import sys, time, xllamacpp
model, slots, port = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
params = xllamacpp.CommonParams()
params.model.path, params.n_parallel, params.n_ctx = model, slots, 1024 * slots
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 2
params.hostnames, params.port = ["127.0.0.1"], port
server = xllamacpp.Server(params)
time.sleep(3600)
"""


@dataclass(frozen=True, slots=True)
class Contender:
    """command: with PORT and STREAMS to be filled in. per_point: started anew for each number of streams.

    takes_ignore_eos: transformers refuses a request with that field, so its answers end where the model ends them.
    """

    name: str
    command: list[str]
    model: str
    per_point: bool = False
    takes_ignore_eos: bool = True


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextmanager
def running(contender: Contender, streams: int) -> Iterator[str]:
    """The server's base URL, once it answers a chat; ended by its own process id."""
    port = free_port()
    filled = [part.replace("PORT", str(port)).replace("STREAMS", str(streams)) for part in contender.command]
    process = subprocess.Popen(filled, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    body = {"model": contender.model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "stream": False}
    asked = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        for _ in range(240):
            if process.poll() is not None:
                raise SystemExit(f"{contender.name} ended with {process.returncode} before it was ready")
            try:
                urllib.request.urlopen(asked, timeout=120).read()
                break
            except OSError:
                time.sleep(0.5)
        else:
            raise SystemExit(f"{contender.name} was not ready after two minutes")
        yield url
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def measure(
    url: str, contender: Contender, streams: int, num_tokens: int, prompts: Path, rounds: int
) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        subprocess.run(
            [
                sys.executable, "-m", "loadgen", "run", "--base-url", url, "--model", contender.model,
                "--concurrency", str(streams),
                "--num-requests", str(max(streams * rounds, 3)), "--warmup-requests", "1", "--prompts", str(prompts),
                "--max-tokens", str(num_tokens), "--seed", str(streams), "--json", str(result),
                *(["--ignore-eos"] if contender.takes_ignore_eos else []),
                "--allow-errors",
            ],
            check=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        return figures(json.loads(result.read_text()))


def figures(report: dict[str, Any]) -> dict[str, float]:
    """Output tokens a second over the run, TTFT p50 and inter-chunk p99 in ms; every request must have succeeded."""
    summary = report["summary"]
    if summary["errors"]:
        raise SystemExit(f"requests failed: {summary['errors']} {summary['error_details']}")
    return {
        "tokens_per_s": summary["throughput"]["output_tokens_per_s"],
        "ttft_p50_ms": summary["first_content_ms"]["sent"]["p50"],
        "itl_p99_ms": summary["inter_chunk_ms"]["p99"],
    }


def contenders(arguments: argparse.Namespace) -> list[Contender]:
    from aserve.model.hub import cache_folder, resolve_model

    source = resolve_model("")
    ours = [sys.executable, "-m", "aserve", "--port", "PORT", "--log-level", "warning"]
    found = [
        Contender("aserve", ours, source.name),
        # Its queue is as short as its rows are few; here the others wait.
        Contender("aserve, edge", [*ours, "--profile", "edge", "--engine.max_queue_requests", "64"], source.name),
    ]
    if arguments.llamacpp:
        gguf = arguments.gguf or next(cache_folder().rglob("*.gguf"), None)
        if gguf is None:
            raise SystemExit("--llamacpp needs --gguf FILE, the same model as GGUF")
        command = [arguments.llamacpp, "-c", LLAMACPP, str(gguf), "STREAMS", "PORT"]
        found.append(Contender("llama.cpp", command, "default", per_point=True))
    if arguments.transformers:
        binary = str(Path(arguments.transformers).with_name("transformers"))
        command = [
            binary, "serve", str(source.folder), "--continuous-batching", "--device", "cpu", "--dtype", "bfloat16",
            "--cb-num-blocks", "256", "--port", "PORT",
        ]  # fmt: skip
        found.append(Contender("transformers serve", command, str(source.folder), takes_ignore_eos=False))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llamacpp", metavar="PYTHON")
    parser.add_argument("--gguf", metavar="FILE")
    parser.add_argument("--transformers", metavar="PYTHON")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=2, help="requests a stream")
    parser.add_argument("--streams", type=int, nargs="+", default=STREAMS)
    parser.add_argument("--prompts", type=Path, default=ROOT / "tests" / "data" / "questions.jsonl")
    arguments = parser.parse_args()
    # A run that is told to end takes its server along: the exception passes through ``running``.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    sys.stdout.write("| tokens/s (TTFT p50 ms, ITL p99 ms) | " + " | ".join(map(str, arguments.streams)) + " |\n")
    sys.stdout.write("|---" * (len(arguments.streams) + 1) + "|\n")
    for contender in contenders(arguments):
        groups = [[streams] for streams in arguments.streams] if contender.per_point else [list(arguments.streams)]
        cells = []
        for group in groups:
            with running(contender, max(group)) as url:
                for streams in group:
                    point = measure(url, contender, streams, arguments.tokens, arguments.prompts, arguments.rounds)
                    cells.append("{tokens_per_s:.0f} ({ttft_p50_ms:.0f}, {itl_p99_ms:.0f})".format(**point))
        sys.stdout.write(f"| {contender.name} | " + " | ".join(cells) + " |\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
