"""The official Python client on the Responses API: plain, streamed, and ``connect()`` in both its forms."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from fake_engine import TEXT
from server_builders import MODEL, Served, serving

from aserve.errors import Overloaded


@asynccontextmanager
async def client(**options: Any) -> AsyncIterator[tuple[openai.AsyncOpenAI, Served]]:
    async with serving(api_keys=("sk-test",), **options) as served:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="sk-test", max_retries=0) as official:
            yield official, served


async def test_plain() -> None:
    """Created, retrieved, gone on from, cancelled after its end, deleted."""
    async with client() as (official, _):
        response = await official.responses.create(model=MODEL, input="hi", metadata={"a": "b"})
        again = await official.responses.retrieve(response.id)
        following = await official.responses.create(model=MODEL, input="b", previous_response_id=response.id)
        cancelled = await official.responses.cancel(response.id)
        await official.responses.delete(response.id)
        with pytest.raises(openai.NotFoundError):
            await official.responses.retrieve(response.id)

    assert response.output_text == again.output_text == following.output_text == TEXT
    assert (response.status, cancelled.status, following.previous_response_id) == (
        "completed",
        "completed",
        response.id,
    )
    assert response.usage is not None and response.usage.input_tokens_details.cached_tokens == 2
    assert response.usage.input_tokens_details.cache_write_tokens >= 0


async def test_streamed() -> None:
    """Typed events; the stream helper accumulates them to the same response."""
    async with client() as (official, _):
        events = [event async for event in await official.responses.create(model=MODEL, input="hi", stream=True)]
        async with official.responses.stream(model=MODEL, input="hi", top_logprobs=1) as stream:
            final = await stream.get_final_response()

    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == TEXT
    assert events[-1].type == "response.completed" and events[-1].response.output_text == TEXT
    assert final.output_text == TEXT
    content = final.output[0].content[0]  # type: ignore[union-attr]
    assert [item.token for item in content.logprobs or ()] == list(TEXT)  # type: ignore[union-attr]


async def test_closing_the_stream_aborts() -> None:
    """Leaving it early is noticed at once."""
    async with client() as (official, served):
        served.engine.hold()
        asking = asyncio.create_task(official.responses.create(model=MODEL, input="hi", stream=True))
        call = await served.engine.call()
        call.say("x")
        await (await asking).close()

        await call.closed.wait()


async def test_errors_are_the_clients_own_kinds() -> None:
    """Before the first event they have a status."""
    async with client() as (official, served):
        with pytest.raises(openai.BadRequestError) as bad:
            await official.responses.create(model=MODEL, input="hi", tools=[{"type": "web_search"}])
        served.engine.refusal = Overloaded("full")
        with pytest.raises(openai.InternalServerError) as full:
            await official.responses.create(model=MODEL, input="hi", stream=True)

    assert (bad.value.param, full.value.code) == ("tools", "server_overloaded")


async def test_connect() -> None:
    """Lanes, a conversation over two turns, an error event; closed by its context."""
    async with client() as (official, served):
        async with official.responses.connect() as connection:
            await connection.response.create(model=MODEL, input="a", stream_id="one")
            texts, response_id = "", ""
            async for event in connection:
                assert getattr(event, "stream_id", None) == "one"
                if event.type == "response.output_text.delta":
                    texts += event.delta
                if event.type == "response.completed":
                    response_id = event.response.id
                    break
            await connection.response.create(model=MODEL, input="b", previous_response_id=response_id, store=False)
            async for event in connection:
                if event.type == "response.completed":
                    break
            await connection.response.create(model=MODEL, input="b", temperature=9)
            error = await connection.recv()

    assert texts == TEXT
    assert bytes(served.engine.calls[1].request.prompts[0].tolist()).decode().startswith("user:a\nassistant:Hello")
    assert error.type == "error" and (error.status, error.error.param) == (400, "temperature")
    assert served.log.fields_of("request.finished")[-1]["close_code"] == 1000


async def test_connect_without_asyncio() -> None:
    """The synchronous client, from a thread of its own."""

    def talk(url: str) -> tuple[str, list[str]]:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="sk-test") as official:
            with official.responses.connect() as connection:
                connection.response.create(model=MODEL, input="hi")
                types = []
                for event in connection:
                    types.append(event.type)
                    if event.type == "response.completed":
                        return event.response.output_text, types
        raise AssertionError("The response did not end.")

    async with client() as (_, served):
        text, types = await asyncio.to_thread(talk, served.url)

    assert text == TEXT
    assert types[:2] == ["response.created", "response.in_progress"]


async def test_connect_with_a_wrong_key() -> None:
    """Refused before the upgrade, with a status that the client's library shows."""
    async with client() as (official, _):
        with pytest.raises(Exception, match="401"):
            async with official.with_options(api_key="wrong").responses.connect():
                pass


async def test_client_reconnects_when_the_server_drains() -> None:
    """1001 is one of the codes that its reconnection takes for recoverable."""
    async with client() as (official, served):
        attempts: list[int] = []

        def on_reconnecting(event: Any) -> Any:
            attempts.append(event.close_code)
            return {"abort": True}

        async with official.responses.connect(on_reconnecting=on_reconnecting) as connection:
            await connection.response.create(model=MODEL, input="hi")
            stopping: asyncio.Task[None] | None = None
            async for event in connection:
                if event.type == "response.completed":
                    stopping = asyncio.create_task(served.server.drain_and_stop())
        assert stopping is not None
        await stopping

    assert attempts == [1001]
