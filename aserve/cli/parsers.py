"""The commands and their parsers: one table that the dispatch, the help and the shell completion are made from."""

from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from importlib import import_module
from typing import Final, NoReturn, Protocol, cast

from aserve import __version__
from aserve.errors import ConfigError

COMMANDS: Final = {
    "serve": "serve a model over HTTP (this is what happens without a command)",
    "chat": "talk to a model in the terminal: in this process, or on a running server",
    "pull": "fetch and convert a model now, so that a later start needs no network",
    "bench": "measure how fast a model is on this machine, in about a minute",
    "doctor": "look at the machine, the model and the configuration, and name what would go wrong",
    "completion": "print a script with which bash, zsh or fish completes these commands and their options",
}

SUBCOMMANDS: Final = {
    "bench lab": "run experiments about when to launch, on a device made of costs or a real one, or plan for a load",
}


class Command(Protocol):
    """A module of ``aserve.cli``, named like its command. Importing it must stay light: --help waits for it."""

    def add_arguments(self, parser: ArgumentParser) -> None: ...

    def run(self, args: Namespace) -> int:
        """The exit code. Raises ConfigError and ModelError for the operator's mistakes."""
        ...


class Parser(ArgumentParser):
    """Raises in place of printing the usage and leaving: a mistake is answered in one sentence."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message[:1].upper()}{message[1:]}.")


def load_command(name: str) -> Command:
    """The module behind a name out of COMMANDS or SUBCOMMANDS."""
    return cast(Command, import_module(f"aserve.cli.{name.replace(' ', '_')}"))


def make_parser(name: str) -> Parser:
    """The parser of a command, complete."""
    text = (COMMANDS | SUBCOMMANDS)[name]
    usage, description = None, f"{text[:1].upper()}{text[1:]}."
    if name == "serve":
        usage = "python -m aserve [COMMAND] [MODEL] [OPTION ...]"
        listed = "".join(f"  {command:<12}{text}\n" for command, text in (COMMANDS | SUBCOMMANDS).items())
        description = f"Serve a language model from one event loop.\n\ncommands:\n{listed}"
    parser = Parser(
        prog=f"python -m aserve {name}",
        usage=usage,
        description=description,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    if name == "serve":
        parser.add_argument("--version", "-V", action="version", version=f"aserve {__version__}")
    load_command(name).add_arguments(parser)
    if usage is None and parser.get_default("assignments") is not None:  # two dozen flags are no usage line
        parser.usage = f"python -m aserve {name} [MODEL] [OPTION ...]"
    return parser
