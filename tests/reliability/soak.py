"""The long versions of the reliability tests, for nights and releases:

    python tests/reliability/soak.py                       everything, about an hour
    python tests/reliability/soak.py memory --requests 100000
    python tests/reliability/soak.py mixed crowd overload signals idle

memory: RssAnon grows by at most 1 KB a request over 100,000 requests, a fifth of which leave.
mixed: as many requests through HTTP, whole answers right to the last letter, with the recount at every 50th landing.
crowd: 256 good streams beside a hundred clients of each hostile kind; inter-token p99 at most 1.5 times that of alone.
overload: ten times too much for a minute; refusals within 50 ms, goodput at least nine tenths of the peak.
signals: 200 times SIGTERM at a random moment under load; each exit is clean, in time, and no answer is cut silently.
idle: a minute without requests takes less than a hundredth of a core.

Exits with 1 if anything failed.
"""

import argparse
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import uvloop

sys.path.insert(0, str(Path(__file__).parents[1]))

import process_builders
from load import (
    anonymous_bytes,
    bytes_a_request,
    closed_loop,
    first_letter,
    hostile_crowd,
    inter_token_s,
    mixed,
    open_loop,
)
from whole_builders import ScriptedRunner, percentile, says, whole


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


async def memory(num_requests: int) -> bool:
    runner = ScriptedRunner(first_letter, max_num_seqs=32, num_blocks=256, max_model_len=128, log_steps=16)
    async with whole(runner, check_invariants_every=0) as stack:
        grown = await bytes_a_request(
            stack,
            anonymous_bytes,
            warm_up=min(10_000, num_requests),
            count=num_requests,
            report=lambda number, size: say(f"  {number} requests: {size / 2**20:.1f} MiB"),
        )
    say(f"memory: {grown:.0f} bytes a request over {num_requests}")
    return grown <= 1024


async def mixed_load(num_requests: int) -> bool:
    runner = ScriptedRunner(first_letter, max_num_seqs=32, num_blocks=48, max_model_len=256, log_steps=16)
    async with whole(runner, policy="eager", max_num_batched_tokens=96, check_invariants_every=50) as stack:
        outcomes = await mixed(stack, num_requests)
        num_preemptions = stack.figures.num_preemptions
    say(f"mixed: {dict(outcomes)}, {num_preemptions} preemptions")
    return outcomes["whole"] > num_requests / 2 and not outcomes["wrong"]


async def crowd(num_requests: int) -> bool:
    runner = ScriptedRunner(
        says("x", then=ord("x")), max_num_seqs=1024, num_blocks=16_384, max_model_len=4096, step_time_s=0.02
    )
    limits = {"send_buffer": 4096, "write_buffer_bytes": 4096}
    async with whole(runner, max_num_batched_tokens=2048, check_invariants_every=0, **limits) as stack:
        alone = percentile(await inter_token_s(stack, 256, 500), 0.99)
        async with hostile_crowd(stack, 100):
            beside = percentile(await inter_token_s(stack, 256, 500), 0.99)
    say(f"crowd: inter-token p99 {alone * 1000:.1f} ms alone, {beside * 1000:.1f} ms in the crowd")
    return beside <= 1.5 * alone


async def overload(num_requests: int) -> bool:
    runner = ScriptedRunner(
        says("x", then=ord("x")), max_num_seqs=4, num_blocks=64, max_model_len=64, step_time_s=0.02, log_steps=16
    )
    async with whole(runner, max_queue_requests=8, max_num_batched_tokens=64, check_invariants_every=0) as stack:
        peak = (await closed_loop(stack, 8, 20.0, max_tokens=4)).goodput
        offered = await open_loop(stack, 10 * peak, 60.0, max_tokens=4)
    refused_s = percentile(offered.refusals_s, 0.99)
    say(f"overload: {offered.goodput:.1f} of {peak:.1f} answers a second, refusals p99 {refused_s * 1000:.1f} ms")
    return refused_s <= 0.05 and offered.goodput >= 0.9 * peak and not offered.without_retry_after


def signals(num_requests: int) -> bool:
    choose, failures = random.Random(1), 0
    for cycle in range(200):
        with process_builders.serving("--server.drain_timeout_s", "1", runner={"step_time_s": 0.005}) as process:
            lengths = [choose.randint(1, 400) for _ in range(8)]
            calls = [
                process_builders.Background(lambda length=length: process.complete(stream=True, max_tokens=length))
                for length in lengths
            ]
            time.sleep(choose.random())
            process.signal(signal.SIGTERM)
            status = process.exit_status(1 + 4)
            for call in calls:
                try:
                    code, _, body = call.result()
                except OSError:
                    continue  # came too late to be taken
                failures += code == 200 and not (body.endswith(b"data: [DONE]\n\n") or b'"error"' in body)
            failures += status != 0
        if cycle % 20 == 19:
            say(f"  {cycle + 1} cycles, {failures} failures")
    say(f"signals: {failures} failures in 200 cycles")
    return not failures


def idle(num_requests: int) -> bool:
    with process_builders.serving() as process:
        process.complete()
        time.sleep(1.0)
        before_s = process.cpu_s()
        time.sleep(60.0)
        share = (process.cpu_s() - before_s) / 60.0
    say(f"idle: {share:.2%} of a core")
    return share < 0.01


ASYNC = {"memory": memory, "mixed": mixed_load, "crowd": crowd, "overload": overload}
BLOCKING: dict[str, Callable[[int], bool]] = {"signals": signals, "idle": idle}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", metavar="WHAT")
    parser.add_argument("--requests", type=int, default=100_000)
    args = parser.parse_args()
    if unknown := {*args.what} - {*ASYNC, *BLOCKING}:
        parser.error(f"there is no {min(unknown)!r}")
    failed = []
    for name in args.what or [*ASYNC, *BLOCKING]:
        if name in ASYNC:
            passed = uvloop.run(ASYNC[name](args.requests))
        else:
            passed = BLOCKING[name](args.requests)
        if not passed:
            failed.append(name)
    say("failed: " + ", ".join(failed) if failed else "everything held")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
