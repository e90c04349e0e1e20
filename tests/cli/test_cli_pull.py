"""The pull command: what it prints and how it ends."""

import argparse
from pathlib import Path

import pytest

from aserve.cli import pull


def run_pull(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    pull.add_arguments(parser)
    return pull.run(parser.parse_args(arguments))


def test_pull_prints_name_folder_and_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder that is there already: one line, exit code 0."""
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_bytes(b"{}")
    (folder / "model.safetensors").write_bytes(bytes(1_499_998))

    assert run_pull(str(folder)) == 0
    assert capsys.readouterr().out == f"my-model: {folder} (1.5 MB)\n"


def test_pull_of_nothing_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A name that means nothing: one line on standard error, exit code 2."""
    assert run_pull(str(tmp_path / "nowhere"), "--cache-dir", str(tmp_path)) == 2

    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "there is no file or folder" in captured.err
