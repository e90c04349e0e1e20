"""The layers hold: who may import whom, and what importing a package must not load."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

EVERYWHERE = ("aserve.errors", "aserve.faults", "aserve.garbage")
OPTIONS = tuple(f"aserve.{layer}.options" for layer in ("core", "engine", "model", "obs", "server"))

MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "aserve.core": ("aserve.core",),
    "aserve.text": ("aserve.text",),
    "aserve.obs": ("aserve.obs", "aserve.__version__"),
    "aserve.engine": ("aserve.engine", "aserve.core", "aserve.text", "aserve.obs"),
    "aserve.device": ("aserve.device",),
    # RunnerInfo is part of the seam that the model's side fills in, and it is the one that sizes the scheduler
    "aserve.model": (
        "aserve.model", "aserve.device", "aserve.core.plan", "aserve.core.ids", "aserve.core.request",
        "aserve.core.options", "aserve.engine.ports",
    ),
    "aserve.server": (
        "aserve.server", "aserve.engine", "aserve.obs", "aserve.__version__", "aserve.core.ids", "aserve.core.request",
    ),
    "aserve.config": (*OPTIONS, "aserve.profiles"),
    "aserve.profiles": (),
    "aserve.embedding": ("aserve",),
    "aserve.errors": (),
    "aserve.faults": (),
    "aserve.garbage": (),
    "aserve.testing": ("aserve.testing", "aserve.core", "aserve.engine.ports"),
    "aserve.main": ("aserve",),
    "aserve.cli": ("aserve",),
    "aserve.__main__": ("aserve.cli", "aserve.__version__"),
    "aserve": ("aserve.embedding", "aserve.__version__"),
    "loadgen": ("loadgen",),
}  # fmt: skip
"""Longest prefix of a module's name -> prefixes of what it may import of this repository."""

IMPURE = {"asyncio", "logging", "random", "socket", "subprocess", "threading", "time"}
HEAVY = {"torch", "transformers", "triton", "safetensors"}


def modules() -> dict[str, Path]:
    """Every module of the repository by its dotted name."""
    found = {}
    for package in ("aserve", "loadgen"):
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports(path: Path, *, top_level_only: bool = False) -> Iterator[str]:
    """Dotted names that a file imports; of ``from a import b`` it is ``a.b``."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def rule_of(module: str) -> tuple[str, ...]:
    return MAY_IMPORT[max((prefix for prefix in MAY_IMPORT if within(module, (prefix,))), key=len)]


@pytest.mark.parametrize("module", sorted(MODULES))
def test_layers(module: str) -> None:
    """A module imports only from the layers below it; all of aserve may import the bare package for its version."""
    allowed = (*EVERYWHERE, *rule_of(module)) if within(module, ("aserve",)) else rule_of(module)
    named = [name for name in imports(MODULES[module]) if within(name, ("aserve", "loadgen"))]
    if within(module, ("aserve",)):
        named = [name for name in named if name != "aserve"]

    assert [name for name in named if not within(name, allowed)] == []


@pytest.mark.parametrize("module", sorted(name for name in MODULES if within(name, ("aserve.core",))))
def test_core_is_pure(module: str) -> None:
    """The core has no clock, task, thread, log or randomness of its own, and never awaits."""
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    waits = [node for node in ast.walk(tree) if isinstance(node, ast.AsyncFunctionDef | ast.Await | ast.AsyncWith)]

    assert {name.partition(".")[0] for name in imports(MODULES[module])} & (IMPURE | HEAVY | {"aiohttp"}) == set()
    assert waits == []


@pytest.mark.parametrize(
    "module", sorted(name for name in MODULES if not within(name, ("aserve.model", "aserve.device")))
)
def test_torch_stays_below(module: str) -> None:
    """Outside of model/ and device/ nothing imports torch or what loads it while being imported."""
    loaded = {name.partition(".")[0] for name in imports(MODULES[module], top_level_only=True)}

    assert loaded & HEAVY == set()


@pytest.mark.parametrize("module", OPTIONS)
def test_options_stand_alone(module: str) -> None:
    """A module of options imports nothing of aserve, so that the config loads no layer."""
    assert [name for name in imports(MODULES[module]) if within(name, ("aserve",))] == []


@pytest.mark.parametrize(
    ("module", "unloaded"),
    [
        ("aserve", ("torch", "aiohttp", "transformers", "numpy")),
        ("aserve.config", ("torch", "aiohttp", "transformers", "numpy")),
        ("aserve.embedding", ("torch", "aiohttp", "transformers")),
        ("aserve.core", ("torch", "aiohttp", "transformers")),
        ("aserve.core.scheduler", ("torch", "aiohttp", "transformers", "asyncio")),
        ("aserve.engine", ("torch", "aiohttp", "transformers")),
        ("aserve.engine.engine", ("torch", "aiohttp", "transformers")),
        ("aserve.obs.drain", ("torch", "aiohttp", "transformers")),
        ("aserve.text.tokenizer", ("torch", "aiohttp", "transformers")),
        ("aserve.testing", ("torch", "aiohttp", "transformers")),
        ("aserve.server.app", ("torch", "transformers")),
        ("aserve.model", ("torch", "transformers")),
        ("aserve.device", ("torch", "transformers")),
        ("loadgen", ("torch", "transformers", "aserve")),
    ],
)
def test_import_loads_nothing_heavy(module: str, unloaded: tuple[str, ...]) -> None:
    """Importing a layer, with everything that it imports in turn, leaves the heavy libraries alone."""
    program = f"import sys, {module}; print(*sorted(set({unloaded!r}) & set(sys.modules)))"

    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=60, check=False
    )

    assert (result.stdout, result.stderr) == ("\n", "")
