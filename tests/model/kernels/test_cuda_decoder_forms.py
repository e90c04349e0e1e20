"""The decoder's two forms of a decode step: in each family, the short one is as close to transformers as the long."""

import sys
from pathlib import Path

import pytest
import torch
from cuda_builders import PlanHost, make_runner
from kernel_builders import DEVICE, distance

sys.path.append(str(Path(__file__).parent.parent))

from families import NATIVE, hf_logits, hf_model, prompt, save

pytestmark = [
    pytest.mark.torch,
    # The interpreter, which is NumPy, computes both sides of a choice.
    pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow) encountered:RuntimeWarning"),
]

DTYPE, TOLERANCE = (torch.bfloat16, 6e-2) if DEVICE == "cuda" else (torch.float32, 1e-5)
NUM_STEPS = 4 if DEVICE == "cuda" else 1
FAMILIES = list(NATIVE) if DEVICE == "cuda" else ["llama-biases", "smollm-tied", "mistral-window", "qwen3", "smollm3"]
"""In the interpreter, which is slow, those in which layers differ."""


async def logits_of_steps(folder: Path, sequences: list[list[int]], *, has_short_form: bool) -> torch.Tensor:
    """Of decode steps over all sequences, whose last tokens are written into the slots: [steps, sequences, V]."""
    host = PlanHost(make_runner(folder, dtype=DTYPE, has_short_form=has_short_form))
    for slot, tokens in enumerate(sequences):
        for flight in host.prefill(slot, tokens[:-NUM_STEPS]):
            await flight
    found = []
    for step in range(NUM_STEPS):
        places = [(slot, len(tokens) - NUM_STEPS + step) for slot, tokens in enumerate(sequences)]
        writes = [(slot, place, sequences[slot][place]) for slot, place in places]
        await host.launch(token_writes=writes, rows=places)
        found.append(host.runner._steps.logits_SV[: len(sequences)].cpu().clone())
    await host.runner.aclose()
    return torch.stack(found)


@pytest.mark.parametrize("name", FAMILIES)
async def test_the_short_form_is_as_exact_as_the_long_one(name: str, tmp_path: Path) -> None:
    """Biases, norms of heads, windows, layers without rotation, tied weights: alone and with others."""
    model_type, overrides = NATIVE[name]
    model = hf_model(model_type, **{**overrides, "num_hidden_layers": 2})
    folder = save(model, tmp_path / name)
    sequences = [prompt(length, seed=length) for length in (12, 9, 11)]
    expected = [hf_logits(model, tokens)[-NUM_STEPS:] for tokens in sequences]
    distances = {}
    for form in (True, False):
        alone = await logits_of_steps(folder, sequences[:1], has_short_form=form)
        together = await logits_of_steps(folder, sequences, has_short_form=form)
        found = torch.cat((alone, together), 1)
        distances[form] = distance(found, torch.stack([expected[0], *expected], 1))

    assert distances[True] < 1.3 * distances[False] + 1e-6
    assert distances[False] < TOLERANCE
