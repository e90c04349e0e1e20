"""The command line: quick help without the heavy libraries, one sentence for a mistake, and a Config for the rest."""

import json
import os
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aserve import __version__, faults
from aserve.__main__ import main
from aserve.config import Config
from aserve.errors import ModelError

ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("ASERVE_")}


@pytest.fixture(autouse=True)
def no_variables_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("ASERVE_"):
            monkeypatch.delenv(name)


Outcome = int | BaseException


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Config]:
    """Runs the command line with a composition root that only looks; returns the Config that reached it."""

    def run(*arguments: str, outcome: Outcome = 0, expected: int = 0) -> Config:
        reached: list[Config] = []

        def serve(config: Config) -> int:
            reached.append(config)
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome

        root = types.ModuleType("aserve.main")
        root.serve = serve  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "aserve.main", root)
        assert main(arguments) == expected
        return reached[0]

    return run


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a wrong command line is answered with."""
    assert main(arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("aserve: ")
    assert output.err.count("\n") == 1
    return output.err.removeprefix("aserve: ").rstrip("\n")


def python(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        timeout=60,
        check=False,
    )


def test_help_is_quick_and_loads_nothing_heavy() -> None:
    """``--help`` answers without torch, transformers, aiohttp or numpy, in a fraction of a second."""
    program = (
        "import sys, time; start = time.perf_counter()\n"
        "from aserve.__main__ import main\n"
        "try:\n"
        "    main(['--help'])\n"
        "except SystemExit as end:\n"
        "    assert end.code == 0\n"
        "seconds = time.perf_counter() - start\n"
        "heavy = {'torch', 'transformers', 'aiohttp', 'numpy', 'asyncio'} & set(sys.modules)\n"
        "import json; print(json.dumps([sorted(heavy), seconds]))\n"
    )
    best = float("inf")
    for _ in range(3):
        result = python(program)
        assert result.returncode == 0, result.stderr
        *text, last = result.stdout.splitlines()
        heavy, seconds = json.loads(last)
        best = min(best, seconds)

    assert heavy == []
    assert any("--max-num-seqs" in line for line in text)
    assert best < 0.3


def test_whole_process_answers_help_quickly() -> None:
    """``python -m aserve --help``, the interpreter's own start included, takes under a second on a busy machine."""
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        result = subprocess.run(
            [sys.executable, "-m", "aserve", "--help"], capture_output=True, env=ENVIRONMENT, timeout=60, check=False
        )
        best = min(best, time.perf_counter() - start)
        assert result.returncode == 0

    assert best < 1.0


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "-h"], ["pull", "--help"]])
def test_help_of_each_command(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    """Every command explains itself and exits with 0."""
    with pytest.raises(SystemExit) as end:
        main(arguments)

    assert end.value.code == 0
    assert "usage: python -m aserve" in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["--version", "-V"])
def test_version(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    """The version is printed and nothing else happens."""
    assert main([flag]) == 0
    assert capsys.readouterr().out == f"aserve {__version__}\n"


def test_serving_is_the_default(served: Callable[..., Config]) -> None:
    """No arguments, flags alone and ``serve`` all serve."""
    assert served() == Config()
    assert served("--port", "9000").server.port == 9000
    assert served("serve", "--port", "9000").server.port == 9000


@pytest.mark.parametrize(
    ("arguments", "name", "expected"),
    [
        (["--model", "a/b"], "model.model", "a/b"),
        (["serve", "a/b"], "model.model", "a/b"),
        (["--served-model-name", "a,b"], "model.served_model_name", ("a", "b")),
        (["--host", "::"], "server.host", "::"),
        (["--port=1"], "server.port", 1),
        (["--api-key", "k1", "--api-key", "k2"], "server.api_keys", ("k1", "k2")),
        (["--threads", "2"], "model.threads", 2),
        (["--dtype", "float32"], "model.dtype", "float32"),
        (["--reference"], "model.reference", True),
        (["--max-num-seqs", "8"], "scheduler.max_num_seqs", 8),
        (["--max-model-len", "4096"], "scheduler.max_model_len", 4096),
        (["--max-num-batched-tokens", "1024"], "scheduler.max_num_batched_tokens", 1024),
        (["--block-size", "32"], "scheduler.block_size", 32),
        (["--num-blocks", "100"], "scheduler.num_blocks", 100),
        (["--policy", "sync"], "scheduler.policy", "sync"),
        (["--log-level", "debug"], "log.level", "debug"),
        (["--set", "log.ring_size=100"], "log.ring_size", 100),
        (["--log.ring-size", "100"], "log.ring_size", 100),
        (["--log.ring_size=100"], "log.ring_size", 100),
        (["--model.reference"], "model.reference", True),
        (["--model.reference", "false"], "model.reference", False),
        (["--model.reference", "--port", "1"], "model.reference", True),
    ],
)
def test_flags(served: Callable[..., Config], arguments: list[str], name: str, expected: Any) -> None:
    """Every short flag, and every way to name any option, reaches its option."""
    section, key = name.split(".")

    config = served(*arguments)

    assert getattr(getattr(config, section), key) == expected
    assert config.origins[name].startswith("command line ")


def test_last_flag_wins(served: Callable[..., Config]) -> None:
    """Of one flag given twice the later counts."""
    assert served("--port", "1", "--port", "2").server.port == 2


def test_environment_and_file_reach_the_config(
    served: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The process's environment and ``--config`` are sources too."""
    (tmp_path / "my.toml").write_text("[server]\nhost = 'example'\nport = 1")
    monkeypatch.setenv("ASERVE_SERVER__PORT", "2")

    config = served("--config", str(tmp_path / "my.toml"))

    assert (config.server.host, config.server.port) == ("example", 2)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--prot", "1"], "There is no flag --prot; the nearest is --port."),
        (["--max_num_seqs", "1"], "There is no flag --max_num_seqs; the nearest is --max-num-seqs."),
        (["--xyzzy"], "There is no flag --xyzzy; --help lists them."),
        (["--server.prot", "1"], "There is no option 'server.prot'; the nearest is server.port."),
        (["--server.port"], "--server.port needs a value."),
        (["--port"], "Argument --port: expected one argument."),
        (["--port", "x"], "server.port (command line --port): 'x' is not an integer."),
        (["--set", "x"], "--set takes section.key=value, not 'x'."),
        (["--set", "sever.port=1"], "There is no option 'sever.port'; the nearest is server.port."),
        (["serve", "a", "b"], "'b' is one argument too many."),
        (["serv"], "There is no command 'serv'; the nearest is 'serve'."),
        (["xyzzy"], "There is no command 'xyzzy': it is one of serve, chat, pull, bench, doctor, completion."),
        (["pull", "--cache", "x"], "There is no flag --cache; the nearest is --cache-dir."),
        (["--config", "/no/such"], "The config file '/no/such' cannot be read: No such file or directory."),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str) -> None:
    """A wrong command line is one sentence on standard error and exit code 2."""
    assert refused(capsys, *arguments) == expected


def test_mistake_in_the_environment(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """So is a wrong variable, ASERVE_FAULTS included."""
    monkeypatch.setenv("ASERVE_FAULTS", "pool.aloc=raise")

    assert refused(capsys) == (
        "ASERVE_FAULTS: 'pool.aloc=raise': there is no fault point 'pool.aloc'; the nearest is 'pool.alloc'."
    )


def test_faults_are_armed(served: Callable[..., Config], monkeypatch: pytest.MonkeyPatch) -> None:
    """ASERVE_FAULTS arms its points before the server starts."""
    monkeypatch.setenv("ASERVE_FAULTS", "pool.alloc=raise:MemoryError")
    try:
        served()
        with pytest.raises(MemoryError):
            faults.hit("pool.alloc")
    finally:
        faults.disarm_all()


def test_exit_codes(served: Callable[..., Config], capsys: pytest.CaptureFixture[str]) -> None:
    """The server's own code is passed on; a model error is a sentence and 2; an interrupt is 130; no traceback."""
    served(outcome=0, expected=0)
    served(outcome=1, expected=1)
    served(outcome=KeyboardInterrupt(), expected=130)
    assert capsys.readouterr().err == ""

    served(outcome=ModelError("The folder has no config.json."), expected=2)
    assert capsys.readouterr().err == "aserve: The folder has no config.json.\n"


def test_our_own_faults_keep_their_traceback(served: Callable[..., Config]) -> None:
    """What is nobody's mistake but ours is not dressed up as a sentence."""
    with pytest.raises(ZeroDivisionError):
        served(outcome=ZeroDivisionError())


def test_wrong_option_as_a_process() -> None:
    """``python -m aserve --prot 1`` really ends with 2, one line, and no traceback."""
    result = subprocess.run(
        [sys.executable, "-m", "aserve", "--prot", "1"],
        capture_output=True, text=True, env=ENVIRONMENT, timeout=60, check=False,
    )  # fmt: skip

    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "aserve: There is no flag --prot; the nearest is --port.\n"
