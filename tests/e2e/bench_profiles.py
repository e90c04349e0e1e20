"""What each profile buys: its own scenario, under the defaults and under the profile, each in a process of its own.

    python tests/e2e/bench_profiles.py [PROFILE ...] [--repeats N] [--json]

Run it on a quiet machine; the whole takes about ten minutes on two cores. Prompts are random ids, so nothing is shared
that a scenario does not share on purpose.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from aserve import Engine
from aserve.device.memory import resident_bytes

Figures = dict[str, float]
random = np.random.default_rng(0)


@dataclass(slots=True)
class Timeline:
    """When the tokens of one answer came, in seconds since the call."""

    began_s: float = field(default_factory=time.monotonic)
    times_s: list[float] = field(default_factory=list)

    @property
    def first_s(self) -> float:
        return self.times_s[0]

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.times_s, self.times_s[1:], strict=False)]


def ids(count: int) -> list[int]:
    return random.integers(1000, 40000, count).tolist()


async def answer(engine: Engine, prompt: Sequence[int], num_tokens: int) -> tuple[Timeline, list[int]]:
    """Exactly ``num_tokens`` greedy tokens, and when they came."""
    line, tokens = Timeline(), []
    async for delta in engine.generate(prompt, max_tokens=num_tokens, temperature=0, ignore_eos=True):
        line.times_s += [time.monotonic() - line.began_s] * len(delta.tokens)
        tokens += delta.tokens
    return line, tokens


def percentile(values: Sequence[float], q: float) -> float:
    return float(np.percentile(values, q))


async def throughput(engine: Engine) -> Figures:
    """192 requests at once, 64 tokens in and 48 out each."""
    began_s = time.monotonic()
    await asyncio.gather(*(answer(engine, ids(64), 48) for _ in range(192)))
    seconds = time.monotonic() - began_s
    return {"output tokens/s": 192 * 48 / seconds, "prompt and output tokens/s": 192 * 112 / seconds}


async def latency(engine: Engine) -> Figures:
    """Four answers are being written; then two long prompts come, and a short question every half second."""
    writers = [asyncio.create_task(answer(engine, ids(48), 200)) for _ in range(4)]
    await asyncio.sleep(1.0)
    longs = [asyncio.create_task(answer(engine, ids(1500), 8)) for _ in range(2)]
    questions = []
    for _ in range(12):
        await asyncio.sleep(0.5)
        questions.append(asyncio.create_task(answer(engine, ids(40), 8)))
    asked = [line for line, _ in await asyncio.gather(*questions)]
    written = [line for line, _ in await asyncio.gather(*writers)]
    await asyncio.gather(*longs)
    gaps = [1000 * gap for line in written for gap in line.gaps_s]
    return {
        "first token of a question, median ms": 1000 * statistics.median(line.first_s for line in asked),
        "... p90 ms": 1000 * percentile([line.first_s for line in asked], 90),
        "gap between tokens, p99 ms": percentile(gaps, 99),
        "... median ms": statistics.median(gaps),
    }


async def agent(engine: Engine) -> Figures:
    """32 agents with 500 tokens of instructions in common and 1,900 of their own take turns: each adds 100 tokens."""
    common = ids(500)
    contexts = [common + ids(1900) for _ in range(32)]
    turns: list[list[float]] = []
    for _ in range(3):
        outcomes = await asyncio.gather(*(answer(engine, context, 16) for context in contexts))
        turns.append([line.first_s for line, _ in outcomes])
        contexts = [context + tokens + ids(84) for context, (_, tokens) in zip(contexts, outcomes, strict=True)]
    found = engine.statistics()
    return {
        "first turn, mean s to first token": statistics.mean(turns[0]),
        "later turns, mean s to first token": statistics.mean(turns[1] + turns[2]),
        "prompt tokens from the cache, %": 100 * found.prefix_cache_hits / found.prompt_tokens,
    }


async def edge(engine: Engine) -> Figures:
    """One conversation, then 24 of 1,000 tokens, four at a time, whose prefixes stay in the cache."""
    began_s = time.monotonic()
    await answer(engine, ids(48), 64)
    seconds = time.monotonic() - began_s
    idle = resident_bytes()
    for _ in range(6):
        await asyncio.gather(*(answer(engine, ids(1000), 8) for _ in range(4)))
    return {
        "output tokens/s of one conversation": 64 / seconds,
        "memory when ready, MiB": idle / 2**20,
        "memory after the others, MiB": resident_bytes() / 2**20,
    }


SCENARIOS: dict[str, Callable[[Engine], Awaitable[Figures]]] = {
    "throughput": throughput,
    "latency": latency,
    "agent": agent,
    "edge": edge,
}


async def measure(scenario: str, profile: str, model: str) -> Figures:
    began_s = time.monotonic()
    async with Engine.from_pretrained(model, profile=profile) as engine:
        start_s = time.monotonic() - began_s
        for size in (300, 64):  # the first steps of a process are slow
            await answer(engine, ids(size), 8)
        return {"start, s": start_s, **await SCENARIOS[scenario](engine)}


def run(scenario: str, profile: str, model: str) -> Figures:
    """One measurement in a fresh process, so that neither memory nor caches of another one have a part in it."""
    command = [sys.executable, __file__, "--one", scenario, "--under", profile, "--model", model]
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.PIPE, text=True, check=True)
    figures: Figures = json.loads(done.stdout)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profiles", nargs="*", metavar="PROFILE", help=f"of {', '.join(SCENARIOS)}; default: all")
    parser.add_argument("--repeats", type=int, default=1, help="medians of so many alternating runs")
    parser.add_argument("--model", default="", help="as for aserve; default: the default model")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--under", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        sys.stdout.write(json.dumps(asyncio.run(measure(args.one, args.under, args.model))))
        return
    report = {}
    for profile in args.profiles or SCENARIOS:
        runs: dict[str, list[Figures]] = {"": [], profile: []}
        for _ in range(args.repeats):
            for under, figures in runs.items():
                figures.append(run(profile, under, args.model))
        report[profile] = {
            name: {
                under or "default": statistics.median(figures[name] for figures in taken)
                for under, taken in runs.items()
            }
            for name in runs[""][0]
        }
        if not args.json:
            print_rows(profile, report[profile])
    if args.json:
        sys.stdout.write(json.dumps(report, indent=2) + "\n")


def print_rows(profile: str, rows: dict[str, Figures]) -> None:
    sys.stdout.write(f"\n{SCENARIOS[profile].__doc__}\n{'':38} {'default':>10} {profile:>12}\n")
    for name, values in rows.items():
        sys.stdout.write(f"{name:<38} {values['default']:>10.1f} {values[profile]:>12.1f}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
