"""Two streams of a GPU as one device: on a GPU, or in Triton's interpreter, where they take turns."""

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parent.parent))

from cuda_builders import RING_STEPS, PlanHost, chunk_of, join, make_streams, tokens_of
from families import hf_logits, hf_model, prompt, save

from aserve.core.plan import MAIN_STREAM, PREFILL_STREAM
from aserve.model.cuda_streams import CudaStreams

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow) encountered:RuntimeWarning"),
]


A, B = prompt(13, seed=3), prompt(9, seed=1)


class Model:
    """A tiny model's folder, and transformers' greedy tokens."""

    def __init__(self, folder: Path) -> None:
        self._model = hf_model("llama", num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=16)
        self.folder = save(self._model, folder)

    def greedy(self, tokens: list[int], count: int) -> list[int]:
        found = list(tokens)
        for _ in range(count):
            found.append(int(hf_logits(self._model, found)[-1].argmax()))
        return found[len(tokens) :]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("streams"))


@pytest.fixture
async def host(model: Model) -> AsyncIterator[PlanHost]:
    runner = make_streams(model.folder)
    yield PlanHost(runner)
    await runner.aclose()


def new(host: PlanHost, slot: int, tokens: list[int], end: int = 64) -> dict[str, Any]:
    """A sequence and the first chunk of its prompt."""
    return {
        "joins": (join(slot, tokens),),
        "table_writes": host.table(slot, 32),
        "chunks": (chunk_of(slot, tokens, 0, end),),
        "stream": PREFILL_STREAM,
    }


async def test_rows_go_on_beside_chunks(host: PlanHost, model: Model) -> None:
    """One sequence decodes on its stream while another one's prompt comes on the other; then both decode."""
    first = tokens_of(await host.launch(**new(host, 0, A)))
    chunks = [host.launch(**new(host, 3, B, 5))]
    rows = [host.launch(rows=[(0, len(A) + step)]) for step in range(2)]
    chunks.append(host.launch(chunks=(chunk_of(3, B, 5, 9),), stream=PREFILL_STREAM))
    results = [tokens_of(await flight) for flight in (*rows, *chunks)]
    both = tokens_of(await host.launch(rows=[(0, len(A) + 2), (3, len(B))]))

    a, b = model.greedy(A, 4), model.greedy(B, 2)
    assert [first, *results, both] == [[a[0]], [a[1]], [a[2]], [], [b[0]], [a[3], b[1]]]


async def test_many_rows_land_beside_one_chunk(host: PlanHost, model: Model) -> None:
    """More steps than the ring has places, launched and landed between a chunk's launch and its landing."""
    await host.launch(**new(host, 1, A))
    chunk = host.launch(**new(host, 2, B))
    count = RING_STEPS + 2
    rows = [tokens_of(await host.launch(rows=[(1, len(A) + step)]))[0] for step in range(count)]

    assert rows == model.greedy(A, count + 1)[1:]
    assert tokens_of(await chunk) == model.greedy(B, 1)


async def test_a_slot_changes_hands_on_the_prefill_stream(host: PlanHost, model: Model) -> None:
    """The old owner's rows have landed; its leave and the next join come with the same chunk."""
    await host.launch(**new(host, 0, A))
    await host.launch(rows=[(0, len(A))])
    tokens = tokens_of(await host.launch(leaves=[0], **new(host, 0, B)))
    tokens += tokens_of(await host.launch(rows=[(0, len(B))]))

    assert tokens == model.greedy(B, 2)


async def test_a_prefix_is_read_by_both_streams(host: PlanHost, model: Model) -> None:
    """A block that has landed is in the context of a decode row and of a chunk at once."""
    await host.launch(**(first := new(host, 0, A)))
    shared = [first["table_writes"][0][2]]
    other = A[:8] + B
    chunk = host.launch(
        joins=(join(1, other, position=8),),
        table_writes=host.table(1, 24, shared),
        chunks=(chunk_of(1, other, 8, len(other)),),
        stream=PREFILL_STREAM,
    )
    row = host.launch(rows=[(0, len(A))])

    assert [tokens_of(await row), tokens_of(await chunk)] == [model.greedy(A, 2)[1:], model.greedy(other, 1)]


async def test_the_host_samples_rows_of_both_streams(model: Model) -> None:
    """Each stream's logits have memory of their own; tokens come back through the next plan of the main stream."""
    runner = make_streams(model.folder, samples_on_host=True)
    host = PlanHost(runner)
    deferred = np.array([True])
    token = tokens_of(await host.launch(**new(host, 0, A), deferred=deferred))[0]
    chunk = host.launch(**new(host, 1, B), deferred=deferred)
    row = host.launch(rows=[(0, len(A))], token_writes=[(0, len(A), token)], deferred=deferred)

    assert [[token], tokens_of(await row), tokens_of(await chunk)] == [
        *([each] for each in model.greedy(A, 2)),
        model.greedy(B, 1),
    ]
    await runner.aclose()


async def test_what_launches_left_goes_on_on_both(host: PlanHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stream's parts are its own."""
    assert isinstance(host.runner, CudaStreams)
    went_on = []
    for stream, runner in host.runner._runners.items():
        monkeypatch.setattr(runner, "go_on", lambda stream=stream: went_on.append(stream))
    host.runner.go_on()

    assert sorted(went_on) == sorted([MAIN_STREAM, PREFILL_STREAM])


async def test_figures_are_of_both(host: PlanHost) -> None:
    """Steps of either kind, totals of what they computed; what both share once."""
    await host.launch(**new(host, 0, prompt(7, seed=2)))
    await host.launch(rows=[(0, 7)], stream=MAIN_STREAM)
    figures = host.runner.statistics()

    assert (figures["steps_prefill"], figures["steps_decode"], figures["tokens_computed"]) == (1, 1, 8)
    assert figures["kv_bytes"] > 0
    assert figures["launches"] == 2


@pytest.mark.parametrize("error", [RuntimeError(), asyncio.CancelledError()], ids=["fails", "is cancelled"])
async def test_the_second_runner_is_closed_whatever_becomes_of_the_first(error: BaseException) -> None:
    """And what went wrong comes out all the same."""
    closed = []

    class Closing:
        def __init__(self, name: str, error: BaseException | None = None) -> None:
            self._name, self._error = name, error

        async def aclose(self) -> None:
            closed.append(self._name)
            if self._error is not None:
                raise self._error

    with pytest.raises(type(error)):
        await CudaStreams(Closing("main", error), Closing("prefill")).aclose()  # type: ignore[arg-type]

    assert closed == ["main", "prefill"]
