"""``python -m aserve`` as a process of its own, and tiny models that it loads in no time."""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import aiohttp
import numpy as np

TOKENIZER = Path(__file__).parent.parent / "data" / "tiny_tokenizer"
TINY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 559,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BROKEN_NETWORK = {
    **dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:9"),
    **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), "http://127.0.0.1:9"),
    "PIP_NO_INDEX": "1",
    "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
    "HF_ENDPOINT": "http://127.0.0.1:9",
}
"""Every way to a network that a start could take leads nowhere."""


def slow_steps(seconds: float) -> dict[str, str]:
    """Environment in which each step takes this much longer."""
    return {"ASERVE_FAULTS": f"runner.forward=delay:{seconds},times=all"}


# --- models


def tiny_folder(folder: Path, **changes: Any) -> Path:
    """A Llama of two layers without weights, for ``--model.load-format dummy``. ``changes`` of its config.json; None
    removes a key."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TOKENIZER / name, folder)
    config = {key: value for key, value in (TINY | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def add_weights(folder: Path, *, num_shards: int) -> Path:
    """Random weights for the folder's config.json in several files with an index, as large checkpoints come."""
    from safetensors.numpy import save_file

    from aserve.model.config import ModelConfig
    from aserve.model.decoder import tensor_shapes

    config = ModelConfig.from_folder(folder)
    assert config.decoder is not None
    shapes = tensor_shapes(config.decoder, config.vocab_size)
    rng = np.random.default_rng(0)
    names = sorted(shapes)
    weight_map = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        weights = {name: rng.standard_normal(shapes[name], np.float32) * 0.2 for name in names[shard::num_shards]}
        save_file(weights, folder / file)
        weight_map |= dict.fromkeys(names[shard::num_shards], file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


# --- the process


@dataclass
class ServerProcess:
    """What runs, and where it listens."""

    child: "subprocess.Popen[str]"
    url: str
    errors: IO[str]
    is_told_to_stop: bool = False

    def signal(self, number: signal.Signals) -> None:
        self.is_told_to_stop = True
        self.child.send_signal(number)

    def exit_status(self, within_s: float) -> int:
        return self.child.wait(within_s)

    @property
    def standard_error(self) -> str:
        self.errors.seek(0)
        return self.errors.read()

    def logged(self, event: str, *, within_s: float = 10.0) -> list[dict[str, Any]]:
        """The log's records of this name, so far. The log is written behind what it tells: the first is waited for."""
        deadline_s = time.monotonic() + within_s
        while True:
            records = [json.loads(line) for line in self.standard_error.splitlines() if line.startswith("{")]
            found = [record for record in records if record["event"] == event]
            if found or time.monotonic() > deadline_s or self.child.poll() is not None:
                return found
            time.sleep(0.02)

    def get(self, path: str, *, key: str = "") -> Any:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        with urllib.request.urlopen(urllib.request.Request(self.url + path, headers=headers), timeout=20) as answer:
            return json.load(answer)

    def client(self, **options: Any) -> aiohttp.ClientSession:
        """Without a limit of connections. A connection is kept for the next request."""
        return aiohttp.ClientSession(self.url, connector=aiohttp.TCPConnector(limit=0), **options)


@contextmanager
def serving(
    *arguments: str, environment: Mapping[str, str] | None = None, exit_within_s: float = 10.0
) -> Iterator[ServerProcess]:
    """Starts a server and waits for its one line. Where it still runs at the end, it must end with status 0 in time,
    on SIGTERM unless the test has sent a signal."""
    with tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(
            command("--port", "0", *arguments),
            env=clean_environment(environment),
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        assert child.stdout is not None
        try:
            found = re.fullmatch(r"aserve: .* is ready at (http://\S+)\n", child.stdout.readline())
            server = ServerProcess(child, found[1] if found else "", errors)
            assert found, server.standard_error
            yield server
            if child.poll() is None:
                if not server.is_told_to_stop:
                    child.terminate()
                assert child.wait(exit_within_s) == 0, server.standard_error
            assert child.stdout.read() == ""
        finally:
            child.kill()
            child.wait()
            child.stdout.close()


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "aserve", *arguments]


def clean_environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """The test's environment without its own settings of aserve, but for the cache of models."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ASERVE_", "HF_", "OPENAI_"))}
    if cache := os.environ.get("ASERVE_TEST_CACHE"):
        kept["ASERVE_CACHE_DIR"] = cache
    return kept | dict(more or {})


def failed_start(*arguments: str, environment: Mapping[str, str] | None = None) -> str:
    """The one sentence with which a start fails. The log's lines apart nothing else is said, and the status is 2."""
    done = subprocess.run(
        command(*arguments),
        env=clean_environment(environment),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, ""), done
    said = [line for line in done.stderr.splitlines() if not line.startswith("{")]
    assert len(said) == 1 and said[0].startswith("aserve: "), done.stderr
    return said[0].removeprefix("aserve: ")


# --- streams


class Streaming:
    """A completion that is streamed in the background. ``began`` is set by its first event."""

    def __init__(self, client: aiohttp.ClientSession, **fields: Any) -> None:
        self.status = 0
        self.events: list[Any] = []
        self.began = asyncio.Event()
        self._task = asyncio.create_task(self._read(client, {"prompt": "Hello", "stream": True, **fields}))

    async def _read(self, client: aiohttp.ClientSession, body: dict[str, Any]) -> None:
        # A client error is a refused connection, or one that was cut: with what came before the stream shows it.
        with suppress(aiohttp.ClientError):
            async with client.post("/v1/completions", json=body) as response:
                self.status = response.status
                async for line in response.content:
                    if line.startswith(b"data: "):
                        self.events.append("[DONE]" if line == b"data: [DONE]\n" else json.loads(line[6:]))
                        self.began.set()

    async def ended(self) -> None:
        await self._task

    @property
    def end(self) -> str:
        """How it ended: "whole", with the code of its error event, "refused" before it began, or "cut"."""
        if not self.events:
            return "refused" if self.status in (0, 503) else "cut"
        last = self.events[-1]
        if last == "[DONE]":
            return "whole"
        return str(last["error"]["code"]) if "error" in last else "cut"
