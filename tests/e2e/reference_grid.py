"""Greedy text of the real model in reference mode against transformers' ``generate``, over ways of running it.

    python tests/e2e/reference_grid.py [--questions 20] [--tokens 32] [--threads 0]

runs the whole grid {alone, 16 at once} x {chunk 16, 64, 512} x {prefix cache on, off} x {sync, overlap} and a pool so
small that it preempts; ``test_e2e_reference.py`` runs six combinations that cover every pair, and the small pool.
"""

import argparse
import asyncio
import itertools
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from e2e_builders import chat_prompts, generate_all, questions, real_engine

NEAR_TIE = 1e-4
"""A gap between the two best logits below which either may win: float32 sums in another order differ by more."""


@dataclass(frozen=True, slots=True)
class Combination:
    """One way of running. num_blocks 0 is a pool as large as memory allows."""

    at_once: int
    chunk: int
    prefix_cache: bool
    policy: Literal["sync", "overlap"]
    num_blocks: int = 0

    def __str__(self) -> str:
        cache = "cached" if self.prefix_cache else "uncached"
        pool = f", {self.num_blocks} blocks" if self.num_blocks else ""
        return f"{self.at_once} at once, chunk {self.chunk}, {cache}, {self.policy}{pool}"


WHOLE_GRID = [
    Combination(*values) for values in itertools.product((1, 16), (16, 64, 512), (True, False), ("sync", "overlap"))
]
PAIRWISE = [
    Combination(1, 16, True, "sync"),
    Combination(16, 16, False, "overlap"),
    Combination(1, 64, False, "overlap"),
    Combination(16, 64, True, "sync"),
    Combination(1, 512, True, "overlap"),
    Combination(16, 512, False, "sync"),
]
SMALL_POOL = Combination(16, 64, True, "overlap", num_blocks=64)


class Reference:
    """transformers' own model in float32: what it generates, and its logits where we differ."""

    def __init__(self, folder: Path, prompts: list[np.ndarray], num_tokens: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
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
        outputs = self._model.generate(ids, attention_mask=mask, max_new_tokens=num_tokens, do_sample=False)
        ends = self._model.generation_config.eos_token_id
        ends = {ends} if isinstance(ends, int) else set(ends)
        return [_until(output, ends) for output in outputs[:, length:].tolist()]

    def gap(self, index: int, position: int) -> float:
        """Difference of the two best logits for output token ``position`` of prompt ``index``."""
        context = np.concatenate((self.prompts[index], np.array(self.outputs[index][:position], np.int32)))
        with self._torch.inference_mode():
            logits = self._model(self._torch.tensor(context[None], dtype=self._torch.long)).logits[0, -1]
        best, second = logits.topk(2).values.tolist()
        return best - second


def _until(tokens: list[int], ends: set[int]) -> list[int]:
    found = next((index for index, token in enumerate(tokens) if token in ends), len(tokens) - 1)
    return tokens[: found + 1]


@dataclass(frozen=True, slots=True)
class Outcome:
    num_equal: int
    near_ties: list[tuple[int, int, float]]
    wrong: list[tuple[int, int, float]]
    num_preemptions: int
    seconds: float


async def run(folder: Path, reference: Reference, combination: Combination, num_tokens: int, threads: int) -> Outcome:
    """Generate everything in one engine and compare. ``near_ties`` and ``wrong`` hold (prompt, position, gap)."""
    async with real_engine(
        folder,
        threads=threads,
        max_num_seqs=combination.at_once,
        max_num_batched_tokens=combination.at_once + combination.chunk,
        block_size=16,
        num_blocks=combination.num_blocks,
        enable_prefix_caching=combination.prefix_cache,
        policy=combination.policy,
    ) as engine:
        start = time.perf_counter()
        ours = await generate_all(engine, reference.prompts, num_tokens, combination.at_once)
        seconds = time.perf_counter() - start
        num_preemptions = engine.statistics().num_preemptions
    near_ties, wrong = [], []
    for index, (mine, theirs) in enumerate(zip(ours, reference.outputs, strict=True)):
        if mine == theirs:
            continue
        position = next(i for i, pair in enumerate(itertools.zip_longest(mine, theirs)) if pair[0] != pair[1])
        gap = reference.gap(index, position)
        (near_ties if gap < NEAR_TIE else wrong).append((index, position, gap))
    num_equal = len(ours) - len(near_ties) - len(wrong)
    return Outcome(num_equal, near_ties, wrong, num_preemptions, seconds)


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
