"""``python -m aserve bench lab``: ten experiments about when to launch, or a plan for a rate of requests."""

import os
import sys
import time
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from aserve.cli.arguments import MODEL_SECTIONS, add_options, config_from
from aserve.errors import ConfigError

if TYPE_CHECKING:
    from aserve.cli.lab.findings import Experiment

SHAPES: Final = ("8b", "1b")
NUM_EXPERIMENTS: Final = 10
SWEEP: Final = "sweep"
OUT: Final = "lab-results"
NUM_SEEDS: Final = 16


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
        default="plain,overlap,eager,late",
        help="which policies, with commas (default all: plain,overlap,eager,late)",
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
    if min(args.plan, args.prompt_tokens, args.output_tokens, args.requests) <= 0:
        raise ConfigError("--plan, --prompt-tokens, --output-tokens and --requests are more than 0.")
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

        args.set.append(f"model.device={args.device}")
        with RealBench(config_from(args, os.environ)) as bench:
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
    """What makes the same results again."""
    words = ["python -m aserve bench lab"]
    if args.device != "virtual":
        words.append(f"--device {args.device}")
    if args.experiments:
        words.append(f"--experiments {' '.join(args.experiments)}")
    if args.shape != SHAPES[0]:
        words.append(f"--shape {args.shape}")
    if args.seeds != NUM_SEEDS:
        words.append(f"--seeds {args.seeds}")
    return " ".join(words)


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
