"""The command, as people run it."""

import ast
import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from loadgen_stub import HEAD, answer_well, loopback_server

import loadgen

PACKAGE = Path(loadgen.__file__).parent


async def command(*arguments, base_url="http://127.0.0.1:9", interrupt_when=None):
    """Run the command and return its exit status and output."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "loadgen", "run", "--base-url", base_url, "--model", "m", *arguments),
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
    async with loopback_server(answer_well) as server:
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
