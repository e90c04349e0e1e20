"""``python -m aserve [serve] [MODEL]``: from the command line to a Config, then into ``aserve.main``."""

import os
from argparse import SUPPRESS, Action, ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, get_args, get_origin

from aserve import faults
from aserve.config import FLAGS, Assignment, Config, Option, find_option, load_config, options
from aserve.errors import ConfigError

_EPILOG: Final = """\
Every option can be given as --section.key VALUE, as --set section.key=VALUE, as the environment variable
ASERVE_SECTION__KEY, or in the file named by --config; the command line wins over the environment, and that over the
file. config.toml lists them all. Lists take commas, and flags that are given again add to them.
"""


class _Assign(Action):
    """Appends to ``assignments`` for the option named by ``const``, so that the order of flags is kept."""

    def __call__(
        self, parser: ArgumentParser, namespace: Namespace, values: Any, option_string: str | None = None
    ) -> None:
        text = "true" if self.nargs == 0 else values
        namespace.assignments.append(Assignment(name=str(self.const), text=text, origin=option_string or ""))


def add_arguments(parser: ArgumentParser) -> None:
    """Declare MODEL, the short flags, --set and --config. ``split_options`` has taken out --section.key before."""
    parser.epilog = _EPILOG
    parser.set_defaults(assignments=[])
    parser.add_argument("model", nargs="?", help="the same as --model")
    for flag, name in FLAGS.items():
        option = options()[name]
        parser.add_argument(
            flag,
            action=_Assign,
            const=name,
            dest=SUPPRESS,
            nargs=0 if option.kind is bool else None,
            metavar=None if option.kind is bool else _metavar(option, flag),
            help=option.help.replace("%", "%%"),
        )
    parser.add_argument("--config", default="", metavar="FILE", help="read options from this TOML file")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="set any option; may be repeated"
    )


def split_options(arguments: Sequence[str]) -> tuple[list[str], list[Assignment]]:
    """Take ``--section.key VALUE`` and ``--section.key=VALUE`` out of ``arguments``. Raises ConfigError.

    A switch may stand without its value, which is then true.
    """
    rest: list[str] = []
    assignments: list[Assignment] = []
    waiting = list(arguments)
    while waiting:
        argument = waiting.pop(0)
        flag, equals, text = argument.partition("=")
        if not flag.startswith("--") or "." not in flag:
            rest.append(argument)
            continue
        option = find_option(flag.removeprefix("--"))
        if not equals:
            text = _value_after(option, flag, waiting)
        assignments.append(Assignment(name=option.name, text=text, origin=flag))
    return rest, assignments


def config_from(args: Namespace, assignments: Sequence[Assignment], environment: Mapping[str, str]) -> Config:
    """The Config that the parsed command line and the environment ask for. Raises ConfigError."""
    given = list(args.assignments)
    if args.model is not None:
        given.append(Assignment(name="model.model", text=args.model, origin="MODEL"))
    for entry in args.set:
        name, equals, text = entry.partition("=")
        if not equals:
            raise ConfigError(f"--set takes section.key=value, not {entry!r}.")
        given.append(Assignment(name=name, text=text, origin="--set"))
    return load_config(file=args.config, environment=environment, command_line=[*given, *assignments])


def run(args: Namespace, assignments: Sequence[Assignment]) -> int:
    """Serve until told to stop; the exit code. Raises ConfigError and ModelError."""
    config = config_from(args, assignments, os.environ)
    faults.arm_from_environment(os.environ)

    from aserve.main import serve  # here, so that --help and a wrong option answer without the layers below

    return serve(config)


def _metavar(option: Option, flag: str) -> str:
    if get_origin(option.kind) is Literal:
        return "|".join(map(str, get_args(option.kind)))
    return flag.rpartition("-")[2].upper()


def _value_after(option: Option, flag: str, waiting: list[str]) -> str:
    if option.kind is bool and not (waiting and _is_switch_value(option, waiting[0])):
        return "true"
    if not waiting:
        raise ConfigError(f"{flag} needs a value.")
    return waiting.pop(0)


def _is_switch_value(option: Option, text: str) -> bool:
    try:
        option.from_text(text)
    except ValueError:
        return False
    return True
