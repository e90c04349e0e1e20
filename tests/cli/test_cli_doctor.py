"""The doctor: what it tells, what it takes for a problem, and how it ends."""

import json
import resource
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from cli_builders import model_folder

from aserve.__main__ import main
from aserve.cli import diagnosis
from aserve.config import load_config, options
from aserve.device import memory, threads


@pytest.fixture(autouse=True)
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither torch nor variables of ours have a part in these tests."""
    import os

    for name in os.environ:
        if name.startswith(("ASERVE_", "OMP_", "MKL_", "KMP_", "GOMP_")) or name == "PYTHONASYNCIODEBUG":
            monkeypatch.delenv(name)
    monkeypatch.setattr(diagnosis, "PACKAGES", tuple(name for name in diagnosis.PACKAGES if name != "torch"))
    monkeypatch.setattr(diagnosis, "IMPORTED", tuple(name for name in diagnosis.IMPORTED if name != "torch"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return model_folder(tmp_path / "tiny")


def problems(
    folder: Path | str, environment: Mapping[str, str] | None = None, **keywords: Any
) -> list[tuple[str, str]]:
    """(severity, sentence) of everything that is wrong with this configuration."""
    config = load_config(keywords={"port": 0, "model": str(folder)} | keywords)
    return [(each.severity, each.text) for each in diagnosis.diagnose(config, environment or {}).problems]


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the report as JSON."""
    code = main(["doctor", "--json", *arguments])
    return code, json.loads(capsys.readouterr().out)


def test_a_healthy_setup_has_no_problems(folder: Path) -> None:
    """Nothing is wrong with a local model and a free port."""
    assert problems(folder) == []


def test_the_report_names_everything(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Machine, versions, model, and each option with value and origin."""
    code, found = report(capsys, str(folder), "--port", "0", "--api-key", "sesame")
    settings = {setting["name"]: setting for setting in found["config"]}

    assert (code, found["can_serve"]) == (0, True)
    assert set(settings) == set(options())
    assert settings["server.port"] == {"name": "server.port", "value": "0", "origin": "command line --port"}
    assert settings["server.api_keys"]["value"] == "1 set"
    assert found["model"]["name"] == "tiny"
    assert found["model"]["family"] == "llama, by the native decoder"
    assert found["versions"]["uvloop"][0].isdigit()
    assert {"cores", "threads", "memory", "open files"} <= set(found["machine"])


def test_the_report_for_people(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same as text: what a profile changed and why, a mark on options that are set, the verdict last."""
    assert main(["doctor", str(folder), "--port", "0", "--profile", "latency", "--max-num-seqs", "8"]) == 0
    lines = capsys.readouterr().out.splitlines()

    assert "profile latency: for few users who watch the answer appear: quick first tokens and an even pace" in lines
    assert "  scheduler.max_num_seqs = 16 in place of 0 (not applied: command line --max-num-seqs says 8)" in lines
    assert any(line.startswith('* scheduler.policy = "sync"') and line.endswith("  profile latency") for line in lines)
    assert any(line.startswith("  scheduler.block_size = 32") and line.endswith("  default") for line in lines)
    assert lines[-1] == "No problems found."


def test_a_profile_in_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each of its options with the default, the value that counts, and whether that is the profile's."""
    _, found = report(capsys, str(folder), "--port", "0", "--profile", "edge", "--max-num-seqs", "8")
    rows = {row["name"]: row for row in found["profile"]["options"]}

    assert found["profile"]["name"] == "edge"
    assert (rows["scheduler.max_num_seqs"]["applied"], rows["scheduler.max_num_seqs"]["value"]) == (False, "8")
    assert rows["limits.num_workers"]["applied"]


def test_a_wrong_option_is_a_problem(capsys: pytest.CaptureFixture[str]) -> None:
    """A configuration that does not load ends in 1, and the rest is looked at all the same."""
    code, found = report(capsys, "--port", "x")

    assert (code, found["can_serve"]) == (1, False)
    assert found["problems"][-1] == {
        "severity": "error",
        "text": "server.port (command line --port): 'x' is not an integer. "
        "(The rest of this report is about the defaults.)",
    }
    assert found["machine"]


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


def test_a_port_in_use_is_an_error(folder: Path, taken_port: int) -> None:
    """So it is told before a model is loaded for minutes."""
    ((severity, text),) = problems(folder, port=taken_port)

    assert severity == "error"
    assert str(taken_port) in text


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"model_type": None}, "names no model_type"),
    ],
)
def test_a_model_that_cannot_be_served_is_an_error(tmp_path: Path, config: dict[str, Any], sentence: str) -> None:
    """What the loader would refuse is told, in its own words."""
    ((severity, text),) = problems(model_folder(tmp_path / "m", **config))

    assert severity == "error"
    assert sentence in text


def test_damaged_weights_are_an_error(folder: Path) -> None:
    """A file that is no safetensors file is named."""
    (folder / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0not json")

    ((severity, text),) = problems(folder)
    assert (severity, "is no safetensors file" in text) == ("error", True)


def test_no_such_model_is_an_error(tmp_path: Path) -> None:
    """A name that means nothing is told."""
    ((severity, text),) = problems(tmp_path / "nowhere")

    assert (severity, "no file or folder" in text) == ("error", True)


def test_a_model_that_is_not_there_yet_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The default model is fetched by the first start; the doctor fetches nothing."""
    code, found = report(capsys, "--port", "0", "--model.cache-dir", str(tmp_path / "cache"))

    assert code == 0
    assert found["model"]["folder"].startswith("not fetched yet")
    assert list(tmp_path.iterdir()) == []


def test_weights_beyond_the_memory_are_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that cannot fit are told with both figures, and so is a machine that is nearly full."""
    monkeypatch.setattr(memory, "available_bytes", lambda: 100)

    assert [severity for severity, _ in problems(folder, dtype="float32")] == ["warning", "error"]
    assert problems(folder, dtype="bfloat16")[0] == ("warning", "Only 0.00 GiB of memory are free.")


@pytest.mark.parametrize(
    ("variable", "value", "sentence"),
    [
        ("OMP_WAIT_POLICY", "active", "OMP_WAIT_POLICY=active: compute threads spin"),
        ("KMP_BLOCKTIME", "200", "KMP_BLOCKTIME=200: compute threads spin"),
        ("OMP_PROC_BIND", "true", "OMP_PROC_BIND=true: compute threads are pinned"),
        ("OMP_NUM_THREADS", "8", "OMP_NUM_THREADS=8 has no effect: model.threads says"),
        ("PYTHONASYNCIODEBUG", "1", "PYTHONASYNCIODEBUG is set"),
        ("ASERVE_FAULTS", "pool.alloc=raise", "ASERVE_FAULTS is set: the server will fail on purpose."),
    ],
)
def test_variables_that_do_harm(folder: Path, variable: str, value: str, sentence: str) -> None:
    """Each is a warning that says what it does."""
    ((severity, text),) = problems(folder, {variable: value})

    assert severity == "warning"
    assert text.startswith(sentence)


@pytest.mark.parametrize(("variable", "value"), [("OMP_WAIT_POLICY", "PASSIVE"), ("KMP_BLOCKTIME", "0")])
def test_variables_that_do_none(folder: Path, variable: str, value: str) -> None:
    """Values that ask for what we want anyway are no problem."""
    assert problems(folder, {variable: value}) == []


@pytest.mark.parametrize(
    ("keywords", "sentence"),
    [
        ({"host": "0.0.0.0"}, "server.host is '0.0.0.0' and there are no keys: whoever reaches it may use it."),
        ({"reference": True}, "model.reference is on: right in the last bit, and slow."),
        ({"check_invariants_every": 1}, "scheduler.check_invariants_every or force_preempt_every is on"),
        ({"threads": 1024}, "model.threads is 1024 and this process may use"),
    ],
)
def test_options_worth_a_second_look(folder: Path, keywords: dict[str, Any], sentence: str) -> None:
    """What works but is probably not meant is a warning."""
    ((severity, text),) = problems(folder, **keywords)

    assert severity == "warning"
    assert text.startswith(sentence)


def test_two_streams_on_a_cpu_are_an_error(folder: Path) -> None:
    """What the runner would refuse is told, in its own words; without the GPU that was asked for, that alone."""
    sentence = "scheduler.prefill is streams, which takes a GPU: a CPU runs one step at a time. Take split or mixed."

    assert problems(folder, device="cpu", prefill="streams") == [("error", sentence)]
    assert problems(folder, device="cpu", prefill="split") == []
    assert sentence not in [text for _, text in problems(folder, device="cuda", prefill="streams")]


def test_keys_make_an_open_address_fine(folder: Path) -> None:
    """With keys any address will do."""
    assert problems(folder, host="0.0.0.0", api_keys=["k"]) == []


def test_a_log_that_cannot_be_written_is_an_error(folder: Path) -> None:
    """A folder is no log file, nor is a file in a folder that is not there."""
    assert [severity for severity, _ in problems(folder, file=str(folder))] == ["error"]
    assert [severity for severity, _ in problems(folder, file=str(folder / "no" / "log"))] == ["error"]
    assert problems(folder, file=str(folder / "log")) == []


def test_few_open_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hard limit that connections would run into is told."""
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 512))

    assert problems(folder, max_connections=1000) == [
        ("warning", "The limit on open files is 512 (ulimit -Hn): each connection takes one."),
        ("warning", "limits.max_connections is 1000, but the limit on open files (ulimit -Hn) is 512."),
    ]


def test_missing_and_broken_packages(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that is not installed, or that cannot be imported, would stop the server."""
    monkeypatch.setattr(diagnosis, "PACKAGES", (*diagnosis.PACKAGES, "no-such-package"))
    monkeypatch.setattr(diagnosis, "IMPORTED", ("uvloop",))
    monkeypatch.setattr(diagnosis.importlib, "import_module", lambda name: (_ for _ in ()).throw(OSError("libx.so.1")))

    assert problems(folder) == [
        ("error", "The package no-such-package is not installed."),
        ("error", "The package uvloop cannot be loaded: libx.so.1."),
    ]


def test_no_chat_template_is_told(folder: Path) -> None:
    """Without one only completions work."""
    (folder / "chat_template.jinja").unlink()

    assert problems(folder) == [
        ("warning", "The model has no chat template: /v1/chat/completions will refuse every request.")
    ]


def test_sizes_are_of_the_precision_that_will_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are counted from the file's header, in the type that they will have in memory."""
    monkeypatch.setattr(threads, "supports_bfloat16", lambda: True)
    big = model_folder(folder.parent / "big", shape=(8192, 1024))

    found = diagnosis.diagnose(load_config(keywords={"port": 0, "model": str(big)}), {})

    assert "0.02 GiB of weights in memory (8 M parameters as bfloat16)" in found.model["size"]
