"""Shell completion: made from the command line's own tables, and understood by the shells."""

import shutil
import subprocess
from pathlib import Path

import pytest

from aserve.__main__ import main
from aserve.cli.completion import SCRIPTS, script
from aserve.cli.parsers import COMMANDS, SUBCOMMANDS
from aserve.config import FLAGS, options

BASH = shutil.which("bash")


def complete(tmp_path: Path, *words: str) -> set[str]:
    """What bash offers behind ``words``, of which the last is being typed."""
    file = tmp_path / "completion.bash"
    file.write_text(script("bash"))
    program = (
        f'source {file}; COMP_WORDS=("$@"); COMP_CWORD=$(( $# - 1 )); _aserve; '
        'for word in "${COMPREPLY[@]}"; do echo "$word"; done'
    )
    assert BASH is not None
    result = subprocess.run(
        [BASH, "--norc", "-c", program, "bash", *words], capture_output=True, text=True, timeout=30, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")
    return set(result.stdout.split())


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--po"], {"--port", "--policy"}),
        (["serve", "--po"], {"--port", "--policy"}),
        (["chat", "--po"], {"--policy"}),
        (["chat", "--base"], {"--base-url"}),
        (["doctor", "--js"], {"--json"}),
        (["--policy", ""], {"sync", "overlap", "eager", "late"}),
        (["--policy", "=", "o"], {"overlap"}),
        (["--policy", "="], {"sync", "overlap", "eager", "late"}),
        (["--scheduler.sampler", ""], {"device", "host"}),
        (["--scheduler.max_num_s"], {"--scheduler.max_num_seqs"}),
        (["bench", "--model.reference", "t"], {"true"}),
        (["--profile", "la"], {"latency"}),
        (["c"], {"chat", "completion"}),
        (["completion", ""], {"bash", "fish", "zsh"}),
        (["bench", ""], {"lab"}),
        (["bench", "--ex"], set()),
        (["bench", "lab", "--ex"], {"--experiments"}),
        (["bench", "lab", "--js"], set()),  # a flag of bench
        (["bench", "lab", "--po"], {"--policies", "--policy"}),
        (["bench", "lab", "--shape", ""], {"8b", "1b"}),
        (["bench", "--json", "l"], set()),  # the second word is the only place for it
        (["lab", "--ex"], set()),
        (["--model", ""], set()),  # nothing of ours: the shell offers files
        (["serve", ""], set()),
        (["pull", "--po"], set()),
    ],
)
def test_bash_completes(tmp_path: Path, words: list[str], expected: set[str]) -> None:
    """Commands, each command's own flags, values of options with a list, and files elsewhere."""
    assert complete(tmp_path, "aserve", *words) == expected


PROGRAMS = {
    "bash": 'source {file}; COMP_WORDS=({words}); COMP_CWORD={last}; _aserve; printf "%s\\n" "${{COMPREPLY[@]}}"',
    "fish": 'source {file}; complete --do-complete "{words}"',
    "zsh": (
        'compdef() {{ }}; _files() {{ }}; _describe() {{ print -l -- "${{described[@]}}" }}; '
        'compadd() {{ shift; print -l -- "$@" }}; '
        "source {file}; words=({words}); CURRENT=$(( {last} + 1 )); PREFIX=$words[-1]; _aserve"
    ),
}
"""What prints, a line each, what a shell would offer for the last of ``words``; zsh leaves it to others to match it."""


@pytest.mark.parametrize("shell", [shell for shell in PROGRAMS if shutil.which(shell)])
@pytest.mark.parametrize(
    ("words", "flag", "others"),
    [("aserve bench lab --", "--experiments", "--json"), ("aserve bench --", "--json", "--experiments")],
)
def test_a_command_below_another_has_its_own_flags(
    tmp_path: Path, shell: str, words: str, flag: str, others: str
) -> None:
    """In each shell bench and bench lab offer their own flags and not each other's."""
    file = tmp_path / "script"
    file.write_text(script(shell))
    program = PROGRAMS[shell].format(file=file, words=words, last=len(words.split()) - 1)

    result = subprocess.run([shell, "-c", program], capture_output=True, text=True, timeout=30, check=False)
    offered = {line.replace("\t", ":").partition(":")[0] for line in result.stdout.splitlines()}

    assert result.stderr == ""
    assert (flag in offered, others in offered) == (True, False)


@pytest.mark.parametrize("shell", [shell for shell in SCRIPTS if shutil.which(shell)])
def test_the_shells_accept_it(tmp_path: Path, shell: str) -> None:
    """Every shell that is installed here finds the script's syntax right."""
    file = tmp_path / "script"
    file.write_text(script(shell))

    result = subprocess.run([shell, "-n", str(file)], capture_output=True, text=True, timeout=30, check=False)

    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.parametrize("shell", SCRIPTS)
def test_every_table_is_in_it(capsys: pytest.CaptureFixture[str], shell: str) -> None:
    """All commands, short flags and options are in the script of each shell."""
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    words = (*COMMANDS, *(word for name in SUBCOMMANDS for word in name.split()), *options())
    missing = [word for word in (*words, *(flag.removeprefix("--") for flag in FLAGS)) if word not in text]

    assert missing == []


def test_an_unknown_shell_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence, as for every mistake."""
    assert main(["completion", "csh"]) == 2
    assert capsys.readouterr().err.startswith("aserve: Argument shell: invalid choice: 'csh'")
