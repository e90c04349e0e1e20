"""``python -m aserve bench``: how fast a model is on this machine, through the engine in this process, without HTTP.

Three tables: reading prompts by chunk length, writing by number of sequences, and the wait for a first token. Each
point gets a share of the time, and its first run is thrown away.
"""

import json
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

from aserve.cli.arguments import MODEL_SECTIONS, add_options, config_from
from aserve.errors import ConfigError

if TYPE_CHECKING:
    from aserve.cli.bench_points import Report

SECONDS: Final = 45.0
SECONDS_MIN: Final = 2.0
OTHERS_SHARE_MAX: Final = 0.1
"""Of the cores' time; more than this spoils the figures."""


def add_arguments(parser: ArgumentParser) -> None:
    """Declare how long, and the engine's options."""
    group = parser.add_argument_group("bench")
    group.add_argument("--json", action="store_true", help="print one JSON object")
    group.add_argument(
        "--seconds",
        type=float,
        default=SECONDS,
        metavar="S",
        help=f"time for all points together (default {SECONDS:g})",
    )
    add_options(parser, MODEL_SECTIONS)


def run(args: Namespace) -> int:
    """Measure and print; 0. Raises ConfigError and ModelError."""
    if args.seconds < SECONDS_MIN:
        raise ConfigError(f"--seconds: {args.seconds:g} is too short; at least {SECONDS_MIN:g}.")
    config = config_from(args, os.environ)

    from aserve.cli.bench_points import measure  # the engine's layers, which --help does without

    def say(text: str) -> None:
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\033[K{text}")
            sys.stderr.flush()

    try:
        report = measure(config, seconds=args.seconds, say=say)
    finally:
        say("")
    sys.stdout.write(json.dumps(asdict(report), indent=2) + "\n" if args.json else "\n".join(as_text(report)) + "\n")
    return 0


def as_text(report: "Report") -> Iterator[str]:
    """The lines of the report."""
    yield f"{report.model} on {report.device}, aserve {report.version}" + (
        f", profile {report.profile}" if report.profile else ""
    )
    yield f"loaded in {report.load_s:.1f} s, measured in {report.measured_s:.1f} s; {report.method}"
    yield ""
    yield "prefill     tokens/s   ms a chunk   (median of the runs)"
    for chunk in report.prefill:
        yield f"{chunk.num_tokens:>6} tok  {chunk.tokens_per_s:>9.0f}   {chunk.chunk_ms:>10.1f}   {chunk.num_runs} runs"
    yield ""
    yield "decode      tokens/s   tokens/s each   ms a token"
    for batch in report.decode:
        yield (
            f"{batch.num_sequences:>6} seq  {batch.tokens_per_s:>9.1f}   {batch.tokens_per_s_each:>13.1f}   "
            f"{batch.token_ms:>10.1f}   over {batch.window_s:.1f} s"
        )
    yield ""
    ttft = report.first_token
    yield (
        f"first token of a prompt of {ttft.num_prompt_tokens} tokens, idle: "
        f"{ttft.median_ms:.1f} ms median, {ttft.max_ms:.1f} ms at most, {ttft.num_runs} runs"
    )
    if (report.others_cpu_share or 0) > OTHERS_SHARE_MAX:
        yield (
            f"Other programs used {report.others_cpu_share:.0%} of the machine's cores meanwhile: "
            "alone on it, these figures are better."
        )
    yield from (f"left out: {text}" for text in report.left_out)
