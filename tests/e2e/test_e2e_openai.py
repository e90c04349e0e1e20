"""The official Python client against ``python -m aserve``, on every endpoint that it has a call for."""

import asyncio
import math
from collections.abc import Iterator

import openai
import pytest
from aserve_process import ServerProcess, Streaming, serving, slow_steps

pytestmark = pytest.mark.torch

MODEL = "SmolLM2-135M-Instruct"
CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def client(default_server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{default_server.url}/v1", api_key="sk-test") as official:
        yield official


def ask_capital(client: openai.OpenAI, **fields: object) -> openai.types.chat.ChatCompletion:
    return client.chat.completions.create(
        **{"model": MODEL, "messages": CAPITAL, "temperature": 0, "max_completion_tokens": 16} | fields
    )


# --- real text


def test_capital_of_france(client: openai.OpenAI) -> None:
    """A plain chat with the default model: the right answer, its usage, and the request's id."""
    answer = ask_capital(client)
    again = ask_capital(client)

    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and again.usage is not None and again.usage.prompt_tokens_details is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert again.usage.prompt_tokens_details.cached_tokens == answer.usage.prompt_tokens // 16 * 16
    assert again.choices[0].message.content == answer.choices[0].message.content
    assert answer._request_id != again._request_id


def test_streamed_chat_is_the_plain_one(client: openai.OpenAI) -> None:
    """The chunks join to the plain answer; the last one has the usage."""
    plain = ask_capital(client)
    with ask_capital(client, stream=True, stream_options={"include_usage": True}) as stream:
        chunks = list(stream)

    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == plain.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == plain.usage.completion_tokens
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"


def test_the_clients_own_accumulator(client: openai.OpenAI) -> None:
    """``stream()`` with two choices and logprobs: an entry a token, the end's too; the greedy one comes first."""
    with client.chat.completions.stream(
        model=MODEL, messages=CAPITAL, temperature=0, max_tokens=16, logprobs=True, top_logprobs=3, n=2
    ) as stream:
        answer = stream.get_final_completion()

    for choice in answer.choices:
        assert choice.logprobs is not None and choice.logprobs.content is not None
        assert "".join(entry.token for entry in choice.logprobs.content) == f"{choice.message.content}<|im_end|>"
        for entry in choice.logprobs.content:
            listed = [top.logprob for top in entry.top_logprobs]
            assert len(listed) == 3 and listed == sorted(listed, reverse=True) and entry.logprob == listed[0]


def test_seeds(client: openai.OpenAI) -> None:
    """The same seed gives the same text at a temperature; two children and other seeds differ."""

    def texts(seed: int) -> list[str | None]:
        answer = ask_capital(client, temperature=1.5, seed=seed, n=2, max_completion_tokens=12)
        return [choice.message.content for choice in answer.choices]

    first, second, other = texts(7), texts(7), texts(8)

    assert first == second
    assert len({*first, *other}) == 4


def test_stop_strings(client: openai.OpenAI) -> None:
    """Text ends before the stop string, streamed and plain, across tokens."""
    plain = ask_capital(client, stop=[" of Fra"])
    with ask_capital(client, stop=[" of Fra"], stream=True) as stream:
        streamed = "".join([chunk.choices[0].delta.content or "" for chunk in stream])

    assert plain.choices[0].message.content == streamed == "The capital"
    assert plain.choices[0].finish_reason == "stop"


def test_completions(client: openai.OpenAI) -> None:
    """Text, list and token prompts; n; echo with the prompt's own logprobs; streamed as plain."""
    prompt = "The capital of France is"
    several = client.completions.create(model=MODEL, prompt=[prompt, "1, 2, 3,"], max_tokens=3, temperature=0, n=2)
    echoed = client.completions.create(model=MODEL, prompt=prompt, echo=True, logprobs=1, max_tokens=2, temperature=0)
    with client.completions.create(model=MODEL, prompt=prompt, max_tokens=3, temperature=0, stream=True) as stream:
        streamed = "".join([chunk.choices[0].text for chunk in stream])

    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert several.choices[0].text == several.choices[1].text == streamed != several.choices[2].text
    assert "Paris" in streamed
    logprobs = echoed.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens is not None and logprobs.token_logprobs is not None
    assert "".join(logprobs.tokens) == echoed.choices[0].text
    assert echoed.choices[0].text.startswith(prompt)
    assert logprobs.token_logprobs[0] is None and all(-30 < value <= 0 for value in logprobs.token_logprobs[1:])
    assert math.exp(logprobs.token_logprobs[-1]) > 0.1  # greedy, and nearly sure of Paris


def test_token_ids_as_prompt(client: openai.OpenAI) -> None:
    """A list of ids is the prompt itself."""
    text = client.completions.create(model=MODEL, prompt="Hello", max_tokens=4, temperature=0)
    ids = client.post("/../tokenize", body={"prompt": "Hello"}, cast_to=dict[str, object])["tokens"]
    listed = client.completions.create(model=MODEL, prompt=ids, max_tokens=4, temperature=0)

    assert listed.choices[0].text == text.choices[0].text
    assert listed.usage == text.usage


def test_models(client: openai.OpenAI) -> None:
    """Listed and retrieved."""
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_errors_are_the_clients_own_kinds(client: openai.OpenAI) -> None:
    """Each status raises its class, with code and param."""
    with pytest.raises(openai.NotFoundError) as unknown:
        ask_capital(client, model="nope")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nope")
    with pytest.raises(openai.BadRequestError) as range_:
        ask_capital(client, temperature=3)
    with pytest.raises(openai.BadRequestError) as too_long:
        ask_capital(client, max_completion_tokens=100_000)
    with pytest.raises(openai.AuthenticationError) as stranger:
        ask_capital(client.with_options(api_key="sk-other"))
    with pytest.raises(openai.BadRequestError) as tools:
        client.embeddings.create(model=MODEL, input="x")

    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    assert range_.value.param == "temperature"
    assert (too_long.value.code, too_long.value.param) == ("context_length_exceeded", "max_completion_tokens")
    assert stranger.value.code == "invalid_api_key"
    assert tools.value.code == "unsupported"


def test_raw_and_streaming_responses(client: openai.OpenAI) -> None:
    """``with_raw_response`` shows headers, ``with_streaming_response`` the lines of the wire."""
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=CAPITAL, max_tokens=1)
    with client.chat.completions.with_streaming_response.create(
        model=MODEL, messages=CAPITAL, max_tokens=1, temperature=0, stream=True
    ) as response:
        lines = [line for line in response.iter_lines() if line]

    assert raw.headers["x-request-id"] == raw.request_id != ""
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert lines[-1] == "data: [DONE]" and all(line.startswith("data: {") for line in lines[:-1])


async def test_the_async_client(default_server: ServerProcess) -> None:
    """The same over the asynchronous client: sixteen chats at once, plain and streamed."""
    async with openai.AsyncOpenAI(base_url=f"{default_server.url}/v1", api_key="sk-test") as client:

        async def streamed() -> str:
            chunks = await client.chat.completions.create(
                model=MODEL, messages=CAPITAL, temperature=0, max_tokens=8, stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

        async def plain() -> str:
            answer = await client.chat.completions.create(
                model=MODEL, messages=CAPITAL, temperature=0, max_tokens=8, stream=False
            )
            return answer.choices[0].message.content or ""

        texts = await asyncio.gather(*(ask() for _ in range(8) for ask in (streamed, plain)))
        names = [model.id async for model in client.models.list()]

    assert set(texts) == {"The capital of France is Paris."}
    assert names == [MODEL]


# --- a server that is slow and soon full


@pytest.fixture(scope="module")
def slow_server(tiny_model: list[str]) -> Iterator[ServerProcess]:
    """One request runs, one waits, a third is refused; a step takes 20 ms."""
    arguments = [*tiny_model, "--max-num-seqs", "1", "--engine.max-queue-requests", "1"]
    with serving(*arguments, environment=slow_steps(0.02)) as server:
        yield server


async def until(server: ServerProcess, **wanted: int) -> None:
    """Ask for the figures until they are these."""
    async with server.client() as session:
        while True:
            async with session.get("/v1/stats") as answer:
                figures = (await answer.json())["engine"]
                if {name: figures[name] for name in wanted} == wanted:
                    return


def official(server: ServerProcess, **options: object) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", **options)


async def test_a_full_queue_is_retried_as_retry_after_says(slow_server: ServerProcess) -> None:
    """The client waits, tries again and gets its answer; without retries it is an error with the sentence."""
    async with slow_server.client() as session, official(slow_server) as client:
        for _ in range(4):  # the pace from which the server tells how long to wait
            await client.completions.create(model="tiny", prompt="x", max_tokens=1)
        running = Streaming(session, max_tokens=40, ignore_eos=True)
        await running.began.wait()
        waiting = Streaming(session, max_tokens=1, ignore_eos=True)
        await until(slow_server, num_waiting=1)
        with pytest.raises(openai.InternalServerError) as refused:
            await client.with_options(max_retries=0).completions.create(model="tiny", prompt="x", max_tokens=1)
        answer = await client.completions.with_raw_response.create(model="tiny", prompt="x", max_tokens=1)
        await asyncio.gather(running.ended(), waiting.ended())

    assert (refused.value.status_code, refused.value.code) == (503, "server_overloaded")
    assert int(refused.value.response.headers["retry-after"]) >= 1
    assert answer.retries_taken >= 1
    assert (running.end, waiting.end) == ("whole", "whole")


async def test_a_timeout_of_the_client_aborts(slow_server: ServerProcess) -> None:
    """The client gives up in the middle of a plain answer, and the request ends there."""
    async with official(slow_server, max_retries=0) as client:
        with pytest.raises(openai.APITimeoutError):
            await client.completions.create(
                model="tiny", prompt="x", max_tokens=4000, timeout=0.3, extra_body={"ignore_eos": True}
            )
        await until(slow_server, num_streams=0, num_running=0)


async def test_a_deadline_of_the_request_is_an_error(slow_server: ServerProcess) -> None:
    """The server's own time limit, as the request asks: 504 before the first byte is an error that is not retried."""
    async with slow_server.client() as session, official(slow_server) as client:
        running = Streaming(session, max_tokens=40, ignore_eos=True)
        await running.began.wait()
        with pytest.raises(openai.InternalServerError) as late:
            await client.completions.create(model="tiny", prompt="x", max_tokens=1, extra_body={"timeout": 0.1})
        await running.ended()

    assert (late.value.status_code, late.value.code) == (504, "deadline_exceeded")


@pytest.mark.parametrize("way", ["close", "break", "cancel"])
async def test_leaving_a_stream_aborts(slow_server: ServerProcess, way: str) -> None:
    """Closing the stream, breaking out of its loop, or cancelling the reader: nothing runs on."""
    async with official(slow_server) as client:

        async def read() -> None:
            async with await client.completions.create(
                model="tiny", prompt="x", max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
            ) as stream:
                async for _ in stream:
                    began.set()
                    if way == "close":
                        await stream.close()
                    if way != "cancel":
                        break

        began = asyncio.Event()
        reading = asyncio.create_task(read())
        await began.wait()
        if way == "cancel":
            reading.cancel()
        await asyncio.wait([reading])
        await until(slow_server, num_streams=0, num_running=0)
