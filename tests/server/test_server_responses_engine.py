"""Responses over the real engine with a scripted device: the prefix cache, usage, joined deltas, cancelling."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from response_builders import RESPONSES, Socket, body, create, text_of, types
from server_builders import FakeRenderer, RecordingLog
from wire_builders import until

from aserve.engine.engine import Engine
from aserve.engine.options import EngineOptions
from aserve.obs.metrics import Metrics
from aserve.server.app import Server
from aserve.server.options import LimitOptions, ServerOptions
from aserve.testing import ByteTokenizer, ScriptedRunner

MODEL = "fake-model"


@dataclass
class Whole:
    engine: Engine
    session: aiohttp.ClientSession
    url: str


@asynccontextmanager
async def whole(runner: ScriptedRunner, **engine_options: Any) -> AsyncIterator[Whole]:
    engine = Engine(runner, ByteTokenizer(), None, EngineOptions(**engine_options))
    server = Server(
        engine=engine,
        renderer=FakeRenderer(),
        model_names=(MODEL,),
        options=ServerOptions(port=0),
        limits=LimitOptions(),
        log=RecordingLog(),
        metrics=Metrics(MODEL, process=False),
    )
    await engine.start()
    host, port = await server.start()
    try:
        async with aiohttp.ClientSession() as session:
            yield Whole(engine, session, f"http://{host}:{port}")
    finally:
        await server.aclose()
        await engine.aclose()


async def test_warmed_prefix_is_hit() -> None:
    """generate false leaves the prompt's whole blocks behind; usage says what was hit and what was written."""
    async with whole(ScriptedRunner()) as served:
        async with served.session.ws_connect(served.url + RESPONSES) as raw:
            ws = Socket(raw)
            await ws.send(create(instructions="s" * 64, input=[], generate=False))
            warm = (await ws.whole())[-1]["response"]
            await ws.send(create(instructions="s" * 64, max_output_tokens=4))
            events = await ws.whole()

    usage = events[-1]["response"]["usage"]
    assert (warm["status"], warm["usage"]["output_tokens"]) == ("completed", 0)
    assert warm["usage"]["input_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": 64}
    assert usage["input_tokens_details"] == {"cached_tokens": 64, "cache_write_tokens": 16}
    assert (usage["output_tokens"], usage["total_tokens"]) == (4, usage["input_tokens"] + 4)


async def test_streamed_and_plain_say_the_same() -> None:
    """The engine's text over SSE, over a websocket and plain."""
    async with whole(ScriptedRunner()) as served:
        fields = {"seed": 1, "max_output_tokens": 12}
        async with served.session.post(served.url + RESPONSES, json=body(**fields)) as answer:
            plain = (await answer.json())["output"][0]["content"][0]["text"]
        async with served.session.post(served.url + RESPONSES, json=body(stream=True, **fields)) as answer:
            streamed = await answer.text()
        async with served.session.ws_connect(served.url + RESPONSES) as raw:
            await Socket(raw).send(create(**fields))
            over_socket = await Socket(raw).whole()

    assert text_of(over_socket) == plain != ""
    assert streamed.count("event: response.output_text.delta") == 12
    assert types(over_socket)[-1] == "incomplete"


async def test_leaving_and_cancelling_reach_the_engine() -> None:
    """Nothing of an aborted response is scheduled any more."""
    async with whole(ScriptedRunner()) as served:
        async with served.session.ws_connect(served.url + RESPONSES) as raw:
            ws = Socket(raw)
            await ws.send(create(ignore_eos=True), create(ignore_eos=True, stream_id="b"))
            await ws.until("output_text.delta")
            await ws.send({"type": "aserve:response.cancel", "stream_id": "b"})
            last = await ws.until("incomplete")
        await until(lambda: served.engine.statistics().num_streams == 0)

        assert last[-1]["stream_id"] == "b"
        assert served.engine.statistics().num_running == 0
        await asyncio.sleep(0)
