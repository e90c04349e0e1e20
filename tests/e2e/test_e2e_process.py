"""``python -m aserve`` as its users meet it: every way to a model, mistakes in one sentence, and its end."""

import asyncio
import os
import random
import resource
import signal
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import aiohttp
import pytest
from aserve_process import (
    ServerProcess,
    Streaming,
    add_weights,
    clean_environment,
    command,
    failed_start,
    serving,
    slow_steps,
    tiny_folder,
)
from hub_stub import serving_hub
from tiny_gguf import write_tiny_model

pytestmark = pytest.mark.torch

NUM_CYCLES = int(os.environ.get("ASERVE_TEST_CYCLES", "6"))
"""Of SIGTERM under load; ASERVE_TEST_CYCLES=200 is for a night."""


def asked(server: ServerProcess, model: str) -> str:
    """The text of a short greedy completion."""

    async def ask() -> str:
        async with server.client() as client:
            body = {"model": model, "prompt": "Hello", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
            async with client.post("/v1/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
                return str((await answer.json())["choices"][0]["text"])

    return asyncio.run(ask())


# --- ways to a model


def test_a_second_start_needs_no_network(default_server: ServerProcess) -> None:
    """The default model was started with every way to a network broken; it names itself and says what was decided."""
    (loaded,) = default_server.logged("model.loaded")

    assert default_server.get("/v1/models", key="sk-test")["data"][0]["id"] == "SmolLM2-135M-Instruct"
    assert (loaded["origin"], loaded["max_model_len"], loaded["max_num_seqs"]) == ("default", 8192, 64)
    assert loaded["kv_cache_mib"] == loaded["num_blocks"] * 32 * 23040 // 2**20


def test_a_sharded_folder_under_other_names(tmp_path: Path) -> None:
    """Several safetensors files with an index; every alias answers, and the log tells that the pool cut the context."""
    folder = add_weights(tiny_folder(tmp_path / "sharded"), num_shards=3)
    with serving("--model", str(folder), "--served-model-name", "one,two", "--num-blocks", "100") as server:
        models = server.get("/v1/models")["data"]
        (lowered,) = server.logged("model.max_model_len_lowered")

        assert [(model["id"], model["max_model_len"]) for model in models] == [("one", 3200), ("two", 3200)]
        assert asked(server, "one") == asked(server, "two") != ""
        assert (lowered["wanted"], lowered["max_model_len"]) == (8192, 3200)


def test_a_gguf_file(tmp_path: Path) -> None:
    """One file is served under its name, with options from the environment and a config file."""
    (tmp_path / "my.toml").write_text("[scheduler]\nmax_num_seqs = 3\n[model]\nthreads = 1\n")
    environment = {"ASERVE_MODEL__CACHE_DIR": str(tmp_path / "cache"), "ASERVE_CONFIG": str(tmp_path / "my.toml")}
    with serving("--model", str(write_tiny_model(tmp_path / "tiny.gguf")), environment=environment) as server:
        assert asked(server, "tiny") != ""
        assert server.logged("model.loaded")[0]["max_num_seqs"] == 3


def test_a_hub_id(tmp_path: Path) -> None:
    """The model comes from the hub's endpoint, is served under its id, and only what is needed was fetched."""
    folder = add_weights(tiny_folder(tmp_path / "tiny"), num_shards=2)
    with serving_hub() as hub:
        hub.files = {file.name: file.read_bytes() for file in folder.iterdir()} | {"pytorch_model.bin": b"pickle"}
        environment = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_TELEMETRY": "1"}
        with serving("--model", "org/tiny", "--threads", "1", environment=environment) as server:
            assert asked(server, "org/tiny") != ""
        assert hub.fetched() == hub.files.keys() - {"pytorch_model.bin"}


# --- mistakes


@pytest.mark.parametrize(
    ("arguments", "environment", "sentence"),
    [
        (["--model", "/nowhere/model"], {}, "there is no file or folder '/nowhere/model', and a hub id reads org/name"),
        (["--model", "{tmp}"], {}, "{tmp} is not a model: it has no config.json."),
        (["--port", "99999"], {}, "server.port (command line --port): 99999 is not between 0 and 65535."),
        (["--server.prot", "1"], {}, "There is no option 'server.prot'; the nearest is server.port."),
        (["--prot", "1"], {}, "There is no flag --prot; the nearest is --port."),
        ([], {"ASERVE_SERVER__PROT": "1"}, "ASERVE_SERVER__PROT is no option; the nearest is ASERVE_SERVER__PORT."),
        ([], {"ASERVE_CONFIG": "{tmp}/broken.toml"}, "The config file '{tmp}/broken.toml' is not valid TOML: "),
        ([], {"ASERVE_CONFIG": "{tmp}/unknown.toml"}, "unknown.toml: there is no option 'server.prot'; the nearest is"),
        (
            ["--max-num-seqs", "64", "--max-num-batched-tokens", "79"],
            {},
            "scheduler.max_num_batched_tokens: 79 is too few; a step must hold max_num_seqs + block_size = 96 tokens;",
        ),
        (["--host", "192.0.2.1"], {}, "This machine has no address 192.0.2.1; choose another one with --host."),
    ],
)
def test_mistakes_that_need_no_model(
    tmp_path: Path, arguments: list[str], environment: dict[str, str], sentence: str
) -> None:
    """One sentence on standard error, status 2, no traceback, before anything heavy is loaded."""
    (tmp_path / "broken.toml").write_text("[server\n")
    (tmp_path / "unknown.toml").write_text("[server]\nprot = 1\n")
    arguments = [argument.format(tmp=tmp_path) for argument in arguments]
    environment = {name: value.format(tmp=tmp_path) for name, value in environment.items()}

    assert sentence.format(tmp=tmp_path) in failed_start(*arguments, environment=environment)


def test_a_taken_port_is_found_before_the_model_is_loaded() -> None:
    """The port comes before the model, whose name is wrong too."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        assert failed_start("--port", str(port), "--model", "/nowhere") == (
            f"Port {port} on 127.0.0.1 is taken by another program; choose another one with --port."
        )


@pytest.mark.parametrize(
    ("changes", "arguments", "sentence"),
    [
        ({"quantization_config": {"quant_method": "awq"}}, [], "This checkpoint is quantised (awq), which is not"),
        ({"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, [], "rope type 'spiral' is not one of default, "),
        ({}, ["--model.kv-cache-gib", "0.00001"], "Too little memory: "),
    ],
    ids=["quantised", "rope", "memory"],
)
def test_models_that_cannot_be_served(
    tmp_path: Path, changes: dict[str, object], arguments: list[str], sentence: str
) -> None:
    """What only shows when the model is loaded is one sentence all the same."""
    folder = tiny_folder(tmp_path / "model", **changes)

    said = failed_start("--port", "0", "--model", str(folder), "--model.load-format", "dummy", *arguments)

    assert sentence in said


def test_help_takes_a_third_of_a_second_of_cpu() -> None:
    """``--help`` of the whole process, the interpreter's start included."""
    best_s = float("inf")
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command("--help"), env=clean_environment(), stdout=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        best_s = min(best_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)

    assert best_s < 0.3


# --- its end


async def until_draining(server: ServerProcess) -> None:
    """Ask /ready until it is not well: the signal is on its way."""
    async with server.client() as client:
        while True:
            async with client.get("/ready") as answer:
                if answer.status == 503:
                    return


async def until_waiting(client: aiohttp.ClientSession, count: int) -> None:
    """Ask for the figures until so many requests wait in the queue."""
    while True:
        async with client.get("/v1/stats") as answer:
            if (await answer.json())["engine"]["num_waiting"] == count:
                return


async def test_sigterm_lets_what_was_taken_finish(tiny_model: list[str]) -> None:
    """A running and a waiting stream end whole; the idle connection closes; new work is refused; the status is 0."""
    with serving(*tiny_model, "--max-num-seqs", "1", environment=slow_steps(0.02)) as server:
        async with server.client() as client:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
            running = Streaming(client, max_tokens=30, ignore_eos=True)
            await running.began.wait()
            waiting = Streaming(client, max_tokens=3, ignore_eos=True)
            await until_waiting(client, 1)
            server.signal(signal.SIGTERM)
            await until_draining(server)
            async with client.post("/v1/completions", json={"prompt": "Hello"}) as refused:
                status, retry_after = refused.status, refused.headers["Retry-After"]
            await asyncio.gather(running.ended(), waiting.ended())

            assert (status, retry_after) == (503, "1")
            assert (running.end, waiting.end) == ("whole", "whole")
            assert await reader.read() == b""
            writer.close()
        assert server.exit_status(3) == 0


async def test_what_outlasts_the_drain_gets_a_last_event(tiny_model: list[str]) -> None:
    """At the limit the stream ends in an error and without [DONE]; the status is 0 all the same. SIGINT is SIGTERM."""
    slow = slow_steps(0.02)
    with serving(*tiny_model, "--server.drain-timeout-s", "0.3", environment=slow) as server:
        async with server.client() as client:
            stream = Streaming(client, max_tokens=2000, ignore_eos=True)
            await stream.began.wait()
            start_s = time.monotonic()
            server.signal(signal.SIGINT)
            await stream.ended()
        status, seconds = server.exit_status(5), time.monotonic() - start_s

        assert stream.end == "server_draining"
        assert (status, seconds < 3) == (0, True)


async def test_a_second_signal_ends_it_at_once(tiny_model: list[str]) -> None:
    """The stream is cut long before the drain's limit, though a step hangs in the device."""
    hang = {"ASERVE_FAULTS": "runner.forward=hang,after=20"}
    with serving(*tiny_model, environment=hang) as server:
        async with server.client() as client:
            stream = Streaming(client, max_tokens=2000, ignore_eos=True)
            await stream.began.wait()
            server.signal(signal.SIGTERM)
            await until_draining(server)
            start_s = time.monotonic()
            server.signal(signal.SIGTERM)
            await stream.ended()
        status, seconds = server.exit_status(5), time.monotonic() - start_s

        assert stream.end == "cut"
        assert (status, seconds < 2) == (0, True)


@pytest.mark.parametrize(
    ("fault", "options", "sentence"),
    [
        ("raise:DeviceLost", [], "injected at runner.forward"),
        ("hang", ["--engine.watchdog-s", "0.5"], "the device hangs"),
    ],
)
async def test_a_lost_device_ends_the_process(
    tiny_model: list[str], fault: str, options: list[str], sentence: str
) -> None:
    """Every open stream gets an error event, nothing is ready any more, and the status is 1 within five seconds."""
    environment = {"ASERVE_FAULTS": f"runner.forward={fault},after=50"}
    with serving(*tiny_model, *options, environment=environment) as server:
        async with server.client() as client:
            streams = [Streaming(client, max_tokens=2000, ignore_eos=True) for _ in range(3)]
            await asyncio.gather(*(stream.ended() for stream in streams))
            start_s = time.monotonic()
            try:
                async with client.get("/ready") as answer:
                    is_ready = answer.status == 200
            except (OSError, aiohttp.ClientConnectionError):  # gone already, or in the middle of it
                is_ready = False
        status, seconds = server.exit_status(10), time.monotonic() - start_s

        assert [stream.end for stream in streams] == ["generation_failed"] * 3
        assert (is_ready, status, seconds < 5) == (False, 1, True)
        assert sentence in server.logged("server.failed")[0]["reason"]


def test_sigterm_under_load_again_and_again(tiny_model: list[str]) -> None:
    """At any moment: status 0 in time, and each stream ends whole, in an error event, or was never let in."""
    arguments = [*tiny_model, "--max-num-seqs", "4", "--server.drain-timeout-s", "0.2"]

    def cycle(number: int) -> list[str]:
        with serving(*arguments, exit_within_s=5) as server:
            return asyncio.run(under_load(server, random.Random(number)))

    with ThreadPoolExecutor(2) as pool:
        ends = [end for ends in pool.map(cycle, range(NUM_CYCLES)) for end in ends]

    assert len(ends) == NUM_CYCLES * 12
    assert set(ends) <= {"whole", "server_draining", "refused"}


async def under_load(server: ServerProcess, rng: random.Random) -> list[str]:
    """SIGTERM somewhere in the middle of twelve streams of all lengths; how each ended."""
    async with server.client() as client:
        streams = [Streaming(client, max_tokens=rng.choice([1, 30, 400]), ignore_eos=True) for _ in range(12)]
        await rng.choice(streams).began.wait()
        for _ in range(rng.randrange(300)):
            await asyncio.sleep(0)
        server.signal(signal.SIGTERM)
        await asyncio.gather(*(stream.ended() for stream in streams))
    return [stream.end for stream in streams]
