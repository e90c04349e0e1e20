"""The documented program runs as it stands, and an embedded engine speaks with the real model."""

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

import aserve.embedding
from aserve import Engine

pytestmark = [pytest.mark.torch, pytest.mark.timeout(180)]


def test_the_documented_program_runs(default_model_folder: Path, tmp_path: Path) -> None:
    """The docstring's fifteen lines, with the default model where the cache has it: text, and exit code 0."""
    documentation = inspect.getdoc(aserve.embedding) or ""
    lines = [line for line in documentation.splitlines() if line.startswith("    ") or not line]
    program = tmp_path / "program.py"
    program.write_text(inspect.cleandoc("\n".join(lines)))
    assert len(program.read_text().splitlines()) <= 15

    environment = os.environ | {
        "ASERVE_CACHE_DIR": str(default_model_folder.parent.parent),
        "PYTHONPATH": str(Path(aserve.__file__).parent.parent),
        "PYTHONWARNINGS": "error",
    }
    result = subprocess.run(
        [sys.executable, str(program)],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip

    assert (result.returncode, result.stderr) == (0, "")
    assert "river" in result.stdout.lower()


async def test_chats_side_by_side_repeat_the_greedy_answer(tiny_model: list[str]) -> None:
    """Reference mode: the same chat alone and beside another one is the same text; usage counts it."""
    folder = tiny_model[tiny_model.index("--model") + 1]
    options = {"load_format": "dummy", "reference": True, "max_num_seqs": 2, "max_model_len": 256}
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    async with Engine.from_pretrained(folder, **options) as engine:
        alone = engine.generate(chat, max_tokens=16, temperature=0, ignore_eos=True)
        text = await alone.text()
        async with engine.generate("Once upon a time", max_tokens=100, temperature=0, ignore_eos=True) as other:
            await anext(other)
            again = await engine.generate(chat, max_tokens=16, temperature=0, ignore_eos=True).text()

    assert again == text != ""
    assert alone.usage.completion_tokens == 16
