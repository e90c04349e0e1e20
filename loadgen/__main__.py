"""The command line. Exit status 0; 1 where a request failed or a limit was broken; 2 where there was no run.

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
    from pathlib import Path

    from loadgen.options import RunOptions
    from loadgen.scenario import Document

NUM_REQUESTS = 100
"""Of a run whose scenario does not say."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    arguments = _parser().parse_args(argv)
    command: Callable[[argparse.Namespace], int] = arguments.command
    try:
        return command(arguments)
    except LoadgenError as error:
        sys.stderr.write(f"loadgen: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130


def _run(arguments: argparse.Namespace) -> int:
    from loadgen import chrome, figures, live, metrics, page, report, runner

    outputs = _destinations(arguments, "json", "html", "trace", "markdown")
    options = _options(arguments, arguments.base_url)
    with live.view(options, is_wanted=not arguments.quiet) as tell:
        result = runner.run(options, tell=tell)
    summary = metrics.summarise(result)
    sys.stdout.write(report.table(result, summary, is_colored=_is_colored()))
    for kind, path in outputs.items():
        match kind:
            case "json":
                path.write_bytes(report.to_json(result, summary))
            case "html":
                path.write_text(page.run_page(result, summary), encoding="utf-8")
            case "trace":
                path.write_bytes(chrome.to_trace(result))
            case _:
                path.write_text(report.markdown(result, summary), encoding="utf-8")
    if figures.broken(options.limits, figures.flat(summary)):
        return 1
    return 1 if summary.num_ok < summary.num_requests and not arguments.allow_errors else 0


def _sweep(arguments: argparse.Namespace) -> int:
    from loadgen import page, sweep

    outputs = _destinations(arguments, "json", "html", "markdown")
    options = _options(arguments, arguments.base_url)
    plan = sweep.Plan(
        over=arguments.over,
        low=arguments.low,
        high=arguments.high,
        precision=arguments.precision,
        seconds=arguments.seconds,
        num_points_max=arguments.max_points,
    )

    def show(point: sweep.Point) -> None:
        sys.stderr.write(sweep.line(plan, point) + "\n")

    found = sweep.search(options, plan, show=show)
    sys.stdout.write(sweep.table(found))
    for kind, path in outputs.items():
        match kind:
            case "json":
                path.write_bytes(sweep.to_json(found))
            case "html":
                path.write_text(page.sweep_page(found), encoding="utf-8")
            case _:
                path.write_text(sweep.markdown(found), encoding="utf-8")
    return 0 if found.best is not None else 1


def _compare(arguments: argparse.Namespace) -> int:
    from loadgen import compare, figures

    outputs = _destinations(arguments, "json", "markdown")
    sides = [_options(arguments, url, model=model) for url, model in _sides(arguments)]
    limits = tuple(figures.parse_limit(text) for text in arguments.limit or ())

    def show(text: str) -> None:
        sys.stderr.write(text + "\n")

    found = compare.run(sides[0], sides[1], num_rounds=arguments.rounds, show=show)
    sys.stdout.write(compare.table(found))
    for kind, path in outputs.items():
        if kind == "json":
            path.write_bytes(compare.to_json(found))
        else:
            path.write_text(compare.markdown(found), encoding="utf-8")
    sentences = compare.broken(found, limits)
    for sentence in sentences:
        sys.stdout.write(f"limit       {sentence}\n")
    return 1 if sentences or (found.num_failed and not arguments.allow_errors) else 0


def _scenarios(arguments: argparse.Namespace) -> int:
    from loadgen import scenario

    if arguments.name:
        document = scenario.load(arguments.name)
        sys.stdout.write((document.folder / document.where).read_text(encoding="utf-8"))
        return 0
    for name in scenario.names():
        sys.stdout.write(f"{name:<12}{scenario.load(name).fields.get('about', '')}\n")
    return 0


def _stub(arguments: argparse.Namespace) -> int:
    from loadgen import stub

    script = stub.Script(
        ttft_ms=arguments.ttft_ms,
        gap_ms=arguments.gap_ms,
        jitter=arguments.jitter,
        num_slots=arguments.slots,
        stall_at_s=arguments.stall_at,
        stall_s=arguments.stall,
        seed=arguments.seed,
    )
    return stub.main(script, port=arguments.port, truth=arguments.truth)


def _is_colored() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def _destinations(arguments: argparse.Namespace, *kinds: str) -> "dict[str, Path]":
    """Return the files to write by kind, whose folders exist."""
    from pathlib import Path

    paths = {kind: Path(name) for kind in kinds if (name := getattr(arguments, kind))}
    for path in paths.values():
        if not path.absolute().parent.is_dir():
            raise UsageError(f"there is no folder for {path}")
    return paths


def _sides(arguments: argparse.Namespace) -> list[tuple[str, str | None]]:
    return [(arguments.a, arguments.model_a or arguments.model), (arguments.b, arguments.model_b or arguments.model)]


def _options(arguments: argparse.Namespace, base_url: str, *, model: str | None = None) -> "RunOptions":
    from functools import partial

    from loadgen import client, probe, scenario

    document = scenario.load(arguments.scenario) if arguments.scenario else scenario.EMPTY
    document = _with_flags(document, arguments)
    for override in arguments.set or ():
        document = document.with_overrides(scenario.parse_override(override))
    key = arguments.api_key or os.environ.get("OPENAI_API_KEY")
    target = client.parse_target(
        base_url,
        scenario.template(document, model="").endpoint,
        api_key=key,
        headers=dict(arguments.header or ()),
    )
    return scenario.build(
        document,
        target=target,
        model=model or arguments.model or probe.first_model(target),
        calibrate=partial(probe.calibrate, target),
        labels=dict(getattr(arguments, "label", None) or ()),
    )


_FLAGS = {
    "endpoint": "request.endpoint",
    "max_tokens": "request.max_tokens",
    "temperature": "request.temperature",
    "ignore_eos": "request.ignore_eos",
    "usage": "request.usage",
    "extra_body": "request.body",
    "num_requests": "run.num_requests",
    "duration": "run.duration_s",
    "warmup_requests": "run.warmup_requests",
    "warmup": "run.warmup_s",
    "cooldown": "run.cooldown_s",
    "timeout": "run.timeout_s",
    "connect_timeout": "run.connect_timeout_s",
    "max_inflight": "run.max_inflight",
    "processes": "run.processes",
    "seed": "run.seed",
    "words": "work.input",
}


def _with_flags(document: "Document", arguments: argparse.Namespace) -> "Document":
    """Lay the flags that were given over a scenario."""
    from pathlib import Path

    for flag, path in _FLAGS.items():
        value = getattr(arguments, flag)
        if value is not None:
            table, key = path.split(".")
            document = document.with_overrides({table: {key: value}})
    if arguments.prompts:
        document = document.with_overrides(
            {"work": {"kind": "prompts", "file": str(Path(arguments.prompts).absolute())}}
        )
    kind = document.fields.get("arrivals", {}).get("kind", "closed")
    if arguments.concurrency is not None:
        ours = {"concurrency": arguments.concurrency}
        document = document.with_overrides({"arrivals": ours if kind == "closed" else {"kind": "closed", **ours}})
    if arguments.rate is not None:
        keeps_kind = kind in ("constant", "poisson", "gamma")
        document = document.with_overrides(
            {"arrivals": {"rate": arguments.rate} | ({} if keeps_kind else {"kind": "poisson"})}
        )
    if getattr(arguments, "slo", None):
        document = document.with_overrides({"slo": {f"{name}_ms": _number(value) for name, value in arguments.slo}})
    if arguments.limit and arguments.command is not _compare:  # whose limits are on ratios
        document = document.with_overrides({"limits": [*document.fields.get("limits", ()), *arguments.limit]})
    return document


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise UsageError(f"{text} is not a number") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="loadgen", description="Measure an OpenAI-compatible server.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_run(commands)
    _add_sweep(commands)
    _add_compare(commands)

    scenarios = commands.add_parser("scenarios", help="list the library of scenarios, or print one")
    scenarios.add_argument("name", nargs="?")
    scenarios.set_defaults(command=_scenarios)

    stub = commands.add_parser(
        "stub",
        help="serve answers whose timing is a script, to try this program on",
        description="Serve answers whose timing is a script, over SSE and websocket, and write what the script was.",
    )
    stub.add_argument("--port", type=_count(0), default=8900, help="default: %(default)s; 0 takes any free one")
    stub.add_argument("--ttft-ms", type=_not_negative, default=50.0, metavar="MS", help="default: %(default)g")
    stub.add_argument("--gap-ms", type=_not_negative, default=10.0, metavar="MS", help="default: %(default)g")
    stub.add_argument(
        "--jitter", type=_not_negative, default=0.0, metavar="SIGMA", help="of a log-normal law on both (default: 0)"
    )
    stub.add_argument("--slots", type=_count(1), metavar="N", help="answer so many at once, queue the others")
    stub.add_argument("--stall-at", type=_not_negative, metavar="S", help="stop S seconds after the first request")
    stub.add_argument("--stall", type=_not_negative, default=0.0, metavar="S", help="for so long")
    stub.add_argument("--seed", type=int, default=0, metavar="N")
    stub.add_argument(
        "--truth", metavar="FILE", help="write the script of every answer when ended by SIGINT or SIGTERM"
    )
    stub.set_defaults(command=_stub)
    return parser


def _add_run(commands: Any) -> None:
    run = commands.add_parser(
        "run",
        help="send requests and report latencies and throughput",
        description="Send requests and report latencies and throughput. Exit status 1 if a request failed or a limit "
        "was broken.",
    )
    run.set_defaults(command=_run)
    _add_scenario(run)
    server = run.add_argument_group("server")
    server.add_argument("--base-url", required=True, metavar="URL", help="with or without /v1")
    _add_server(server)
    _add_load(run)
    _add_bounds(run)
    judged = run.add_argument_group("judged by")
    _add_slo(judged)
    judged.add_argument(
        "--limit", action="append", metavar="LIMIT", help="such as 'ttft_ms_p99 < 500'; sets the status"
    )
    judged.add_argument("--allow-errors", action="store_true", help="exit with 0 though requests failed")
    output = run.add_argument_group("output")
    output.add_argument("--json", metavar="FILE", help="write all figures and every sample")
    output.add_argument("--html", metavar="FILE", help="write a report to look at, in one file")
    output.add_argument("--trace", metavar="FILE", help="write a timeline for Chrome's tracing page or Perfetto")
    output.add_argument("--markdown", metavar="FILE", help="write a table to paste")
    output.add_argument("--label", action="append", type=_pair("="), metavar="NAME=VALUE", help="written into the JSON")
    output.add_argument("--quiet", action="store_true", help="no live table")


def _add_sweep(commands: Any) -> None:
    sweep = commands.add_parser(
        "sweep",
        help="find the highest load that keeps the limits, and the knee",
        description="Raise the load until a limit breaks, then halve the interval. Exit status 1 if the lowest load "
        "already breaks one.",
    )
    sweep.set_defaults(command=_sweep)
    _add_scenario(sweep)
    server = sweep.add_argument_group("server")
    server.add_argument("--base-url", required=True, metavar="URL", help="with or without /v1")
    _add_server(server)
    search = sweep.add_argument_group("search")
    search.add_argument("--over", choices=("rate", "concurrency"), default="rate", help="default: %(default)s")
    search.add_argument("--low", type=_positive, default=1.0, metavar="X", help="where to begin (default: %(default)g)")
    search.add_argument("--high", type=_positive, metavar="X", help="never beyond this")
    search.add_argument(
        "--precision",
        type=_positive,
        default=0.1,
        metavar="P",
        help="stop when the interval is this narrow (default: 0.1)",
    )
    search.add_argument(
        "--seconds", type=_positive, default=20.0, metavar="S", help="of each point (default: %(default)g)"
    )
    search.add_argument("--max-points", type=_count(2), default=16, metavar="N", help="default: %(default)s")
    search.add_argument("--limit", action="append", metavar="LIMIT", help="such as 'ttft_ms_p99 < 500'")
    _add_slo(search)
    _add_load(sweep)
    _add_bounds(sweep)
    output = sweep.add_argument_group("output")
    output.add_argument("--json", metavar="FILE", help="write all points")
    output.add_argument("--html", metavar="FILE", help="write throughput against latency, in one file")
    output.add_argument("--markdown", metavar="FILE", help="write a table to paste")


def _add_compare(commands: Any) -> None:
    compare = commands.add_parser(
        "compare",
        help="alternate two servers in one run and give ratios",
        description="Give both servers the same load by turns and report B's figures over A's with intervals of 95 %. "
        "Exit status 1 if a request failed or a limit on a ratio was broken.",
    )
    compare.set_defaults(command=_compare)
    compare.add_argument("a", metavar="A", help="base URL of the one")
    compare.add_argument("b", metavar="B", help="base URL of the other")
    _add_scenario(compare, is_flag=True)
    server = compare.add_argument_group("servers")
    _add_server(server)
    server.add_argument("--model-a", metavar="NAME", help="where it differs")
    server.add_argument("--model-b", metavar="NAME", help="where it differs")
    compare.add_argument("--rounds", type=_count(2), default=6, metavar="N", help="of both (default: %(default)s)")
    compare.add_argument("--limit", action="append", metavar="LIMIT", help="on a ratio, such as 'ttft_ms_p50 < 1.05'")
    compare.add_argument("--allow-errors", action="store_true", help="exit with 0 though requests failed")
    _add_load(compare)
    _add_bounds(compare)
    output = compare.add_argument_group("output")
    output.add_argument("--json", metavar="FILE", help="write the ratios and the figures of every round")
    output.add_argument("--markdown", metavar="FILE", help="write a table to paste")


def _add_scenario(parser: argparse.ArgumentParser, *, is_flag: bool = False) -> None:
    what = "a name of the library (see 'loadgen scenarios') or a TOML file"
    if is_flag:
        parser.add_argument("--scenario", metavar="SCENARIO", help=what)
    else:
        parser.add_argument("scenario", nargs="?", metavar="SCENARIO", help=what)
    parser.add_argument("--set", action="append", metavar="KEY=VALUE", help="replace a key: --set work.input=64")


def _add_server(group: Any) -> None:
    group.add_argument("--model", metavar="NAME", help="default: the server's first")
    group.add_argument("--endpoint", choices=("chat", "completions", "responses", "responses-ws"), help="default: chat")
    group.add_argument("--api-key", metavar="KEY", help="default: OPENAI_API_KEY of the environment")
    group.add_argument("--header", action="append", type=_pair(":"), metavar="NAME:VALUE", help="may be repeated")


def _add_load(parser: argparse.ArgumentParser) -> None:
    when = parser.add_argument_group("arrivals")
    form = when.add_mutually_exclusive_group()
    form.add_argument(
        "--concurrency", type=_count(1), metavar="N", help="closed loop: N requests out at once (default: 8)"
    )
    form.add_argument("--rate", type=_positive, metavar="R", help="open loop: R requests a second, Poisson by default")
    when.add_argument(
        "--num-requests", type=_count(1), metavar="N", help=f"default: {NUM_REQUESTS} where no duration is given"
    )
    when.add_argument("--duration", type=_positive, metavar="S", help="send for S seconds, then let all end")
    when.add_argument("--seed", type=int, metavar="N", help="of arrivals and prompts (default: 0)")
    when.add_argument("--warmup-requests", type=_count(0), metavar="N", help="sent before the start, not counted")
    when.add_argument("--warmup", type=_not_negative, metavar="S", help="seconds left out at the beginning")
    when.add_argument("--cooldown", type=_not_negative, metavar="S", help="seconds left out at the end")
    when.add_argument("--processes", type=_count(1), metavar="N", help="that share the load (default: 1)")

    what = parser.add_argument_group("requests")
    prompts = what.add_mutually_exclusive_group()
    prompts.add_argument("--words", type=_count(1), metavar="N", help="random words in a prompt (default: 128)")
    prompts.add_argument("--prompts", metavar="FILE", help="JSON lines with messages, turns, prompt or question")
    what.add_argument("--max-tokens", type=_count(1), metavar="N", help="default: 128")
    what.add_argument("--temperature", type=_not_negative, metavar="T", help="default: 0")
    what.add_argument(
        "--ignore-eos", action="store_true", default=None, help="go on to max-tokens (an extension of most servers)"
    )
    what.add_argument(
        "--usage", choices=("final", "continuous", "off"), help="token counts to ask for (default: final)"
    )
    what.add_argument("--extra-body", type=_json_object, metavar="JSON", help="laid over the request's body")


def _add_bounds(parser: argparse.ArgumentParser) -> None:
    bounds = parser.add_argument_group("bounds")
    bounds.add_argument("--timeout", type=_positive, metavar="S", help="of a request, from its send (default: 300)")
    bounds.add_argument("--connect-timeout", type=_positive, metavar="S", help="default: 10")
    bounds.add_argument("--max-inflight", type=_count(1), metavar="N", help="requests out at once (default: 1024)")


def _add_slo(group: Any) -> None:
    group.add_argument(
        "--slo",
        action="append",
        type=_pair("="),
        metavar="NAME=MS",
        help="what makes a request good: ttft=500, tpot=50 or e2e=5000; may be repeated",
    )


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
