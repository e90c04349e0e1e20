"""``python -m loadgen run``: the command line. Exit status 0, 1 where a request failed, 2 where there was no run.

Only argparse is imported before the options are parsed, so that --help is instant.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from loadgen.errors import LoadgenError, UsageError

if TYPE_CHECKING:
    from loadgen.options import RunOptions

NUM_REQUESTS = 100


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    arguments = _parser().parse_args(argv)
    try:
        return _run(arguments)
    except LoadgenError as error:
        sys.stderr.write(f"loadgen: {error}\n")
        return 2


def _run(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from loadgen import metrics, report, runner

    options = _options(arguments)
    destination = Path(arguments.json) if arguments.json else None
    if destination is not None and not destination.absolute().parent.is_dir():
        raise UsageError(f"there is no folder for {destination}")
    result = runner.run(options)
    summary = metrics.summarise(result)
    is_colored = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    sys.stdout.write(report.table(result, summary, is_colored=is_colored))
    if destination is not None:
        destination.write_bytes(report.to_json(result, summary))
    return 1 if summary.num_ok < summary.num_requests and not arguments.allow_errors else 0


def _options(arguments: argparse.Namespace) -> "RunOptions":
    from loadgen import arrivals, client, options, work

    key = arguments.api_key or os.environ.get("OPENAI_API_KEY")
    num_requests = arguments.num_requests
    if num_requests is None and arguments.duration is None:
        num_requests = NUM_REQUESTS
    return options.RunOptions(
        target=client.parse_target(
            arguments.base_url, arguments.endpoint, api_key=key, headers=dict(arguments.header or ())
        ),
        template=work.BodyTemplate(
            model=arguments.model,
            endpoint=arguments.endpoint,
            max_tokens=arguments.max_tokens,
            temperature=arguments.temperature,
            ignore_eos=arguments.ignore_eos,
            usage=arguments.usage,
            extra=arguments.extra_body,
        ),
        prompts=work.read_jsonl(arguments.prompts)
        if arguments.prompts
        else work.RandomWords(num_words=arguments.words),
        arrivals=(
            arrivals.ClosedLoop(concurrency=arguments.concurrency)
            if arguments.rate is None
            else arrivals.Poisson(rate=arguments.rate)
        ),
        num_requests=num_requests,
        duration_s=arguments.duration,
        num_warmup_requests=arguments.warmup_requests,
        warmup_s=arguments.warmup,
        cooldown_s=arguments.cooldown,
        timeout_s=arguments.timeout,
        connect_timeout_s=arguments.connect_timeout,
        max_inflight=arguments.max_inflight,
        num_processes=arguments.processes,
        seed=arguments.seed,
        labels=dict(arguments.label or ()),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="loadgen", description="Measure an OpenAI-compatible server.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser(
        "run",
        help="send requests and report latencies and throughput",
        description="Send requests and report latencies and throughput. Exit status 1 if a request failed.",
    )

    target = run.add_argument_group("server")
    target.add_argument("--base-url", required=True, metavar="URL", help="with or without /v1")
    target.add_argument("--model", required=True, metavar="NAME", help="the model's name on the server")
    target.add_argument("--endpoint", choices=("chat", "completions"), default="chat", help="default: %(default)s")
    target.add_argument("--api-key", metavar="KEY", help="default: OPENAI_API_KEY of the environment")
    target.add_argument("--header", action="append", type=_pair(":"), metavar="NAME:VALUE", help="may be repeated")

    when = run.add_argument_group("arrivals")
    form = when.add_mutually_exclusive_group()
    form.add_argument(
        "--concurrency",
        type=_count(1),
        default=8,
        metavar="N",
        help="closed loop: N requests out at once (default: %(default)s)",
    )
    form.add_argument("--rate", type=_positive, metavar="R", help="open loop: Poisson arrivals, R requests a second")
    when.add_argument(
        "--num-requests", type=_count(1), metavar="N", help=f"default: {NUM_REQUESTS} where no duration is given"
    )
    when.add_argument("--duration", type=_positive, metavar="S", help="send for S seconds, then let all end")
    when.add_argument("--seed", type=int, default=0, metavar="N", help="of arrivals and prompts (default: %(default)s)")
    when.add_argument(
        "--warmup-requests", type=_count(0), default=0, metavar="N", help="sent before the start, not counted"
    )
    when.add_argument(
        "--warmup", type=_not_negative, default=0.0, metavar="S", help="seconds left out at the beginning"
    )
    when.add_argument("--cooldown", type=_not_negative, default=0.0, metavar="S", help="seconds left out at the end")
    when.add_argument(
        "--processes",
        type=_count(1),
        default=1,
        metavar="N",
        help="share the work among N processes (default: %(default)s)",
    )

    what = run.add_argument_group("requests")
    prompts = what.add_mutually_exclusive_group()
    prompts.add_argument(
        "--words", type=_count(1), default=128, metavar="N", help="prompts of N random words (default: %(default)s)"
    )
    prompts.add_argument("--prompts", metavar="FILE", help="prompts from JSONL: messages, turns, prompt or question")
    what.add_argument("--max-tokens", type=_count(1), default=128, metavar="N", help="default: %(default)s")
    what.add_argument("--temperature", type=_not_negative, default=0.0, metavar="T", help="default: %(default)s")
    what.add_argument("--ignore-eos", action="store_true", help="go on to max-tokens (an extension of most servers)")
    what.add_argument(
        "--usage",
        choices=("final", "continuous", "off"),
        default="final",
        help="token counts to ask for (default: %(default)s)",
    )
    what.add_argument(
        "--extra-body", type=_json_object, default={}, metavar="JSON", help="laid over the request's body"
    )

    bounds = run.add_argument_group("bounds")
    bounds.add_argument(
        "--timeout",
        type=_positive,
        default=300.0,
        metavar="S",
        help="of a request, from its send (default: %(default)g)",
    )
    bounds.add_argument("--connect-timeout", type=_positive, default=10.0, metavar="S", help="default: %(default)g")
    bounds.add_argument(
        "--max-inflight",
        type=_count(1),
        default=1024,
        metavar="N",
        help="requests out at once, at most (default: %(default)s)",
    )

    output = run.add_argument_group("output")
    output.add_argument("--json", metavar="FILE", help="write all figures and every sample")
    output.add_argument("--label", action="append", type=_pair("="), metavar="NAME=VALUE", help="written into the JSON")
    output.add_argument("--allow-errors", action="store_true", help="exit with 0 though requests failed")
    return parser


def _count(at_least: int) -> Callable[[str], int]:
    def count(text: str) -> int:
        value = int(text)
        if value < at_least:
            raise argparse.ArgumentTypeError(f"must be at least {at_least}")
        return value

    return count


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError("must be above 0")
    return value


def _not_negative(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError("must be 0 or more")
    return value


def _pair(separator: str) -> Callable[[str], tuple[str, str]]:
    def pair(text: str) -> tuple[str, str]:
        name, found, value = text.partition(separator)
        if not found or not name.strip():
            raise argparse.ArgumentTypeError(f"must be NAME{separator}VALUE")
        return name.strip(), value.strip()

    return pair


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return value


if __name__ == "__main__":
    sys.exit(main())
