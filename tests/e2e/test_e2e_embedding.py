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


async def test_chats_side_by_side_repeat_the_greedy_answer(default_model_folder: Path) -> None:
    """Reference mode: the same chat alone and beside another one is the same text; usage counts it."""
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    options = {"reference": True, "max_num_seqs": 2, "max_model_len": 256, "max_num_batched_tokens": 48}
    async with Engine.from_pretrained(str(default_model_folder), **options) as engine:
        alone = engine.generate(chat, max_tokens=8, temperature=0)
        text = await alone.text()
        other = engine.generate("Once upon a time", max_tokens=12, temperature=0, ignore_eos=True)
        async with other:
            await anext(other)
            again = await engine.generate(chat, max_tokens=8, temperature=0).text()

    assert "Paris" in text
    assert again == text
    assert alone.usage.completion_tokens <= 8
