"""The CUDA runner's plans against the CPU runner's and transformers: on a GPU, or in Triton's interpreter."""

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).parent.parent))

from cuda_builders import PlanHost, Sizes, chunk_of, join, make_runner, tokens_of
from families import hf_logits, hf_model, prompt, save

from aserve.core.options import SchedulerOptions
from aserve.core.plan import FLAG_DONE, FLAG_INVALID, BatchPlan, BatchResult
from aserve.core.request import SamplingParams
from aserve.errors import DeviceLost, ModelError
from aserve.model.cuda_start import load_cuda_runner
from aserve.model.cuda_steps import CudaSteps
from aserve.model.options import ModelOptions
from aserve.model.runner import load_cpu_runner

pytestmark = [
    pytest.mark.torch,
    # The interpreter, which is NumPy, computes both sides of a choice.
    pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow) encountered:RuntimeWarning"),
]

A, B = prompt(13, seed=3), prompt(9, seed=1)


def tiny_model(num_hidden_layers: int) -> Any:
    return hf_model(
        "llama", num_hidden_layers=num_hidden_layers, num_attention_heads=2, num_key_value_heads=1, head_dim=16
    )


class Model:
    """A tiny model's folder, and what transformers makes of it."""

    def __init__(self, folder: Path, *, num_layers: int = 1) -> None:
        self._model = tiny_model(num_hidden_layers=num_layers)
        self.folder = save(self._model, folder)

    def logprobs(self, tokens: list[int]) -> torch.Tensor:
        return hf_logits(self._model, tokens).log_softmax(-1)

    def greedy(self, tokens: list[int], count: int) -> list[int]:
        found = list(tokens)
        for _ in range(count):
            found.append(int(self.logprobs(found)[-1].argmax()))
        return found[len(tokens) :]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    yield Model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def host(model: Model, request: pytest.FixtureRequest) -> AsyncIterator[PlanHost]:
    """Of steps with so many cuts: a parameter, or none."""
    runner = make_runner(model.folder, num_cuts=getattr(request, "param", 0))
    yield PlanHost(runner)
    await runner.aclose()


@pytest.fixture
async def cpu(model: Model) -> AsyncIterator[PlanHost]:
    scheduler = SchedulerOptions(
        max_num_seqs=4, max_num_batched_tokens=32, max_model_len=64, block_size=8, num_blocks=40
    )
    options = ModelOptions(device="cpu", dtype="float32", threads=1)
    runner = await asyncio.to_thread(load_cpu_runner, options, scheduler, model.folder)
    yield PlanHost(runner)
    await runner.aclose()


async def test_a_prompt_in_chunks_goes_on_in_rows(tmp_path: Path) -> None:
    """Chunks and rows of two layers, launched ahead, give transformers' greedy tokens."""
    model = Model(tmp_path / "tiny", num_layers=2)
    runner = make_runner(model.folder)

    assert await PlanHost(runner).generate(2, A, 5, chunk=8) == model.greedy(A, 5)
    await runner.aclose()


async def test_rows_and_chunks_in_one_step(host: PlanHost, model: Model) -> None:
    """One sequence decodes while another one's prompt comes in two chunks beside it."""
    first = host.prefill(0, A)
    both = [
        host.launch(
            rows=[(0, len(A))],
            joins=(join(3, B),),
            table_writes=host.table(3, 24),
            chunks=(chunk_of(3, B, 0, 5),),
        ),
        host.launch(rows=[(0, len(A) + 1)], chunks=(chunk_of(3, B, 5, 9),)),
        host.launch(rows=[(0, len(A) + 2), (3, len(B))]),
    ]
    results = [tokens_of(await flight) for flight in [*first, *both]]

    a, b = model.greedy(A, 4), model.greedy(B, 2)
    assert results == [[a[0]], [a[1]], [a[2], b[0]], [a[3], b[1]]]


async def test_a_prefix_is_read_from_anothers_blocks(host: PlanHost, model: Model) -> None:
    """The second sequence joins behind the first one's full block."""
    writes = host.table(0, 32)
    await host.launch(joins=(join(0, A),), table_writes=writes, chunks=(chunk_of(0, A, 0, 13),))
    other = A[:8] + B
    shared = [writes[0][2]]

    flight = host.launch(
        joins=(join(1, other, position=8),),
        table_writes=host.table(1, 24, shared),
        chunks=(chunk_of(1, other, 8, len(other)),),
    )

    assert tokens_of(await flight) == model.greedy(other, 1)


async def test_a_slot_changes_hands_while_its_steps_are_out(host: PlanHost, model: Model) -> None:
    """Left and joined in one plan, behind rows of the old owner that nobody has seen."""
    flights = host.prefill(1, A)
    flights += [host.launch(rows=[(1, len(A) + step)]) for step in range(2)]
    flights.append(
        host.launch(
            leaves=[1], joins=(join(1, B),), table_writes=host.table(1, 16), chunks=(chunk_of(1, B, 0, len(B)),)
        )
    )
    flights.append(host.launch(rows=[(1, len(B))]))

    tokens = [tokens_of(await flight)[0] for flight in flights]

    assert tokens == model.greedy(A, 3) + model.greedy(B, 2)


async def test_stop_ids_and_limits_end_rows_on_the_device(host: PlanHost, model: Model) -> None:
    """Later rows of an ended sequence are done and change nothing; its neighbour goes on."""
    a, b = model.greedy(A, 3), model.greedy(B, 4)
    assert a[0] != a[1]
    host.prefill(0, A, stop_ids=(a[1],), room=16)
    host.prefill(1, B, max_length=len(B) + 3, room=16)
    results = [await host.launch(rows=[(0, len(A) + step), (1, len(B) + step)]) for step in range(3)]

    assert [result.flags.tolist() for result in results] == [[FLAG_DONE, 0], [FLAG_DONE, FLAG_DONE], [FLAG_DONE] * 2]
    assert [tokens_of(result) for result in results[:2]] == [[a[1], b[1]], [0, b[2]]]


async def test_a_sequence_may_end_with_its_last_block(host: PlanHost, model: Model) -> None:
    """A finish at a block's edge, with a row beyond it in flight: nobody reads or writes past the table."""
    count = 16 - len(A) + 1
    host.prefill(0, A, max_length=16 + 1, room=16)
    flights = [host.launch(rows=[(0, len(A) + step)]) for step in range(count)]
    neighbour = await host.generate(2, B, 3)
    results = [await flight for flight in flights]

    assert [tokens_of(result)[0] for result in results[:-1]] == model.greedy(A, count)[1:]
    assert results[-2].flags.tolist() == [FLAG_DONE]
    assert neighbour == model.greedy(B, 3)


SAMPLED = {
    "temperature": SamplingParams(temperature=1.5),
    "filters": SamplingParams(temperature=1.5, top_k=20, top_p=0.9, min_p=0.01),
    "penalties": SamplingParams(temperature=0, repetition_penalty=1.5, presence_penalty=1.0, frequency_penalty=0.7),
    "bias": SamplingParams(temperature=0, logit_bias=((5, 30.0), (6, 29.5)), bad_words=((5,),)),
    "allowed": SamplingParams(temperature=1.0, allowed_token_ids=(7, 8, 9)),
}


async def test_bad_words_of_several_tokens(host: PlanHost, cpu: PlanHost, model: Model) -> None:
    """Begun in the prompt or in the output, they are not completed; what only resembles them is."""
    a = model.greedy(A, 3)
    words = ((*A[-2:], a[0]), (A[-1], A[-1], a[0]), (96, 96))
    results = []
    for each in (host, cpu):
        params = SamplingParams(temperature=0, bad_words=words)
        first = await each.generate(0, A, 3, params=params)
        again = await each.generate(1, A, 4, params=SamplingParams(temperature=0, bad_words=((a[0], a[1]), tuple(A))))
        results.append((first, again))

    assert results[0] == results[1]
    assert results[0][0][0] != a[0]
    assert results[0][1][0] == a[0]
    assert results[0][1][1] != a[1]


async def test_sampling_is_the_cpu_runners(host: PlanHost, cpu: PlanHost) -> None:
    """The same tokens from the same seeds, every kind of parameter in one batch."""
    results = []
    for each in (host, cpu):
        kinds = list(SAMPLED.values())
        found = []
        for params in (kinds[:3], kinds[2:]):
            each.free = list(range(1, 41))
            slots = range(len(params))
            joins = tuple(join(slot, A[:8], params=kind) for slot, kind in zip(slots, params, strict=True))
            tables = [write for slot in slots for write in each.table(slot, 24)]
            chunks = tuple(chunk_of(slot, A[:8], 0, 8) for slot in slots)
            flights = [each.launch(joins=joins, table_writes=tables, chunks=chunks)]
            flights += [each.launch(rows=[(slot, 8 + step) for slot in slots]) for step in range(3)]
            found += [tokens_of(await flight) for flight in flights]
            each.launch(leaves=list(slots))
        results.append(found)

    assert results[0] == results[1]


@pytest.mark.parametrize("host", [0, 2], indirect=True)
async def test_differences_too_many_for_one_array_go_ahead_in_parts(host: PlanHost, model: Model) -> None:
    """Joins first, then writes and what single joins bring, each part by a launch of its own."""
    host.runner._steps.room = 200  # a slot's record, and little else
    params = SamplingParams(temperature=0, logit_bias=((3, 1e9),))
    flights = host.prefill(1, A) + host.prefill(2, B, params=params)
    flights.append(host.launch(rows=[(1, len(A))]))

    tokens = [tokens_of(await flight)[0] for flight in flights]

    a = model.greedy(A, 2)
    assert tokens == [a[0], 3, a[1]]


@pytest.mark.parametrize("host", [0, 2], indirect=True)
async def test_logprobs_of_tokens_and_prompts(host: PlanHost, model: Model) -> None:
    """Under the model's own distribution, with the likeliest alternatives."""
    flights = [
        host.launch(
            joins=(join(0, A),), table_writes=host.table(0, 24), chunks=(chunk_of(0, A, 0, 8, k=2),), logprobs_k=3
        ),
        host.launch(chunks=(chunk_of(0, A, 8, 13, k=2),), logprobs_k=3),
    ]
    first, last = [await flight for flight in flights]
    expected = model.logprobs(A)

    prompts = [result.prompt_logprobs[0][1] for result in (first, last)]
    of_tokens = np.concatenate([each.token_logprobs for each in prompts])
    assert np.allclose(of_tokens, expected[torch.arange(12), A[1:]], atol=1e-4)
    top = np.concatenate([each.top_ids for each in prompts])
    assert top.tolist() == expected[:-1].topk(2).indices.tolist()
    assert last.logprobs.token_logprobs.tolist() == pytest.approx([float(expected[-1].max())], abs=1e-4)
    assert last.logprobs.ranks.tolist() == [1]
    assert last.logprobs.top_ids.tolist() == [expected[-1].topk(3).indices.tolist()]


@pytest.mark.parametrize("num_cuts", [0, 2])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, frequency_penalty=0.5),
        SamplingParams(temperature=0, bad_words=((5,), (7, 8))),
        SamplingParams(temperature=0, logit_bias=((5, 30.0),)),
    ],
)
async def test_rows_that_the_host_samples(params: SamplingParams, num_cuts: int, model: Model) -> None:
    """Their tokens are those of the device's sampler, and come back with the next plan."""
    runner = make_runner(model.folder, samples_on_host=True, num_cuts=num_cuts)
    host = PlanHost(runner)
    on_device = await host.generate(0, A, 4, params=params)

    tokens = []
    fields: dict[str, Any] = {
        "joins": (join(1, A, params=params),),
        "table_writes": host.table(1, 24),
        "chunks": (chunk_of(1, A, 0, 13),),
    }
    for step in range(4):
        result = await host.launch(**fields, deferred=np.array([True]), logprobs_k=1)
        tokens += tokens_of(result)
        position = len(A) + step
        fields = {"token_writes": [(1, position, tokens[-1])], "rows": [(1, position)]}
    await runner.aclose()

    assert tokens == on_device
    assert result.logprobs.ranks.shape == (1,)


async def test_the_host_samples_rows_that_lie_apart(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row and a prompt's end, another prompt's chunk between them; the memory for it was there at the start."""
    runner = make_runner(model.folder, samples_on_host=True)
    host = PlanHost(runner)
    first = await host.prefill(1, A)[-1]

    def allocate(*size: int, dtype: torch.dtype) -> torch.Tensor:
        raise AssertionError("pinned memory is allocated after the start")

    monkeypatch.setattr(runner._device, "pinned", allocate, raising=False)
    result = await host.launch(
        rows=[(1, len(A))],
        joins=(join(0, A), join(2, B)),
        table_writes=host.table(0, 16) + host.table(2, 16),
        chunks=(chunk_of(0, A, 0, 5), chunk_of(2, B, 0, len(B))),
        deferred=np.array([True, True]),
    )
    await runner.aclose()

    assert tokens_of(first) + tokens_of(result) == [*model.greedy(A, 2), *model.greedy(B, 1)]


async def test_an_invalid_row_fails_alone(host: PlanHost, model: Model) -> None:
    """Who reads a poisoned block gets FLAG_INVALID; the sequence beside it its own tokens."""
    host.prefill(0, A, room=16)
    writes = host.table(1, 24)
    host.launch(joins=(join(1, A),), table_writes=writes, chunks=(chunk_of(1, A, 0, 13),))
    await host.launch(rows=[(0, len(A))])
    host.poison([writes[0][2]])

    results = [await host.launch(rows=[(0, len(A) + 1 + step), (1, len(A) + step)]) for step in range(2)]

    assert [result.flags.tolist() for result in results] == [[0, FLAG_INVALID], [0, FLAG_DONE]]
    assert [tokens_of(result)[0] for result in results] == model.greedy(A, 4)[2:]


async def test_a_plan_without_tokens_changes_the_table_only(host: PlanHost, model: Model) -> None:
    """Its flight lands with no rows."""
    result = await host.launch(joins=(join(0, A),), table_writes=host.table(0, 16))
    assert result.tokens.shape == (0, 1)

    assert tokens_of(await host.launch(chunks=(chunk_of(0, A, 0, 13),))) == model.greedy(A, 1)


async def test_reference_mode_gives_the_same_bits_in_any_batch(tmp_path: Path) -> None:
    """Log-probabilities of a sequence alone, and in chunks and rows beside another one."""
    runner = make_runner(
        save(tiny_model(num_hidden_layers=1), tmp_path / "tiny"), Sizes(max_num_tokens=16), reference=True
    )
    host = PlanHost(runner)
    tokens = A[:6]
    host.launch(joins=(join(0, tokens),), table_writes=host.table(0, 16))
    prompt = await host.launch(chunks=(chunk_of(0, tokens, 0, 6, k=0),))
    row = await host.launch(rows=[(0, 6)], logprobs_k=0)
    alone = [*of_prompt(prompt), *of_rows(row)]

    host.launch(joins=(join(1, B), join(2, tokens)), table_writes=host.table(1, 24) + host.table(2, 16))
    first = await host.launch(chunks=(chunk_of(2, tokens, 0, 1, k=0), chunk_of(1, B, 0, 9)))
    rest = await host.launch(rows=[(1, 9)], chunks=(chunk_of(2, tokens, 1, 6, k=0),))
    rows = await host.launch(rows=[(1, 10), (2, 6)], logprobs_k=0)
    beside = [*of_prompt(first), *of_prompt(rest), of_rows(rows)[1]]
    await runner.aclose()

    assert beside == alone


def of_prompt(result: BatchResult) -> list[float]:
    found: list[float] = result.prompt_logprobs[0][1].token_logprobs.tolist()
    return found


def of_rows(result: BatchResult) -> list[float]:
    assert result.logprobs is not None
    found: list[float] = result.logprobs.token_logprobs.tolist()
    return found


async def test_a_lost_device_is_told_from_a_failed_launch(host: PlanHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device says which it is; later steps go on if it is alive."""

    def broken(plan: BatchPlan) -> None:
        raise RuntimeError("no such kernel")

    with monkeypatch.context() as patch:
        patch.setattr(host.runner._steps, "size_of", broken)
        with pytest.raises(RuntimeError, match="no such kernel"):
            host.prefill(0, A)
        patch.setattr(host.runner._device, "explain", lambda error: DeviceLost(str(error)), raising=False)
        with pytest.raises(DeviceLost, match="no such kernel"):
            host.prefill(0, A)
    assert len((await host.prefill(1, A)[-1]).tokens) == 1
    assert host.runner.statistics()["steps_failed"] == 2


@pytest.mark.parametrize("what", ["step", "table"])
async def test_a_launch_that_could_not_be_enqueued_leaves_no_words(
    what: str, host: PlanHost, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither to the next launches, which take the arrays in the device's turn, nor on the device."""
    steps = host.runner._steps

    def fails() -> None:
        raise RuntimeError("no room for it")

    for _ in range(2):
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no room"):
            if what == "table":
                patch.setattr(steps, "apply_words", fails)
                host.launch(joins=(join(1, B),), table_writes=host.table(1, 16))
            else:
                patch.setattr(steps, "step", lambda size: replace(CudaSteps.step(steps, size), replays=(fails,)))
                host.prefill(1, B)

    assert await host.generate(0, A, 5) == model.greedy(A, 5)


async def test_a_step_without_its_logprobs_ends_as_any(host: PlanHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its flight: what it computes is on its way already. The next ones go on."""
    with monkeypatch.context() as patch:
        patch.setattr(host.runner._logprobs, "compute", lambda *args: 1 / 0)
        flight = host.launch(joins=(join(3, B),), chunks=(chunk_of(3, B, 0, 9),), logprobs_k=0)

    with pytest.raises(ZeroDivisionError):
        await flight
    assert len((await host.prefill(1, A)[-1]).tokens) == 1
    assert host.runner.statistics()["steps_failed"] == 1


async def test_a_launch_that_breaks_off_before_its_event_holds_its_array(
    host: PlanHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows when the device reads that: before the array's next turn the stream is waited for, once."""
    runner, num_waits = host.runner, [0]
    synchronize, num_arrays = runner._device.synchronize, runner._steps.limits.ring_steps

    def counted() -> None:
        num_waits[-1] += 1
        synchronize()

    monkeypatch.setattr(runner._device, "synchronize", counted, raising=False)
    with monkeypatch.context() as patch:
        patch.setattr(runner._device, "record", lambda **options: 1 / 0, raising=False)
        with pytest.raises(ZeroDivisionError):
            host.launch(leaves=[3])
    for _ in range(2 * num_arrays):
        num_waits.append(0)
        await host.launch(leaves=[3])

    assert num_waits == [0] * num_arrays + [1] + [0] * num_arrays


async def test_no_launch_waits_for_the_whole_stream(host: PlanHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each array of words has its own step's event."""
    num_waits = [0]

    def counted() -> None:
        num_waits[0] += 1

    monkeypatch.setattr(host.runner._device, "synchronize", counted, raising=False)
    await host.generate(0, A, 2 * host.runner._steps.limits.ring_steps)

    assert num_waits == [0]


async def test_nothing_is_launched_after_closing(host: PlanHost) -> None:
    """A closed runner says so."""
    await host.runner.aclose()

    with pytest.raises(DeviceLost, match="closed"):
        host.prefill(0, A)


def test_reference_mode_has_a_bound_of_tokens(model: Model) -> None:
    """Said before anything is loaded, with what to lower."""
    with pytest.raises(ModelError, match=r"scheduler\.max_num_batched_tokens is 8193; .* at most 8192 tokens a step"):
        load_cuda_runner(ModelOptions(reference=True), SchedulerOptions(max_num_batched_tokens=8193), model.folder)


class _Closing:
    """A part of a runner that notes its closing, and fails at it where it has an ``error``."""

    def __init__(self, closed: list[str], name: str, error: BaseException | None = None) -> None:
        self._closed, self._name, self._error = closed, name, error

    def close(self) -> None:
        self._closed.append(self._name)
        if self._error is not None:
            raise self._error

    async def aclose(self) -> None:
        self.close()


@pytest.mark.parametrize("error", [RuntimeError(), asyncio.CancelledError()], ids=["fails", "is cancelled"])
@pytest.mark.parametrize("broken", ["watcher", "old watcher", "sampler"])
async def test_everything_is_closed_whatever_becomes_of_one(
    host: PlanHost, monkeypatch: pytest.MonkeyPatch, broken: str, error: BaseException
) -> None:
    """The watcher first, so that the sampler gets what the device had for it; and what went wrong comes out."""
    closed: list[str] = []

    def part(name: str) -> _Closing:
        return _Closing(closed, name, error if name == broken else None)

    with monkeypatch.context() as patch:
        patch.setattr(host.runner, "_watcher", part("watcher"))
        patch.setattr(host.runner, "_old_watchers", [part("old watcher"), part("older watcher")])
        patch.setattr(host.runner, "_host_sampler", part("sampler"))
        with pytest.raises(type(error)):
            await host.runner.aclose()

    assert (closed[0], sorted(closed), closed[-1]) == (
        "watcher",
        ["old watcher", "older watcher", "sampler", "watcher"],
        "sampler",
    )
