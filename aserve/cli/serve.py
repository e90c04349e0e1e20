"""``python -m aserve [serve] [MODEL]``: from the command line to a Config, then into ``aserve.main``."""

import os
from argparse import ArgumentParser, Namespace

from aserve import faults
from aserve.cli.arguments import add_options, config_from


def add_arguments(parser: ArgumentParser) -> None:
    """Declare every option of the configuration."""
    add_options(parser)


def run(args: Namespace) -> int:
    """Serve until told to stop; the exit code. Raises ConfigError and ModelError."""
    config = config_from(args, os.environ)
    faults.arm_from_environment(os.environ)

    from aserve.main import serve  # here, so that --help and a wrong option answer without the layers below

    return serve(config)
