"""The server under Poisson arrivals at shares of its capacity, under each launch policy in turn.

    python tests/gpu/poisson.py [--shape llama1b] [--shares 0.3 0.6 0.9] [--policies sync overlap late]
    python tests/gpu/poisson.py --device cpu --shape tiny --max-num-seqs 8 --seconds 2 --shares 0.3 0.9

The whole server in this process, driven over SSE by ``loadgen`` in others; one model is loaded once. Capacity is the
requests a second of a closed loop that keeps every slot taken, under ``overlap``; each policy then meets the same
arrivals. Latencies count from the intended time. *Left out* are rows that a step could have had when the device began
it and did not have, *bubble* the share of the time in which the device stood idle beside work, by the host's clock.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import uvloop
from kept_runner import KeptRunner
from loop_health import run_loadgen, scheduler_options, serving
from make_models import SHAPES, write_model

from aserve.core.policy import POLICIES
from aserve.device.threads import prepare_process
from aserve.engine.engine import Engine
from aserve.engine.ports import Runner
from aserve.engine.statistics import EngineStatistics
from aserve.model.options import ModelOptions
from aserve.obs.loop_watch import freeze_heap
from aserve.text.chat_template import ChatTemplate, PromptRenderer
from aserve.text.tokenizer import HFTokenizer

CAPACITY_ROUNDS = 3
"""Requests a slot while capacity is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Of one policy at a share of the capacity."""

    policy: str
    share: float
    requests_per_s: float
    ttft_ms_p50: float
    ttft_ms_p99: float
    itl_ms_p50: float
    itl_ms_p99: float
    tokens_per_s: float
    rows_a_step: float
    left_out: float
    bubble: float
    num_requests: int
    client_bound_by: Sequence[str]


async def capacity(url: str, arguments: argparse.Namespace) -> float:
    """Requests a second of a closed loop, after one that warms up."""
    flags = request_flags(arguments)
    for rounds, seed in ((1, 1), (CAPACITY_ROUNDS, 2)):
        streams = arguments.max_num_seqs
        found = await run_loadgen(
            url, "--concurrency", str(streams), "--num-requests", str(streams * rounds), "--seed", str(seed), *flags
        )
    requests_per_s: float = found["summary"]["throughput"]["requests_per_s"]
    return requests_per_s


def request_flags(arguments: argparse.Namespace) -> list[str]:
    return [
        "--words", str(arguments.words), "--max-tokens", str(arguments.tokens),
        "--processes", str(arguments.processes), "--max-inflight", "4096",
    ]  # fmt: skip


async def measure(
    engine: Engine, url: str, policy: str, share: float, rate: float, arguments: argparse.Namespace
) -> Point:
    before, started_s = engine.statistics(), time.monotonic()
    found = await run_loadgen(
        url, "--rate", f"{rate:.3f}", "--duration", str(arguments.seconds), "--seed", str(round(100 * share)),
        "--warmup", str(arguments.seconds / 6), *request_flags(arguments),
    )  # fmt: skip
    return point_of(policy, share, found["summary"], before, engine.statistics(), time.monotonic() - started_s)


def point_of(
    policy: str,
    share: float,
    summary: dict[str, Any],
    before: EngineStatistics,
    after: EngineStatistics,
    seconds: float,
) -> Point:
    ttft, itl = summary["first_content_ms"]["intended"], summary["inter_token_ms"] or summary["inter_chunk_ms"]
    num_steps = max(1, after.num_steps - before.num_steps)
    num_eligible = max(1, after.num_eligible_rows - before.num_eligible_rows)
    return Point(
        policy=policy,
        share=share,
        requests_per_s=summary["throughput"]["requests_per_s"],
        ttft_ms_p50=ttft["p50"],
        ttft_ms_p99=ttft["p99"],
        itl_ms_p50=itl["p50"],
        itl_ms_p99=itl["p99"],
        tokens_per_s=summary["throughput"]["output_tokens_per_s"],
        rows_a_step=(after.num_rows - before.num_rows) / num_steps,
        left_out=(after.num_left_out_rows - before.num_left_out_rows) / num_eligible,
        bubble=(after.bubble_s - before.bubble_s) / seconds,
        num_requests=summary["num_measured"],
        client_bound_by=summary["client"]["bound_by"],
    )


def table(points: Sequence[Point]) -> str:
    lines = [
        "| policy | load | requests/s | TTFT ms p50 | p99 | ITL ms p50 | p99 | tokens/s "
        "| rows a step | left out | bubble |",
        "|---" * 11 + "|",
    ]
    lines += [
        f"| {point.policy} | {point.share:.0%} | {point.requests_per_s:.1f} | {point.ttft_ms_p50:.1f} "
        f"| {point.ttft_ms_p99:.1f} | {point.itl_ms_p50:.2f} | {point.itl_ms_p99:.2f} | {point.tokens_per_s:.0f} "
        f"| {point.rows_a_step:.1f} | {point.left_out:.1%} | {point.bubble:.1%} |"
        + (f" client-bound: {' and '.join(point.client_bound_by)}" if point.client_bound_by else "")
        for point in points
    ]
    return "\n".join(lines)


async def run(arguments: argparse.Namespace, runner: Runner, model: Path) -> tuple[float, list[Point]]:
    tokenizer = HFTokenizer.from_folder(model)
    renderer = PromptRenderer(tokenizer, ChatTemplate.from_folder(model))
    renderer.encode_chat([{"role": "user", "content": "warm up"}])
    kept = KeptRunner(runner)
    freeze_heap()
    points = []
    try:
        async with serving(kept, scheduler_options(arguments, "overlap"), renderer, tokenizer) as (_, url, *_):
            most = arguments.capacity or await capacity(url, arguments)
        print(f"capacity {most:.1f} requests/s", file=sys.stderr, flush=True)  # noqa: T201
        for policy in arguments.policies:
            async with serving(kept, scheduler_options(arguments, policy), renderer, tokenizer) as (engine, url, *_):
                for share in arguments.shares:
                    point = await measure(engine, url, policy, share, share * most, arguments)
                    points.append(point)
                    print(json.dumps(asdict(point)), file=sys.stderr, flush=True)  # noqa: T201  # if it is cut short
    finally:
        await runner.aclose()
    return most, points


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", choices=list(SHAPES), default="llama1b")
    parser.add_argument("--policies", nargs="+", choices=list(POLICIES), default=("sync", "overlap", "late"))
    parser.add_argument("--shares", type=float, nargs="+", default=(0.3, 0.6, 0.9))
    parser.add_argument("--seconds", type=float, default=12.0, help="of arrivals at each point")
    parser.add_argument("--words", type=int, default=64, help="in a prompt, some four tokens each")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--capacity", type=float, default=0.0, help="requests a second; 0 measures it")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, nargs=1, default=(0,), help="0 is the server's own")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    prepare_process()
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder), arguments.shape)
        from aserve.model.runner import load_runner

        options = ModelOptions(load_format="dummy", device=arguments.device)
        runner = load_runner(options, scheduler_options(arguments, "overlap"), model)
        most, points = uvloop.run(run(arguments, runner, model))
    if arguments.json is not None:
        found = {"capacity": most, "points": [asdict(point) for point in points]}
        arguments.json.write_text(json.dumps(found, indent=1))
    print(f"{arguments.shape}, capacity {most:.1f} requests/s\n\n{table(points)}")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
