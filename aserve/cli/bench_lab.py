"""``python -m aserve bench lab``: ten experiments about when to launch, or a plan for a rate of requests."""

import os
import shlex
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from aserve.cli.arguments import MODEL_SECTIONS, add_options, config_from
from aserve.config import FLAGS, options
from aserve.errors import ConfigError

if TYPE_CHECKING:
    from aserve.cli.lab.findings import Experiment

SHAPES: Final = ("8b", "1b")
NUM_EXPERIMENTS: Final = 10
SWEEP: Final = "sweep"
OUT: Final = "lab-results"
NUM_SEEDS: Final = 16
ALL_POLICIES: Final = "plain,overlap,eager,late"
PLAN_RATES: Final = (0.01, 1e6)
"""Requests a second. Beyond them the virtual clock's float tells arrivals, or a step's few milliseconds, no longer."""
PLAN_REQUESTS_MIN: Final = 4


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the experiments, the plan, and the engine's options."""
    group = parser.add_argument_group("bench lab")
    group.add_argument(
        "--experiments",
        nargs="+",
        metavar="N",
        default=[],
        help=f"which of 1 to {NUM_EXPERIMENTS}, and {SWEEP} of the costs (default: all that the device allows)",
    )
    group.add_argument(
        "--device",
        choices=("virtual", "cpu", "cuda"),
        default="virtual",
        help="a device made of costs, in no time (the default), or a real one that runs MODEL",
    )
    group.add_argument("--out", metavar="DIR", default=OUT, help=f"where the folder goes (default {OUT})")
    group.add_argument(
        "--seeds", type=int, metavar="N", default=NUM_SEEDS, help=f"runs of what is random (default {NUM_SEEDS})"
    )
    group.add_argument(
        "--jobs", type=int, metavar="N", default=0, help="processes on the virtual device (default: one a core)"
    )
    group.add_argument(
        "--shape", choices=SHAPES, default=SHAPES[0], help="whose costs the virtual device has from experiment 7 on"
    )
    group.add_argument(
        "--policies",
        metavar="NAMES",
        default=ALL_POLICIES,
        help=f"which policies, with commas (default all: {ALL_POLICIES})",
    )
    plan = parser.add_argument_group("bench lab --plan")
    plan.add_argument(
        "--plan", type=float, metavar="RATE", help="in place of experiments: what --shape would do at RATE requests/s"
    )
    plan.add_argument("--prompt-tokens", type=int, metavar="N", default=512, help="of each request (default 512)")
    plan.add_argument("--output-tokens", type=int, metavar="N", default=128, help="of each request (default 128)")
    plan.add_argument("--requests", type=int, metavar="N", default=400, help="in the run that tells (default 400)")
    add_options(parser, MODEL_SECTIONS)


def run(args: Namespace) -> int:
    """Run, write and say what was found; 0, whatever it was. Raises ConfigError and ModelError."""
    if args.seeds < 2 or args.jobs < 0:
        raise ConfigError("--seeds is at least 2, for there is no interval of one, and --jobs at least 1.")
    return _plan(args) if args.plan is not None else _experiments(args)


def _plan(args: Namespace) -> int:
    rate_min, rate_max = PLAN_RATES
    if not rate_min <= args.plan <= rate_max:  # nor is nan
        raise ConfigError(f"--plan is {rate_min:g} to {rate_max:,.0f} requests/s, not {args.plan:g}.")
    if min(args.prompt_tokens, args.output_tokens) <= 0:
        raise ConfigError("--prompt-tokens and --output-tokens are more than 0.")
    if args.requests < PLAN_REQUESTS_MIN:
        raise ConfigError(
            f"--requests is at least {PLAN_REQUESTS_MIN}: whether waits grow shows between quarters of the requests."
        )
    config = config_from(args, os.environ)

    from aserve.cli.lab.planning import plan  # the engine's layers, which --help does without
    from aserve.cli.lab.shapes import h200

    found = plan(
        h200(args.shape),
        args.plan,
        config.scheduler,
        num_prompt_tokens=args.prompt_tokens,
        num_output_tokens=args.output_tokens,
        num_requests=args.requests,
    )
    sys.stdout.write("\n".join(found.lines()) + "\n")
    return 0


def _experiments(args: Namespace) -> int:
    from aserve.cli.lab.catalogue import EXPERIMENTS, ON_A_REAL_DEVICE, run_all
    from aserve.cli.lab.laboratory import POLICIES, Lab
    from aserve.cli.lab.report import write

    numbers = [_number(name) for name in args.experiments] or list(EXPERIMENTS)
    policies = tuple(args.policies.split(","))
    if not set(policies) <= set(POLICIES):
        raise ConfigError(f"--policies takes names out of {', '.join(POLICIES)}, not {args.policies!r}.")
    lab = Lab(policies=policies, num_seeds=args.seeds, shape=args.shape)
    began_s = time.perf_counter()
    found: list[Experiment] = []
    if args.device == "virtual":
        device = f"virtual; from experiment 7 on it has the costs of {args.shape.upper()} on one H200"
        for experiment in run_all(numbers, lab, num_processes=args.jobs or min(len(numbers), os.cpu_count() or 1)):
            found.append(experiment)
            _say(experiment, time.perf_counter() - began_s)
    else:
        impossible = [number for number in numbers if number not in ON_A_REAL_DEVICE]
        if args.experiments and impossible:
            raise ConfigError(
                f"--experiments: {', '.join(map(_name, impossible))} are told what a step takes, which --device "
                f"{args.device} is not; it takes {', '.join(map(_name, ON_A_REAL_DEVICE))}."
            )
        from aserve.cli.lab.real_bench import RealBench

        on_device = Namespace(**vars(args) | {"set": [*args.set, f"model.device={args.device}"]})
        with RealBench(config_from(on_device, os.environ)) as bench:
            for number in (number for number in numbers if number in ON_A_REAL_DEVICE):
                experiment = EXPERIMENTS[number](replace(lab, bench=bench))
                found.append(experiment)
                _say(experiment, time.perf_counter() - began_s)
            device = bench.device
    write(Path(args.out), found, command=_command(args), device=device)
    sys.stdout.write(f"{Path(args.out) / 'README.md'} has the tables\n")
    return 0


def _number(name: str) -> int:
    if name == SWEEP:
        return 0
    if name.isdecimal() and 1 <= int(name) <= NUM_EXPERIMENTS:
        return int(name)
    raise ConfigError(f"--experiments takes 1 to {NUM_EXPERIMENTS} and {SWEEP}, not {name!r}.")


def _name(number: int) -> str:
    return str(number) if number else SWEEP


def _command(args: Namespace) -> str:
    """What makes the same results again, on any machine: without --out and --jobs; of a path only the name stays."""
    return shlex.join(["python", "-m", "aserve", "bench", "lab", *_words(args)])


def _words(args: Namespace) -> Iterator[str]:
    """MODEL comes before --experiments, which would take it for a number."""
    if args.device != "virtual":
        yield from ("--device", args.device)
    if args.model is not None:
        yield _without_folder(args.model)
    if args.profile:
        yield from ("--profile", args.profile)
    if args.config:
        yield from ("--config", _without_folder(args.config))
    for each in args.assignments:
        if _is_of_the_engine(each.name):
            yield each.origin
            if each.origin not in FLAGS or options()[each.name].kind is not bool:  # a short flag may be a switch
                yield _without_folder(each.text)
    for name, _, text in (entry.partition("=") for entry in args.set):
        if _is_of_the_engine(name):
            yield from ("--set", f"{name}={_without_folder(text)}")
    if args.seeds != NUM_SEEDS:
        yield from ("--seeds", str(args.seeds))
    if args.shape != SHAPES[0] or args.device != "virtual":  # a real device has its model's, which a page should name
        yield from ("--shape", args.shape)
    if args.policies != ALL_POLICIES:
        yield from ("--policies", args.policies)
    if args.experiments:
        yield from ("--experiments", *args.experiments)


def _is_of_the_engine(name: str) -> bool:
    """What the others say changes no result, and may be a key."""
    return name.partition(".")[0] in MODEL_SECTIONS


def _without_folder(text: str) -> str:
    """A path's last part; anything else, such as a model's name on the hub, as it is."""
    path = os.path.expanduser(text)
    return os.path.basename(os.path.abspath(path)) if text and (os.path.isabs(path) or os.path.exists(path)) else text


def _say(experiment: "Experiment", seconds: float) -> None:
    agreeing = sum(claim.agreement == "agrees" for claim in experiment.claims)
    sys.stdout.write(
        f"{_name(experiment.number):>5}  {experiment.title}: {agreeing} of {len(experiment.claims)} expectations met "
        f"({seconds:.0f} s)\n"
    )
    for claim in experiment.claims:
        if claim.agreement == "contradicts":
            sys.stdout.write(f"       not met: {claim.expected}: {claim.found}\n")
    sys.stdout.flush()
