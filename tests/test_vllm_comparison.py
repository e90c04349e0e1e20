"""The comparison with vLLM (tests/gpu/compare_vllm.py): which servers run, what is reported as met, who goes first."""

import argparse
import asyncio
import json
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parent / "gpu"))

from compare_vllm import parse_spec, servers
from vllm_client import serve_runs
from vllm_report import Gate, Point, Report, Start


def point(server: str, streams: int = 64, run: int = 0, **figures: float) -> Point:
    rest = {"ttft_p50": 50.0, "ttft_p99": 100.0, "tpot_p50": 2.0, "itl_p50": 2.0, "itl_p99": 9.0, "tokens_per_s": 1e4}
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
