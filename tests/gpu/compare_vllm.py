"""aserve beside vLLM on one GPU, in one run and with one client: starts, latencies and tokens a second.

    python tests/gpu/compare_vllm.py --shape llama1b --streams 1 64 256 --vllm-site ~/vllm-site --out results
    python tests/gpu/compare_vllm.py --shape llama8b --streams 1 16 64 --vllm-site ~/vllm-site --out results

Random weights (``make_models.py``), random prompts of 512 tokens, 256 tokens out, no end of sequence. The servers run
one after the other, each warmed up; every point has prompts of its own, the same ones for each server. The client is
``vllm bench serve``, of 64 streams and more as four processes whose requests are put together. Prints Markdown; keeps
everything as JSON. A server:

    aserve, vllm: with their own defaults, but for 256 sequences and a context of 8,192
    vllm4: vLLM with four front-end processes
"""

import argparse
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from make_models import SHAPES, write_model

ROOT: Final = Path(__file__).parents[2]
READY_S_MAX: Final = 300
MANY_STREAMS: Final = 64
"""From here on the requests come from several client processes: one would be the bottleneck."""


class Failed(Exception):
    """A server or a client of the comparison did not do its part; the others go on."""


# --- servers


@dataclass(frozen=True, slots=True)
class Server:
    name: str
    command: list[str]
    environment: dict[str, str]


def servers(arguments: argparse.Namespace, model: Path) -> dict[str, Server]:
    """Every server that can be asked for. {port} in a command is filled in at each start."""
    vllm = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", "m",
        "--load-format", "dummy", "--max-model-len", "8192", "--max-num-seqs", "256", "--host", "127.0.0.1",
        "--port", "{port}", "--no-enable-log-requests", "--disable-uvicorn-access-log",
        *shlex.split(arguments.vllm_args),
    ]  # fmt: skip
    aserve = [
        sys.executable, "-m", "aserve", "--model", str(model), "--served-model-name", "m",
        "--model.load_format", "dummy", "--max-model-len", "8192", "--max-num-seqs", "256", "--port", "{port}",
        "--log-level", "warning",
        *shlex.split(arguments.aserve_args),
    ]  # fmt: skip
    theirs = vllm_environment(arguments.vllm_site)
    ours = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))}
    known = [
        Server("aserve", aserve, ours),
        Server("vllm", [*vllm, "--api-server-count", "1"], theirs),
        Server("vllm4", [*vllm, "--api-server-count", "4"], theirs),
    ]
    return {server.name: server for server in known}


def vllm_environment(site: str) -> dict[str, str]:
    """For vLLM and for the client: its own packages first, and no network."""
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    # FlashInfer's sampler is compiled at the first start, for which the machine needs a compiler and minutes.
    return os.environ | quiet | {"VLLM_USE_FLASHINFER_SAMPLER": "0", "PYTHONPATH": str(Path(site).expanduser())}


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@dataclass(slots=True)
class Start:
    """Seconds from the start of the process."""

    server: str
    ready_s: float = 0.0
    first_token_s: float = 0.0


@contextmanager
def running(server: Server, log: Path) -> Iterator[tuple[str, Start]]:
    """The server's base URL and how it started; ended with all its processes."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [part.replace("{port}", str(port)) for part in server.command]
    started_s = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=server.environment, start_new_session=True, cwd=ROOT
        )
    try:
        start = Start(server.name)
        while not is_healthy(url):
            if process.poll() is not None:
                raise Failed(f"{server.name} ended before it was ready:\n{log.read_text()[-2000:]}")
            if time.monotonic() - started_s > READY_S_MAX:
                raise Failed(f"{server.name} was not ready after {READY_S_MAX} s:\n{log.read_text()[-2000:]}")
            time.sleep(0.05)
        start.ready_s = time.monotonic() - started_s
        body = {"model": "m", "prompt": "one", "max_tokens": 1}
        asked = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        urllib.request.urlopen(asked, timeout=120).read()
        start.first_token_s = time.monotonic() - started_s
        yield url, start
    finally:
        end_group(process)


def is_healthy(url: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=1) as answer:
        return int(answer.status) == 200
    return False


def end_group(process: "subprocess.Popen[Any]") -> None:
    """SIGTERM to the process and all it started, then SIGKILL. Afterwards the GPU's memory is free again."""
    for number, patience_s in ((signal.SIGTERM, 20), (signal.SIGKILL, 20)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
            break
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # what outlived its parent


# --- the client


class Client:
    """One ``vllm_client.py``."""

    def __init__(self, environment: dict[str, str], python: str, log: Path) -> None:
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [python, str(Path(__file__).with_name("vllm_client.py"))],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True,
                env=environment | {"OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        self._log = log

    def ask(self, arguments: Sequence[str]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(arguments) + "\n")
        self._process.stdin.flush()

    def answer(self) -> str:
        """The next line. Raises Failed if the client has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise Failed(f"the client has ended:\n{self._log.read_text()[-2000:]}")
        return line

    def close(self) -> None:
        end_group(self._process)


def drive(
    clients: Sequence[Client],
    url: str,
    model: Path,
    *,
    streams: int,
    requests: int,
    seed: int,
    lengths: tuple[int, int],
    more: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """One run over all ``clients``, which share streams and requests; the answer of each."""
    for number, client in enumerate(clients):
        client.ask(
            [
                "--backend", "openai", "--base-url", url, "--endpoint", "/v1/completions", "--model", "m",
                "--tokenizer", str(model), "--dataset-name", "random", "--random-input-len", str(lengths[0]),
                "--random-output-len", str(lengths[1]), "--num-prompts", str(max(1, requests // len(clients))),
                "--max-concurrency", str(max(1, streams // len(clients))), "--request-rate", "inf", "--ignore-eos",
                "--seed", str(seed + number), "--disable-tqdm", "--save-detailed", "--ready-check-timeout-sec", "0",
                *more,
            ]
        )  # fmt: skip
    answers = [json.loads(client.answer()) for client in clients]
    for answer in answers:
        if "error" in answer or answer["failed"]:
            raise Failed(f"the client failed: {answer.get('error') or answer['errors']}")
    return answers


# --- figures


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Of one server at so many streams; times in ms. client_cpu: of the busiest client process, a share of a core."""

    server: str
    streams: int
    run: int
    requests: int
    output_tokens: int
    tokens_per_s: float
    ttft_p50: float
    ttft_p99: float
    tpot_p50: float
    itl_p50: float
    itl_p99: float
    client_cpu: float

    @classmethod
    def of(cls, server: str, streams: int, run: int, answers: Sequence[dict[str, Any]]) -> "Point":
        def ms(name: str, share: float) -> float:
            values = sorted(value for answer in answers for value in answer[name])
            return values[min(len(values) - 1, int(len(values) * share))] * 1e3 if values else 0.0

        seconds = max(answer["ended_s"] for answer in answers) - min(answer["started_s"] for answer in answers)
        tokens = sum(answer["output_tokens"] for answer in answers)
        return cls(
            server=server,
            streams=streams,
            run=run,
            requests=sum(answer["completed"] for answer in answers),
            output_tokens=tokens,
            tokens_per_s=tokens / seconds,
            ttft_p50=ms("ttft_s", 0.5),
            ttft_p99=ms("ttft_s", 0.99),
            tpot_p50=ms("tpot_s", 0.5),
            itl_p50=ms("itl_s", 0.5),
            itl_p99=ms("itl_s", 0.99),
            client_cpu=max(answer["cpu"] for answer in answers),
        )


@dataclass(slots=True)
class Report:
    shape: str
    lengths: tuple[int, int]
    about: dict[str, str]
    starts: list[Start] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)
    not_run: list[str] = field(default_factory=list)

    def markdown(self) -> str:
        about = ", ".join(f"{key} {value}" for key, value in self.about.items())
        lines = [f"{self.shape}, {self.lengths[0]} tokens in, {self.lengths[1]} out; {about}", ""]
        lines += ["| server | start to ready s | to first token s |", "|---|---|---|"]
        lines += [f"| {start.server} | {start.ready_s:.1f} | {start.first_token_s:.1f} |" for start in self.starts]
        lines += ["", "| streams | server | TTFT p50 ms | p99 | TPOT p50 | ITL p50 | p99 | tokens/s | client CPU |"]
        lines += ["|---" * 9 + "|"]
        for point in sorted(self.points, key=lambda point: (point.streams, point.server, point.run)):
            lines.append(
                f"| {point.streams} | {point.server} | {point.ttft_p50:.1f} | {point.ttft_p99:.1f} "
                f"| {point.tpot_p50:.2f} | {point.itl_p50:.2f} | {point.itl_p99:.2f} | {point.tokens_per_s:.0f} "
                f"| {point.client_cpu:.0%} |"
            )
        lines += ["", *self._ratios()]
        lines += [f"not run: {what}" for what in self.not_run]
        return "\n".join(lines)

    def _ratios(self) -> list[str]:
        """How many times better aserve is; above 1 is ahead. Of several runs the best of each."""
        lines = ["| streams | against | TTFT p50 | TTFT p99 | TPOT | ITL p99 | tokens/s |", "|---" * 7 + "|"]
        for streams in sorted({point.streams for point in self.points}):
            ours = self._best("aserve", streams)
            for name in dict.fromkeys(point.server for point in self.points if point.server != "aserve"):
                theirs = self._best(name, streams)
                if ours is None or theirs is None:
                    continue
                times = [
                    f"{getattr(theirs, what) / getattr(ours, what):.2f}x" if getattr(ours, what) else ""
                    for what in ("ttft_p50", "ttft_p99", "tpot_p50", "itl_p99")
                ]
                rate = ours.tokens_per_s / theirs.tokens_per_s
                lines.append(f"| {streams} | {name} | {' | '.join(times)} | {rate:.2f}x |")
        return lines if len(lines) > 2 else []

    def _best(self, server: str, streams: int) -> Point | None:
        runs = [point for point in self.points if (point.server, point.streams) == (server, streams)]
        return max(runs, key=lambda point: point.tokens_per_s, default=None)


def about_the_machine(vllm_site: str) -> dict[str, str]:
    """Date, GPU and versions, as far as they can be told."""
    found = {"date": time.strftime("%Y-%m-%d", time.gmtime())}
    with suppress(OSError, subprocess.CalledProcessError):
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        found["GPU"] = subprocess.run(query, check=True, capture_output=True, text=True).stdout.strip()
    with suppress(OSError, subprocess.CalledProcessError):
        commit = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
        found["aserve"] = subprocess.run(commit, check=True, capture_output=True, text=True).stdout.strip()
    for folder in Path(vllm_site).expanduser().glob("vllm-*.dist-info"):
        found["vLLM"] = folder.name.removeprefix("vllm-").removesuffix(".dist-info")
    return found


# --- the run


def measure(arguments: argparse.Namespace, report: Report, model: Path, clients: Sequence[Client]) -> None:
    """Each server in turn: its start, a warm-up, its points, and further starts where they were asked for."""
    deadline_s = time.monotonic() + arguments.deadline
    known = servers(arguments, model)
    for name in arguments.servers:
        try:
            measure_one(arguments, report, known[name], model, clients, deadline_s)
        except (Failed, OSError) as error:
            report.not_run.append(f"the rest of {name}: {error}")
        save(report, arguments.out)


def measure_one(
    arguments: argparse.Namespace,
    report: Report,
    server: Server,
    model: Path,
    clients: Sequence[Client],
    deadline_s: float,
) -> None:
    points = [(run, streams) for run in range(arguments.runs) for streams in arguments.streams]
    if server.name == "vllm4":  # what more front ends are for
        points = [(run, streams) for run, streams in points if streams >= MANY_STREAMS]
    if time.monotonic() > deadline_s:
        report.not_run.append(server.name)
        return
    with running(server, arguments.out / f"{server.name}.log") as (url, start):
        report.starts.append(start)
        lengths = (arguments.input, arguments.output)
        drive(clients, url, model, streams=4, requests=8, seed=7, lengths=lengths)
        for run, streams in points:
            if time.monotonic() > deadline_s:
                report.not_run.append(f"{server.name} at {streams} streams")
                continue
            used = clients if streams >= MANY_STREAMS else clients[:1]
            requests = min(max(8, streams * arguments.rounds), 1024)
            seed = 10_000 * (run + 1) + 10 * streams
            answers = drive(
                used, url, model, streams=streams, requests=requests, seed=seed, lengths=lengths,
                more=shlex.split(arguments.client_args),
            )  # fmt: skip
            report.points.append(Point.of(server.name, streams, run, answers))
            (arguments.out / f"{report.shape}-{server.name}-{streams}-{run}.json").write_text(json.dumps(answers))
            save(report, arguments.out)
    for _ in range(arguments.restarts):
        with running(server, arguments.out / f"{server.name}-again.log") as (_, start):
            report.starts.append(start)


def save(report: Report, out: Path) -> None:
    """After every point: a run that is cut short has lost nothing."""
    (out / f"{report.shape}.json").write_text(json.dumps(asdict(report), indent=1))
    (out / f"{report.shape}.md").write_text(report.markdown() + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="llama1b")
    parser.add_argument("--streams", type=int, nargs="+", default=(1, 64, 256))
    parser.add_argument("--servers", nargs="+", choices=("aserve", "vllm", "vllm4"), default=("aserve", "vllm"))
    parser.add_argument("--vllm-site", default="~/vllm-site", help="the folder that vLLM was installed into")
    parser.add_argument("--client-python", default=sys.executable, help="a Python that has vLLM, for the client")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--input", type=int, default=512)
    parser.add_argument("--output", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=4, help="requests a stream, 8 at least and 1,024 at most in all")
    parser.add_argument("--runs", type=int, default=1, help="of each point")
    parser.add_argument("--clients", type=int, default=4, help=f"client processes at {MANY_STREAMS} streams and more")
    parser.add_argument("--restarts", type=int, default=0, help="further starts of each server, with warm caches")
    parser.add_argument("--deadline", type=float, default=480, help="seconds after which no further point begins")
    parser.add_argument("--aserve-args", default="", help="further arguments of aserve, in one string")
    parser.add_argument("--vllm-args", default="", help="further arguments of vLLM, in one string")
    parser.add_argument("--client-args", default="", help='further arguments of the client, such as "--temperature 0"')
    arguments = parser.parse_args()
    # A run that is told to end takes its servers along: the exception passes through ``running``.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    arguments.out = arguments.out.resolve()
    arguments.out.mkdir(parents=True, exist_ok=True)
    report = Report(arguments.shape, (arguments.input, arguments.output), about_the_machine(arguments.vllm_site))
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model = write_model(Path(folder), arguments.shape)
        environment = vllm_environment(arguments.vllm_site)
        clients = []
        for number in range(arguments.clients):
            client = Client(environment, arguments.client_python, arguments.out / f"client{number}.log")
            stack.callback(client.close)
            clients.append(client)
        for client in clients:
            client.answer()
        try:
            measure(arguments, report, model, clients)
        finally:
            save(report, arguments.out)
            sys.stdout.write(report.markdown() + "\n")
    return 1 if report.not_run else 0


if __name__ == "__main__":
    sys.exit(main())
