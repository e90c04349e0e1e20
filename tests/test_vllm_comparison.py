"""The comparison with vLLM (tests/gpu/compare_vllm.py): which servers run, what is reported as met, who goes first."""

import argparse
import asyncio
import gzip
import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parent / "gpu"))

from compare_vllm import Comparison, Served, cpu_s, parse_spec, servers
from vllm_client import serve_runs
from vllm_report import Gate, Point, Report, ServerSteps, ServerTotals, Start


def point(server: str, streams: int = 64, run: int = 0, **figures: float) -> Point:
    rest: dict[str, Any] = {
        "ttft_p50": 50.0, "ttft_p99": 100.0, "tpot_p50": 2.0, "itl_p50": 2.0, "itl_p99": 9.0, "tokens_per_s": 1e4,
    }  # fmt: skip
    return Point(
        server=server, streams=streams, run=run, requests=1, output_tokens=1, client_cpu=0.5, **(rest | figures)
    )


def report(*points: Point, shape: str = "llama1b") -> Report:
    return Report(shape, (512, 256), {"GPU": "one"}, points=list(points))


def asked(*specs: str) -> argparse.Namespace:
    return argparse.Namespace(
        servers=specs, streams=(1, 64, 256), vllm_args="", aserve_args="--policy late", vllm_site="site"
    )


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        ("aserve", ("aserve", None, [])),
        ("aserve@", ("aserve", (), [])),
        ("vllm@64,256", ("vllm", (64, 256), [])),
        ("aserve 4096@16:--max-num-batched-tokens 4096", ("aserve 4096", (16,), ["--max-num-batched-tokens", "4096"])),
        ("aserve late:--policy late", ("aserve late", None, ["--policy", "late"])),
    ],
)
def test_a_server_is_a_name_its_points_and_its_arguments(spec: str, parts: tuple[Any, ...]) -> None:
    """All but the name may be left out."""
    assert parse_spec(spec) == parts


@pytest.mark.parametrize("spec", ["aserve@x", "aserve@0", "aserve:'"])
def test_a_spec_that_cannot_be_read_is_refused(spec: str) -> None:
    """Before any GPU time is spent on the others."""
    with pytest.raises(ValueError):
        parse_spec(spec)


def test_an_unknown_server_is_refused_by_name() -> None:
    """The sentence says what there is."""
    with pytest.raises(ValueError, match="'sglang': a server's name begins with one of aserve, vllm, vllm4"):
        servers(asked("sglang"), Path("model"))


def test_a_name_stands_for_one_setting() -> None:
    """Its points would be put together."""
    with pytest.raises(ValueError, match="aserve 4k is named before with other arguments"):
        servers(asked("aserve 4k:--chunks 4096", "aserve", "aserve", "aserve 4k:--chunks 8192"), Path("model"))


def test_servers_keep_their_order_and_their_own_points() -> None:
    """The order is what a deadline cuts from behind."""
    found = servers(asked("aserve", "vllm4", "aserve 4096@64:--chunks 4096", "vllm@"), Path("model"))

    assert [(server.name, server.kind, server.streams) for server in found] == [
        ("aserve", "aserve", (1, 64, 256)),
        ("vllm4", "vllm", (64, 256)),
        ("aserve 4096", "aserve", (64,)),
        ("vllm", "vllm", ()),
    ]
    assert found[2].command[-4:] == ["--policy", "late", "--chunks", "4096"]


@pytest.mark.parametrize(
    ("gate", "ours", "theirs", "is_met"),
    [
        (Gate("tpot_p50"), 2.0, 2.0, True),
        (Gate("tpot_p50"), 2.1, 2.0, False),
        (Gate("tokens_per_s", 1.8), 180.0, 100.0, True),
        (Gate("tokens_per_s", 1.8), 179.0, 100.0, False),
        (Gate("tpot_p50", limit=4.5), 4.5, None, True),
        (Gate("tokens_per_s", limit=100), 99.0, None, False),
        (Gate("ttft_p50"), 1.0, None, None),
    ],
)
def test_a_gate_knows_which_way_is_better(gate: Gate, ours: float, theirs: float | None, is_met: bool | None) -> None:
    """Times have to be lower, tokens a second higher; without vLLM's figure only a limit can be met."""
    assert gate.is_met(ours, theirs) is is_met


def test_gates_are_held_against_the_best_of_vllm() -> None:
    """Of its servers the better one counts, figure by figure."""
    told = report(
        point("aserve", 256, tokens_per_s=30_000),
        point("vllm", 256, tokens_per_s=14_000),
        point("vllm4", 256, tokens_per_s=16_000),
    ).markdown()

    assert "| 256 | aserve | tokens/s | ≥ 2x vLLM's | 30000 | 16000 | missed |" in told


def test_a_gate_is_open_as_long_as_no_setting_meets_it() -> None:
    """Each setting has its row; what is left over is named."""
    told = report(
        point("aserve", tpot_p50=2.5, ttft_p50=10),
        point("aserve 2048", tpot_p50=1.5, ttft_p50=90),
        point("vllm", tpot_p50=2.0, ttft_p50=50, tokens_per_s=9e3),
    ).markdown()

    assert "| 64 | aserve | TPOT p50 ms | ≤ vLLM's | 2.5 | 2 | missed |" in told
    assert "| 64 | aserve 2048 | TPOT p50 ms | ≤ vLLM's | 1.5 | 2 | met |" in told
    assert "gates that no setting met: tokens/s ≥ 1.8x vLLM's at 64\n" in told


def test_what_was_not_run_is_not_met() -> None:
    """A gate without figures is neither passed over nor called missed."""
    told = report(point("aserve", tpot_p50=0.7)).markdown()

    assert "gates that no setting met: none\n" in told
    assert "TPOT p50 ms ≤ vLLM's at 64" in told.split("gates not measured: ")[1]


def test_of_several_runs_the_median_counts() -> None:
    """In the ratios and at the gates; the points stay apart."""
    runs = [point("aserve", run=run, tpot_p50=tpot) for run, tpot in enumerate((1.0, 5.0, 2.0))]
    told = report(*runs, point("vllm", tpot_p50=3.0)).markdown()

    assert "| 64 | aserve | vllm | 1.00x | 1.00x | 1.50x | 1.00x | 1.00x |" in told


def test_a_run_that_was_cut_short_is_told() -> None:
    """Before the first point there are starts, and what did not come."""
    cut = report(shape="tiny")
    cut.starts.append(Start("aserve", 1.5, 1.625, compiled=True))
    cut.not_run.append("vllm at 64 streams")

    assert "| aserve | compiled | 1.50 | 1.62 |" in cut.markdown()
    assert cut.markdown().endswith("not run: vllm at 64 streams")


def test_what_aserve_counted_is_told_by_the_step_and_the_token() -> None:
    """A point is the difference of two readings; the bubble is a share of its time."""
    before = ServerTotals(num_steps=100, num_rows=1000, num_prefill_tokens=500, bubble_s=2.0, cpu_s=10.0)
    after = ServerTotals(num_steps=150, num_rows=1400, num_prefill_tokens=1500, bubble_s=2.5, cpu_s=10.25)

    assert ServerSteps.between(before, after, seconds=5.0, output_tokens=1000) == ServerSteps(
        num_steps=50, rows_a_step=8.0, prompt_tokens_a_step=20.0, bubble=0.1, cpu_us=250.0
    )


def test_the_cpu_time_of_a_process_is_all_its_threads() -> None:
    """As the process itself sees it, but for the kernel's tick."""
    thread = Thread(target=lambda: sum(range(3_000_000)))
    thread.start()
    thread.join()

    assert cpu_s(os.getpid()) == pytest.approx(time.process_time(), abs=0.1)


class Stub(ThreadingHTTPServer):
    """An aserve that counts ten steps from one reading of its figures to the next, and keeps a trace if it has one."""

    def __init__(self, trace: bytes | None) -> None:
        super().__init__(("127.0.0.1", 0), StubHandler)
        self.trace = trace
        self.asked: list[str] = []
        self.num_steps = 0

    def answer(self, path: str) -> bytes | None:
        self.asked.append(path)
        if path.startswith("/v1/trace"):
            return self.trace
        self.num_steps += 10
        rows, tokens = 8 * self.num_steps, 32 * self.num_steps
        engine = {"num_steps": self.num_steps, "num_rows": rows, "num_prefill_tokens": tokens, "bubble_s": 0.0}
        return json.dumps({"engine": engine | {"num_streams": 0}}).encode()


class StubHandler(BaseHTTPRequestHandler):
    server: Stub

    def do_GET(self) -> None:
        answer = self.server.answer(self.path)
        self.send_response(404 if answer is None else 200)
        self.end_headers()
        self.wfile.write(answer or b"")

    def log_message(self, *_: Any) -> None:
        """Tests are silent."""


@pytest.fixture
def stub(request: pytest.FixtureRequest) -> Iterator[Stub]:
    with Stub(getattr(request, "param", b'{"traceEvents": []}')) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


class OneAnswer:
    """Clients of which one has had its three tokens, begun two seconds ago."""

    def run(self, arguments: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
        began_s = time.monotonic() - 2
        return [
            {
                "completed": 1, "failed": 0, "output_tokens": 3, "started_s": began_s, "ended_s": began_s + 1.5,
                "ttft_s": [0.5], "tpot_s": [0.5], "itl_s": [0.5, 0.5], "cpu": 0.25,
            }
        ]  # fmt: skip


def run_point(stub: Stub, out: Path, spec: str, *, traces: bool = False) -> Report:
    """One point of that server, as if it were the stub."""
    arguments = asked(spec)
    arguments.__dict__.update(out=out, traces=traces, clients=1, rounds=1, input=8, output=3, client_args="")
    found = report()
    clients: Any = OneAnswer()
    (server,) = servers(arguments, Path("model"))
    served = Served(f"http://127.0.0.1:{stub.server_port}", os.getpid(), Start(server.name))
    Comparison(arguments=arguments, report=found, model=Path("model"), clients=clients).run_point(server, served, 64)
    return found


def test_a_point_of_aserve_tells_of_its_steps(stub: Stub, tmp_path: Path) -> None:
    """They are in the JSON and in a table of their own; a trace is kept only where it is wanted."""
    told = run_point(stub, tmp_path, "aserve")
    kept = json.loads((tmp_path / "llama1b.json").read_text())["points"][0]["server_steps"]

    assert stub.asked == ["/v1/stats", "/v1/stats"]
    assert (kept["num_steps"], kept["rows_a_step"], kept["prompt_tokens_a_step"]) == (10, 8.0, 32.0)
    assert "| 64 | aserve | 10 | 8.0 | 32.0 | 0.0% |" in told.markdown().split("inside aserve:")[1]


def test_a_point_of_vllm_is_not_asked_for_steps(stub: Stub, tmp_path: Path) -> None:
    """Nor for a trace."""
    told = run_point(stub, tmp_path, "vllm", traces=True)

    assert (stub.asked, told.points[0].server_steps, "inside" in told.markdown()) == ([], None, False)


def test_a_trace_is_of_the_time_since_the_first_request(stub: Stub, tmp_path: Path) -> None:
    """Nothing before it, and it lies beside the answers."""
    told = run_point(stub, tmp_path, "aserve 2k", traces=True)
    seconds = float(stub.asked[-1].removeprefix("/v1/trace?seconds="))

    assert 2 <= seconds < 10
    assert gzip.decompress((tmp_path / "llama1b-aserve-2k-64-0.trace.json.gz").read_bytes()) == stub.trace
    assert told.not_run == []


@pytest.mark.parametrize("stub", [None], indirect=True)
def test_a_trace_that_cannot_be_had_leaves_the_point(stub: Stub, tmp_path: Path) -> None:
    """As where the server keeps none."""
    told = run_point(stub, tmp_path, "aserve", traces=True)

    assert (len(told.points), told.not_run) == (1, ["the trace of aserve at 64 streams: HTTP Error 404: Not Found"])
    assert list(tmp_path.glob("*.gz")) == []


class Serve:
    """vLLM's benchmark module: a run is one request of three tokens."""

    def __init__(self) -> None:
        self.sent: list[Sequence[str]] = []

    def main(self, arguments: Sequence[str]) -> dict[str, Any]:
        return asyncio.run(self.benchmark(arguments))

    async def benchmark(self, arguments: Sequence[str]) -> dict[str, Any]:
        self.sent.append(arguments)
        return {
            "completed": 1, "failed": 0, "errors": [""], "total_output_tokens": 3, "total_input_tokens": 5,
            "start_times": [10.0], "ttfts": [0.5], "itls": [[0.25, 0.75]], "output_lens": [3],
        }  # fmt: skip


class Parser:
    def parse_args(self, arguments: Sequence[str]) -> Sequence[str]:
        if arguments == ["--nonsense"]:
            raise SystemExit(2)
        return arguments


class Conversation:
    """A client's process as a thread, and the other end of its socket."""

    def __init__(self) -> None:
        self.serve = Serve()
        ours, theirs = socket.socketpair()
        with ours, theirs:
            self._ours, self._theirs = ours.makefile("rw"), theirs.makefile("rw")
        self._theirs.reconfigure(line_buffering=True)
        self._thread = Thread(target=serve_runs, args=(self.serve, Parser(), self._theirs))
        self._thread.start()

    def hear(self) -> str:
        return self._ours.readline().rstrip("\n")

    def ask(self, line: str) -> str:
        self._ours.write(line + "\n")
        self._ours.flush()
        return self.hear()

    def close(self) -> None:
        self._ours.close()
        self._thread.join()
        self._theirs.close()


@pytest.fixture
def client() -> Any:
    conversation = Conversation()
    yield conversation
    conversation.close()


def test_a_client_sends_when_it_is_told_to(client: Conversation) -> None:
    """Its prompts are made before; figures are of the requests alone."""
    assert client.hear() == "ready"
    assert (client.ask('["--seed", "1"]'), client.serve.sent) == ("prepared", [])
    answer = json.loads(client.ask("go"))

    assert client.serve.sent == [["--seed", "1"]]
    assert (answer["started_s"], answer["ended_s"], answer["tpot_s"]) == (10.0, 11.5, [0.5])


def test_a_run_that_is_called_off_leaves_the_client_ready(client: Conversation) -> None:
    """So does one whose arguments vLLM does not know."""
    assert client.hear() == "ready"
    answers = [client.ask(line) for line in ("[]", "no", '["--nonsense"]', "[]")]
    last = json.loads(client.ask("go"))

    assert answers == ["prepared", '{"error": "RuntimeError: called off"}', '{"error": "SystemExit: 2"}', "prepared"]
    assert (last["completed"], len(client.serve.sent)) == (1, 1)
