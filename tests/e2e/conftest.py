"""Servers that several tests talk to, and the model tests' builders for those that need them."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "model"))  # hub_stub, tiny_gguf

from aserve_process import BROKEN_NETWORK, ServerProcess, serving, tiny_folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Arguments that serve a tiny random model."""
    folder = tiny_folder(tmp_path_factory.mktemp("models") / "tiny")
    return ["--model", str(folder), "--model.load-format", "dummy", "--threads", "1", "--num-blocks", "2000"]


@pytest.fixture(scope="session")
def default_server(default_model_folder: Path) -> Iterator[ServerProcess]:
    """The default model as ``python -m aserve`` serves it a second time: from the cache, without any network."""
    with serving("--api-key", "sk-test", environment=BROKEN_NETWORK) as server:
        yield server
