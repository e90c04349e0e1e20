"""Requests of all kinds through the real engine, and a count afterwards: every block, slot and byte is where it was.

    python tests/gpu/churn.py                         10,000 requests, a Llama of 1B with random weights on the GPU
    python tests/gpu/churn.py --reference             1,000 in reference mode, each compared with a run of it alone
    python tests/gpu/churn.py --device cpu --shape tiny --requests 300 --at-once 40 --max-num-seqs 16

Random lengths, common prefixes, every sampling parameter, groups, and clients that leave at any moment; more at once
than there are slots, in a pool too small for them, so that blocks are evicted and sequences preempted. Exits with 1 if
anything is missing, left over or different.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
import uvloop
from make_models import SHAPES, VOCAB_SIZE, write_model

from aserve.core.invariants import check
from aserve.core.options import SchedulerOptions
from aserve.core.policy import POLICIES
from aserve.core.request import FinishReason, SamplingParams
from aserve.device.memory import resident_bytes
from aserve.device.threads import prepare_process
from aserve.engine.engine import Engine
from aserve.engine.generation import GenerationRequest
from aserve.engine.options import EngineOptions
from aserve.engine.ports import Runner
from aserve.model.options import ModelOptions
from aserve.text.tokenizer import HFTokenizer

NUM_PREFIXES = 16
SHARE_WITH_PREFIX = 0.4
SHARE_LEAVING = 0.1
GROWN_BYTES_MAX = 4096
ENOUGH_REQUESTS = 2500
"""Memory of the process that a request of the second half may leave behind, of so many: allocators are full by then."""

Tokens = dict[int, list[int]]
"""Output tokens of each choice."""


@dataclass(frozen=True, slots=True)
class Order:
    """A request and how many of its tokens its client waits for; None is all."""

    request: GenerationRequest
    leaves_after: int | None


def orders(count: int, *, prompt_max: int, output_max: int, seed: int) -> Iterator[Order]:
    """The same ones for the same seed."""
    dice = random.Random(seed)
    numbers = np.random.default_rng(seed)

    def prompt(length: int) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
        return numbers.integers(3, VOCAB_SIZE, length, dtype=np.int32)

    prefixes = [prompt(dice.randint(prompt_max // 16, prompt_max // 2)) for _ in range(NUM_PREFIXES)]
    for number in range(count):
        length = int(prompt_max ** dice.random())
        parts = [prompt(max(1, length // 2))]
        if dice.random() < SHARE_WITH_PREFIX:
            parts.insert(0, dice.choice(prefixes))
        max_tokens = dice.randint(1, output_max)
        yield Order(
            GenerationRequest(
                request_id=f"churn-{number}",
                prompts=(np.concatenate(parts)[: prompt_max - 1],),
                params=sampling(dice, max_tokens),
                n=2 if dice.random() < 0.05 else 1,
                seed=number,
                ignore_eos=dice.random() < 0.5,
            ),
            dice.randint(0, max_tokens) if dice.random() < SHARE_LEAVING else None,
        )


def sampling(dice: random.Random, max_tokens: int) -> SamplingParams:
    """Greedy in half of the cases, else some of what the sampler can do."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    if dice.random() < 0.5:
        params = replace(params, temperature=dice.uniform(0.2, 1.5))
        params = replace(params, top_k=dice.choice((0, 1, 20, 500)), top_p=dice.choice((1.0, 0.9, 0.3)))
    if dice.random() < 0.2:
        params = replace(params, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3)
    if dice.random() < 0.2:
        params = replace(params, stop_token_ids=tuple(dice.randrange(VOCAB_SIZE) for _ in range(8)))
    return params


async def carry_out(engine: Engine, order: Order) -> tuple[Tokens, str]:
    """The tokens that came, and how it ended: a finish reason, or "left"."""
    tokens: Tokens = defaultdict(list)
    reasons: set[str] = set()
    async with engine.submit_nowait(order.request) as stream:
        while order.leaves_after is None or sum(map(len, tokens.values())) < order.leaves_after:
            deltas = await stream.next()
            if not deltas:
                return tokens, "/".join(sorted(reasons))
            for delta in deltas:
                tokens[delta.index] += delta.tokens
                if delta.finish is not None:
                    reasons.add(delta.finish.value)
    return tokens, "left"


class Churn:
    """So many orders at once until there are none; ``outputs`` by request, in case they are wanted."""

    def __init__(self, engine: Engine, *, keeps: bool) -> None:
        self.endings: Counter[str] = Counter()
        self.num_tokens = 0
        self.outputs: dict[str, Tokens] = {}
        self._engine = engine
        self._keeps = keeps

    async def run(self, source: Iterator[Order], at_once: int) -> None:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(at_once):
                tasks.create_task(self._client(source))

    async def _client(self, source: Iterator[Order]) -> None:
        for order in source:
            tokens, ending = await carry_out(self._engine, order)
            self.endings[ending] += 1
            self.num_tokens += sum(map(len, tokens.values()))
            if self._keeps:
                self.outputs[order.request.request_id] = tokens


async def idle(engine: Engine) -> None:
    """Until the last step of whoever left has landed."""
    while not engine.scheduler.is_idle or engine.statistics().num_streams:  # noqa: ASYNC110  # nobody announces it
        await asyncio.sleep(0.01)


def left_over(engine: Engine) -> list[str]:
    """What an idle engine holds and should not, the prefix cache flushed."""
    engine.flush_prefix_cache()
    check(engine.scheduler)
    scheduler = engine.scheduler
    ledger, slots = scheduler.ledger, scheduler.slots
    faults = []
    if ledger.num_free != ledger.num_blocks:
        faults.append(f"{ledger.num_blocks - ledger.num_free} of {ledger.num_blocks} blocks are not free")
    if slots.num_free != slots.max_num_seqs:
        faults.append(f"{slots.max_num_seqs - slots.num_free} of {slots.max_num_seqs} slots are not free")
    for what, number in (("sequences", len(scheduler.sequences)), ("steps in flight", len(scheduler.inflight))):
        if number:
            faults.append(f"{number} {what} are left")
    return faults


def device_bytes(device: str) -> int:
    """What tensors hold on the GPU; 0 elsewhere."""
    if device != "cuda":
        return 0
    import torch

    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


async def differences(engine: Engine, churn: Churn, source: Iterator[Order]) -> list[str]:
    """Each order once more, alone and with an empty cache: the tokens that came before must be the first of its own."""
    found = []
    for order in source:
        engine.flush_prefix_cache()
        alone, _ = await carry_out(engine, replace(order, leaves_after=None))
        before = churn.outputs[order.request.request_id]
        whole = order.leaves_after is None
        for index, tokens in before.items():
            expected = alone[index] if whole else alone[index][: len(tokens)]
            if tokens != expected:
                place = next(
                    (i for i, pair in enumerate(zip(tokens, expected, strict=False)) if pair[0] != pair[1]), -1
                )
                found.append(f"{order.request.request_id}, choice {index}: token {place} of {len(expected)} differs")
    return found


async def run(
    arguments: argparse.Namespace, runner: Runner, tokenizer: HFTokenizer, scheduler: SchedulerOptions
) -> int:
    engine = Engine(runner, tokenizer, scheduler, EngineOptions(max_queue_requests=1 << 16))
    await engine.start()
    faults: list[str] = []
    try:

        def source(count: int, seed: int) -> Iterator[Order]:
            return orders(count, prompt_max=arguments.prompt_max, output_max=arguments.output_max, seed=seed)

        churn = Churn(engine, keeps=arguments.reference)
        everything, half = source(arguments.requests, 1), arguments.requests // 2
        bytes_at_start = device_bytes(arguments.device)
        started_s = time.perf_counter()
        await churn.run(islice(everything, half), arguments.at_once)
        await idle(engine)
        faults += left_over(engine)
        resident_before = resident_bytes()
        await churn.run(everything, arguments.at_once)
        await idle(engine)
        seconds = time.perf_counter() - started_s
        faults += left_over(engine)

        grown = device_bytes(arguments.device) - bytes_at_start
        resident = (resident_bytes() - resident_before) / half
        statistics = engine.statistics()
        print(f"{dict(churn.endings)}, {churn.num_tokens} tokens in {seconds:.1f} s")  # noqa: T201
        print(  # noqa: T201
            f"{statistics.num_steps} steps, {statistics.num_preemptions} preemptions, "
            f"{statistics.num_wasted_rows} rows wasted, "
            f"{statistics.prefix_cache_hits} of {statistics.prefix_cache_queries} prompt tokens cached"
        )
        print(f"grown: {grown} bytes on the GPU, {resident:.0f} bytes a request of the second half")  # noqa: T201
        if grown:
            faults.append(f"{grown} bytes more are allocated on the GPU")
        if half >= ENOUGH_REQUESTS and resident > GROWN_BYTES_MAX:
            faults.append(f"the process has grown by {resident:.0f} bytes a request")
        if churn.endings[FinishReason.ERROR.value] or statistics.num_failed_steps:
            faults.append(f"{statistics.num_failed_steps} steps failed")
        if arguments.reference:
            different = await differences(engine, churn, source(arguments.requests, 1))
            print(f"{len(different)} of {arguments.requests} differ from a run alone")  # noqa: T201
            faults += different[:20]
    finally:
        await engine.aclose()
    for fault in faults:
        print("FAULT:", fault)  # noqa: T201
    return 1 if faults else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", choices=list(SHAPES), default="llama1b")
    parser.add_argument("--reference", action="store_true")
    parser.add_argument("--requests", type=int, help="10,000, in reference mode 1,000")
    parser.add_argument("--at-once", type=int, default=320)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--num-blocks", type=int, default=1024, help="few: evicts blocks, preempts sequences")
    parser.add_argument("--prompt-max", type=int, default=1500)
    parser.add_argument("--output-max", type=int, default=64)
    parser.add_argument("--policy", choices=list(POLICIES), default="overlap")
    parser.add_argument("--check-every", type=int, default=100, help="landings between two recounts of all state")
    arguments = parser.parse_args()
    arguments.requests = arguments.requests or (1_000 if arguments.reference else 10_000)
    prepare_process()
    scheduler = SchedulerOptions(
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        num_blocks=arguments.num_blocks,
        max_model_len=arguments.prompt_max + arguments.output_max,
        policy=arguments.policy,
        check_invariants_every=arguments.check_every,
    )
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder), arguments.shape)
        from aserve.model.runner import load_runner

        started_s = time.perf_counter()
        options = ModelOptions(load_format="dummy", device=arguments.device, reference=arguments.reference)
        runner = load_runner(options, scheduler, model)
        print(f"{runner.info.device}, loaded in {time.perf_counter() - started_s:.1f} s")  # noqa: T201
        return uvloop.run(run(arguments, runner, HFTokenizer.from_folder(model), scheduler))


if __name__ == "__main__":
    sys.exit(main())
