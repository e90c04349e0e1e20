"""Steps that are launched in parts, with turns of the loop between them: on a GPU, or in Triton's interpreter."""

import asyncio
import gc
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parent.parent))

from cuda_builders import EagerDevice, PlanHost, chunk_of, join, make_runner, tokens_of
from families import hf_model, prompt, save

from aserve import faults
from aserve.device.graphs import CudaDevice
from aserve.errors import DeviceLost
from aserve.model import cuda_decoder
from aserve.model.kernels.differences import HEADER_WORDS
from aserve.model.kernels.slots import POSITION

pytestmark = [
    pytest.mark.torch,
    # The interpreter, which is NumPy, computes both sides of a choice.
    pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow) encountered:RuntimeWarning"),
]

A, B = prompt(13, seed=3), prompt(9, seed=1)
NUM_LAYERS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    model = hf_model("llama", num_hidden_layers=NUM_LAYERS, num_attention_heads=2, num_key_value_heads=1, head_dim=16)
    yield save(model, tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def host(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[PlanHost]:
    monkeypatch.setattr(cuda_decoder, "LAYERS_A_LAUNCH", 1)
    runner = make_runner(folder, num_cuts=NUM_LAYERS - 1)
    yield PlanHost(runner)
    await runner.aclose()


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


class HeldEvent:
    """Is reached when the test says so."""

    def __init__(self) -> None:
        self.is_reached = False

    def query(self) -> bool:
        return self.is_reached

    def synchronize(self) -> None: ...


@pytest.mark.parametrize(
    ("long", "short", "expected"),
    [(1, 2, [NUM_LAYERS - 1, 1]), (2, 1, [1, NUM_LAYERS - 1]), (NUM_LAYERS, NUM_LAYERS, [0, 0])],
)
def test_a_long_step_is_cut_between_its_layers(
    long: int, short: int, expected: list[int], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After so many layers each, not behind the last; the short form after a number of its own."""
    monkeypatch.setattr(cuda_decoder, "LAYERS_A_LAUNCH", long)
    monkeypatch.setattr(cuda_decoder, "SHORT_LAYERS_A_LAUNCH", short)
    cuts: list[int] = []
    monkeypatch.setattr(EagerDevice, "cut", lambda device: cuts.append(1))
    monkeypatch.setattr(CudaDevice, "cut", lambda device: cuts.append(1))
    runner = make_runner(folder, has_short_form=True)
    steps = runner._steps
    found = []
    for size in (next(size for size in steps.sizes() if size[2]), (1, 1, False)):
        cuts.clear()
        with torch.inference_mode(), runner._device.scope():
            steps._body(size)()
        found.append(len(cuts))

    assert found == expected


@pytest.mark.parametrize("has_short_form", [False, True])
async def test_tokens_are_those_of_steps_in_one_part(
    has_short_form: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launched far ahead, where the next launch comes before the loop's turn, and each by itself."""
    whole = PlanHost(make_runner(folder, has_short_form=has_short_form))
    expected = await whole.generate(0, A, 2)
    await whole.runner.aclose()
    monkeypatch.setattr(cuda_decoder, "LAYERS_A_LAUNCH", 1)
    monkeypatch.setattr(cuda_decoder, "SHORT_LAYERS_A_LAUNCH", 1)
    host = PlanHost(make_runner(folder, has_short_form=has_short_form, num_cuts=NUM_LAYERS - 1))
    ahead = await host.generate(1, A, 2, chunk=4)
    alone = tokens_of(await host.prefill(2, A)[-1]) + tokens_of(await host.launch(rows=[(2, len(A))]))
    await host.runner.aclose()

    assert ahead == alone == expected


async def test_the_loop_gets_its_turn_before_each_part(host: PlanHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """One part a turn; until the last, nothing is watched, and the step counts as out."""
    runner, turn = host.runner, [0]
    turns: list[int] = []
    monkeypatch.setattr(runner, "_note_go", lambda seconds, plan: turns.append(turn[0]))
    (flight,) = host.prefill(0, A)
    watched_at_once, out_at_once = len(runner._watcher or ()), runner.num_out
    for turn[0] in range(1, NUM_LAYERS + 1):
        await asyncio.sleep(0)

    assert (watched_at_once, out_at_once) == (0, 1)
    assert turns == list(range(NUM_LAYERS))
    assert len(tokens_of(await flight)) == 1
    assert runner.num_out == 0


async def test_a_launch_waits_behind_parts_that_are_left(host: PlanHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds the loop for none of them: each has a turn of its own, in the order of launches."""
    runner = host.runner
    goes: list[tuple[int, float]] = []
    monkeypatch.setattr(runner, "_note_go", lambda seconds, plan: goes.append((plan.step, seconds)))
    flights = host.prefill(0, A)
    with faults.armed("runner.launch_rest", "delay", times=NUM_LAYERS - 1, delay_s=0.05):
        flights += [host.launch(rows=[(0, len(A) + step)]) for step in range(2)]
        out, at_once = runner.num_out, len(goes)
        await turns(NUM_LAYERS - 1)
    await turns(2 * NUM_LAYERS)

    assert (out, at_once) == (3, 3)
    assert [step for step, _ in goes] == [1, 2, 3, *[1] * (NUM_LAYERS - 1), *[2] * NUM_LAYERS, *[3] * NUM_LAYERS]
    assert min(seconds for _, seconds in goes[3 : 3 + NUM_LAYERS - 1]) >= 0.05
    assert [len(tokens_of(await flight)) for flight in flights] == [1] * 3


async def test_whoever_keeps_the_loop_can_have_parts_enqueued(host: PlanHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """One a call, in order, each noted as a go; the loop's turns have what is left, and nothing is left to call for."""
    goes: list[int] = []
    monkeypatch.setattr(host.runner, "_note_go", lambda seconds, plan: goes.append(plan.step))
    flights = [*host.prefill(0, A), host.launch(rows=[(0, len(A))])]
    for _ in range(NUM_LAYERS):
        host.runner.go_on()
    at_once = list(goes)
    await turns(2 * NUM_LAYERS)
    host.runner.go_on()

    assert at_once == [1, 2, *[1] * (NUM_LAYERS - 1), 2]
    assert goes == [*at_once, *[2] * (NUM_LAYERS - 1)]
    assert [len(tokens_of(await flight)) for flight in flights] == [1, 1]


async def test_no_garbage_is_collected_while_a_part_is_enqueued(
    host: PlanHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a turn of its own; the launch itself is the engine's, which sees to it."""
    go, was_on = host.runner._go, []

    def noted(rest: Any) -> None:
        was_on.append(gc.isenabled())
        go(rest)

    monkeypatch.setattr(host.runner, "_go", noted)
    gc.enable()
    (flight,) = host.prefill(0, A)
    await flight

    assert was_on == [True] + [False] * (NUM_LAYERS - 1)
    assert gc.isenabled()


async def test_more_launches_than_arrays_of_words(host: PlanHost) -> None:
    """Those that wait are enqueued at once then. None is lost, and each has its own words."""
    num_launches = len(host.runner._steps.arrays_RW) + 2  # the first one waits for nothing
    flights = host.prefill(0, A[:num_launches], chunk=1)
    found = [token for flight in flights for token in tokens_of(await flight)]
    for step in range(5):
        found += tokens_of(await host.launch(rows=[(0, num_launches + step)]))

    assert len(flights) == num_launches
    assert found == await host.generate(1, A[:num_launches], 6)


async def test_a_change_of_the_table_alone_takes_parts_along(host: PlanHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes behind what was launched before it, and is done when it was launched. One time is noted for all that."""
    runner = host.runner
    goes: list[float] = []
    monkeypatch.setattr(runner, "_note_go", lambda seconds, plan: goes.append(seconds))
    (first,) = host.prefill(0, A)
    with faults.armed("runner.launch_rest", "delay", times=NUM_LAYERS - 1, delay_s=0.05):
        second = host.launch(leaves=[0])

    assert len(goes) == 2
    assert goes[1] >= (NUM_LAYERS - 1) * 0.05
    assert [len((await flight).tokens) for flight in (first, second)] == [1, 0]
    await turns(NUM_LAYERS)
    assert len(goes) == 2


async def test_chunks_beside_another_step_wait_for_the_loop_with_all_parts(
    host: PlanHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their words are written at once and fetched later; rows begin in the same go, if no parts are left."""
    runner, turn = host.runner, [0]

    def slots(count: int) -> list[int]:
        """Of the step whose words were fetched last."""
        runner._device.synchronize()
        found: list[int] = runner._steps.words[HEADER_WORDS:][:count].tolist()
        return found

    goes: list[int] = []
    monkeypatch.setattr(runner, "_note_go", lambda seconds, plan: goes.append(turn[0]))
    event = HeldEvent()
    with monkeypatch.context() as patch:
        patch.setattr(runner._device, "record", lambda *, blocking=False: event, raising=False)
        (first,) = host.prefill(0, A)
        await turns(NUM_LAYERS - 1)
    (second,) = host.prefill(1, A[:5])  # while the first one is out, of which nothing is left to enqueue
    goes.clear()
    before = slots(1)
    for turn[0] in range(1, NUM_LAYERS + 1):
        await turns(1)
    after_chunks = slots(1)
    event.is_reached = True
    tokens = [tokens_of(await flight) for flight in (first, second)]
    third = host.launch(rows=[(0, len(A)), (1, 5)])
    after_rows = slots(2)

    assert goes[:NUM_LAYERS] == list(range(1, NUM_LAYERS + 1))
    assert (before, after_chunks, after_rows) == ([0], [1], [0, 1])
    assert [len(each) for each in tokens] == [1, 1]
    assert len(tokens_of(await third)) == 2


async def test_a_fault_in_the_rest_ends_that_flight_alone(host: PlanHost) -> None:
    """What was launched before it and after it lands."""
    (first,) = host.prefill(0, A)
    await turns(NUM_LAYERS)
    with faults.armed("runner.launch_rest", error=MemoryError("no room")):
        (second,) = host.prefill(1, A)
        await turns(1)
    (third,) = host.prefill(2, A)

    with pytest.raises(MemoryError, match="no room"):
        await second
    assert len(tokens_of(await first)) == len(tokens_of(await third)) == 1
    assert host.runner.statistics()["steps_failed"] == 1


async def test_a_step_that_breaks_off_ends_behind_what_was_enqueued(
    host: PlanHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks go to others when it has ended, and its first parts may still write to them."""
    event = HeldEvent()
    monkeypatch.setattr(host.runner._device, "record", lambda *, blocking=False: event, raising=False)
    with faults.armed("runner.launch_rest", error=MemoryError("no room")):
        (flight,) = host.prefill(0, A)
        await turns(10)
    was_done, num_out = flight.done(), host.runner.num_out
    event.is_reached = True

    with pytest.raises(MemoryError, match="no room"):
        await flight
    assert (was_done, num_out, host.runner.num_out) == (False, 1, 0)


async def test_a_newcomer_whose_step_was_never_begun_has_its_slot(host: PlanHost) -> None:
    """The next step, which may list it already, does not run with what the slot's last owner left there."""
    runner = host.runner
    await host.prefill(0, A)[-1]
    (other,) = host.prefill(1, A)
    writes = host.table(0, 16)
    with faults.armed("runner.launch_rest", after=NUM_LAYERS - 1, error=MemoryError("no room")):
        newcomer = host.launch(
            leaves=[0], joins=(join(0, B),), table_writes=writes, chunks=(chunk_of(0, B, 0, len(B)),)
        )
        beside = host.launch(rows=[(1, len(A))])
        await turns(2 * NUM_LAYERS)
    behind = host.launch(rows=[(1, len(A) + 1)])  # whose words are behind those that were for the newcomer

    with pytest.raises(MemoryError, match="no room"):
        await newcomer
    assert [len(tokens_of(await flight)) for flight in (other, beside, behind)] == [1, 1, 1]
    runner._device.synchronize()
    assert runner._steps.table.block_tables_SB[0, : len(writes)].tolist() == [block for _, _, block in writes]
    assert runner._steps.table.records_SW[0, POSITION.value].item() == 0


@pytest.mark.parametrize("broken", ["record", "apply_words"])
async def test_a_step_of_which_nothing_can_be_known_loses_the_device(
    broken: str, host: PlanHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither whether its blocks are free nor what the slots hold: at once, and with what began it."""

    def fails(**options: bool) -> HeldEvent:
        raise RuntimeError("no event")

    (first,) = host.prefill(0, A)
    with faults.armed("runner.launch_rest", after=NUM_LAYERS - 1, error=MemoryError("no room")):
        (second,) = host.prefill(1, B)  # begun in the loop's turn behind the first one's
        await turns(NUM_LAYERS - 1)
        waiting = host.launch(rows=[(0, len(A))])
        owner = host.runner._device if broken == "record" else host.runner._steps
        with monkeypatch.context() as patch:
            patch.setattr(owner, broken, fails, raising=False)
            await turns(1)
    was_done = second.done()

    for lost in (second, waiting):  # which would take words that are not its own
        with pytest.raises(DeviceLost, match=r"no room.*no event"):
            await lost
    assert was_done
    assert len(tokens_of(await first)) == 1
    assert host.runner.num_out == 0


async def test_chunks_may_have_to_begin_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a launch comes just before the end of what is out."""
    monkeypatch.setattr(cuda_decoder, "LAYERS_A_LAUNCH", 1)
    host = PlanHost(make_runner(folder, num_cuts=NUM_LAYERS - 1, begins_later=False))
    runner, event = host.runner, HeldEvent()
    goes: list[float] = []
    with monkeypatch.context() as patch:
        patch.setattr(runner._device, "record", lambda *, blocking=False: event, raising=False)
        flights = host.prefill(0, A)
        await turns(NUM_LAYERS - 1)
    monkeypatch.setattr(runner, "_note_go", lambda seconds, plan: goes.append(seconds))
    flights += host.prefill(1, B)
    await turns(2 * NUM_LAYERS)
    runner._device.synchronize()
    event.is_reached = True

    assert len(goes) == NUM_LAYERS
    assert [len(tokens_of(await flight)) for flight in flights] == [1, 1]
    await runner.aclose()


async def test_closing_enqueues_the_rest_first(host: PlanHost) -> None:
    """The step lands as any that is out."""
    (flight,) = host.prefill(0, A)
    await host.runner.aclose()

    assert len(tokens_of(await flight)) == 1
    with pytest.raises(DeviceLost, match="closed"):
        host.prefill(1, A)


def test_a_step_whose_loop_has_gone_is_left(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next loop's steps go on without it, and without those that waited behind it."""
    monkeypatch.setattr(cuda_decoder, "LAYERS_A_LAUNCH", 1)
    host = PlanHost(make_runner(folder, num_cuts=NUM_LAYERS - 1))

    async def leave() -> None:
        host.prefill(0, A)
        for step in range(2):
            host.launch(rows=[(0, len(A) + step)])
        asyncio.get_running_loop().stop()  # before any turn

    async def go_on() -> list[int]:
        tokens = tokens_of(await host.prefill(1, A)[-1])
        tokens += tokens_of(await host.launch(rows=[(1, len(A))]))
        await host.runner.aclose()
        return tokens

    loop = asyncio.new_event_loop()
    task = loop.create_task(leave())
    loop.run_forever()
    task.cancel()
    loop.close()

    assert len(asyncio.run(go_on())) == 2
