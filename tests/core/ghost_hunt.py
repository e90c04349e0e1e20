"""The ghost hunt: many short requests on a device where every stale or foreign read shows, looking for one wrong token.

    python tests/core/ghost_hunt.py --requests 100000 [--prefill mixed split streams]

Half of the requests share prefixes, a fifth is aborted in whatever phase it is, the pool holds 30 % of what the running
sequences want, and steps execute as late and as far out of order as fences allow.
"""

import argparse
import itertools
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from core_builders import World

from aserve.core.request import FinishReason
from aserve.testing import DeviceBugs

MAX_NUM_SEQS = 16
BLOCK_SIZE = 4
NUM_BLOCKS = 48  # 16 sequences of about 40 tokens want 160 blocks


@dataclass(slots=True)
class Catch:
    """What a hunt brought home. wrong: (request, its output, what it should have been)."""

    num_requests: int = 0
    num_steps: int = 0
    num_tokens: int = 0
    num_aborted: int = 0
    num_failed: int = 0
    num_preemptions: int = 0
    num_prefix_hits: int = 0
    wrong: list[tuple[int, list[int], list[int]]] = field(default_factory=list)


def hunt(
    num_requests: int,
    *,
    seed: int = 0,
    max_inflight: int = 4,
    prefill: str = "mixed",
    bugs: DeviceBugs | None = None,
    fail_steps: float = 0.002,
    stop_at_first: bool = False,
    on_progress: Callable[[Catch], None] = lambda catch: None,
) -> Catch:
    """Serve ``num_requests`` and compare each output with that of the request alone. All checks but that are off."""
    rng = random.Random(seed)
    world = World(
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_model_len=80,
        max_num_seqs=MAX_NUM_SEQS,
        max_inflight=max_inflight,
        prefill=prefill,
        watermark=0.02,
        long_prefill_threshold=24,
        checked=False,
        bugs=bugs,
    )
    documents = [[rng.randrange(32000) for _ in range(40)] for _ in range(8)]
    catch = Catch()
    counters = world.scheduler.counters

    def submit() -> None:
        prompt = [rng.randrange(32000) for _ in range(rng.randint(1, 30))]
        if rng.random() < 0.5:
            prompt = rng.choice(documents)[: rng.randint(8, 40)] + prompt[: rng.randint(0, 8)]
        max_tokens = rng.randint(1, 24)
        more = {"presence_penalty": 1.0} if rng.random() < 0.1 else {}
        stop_at = rng.randrange(max_tokens) if rng.random() < 0.3 else None
        world.submit(prompt, max_tokens, seed=catch.num_requests, stop_at=stop_at, **more)
        catch.num_requests += 1

    def settle() -> None:
        for ident in [ident for ident, told in world.told.items() if told.finish is not None]:
            told = world.told.pop(ident)
            catch.num_tokens += len(told.output)
            catch.num_aborted += told.finish.reason is FinishReason.ABORT
            catch.num_failed += told.finish.reason is FinishReason.ERROR
            if not told.is_right:
                catch.wrong.append((ident, told.output, told.expected))
        world.plans.clear()
        catch.num_steps, catch.num_preemptions = counters.num_steps, counters.num_preemptions
        catch.num_prefix_hits = counters.num_prefix_hits

    while catch.num_requests < num_requests or world.live:
        while catch.num_requests < num_requests and len(world.live) < 2 * MAX_NUM_SEQS:
            submit()
        if world.live and rng.random() < 0.05:
            world.end(rng.choice(world.live))
        if rng.random() < fail_steps:
            world.runner.fail_step(counters.num_steps + 1, MemoryError("planted"))
        # Mostly full, so that finishes, aborts and failures find as many steps in flight as there may be.
        full = world.launch() is None
        if world.num_executable and rng.random() < 0.3:
            world.execute(ahead=rng.random() < 0.7, stream=rng.choice(world.streams_executable))
        if world.num_inflight and (full or rng.random() < 0.2):
            stream = rng.choice(world.streams_inflight)
            if not world.runner.num_executed_on(stream) and world.runner.num_launched_on(stream):
                world.execute(ahead=rng.random() < 0.7, stream=stream)
            world.land(stream=stream)
        settle()
        if catch.wrong and stop_at_first:
            break
        on_progress(catch)
    return catch


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prefill", nargs="+", default=["mixed", "split", "streams"])
    args = parser.parse_args()
    failed = False
    kinds = list(itertools.product(args.prefill, (4, 8)))
    for prefill, max_inflight in kinds:
        start = time.perf_counter()
        catch = hunt(args.requests // len(kinds), seed=args.seed, max_inflight=max_inflight, prefill=prefill)
        seconds = time.perf_counter() - start
        sys.stdout.write(
            f"{prefill}, max_inflight {max_inflight}: {catch.num_requests} requests, {catch.num_steps} steps, "
            f"{catch.num_tokens} tokens, {catch.num_aborted} aborted, {catch.num_failed} failed, "
            f"{catch.num_preemptions} preemptions, {catch.num_prefix_hits} tokens from the cache, "
            f"{len(catch.wrong)} wrong, {seconds:.0f} s\n"
        )
        for ident, output, expected in catch.wrong[:5]:
            sys.stdout.write(f"  request {ident}: {output} instead of {expected}\n")
        failed |= bool(catch.wrong)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
