"""Every command's parser: light to make, and complete."""

import subprocess
import sys

import pytest

from aserve.__main__ import main
from aserve.cli.parsers import COMMANDS, make_parser


def test_no_parser_loads_what_is_heavy() -> None:
    """All parsers together, which shell completion makes, load neither torch nor aiohttp, asyncio or numpy."""
    program = (
        "import sys; from aserve.cli.parsers import COMMANDS, make_parser\n"
        "for name in COMMANDS: make_parser(name)\n"
        "print(sorted({'torch', 'transformers', 'aiohttp', 'numpy', 'asyncio'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)

    assert (result.stdout, result.stderr) == ("[]\n", "")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_complete(capsys: pytest.CaptureFixture[str], name: str) -> None:
    """Every command explains itself, and every flag of it has a sentence."""
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])

    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("usage: python -m aserve ")
    assert [action.dest for action in make_parser(name)._actions if not action.help] == []


@pytest.mark.parametrize("name", ["serve", "chat", "bench", "doctor"])
def test_profiles_and_set_are_in_the_help(name: str) -> None:
    """Whoever takes options says how: --set, --profile with the goals, and the order of the sources."""
    text = make_parser(name).format_help()

    assert "--set SECTION.KEY=VALUE" in text
    assert "  latency     for few users" in text
    assert "the file over a profile" in " ".join(text.split())


@pytest.mark.parametrize("name", ["chat", "bench", "doctor"])
def test_full_names_reach_every_command(capsys: pytest.CaptureFixture[str], name: str) -> None:
    """--section.key is checked wherever options are taken."""
    assert main([name, "--scheduler.polcy", "sync"]) == 2
    assert "the nearest is scheduler.policy" in capsys.readouterr().err
