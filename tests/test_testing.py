"""The shipped fakes themselves: what they do when nobody does anything wrong, and that their planted faults show."""

import asyncio
from collections.abc import Iterable

import numpy as np
import pytest

from aserve.core.ids import Epoch, Slot, StepNumber
from aserve.core.plan import FLAG_DONE, FLAG_INVALID, BatchPlan, Chunk, Join
from aserve.core.request import SamplingParams
from aserve.errors import DeviceLost
from aserve.testing import ByteTokenizer, ManualClock, ManualEvent, MemoryRunner, ScriptedRunner, expected_tokens

PROMPT = tuple(range(40, 75))


def join(slot: int = 0, *, max_length: int = 1000, num_prompt: int = len(PROMPT), position: int = 0, **more) -> Join:
    values = {
        "slot": Slot(slot),
        "epoch": Epoch(1),
        "position": position,
        "params": SamplingParams(),
        "seed": 0,
        "stop_ids": (),
        "min_length": 0,
        "max_length": max_length,
        "num_prompt_tokens": num_prompt,
        "history": np.empty(0, np.int32),
    }
    return Join(**values | more)


def chunk(tokens: Iterable[int], *, slot: int = 0, start: int = 0, last: bool = True, **more) -> Chunk:
    return Chunk(slot=Slot(slot), start=start, tokens=np.array(list(tokens), np.int32), last=last, **more)


def plan(step: int, *, rows: list[tuple[int, int]] = (), table: list[tuple[int, int, int]] = (), **more) -> BatchPlan:
    more = {"rows": np.array(rows, np.int32).reshape(-1, 2), **more}
    return BatchPlan(step=StepNumber(step), table_writes=np.array(table, np.int32).reshape(-1, 3), **more)


def blocks_of(slot: int, blocks: Iterable[int]) -> list[tuple[int, int, int]]:
    return [(slot, index, block) for index, block in enumerate(blocks)]


def run_now(runner: MemoryRunner, step: BatchPlan) -> list[int]:
    """Launch, execute and land one step; its tokens."""
    runner.launch(step)
    runner.execute()
    return runner.land().result().tokens[:, 0].tolist()


# --- clock, events, tokenizer


def test_the_clock_stands_until_it_is_told():
    """Time passes by ``advance`` alone, and never backwards."""
    clock = ManualClock(5.0)
    clock.advance(1.5)

    assert clock() == 6.5
    with pytest.raises(ValueError, match="back"):
        clock.advance(-1)


async def test_an_event_survives_a_cancelled_await():
    """Cancelling one waiter leaves the event and its other waiters alone."""
    event = ManualEvent()

    async def wait() -> object:
        return await event

    patient, hasty = asyncio.create_task(wait()), asyncio.create_task(wait())
    await asyncio.sleep(0)
    hasty.cancel()
    await asyncio.sleep(0)
    event.set("landed")

    assert hasty.cancelled()
    assert await patient == await event == "landed"


async def test_a_failed_event_fails_every_await():
    """The fault is raised as often as it is asked for."""
    event = ManualEvent()
    event.fail(MemoryError("no room"))

    for _ in range(2):
        with pytest.raises(MemoryError, match="no room"):
            await event


@pytest.mark.parametrize("text", ["plain", "naïve ✓ 日本 🙂", "a <|eos|> in the text"])
def test_bytes_go_there_and_back(text):
    """Text survives, markers in it are text, and decoding token by token gives the same."""
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode(text)
    decoder = tokenizer.decoder()

    assert tokenizer.decode(tokens) == text
    assert "".join(decoder.push(token) for token in tokens) + decoder.finish() == text
    assert tokens[0] == tokenizer.bos_id
    assert tokenizer.EOS not in tokens


def test_markers_become_tokens_only_when_asked_for():
    """parse_special turns a marker into its id; with skip_special_tokens off it comes back as text."""
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode("a<|eos|>b", add_special_tokens=False, parse_special=True)

    assert tokens == [ord("a"), tokenizer.EOS, ord("b")]
    assert tokenizer.decode(tokens) == "ab"
    assert tokenizer.decode(tokens, skip_special_tokens=False) == "a<|eos|>b"


def test_half_a_character_is_held_until_the_end():
    """An incomplete character gives no text until it is complete, and U+FFFD if it never is."""
    decoder = ByteTokenizer().decoder()

    assert [decoder.push(byte) for byte in "é".encode()] == ["", "é"]
    assert (decoder.push(0xE2), decoder.finish()) == ("", "\ufffd")


# --- the scripted device


async def test_a_script_is_followed_row_by_row():
    """Output token i is item i of the script, whatever mix of rows and chunks samples it."""
    runner = ScriptedRunner(b"abc")
    first = await runner.launch(plan(1, joins=(join(),), table=blocks_of(0, [5, 6, 7]), chunks=(chunk(PROMPT),)))
    second = await runner.launch(
        plan(
            2,
            joins=(join(1),),
            table=blocks_of(1, [8, 9, 10]),
            rows=[(0, len(PROMPT))],
            chunks=(chunk(PROMPT, slot=1),),
        )
    )

    assert first.tokens.tolist() == [[ord("a")]]
    assert second.tokens.tolist() == [[ord("b")], [ord("a")]]


async def test_a_script_function_sees_the_context_through_the_cache():
    """After a prefix hit the function is still given the whole context, from the blocks."""
    seen = []

    def script(context: np.ndarray, index: int) -> int:
        seen.append((context.tolist(), index))
        return 65 + index

    runner = ScriptedRunner(script)
    await runner.launch(plan(1, joins=(join(),), table=blocks_of(0, [5, 6, 7]), chunks=(chunk(PROMPT),)))
    await runner.launch(plan(2, rows=[(0, len(PROMPT))]))
    hit = join(1, position=32)
    await runner.launch(
        plan(3, joins=(hit,), table=blocks_of(1, [5, 6, 9]), chunks=(chunk(PROMPT[32:], slot=1, start=32),))
    )

    assert seen == [([*PROMPT], 0), ([*PROMPT, 65], 1), ([*PROMPT], 0)]


async def test_the_device_flags_ends_as_the_host_rules():
    """A stop id and the length limit set DONE, and a row after the end changes nothing."""
    runner = ScriptedRunner(b"xyz")
    joins = (join(stop_ids=(ord("y"),)), join(1, max_length=len(PROMPT) + 1))
    start = plan(
        1,
        joins=joins,
        table=blocks_of(0, [1, 2, 3]) + blocks_of(1, [4, 5, 6]),
        chunks=(chunk(PROMPT), chunk(PROMPT, slot=1)),
    )
    flags = [
        (await runner.launch(start)).flags.tolist(),
        (await runner.launch(plan(2, rows=[(0, len(PROMPT))]))).flags.tolist(),
        (await runner.launch(plan(3, rows=[(0, len(PROMPT) + 1)]))).flags.tolist(),
    ]

    assert flags == [[0, FLAG_DONE], [FLAG_DONE], [FLAG_DONE]]


async def test_a_stop_id_below_the_minimum_is_masked():
    """Below min_length the script's stop id comes out as the next id that is none."""
    runner = ScriptedRunner(b"s")
    masked = join(stop_ids=(ord("s"), ord("t")), min_length=len(PROMPT) + 1)
    first = await runner.launch(plan(1, joins=(masked,), table=blocks_of(0, [1, 2, 3]), chunks=(chunk(PROMPT),)))
    second = await runner.launch(plan(2, rows=[(0, len(PROMPT))]))

    assert (first.tokens[0, 0], first.flags[0]) == (ord("u"), 0)
    assert (second.tokens[0, 0], second.flags[0]) == (ord("s"), FLAG_DONE)


async def test_steps_stay_in_flight_behind_the_gate():
    """While held nothing lands; release lands the oldest, release_step any."""
    runner = ScriptedRunner()
    runner.hold()
    flights = [
        runner.launch(plan(step, joins=(join(step),), table=[(step, 0, step)], chunks=(chunk(PROMPT[:9], slot=step),)))
        for step in (1, 2, 3)
    ]
    await asyncio.sleep(0)
    before = [flight.done() for flight in flights]
    runner.release_step(3)
    runner.release()
    held = [flight.done() for flight in flights]
    runner.resume()

    assert before == [False, False, False]
    assert held == [True, False, True]
    assert (await flights[1]).step == 2


async def test_planted_faults_come_where_they_were_planted():
    """A launch, a step and a row fail as told; others go on; a lost device stays lost."""
    runner = ScriptedRunner(lambda context, index: 10**6 if index == 2 else 65)
    runner.fail_launch(2, MemoryError("launch"))
    runner.fail_step(3, ValueError("step"))
    runner.fail_step(7, DeviceLost("gone"))
    runner.invalidate(4, 0)

    def start(step: int, slot: int) -> BatchPlan:
        return plan(step, joins=(join(slot),), table=[(slot, 0, slot + 1)], chunks=(chunk(PROMPT[:9], slot=slot),))

    first = await runner.launch(start(1, 0))
    with pytest.raises(MemoryError, match="launch"):
        runner.launch(start(2, 1))
    with pytest.raises(ValueError, match="step"):
        await runner.launch(start(3, 2))
    fourth = await runner.launch(start(4, 3))
    fifth = await runner.launch(plan(5, joins=(join(4, num_prompt=7),), rows=[], chunks=(chunk(PROMPT[:9], slot=4),)))
    sixth = runner.launch(start(6, 5))
    with pytest.raises(DeviceLost):
        await runner.launch(start(7, 6))
    with pytest.raises(DeviceLost):
        runner.launch(start(8, 7))

    assert first.flags.tolist() == [0]
    assert fourth.flags.tolist() == [FLAG_INVALID]
    assert fifth.flags.tolist() == [FLAG_INVALID]  # output 2 is asked for an id beyond the vocabulary
    assert (await sixth).flags.tolist() == [0]


async def test_deferred_rows_wait_for_the_hosts_token():
    """A deferred row writes nothing back; the token of the next plan is what the row after it sees."""
    runner = ScriptedRunner(lambda context, index: int(context[-1]) + 1)
    deferred = np.array([True])
    first = await runner.launch(
        plan(1, joins=(join(),), table=blocks_of(0, [1, 2, 3]), chunks=(chunk(PROMPT),), deferred=deferred)
    )
    writes = np.array([[0, len(PROMPT), 7]], np.int32)
    second = await runner.launch(plan(2, rows=[(0, len(PROMPT))], token_writes=writes))

    assert first.tokens.tolist() == [[PROMPT[-1] + 1]]
    assert second.tokens.tolist() == [[8]]


async def test_logprobs_come_in_the_shapes_of_the_contract():
    """K alternatives a row; prompt logprobs cover n tokens of a chunk, one less for the last."""
    runner = ScriptedRunner(b"q")
    first = await runner.launch(
        plan(
            1,
            joins=(join(),),
            table=blocks_of(0, [1, 2, 3]),
            chunks=(chunk(PROMPT[:20], last=False, prompt_logprobs_k=2, next_token=PROMPT[20]),),
        )
    )
    second = await runner.launch(plan(2, chunks=(chunk(PROMPT[20:], start=20, prompt_logprobs_k=0),), logprobs_k=3))
    [(first_index, first_prompt)], [(second_index, second_prompt)] = first.prompt_logprobs, second.prompt_logprobs

    assert first.tokens.shape == (0, 1)
    assert first.logprobs is None
    assert second.logprobs.top_ids.tolist() == [[ord("q"), ord("q") + 1, ord("q") + 2]]
    assert (first_index, first_prompt.top_ids.shape) == (0, (20, 2))
    assert first_prompt.top_ids[:, 0].tolist() == [*PROMPT[1:21]]
    assert (second_index, second_prompt.top_ids.shape) == (0, (14, 0))


# --- the memory device


@pytest.mark.parametrize("splits", [(35,), (16, 19), (1, 15, 1, 18), (34, 1)])
def test_tokens_do_not_depend_on_the_chunks(splits):
    """However the prompt is cut, the output is what the sequence gives alone."""
    runner = MemoryRunner(manual=True)
    tokens, start = [], 0
    for step, size in enumerate(splits, 1):
        first = {"joins": (join(),), "table": blocks_of(0, [9, 4, 30])} if step == 1 else {}
        part = chunk(PROMPT[start : start + size], start=start, last=step == len(splits))
        tokens += run_now(runner, plan(step, chunks=(part,), **first))
        start += size
    for index in range(5):
        tokens += run_now(runner, plan(len(splits) + 1 + index, rows=[(0, len(PROMPT) + index)]))

    assert tokens == expected_tokens(PROMPT, 6)


def test_steps_in_flight_build_on_each_other():
    """Rows launched before their input token has landed compute the same; newer steps of other slots may run first."""
    runner = MemoryRunner(manual=True)
    runner.launch(plan(1, joins=(join(),), table=blocks_of(0, [1, 2, 3]), chunks=(chunk(PROMPT),)))
    runner.launch(plan(2, rows=[(0, 35)]))
    other = PROMPT[::-1]
    runner.launch(
        plan(3, joins=(join(1),), table=blocks_of(1, [4, 5, 6]), rows=[(0, 36)], chunks=(chunk(other, slot=1),))
    )
    results = []
    for _ in range(3):
        runner.execute(ahead=True)
    while runner.num_executed:
        results.append(runner.land().result().tokens[:, 0].tolist())
    first, second, third = expected_tokens(PROMPT, 3)

    assert results == [[first], [second], [third, *expected_tokens(other, 1)]]


def test_a_foreign_cell_shows_in_the_output():
    """Another slot that writes into a block of the context changes every token from then on."""
    runner = MemoryRunner(manual=True)
    run_now(runner, plan(1, joins=(join(),), table=blocks_of(0, [1, 2, 3]), chunks=(chunk(PROMPT),)))
    run_now(runner, plan(2, joins=(join(1),), table=blocks_of(1, [2, 5, 6]), chunks=(chunk(PROMPT[::-1], slot=1),)))

    assert run_now(runner, plan(3, rows=[(0, 35)])) != expected_tokens(PROMPT, 2)[1:]


def test_equal_tokens_behind_another_prefix_are_other_cells():
    """A cell depends on all before it, so a block of the right tokens and the wrong parent shows."""
    runner = MemoryRunner(manual=True)
    other = (1, *PROMPT[1:])
    run_now(runner, plan(1, joins=(join(),), table=blocks_of(0, [1, 2, 3]), chunks=(chunk(PROMPT),)))
    run_now(runner, plan(2, joins=(join(1),), table=blocks_of(1, [4, 5, 6]), chunks=(chunk(other, slot=1),)))
    tail = chunk(other[32:], slot=2, start=32)
    right = plan(3, joins=(join(2, position=32),), table=blocks_of(2, [4, 5, 7]), chunks=(tail,))
    wrong = plan(4, joins=(join(2, position=32),), table=blocks_of(2, [4, 2, 7]), chunks=(tail,))

    assert run_now(runner, right) == expected_tokens(other, 1)
    assert run_now(runner, wrong) != expected_tokens(other, 1)


def test_seed_stop_minimum_and_history_count():
    """The output follows the key, masks and ends at stop ids, and tells prompt from output after a resumption."""
    plain = expected_tokens(PROMPT, 4, vocab_size=97)
    stop = plain[2]
    penalised = SamplingParams(presence_penalty=1.0)
    alone = expected_tokens(PROMPT, 4, needs_history=True)
    history = np.array([*PROMPT, *alone[:2]], np.int32)
    runner = MemoryRunner(manual=True)
    resumed = plan(
        1,
        joins=(join(params=penalised, history=history),),
        table=blocks_of(0, [1, 2, 3]),
        chunks=(chunk([*PROMPT, *alone[:2]]),),
    )

    assert expected_tokens(PROMPT, 4, vocab_size=97, stop_ids=[stop]) == plain[: plain.index(stop) + 1]
    assert len(expected_tokens(PROMPT, 4, vocab_size=97, stop_ids=[stop], min_tokens=4)) == 4
    assert expected_tokens(PROMPT, 4, seed=1) != expected_tokens(PROMPT, 4)
    assert run_now(runner, resumed) + run_now(runner, plan(2, rows=[(0, 37)])) == alone[2:]


def test_a_failed_step_leaves_its_slots_dead():
    """What ran of other slots stays right; later rows of the failed step's slots are DONE and write nothing."""
    runner = MemoryRunner(manual=True, record=True)
    run_now(runner, plan(1, joins=(join(),), table=blocks_of(0, [1, 2, 3]), chunks=(chunk(PROMPT),)))
    runner.fail_step(2, MemoryError("no room"))
    runner.launch(plan(2, joins=(join(1),), table=blocks_of(1, [4, 5, 6]), chunks=(chunk(PROMPT, slot=1),)))
    runner.launch(plan(3, rows=[(0, 35), (1, 35)]))
    runner.execute()
    with pytest.raises(MemoryError):
        runner.land().result()
    runner.execute()
    result = runner.land().result()

    assert result.flags.tolist() == [0, FLAG_DONE]
    assert result.tokens[0, 0] == expected_tokens(PROMPT, 2)[1]
    assert [blocks.tolist() for blocks in runner.accesses[3]] == [[1, 2, 3], [3]]


def test_streams_of_the_memory_device_go_their_own_ways():
    """A later step of one stream runs and lands before an earlier one of the other, which changes neither."""
    runner = MemoryRunner(manual=True)
    other = PROMPT[::-1]
    runner.launch(plan(1, joins=(join(),), table=blocks_of(0, [1, 2, 3]), chunks=(chunk(PROMPT),), stream=1))
    runner.execute()
    runner.land()
    runner.launch(plan(2, joins=(join(1),), table=blocks_of(1, [4, 5, 6]), chunks=(chunk(other, slot=1),), stream=1))
    runner.launch(plan(3, rows=[(0, 35)]))
    results = []
    for stream in (0, 1):
        runner.execute(stream=stream)
        results += runner.land(stream=stream).result().tokens[:, 0].tolist()

    assert results == [expected_tokens(PROMPT, 2)[1], *expected_tokens(other, 1)]


HIT = {
    "joins": (join(1, position=16),),
    "table": blocks_of(1, [1, 4]),
    "chunks": (chunk(PROMPT[16:20], slot=1, start=16),),
}


@pytest.mark.parametrize("later", [{"rows": [(0, 20)]}, HIT], ids=["a slot", "a block"])
def test_streams_that_race_are_caught(later):
    """A step that collides with one of the other stream, out at its launch, is refused, or computes nonsense."""
    first = {"joins": (join(),), "table": blocks_of(0, [1, 2, 3]), "chunks": (chunk(PROMPT[:20]),)}
    results = []
    for stream in (0, 1):
        runner = MemoryRunner(manual=True, verify=False)
        runner.launch(plan(1, stream=1, **first))
        runner.execute()
        runner.launch(plan(2, stream=stream, **later))
        runner.execute()
        results.append([runner.land().result().tokens.tolist() for _ in range(2)])
    checked = MemoryRunner(manual=True)
    checked.launch(plan(1, stream=1, **first))

    assert results[0][0] == results[1][0]
    assert results[0][1] != results[1][1]
    with pytest.raises(AssertionError, match="does not wait"):
        checked.launch(plan(2, **later))


async def test_streams_of_the_scripted_device_land_independently():
    """A step that takes an hour holds up its own stream alone."""
    runner = ScriptedRunner(step_time_s=lambda plan: 3600.0 * plan.stream)
    slow = runner.launch(plan(1, stream=1))
    await runner.launch(plan(2))

    assert not slow.done()
    await runner.aclose()
