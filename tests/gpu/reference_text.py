"""Greedy text of the real model on a GPU: the same in every way of running it, and how far bfloat16 is from it.

    python tests/gpu/reference_text.py [--model FILE.gguf]
    python tests/gpu/reference_text.py --device cpu --prompts 2 --rows 3 --tokens 8

In reference mode each answer has to be that of transformers' ``generate`` in float32, or to differ first where the two
best logits nearly tie: alone, many at once, in small chunks, from cached prefixes, preempted, at each depth of the
pipeline. One model is loaded for all of these. Then once more in bfloat16: how often its token is the likeliest in
float32, and how far its distribution is from that, for ours and for transformers' own. Exits with 1 if an answer is
wrong.
"""

import argparse
import asyncio
import gc
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from kept_runner import KeptRunner
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1] / "e2e"))

from e2e_builders import chat_prompts, questions
from reference_grid import Combination, Outcome, Reference, compare

from aserve.core.invariants import check
from aserve.core.options import SchedulerOptions
from aserve.core.policy import POLICIES
from aserve.core.request import SamplingParams
from aserve.engine.engine import Engine
from aserve.engine.generation import GenerationRequest
from aserve.engine.ports import Runner
from aserve.model.hub import resolve_model
from aserve.model.options import ModelOptions
from aserve.model.runner import load_runner
from aserve.text.tokenizer import HFTokenizer

BLOCK_SIZE: Final = 16
CHUNK: Final = 512
MAX_INFLIGHT: Final = 8
NUM_ALTERNATIVES: Final = 20
"""Of which log-probabilities are compared; the rest of the vocabulary counts as one token."""


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


# --- ways of running


def ways(rows: int, blocks_a_sequence: int) -> dict[str, Combination]:
    """rows: at most so many at once. The small pool holds two in five of them."""
    small_pool = max(8, blocks_a_sequence, rows * blocks_a_sequence * 2 // 5)
    found = {
        "alone": Combination(1, CHUNK, False, "overlap"),
        f"{rows} at once": Combination(rows, CHUNK, False, "overlap"),
        "chunks of 16": Combination(rows, 16, False, "overlap"),
        "cached": Combination(rows, CHUNK, True, "overlap", rounds=2),
        "preempted": Combination(rows, CHUNK, True, "overlap", num_blocks=small_pool),
    }
    found |= {
        f"depth {depth}": Combination(rows, 64, False, "eager", max_inflight=depth)
        for depth in range(1, MAX_INFLIGHT + 1)
    }
    policies: tuple[Any, ...] = tuple(name for name in ("sync", "late") if name in POLICIES)
    return found | {policy: Combination(rows, 64, False, policy) for policy in policies}


@asynccontextmanager
async def engine_of(runner: Runner, tokenizer: HFTokenizer, combination: Combination) -> AsyncIterator[Engine]:
    """An engine over a runner that stays, checked and closed afterwards."""
    changes = {"num_blocks": combination.num_blocks} if combination.num_blocks else {}
    options = SchedulerOptions(
        max_num_seqs=combination.at_once,
        max_num_batched_tokens=combination.at_once + combination.chunk,
        block_size=BLOCK_SIZE,
        enable_prefix_caching=combination.prefix_cache,
        policy=combination.policy,
        max_inflight=combination.max_inflight,
        check_invariants_every=64,
    )
    engine = Engine(KeptRunner(runner, **changes), tokenizer, options)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.aclose()
    check(engine.scheduler)


def load(folder: Path, device: Any, rows: int, length: int, *, reference: bool) -> Runner:
    """A runner for ``rows`` sequences of up to ``length`` tokens, as deep as it gets, which leaves memory to others."""
    scheduler = SchedulerOptions(
        max_num_seqs=rows,
        max_num_batched_tokens=rows + CHUNK,
        max_model_len=length,
        block_size=BLOCK_SIZE,
        num_blocks=(rows + 1) * -(-length // BLOCK_SIZE) * 2,
        max_inflight=MAX_INFLIGHT,
    )
    options = ModelOptions(device=device, reference=reference, dtype="auto" if reference else "bfloat16")
    started_s = time.perf_counter()
    runner = load_runner(options, scheduler, folder)
    say(f"{runner.info.device}: loaded in {time.perf_counter() - started_s:.1f} s")
    return runner


async def run_ways(
    runner: Runner, tokenizer: HFTokenizer, reference: Reference, chosen: dict[str, Combination], num_tokens: int
) -> dict[str, Outcome]:
    found = {}
    for name, combination in chosen.items():
        async with engine_of(runner, tokenizer, combination) as engine:
            found[name] = await compare(engine, reference, combination, num_tokens)
        say(f"{name}: {found[name]}")
    await runner.aclose()
    return found


# --- bfloat16


@dataclass(frozen=True, slots=True)
class Distance:
    """From float32, over all tokens of the answers: share of likeliest tokens that are the same; KL(float32 || it)."""

    num_positions: int
    agreement: float
    kl_mean: float
    kl_max: float


async def answers_in_bfloat16(
    runner: Runner, tokenizer: HFTokenizer, prompts: list[np.ndarray], num_tokens: int
) -> list[tuple[list[int], Tensor, Tensor]]:
    """All prompts at once, greedily: tokens [n], the likeliest ids [n, 20] and their log-probabilities."""
    combination = Combination(len(prompts), CHUNK, False, "overlap")
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, logprobs=NUM_ALTERNATIVES)

    async with engine_of(runner, tokenizer, combination) as engine:

        async def answer(index: int) -> tuple[list[int], Tensor, Tensor]:
            request = GenerationRequest(
                request_id=f"prompt-{index}", prompts=(prompts[index],), params=params, ignore_eos=True
            )
            deltas = [delta async for delta in engine.submit_nowait(request)]
            logprobs = [logprob for delta in deltas for logprob in delta.logprobs or ()]
            top = torch.tensor([logprob.top for logprob in logprobs], dtype=torch.float64)
            return [logprob.token for logprob in logprobs], top[..., 0].long(), top[..., 1]

        answers = await asyncio.gather(*(answer(index) for index in range(len(prompts))))
    await runner.aclose()
    return list(answers)


def log_of_rest(logprobs_NK: Tensor) -> Tensor:
    """log of what the alternatives leave."""
    return (1 - logprobs_NK.exp().sum(-1, keepdim=True)).clamp_min(1e-12).log()


def distance_of(parts: list[tuple[Tensor, Tensor, Tensor]]) -> Distance:
    """parts: float32 logits [n, V], and of the other model the likeliest ids [n, K] and their log-probabilities."""
    agreements, kls = [], []
    for logits_NV, ids_NK, others_NK in parts:
        agreements.append(logits_NV.argmax(-1).cpu() == ids_NK[:, 0])
        ours_NK = logits_NV.double().log_softmax(-1).cpu().gather(1, ids_NK)
        p, q = (torch.cat((x, log_of_rest(x)), -1) for x in (ours_NK, others_NK))
        kls.append((p.exp() * (p - q)).sum(-1))
    agreement, kl = torch.cat(agreements), torch.cat(kls)
    return Distance(len(kl), float(agreement.double().mean()), float(kl.mean()), float(kl.max()))


def distances(
    reference: Reference, answers: list[tuple[list[int], Tensor, Tensor]], folder: Path, device: str
) -> tuple[Distance, Distance]:
    """Ours and transformers' own bfloat16, over our answers."""
    from transformers import AutoModelForCausalLM

    theirs_in_bfloat16 = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device)
    ours, theirs = [], []
    for prompt, (tokens, ids_NK, logprobs_NK) in zip(reference.prompts, answers, strict=True):
        text = np.concatenate((prompt, np.array(tokens, np.int32)))
        places = slice(len(prompt) - 1, len(text) - 1)
        logits_NV = reference.logits(text)[places]
        with torch.inference_mode():
            ids = torch.tensor(text[None], dtype=torch.long, device=device)
            other_NV = theirs_in_bfloat16(ids).logits[0, places].double().log_softmax(-1)
        top = other_NV.topk(ids_NK.shape[1])
        ours.append((logits_NV, ids_NK, logprobs_NK))
        theirs.append((logits_NV, top.indices.cpu(), top.values.cpu()))
    return distance_of(ours), distance_of(theirs)


# --- the tables


def table_of_distances(ours: Distance, theirs: Distance) -> str:
    lines = ["| bfloat16 | tokens | likeliest in float32 | KL mean, nats | KL max |", "|---" * 5 + "|"]
    lines += [
        f"| {name} | {found.num_positions} | {found.agreement:.2%} | {found.kl_mean:.2e} | {found.kl_max:.2e} |"
        for name, found in (("aserve", ours), ("transformers", theirs))
    ]
    return "\n".join(lines)


def table_of_ways(outcomes: dict[str, Outcome]) -> str:
    lines = ["| way | equal | near ties | wrong | preemptions | cached tokens | s |", "|---" * 7 + "|"]
    lines += [
        f"| {name} | {found.num_equal} | {len(found.near_ties)} | {len(found.wrong)} | {found.num_preemptions} "
        f"| {found.num_cached_tokens} | {found.seconds:.1f} |"
        for name, found in outcomes.items()
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", default="", help="a GGUF file or a folder; empty is the default model")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--rows", type=int, default=64, help="requests at once; prompts repeat to fill them")
    parser.add_argument("--tokens", type=int, default=64)
    arguments = parser.parse_args()
    folder = resolve_model(arguments.model, cache_dir=os.environ.get("ASERVE_TEST_CACHE", "")).folder
    tokenizer = HFTokenizer.from_folder(folder)
    prompts = chat_prompts(folder, questions(arguments.prompts))
    length = max(map(len, prompts)) + arguments.tokens + 1
    started_s = time.perf_counter()
    reference = Reference(folder, prompts, arguments.tokens, arguments.device)
    say(f"transformers generated {len(prompts)} answers in {time.perf_counter() - started_s:.1f} s")

    chosen = ways(arguments.rows, -(-length // BLOCK_SIZE))
    runner = load(folder, arguments.device, arguments.rows, length, reference=True)
    outcomes = asyncio.run(run_ways(runner, tokenizer, reference, chosen, arguments.tokens))
    del runner
    gc.collect()
    runner = load(folder, arguments.device, len(prompts), length, reference=False)
    answers = asyncio.run(answers_in_bfloat16(runner, tokenizer, prompts, arguments.tokens))
    ours, theirs = distances(reference, answers, folder, arguments.device)
    say(f"\n{table_of_distances(ours, theirs)}\n\n{table_of_ways(outcomes)}")
    return 1 if any(found.wrong for found in outcomes.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
