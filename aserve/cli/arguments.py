"""The configuration's options on a command line: declared, taken apart, and put together into a Config."""

from argparse import SUPPRESS, Action, ArgumentParser, Namespace
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, Literal, get_args, get_origin

from aserve.config import FLAGS, Assignment, Config, Option, find_option, load_config, options
from aserve.errors import ConfigError
from aserve.profiles import PROFILES

_EPILOG: Final = """\
Every option can be given as --section.key VALUE, as --set section.key=VALUE, as the environment variable
ASERVE_SECTION__KEY, or in the file named by --config (ASERVE_CONFIG); the command line wins over the environment, that
over the file, and the file over a profile. config.toml lists them all. Lists take commas, and flags that are given
again add to them.

profiles (--profile, ASERVE_PROFILE, or profile = "NAME" at the top of the file):
"""

MODEL_SECTIONS: Final = frozenset({"model", "scheduler", "engine"})
"""Sections that matter to a command without a server; the short flags of others are not declared for it."""


class _Assign(Action):
    """Appends to ``assignments`` for the option named by ``const``, so that the order of flags is kept."""

    def __call__(
        self, parser: ArgumentParser, namespace: Namespace, values: Any, option_string: str | None = None
    ) -> None:
        text = "true" if self.nargs == 0 else values
        namespace.assignments = [
            *namespace.assignments,
            Assignment(name=str(self.const), text=text, origin=option_string or ""),
        ]


def add_options(parser: ArgumentParser, sections: Collection[str] = ()) -> None:
    """Declare MODEL, the short flags (of ``sections``, else all), --profile, --set and --config.

    ``split_options`` has to take out --section.key before the parser sees it.
    """
    parser.epilog = _EPILOG + "".join(f"  {name:<11} for {profile.goal}\n" for name, profile in PROFILES.items())
    parser.set_defaults(assignments=[])
    parser.add_argument("model", nargs="?", help="the same as --model")
    for flag, name in FLAGS.items():
        option = options()[name]
        if sections and option.section not in sections:
            continue
        parser.add_argument(
            flag,
            action=_Assign,
            const=name,
            dest=SUPPRESS,
            nargs=0 if option.kind is bool else None,
            metavar=None if option.kind is bool else _metavar(option, flag),
            help=option.help.replace("%", "%%"),
        )
    parser.add_argument("--profile", default="", metavar="|".join(PROFILES), help="options chosen for a goal")
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


def config_from(args: Namespace, environment: Mapping[str, str]) -> Config:
    """The Config that the parsed command line and the environment ask for. Raises ConfigError.

    ``args.assignments``: what the short flags said, then what ``split_options`` found.
    """
    given = list(args.assignments)
    if args.model is not None:
        given.append(Assignment(name="model.model", text=args.model, origin="MODEL"))
    for entry in args.set:
        name, equals, text = entry.partition("=")
        if not equals:
            raise ConfigError(f"--set takes section.key=value, not {entry!r}.")
        given.append(Assignment(name=name, text=text, origin="--set"))
    return load_config(file=args.config, profile=args.profile, environment=environment, command_line=given)


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
