"""Chat completions on the wire, streamed and plain."""

import asyncio
import json

from fake_engine import TEXT, logprob
from server_builders import HELLO, MODEL, chat, http, serving, unchunked
from wire_builders import events

from aserve.core.request import FinishReason, SamplingParams
from aserve.engine.generation import Delta
from aserve.server.schema import ChatRequest


async def test_stream_is_framed_byte_for_byte() -> None:
    """Role, one chunk a token, the finish, [DONE]; each a data line and a blank one, in chunked coding."""
    async with serving() as served:
        served.engine.hold()
        reader, writer = await served.connect()
        writer.write(http("POST", "/v1/chat/completions", chat(stream=True)))
        call = await served.engine.call()
        call.say("Hé")
        call.say("\u2028\x85\n")
        call.end()
        head, body = unchunked(await reader.read())
        writer.close()

    base = json.loads(body.partition(b"\n")[0][6:])
    start = (
        f'data: {{"id":"{call.request_id}","object":"chat.completion.chunk","created":{base["created"]},'
        f'"model":"{MODEL}","choices":['
    )
    expected = [
        start + '{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}',
        start + '{"index":0,"delta":{"content":"Hé"},"logprobs":null,"finish_reason":null}]}',
        start + '{"index":0,"delta":{"content":"\\u2028\\u0085\\n"},"logprobs":null,"finish_reason":null}]}',
        start + '{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop","stop_reason":null}]}',
        "data: [DONE]",
    ]
    assert body.decode() == "".join(event + "\n\n" for event in expected)
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    headers = dict(line.split(": ", 1) for line in head.decode().split("\r\n")[1:])
    assert headers["Content-Type"] == "text/event-stream; charset=utf-8"
    assert headers["Cache-Control"] == "no-cache"
    assert headers["X-Accel-Buffering"] == "no"
    assert "Content-Length" not in headers and "Content-Encoding" not in headers


async def test_what_comes_in_one_step_is_one_write() -> None:
    """Deltas that arrive together leave in one chunk of the transfer coding, the end of the body behind them."""
    async with serving() as served:
        raw = await served.raw(http("POST", "/v1/chat/completions", chat(stream=True)))

    body = raw.partition(b"\r\n\r\n")[2]
    size, _, rest = body.partition(b"\r\n")
    assert rest[int(size, 16) :] == b"\r\n0\r\n\r\n"
    assert rest.count(b"data: ") == len(TEXT) + 3


async def test_connection_serves_the_next_request_after_done() -> None:
    """A stream ends its body, not its connection."""
    async with serving() as served:
        reader, writer = await served.connect()
        for _ in range(3):
            writer.write(http("POST", "/v1/chat/completions", chat(stream=True), close=False))
            answer = await reader.readuntil(b"\r\n0\r\n\r\n")
            assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        writer.close()

        assert served.server.statistics()["connections"]["open"] == 1


async def test_plain_answer_has_every_key() -> None:
    """Nullable keys are there, usage counts cached tokens, the model goes by the name that was asked for."""
    async with serving() as served:
        response = await served.post("/v1/chat/completions", chat(model="alias"))
        answer = response.json
        request = served.engine.calls[0].request

    assert answer == {
        "id": request.request_id,
        "created": answer["created"],
        "model": "alias",
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": TEXT, "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": len("user:hi\nassistant:"),
            "completion_tokens": len(TEXT),
            "total_tokens": len("user:hi\nassistant:") + len(TEXT),
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }
    assert request.request_id.startswith("chatcmpl-")


async def test_joined_stream_equals_the_plain_answer() -> None:
    """The same call gives the same text, choice by choice, and the same usage."""
    fields = {"n": 3, "max_tokens": 5, "logprobs": True, "top_logprobs": 2}
    async with serving() as served:
        plain = (await served.post("/v1/chat/completions", chat(**fields))).json
        response = await served.post(
            "/v1/chat/completions", chat(**fields, stream=True, stream_options={"include_usage": True})
        )
        chunks = events(response.body)

    assert chunks.pop() == "[DONE]"
    usage = chunks.pop()
    assert (usage["choices"], usage["usage"]) == ([], plain["usage"])
    assert all(chunk["usage"] is None for chunk in chunks)
    for choice in plain["choices"]:
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
        assert "".join(entry["delta"].get("content", "") for entry in own) == choice["message"]["content"] == TEXT[:5]
        assert [item for entry in own for item in (entry["logprobs"] or {"content": []})["content"]] == choice[
            "logprobs"
        ]["content"]
        assert [entry["finish_reason"] for entry in own if entry["finish_reason"]] == ["length"]
        assert [entry["delta"].get("role") for entry in own] == ["assistant", *[None] * (len(own) - 1)]


async def test_logprobs_carry_bytes_and_alternatives() -> None:
    """Each token has text, bytes and its top list; a token of half a character has its bytes all the same."""
    async with serving() as served:
        served.engine.hold()
        answer = asyncio.create_task(served.post("/v1/chat/completions", chat(logprobs=True, top_logprobs=1)))
        call = await served.engine.call()
        call.push(
            Delta(index=0, tokens=(0xC3,), logprobs=(logprob(0xC3, 1),)),
            Delta(index=0, text="é", tokens=(0xA9,), logprobs=(logprob(0xA9, 1),)),
        )
        call.end()
        content = (await answer).json["choices"][0]["logprobs"]["content"]

    assert content[0]["token"] == "\ufffd" and content[0]["bytes"] == [0xC3]
    assert content[1] == {
        "token": "\ufffd",
        "logprob": -0.5,
        "bytes": [0xA9],
        "top_logprobs": [{"token": "\ufffd", "logprob": -0.5, "bytes": [0xA9]}],
    }


async def test_token_without_text_joins_the_next_chunk() -> None:
    """No empty content chunk; its logprob comes with the text that it belongs to, or with the finish."""
    async with serving() as served:
        served.engine.hold()
        answer = asyncio.create_task(served.post("/v1/chat/completions", chat(stream=True, logprobs=True)))
        call = await served.engine.call()
        call.push(Delta(index=0, tokens=(0xC3,), logprobs=(logprob(0xC3, 0),)))
        call.push(Delta(index=0, text="é", tokens=(0xA9,), logprobs=(logprob(0xA9, 0),)))
        call.push(Delta(index=0, tokens=(257,), logprobs=(logprob(257, 0),), finish=FinishReason.STOP))
        chunks = events((await answer).body)[:-1]

    content = [chunk["choices"][0]["delta"].get("content") for chunk in chunks]
    counts = [len((chunk["choices"][0]["logprobs"] or {"content": []})["content"]) for chunk in chunks]
    assert (content, counts) == (["", "é", None], [0, 2, 1])


async def test_running_usage_counts_along() -> None:
    """continuous_usage_stats puts the usage so far into each chunk."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with serving() as served:
        response = await served.post(
            "/v1/chat/completions", chat(stream=True, stream_options=options, max_completion_tokens=3)
        )
        chunks = events(response.body)[:-1]

    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 1, 2, 3, 3, 3]


async def test_token_ids_on_request() -> None:
    """return_token_ids lists the prompt's and the answer's ids, plain and streamed."""
    async with serving() as served:
        plain = (await served.post("/v1/chat/completions", chat(return_token_ids=True, max_tokens=2))).json
        response = await served.post("/v1/chat/completions", chat(return_token_ids=True, max_tokens=2, stream=True))
        chunks = events(response.body)[:-1]

    prompt = list(b"user:hi\nassistant:")
    assert (plain["prompt_token_ids"], plain["choices"][0]["token_ids"]) == (prompt, list(TEXT[:2].encode()))
    assert chunks[0]["choices"][0]["prompt_token_ids"] == prompt
    assert [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", [])] == list(TEXT[:2].encode())


async def test_silence_is_filled_with_comments() -> None:
    """The 200 waits for the first token or the first comment; comments come as long as nothing else does."""
    async with serving(keepalive_comment_s=0.02) as served:
        served.engine.hold()
        reader, writer = await served.connect()
        writer.write(http("POST", "/v1/chat/completions", chat(stream=True)))
        before = await reader.readuntil(b": keep-alive\n\n")
        await reader.readuntil(b": keep-alive\n\n")
        (await served.engine.call()).say("late")
        (await served.engine.call()).end()
        rest = await reader.read()
        writer.close()

    assert before.startswith(b"HTTP/1.1 200") and b"data:" not in before
    assert b'"role":"assistant"' in rest and b'"content":"late"' in rest and b"data: [DONE]\n\n" in rest


async def test_fields_reach_the_engine() -> None:
    """What the client asks for is what the engine gets."""
    fields = {
        "max_completion_tokens": 7,
        "max_tokens": 9,
        "min_tokens": 2,
        "stop": ["a", "bc"],
        "stop_token_ids": [5, 5],
        "temperature": 0.001,
        "top_p": 0.5,
        "top_k": 9999,
        "min_p": 0.1,
        "repetition_penalty": 1.5,
        "presence_penalty": -1,
        "frequency_penalty": 2,
        "seed": -1,
        "logit_bias": {"5": -100, "6": 1.5},
        "bad_words": ["x"],
        "allowed_token_ids": [1, 2],
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "priority": -3,
        "cache_salt": "salt",
        "n": 2,
    }
    async with serving() as served:
        await served.post("/v1/chat/completions", chat(**fields))
        request = served.engine.calls[0].request

    params = request.params
    assert (params.max_tokens, params.min_tokens, params.stop_token_ids) == (7, 2, (5,))
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.01, 0.5, 0, 0.1)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.5, -1, 2)
    assert params.logit_bias == ((5, -100.0), (6, 1.5))
    assert params.bad_words == (tuple(b"x"), tuple(b" x"))
    assert params.allowed_token_ids == (1, 2)
    assert (request.seed, request.stop, request.n, request.priority) == (2**64 - 1, ("a", "bc"), 2, -3)
    assert (request.ignore_eos, request.include_stop_str_in_output, request.skip_special_tokens) == (True, True, False)
    assert request.cache_salt == "salt"


async def test_null_means_default() -> None:
    """Every optional field may be null; without a length a chat may use all the room."""
    nulls = dict.fromkeys(set(ChatRequest.__struct_fields__) - {"messages"})
    async with serving() as served:
        response = await served.post("/v1/chat/completions", {"messages": HELLO, **nulls})
        params = served.engine.calls[0].request.params

    assert response.status == 200
    assert params.max_tokens == 512 - len("user:hi\nassistant:")
    assert (params.temperature, params.top_p, params.top_k) == (1.0, 1.0, 0)


async def test_parts_and_roles() -> None:
    """Text parts are joined by line feeds; a developer speaks as the system."""
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "c", "name": "me"},
    ]
    async with serving() as served:
        await served.post("/v1/chat/completions", chat(messages=messages))
        prompt = bytes(served.engine.calls[0].request.prompts[0].tolist())

    assert prompt == b"system:a\nb\nuser:c\nassistant:"


async def test_final_message_is_continued() -> None:
    """continue_final_message asks the template for no generation prompt."""
    messages = [*HELLO, {"role": "assistant", "content": "wel"}]
    async with serving() as served:
        await served.post("/v1/chat/completions", chat(messages=messages, continue_final_message=True))
        prompt = bytes(served.engine.calls[0].request.prompts[0].tolist())

    assert prompt == b"user:hi\nassistant:wel"


async def test_prompt_is_truncated_from_the_left() -> None:
    """truncate_prompt_tokens keeps the last tokens."""
    async with serving() as served:
        await served.post("/v1/chat/completions", chat(truncate_prompt_tokens=4))

        assert bytes(served.engine.calls[0].request.prompts[0].tolist()) == b"ant:"


async def test_model_defaults_apply_where_nothing_is_sent() -> None:
    """The generation_config's values are defaults, not limits."""
    async with serving(sampling_defaults=SamplingParams(temperature=0.6, top_k=20)) as served:
        await served.post("/v1/chat/completions", chat())
        await served.post("/v1/chat/completions", chat(temperature=0, top_k=-1))
        found = [(call.request.params.temperature, call.request.params.top_k) for call in served.engine.calls]

    assert found == [(0.6, 20), (0.0, 0)]


async def test_prompt_logprobs_of_a_plain_chat() -> None:
    """One entry a prompt token, null for the first."""
    async with serving() as served:
        answer = (await served.post("/v1/chat/completions", chat(prompt_logprobs=1, max_tokens=1))).json

    entries = answer["prompt_logprobs"]
    assert entries[0] is None and len(entries) == len("user:hi\nassistant:")
    assert entries[1] == {str(ord("s")): {"logprob": -0.5, "rank": 1, "decoded_token": "s"}}
