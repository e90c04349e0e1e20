"""Completions on the wire: four shapes of prompt, echo, logprobs, n."""

import json

import pytest
from fake_engine import TEXT, logprob
from server_builders import MODEL, http, serving, unchunked
from wire_builders import events

from aserve.engine.generation import Delta, TokenLogprob

PATH = "/v1/completions"


async def test_stream_is_framed_byte_for_byte() -> None:
    """One chunk a token without a role, the finish, [DONE]."""
    async with serving() as served:
        raw = await served.raw(http("POST", PATH, {"prompt": "p", "max_tokens": 2, "stream": True}))
        call = served.engine.calls[0]

    _, body = unchunked(raw)
    created = json.loads(body.partition(b"\n")[0][6:])["created"]
    start = (
        f'data: {{"id":"{call.request_id}","object":"text_completion","created":{created},"model":"{MODEL}","choices":['
    )
    expected = [
        start + '{"index":0,"text":"H","logprobs":null,"finish_reason":null}]}',
        start + '{"index":0,"text":"e","logprobs":null,"finish_reason":null}]}',
        start + '{"index":0,"text":"","logprobs":null,"finish_reason":"length","stop_reason":null}]}',
        "data: [DONE]",
    ]
    assert body.decode() == "".join(event + "\n\n" for event in expected)
    assert call.request_id.startswith("cmpl-")


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [b"ab"]),
        (["ab", "c"], [b"ab", b"c"]),
        ([97, 98], [b"ab"]),
        ([[97, 98], [99]], [b"ab", b"c"]),
    ],
)
async def test_prompt_has_four_shapes(prompt: object, expected: list[bytes]) -> None:
    """A string, strings, token ids, lists of token ids; choices come prompt by prompt."""
    async with serving() as served:
        answer = (await served.post(PATH, {"prompt": prompt, "n": 2, "best_of": 2})).json
        request = served.engine.calls[0].request

    assert [bytes(ids.tolist()) for ids in request.prompts] == expected
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(expected)))
    assert answer["usage"]["completion_tokens"] == 2 * len(expected) * len(TEXT)


async def test_sixteen_tokens_by_default() -> None:
    """The official default, cut to what fits."""
    async with serving() as served:
        await served.post(PATH, {"prompt": "a"})
        await served.post(PATH, {"prompt": "a" * 509})

        assert [call.request.params.max_tokens for call in served.engine.calls] == [16, 3]


async def test_echo_with_logprobs() -> None:
    """The prompt comes back before the text; its tokens lead all four lists, the first without a logprob."""
    fields = {"prompt": "ab", "echo": True, "logprobs": 1, "max_tokens": 2}
    async with serving() as served:
        choice = (await served.post(PATH, fields)).json["choices"][0]

    assert choice["text"] == "abHe"
    assert choice["logprobs"] == {
        "tokens": ["a", "b", "H", "e"],
        "token_logprobs": [None, -0.5, -0.5, -0.5],
        "top_logprobs": [None, {"b": -0.5}, {"H": -0.5}, {"e": -0.5}],
        "text_offset": [0, 1, 2, 3],
    }


async def test_echo_of_one_token_has_no_prompt_logprobs() -> None:
    """Nothing precedes the only token of a prompt."""
    async with serving() as served:
        served.engine.hold()
        reader, writer = await served.connect()
        writer.write(http("POST", PATH, {"prompt": "a", "echo": True, "logprobs": 0, "max_tokens": 1}))
        call = await served.engine.call()
        call.push(Delta(index=0, text="b", tokens=(98,), logprobs=(logprob(98, 0),)))
        call.end()
        answer = json.loads((await reader.read()).partition(b"\r\n\r\n")[2])
        writer.close()

    assert answer["choices"][0]["text"] == "ab"
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == [None, -0.5]


@pytest.mark.parametrize("logprobs", [None, 0, 2])
async def test_joined_stream_equals_the_plain_answer(logprobs: int | None) -> None:
    """Text, logprobs and finish of each choice are the same either way, echo included."""
    fields = {"prompt": ["ab", "c"], "n": 2, "echo": True, "logprobs": logprobs, "max_tokens": 3}
    async with serving() as served:
        plain = (await served.post(PATH, fields)).json
        chunks = events((await served.post(PATH, {**fields, "stream": True})).body)

    assert chunks.pop() == "[DONE]"
    for choice in plain["choices"]:
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
        assert "".join(entry["text"] for entry in own) == choice["text"]
        assert [entry["finish_reason"] for entry in own if entry["finish_reason"]] == [choice["finish_reason"]]
        for name, values in (choice["logprobs"] or {}).items():
            assert [value for entry in own for value in (entry["logprobs"] or {name: []})[name]] == values


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("logprobs", [None, 1])
async def test_prompt_alone(logprobs: int | None, stream: bool) -> None:
    """max_tokens 0 with echo gives the prompt and its logprobs, no new token, finish_reason length."""
    fields = {"prompt": ["abc"], "max_tokens": 0, "echo": True, "logprobs": logprobs, "stream": stream}
    if stream:
        fields["stream_options"] = {"include_usage": True}
    async with serving() as served:
        body = (await served.post(PATH, fields)).body
        lengths = [call.request.params.max_tokens for call in served.engine.calls]

    chunks = events(body)[:-1] if stream else [json.loads(body)]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(choice["text"] for choice in choices) == "abc"
    assert choices[-1]["finish_reason"] == "length"
    assert chunks[-1]["usage"]["completion_tokens"] == 0 and chunks[-1]["usage"]["prompt_tokens"] == 3
    assert lengths == [0]
    if logprobs:
        assert choices[0]["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]


async def test_many_logprobs_are_listed_off_the_loop() -> None:
    """An answer of thousands of entries is the same as a small one, only built elsewhere."""
    fields = {"prompt": "ab" * 100, "echo": True, "logprobs": 5, "max_tokens": 1}
    async with serving() as served:
        logprobs = (await served.post(PATH, fields)).json["choices"][0]["logprobs"]

    assert len(logprobs["tokens"]) == len(logprobs["top_logprobs"]) == 201
    assert logprobs["text_offset"] == list(range(201))


async def test_echo_of_token_ids_is_their_text() -> None:
    """A prompt of ids is echoed as it decodes, control tokens included."""
    async with serving() as served:
        answer = (await served.post(PATH, {"prompt": [256, 97], "echo": True, "max_tokens": 1})).json

    assert answer["choices"][0]["text"] == "<|bos|>aH"


async def test_prompt_logprobs_and_token_ids_by_choice() -> None:
    """Each choice carries its own prompt's logprobs and ids."""
    fields = {"prompt": ["ab", "c"], "prompt_logprobs": 0, "return_token_ids": True, "max_tokens": 1}
    async with serving() as served:
        choices = (await served.post(PATH, fields)).json["choices"]

    assert choices[0]["prompt_logprobs"] == [None, {"98": {"logprob": -0.5, "rank": 1, "decoded_token": "b"}}]
    assert [choice["prompt_token_ids"] for choice in choices] == [[97, 98], [99]]
    assert [choice["token_ids"] for choice in choices] == [[72], [72]]


async def test_infinite_logprobs_are_finite_on_the_wire() -> None:
    """Minus infinity and NaN have no JSON; they become -9999."""
    impossible = TokenLogprob(token=97, logprob=float("nan"), rank=1, top=((98, float("-inf")),))
    async with serving() as served:
        served.engine.hold()
        reader, writer = await served.connect()
        writer.write(http("POST", PATH, {"prompt": "a", "logprobs": 1}))
        call = await served.engine.call()
        call.push(Delta(index=0, text="a", tokens=(97,), logprobs=(impossible,)))
        call.end()
        answer = json.loads((await reader.read()).partition(b"\r\n\r\n")[2])
        writer.close()

    assert answer["choices"][0]["logprobs"]["top_logprobs"] == [{"b": -9999.0, "a": -9999.0}]
