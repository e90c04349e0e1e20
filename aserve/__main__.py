"""``python -m aserve [COMMAND]``; without one it serves. Loads neither torch nor aiohttp before it knows what to do."""

import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Final, NoReturn

from aserve import __version__
from aserve.cli.arguments import split_options
from aserve.cli.parsers import COMMANDS, SUBCOMMANDS, Parser, load_command, make_parser
from aserve.errors import ConfigError, ModelError

EXIT_USAGE: Final = 2
EXIT_INTERRUPTED: Final = 130


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
    if arguments and f"{command} {arguments[0]}" in SUBCOMMANDS:
        command = f"{command} {arguments.pop(0)}"
    if command not in COMMANDS | SUBCOMMANDS:
        near = get_close_matches(command, COMMANDS, n=1)
        raise ConfigError(
            f"There is no command {command!r}"
            + (f"; the nearest is {near[0]!r}." if near else f": it is one of {', '.join(COMMANDS)}.")
        )
    parser = make_parser(command)
    takes_options = parser.get_default("assignments") is not None  # the configuration's
    arguments, assignments = split_options(arguments) if takes_options else (arguments, [])
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        _refuse(parser, unknown[0])
    if assignments:
        args.assignments = [*args.assignments, *assignments]
    return load_command(command).run(args)


def _refuse(parser: Parser, argument: str) -> NoReturn:
    if not argument.startswith("-"):
        raise ConfigError(f"{argument!r} is one argument too many.")
    flag = argument.partition("=")[0]
    near = get_close_matches(flag.replace("_", "-"), parser._option_string_actions, n=1)
    raise ConfigError(f"There is no flag {flag}" + (f"; the nearest is {near[0]}." if near else "; --help lists them."))


if __name__ == "__main__":
    sys.exit(main())
