"""Models of transformers' own code in the CUDA runner: equal to it on a GPU, or in Triton's interpreter."""

import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).parent.parent))

from cuda_builders import PlanHost, chunk_of, join, make_runner, tokens_of
from families import FALLBACK, hf_logits, hf_model, prompt, save
from kernel_builders import DEVICE

from aserve.core.options import SchedulerOptions
from aserve.errors import ModelError, NotOnGpu
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


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """What is allocated without a value is NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.skipif(
    DEVICE == "cuda", reason="torch's deterministic mode, which poisons memory, asks for other settings of cuBLAS"
)
@pytest.mark.usefixtures("poisoned_memory")
async def test_padding_goes_through_the_module_as_numbers(tmp_path: Path) -> None:
    """Rows of padding behind a chunk and among rows: foreign code never meets what the memory held before."""
    host = PlanHost(make_runner(save(hf_model("olmo2", num_hidden_layers=1), tmp_path / "olmo2")))
    logits_TV = host.runner._steps.activations.logits_TV
    for slot in (0, 1):
        await host.prefill(slot, B)[-1]
    found = []
    for launch in (lambda: host.prefill(2, B)[-1], lambda: host.launch(rows=[(slot, len(B)) for slot in range(3)])):
        with torch.inference_mode():
            logits_TV.fill_(torch.nan)
        await launch()
        found.append(int(logits_TV.isfinite().all(1).sum()))
    await host.runner.aclose()

    assert found == [16, 4]  # where 9 tokens and 3 rows were asked for


def test_a_model_whose_attention_departs_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is tried against its own eager attention before it serves."""
    monkeypatch.setattr(cuda_fallback, "decode_attention", lambda *args, **kwargs: None)

    with pytest.raises(NotOnGpu, match="paged attention does not give its own logits"):
        make_runner(save(hf_model("olmo2"), tmp_path / "olmo2"))


def test_reference_mode_is_refused_with_what_to_do(tmp_path: Path) -> None:
    """Transformers' matrix products depend on the batch."""
    folder = save(hf_model("olmo2"), tmp_path / "olmo2")

    with pytest.raises(NotOnGpu, match=r"no reference mode on a GPU: set model\.device to cpu"):
        load_cuda_runner(ModelOptions(reference=True), SchedulerOptions(), folder)


async def test_the_cpu_takes_what_a_gpu_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the device is left open; who asks for a GPU gets the refusal."""
    folder = save(hf_model("olmo2"), tmp_path / "olmo2")
    scheduler = SchedulerOptions(max_num_seqs=4, max_num_batched_tokens=64, num_blocks=8)

    def refuse(*args: object) -> None:
        raise NotOnGpu("it cannot be captured.")

    monkeypatch.setattr(runner, "has_gpu", lambda: True)
    monkeypatch.setattr(cuda_start, "load_cuda_runner", refuse)
    with pytest.raises(NotOnGpu, match="captured"):
        load_runner(ModelOptions(device="cuda"), scheduler, folder)
    capsys.readouterr()
    loaded = load_runner(ModelOptions(dtype="float32", threads=1), scheduler, folder)
    await loaded.aclose()

    assert isinstance(loaded, CpuRunner)
    assert "the CPU takes this model: it cannot be captured." in capsys.readouterr().err


@pytest.mark.parametrize("name", ["olmo2", "llama"])
def test_an_operators_mistake_is_not_left_to_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Too little memory or an option out of range, with the device left open: said, not worked around."""

    def refuse(*args: object) -> None:
        raise ModelError("Too little device memory.")

    monkeypatch.setattr(runner, "has_gpu", lambda: True)
    monkeypatch.setattr(cuda_start, "load_cuda_runner", refuse)

    with pytest.raises(ModelError, match="Too little device memory"):
        load_runner(ModelOptions(threads=1), SchedulerOptions(num_blocks=8), save(hf_model(name), tmp_path / name))


def test_the_cpu_starts_when_the_gpus_memory_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the refused start had loaded is gone by then, and torch holds on to none of it."""

    class Weights:
        """In a ring, as modules and their hooks are."""

        def __init__(self) -> None:
            self.itself = self

    loaded: list[weakref.ref[Weights]] = []
    events: list[str] = []

    def refuse(*args: object) -> None:
        weights = Weights()
        loaded.append(weakref.ref(weights))
        raise NotOnGpu("it cannot be captured.")

    def has_gone() -> str:
        return "gone" if loaded[0]() is None else "held"

    monkeypatch.setattr(runner, "has_gpu", lambda: True)
    monkeypatch.setattr(cuda_start, "load_cuda_runner", refuse)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: events.append(f"emptied, weights {has_gone()}"))
    monkeypatch.setattr(runner, "load_cpu_runner", lambda *args: events.append(f"cpu, weights {has_gone()}"))
    load_runner(ModelOptions(), SchedulerOptions(), tmp_path)

    assert events == ["emptied, weights gone", "cpu, weights gone"]
