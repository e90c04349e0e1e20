"""The engine in somebody else's program: from aserve import Engine."""

import asyncio
import gc
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aserve
from aserve import Engine
from aserve.config import Config
from aserve.core.request import FinishReason
from aserve.embedding import Parts
from aserve.errors import (
    AserveError,
    ConfigError,
    ContextLengthExceeded,
    DeadlineExceeded,
    DeviceLost,
    EngineDead,
    GenerationFailed,
    InvalidRequest,
    ModelError,
    RequestAborted,
)
from aserve.testing import ByteTokenizer, ScriptedRunner
from aserve.text.chat_template import ChatTemplate

TEMPLATE = ChatTemplate("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: ")


def scripted(runner: ScriptedRunner | None = None, **options: Any) -> Engine:
    return Engine.from_runner(runner or ScriptedRunner(), ByteTokenizer(), template=TEMPLATE, **options)


def says(text: str) -> Callable[[Any, int], int]:
    """A script that writes ``text`` and ends."""
    return lambda context, index: text.encode()[index] if index < len(text.encode()) else ByteTokenizer.EOS


async def rest(engine: Engine) -> None:
    """Let the loop turn until nothing is open and nothing in flight."""
    for _ in range(10_000):
        statistics = engine.statistics()
        if (statistics.num_streams, statistics.num_running, statistics.num_inflight_steps) == (0, 0, 0):
            return
        await asyncio.sleep(0)
    raise AssertionError("the engine does not come to rest")


async def launched(runner: ScriptedRunner) -> None:
    """Let the loop turn until a step is in flight."""
    for _ in range(10_000):
        if runner.num_inflight:
            return
        await asyncio.sleep(0)
    raise AssertionError("nothing was launched")


def test_the_package_is_light_until_engine_is_asked_for() -> None:
    """``import aserve`` loads nothing; ``from aserve import Engine`` loads neither torch nor aiohttp."""
    program = (
        "import sys, aserve\n"
        "assert not {'numpy', 'asyncio'} & set(sys.modules)\n"
        "from aserve import Engine\n"
        "assert Engine is aserve.Engine\n"
        "Engine.from_pretrained()\n"
        "print(sorted({'torch', 'transformers', 'aiohttp'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)

    assert (result.stdout, result.stderr) == ("[]\n", "")


def test_other_names_are_not_there() -> None:
    """The lazy package is not a magic one."""
    with pytest.raises(AttributeError, match="no attribute 'Engines'"):
        _ = aserve.Engines  # type: ignore[attr-defined]


async def test_text_is_continued() -> None:
    """A string is a plain prompt; the last delta tells how it ended, usage how much it was."""
    async with scripted(ScriptedRunner(says("a river"))) as engine:
        generation = engine.generate("Name", max_tokens=20)
        deltas = [delta async for delta in generation]

    assert "".join(delta.text for delta in deltas) == "a river"
    assert [delta.finish for delta in deltas if delta.finish] == [FinishReason.STOP]
    assert (generation.usage.prompt_tokens, generation.usage.completion_tokens) == (5, 8)  # BOS and EOS count


@pytest.mark.parametrize("prompt", [[72, 105], np.array([72, 105], np.int32), (72, 105)])
async def test_token_ids_are_a_prompt_too(prompt: Any) -> None:
    """Ids in a list, a tuple or an array are what the text would be."""
    runner = ScriptedRunner()
    async with scripted(runner) as engine:
        await engine.generate(prompt, max_tokens=1).text()

    assert runner.log[0].chunks[0].tokens.tolist() == [72, 105]


async def test_messages_go_through_the_template() -> None:
    """A list of messages is a chat."""
    runner = ScriptedRunner(says("Rhine"))
    async with scripted(runner) as engine:
        text = await engine.generate([{"role": "user", "content": "Hi"}]).text()

    assert text == "Rhine"
    assert bytes(runner.log[0].chunks[0].tokens.tolist()) == b"user: Hi\nassistant: "


async def test_long_prompts_are_prepared_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes long to tokenise does not hold up the host's loop."""
    threads = []
    encode = ByteTokenizer.encode

    def watched(self: ByteTokenizer, text: str, **options: Any) -> list[int]:
        threads.append(threading.current_thread() is threading.main_thread())
        return encode(self, text, **options)

    monkeypatch.setattr(ByteTokenizer, "encode", watched)
    async with scripted(ScriptedRunner(max_model_len=8192)) as engine:
        await engine.generate("x", max_tokens=1).text()
        await engine.generate("x" * 5000, max_tokens=1).text()

    assert threads == [True, False]


async def test_fields_of_the_wire_are_taken() -> None:
    """n, stop and the rest mean what they mean over HTTP; choices are told apart by index."""
    async with scripted(ScriptedRunner(b"abcd")) as engine:
        deltas = [delta async for delta in engine.generate("x", n=2, stop=["c"], max_tokens=9, logprobs=0)]

    assert {delta.index for delta in deltas} == {0, 1}
    assert "".join(delta.text for delta in deltas if delta.index == 1) == "ab"
    assert all(delta.logprobs is not None for delta in deltas)


async def test_many_at_once_are_batched() -> None:
    """Calls run side by side in the same steps."""
    runner = ScriptedRunner()
    async with scripted(runner) as engine:
        texts = await asyncio.gather(*(engine.generate(f"prompt {i}", max_tokens=16).text() for i in range(8)))

    assert texts == ["ok ok ok ok ok o"] * 8
    assert max(len(plan.rows) for plan in runner.log) == 8


@pytest.mark.parametrize(
    ("prompt", "fields", "message"),
    [
        ("x", {"temperature": 9}, "'temperature': expected `float` <= 2.0."),
        ("x", {"temprature": 1}, "There is no field 'temprature'."),
        ("x", {"stream": True}, "The field 'stream' is the server's alone."),
        ("x", {"max_tokens": 0}, "'max_tokens' must be at least 1."),
        ("x", {"min_tokens": 5, "max_tokens": 2}, "'min_tokens' is 5, more than the 2 tokens to generate."),
        ([[]], {}, "'prompt[0]' is empty: a prompt needs at least one token."),
        ([], {}, "'prompt' must not be an empty list."),
        ([{"role": "user"}], {}, "'messages[0].content' must be a string or a list of text parts."),
        ("x", {"seed": object()}, "The prompt or a field cannot be sent to a model"),
        ("\ud800", {}, "The prompt or a field cannot be sent to a model"),
    ],
)
async def test_mistakes_are_raised(prompt: Any, fields: dict[str, Any], message: str) -> None:
    """A wrong prompt or field is InvalidRequest, in a sentence; the engine goes on."""
    async with scripted() as engine:
        with pytest.raises(InvalidRequest) as raised:
            await engine.generate(prompt, **fields).text()
        assert raised.value.message.replace("`", "").startswith(message.replace("`", ""))

        assert await engine.generate("x", max_tokens=2).text() == "ok"


async def test_a_prompt_that_does_not_fit_is_raised() -> None:
    """Prompt and length beyond the context are ContextLengthExceeded; a default length is what fits."""
    async with scripted(ScriptedRunner(max_model_len=32)) as engine:
        with pytest.raises(ContextLengthExceeded):
            await engine.generate("x" * 30, max_tokens=3).text()

        assert await engine.generate("x" * 29).text() == "ok"


async def test_a_failed_step_is_raised_after_its_text() -> None:
    """A step that fails raises GenerationFailed behind the deltas that came before; others go on."""
    runner = ScriptedRunner()
    runner.fail_step(3, RuntimeError("kernel"))
    async with scripted(runner, policy="sync") as engine:
        text = ""
        with pytest.raises(GenerationFailed, match="kernel"):
            async for delta in engine.generate("x", max_tokens=9):
                text += delta.text

        assert text == "ok"
        assert await engine.generate("x", max_tokens=2).text() == "ok"


async def test_a_lost_device_is_raised_and_the_host_lives() -> None:
    """A dead engine raises EngineDead for what is open and for what comes, and closes cleanly."""
    runner = ScriptedRunner()
    runner.fail_step(2, DeviceLost("gone"))
    async with scripted(runner, policy="sync") as engine:
        for _ in range(2):
            with pytest.raises(EngineDead, match="gone"):
                await engine.generate("x", max_tokens=9).text()
        assert not engine.health().alive

    assert runner.closed


async def test_a_time_limit_is_raised() -> None:
    """``timeout`` in seconds ends in DeadlineExceeded."""
    runner = ScriptedRunner()
    runner.hold()
    async with scripted(runner) as engine:
        with pytest.raises(DeadlineExceeded):
            await engine.generate("x", timeout=0.01).text()


async def test_closing_tells_the_readers() -> None:
    """Readers of a closed engine get RequestAborted; later calls are refused; closing twice is nothing."""
    runner = ScriptedRunner()
    runner.hold()
    engine = await scripted(runner)
    reader = asyncio.create_task(engine.generate("x").text())
    await launched(runner)
    await engine.aclose()
    await engine.aclose()

    with pytest.raises(RequestAborted):
        await reader
    with pytest.raises(AserveError, match="shutting down"):
        await engine.generate("x").text()
    assert runner.closed
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_leaving_the_loop_aborts() -> None:
    """``break`` lets go of the call without the garbage collector's help."""
    async with scripted() as engine:
        gc.disable()
        try:
            async for _ in engine.generate("x"):
                break
            await rest(engine)
        finally:
            gc.enable()

        assert engine.statistics().num_finished["abort"] == 1


async def test_async_with_aborts_at_once() -> None:
    """After ``async with`` the call is no longer open, whatever ended it."""
    async with scripted() as engine:
        with pytest.raises(ZeroDivisionError):
            async with engine.generate("x") as generation:
                async for _ in generation:
                    raise ZeroDivisionError

        assert engine.statistics().num_streams == 0
        assert [delta async for delta in generation] == []


async def test_a_cancelled_reader_aborts() -> None:
    """Cancelling the task that reads ends the call, and only that one."""
    runner = ScriptedRunner()
    runner.hold()
    async with scripted(runner) as engine:
        reader = asyncio.create_task(engine.generate("x").text())
        other = asyncio.create_task(engine.generate("y", max_tokens=2).text())
        await launched(runner)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        runner.resume()

        assert await other == "ok"
        await rest(engine)


async def test_a_generation_that_nobody_reads_is_nothing() -> None:
    """Nothing is queued before the first iteration."""
    async with scripted() as engine:
        engine.generate("x")

        assert engine.statistics().num_accepted == 0


def test_wrong_options_are_raised_before_anything_is_loaded() -> None:
    """Options of the engine are taken by key; those of a server, and unknown ones, are ConfigErrors."""
    with pytest.raises(
        ConfigError, match=r"There is no option 'max_num_seq'; the nearest is scheduler\.max_num_seqs\."
    ):
        Engine.from_pretrained(max_num_seq=1)
    with pytest.raises(ConfigError, match=r"server\.port has no effect on an embedded engine\."):
        Engine.from_pretrained(port=1)
    with pytest.raises(ConfigError, match=r"There is no profile 'x'"):
        Engine.from_pretrained(profile="x")


async def test_a_model_that_is_not_there_is_raised(tmp_path: Path) -> None:
    """A wrong model is ModelError at the start, and the program goes on."""
    with pytest.raises(ModelError, match="no file or folder"):
        await Engine.from_pretrained(str(tmp_path / "nothing"))


async def test_a_start_that_is_cancelled_leaves_nothing() -> None:
    """The thread that loads is waited for, and what it loaded is closed."""
    began, go_on = asyncio.Event(), threading.Event()
    loop, runner = asyncio.get_running_loop(), ScriptedRunner()

    def load() -> Parts:
        loop.call_soon_threadsafe(began.set)
        assert go_on.wait(10)
        return Parts(name="x", runner=runner, tokenizer=ByteTokenizer(), renderer=None, defaults=None)  # type: ignore[arg-type]

    starting = asyncio.ensure_future(Engine(load, Config()).__aenter__())
    await began.wait()
    starting.cancel()
    await asyncio.sleep(0)
    assert not starting.done()
    go_on.set()

    with pytest.raises(asyncio.CancelledError):
        await starting
    assert runner.closed


async def test_use_before_the_start_is_told() -> None:
    """An engine that was not started says how to, and none is started twice."""
    engine = scripted()
    with pytest.raises(RuntimeError, match="has not been started"):
        await engine.generate("x").text()
    async with engine:
        with pytest.raises(RuntimeError, match="started once"):
            await engine
