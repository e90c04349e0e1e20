"""Reference mode gives transformers' own greedy text, however the engine runs."""

import asyncio
from pathlib import Path

import pytest
from e2e_builders import chat_prompts, questions
from reference_grid import PAIRWISE, SMALL_POOL, Combination, Reference, run

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(600)]

NUM_QUESTIONS, NUM_TOKENS = 20, 32


@pytest.fixture(scope="module")
def reference(default_model_folder: Path) -> Reference:
    return Reference(default_model_folder, chat_prompts(default_model_folder, questions(NUM_QUESTIONS)), NUM_TOKENS)


@pytest.mark.parametrize("combination", PAIRWISE, ids=str)
def test_every_pair_of_ways_gives_the_reference_text(
    default_model_folder: Path, reference: Reference, combination: Combination
) -> None:
    """Equal ids, or a first difference where the two best logits nearly tie."""
    outcome = asyncio.run(run(default_model_folder, reference, combination, NUM_TOKENS, threads=0))

    assert outcome.wrong == []
    assert outcome.num_equal >= (combination.num_prompts or NUM_QUESTIONS) - 1


def test_preemption_does_not_change_the_text(default_model_folder: Path, reference: Reference) -> None:
    """A pool that holds a few of the sixteen sequences, which take turns in it."""
    outcome = asyncio.run(run(default_model_folder, reference, SMALL_POOL, NUM_TOKENS, threads=0))

    assert outcome.wrong == []
    assert outcome.num_preemptions > 0
