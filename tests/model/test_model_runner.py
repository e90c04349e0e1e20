"""The CPU runner: plans in, flights out, over a model whose next token is a hash of every token that it reads."""

import asyncio
import itertools
import threading
import zlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from aserve import faults
from aserve.core.ids import Epoch, Slot, StepNumber
from aserve.core.plan import FLAG_DONE, FLAG_INVALID, BatchPlan, BatchResult, Chunk, Join
from aserve.core.request import SamplingParams
from aserve.device.thread import DeviceThread
from aserve.engine.ports import Runner, RunnerInfo
from aserve.errors import DeviceLost
from aserve.model.batch import ForwardBatch, KVShape
from aserve.model.config import ModelConfig
from aserve.model.kv_tensors import KVTensors
from aserve.model.runner import CpuRunner, StepFlight

pytestmark = pytest.mark.torch

VOCAB_SIZE = 50
BLOCK_SIZE = 4
GREEDY = SamplingParams(temperature=0)
BROKEN = 13
"""Whoever reads this token gets logits of NaN."""


def logits_after(tokens: Sequence[int]) -> Tensor:
    """float32 [V], a function of all tokens and their order."""
    if BROKEN in tokens:
        return torch.full((VOCAB_SIZE,), float("nan"))
    seed = zlib.crc32(np.array(tokens, np.int32).tobytes())
    logits = np.random.default_rng(seed).normal(0, 2, VOCAB_SIZE).astype(np.float32)
    logits[BROKEN] = -100
    return torch.from_numpy(logits)


class HashModel:
    """Keeps each token's id as its K, and reads its context back through the block tables."""

    config = ModelConfig(model_type="hash", vocab_size=VOCAB_SIZE, max_position_embeddings=64)
    kv_shape = KVShape(num_layers=1, num_kv_heads=1, head_dim=1, dtype=torch.float32)
    weight_bytes = 0

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.began = threading.Event()
        self.num_forwards = 0

    def forward(self, batch: ForwardBatch, kv: KVTensors) -> Tensor:
        self.began.set()
        self.gate.wait()
        self.num_forwards += 1
        keys = kv.layers[0][0, 0].reshape(-1)
        keys[batch.slot_mapping_T] = batch.token_ids_T.to(torch.float32)
        starts = np.array(batch.query_starts)
        rows = []
        for index in batch.logit_rows_R.tolist():
            sequence = int(np.searchsorted(starts, index, side="right")) - 1
            positions = torch.arange(int(batch.positions_T[index]) + 1)
            blocks = batch.block_tables_SB[sequence, positions // BLOCK_SIZE].to(torch.int64)
            rows.append(logits_after(keys[blocks * BLOCK_SIZE + positions % BLOCK_SIZE].int().tolist()))
        return torch.stack(rows) if rows else torch.empty(0, VOCAB_SIZE)


class Host:
    """Makes plans and launches them: the bookkeeping of a scheduler, as little as the tests need."""

    def __init__(self) -> None:
        self.model = HashModel()
        kv = KVTensors.allocate(self.model.kv_shape, num_blocks=32, block_size=BLOCK_SIZE)
        info = RunnerInfo(
            model_name="hash",
            device="cpu",
            vocab_size=VOCAB_SIZE,
            max_model_len=64,
            num_blocks=32,
            block_size=BLOCK_SIZE,
            max_num_seqs=4,
        )
        device = DeviceThread("test-device", setup=lambda: torch.set_num_threads(1))
        self.runner = CpuRunner(model=self.model, kv=kv, info=info, device=device, num_threads=1)
        self._steps = itertools.count(1)

    def launch(self, **fields: Any) -> StepFlight:
        for name in ("leaves", "table_writes", "token_writes", "rows"):
            if name in fields:
                fields[name] = np.array(fields[name], np.int32)
        return self.runner.launch(BatchPlan(step=StepNumber(next(self._steps)), **fields))

    def prefill(self, slot: int, prompt: Sequence[int], *, chunk: int = 64, **changes: Any) -> list[StepFlight]:
        """Join ``slot`` and compute the prompt in chunks, all launched at once; the last flight samples."""
        flights = []
        for start in range(0, len(prompt), chunk):
            first = {"joins": (join(slot, prompt, **changes),), "table_writes": table_of(slot)} if not start else {}
            flights.append(self.launch(chunks=(chunk_of(slot, prompt, start, start + chunk),), **first))
        return flights

    async def generate(self, slot: int, prompt: Sequence[int], num_tokens: int, **changes: Any) -> list[int]:
        """Tokens of one sequence, every step launched before the first lands."""
        flights = self.prefill(slot, prompt, **changes)[-1:]
        flights += [self.launch(rows=[(slot, len(prompt) + step)]) for step in range(num_tokens - 1)]
        return [token for flight in flights for token in tokens_of(await flight)]


@pytest.fixture
async def host() -> AsyncIterator[Host]:
    host = Host()
    yield host
    await host.runner.aclose()


def join(slot: int, prompt: Sequence[int] = (), *, output: Sequence[int] = (), **changes: Any) -> Join:
    arguments: dict[str, Any] = {"params": GREEDY, "position": 0, "seed": 0, "stop_ids": (), "max_length": 64}
    return Join(
        slot=Slot(slot),
        epoch=Epoch(1),
        min_length=0,
        num_prompt_tokens=len(prompt),
        history=np.array([*prompt, *output], np.int32),
        **arguments | changes,
    )


def table_of(slot: int, num_blocks: int = 8) -> list[tuple[int, int, int]]:
    """Eight blocks of its own for each slot, in reverse."""
    return [(slot, index, 8 * slot + num_blocks - index) for index in range(num_blocks)]


def chunk_of(slot: int, prompt: Sequence[int], start: int, stop: int, **changes: Any) -> Chunk:
    last = stop >= len(prompt)
    following = {} if last else {"next_token": prompt[stop]}
    tokens = np.array(prompt[start:stop], np.int32)
    return Chunk(slot=Slot(slot), start=start, tokens=tokens, last=last, **following | changes)


def tokens_of(result: BatchResult) -> list[int]:
    assert result.tokens.dtype == np.int32
    assert result.tokens.shape == (len(result.flags), 1)
    assert result.num_tokens.tolist() == [1] * len(result.flags)
    return result.tokens[:, 0].tolist()


def expected_tokens(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What greedy decoding of the model gives, by its definition."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(logits_after(tokens).argmax()))
    return tokens[len(prompt) :]


PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]


async def test_the_runner_is_a_runner(host: Host) -> None:
    """It has what the engine's seam asks for."""
    runner: Runner = host.runner
    assert runner.info.max_num_seqs == 4


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 64])
async def test_tokens_do_not_depend_on_the_size_of_chunks(host: Host, chunk: int) -> None:
    """Prefill in pieces, then decode with every step launched ahead."""
    assert await host.generate(1, PROMPT, 8, chunk=chunk) == expected_tokens(PROMPT, 8)


async def test_decode_rows_and_chunks_share_a_step(host: Host) -> None:
    """Rows in their order, then the chunks that end a prompt; a partial chunk has no row."""
    (first,) = host.prefill(0, PROMPT)
    token = tokens_of(await first)[0]
    mixed = await host.launch(
        joins=(join(1, [7, 7]), join(2, [8] * 6)),
        table_writes=table_of(1) + table_of(2),
        rows=[(0, len(PROMPT))],
        chunks=(chunk_of(2, [8] * 6, 0, 4), chunk_of(1, [7, 7], 0, 2)),
    )
    expected = [expected_tokens([*PROMPT, token], 1), expected_tokens([7, 7], 1)]
    assert [[token] for token in tokens_of(mixed)] == expected


async def test_a_prefix_that_is_cached_is_not_computed_again(host: Host) -> None:
    """The sequence joins at the hit's end and reads another's block."""
    await host.prefill(0, PROMPT)[-1]
    shared = 8  # slot 0's first block
    flight = host.launch(
        joins=(join(3, PROMPT, position=4),),
        table_writes=[(3, 0, shared), *table_of(3)[1:]],
        chunks=(chunk_of(3, PROMPT, 4, 64),),
    )
    assert tokens_of(await flight) == expected_tokens(PROMPT, 1)


async def test_rows_launched_beyond_the_end_change_nothing(host: Host) -> None:
    """They say done, write into the trash block, and the slot's next owner is not disturbed."""
    expected = expected_tokens(PROMPT, 6)
    stop = expected[2]
    first = host.prefill(0, PROMPT, stop_ids=(stop,))[-1]
    later = [host.launch(rows=[(0, len(PROMPT) + step)]) for step in range(5)]
    results = [await flight for flight in (first, *later)]
    num_good = expected.index(stop) + 1
    assert [token for result in results[:num_good] for token in tokens_of(result)] == expected[:num_good]
    assert [int(result.flags[0]) for result in results] == [0] * (num_good - 1) + [FLAG_DONE] * (7 - num_good)
    newcomer = host.launch(
        leaves=[0], joins=(join(0, [1, 2]),), table_writes=table_of(0), chunks=(chunk_of(0, [1, 2], 0, 2),)
    )
    assert tokens_of(await newcomer) == expected_tokens([1, 2], 1)


async def test_the_length_limit_is_flagged_on_its_token(host: Host) -> None:
    """Eleven tokens in all: the second output of a prompt of nine."""
    first = host.prefill(0, PROMPT, max_length=len(PROMPT) + 2)[-1]
    second = host.launch(rows=[(0, len(PROMPT))])
    assert [int((await flight).flags[0]) for flight in (first, second)] == [0, FLAG_DONE]


async def test_launch_returns_before_the_step_runs(host: Host) -> None:
    """The loop never waits for a forward."""
    host.model.gate.clear()
    flights = host.prefill(0, PROMPT, chunk=3)
    assert [flight.done() for flight in flights] == [False] * 3
    assert host.model.num_forwards == 0
    host.model.gate.set()
    await flights[-1]
    assert [flight.done() for flight in flights] == [True] * 3


async def test_a_failed_step_fails_alone(host: Host) -> None:
    """Its differences are applied all the same, its own sequences are inert, the others go on."""
    await host.prefill(0, PROMPT)[-1]
    await host.prefill(2, [9, 8])[-1]
    with faults.armed("runner.forward", error=MemoryError("no room")):
        failing = host.launch(
            leaves=[2],
            joins=(join(1, [7, 7]), join(3, [5, 6])),
            table_writes=table_of(1) + table_of(3),
            chunks=(chunk_of(1, [7, 7], 0, 2),),
        )
        orphan = host.launch(rows=[(1, 2)])
        other = host.launch(rows=[(0, len(PROMPT))], chunks=(chunk_of(3, [5, 6], 0, 2),))
        with pytest.raises(MemoryError, match="no room"):
            await failing
    assert (await orphan).flags.tolist() == [FLAG_DONE]
    assert tokens_of(await other) == [expected_tokens(PROMPT, 2)[1], *expected_tokens([5, 6], 1)]
    assert (await host.launch(rows=[(2, 3)])).flags.tolist() == [FLAG_DONE]
    assert host.runner.statistics()["steps_failed"] == 1


@pytest.mark.parametrize("point", ["runner.sample", "runner.land"])
async def test_a_fault_after_the_forward_fails_the_step_too(host: Host, point: str) -> None:
    """And nothing runs on from a token that the host never saw."""
    await host.prefill(0, PROMPT)[-1]
    with faults.armed(point):
        failing = host.launch(rows=[(0, len(PROMPT))])
        orphan = host.launch(rows=[(0, len(PROMPT) + 1)])
        with pytest.raises(faults.FaultInjected):
            await failing
    assert (await orphan).flags.tolist() == [FLAG_DONE]


async def test_a_cancellation_in_the_device_thread_does_not_reach_the_loop_as_one(host: Host) -> None:
    """The lander would take it for its own."""
    with faults.armed("runner.forward", "cancel"):
        flight = host.prefill(0, PROMPT)[-1]
        with pytest.raises(RuntimeError, match="CancelledError in the device thread"):
            await flight


async def test_a_launch_that_fails_leaves_no_trace(host: Host) -> None:
    """The fault comes out of launch itself."""
    with faults.armed("runner.launch"), pytest.raises(faults.FaultInjected):
        host.prefill(0, PROMPT)
    assert await host.generate(0, PROMPT, 2) == expected_tokens(PROMPT, 2)


async def test_an_invalid_row_fails_alone_and_stays_inert(host: Host) -> None:
    """Logits of NaN flag their row; the steps that are out already do nothing for it."""
    flights = [
        host.launch(
            joins=(join(0, [1, BROKEN]), join(1, PROMPT)),
            table_writes=table_of(0) + table_of(1),
            chunks=(chunk_of(0, [1, BROKEN], 0, 2), chunk_of(1, PROMPT, 0, 64)),
        ),
        *(host.launch(rows=[(0, 2 + step), (1, len(PROMPT) + step)]) for step in range(2)),
    ]
    results = [await flight for flight in flights]
    assert [result.flags.tolist() for result in results] == [[FLAG_INVALID, 0], [FLAG_DONE, 0], [FLAG_DONE, 0]]
    assert [tokens_of(result)[1] for result in results] == expected_tokens(PROMPT, 3)


SAMPLED = SamplingParams(temperature=1.3, top_p=0.95, frequency_penalty=0.5)


async def test_seeded_sampling_is_the_same_alone_and_in_company(host: Host) -> None:
    """Two sequences of one seed and a third, each by itself and all in one batch."""
    seeds = [5, 5, 6]
    alone = [await host.generate(slot, PROMPT, 6, params=SAMPLED, seed=seeds[slot]) for slot in range(3)]
    together = [
        host.launch(
            leaves=[0, 1, 2],
            joins=tuple(join(slot, PROMPT, params=SAMPLED, seed=seeds[slot]) for slot in range(3)),
            table_writes=[write for slot in range(3) for write in table_of(slot)],
            chunks=tuple(chunk_of(slot, PROMPT, 0, 64) for slot in (2, 0, 1)),
        )
    ]
    together += [host.launch(rows=[(slot, len(PROMPT) + step) for slot in (2, 0, 1)]) for step in range(5)]
    results = [tokens_of(await flight) for flight in together]
    assert [list(column) for column in zip(*results, strict=True)] == [alone[2], alone[0], alone[1]]
    assert alone[0] == alone[1] != alone[2]


async def test_a_preempted_sequence_goes_on_as_if_nothing_had_been(host: Host) -> None:
    """It joins another slot with its history and computes prompt and output again."""
    whole = await host.generate(0, PROMPT, 8, params=SAMPLED, seed=9)
    kept = [*PROMPT, *whole[:4]]
    flights = [
        host.launch(
            joins=(join(3, PROMPT, output=whole[:4], params=SAMPLED, seed=9),),
            table_writes=table_of(3),
            chunks=(chunk_of(3, kept, 0, 64),),
        )
    ]
    flights += [host.launch(rows=[(3, len(kept) + step)]) for step in range(3)]
    assert [tokens_of(await flight)[0] for flight in flights] == whole[4:]


async def test_the_hosts_sampler_gives_the_devices_tokens(host: Host) -> None:
    """Each token comes back in the next plan, and counts for penalties as if sampled here."""
    expected = await host.generate(0, PROMPT, 6, params=SAMPLED, seed=3)
    result = await host.launch(
        joins=(join(1, PROMPT, params=SAMPLED, seed=3, max_length=len(PROMPT) + 6),),
        table_writes=table_of(1),
        chunks=(chunk_of(1, PROMPT, 0, 64),),
        deferred=np.array([True]),
    )
    tokens, flags = tokens_of(result), result.flags.tolist()
    for position in range(len(PROMPT), len(PROMPT) + 5):
        result = await host.launch(
            token_writes=[(1, position, tokens[-1])], rows=[(1, position)], deferred=np.array([True])
        )
        tokens += tokens_of(result)
        flags += result.flags.tolist()
    assert (tokens, flags) == (expected, [0] * 5 + [FLAG_DONE])


async def test_deferred_rows_and_others_come_back_in_row_order(host: Host) -> None:
    """One row in three is sampled by the host; tokens and log-probabilities are where they belong."""
    prompts = [[slot + 1, slot + 2] for slot in range(3)]
    result = await host.launch(
        joins=tuple(join(slot, prompts[slot]) for slot in range(3)),
        table_writes=[write for slot in range(3) for write in table_of(slot)],
        chunks=tuple(chunk_of(slot, prompts[slot], 0, 2) for slot in range(3)),
        deferred=np.array([False, True, False]),
        logprobs_k=2,
    )
    assert tokens_of(result) == [expected_tokens(prompt, 1)[0] for prompt in prompts]
    assert result.logprobs is not None
    expected = torch.stack([logits_after(prompt) for prompt in prompts]).log_softmax(-1)
    np.testing.assert_allclose(result.logprobs.top_logprobs, expected.topk(2).values, rtol=1e-5)
    assert result.logprobs.top_ids[:, 0].tolist() == tokens_of(result)


async def test_a_fault_in_the_hosts_sampler_fails_the_step(host: Host) -> None:
    """And the next step lands."""
    with faults.armed("runner.land"):
        flight = host.launch(
            joins=(join(0, PROMPT),),
            table_writes=table_of(0),
            chunks=(chunk_of(0, PROMPT, 0, 64),),
            deferred=np.array([True]),
        )
        with pytest.raises(faults.FaultInjected):
            await flight
    assert await host.generate(1, PROMPT, 2) == expected_tokens(PROMPT, 2)


@pytest.mark.parametrize("chunk", [4, 64])
async def test_prompt_logprobs_cover_the_prompt_once(host: Host, chunk: int) -> None:
    """n for a chunk whose follower is known, n - 1 for the last; the sampled token has its own."""
    plans = []
    for start in range(0, len(PROMPT), chunk):
        first = {"joins": (join(0, PROMPT),), "table_writes": table_of(0)} if not start else {}
        asked = chunk_of(0, PROMPT, start, start + chunk, prompt_logprobs_k=3)
        plans.append(host.launch(chunks=(asked,), logprobs_k=0, **first))
    results = [await flight for flight in plans]
    found = [(index, logprobs) for result in results for index, logprobs in result.prompt_logprobs]
    expected = torch.stack([logits_after(PROMPT[:end]) for end in range(1, len(PROMPT))]).log_softmax(-1)
    chosen = expected.gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]
    assert [index for index, _ in found] == [0] * len(results)
    np.testing.assert_allclose(np.concatenate([part.token_logprobs for _, part in found]), chosen, rtol=1e-5)
    top_ids = np.concatenate([part.top_ids for _, part in found])
    assert top_ids.tolist() == expected.topk(3).indices.tolist()
    sampled = results[-1].logprobs
    assert sampled is not None
    assert (sampled.ranks.tolist(), sampled.top_ids.shape) == ([1], (1, 0))


async def test_a_plan_without_tokens_lands(host: Host) -> None:
    """Only a leave; nothing to compute."""
    await host.prefill(0, PROMPT)[-1]
    result = await host.launch(leaves=[0])
    assert (tokens_of(result), host.model.num_forwards) == ([], 1)


async def test_positions_that_differ_from_the_plans_fail_the_step(host: Host) -> None:
    """A fault of ours, found before anything is computed."""
    await host.prefill(0, PROMPT)[-1]
    with pytest.raises(AssertionError, match="is at position 9, the plan says 11"):
        await host.launch(rows=[(0, 11)])


async def test_warming_up_changes_nothing(host: Host) -> None:
    """It runs before anybody has joined, on the trash block."""
    await asyncio.to_thread(host.runner.warm_up, 16)
    assert host.model.num_forwards == 4
    assert await host.generate(0, PROMPT, 3) == expected_tokens(PROMPT, 3)


async def test_closing_lands_what_is_out_and_refuses_more() -> None:
    """Both threads end; closing twice is fine."""
    host = Host()
    flight = host.launch(
        joins=(join(0, PROMPT),),
        table_writes=table_of(0),
        chunks=(chunk_of(0, PROMPT, 0, 64),),
        deferred=np.array([True]),
    )
    await host.runner.aclose()
    await host.runner.aclose()
    assert tokens_of(await flight) == expected_tokens(PROMPT, 1)
    with pytest.raises(DeviceLost):
        host.prefill(1, PROMPT)


class BadPart:
    """A part of a runner, or two of them, that notes its closing and fails at it where there is an error for it."""

    def __init__(self, closed: list[str], errors: dict[str, BaseException]) -> None:
        self._closed, self._errors = closed, errors

    def _close(self, name: str) -> None:
        self._closed.append(name)
        if name in self._errors:
            raise self._errors[name]

    async def end(self) -> None:
        self._close("device")

    async def aclose(self) -> None:
        self._close("sampler")

    def close_bells(self) -> None:
        self._close("bells")


@pytest.mark.parametrize(
    "errors",
    [
        {"device": asyncio.CancelledError()},
        {"sampler": RuntimeError("no thread")},
        {"device": RuntimeError("no thread"), "sampler": RuntimeError("no thread"), "bells": OSError("no descriptor")},
    ],
    ids=", ".join,
)
async def test_every_part_is_closed_whatever_becomes_of_the_others(
    host: Host, monkeypatch: pytest.MonkeyPatch, errors: dict[str, BaseException]
) -> None:
    """The threads first, for they ring the bells; the last error comes out."""
    closed: list[str] = []
    part = BadPart(closed, errors)
    *_, last = errors.values()
    with monkeypatch.context() as patch:
        patch.setattr(host.runner, "_device", part)
        patch.setattr(host.runner, "_host_sampler", part)
        with pytest.raises(type(last)) as raised:
            await host.runner.aclose()
    assert (closed, raised.value) == (["device", "sampler", "bells"], last)


async def test_a_cancelled_closing_waits_for_the_step_that_runs_alone() -> None:
    """What is queued behind it fails and is not computed; a sampler that the step makes meanwhile is ended too."""
    host = Host()
    host.model.gate.clear()
    running = host.launch(
        joins=(join(0, PROMPT),),
        table_writes=table_of(0),
        chunks=(chunk_of(0, PROMPT, 0, 64),),
        deferred=np.array([True]),
    )
    (queued,) = host.prefill(1, PROMPT)
    await asyncio.to_thread(host.model.began.wait)
    closing = asyncio.create_task(host.runner.aclose())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.sleep(0)
    host.model.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert (running.done(), queued.done()) == (True, True)
    assert tokens_of(await running) == expected_tokens(PROMPT, 1)
    with pytest.raises(DeviceLost, match=r"The device is closed\."):
        await queued
    sampler = host.runner._host_sampler
    assert sampler is not None
    assert (host.model.num_forwards, sampler._thread._thread.is_alive()) == (1, False)


async def test_statistics_count_steps_by_kind_and_tokens(host: Host) -> None:
    """Prefill, decode and mixed steps; tokens computed and sampled."""
    await host.generate(0, PROMPT, 3)
    await host.launch(
        rows=[(0, len(PROMPT) + 2)],
        joins=(join(1, PROMPT),),
        table_writes=table_of(1),
        chunks=(chunk_of(1, PROMPT, 0, 4),),
    )
    figures = host.runner.statistics()
    counts = [figures[f"steps_{kind}"] for kind in ("prefill", "decode", "mixed")]
    assert counts == [1, 2, 1]
    assert (figures["tokens_computed"], figures["tokens_sampled"], figures["threads"]) == (9 + 2 + 5, 4, 1)
