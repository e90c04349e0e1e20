"""aserve beside vLLM on one GPU, in one run and with one client: starts, latencies, tokens a second, and what they owe.

    python tests/gpu/compare_vllm.py --shape llama1b --streams 1 64 256 --vllm-site ~/vllm-site --out results
    python tests/gpu/compare_vllm.py --shape llama8b --streams 1 16 64 --vllm-site ~/vllm-site --out results \\
        --servers aserve vllm "aserve 4096@16,64:--max-num-batched-tokens 4096" aserve@

Random weights (``make_models.py``), random prompts of 512 tokens, 256 tokens out, no end of sequence. The servers run
one after the other in the order given, so that --deadline cuts the last; each is warmed up; every point has prompts of
its own, the same ones for each server. The client is ``vllm bench serve``, of 64 streams and more as four processes
that begin together and whose requests are put together; it comes up beside the first server. aserve's own counts tell
what its steps were like; --traces keeps each, for Perfetto. Prints Markdown; keeps everything as JSON. A server is
NAME[@STREAMS][:ARGUMENTS], and NAME is or begins with

    aserve, vllm: with their own defaults, but for 256 sequences and a context of 8,192
    vllm4: vLLM with four front-end processes, for 64 streams and more

STREAMS, with commas, is the points it is run at: those of --streams if there is no @, none if nothing follows it (a
start alone). One that is named again is started again, with its caches warm, and its points are run again.
"""

import argparse
import gzip
import json
import os
import platform
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from io import TextIOWrapper
from pathlib import Path
from typing import Any, Final

from make_models import SHAPES, write_model
from vllm_report import Point, Report, ServerTotals, Start

ROOT: Final = Path(__file__).parents[2]
READY_S_MAX: Final = 180
CLIENT_S_MAX: Final = 120
"""No import of vLLM and no point takes longer."""
MANY_STREAMS: Final = 64
"""From here on the requests come from several client processes: one would be the bottleneck."""
WARM_UP: Final = (16, 32, 64)
"""Streams, requests and tokens out: half a second to two that bring up every client, prompts and rows together."""
EXPECTED_START_S: Final = {"aserve": 20.0, "vllm": 110.0}
"""Of the first of a kind; afterwards it is what the last one took. What would not be ready in time is not begun."""
COMPILED: Final = ("kernels compiled in", "Compiling a graph for")
"""What aserve and vLLM log when their caches were cold."""


class Failed(Exception):
    """A server of the comparison, or a run, did not do its part; the others go on."""


class ClientLost(Exception):
    """Nothing more can be measured."""


# --- servers


@dataclass(frozen=True, slots=True)
class Server:
    """kind: aserve or vllm. {port} in the command is filled in at each start."""

    name: str
    kind: str
    command: list[str]
    environment: dict[str, str]
    streams: tuple[int, ...]

    @property
    def file_name(self) -> str:
        return self.name.replace(" ", "-")


def servers(arguments: argparse.Namespace, model: Path) -> list[Server]:
    """What --servers asks for, in its order. Raises ValueError, which names what is wrong."""
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
    commands = {
        "aserve": aserve,
        "vllm": [*vllm, "--api-server-count", "1"],
        "vllm4": [*vllm, "--api-server-count", "4"],
    }
    many = tuple(streams for streams in arguments.streams if streams >= MANY_STREAMS)
    found: list[Server] = []
    for spec in arguments.servers:
        name, streams, more = parse_spec(spec)
        base = name.split()[0] if name else ""
        if base not in commands:
            raise ValueError(f"{spec!r}: a server's name begins with one of {', '.join(commands)}")
        kind = "aserve" if base == "aserve" else "vllm"
        usual = many if base == "vllm4" else tuple(arguments.streams)
        command = [*commands[base], *more]
        if any(other.name == name and other.command != command for other in found):
            raise ValueError(f"{spec!r}: {name} is named before with other arguments")
        found.append(
            Server(
                name,
                kind,
                command,
                ours if kind == "aserve" else theirs,
                usual if streams is None else streams,
            )
        )
    return found


def parse_spec(spec: str) -> tuple[str, tuple[int, ...] | None, list[str]]:
    """NAME[@STREAMS][:ARGUMENTS] as name, streams (None: the usual ones) and arguments. Raises ValueError."""
    head, _, more = spec.partition(":")
    name, at, streams = head.partition("@")
    try:
        numbers = tuple(int(number) for number in streams.split(",") if number.strip())
    except ValueError:
        numbers = (0,)
    if any(number < 1 for number in numbers):
        raise ValueError(f"{spec!r}: after @ come numbers of streams, with commas between them")
    return name.strip(), numbers if at else None, shlex.split(more)


def vllm_environment(site: str) -> dict[str, str]:
    """For vLLM and for the client: its own packages first, and no network."""
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    # FlashInfer's sampler is compiled at the first start, for which the machine needs a compiler and minutes.
    return os.environ | quiet | {"VLLM_USE_FLASHINFER_SAMPLER": "0", "PYTHONPATH": str(Path(site).expanduser())}


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@dataclass(frozen=True, slots=True)
class Served:
    """A server that runs: its base URL, the process that was started, and how that went."""

    url: str
    pid: int
    start: Start


@contextmanager
def running(server: Server, log: Path) -> Iterator[Served]:
    """Ended with all its processes."""
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
                raise Failed(f"{server.name} ended before it was ready:\n{tail(log)}")
            if time.monotonic() - started_s > READY_S_MAX:
                raise Failed(f"{server.name} was not ready after {READY_S_MAX} s:\n{tail(log)}")
            time.sleep(0.05)
        start.ready_s = time.monotonic() - started_s
        body = {"model": "m", "prompt": "one", "max_tokens": 1}
        asked = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        urllib.request.urlopen(asked, timeout=120).read()
        start.first_token_s = time.monotonic() - started_s
        start.compiled = any(mark in log.read_text(errors="replace") for mark in COMPILED)
        yield Served(url, process.pid, start)
    finally:
        end_group(process)


def is_healthy(url: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=1) as answer:
        return int(answer.status) == 200
    return False


def totals_of(served: Served) -> ServerTotals:
    """Of an aserve."""
    with urllib.request.urlopen(f"{served.url}/v1/stats", timeout=30) as answer:
        engine = json.load(answer)["engine"]
    counted = ("num_steps", "num_rows", "num_prefill_tokens", "bubble_s")
    return ServerTotals(**{name: engine[name] for name in counted}, cpu_s=cpu_s(served.pid))


def cpu_s(pid: int) -> float:
    """User and system time of all threads of one process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # from the third on; a name has spaces
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def save_trace(served: Served, seconds: float, file: Path) -> None:
    """What an aserve did in so many seconds until now, for Perfetto."""
    with (
        urllib.request.urlopen(f"{served.url}/v1/trace?seconds={seconds:.3f}", timeout=60) as answer,
        gzip.open(file, "wb", compresslevel=6) as output,
    ):
        shutil.copyfileobj(answer, output)


def tail(log: Path) -> str:
    return log.read_text(errors="replace")[-2000:]


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


class Clients:
    """The processes of one ``vllm_client.py``, which comes up on its own: ``ready`` waits for it."""

    def __init__(self, number: int, environment: dict[str, str], python: str, log: Path) -> None:
        pairs = [socket.socketpair() for _ in range(number)]
        theirs = [their.fileno() for _, their in pairs]
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [python, str(Path(__file__).with_name("vllm_client.py")), *map(str, theirs)],
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                env=environment | {"OMP_NUM_THREADS": "1"}, pass_fds=theirs,
            )  # fmt: skip
        self._log = log
        self._lines: list[TextIOWrapper] = []
        for ours, their in pairs:
            their.close()
            ours.settimeout(CLIENT_S_MAX)
            with ours:  # the file keeps it open
                self._lines.append(ours.makefile("rw"))
        self._is_ready = False

    def ready(self) -> None:
        """Blocks until vLLM is imported. Raises ClientLost."""
        if not self._is_ready:
            for lines in self._lines:
                self._read(lines)
            self._is_ready = True

    def run(self, arguments: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
        """The answers of as many clients as there are lists of ``arguments``, which send together.

        Raises Failed if requests did, ClientLost.
        """
        self.ready()
        used = self._lines[: len(arguments)]
        for lines, its in zip(used, arguments, strict=True):
            self._write(lines, json.dumps(its))
        first = [self._read(lines) for lines in used]
        errors = [line for line in first if line != "prepared\n"]
        prepared = [lines for lines, line in zip(used, first, strict=True) if line == "prepared\n"]
        for lines in prepared:
            self._write(lines, "no" if errors else "go")
        answers = [json.loads(line) for line in [*errors, *(self._read(lines) for lines in prepared)]]
        for answer in answers:
            if "error" in answer or answer["failed"]:
                raise Failed(f"the client failed: {answer.get('error') or answer['errors']}")
        return answers

    def _write(self, lines: TextIOWrapper, line: str) -> None:
        try:
            lines.write(line + "\n")
            lines.flush()
        except OSError:
            raise ClientLost(f"the client has ended or is silent:\n{tail(self._log)}") from None

    def _read(self, lines: TextIOWrapper) -> str:
        try:
            line = lines.readline()
        except OSError:
            line = ""
        if not line:
            raise ClientLost(f"the client has ended or is silent:\n{tail(self._log)}")
        return line

    def close(self) -> None:
        end_group(self._process)
        for lines in self._lines:
            with suppress(OSError):
                lines.close()


def drive(
    clients: Clients,
    number: int,
    url: str,
    model: Path,
    *,
    streams: int,
    requests: int,
    seed: int,
    lengths: tuple[int, int],
    more: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """One run over so many of the clients, which share streams and requests; the answer of each."""
    return clients.run(
        [
            [
                "--backend", "openai", "--base-url", url, "--endpoint", "/v1/completions", "--model", "m",
                "--tokenizer", str(model), "--dataset-name", "random", "--random-input-len", str(lengths[0]),
                "--random-output-len", str(lengths[1]), "--num-prompts", str(max(1, requests // number)),
                "--max-concurrency", str(max(1, streams // number)), "--request-rate", "inf", "--ignore-eos",
                "--seed", str(seed + client), "--disable-tqdm", "--save-detailed", "--ready-check-timeout-sec", "0",
                *more,
            ]
            for client in range(number)
        ]
    )  # fmt: skip


def about_the_machine(vllm_site: str) -> dict[str, str]:
    """Date, GPU and versions, as far as they can be told."""
    found = {"date": time.strftime("%Y-%m-%d", time.gmtime())}
    with suppress(OSError, subprocess.CalledProcessError):
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        found["GPU"] = subprocess.run(query, check=True, capture_output=True, text=True).stdout.strip()
    with suppress(OSError, subprocess.CalledProcessError):
        commit = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
        found["aserve"] = subprocess.run(commit, check=True, capture_output=True, text=True).stdout.strip()
    found["Python"] = platform.python_version()
    for package in ("torch", "triton"):
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    for folder in Path(vllm_site).expanduser().glob("vllm-*.dist-info"):
        found["vLLM"] = folder.name.removeprefix("vllm-").removesuffix(".dist-info")
    return found


# --- the run


class Stopwatch:
    """Adds to a report what the time since the last lap went to."""

    def __init__(self, report: Report, server: str) -> None:
        self._report = report
        self._server = server
        self._at_s = time.monotonic()

    def lap(self, what: str) -> None:
        now_s = time.monotonic()
        self._report.seconds.append((self._server, what, round(now_s - self._at_s, 2)))
        self._at_s = now_s


@dataclass(slots=True, kw_only=True)
class Comparison:
    """Each server in turn: its start, a warm-up, its points. All figures go to the report."""

    arguments: argparse.Namespace
    report: Report
    model: Path
    clients: Clients

    def run(self, order: Sequence[Server]) -> None:
        """A server that fails does not end the run."""
        report = self.report
        deadline_s = time.monotonic() + self.arguments.deadline
        expected_s = dict(EXPECTED_START_S)
        for server in order:
            if time.monotonic() + expected_s[server.kind] > deadline_s:
                points = " at " + ", ".join(map(str, server.streams)) + " streams" if server.streams else ", its start"
                report.not_run.append(server.name + points)
                continue
            try:
                self._run_server(server, deadline_s)
                expected_s[server.kind] = report.starts[-1].ready_s
            except ClientLost as error:
                report.not_run.append(f"{server.name} and all behind it: {error}")
                return
            except (Failed, OSError) as error:
                report.not_run.append(f"the rest of {server.name}: {error}")
            report.save(self.arguments.out)

    def _run_server(self, server: Server, deadline_s: float) -> None:
        arguments, report = self.arguments, self.report
        before = sum(start.server == server.name for start in report.starts)
        watch = Stopwatch(report, server.name)
        with running(server, arguments.out / f"{server.file_name}.{before}.log") as served:
            report.starts.append(served.start)
            watch.lap("start")
            if server.streams:
                self.clients.ready()
                watch.lap("waiting for the clients")
                streams, requests, tokens = WARM_UP
                drive(
                    self.clients, arguments.clients, served.url, self.model, streams=streams, requests=requests,
                    seed=7 + 100 * before, lengths=(arguments.input, min(tokens, arguments.output)),
                )  # fmt: skip
                watch.lap("warm-up")
            for run in range(arguments.runs):
                for streams in server.streams:
                    if time.monotonic() > deadline_s:
                        report.not_run.append(f"{server.name} at {streams} streams")
                        continue
                    self.run_point(server, served, streams)
                    watch.lap(f"x{streams}" + (f" run {run + 1}" if run else ""))
        watch.lap("end")

    def run_point(self, server: Server, served: Served, streams: int) -> None:
        """Raises Failed, ClientLost, OSError."""
        arguments, report, is_ours = self.arguments, self.report, server.kind == "aserve"
        number = sum((p.server, p.streams) == (server.name, streams) for p in report.points)
        before = totals_of(served) if is_ours else None
        answers = drive(
            self.clients, arguments.clients if streams >= MANY_STREAMS else 1, served.url, self.model, streams=streams,
            requests=min(max(8, streams * arguments.rounds), 1024), seed=10_000 * (number + 1) + 10 * streams,
            lengths=(arguments.input, arguments.output), more=shlex.split(arguments.client_args),
        )  # fmt: skip
        totals = (before, totals_of(served)) if before is not None else None
        report.points.append(Point.of(server.name, streams, number, answers, totals))
        began_s = min(answer["started_s"] for answer in answers)  # the clients' clock is the host's, and so is ours
        file = arguments.out / f"{report.shape}-{server.file_name}-{streams}-{number}.json"
        file.write_text(json.dumps(answers))
        report.save(arguments.out)
        if arguments.traces and is_ours:
            try:
                save_trace(served, time.monotonic() - began_s, file.with_suffix(".trace.json.gz"))
            except OSError as error:
                report.not_run.append(f"the trace of {server.name} at {streams} streams: {error}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="llama1b")
    parser.add_argument("--streams", type=int, nargs="+", default=(1, 64, 256))
    parser.add_argument("--servers", nargs="+", default=("aserve", "vllm"), metavar="NAME[@STREAMS][:ARGUMENTS]")
    parser.add_argument("--vllm-site", default="~/vllm-site", help="the folder that vLLM was installed into")
    parser.add_argument("--client-python", default=sys.executable, help="a Python that has vLLM, for the client")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--input", type=int, default=512)
    parser.add_argument("--output", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=4, help="requests a stream, 8 at least and 1,024 at most in all")
    parser.add_argument("--runs", type=int, default=1, help="of each point at each start of a server")
    parser.add_argument("--clients", type=int, default=4, help=f"client processes at {MANY_STREAMS} streams and more")
    parser.add_argument("--deadline", type=float, default=480, help="seconds after which nothing further begins")
    parser.add_argument("--traces", action="store_true", help="keep what each aserve did at each point, for Perfetto")
    parser.add_argument("--aserve-args", default="", help="further arguments of every aserve, in one string")
    parser.add_argument("--vllm-args", default="", help="further arguments of every vLLM, in one string")
    parser.add_argument("--client-args", default="", help='further arguments of the client, such as "--temperature 0"')
    arguments = parser.parse_args()
    # A run that is told to end takes its servers along: the exception passes through ``running``.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    arguments.out = arguments.out.resolve()
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder), arguments.shape)
        try:
            order = servers(arguments, model)
        except ValueError as error:
            parser.error(str(error))
        arguments.out.mkdir(parents=True, exist_ok=True)
        environment = vllm_environment(arguments.vllm_site)
        clients = Clients(arguments.clients, environment, arguments.client_python, arguments.out / "clients.log")
        report = Report(arguments.shape, (arguments.input, arguments.output), {})
        try:
            report.about.update(about_the_machine(arguments.vllm_site))
            Comparison(arguments=arguments, report=report, model=model, clients=clients).run(order)
        finally:
            clients.close()
            report.save(arguments.out)
            sys.stdout.write(report.markdown() + "\n")
    return 1 if report.not_run else 0


if __name__ == "__main__":
    sys.exit(main())
