"""The official Python client, as people use it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from fake_engine import TEXT
from server_builders import HELLO, MODEL, Served, serving

from aserve.core.request import FinishReason
from aserve.errors import ModelLoading, Overloaded


@asynccontextmanager
async def client(**options: Any) -> AsyncIterator[tuple[openai.AsyncOpenAI, Served]]:
    """The client with its defaults, but for two retries without their pauses."""
    async with serving(api_keys=("sk-test",), **options) as served:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="sk-test", max_retries=2) as official:
            yield official, served


async def test_chat() -> None:
    """A plain chat gives text, finish, usage and the request's id."""
    async with client() as (official, served):
        answer = await official.chat.completions.create(model=MODEL, messages=HELLO)

        assert answer.choices[0].message.content == TEXT
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        assert (answer.usage.completion_tokens, answer.usage.prompt_tokens_details.cached_tokens) == (len(TEXT), 2)
        assert answer._request_id == served.log.fields_of("request.finished")[0]["request_id"]


async def test_streamed_chat_with_usage() -> None:
    """Chunks join to the text; the last one has the usage; the stream ends by itself."""
    async with client() as (official, _):
        chunks = await official.chat.completions.create(
            model=MODEL, messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
        received = [chunk async for chunk in chunks]

    text = "".join(chunk.choices[0].delta.content or "" for chunk in received if chunk.choices)
    assert text == TEXT
    assert received[-1].usage is not None and received[-1].usage.completion_tokens == len(TEXT)
    assert len({chunk.id for chunk in received}) == 1


async def test_stream_helper_accumulates() -> None:
    """The client's own accumulator accepts the chunks, logprobs included."""
    async with client() as (official, _):
        async with official.chat.completions.stream(
            model=MODEL, messages=HELLO, logprobs=True, top_logprobs=2, n=2
        ) as stream:
            answer = await stream.get_final_completion()

    assert [choice.message.content for choice in answer.choices] == [TEXT] * 2
    logprobs = answer.choices[1].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert [item.token for item in logprobs.content] == list(TEXT)


async def test_keep_alive_comments_do_not_disturb() -> None:
    """Comments before and between events are skipped."""
    async with client(keepalive_comment_s=0.02) as (official, served):
        served.engine.hold()
        chunks = await official.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
        call = await served.engine.call()
        call.say("late")
        call.end()

        assert "".join([chunk.choices[0].delta.content or "" async for chunk in chunks]) == "late"


async def test_completions() -> None:
    """Prompts in a list, echo, logprobs; plain and streamed."""
    async with client() as (official, _):
        answer = await official.completions.create(
            model=MODEL, prompt=["a", "b"], echo=True, logprobs=1, max_tokens=2, temperature=0
        )
        chunks = await official.completions.create(model=MODEL, prompt=[97], max_tokens=2, stream=True)
        text = "".join([chunk.choices[0].text async for chunk in chunks])

    assert [choice.text for choice in answer.choices] == ["aHe", "bHe"]
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.token_logprobs == [None, -0.5, -0.5]
    assert text == "He"


async def test_models() -> None:
    """Listed and retrieved by name."""
    async with client() as (official, _):
        assert [model.id async for model in official.models.list()] == [MODEL, "alias"]
        assert (await official.models.retrieve("alias")).id == "alias"


async def test_errors_are_the_clients_own_kinds() -> None:
    """Each status raises its class, with code and param; none of them is retried."""
    async with client() as (official, served):
        with pytest.raises(openai.BadRequestError) as bad:
            await official.chat.completions.create(model=MODEL, messages=HELLO, temperature=3)
        with pytest.raises(openai.NotFoundError) as unknown:
            await official.chat.completions.create(model="nope", messages=HELLO)
        with pytest.raises(openai.AuthenticationError) as stranger:
            await official.with_options(api_key="wrong").models.list()
        with pytest.raises(openai.BadRequestError) as streamed:
            await official.chat.completions.create(model=MODEL, messages=[], stream=True)
        with pytest.raises(openai.BadRequestError) as to_come:
            await official.embeddings.create(model=MODEL, input="x")

        assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
        assert unknown.value.code == "model_not_found"
        assert stranger.value.code == "invalid_api_key"
        assert streamed.value.param == "messages"
        assert to_come.value.code == "unsupported"
        assert len(served.log.fields_of("request.finished")) == 5


async def test_overload_is_retried_and_then_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """503 and 429 come back twice, as Retry-After says; then the client gives up."""
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr("openai._base_client.anyio.sleep", sleep)
    async with client() as (official, served):
        served.engine.refusal = Overloaded("full", retry_after_s=3)
        with pytest.raises(openai.InternalServerError) as full:
            await official.chat.completions.create(model=MODEL, messages=HELLO)
        served.engine.refusal = ModelLoading("soon", retry_after_s=7)
        with pytest.raises(openai.InternalServerError) as loading:
            await official.chat.completions.create(model=MODEL, messages=HELLO, stream=True)

        assert (full.value.code, loading.value.code) == ("server_overloaded", "model_loading")
        assert waits == [3, 3, 7, 7]
        assert len(served.log.fields_of("request.finished")) == 6


async def test_fault_in_a_stream_is_raised_with_its_sentence() -> None:
    """The client turns the error event into an APIError; the text before it has arrived."""
    async with client() as (official, served):
        served.engine.hold()
        chunks = await _after_first(official, served)
        (await served.engine.call()).end(FinishReason.ERROR, error="The step failed.")
        with pytest.raises(openai.APIError, match=r"The step failed\."):
            async for _ in chunks:
                pass


async def _after_first(official: openai.AsyncOpenAI, served: Served) -> openai.AsyncStream[Any]:
    asking = asyncio.create_task(official.chat.completions.create(model=MODEL, messages=HELLO, stream=True))
    (await served.engine.call()).say("x")
    return await asking


async def test_closing_the_clients_stream_aborts() -> None:
    """Leaving the stream early is noticed at once."""
    async with client() as (official, served):
        served.engine.hold()
        chunks = await _after_first(official, served)
        await chunks.close()

        await (await served.engine.call()).closed.wait()


async def test_connection_is_reused_after_streams() -> None:
    """Twenty streams and chats in a row take one connection."""
    async with client() as (official, served):
        for _ in range(10):
            await official.chat.completions.create(model=MODEL, messages=HELLO)
            chunks = await official.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
            assert [chunk async for chunk in chunks]

        assert served.num_connections == 1
