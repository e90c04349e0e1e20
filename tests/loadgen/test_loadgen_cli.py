"""The command, as people run it."""

import ast
import asyncio
import json
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from loadgen_stub import HEAD, answer_well, loopback_server

import loadgen

PACKAGE = Path(loadgen.__file__).parent


async def command(*arguments, base_url="http://127.0.0.1:9", interrupt_when=None):
    """Run ``loadgen run`` and return its exit status and output."""
    return await loadgen_command(
        "run", "--base-url", base_url, "--model", "m", *arguments, interrupt_when=interrupt_when
    )


async def loadgen_command(*arguments, interrupt_when=None):
    """Run the command and return its exit status and output."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "loadgen", *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=PACKAGE.parent,
    )
    if interrupt_when is not None:
        await interrupt_when.wait()
        process.send_signal(signal.SIGINT)
    output, _ = await process.communicate()
    return process.returncode, output.decode()


async def test_a_run_of_two_processes_is_one_result(tmp_path):
    """Two processes send each request once and give one table and one file, in which their times compare."""

    async def answer_in_a_while(writer):
        # A process has four turns, so that one is at work when the other begins, however late the host lets it.
        await asyncio.sleep(0.1)
        await answer_well(writer)

    async with loopback_server(answer_in_a_while) as server:
        status, output = await command(
            *("--concurrency", "5", "--num-requests", "40", "--warmup-requests", "3", "--processes", "2"),
            *("--json", str(tmp_path / "run.json"), "--label", "who=test"),
            base_url=server.base_url,
        )

    assert status == 0, output
    assert "requests    40 ok, 0 failed" in output
    assert len(server.bodies) == 43
    fields = json.loads((tmp_path / "run.json").read_bytes())
    assert [r["index"] for r in fields["requests"]] == list(range(40))
    assert {r["process"] for r in fields["requests"]} == {0, 1}
    assert fields["summary"]["output_tokens"]["mean"] == 4
    assert fields["options"]["labels"] == {"who": "test"}
    assert len(fields["processes"]) == 2
    spans = [
        (min(r["sent_s"] for r in own), max(r["end_s"] for r in own))
        for own in ([r for r in fields["requests"] if r["process"] == p] for p in (0, 1))
    ]
    assert max(begin for begin, _ in spans) < min(end for _, end in spans)


async def test_an_open_run_over_completions():
    """Poisson arrivals on the other endpoint, with fields of the user's own."""
    async with loopback_server(answer_well) as server:
        status, output = await command(
            *(
                "--rate",
                "200",
                "--words",
                "5",
                "--num-requests",
                "20",
                "--endpoint",
                "completions",
                "--extra-body",
                '{"top_k": 1}',
            ),
            base_url=server.base_url,
        )

    assert status == 0, output
    assert "Poisson arrivals, 200 requests/s" in output
    assert server.heads[0].startswith(b"POST /v1/completions ")
    assert len(server.bodies[0]["prompt"].split()) == 5
    assert server.bodies[0]["top_k"] == 1


@pytest.mark.parametrize(("flags", "expected"), [((), 1), (("--allow-errors",), 0)])
async def test_failed_requests_set_the_exit_status(flags, expected):
    """A failed request fails the command, unless errors are allowed; it is shown by kind either way."""

    async def refuse(writer):
        writer.write(b"HTTP/1.1 429 Busy\r\nContent-Length: 0\r\n\r\n")

    async with loopback_server(refuse) as server:
        status, output = await command("--num-requests", "3", *flags, base_url=server.base_url)

    assert status == expected, output
    assert "3 × http_429" in output


@pytest.mark.parametrize("processes", ["1", "2"])
async def test_an_interruption_reports_what_there_is(processes):
    """SIGINT ends a run of one or several processes early, with a report."""
    waiting = asyncio.Event()

    async def answer_once_then_hang(writer):
        if len(server.bodies) <= 2:
            await answer_well(writer)
        else:
            writer.write(HEAD)
            if len(server.bodies) >= 4:
                waiting.set()
            await asyncio.Event().wait()

    async with loopback_server(answer_once_then_hang) as server:
        status, output = await command(
            *("--num-requests", "50", "--concurrency", "2", "--processes", processes),
            base_url=server.base_url,
            interrupt_when=waiting,
        )

    assert status == 1, output
    assert "requests    2 ok, 2 failed" in output
    assert "2 × interrupted" in output


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--concurrency", "1", "--processes", "2"), "2 processes cannot share a concurrency of 1"),
        (("--concurrency", "2000"), "exceeds --max-inflight 1024"),
        (("--prompts", "/nowhere/x.jsonl"), "cannot be read"),
        (("--json", "/nowhere/x.json"), "there is no folder"),
        (("--rate", "0"), "must be above 0"),
        (("--extra-body", "[]"), "must be a JSON object"),
        (("--rate", "1", "--concurrency", "1"), "not allowed with"),
        (("--header", "nonsense"), "must be NAME:VALUE"),
    ],
)
async def test_options_that_make_no_run(arguments, complaint):
    """Bad options are named before anything is sent, with exit status 2."""
    status, output = await command(*arguments)

    assert status == 2
    assert complaint in output


async def test_a_scenario_is_run_and_its_keys_replaced(tmp_path):
    """A scenario of the library runs with flags and keys laid over it, and every form of report is written."""
    names = {kind: str(tmp_path / f"run.{kind}") for kind in ("json", "html", "trace", "markdown")}
    async with loopback_server(answer_well) as server:
        status, output = await command(
            "chat",
            *("--num-requests", "4", "--concurrency", "4", "--max-tokens", "4"),
            *("--set", "work.think_ms=1", "--set", "arrivals.ramp_s=0"),
            *(part for kind, name in names.items() for part in (f"--{kind}", name)),
            base_url=server.base_url,
        )

    assert status == 0, output
    assert "chat: closed loop, 4 at once" in output
    assert "goodput     100.0% of 8" in output
    assert [len(body["messages"]) for body in server.bodies] == [1] * 4 + [3] * 4
    fields = json.loads((tmp_path / "run.json").read_bytes())
    assert [(r["index"], r["turn"]) for r in fields["requests"]] == [(i, t) for i in range(4) for t in range(2)]
    assert fields["figures"]["goodput_share"] == 1.0
    assert "</html>" in (tmp_path / "run.html").read_text()
    assert json.loads((tmp_path / "run.trace").read_bytes())["traceEvents"]
    assert "| TPOT |" in (tmp_path / "run.markdown").read_text()


async def test_a_broken_limit_sets_the_exit_status():
    """A limit fails the command and is named."""
    async with loopback_server(answer_well) as server:
        kept = await command("--num-requests", "3", "--limit", "e2e_ms_p99 < 5000", base_url=server.base_url)
        broken = await command("--num-requests", "3", "--limit", "e2e_ms_p99 < 0.001", base_url=server.base_url)

    assert kept[0] == 0, kept[1]
    assert broken[0] == 1
    assert "limit       e2e_ms_p99 < 0.001: it is" in broken[1]


async def test_a_sweep_and_a_comparison(tmp_path):
    """Both run from the command line and write what they found."""
    async with loopback_server(answer_well) as server:
        swept = await loadgen_command(
            *("sweep", "--base-url", server.base_url, "--model", "m", "--low", "40", "--high", "80"),
            *("--seconds", "0.3", "--html", str(tmp_path / "sweep.html"), "--json", str(tmp_path / "sweep.json")),
        )
        compared = await loadgen_command(
            *("compare", server.base_url, server.base_url, "--model", "m", "--rounds", "2", "--num-requests", "4"),
            *("--limit", "e2e_ms_p50 < 1000", "--markdown", str(tmp_path / "compare.md")),
        )

    assert swept[0] == 0, swept[1]
    assert "highest load that holds: 80 requests/s" in swept[1]
    assert [point["load"] for point in json.loads((tmp_path / "sweep.json").read_bytes())["points"]] == [40, 80]
    assert "</html>" in (tmp_path / "sweep.html").read_text()
    assert compared[0] == 0, compared[1]
    assert "round 2 of 2" in compared[1]
    assert "| e2e_ms_p50 |" in (tmp_path / "compare.md").read_text()


async def test_the_library_is_listed_and_shown():
    """Names with what they are about; a name gives its file."""
    _, listed = await loadgen_command("scenarios")
    _, shown = await loadgen_command("scenarios", "rag")

    assert "hostile" in listed
    assert shown == (PACKAGE / "scenarios" / "rag.toml").read_text()


async def test_the_stub_serves_and_writes_its_truth(tmp_path):
    """The scripted server takes any port, names it, names its model, and says at its end what it played."""
    truth = tmp_path / "truth.json"
    stub = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "loadgen", "stub", "--port", "0", "--ttft-ms", "1", "--gap-ms", "1"),
        *("--truth", str(truth)),
        stdout=subprocess.PIPE,
        cwd=PACKAGE.parent,
    )
    base_url = (await stub.stdout.readline()).decode().strip()
    status, output = await loadgen_command("run", "--base-url", base_url, "--num-requests", "5", "--max-tokens", "3")
    stub.send_signal(signal.SIGTERM)
    await stub.wait()

    assert status == 0, output
    assert output.startswith("stub at ")
    answers = json.loads(truth.read_bytes())["answers"]
    assert [len(each["event_ms"]) for each in answers] == [3] * 5


def test_it_can_be_installed_on_its_own():
    """Its own project file names nothing but the two optional packages, and takes every kind of file along."""
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())

    assert [re.match(r"[\w-]+", each)[0] for each in project["project"]["dependencies"]] == ["uvloop", "orjson"]
    patterns = project["tool"]["setuptools"]["package-data"]["loadgen"]
    files = {path.relative_to(PACKAGE) for path in PACKAGE.rglob("*") if path.is_file() and "docs" not in path.parts}
    data = {path for path in files if path.suffix not in (".py", ".pyc") and path.name != "pyproject.toml"}
    assert {path for path in data if not any(path.match(p) for p in patterns)} <= {Path("README.md")}


def test_help_loads_next_to_nothing():
    """Help needs neither asyncio nor multiprocessing nor uvloop, so it is there at once."""
    code = """
import sys, loadgen.__main__
try:
    loadgen.__main__.main(["run", "--help"])
except SystemExit as end:
    assert end.code == 0
print("loaded:", sorted({"asyncio", "multiprocessing", "uvloop", "orjson", "ssl", "dataclasses"} & set(sys.modules)))
"""

    output = subprocess.run(
        [sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True, check=True
    ).stdout

    assert output.endswith("loaded: []\n")


def test_only_the_wire_is_shared():
    """The package imports nothing of the server it measures, and nothing but the two optional packages."""
    imported = set()
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add((node.module or "").partition(".")[0])

    assert imported - sys.stdlib_module_names == {"loadgen", "uvloop", "orjson"}
