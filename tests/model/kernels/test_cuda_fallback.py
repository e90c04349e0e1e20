"""Models of transformers' own code in the CUDA runner: equal to it on a GPU, or in Triton's interpreter."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).parent.parent))

from cuda_builders import PlanHost, chunk_of, join, make_runner, tokens_of
from families import FALLBACK, hf_logits, hf_model, prompt, save
from kernel_builders import DEVICE

from aserve.core.options import SchedulerOptions
from aserve.errors import ModelError
from aserve.model import cuda_fallback, cuda_start, runner
from aserve.model.cuda_start import load_cuda_runner
from aserve.model.options import ModelOptions
from aserve.model.runner import CpuRunner, load_runner

pytestmark = [
    pytest.mark.torch,
    # The interpreter, which is NumPy, computes both sides of a choice.
    pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow) encountered:RuntimeWarning"),
]

A, B = prompt(13, seed=3), prompt(9, seed=1)
FAMILIES = [name for name in FALLBACK if "dynamic" not in name] if DEVICE == "cuda" else ["gemma2"]
"""The interpreter's one has windows and bent scores."""


@pytest.mark.parametrize("name", FAMILIES)
async def test_chunks_and_rows_match_transformers(name: str, tmp_path: Path) -> None:
    """A prompt in two chunks beside another sequence's rows, then rows of both: tokens and log-probabilities."""
    model_type, overrides = FALLBACK[name]
    model = hf_model(model_type, **{**overrides, "num_hidden_layers": 2})
    host = PlanHost(make_runner(save(model, tmp_path / name)))

    flights = [*host.prefill(0, B), *host.prefill(1, A[:1])]
    flights.append(
        host.launch(
            rows=[(0, len(B))],
            joins=(join(2, A),),
            table_writes=host.table(2, 24),
            chunks=(chunk_of(2, A, 0, 8, k=0),),
        )
    )
    flights.append(host.launch(rows=[(0, len(B) + 1)], chunks=(chunk_of(2, A, 8, 13, k=0),)))
    flights.append(host.launch(rows=[(0, len(B) + 2), (2, len(A))]))
    results = [await flight for flight in flights]
    await host.runner.aclose()

    def greedy(tokens: list[int], count: int) -> list[int]:
        found = list(tokens)
        for _ in range(count):
            found.append(int(hf_logits(model, found)[-1].argmax()))
        return found[len(tokens) :]

    a, b = greedy(A, 2), greedy(B, 4)
    assert [tokens_of(result) for result in (results[0], *results[2:])] == [[b[0]], [b[1]], [b[2], a[0]], [b[3], a[1]]]
    of_prompt = np.concatenate([result.prompt_logprobs[0][1].token_logprobs for result in results[2:4]])
    expected = hf_logits(model, A).log_softmax(-1)[torch.arange(12), A[1:]]
    assert np.allclose(of_prompt, expected, atol=1e-4)


def test_a_model_whose_attention_departs_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is tried against its own eager attention before it serves."""
    monkeypatch.setattr(cuda_fallback, "decode_attention", lambda *args, **kwargs: None)

    with pytest.raises(ModelError, match="paged attention does not give its own logits"):
        make_runner(save(hf_model("olmo2"), tmp_path / "olmo2"))


def test_reference_mode_is_refused_with_what_to_do(tmp_path: Path) -> None:
    """Transformers' matrix products depend on the batch."""
    folder = save(hf_model("olmo2"), tmp_path / "olmo2")

    with pytest.raises(ModelError, match=r"no reference mode on a GPU: set model\.device to cpu"):
        load_cuda_runner(ModelOptions(reference=True), SchedulerOptions(), folder)


async def test_the_cpu_takes_what_a_gpu_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the device is left open; who asks for a GPU gets the refusal."""
    folder = save(hf_model("olmo2"), tmp_path / "olmo2")
    scheduler = SchedulerOptions(max_num_seqs=4, max_num_batched_tokens=64, num_blocks=8)

    def refuse(*args: object) -> None:
        raise ModelError("it cannot be captured.")

    monkeypatch.setattr(runner, "has_gpu", lambda: True)
    monkeypatch.setattr(cuda_start, "load_cuda_runner", refuse)
    with pytest.raises(ModelError, match="captured"):
        load_runner(ModelOptions(device="cuda"), scheduler, folder)
    capsys.readouterr()
    loaded = load_runner(ModelOptions(dtype="float32", threads=1), scheduler, folder)
    await loaded.aclose()

    assert isinstance(loaded, CpuRunner)
    assert "the CPU takes this model: it cannot be captured." in capsys.readouterr().err
