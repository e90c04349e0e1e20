"""``python -m aserve doctor``: what the server would find here, every option with its origin, and what is wrong."""

import json
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from aserve.cli.arguments import add_options, config_from
from aserve.config import Config, options
from aserve.errors import ConfigError
from aserve.profiles import PROFILES

if TYPE_CHECKING:
    from aserve.cli.diagnosis import Diagnosis

EXIT_CANNOT_SERVE: Final = 1


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the form of the report, and the options that ``serve`` would be given."""
    group = parser.add_argument_group("doctor")
    group.add_argument("--json", action="store_true", help="print one JSON object")
    group.add_argument("--load", action="store_true", help="load the model too, and generate a few tokens")
    add_options(parser)


def run(args: Namespace) -> int:
    """Print the report. 0, or 1 if ``serve`` with these options would not start."""
    mistake = ""
    try:
        config = config_from(args, os.environ)
    except ConfigError as error:  # what can be said without the configuration is said all the same
        config, mistake = Config(), error.message

    from aserve.cli.diagnosis import diagnose  # numpy and the model's layers, which --help does without

    found = diagnose(config, os.environ, load=args.load)
    config = config.on(found.device, found.num_layer_parameters)
    if mistake:
        found.error(f"{mistake} (The rest of this report is about the defaults.)")
    sys.stdout.write(as_json(config, found) if args.json else "\n".join(as_text(config, found)) + "\n")
    return 0 if found.can_serve else EXIT_CANNOT_SERVE


def as_json(config: Config, found: "Diagnosis") -> str:
    """One object: machine, versions, model, profile, config, problems, can_serve."""
    report = {
        "can_serve": found.can_serve,
        "problems": [{"severity": problem.severity, "text": problem.text} for problem in found.problems],
        "machine": found.machine,
        "versions": found.versions,
        "model": found.model,
        "profile": {"name": config.profile, "options": list(_profile_rows(config))},
        "config": [
            {"name": setting.name, "value": setting.value, "origin": setting.origin} for setting in config.settings()
        ],
    }
    return json.dumps(report, indent=2) + "\n"


def as_text(config: Config, found: "Diagnosis") -> Iterator[str]:
    """The lines of the report, the problems last, where they are seen."""
    from aserve.cli.diagnosis import sections

    for title, facts in sections(found):
        yield title
        width = max(map(len, facts), default=0)
        yield from (f"  {name:<{width}}  {value}" for name, value in facts.items())
        yield ""
    if config.profile:
        yield f"profile {config.profile}: for {PROFILES[config.profile].goal}"
        for row in _profile_rows(config):
            given_way = "" if row["applied"] else f" (not applied: {row['origin']} says {row['value']})"
            yield f"  {row['name']} = {row['profile_value']} in place of {row['default']}{given_way}"
            yield f"      {row['reason']}"
        yield ""
    settings = list(config.settings())
    num_set = sum(not setting.origin.startswith("default") for setting in settings)
    yield f"configuration ({num_set} of {len(settings)} options are set; origin at the right)"
    width = max(len(f"{setting.name} = {setting.value}") for setting in settings)
    for setting in settings:
        mark = " " if setting.origin.startswith("default") else "*"
        yield f"{mark} {f'{setting.name} = {setting.value}':<{width}}  {setting.origin}"
    yield ""
    if not found.problems:
        yield "No problems found."
        return
    yield "problems"
    yield from (f"  {problem.severity}: {problem.text}" for problem in found.problems)
    if not found.can_serve:
        yield "The server would not start like this."


def _profile_rows(config: Config) -> Iterator[dict[str, Any]]:
    """What the profile changed, and where something explicit won over it."""
    if not config.profile:
        return
    settings = {setting.name: setting for setting in config.settings()}
    for name, choice in PROFILES[config.profile].choices.items():
        setting = settings[name]
        yield {
            "name": name,
            "profile_value": choice.value,
            "default": options()[name].default,
            "value": setting.value,
            "origin": setting.origin,
            "applied": setting.origin == f"profile {config.profile}",
            "reason": choice.reason,
        }
