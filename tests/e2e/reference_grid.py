"""Greedy text of the real model in reference mode against transformers' ``generate``, over ways of running it.

    python tests/e2e/reference_grid.py [--questions 20] [--tokens 32] [--threads 0]

runs the whole grid {alone, 16 at once} x {chunk 16, 64, 512} x {prefix cache on, off} x {sync, overlap} and a pool so
small that it preempts; ``test_e2e_reference.py`` runs six combinations that cover every pair, and the small pool.
``tests/gpu/reference_text.py`` does the like on a GPU.
"""

import argparse
import asyncio
import itertools
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from e2e_builders import chat_prompts, generate_all, questions, real_engine

from aserve.engine.engine import Engine

NEAR_TIE = 1e-4
"""A gap between the two best logits below which either may win: float32 sums in another order differ by more."""


@dataclass(frozen=True, slots=True)
class Combination:
    """One way of running. num_blocks 0 is a pool as large as memory allows.

    at_once: with more of them than prompts, prompts repeat. rounds: everything is generated so often, in one engine.
    num_prompts: so many of the reference's, from ``first_prompt`` on, 0 for all.
    """

    at_once: int
    chunk: int
    prefix_cache: bool
    policy: Literal["sync", "overlap", "eager"]
    num_blocks: int = 0
    rounds: int = 1
    max_inflight: int = 4
    num_prompts: int = 0
    first_prompt: int = 0

    def __str__(self) -> str:
        cache = "cached" if self.prefix_cache else "uncached"
        pool = f", {self.num_blocks} blocks" if self.num_blocks else ""
        return f"{self.at_once} at once, chunk {self.chunk}, {cache}, {self.policy}{pool}"


WHOLE_GRID = [
    Combination(*values) for values in itertools.product((1, 16), (16, 64, 512), (True, False), ("sync", "overlap"))
]
PAIRWISE = [
    Combination(1, 16, True, "sync", num_prompts=2, first_prompt=16),
    Combination(16, 16, False, "overlap", num_prompts=16),
    Combination(1, 64, False, "overlap", num_prompts=2, first_prompt=18),
    Combination(16, 64, True, "sync", num_prompts=16),
    Combination(1, 512, True, "overlap", num_prompts=2),
    Combination(16, 512, False, "sync", num_prompts=16),
]
"""A step in reference mode takes as long for one stream as for sixteen: so those that are alone are few, and between
them and the sixteen every question has its turn."""
SMALL_POOL = Combination(16, 64, True, "overlap", num_blocks=64)


class Reference:
    """transformers' own model in float32: what it generates, and its logits where we differ."""

    def __init__(self, folder: Path, prompts: list[np.ndarray], num_tokens: int, device: str = "cpu") -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        # On a GPU torch's fused attention rounds float32 more coarsely than the definition.
        attention = {} if device == "cpu" else {"attn_implementation": "eager"}
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **attention).to(device)
        self.prompts = prompts
        self.outputs = self._generate(num_tokens)

    def _generate(self, num_tokens: int) -> list[list[int]]:
        """All prompts in one batch, padded on the left; each output ends with its first end-of-sequence token."""
        length = max(len(prompt) for prompt in self.prompts)
        ids = self._torch.zeros(len(self.prompts), length, dtype=self._torch.long)
        mask = self._torch.zeros_like(ids)
        for row, prompt in enumerate(self.prompts):
            ids[row, length - len(prompt) :] = self._torch.from_numpy(prompt)
            mask[row, length - len(prompt) :] = 1
        device = self._model.device
        outputs = self._model.generate(
            ids.to(device), attention_mask=mask.to(device), max_new_tokens=num_tokens, do_sample=False
        )
        ends = self._model.generation_config.eos_token_id
        ends = {ends} if isinstance(ends, int) else set(ends)
        return [_until(output, ends) for output in outputs[:, length:].tolist()]

    def gap(self, index: int, position: int) -> float:
        """Difference of the two best logits for output token ``position`` of prompt ``index``."""
        context = np.concatenate((self.prompts[index], np.array(self.outputs[index][:position], np.int32)))
        best, second = self.logits(context)[-1].topk(2).values.tolist()
        return best - second

    def logits(self, tokens: np.ndarray) -> Any:
        """Of every position of ``tokens``, float32."""
        with self._torch.inference_mode():
            ids = self._torch.tensor(tokens[None], dtype=self._torch.long, device=self._model.device)
            return self._model(ids).logits[0].float()


def _until(tokens: list[int], ends: set[int]) -> list[int]:
    found = next((index for index, token in enumerate(tokens) if token in ends), len(tokens) - 1)
    return tokens[: found + 1]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Answers that are equal, and the others as (prompt, position of the first difference, gap)."""

    num_equal: int
    near_ties: list[tuple[int, int, float]]
    wrong: list[tuple[int, int, float]]
    num_preemptions: int
    num_cached_tokens: int
    seconds: float


async def run(folder: Path, reference: Reference, combination: Combination, num_tokens: int, threads: int) -> Outcome:
    """Generate everything in an engine of its own and compare."""
    async with real_engine(
        folder,
        threads=threads,
        max_num_seqs=combination.at_once,
        max_num_batched_tokens=combination.at_once + combination.chunk,
        block_size=16,
        num_blocks=combination.num_blocks,
        enable_prefix_caching=combination.prefix_cache,
        policy=combination.policy,
        max_inflight=combination.max_inflight,
    ) as engine:
        return await compare(engine, reference, combination, num_tokens)


async def compare(engine: Engine, reference: Reference, combination: Combination, num_tokens: int) -> Outcome:
    """Generate everything in a new engine that was made as ``combination`` says."""
    num_prompts = combination.num_prompts or len(reference.prompts)
    chosen = [combination.first_prompt + index % num_prompts for index in range(max(num_prompts, combination.at_once))]
    start, ours = time.perf_counter(), []
    for _ in range(combination.rounds):
        prompts = [reference.prompts[index] for index in chosen]
        ours += await generate_all(engine, prompts, num_tokens, combination.at_once)
    seconds, statistics = time.perf_counter() - start, engine.statistics()
    near_ties, wrong = [], []
    for index, mine in zip(chosen * combination.rounds, ours, strict=True):
        theirs = reference.outputs[index]
        if mine == theirs:
            continue
        position = next(i for i, pair in enumerate(itertools.zip_longest(mine, theirs)) if pair[0] != pair[1])
        gap = reference.gap(index, position)
        (near_ties if gap < NEAR_TIE else wrong).append((index, position, gap))
    return Outcome(
        num_equal=len(ours) - len(near_ties) - len(wrong),
        near_ties=near_ties,
        wrong=wrong,
        num_preemptions=statistics.num_preemptions,
        num_cached_tokens=statistics.prefix_cache_hits,
        seconds=seconds,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=0)
    arguments = parser.parse_args()

    from aserve.model.hub import resolve_model

    folder = resolve_model("", cache_dir=os.environ.get("ASERVE_TEST_CACHE", "")).folder
    reference = Reference(folder, chat_prompts(folder, questions(arguments.questions)), arguments.tokens)
    num_wrong = 0
    for combination in [*WHOLE_GRID, SMALL_POOL]:
        outcome = asyncio.run(run(folder, reference, combination, arguments.tokens, arguments.threads))
        num_wrong += len(outcome.wrong)
        sys.stdout.write(
            f"{combination!s:60} equal {outcome.num_equal:3}  near ties {len(outcome.near_ties)}  wrong {outcome.wrong}"
            f"  preemptions {outcome.num_preemptions}  {outcome.seconds:.1f} s\n"
        )
        sys.stdout.flush()
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
