"""``python -m aserve pull [MODEL]``: fetch and convert a model now, so that a later start needs no network."""

import sys
from argparse import ArgumentParser, Namespace

from aserve.errors import ModelError

_USAGE_ERROR = 2


def add_arguments(parser: ArgumentParser) -> None:
    """Declare ``model`` and ``--cache-dir``."""
    parser.add_argument(
        "model",
        nargs="?",
        default="",
        help="hub id org/name[@revision], GGUF file or folder; default: the small built-in one",
    )
    parser.add_argument("--cache-dir", default="", help="where models are kept (or ASERVE_CACHE_DIR)")


def run(args: Namespace) -> int:
    """Print the model's folder and size and return 0, or one sentence to standard error and 2."""
    from aserve.model.hub import resolve_model  # here, so that --help stays quick

    try:
        source = resolve_model(args.model, cache_dir=args.cache_dir)
    except ModelError as error:
        sys.stderr.write(f"aserve: {error.message}\n")
        return _USAGE_ERROR
    num_bytes = sum(file.stat().st_size for file in source.folder.rglob("*") if file.is_file())
    sys.stdout.write(f"{source.name}: {source.folder} ({num_bytes / 1e6:.1f} MB)\n")
    return 0
