"""The real model on a GPU: transformers' own greedy text in reference mode, and bfloat16 no further from it."""

import asyncio
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "e2e"))

from e2e_builders import chat_prompts, questions
from reference_grid import Reference
from reference_text import BLOCK_SIZE, answers_in_bfloat16, distances, load, run_ways, ways

from aserve.text.tokenizer import HFTokenizer

pytestmark = [pytest.mark.gpu, pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(300)]

NUM_PROMPTS, NUM_TOKENS, ROWS = 20, 32, 64


@pytest.fixture(scope="module")
def reference(default_model_folder: Path) -> Reference:
    return Reference(
        default_model_folder, chat_prompts(default_model_folder, questions(NUM_PROMPTS)), NUM_TOKENS, "cuda"
    )


def length(reference: Reference) -> int:
    return max(map(len, reference.prompts)) + NUM_TOKENS + 1


def test_every_way_gives_the_reference_text(default_model_folder: Path, reference: Reference) -> None:
    """Equal ids, or a first difference where the two best logits nearly tie, in all ways of running."""
    runner = load(default_model_folder, "cuda", ROWS, length(reference), reference=True)
    chosen = ways(ROWS, -(-length(reference) // BLOCK_SIZE))
    tokenizer = HFTokenizer.from_folder(default_model_folder)

    outcomes = asyncio.run(run_ways(runner, tokenizer, reference, chosen, NUM_TOKENS))

    assert {name: outcome.wrong for name, outcome in outcomes.items() if outcome.wrong} == {}
    assert outcomes["preempted"].num_preemptions > 0
    assert outcomes["cached"].num_cached_tokens > 0


def test_bfloat16_is_no_further_from_float32_than_transformers(
    default_model_folder: Path, reference: Reference
) -> None:
    """By the divergence of its distribution over whole answers."""
    runner = load(default_model_folder, "cuda", NUM_PROMPTS, length(reference), reference=False)
    tokenizer = HFTokenizer.from_folder(default_model_folder)
    answers = asyncio.run(answers_in_bfloat16(runner, tokenizer, reference.prompts, NUM_TOKENS))

    ours, theirs = distances(reference, answers, default_model_folder, "cuda")

    assert ours.kl_mean < 1.25 * theirs.kl_mean
