"""``python -m aserve [COMMAND]``; without one it serves. Loads neither torch nor aiohttp before it knows what to do."""

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Final, NoReturn

from aserve import __version__
from aserve.errors import ConfigError, ModelError

EXIT_USAGE: Final = 2
EXIT_INTERRUPTED: Final = 130

COMMANDS: Final = {
    "serve": "serve a model over HTTP (this is what happens without a command)",
    "pull": "fetch and convert a model now, so that a later start needs no network",
}


class _Parser(ArgumentParser):
    """Raises in place of printing the usage and leaving: a mistake is answered in one sentence."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message[:1].upper()}{message[1:]}.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code: 0, 2 after the operator's mistake, 130 after an interrupt."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        return _run(arguments)
    except (ConfigError, ModelError) as error:
        sys.stderr.write(f"aserve: {error.message}\n")
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _run(arguments: list[str]) -> int:
    if arguments and arguments[0] in ("--version", "-V"):
        sys.stdout.write(f"aserve {__version__}\n")
        return 0
    command = "serve"
    if arguments and not arguments[0].startswith("-"):
        command = arguments.pop(0)
    if command == "serve":
        return _serve(arguments)
    if command == "pull":
        return _pull(arguments)
    near = get_close_matches(command, COMMANDS, n=1)
    raise ConfigError(
        f"There is no command {command!r}"
        + (f"; the nearest is {near[0]!r}." if near else f": it is one of {', '.join(COMMANDS)}.")
    )


def _serve(arguments: list[str]) -> int:
    from aserve.cli import serve

    parser = _parser("serve", usage="python -m aserve [COMMAND] [MODEL] [OPTION ...]")
    parser.description = "Serve a language model from one event loop.\n\ncommands:\n" + "".join(
        f"  {name:<8} {text}\n" for name, text in COMMANDS.items()
    )
    parser.add_argument("--version", "-V", action="version", version=f"aserve {__version__}")
    serve.add_arguments(parser)
    rest, assignments = serve.split_options(arguments)
    args, unknown = parser.parse_known_args(rest)
    if unknown:
        _refuse(parser, unknown[0])
    return serve.run(args, assignments)


def _pull(arguments: list[str]) -> int:
    from aserve.cli import pull

    parser = _parser("pull")
    parser.description = COMMANDS["pull"]
    pull.add_arguments(parser)
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        _refuse(parser, unknown[0])
    return pull.run(args)


def _parser(command: str, usage: str | None = None) -> _Parser:
    return _Parser(
        prog=f"python -m aserve {command}", usage=usage, formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False
    )


def _refuse(parser: ArgumentParser, argument: str) -> NoReturn:
    if not argument.startswith("-"):
        raise ConfigError(f"{argument!r} is one argument too many.")
    flag = argument.partition("=")[0]
    near = get_close_matches(flag.replace("_", "-"), parser._option_string_actions, n=1)
    raise ConfigError(f"There is no flag {flag}" + (f"; the nearest is {near[0]}." if near else "; --help lists them."))


if __name__ == "__main__":
    sys.exit(main())
