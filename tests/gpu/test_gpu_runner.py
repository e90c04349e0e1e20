"""The CUDA runner on a GPU: each family against transformers, and reference mode through the whole engine."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cuda_builders import GREEDY, PlanHost, Sizes, chunk_of, join, make_runner
from kernel_builders import check_frequencies, exact_distribution

sys.path.append(str(Path(__file__).parent.parent / "model"))

from families import FALLBACK, NATIVE, hf_model, prompt, save

from aserve.core.invariants import check
from aserve.core.options import SchedulerOptions
from aserve.core.request import SamplingParams
from aserve.engine.engine import Engine
from aserve.engine.generation import GenerationRequest
from aserve.errors import ModelError
from aserve.model.cuda_start import load_cuda_runner
from aserve.model.options import ModelOptions
from aserve.testing import ByteTokenizer

pytestmark = [pytest.mark.gpu, pytest.mark.torch, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]

DEEP = {
    "hidden_size": 512, "intermediate_size": 1280, "num_hidden_layers": 16, "num_attention_heads": 8, "head_dim": 64,
    "max_position_embeddings": 2048, "vocab_size": 600, "initializer_range": 0.05,
}  # fmt: skip


def deep_model(name: str) -> Any:
    model_type, overrides = NATIVE[name]
    heads = {"num_key_value_heads": 8} if "multi-head" in name else {"num_key_value_heads": 2}
    kept = {key: value for key, value in overrides.items() if key not in ("num_attention_heads", "head_dim")}
    return hf_model(model_type, **{**kept, **DEEP, **heads})


def tiny_model() -> Any:
    """Two layers; its next token is one of 97."""
    return hf_model("llama", num_attention_heads=2, num_key_value_heads=1, head_dim=16, initializer_range=0.3)


def hf_logprobs(model: Any, tokens: list[int], dtype: torch.dtype) -> torch.Tensor:
    """transformers' log-probabilities of each next token, computed in ``dtype`` on the GPU."""
    ids = torch.tensor([tokens], device="cuda")
    with torch.inference_mode():
        logits = model.to("cuda", dtype)(ids).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].cpu()


async def our_logprobs(folder: Path, tokens: list[int], dtype: torch.dtype) -> torch.Tensor:
    """The same of the runner, a prompt of 150 tokens in three chunks beside decode rows of another sequence."""
    sizes = Sizes(max_num_seqs=8, max_num_tokens=128, max_model_len=256, block_size=16, num_blocks=64)
    host = PlanHost(make_runner(folder, sizes, dtype=dtype))
    host.prefill(0, prompt(20, seed=1), room=64)
    found: list[float] = []
    for step, (start, end) in enumerate(((0, 100), (100, 101), (101, 150))):
        first: dict[str, Any] = {} if start else {"joins": (join(1, tokens),), "table_writes": host.table(1, 160)}
        flight = host.launch(rows=[(0, 20 + step)], chunks=(chunk_of(1, tokens, start, end, k=1),), **first)
        found += (await flight).prompt_logprobs[0][1].token_logprobs.tolist()
    await host.runner.aclose()
    return torch.tensor(found)


@pytest.mark.parametrize("name", NATIVE)
async def test_families_match_transformers(name: str, tmp_path: Path) -> None:
    """At a depth of sixteen layers: in float32 closely; in bfloat16 no further from float32 than transformers is."""
    model = deep_model(name)
    folder = save(model, tmp_path / name)
    tokens = prompt(150)
    expected = hf_logprobs(model, tokens, torch.float32)

    in_float32 = (await our_logprobs(folder, tokens, torch.float32) - expected).abs()
    in_bfloat16 = (await our_logprobs(folder, tokens, torch.bfloat16) - expected).abs()
    theirs_in_bfloat16 = (hf_logprobs(model, tokens, torch.bfloat16) - expected).abs()

    assert in_float32.max() < 2e-3
    assert in_bfloat16.mean() < 1.25 * theirs_in_bfloat16.mean()


async def test_256_ragged_rows(tmp_path: Path) -> None:
    """Prompts of 1 to 1,000 tokens, all decoding at once, give what each gives alone."""
    folder = save(deep_model("llama"), tmp_path / "llama")
    lengths = (1 + (torch.rand(256, generator=torch.Generator().manual_seed(0)) ** 3 * 999)).int().tolist()
    sizes = Sizes(max_num_seqs=256, max_num_tokens=1024, max_model_len=1100, block_size=32, num_blocks=6000)
    host = PlanHost(make_runner(folder, sizes, reference=True))
    prompts = [prompt(length, seed=seed) for seed, length in enumerate(lengths)]
    chosen = (0, 17, 128, 255, int(np.argmax(lengths)))
    alone = {slot: await host.generate(slot, prompts[slot], 8, room=lengths[slot] + 8) for slot in chosen}
    host.launch(leaves=list(range(256)))
    host.free = list(range(1, 6001))

    flights = [host.prefill(slot, prompts[slot], room=lengths[slot] + 8)[-1] for slot in range(4)]
    results = []
    for slot in range(256):
        flight = host.prefill(slot, prompts[slot], chunk=1000, room=lengths[slot] + 8)[-1]
        results.append([int((await flight).tokens[0, 0])])
    for step in range(7):
        rows = [(slot, length + step) for slot, length in enumerate(lengths)]
        for slot, token in enumerate((await host.launch(rows=rows)).tokens[:, 0].tolist()):
            results[slot].append(token)
    assert all(flight.done() for flight in flights)
    await host.runner.aclose()

    assert {slot: results[slot] for slot in chosen} == alone


FILTERS = {
    "top-k": SamplingParams(temperature=1.5, top_k=20),
    "top-p": SamplingParams(temperature=1.5, top_p=0.8),
    "min-p": SamplingParams(temperature=1.5, min_p=0.1),
    "all": SamplingParams(temperature=1.5, top_k=40, top_p=0.9, min_p=0.05),
}
NUM_DRAWS, NUM_ROWS = 100_000, 256


@pytest.mark.parametrize("name", FILTERS)
async def test_frequencies_of_a_hundred_thousand_draws(name: str, tmp_path: Path) -> None:
    """One prompt's next token, drawn by as many sequences with seeds of their own, a batch of decode rows at a time."""
    sizes = Sizes(max_num_seqs=NUM_ROWS, max_num_tokens=NUM_ROWS + 16, max_model_len=32, num_blocks=2 * NUM_ROWS)
    host = PlanHost(make_runner(save(tiny_model(), tmp_path / "tiny"), sizes))
    tokens, slots = prompt(9), range(NUM_ROWS)
    writes = host.table(0, 16)
    await host.launch(joins=(join(0, tokens),), table_writes=writes, chunks=(chunk_of(0, tokens, 0, 8),))
    tables = [writes, *(host.table(slot, 16, [writes[0][2]]) for slot in slots[1:])]
    table_writes = [write for table in tables for write in table]

    drawn: list[np.ndarray] = []
    for first in range(0, NUM_DRAWS, NUM_ROWS):
        flight = host.launch(
            leaves=list(slots),
            joins=tuple(join(slot, tokens, position=8, params=FILTERS[name], seed=first + slot) for slot in slots),
            table_writes=table_writes,
            token_writes=[(slot, 8, tokens[8]) for slot in slots],
            rows=[(slot, 8) for slot in slots],
        )
        drawn.append((await flight).tokens[:, 0])
    logits_V = host.runner._steps.logits_SV[0].cpu()
    await host.runner.aclose()

    check_frequencies(torch.from_numpy(np.concatenate(drawn)[:NUM_DRAWS]), exact_distribution(logits_V, FILTERS[name]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(deep_model("llama"), tmp_path_factory.mktemp("models") / "llama")


@asynccontextmanager
async def cuda_engine(folder: Path, *, reference: bool = True, **options: Any) -> AsyncIterator[Engine]:
    sizes = {"max_num_seqs": 64, "max_num_batched_tokens": 256, "num_blocks": 1000, "check_invariants_every": 16}
    scheduler = SchedulerOptions(**(sizes | options))
    model_options = ModelOptions(reference=reference, gpu_memory_utilization=0.3)
    runner = await asyncio.to_thread(load_cuda_runner, model_options, scheduler, folder)
    engine = Engine(runner, ByteTokenizer(), scheduler)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.aclose()
    check(engine.scheduler)


PROMPTS = [np.array(prompt(40 + 9 * seed, seed=seed), np.int32) for seed in range(64)]
"""Of 40 to 607 tokens."""


async def generate(engine: Engine, index: int, num_tokens: int = 24, **params: Any) -> list[int]:
    sampling = SamplingParams(**{"temperature": 0.8 if index % 2 else 0.0, "max_tokens": num_tokens} | params)
    request = GenerationRequest(
        request_id=f"r{index}", prompts=(PROMPTS[index],), params=sampling, seed=index, ignore_eos=True
    )
    return [token async for delta in engine.submit_nowait(request) for token in delta.tokens]


async def all_tokens(engine: Engine, indices: Sequence[int]) -> list[list[int]]:
    return list(await asyncio.gather(*(generate(engine, index) for index in indices)))


WAYS: dict[str, dict[str, Any]] = {
    "64 rows": {},
    "chunks of 16": {"max_num_batched_tokens": 80},
    "preempted": {"num_blocks": 120},
    "preempted by force": {"force_preempt_every": 7},
    **{f"depth {depth}": {"policy": "eager", "max_inflight": depth} for depth in (1, 2, 3, 5, 8)},
    "sync": {"policy": "sync"},
    "host sampler": {"sampler": "host"},
    "split": {"prefill": "split"},
    "streams": {"prefill": "streams"},
    "streams, the host sampling": {"prefill": "streams", "sampler": "host"},
    "preempted by force in two streams": {"prefill": "streams", "force_preempt_every": 7},
}


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[list[int]]:
    """Tokens of all prompts, one at a time."""

    async def run() -> list[list[int]]:
        async with cuda_engine(folder, enable_prefix_caching=False) as engine:
            return [await generate(engine, index) for index in range(len(PROMPTS))]

    return asyncio.run(run())


@pytest.mark.parametrize("way", WAYS)
async def test_reference_mode_gives_the_same_tokens_in_any_way(folder: Path, alone: list[list[int]], way: str) -> None:
    """Greedy and sampled, 64 at once: nothing differs from a run one at a time."""
    async with cuda_engine(folder, **WAYS[way]) as engine:
        together = await all_tokens(engine, range(len(PROMPTS)))
        num_preemptions = engine.statistics().num_preemptions

    assert together == alone
    assert (num_preemptions > 0) == way.startswith("preempted")


async def test_cached_prefixes_do_not_change_tokens(folder: Path, alone: list[list[int]]) -> None:
    """The same prompts a second time, from the first time's blocks."""
    async with cuda_engine(folder) as engine:
        await all_tokens(engine, range(16))
        again = await all_tokens(engine, range(16))

    assert again == alone[:16]


async def test_captured_steps_answer_in_bfloat16(folder: Path) -> None:
    """Nothing is lost or made twice at 64 streams; repeated runs agree while batches are alike."""
    async with cuda_engine(folder, reference=False) as engine:
        first = await generate(engine, 0, 32)
        together = await all_tokens(engine, range(len(PROMPTS)))
        again = await generate(engine, 0, 32)

    assert [len(tokens) for tokens in together] == [24] * len(PROMPTS)
    assert first == again


@pytest.mark.parametrize("name", [name for name in FALLBACK if "dynamic" not in name])
async def test_models_of_transformers_own_code(name: str, tmp_path: Path) -> None:
    """Through the whole engine in float32, captured, all at once: the tokens of transformers' generate."""
    model_type, overrides = FALLBACK[name]
    model = hf_model(model_type, **{**overrides, "max_position_embeddings": 512})
    folder = save(model, tmp_path / name)
    prompts = [prompt(5 + 9 * seed, seed=seed) for seed in range(16)]
    scheduler = SchedulerOptions(
        max_num_seqs=16, max_num_batched_tokens=96, num_blocks=300, block_size=16, check_invariants_every=16
    )
    options = ModelOptions(dtype="float32", gpu_memory_utilization=0.3, device="cuda")
    engine = Engine(await asyncio.to_thread(load_cuda_runner, options, scheduler, folder), ByteTokenizer(), scheduler)
    await engine.start()

    async def answer(index: int) -> list[int]:
        request = GenerationRequest(
            request_id=f"r{index}",
            prompts=(np.array(prompts[index], np.int32),),
            params=SamplingParams(temperature=0.0, max_tokens=16),
            ignore_eos=True,
        )
        return [token async for delta in engine.submit_nowait(request) for token in delta.tokens]

    ours = await asyncio.gather(*(answer(index) for index in range(len(prompts))))
    await engine.aclose()
    check(engine.scheduler)

    model = model.to("cuda")
    theirs = []
    for tokens in prompts:
        with torch.inference_mode():
            for _ in range(16):
                tokens = [*tokens, int(model(torch.tensor([tokens], device="cuda")).logits[0, -1].argmax())]
        theirs.append(tokens[-16:])
    assert ours == theirs


def test_too_little_memory_says_what_to_lower(folder: Path) -> None:
    """A pool larger than the device."""
    scheduler = SchedulerOptions(max_num_seqs=8, max_num_batched_tokens=64)

    with pytest.raises(ModelError, match="Lower scheduler"):
        load_cuda_runner(ModelOptions(kv_cache_gib=1e4), scheduler, folder)


async def test_greedy_tokens_in_bfloat16_are_the_likeliest(folder: Path) -> None:
    """The sampled token is the first alternative that the log-probabilities name."""
    runner = make_runner(folder, Sizes(max_num_seqs=8, max_num_tokens=64, max_model_len=256, block_size=16))
    host = PlanHost(runner)
    for slot in range(8):
        host.prefill(slot, prompt(16, seed=slot), room=64, params=GREEDY)
    result = await host.launch(rows=[(slot, 16) for slot in range(8)], logprobs_k=2)
    await runner.aclose()

    assert result.logprobs is not None
    assert result.logprobs.top_ids[:, 0].tolist() == result.tokens[:, 0].tolist()
    assert result.logprobs.ranks.tolist() == [1] * 8


REFUSED = """
import sys
from pathlib import Path

from aserve.core.options import SchedulerOptions
from aserve.errors import ModelError
from aserve.model.cuda_start import load_cuda_runner
from aserve.model.options import ModelOptions

scheduler = SchedulerOptions(max_num_seqs=8, max_num_batched_tokens=64, num_blocks=100)
try:
    load_cuda_runner(ModelOptions(gpu_memory_utilization=0.3), scheduler, Path(sys.argv[1]))
except ModelError as error:
    print(error.message)
"""
"""In a process of its own, since a capture that breaks off leaves things behind."""


def test_what_cannot_be_captured_is_refused(tmp_path: Path) -> None:
    """Rope that looks at the longest sequence of a batch, on the host; it says what to do."""
    model_type, overrides = FALLBACK["llama-dynamic-rope"]
    folder = save(hf_model(model_type, **overrides), tmp_path / "dynamic")

    done = subprocess.run(
        [sys.executable, "-c", REFUSED, str(folder)], cwd=ROOT, capture_output=True, text=True, check=False
    )

    assert "cannot be captured in a CUDA graph" in done.stdout, done.stderr
    assert done.stdout.endswith(": set model.device to cpu.\n")
