"""Every case of the table of errors: status, code, param, and whether to come back."""

import asyncio
import json
from typing import Any

import pytest
from server_builders import HELLO, chat, http, serving
from wire_builders import JSON

from aserve.core.request import FinishReason
from aserve.engine.generation import Delta
from aserve.errors import EngineDead, InvalidRequest, ModelLoading, Overloaded

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def user(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    ({}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": {}}, "messages"),
    ({"messages": [{}]}, "messages[0].role"),
    ({"messages": [{"role": 5, "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ({"messages": [*HELLO, {"role": "user"}]}, "messages[1].content"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
    (user(5), "messages[0].content"),
    (user([{"type": "image_url", "image_url": {"url": "data:image/png"}}]), "messages[0].content[0].type"),
    (user([{"type": "text"}]), "messages[0].content[0].text"),
    (user([{"type": "text", "text": 1}]), "messages[0].content[0].text"),
    (user(["x"]), "messages[0].content[0]"),
    (chat(max_completion_tokens=0), "max_completion_tokens"),
    (chat(top_logprobs=3), "top_logprobs"),
    (chat(logprobs=True, top_logprobs=21), "top_logprobs"),
    (chat(logprobs=1), "logprobs"),
    (chat(stream_options={"include_usage": True}), "stream_options"),
    (chat(stream=True, stream_options={"include_usage": 1}), "stream_options.include_usage"),
    (chat(stream=True, prompt_logprobs=1), "prompt_logprobs"),
    (chat(chat_template_kwargs={"messages": []}), "chat_template_kwargs.messages"),
    (chat(chat_template_kwargs={"a b": 1}), "chat_template_kwargs.a b"),
    (chat(chat_template_kwargs={"a": "x" * 20000}), "chat_template_kwargs"),
    (chat(chat_template_kwargs={"refuse": True}), "messages"),
    (chat(continue_final_message=True), "continue_final_message"),
    (chat(min_tokens=9, max_tokens=3), "min_tokens"),
    (chat(cache_salt="x" * 257), "cache_salt"),
]

BAD_TEXTS: list[tuple[dict[str, Any], str]] = [
    ({}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [""]}, "prompt[0]"),
    ({"prompt": ["a", 1]}, "prompt[1]"),
    ({"prompt": [[1], "a"]}, "prompt[1]"),
    ({"prompt": [[1], []]}, "prompt[1]"),
    ({"prompt": [-1]}, "prompt[0]"),
    ({"prompt": [0, 151999999]}, "prompt[1]"),
    ({"prompt": [1.5]}, "prompt[0]"),
    ({"prompt": [True]}, "prompt[0]"),
    ({"prompt": [2**64]}, "prompt[0]"),
    ({"prompt": [[1, None]]}, "prompt[0][1]"),
    ({"prompt": [{}]}, "prompt[0]"),
    ({"prompt": ["a"] * 65}, "prompt"),
    ({"prompt": ["a"] * 33, "n": 2}, "n"),
    *[({"prompt": "a", "max_tokens": bad}, "max_tokens") for bad in (-1, 0, 1.5, 1.0, 10**18, 2**64, "8", True, [])],
    *[({"prompt": "a", "temperature": bad}, "temperature") for bad in (1e9, 2.0001, -1, "NaN", True)],
    *[({"prompt": "a", "top_p": bad}, "top_p") for bad in (-0.1, 1.1, "1")],
    *[({"prompt": "a", "top_k": bad}, "top_k") for bad in (-2, 1.0, "5", False)],
    *[({"prompt": "a", "min_p": bad}, "min_p") for bad in (-0.1, 1.1)],
    *[({"prompt": "a", "n": bad}, "n") for bad in (0, 9, 100000, True, 1.0)],
    *[({"prompt": "a", "seed": bad}, "seed") for bad in (2**63, 1.0, "1")],
    *[({"prompt": "a", "repetition_penalty": bad}, "repetition_penalty") for bad in (0, -1, 101)],
    *[({"prompt": "a", "presence_penalty": bad}, "presence_penalty") for bad in (2.1, -2.1, "x")],
    *[
        ({"prompt": "a", "logit_bias": bad}, "logit_bias")
        for bad in (
            {"999999": 5},
            {"-1": 5},
            {"abc": 5},
            {"٣": 5},
            {"9" * 5000: 5},
            {"5": 1e39},
            {"5": "x"},
            {"5": None},
            {str(i): 1 for i in range(301)},
            [],
        )
    ],
    *[({"prompt": "a", "stop": bad}, "stop") for bad in ("", 5, ["x"] * 17, "x" * 257, {})],
    ({"prompt": "a", "stop": [""]}, "stop[0]"),
    ({"prompt": "a", "stop": ["a", "x" * 1_000_00]}, "stop[1]"),
    ({"prompt": "a", "stop": ["a", None]}, "stop[1]"),
    ({"prompt": "a", "stop_token_ids": [5_000_000], "min_tokens": 4}, "stop_token_ids"),
    ({"prompt": "a", "stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"prompt": "a", "stop_token_ids": list(range(16))}, "stop_token_ids"),
    ({"prompt": "a", "stop_token_ids": list(range(17))}, "stop_token_ids"),
    ({"prompt": "a", "allowed_token_ids": []}, "allowed_token_ids"),
    ({"prompt": "a", "allowed_token_ids": [258]}, "allowed_token_ids"),
    ({"prompt": "a", "bad_words": [""]}, "bad_words[0]"),
    ({"prompt": "a", "logprobs": 1_000_000}, "logprobs"),
    ({"prompt": "a", "logprobs": True}, "logprobs"),
    ({"prompt": "a", "prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"prompt": "a", "timeout": 0}, "timeout"),
    ({"prompt": "a", "stream": "yes"}, "stream"),
    ({"prompt": "a", "model": 5}, "model"),
]

UNSUPPORTED: list[tuple[str, Any]] = [
    ("tools", [{"type": "function"}]),
    ("tool_choice", "auto"),
    ("tool_choice", "required"),
    ("functions", [{}]),
    ("response_format", {"type": "json_object"}),
    ("response_format", {"type": "json_schema", "json_schema": {}}),
    ("structured_outputs", {"json": {}}),
    ("guided_json", {}),
    ("guided_regex", "a+"),
    ("modalities", ["text", "audio"]),
    ("chat_template", "{{ messages }}"),
    ("use_beam_search", True),
    ("suffix", "z"),
    ("web_search_options", {}),
]


@pytest.mark.parametrize(("body", "param"), BAD_CHATS, ids=str)
async def test_bad_chat_names_its_field(body: dict[str, Any], param: str) -> None:
    """A missing, mistyped or impossible field is a 400 with its path, which no retry can cure."""
    await _is_refused(CHAT, body, param)


@pytest.mark.parametrize(("body", "param"), BAD_TEXTS, ids=lambda value: str(value)[:60])
async def test_bad_completion_names_its_field(body: dict[str, Any], param: str) -> None:
    """The same for completions."""
    await _is_refused(TEXT, body, param)


async def _is_refused(path: str, body: dict[str, Any], param: str) -> None:
    async with serving() as served:
        answer = await served.post(path, body)
        again = await served.post(CHAT, chat(max_tokens=1))

        assert (answer.status, answer.error["type"], answer.error["param"]) == (400, "invalid_request_error", param)
        assert answer.headers["x-should-retry"] == "false"
        assert (again.status, len(served.engine.calls)) == (200, 1)


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(("name", "value"), UNSUPPORTED, ids=str)
async def test_unsupported_field_is_refused_and_never_ignored(name: str, value: Any, path: str) -> None:
    """A known field that would change the answer is a 400 that says so; null asks for nothing."""
    async with serving() as served:
        answer = await served.post(path, {**chat(), "prompt": "a", name: value})
        empty = await served.post(path, {**chat(), "prompt": "a", name: None})

    assert (answer.status, answer.error["code"], answer.error["param"]) == (400, "unsupported", name)
    assert "not supported" in answer.error["message"]
    assert empty.status == 200


async def test_best_of_other_than_n_is_unsupported() -> None:
    """best_of is served only where it changes nothing."""
    async with serving() as served:
        refused = await served.post(TEXT, {"prompt": "a", "best_of": 2})
        served_too = await served.post(TEXT, {"prompt": "a", "best_of": 1})

    assert (refused.status, refused.error["param"], served_too.status) == (400, "best_of", 200)


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/v1/embeddings"), ("POST", "/v1/messages")],
)
async def test_endpoint_to_come_says_so(method: str, path: str) -> None:
    """What is not there yet is a 400, not a 404."""
    async with serving() as served:
        answer = await served.request(method, path)

    assert (answer.status, answer.error["code"]) == (400, "unsupported")
    assert "not supported" in answer.error["message"]


async def test_harmless_values_of_unsupported_fields_pass() -> None:
    """Clients send many fields with their defaults."""
    harmless = {
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "parallel_tool_calls": True,
        "suffix": "",
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "logit_bias": {},
        "stop": [],
    }
    async with serving() as served:
        answer = await served.post(CHAT, chat(**harmless))

    assert answer.status == 200
    assert "x-aserve-ignored-params" not in answer.headers


BAD_BODIES = [
    b"",
    b"{",
    b"[]",
    b"null",
    b"5",
    b'"s"',
    b"\xef\xbb\xbf{}",
    "{}".encode("utf-16"),
    b'{"a":"\xff\xfe"}',
    b'{"messages":[{"role":"user","content":"hi \\ud83d"}]}',
    b'{"temperature":NaN}',
    b'{"temperature":Infinity}',
    b'{"temperature":1e400}',
    b"\0",
    b"[" * 20000 + b"]" * 20000,
    b'{"messages":[{"role":"user","content":"x"}],"prompt":"x","tokens":[],"x":' + b"[" * 10000 + b"]" * 10000 + b"}",
    b'{"messages":[{"role":"user","content":"x"}],"prompt":"x","tokens":[],"x":' + b'{"a":' * 300 + b"1" + b"}" * 301,
    b'{"messages":[{"role":"user","content":"x"}],"prompt":"x","tokens":[],"x":' + b"[" * 64 + b"]" * 64 + b"}",
]


@pytest.mark.parametrize("path", [CHAT, TEXT, "/tokenize", "/detokenize", "/apply-template"])
async def test_body_that_is_no_json_object_is_refused(path: str) -> None:
    """Not JSON, not UTF-8, not an object or too deep: 400, and the connection goes on."""
    async with serving() as served:
        reader, writer = await served.connect()
        for body in BAD_BODIES:
            writer.write(http("POST", path, body, close=False))
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].split()[0])
            error = json.loads(await reader.readexactly(length))["error"]
            assert (head.split()[1], error["type"]) == (b"400", "invalid_request_error"), body[:40]
        writer.close()


async def test_depth_of_64_is_allowed_even_among_many_brackets() -> None:
    """Only nesting counts, not the number of arrays."""
    deep: Any = 1
    for _ in range(63):
        deep = [deep]
    async with serving() as served:
        answer = await served.post(CHAT, chat(x=deep, y=[[]] * 200))

    assert answer.status == 200


@pytest.mark.parametrize(
    "headers",
    [
        "Content-Type: text/plain\r\n",
        "Content-Type: application/json; charset=bogus\r\n",
        "Content-Type: application/json; charset=utf-16\r\n",
        "Content-Type: multipart/form-data; boundary=x\r\n",
        "Content-Type:\r\n",
    ],
)
async def test_other_content_type_is_refused(headers: str) -> None:
    """Only application/json in UTF-8 is read."""
    async with serving() as served:
        raw = await served.raw(http("POST", CHAT, chat(), headers=headers))

    assert raw.startswith(b"HTTP/1.1 400 ")


async def test_compressed_body_is_refused_unread() -> None:
    """A Content-Encoding is a 415, whatever it would unpack to."""
    async with serving() as served:
        raw = await served.raw(http("POST", CHAT, b"\x1f\x8b", headers=f"{JSON}Content-Encoding: gzip\r\n"))

    assert raw.startswith(b"HTTP/1.1 415 ")


@pytest.mark.parametrize("chunked", [False, True])
async def test_body_over_the_cap_is_refused(chunked: bool) -> None:
    """413, from the header where it says the length, else as soon as too much has come."""

    async def body() -> Any:
        for _ in range(4):
            yield b" " * 600

    async with serving(max_body_bytes=1000) as served:
        sent: Any = body() if chunked else b" " * 2400
        answer = await served.request("POST", CHAT, data=sent, headers={"Content-Type": "application/json"})

    assert (answer.status, answer.headers["x-should-retry"]) == (413, "false")


async def test_large_body_is_read_and_parsed_in_a_worker() -> None:
    """A body above the threshold gives the same answer; a fault in it the same error."""
    async with serving(offload_bytes=100) as served:
        good = await served.post(TEXT, {"prompt": "a" * 400, "max_tokens": 2})
        bad = await served.post(TEXT, {"prompt": "a" * 400, "max_tokens": -2})

    assert (good.status, bad.status, bad.error["param"]) == (200, 400, "max_tokens")


@pytest.mark.parametrize(
    "body", [b"zz\r\n", b"-1\r\n", b"0x5\r\nhello\r\n", b"5;a=\nb\r\nhello\r\n0\r\n\r\n", b"1" * 20 + b"\r\n"]
)
async def test_broken_transfer_coding_is_refused_at_once(body: bytes) -> None:
    """A chunk size that is none, when the headers have been read already: 400 and the end of the connection."""
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\n{JSON}Transfer-Encoding: chunked\r\nExpect: 100-continue\r\n\r\n"
    )
    async with serving() as served:
        reader, writer = await served.connect()
        writer.write(head.encode())
        await reader.readuntil(b"100 Continue\r\n\r\n")
        writer.write(body)
        raw = await reader.read()
        writer.close()

        assert raw.startswith(b"HTTP/1.1 400 ") and b"Connection: close\r\n" in raw
        assert [event for level, event, _ in served.log.records if level == "error"] == []


async def test_expected_continue_is_given_only_to_what_will_be_read() -> None:
    """100 Continue comes when headers and key are right, and the body may follow."""
    async with serving() as served:
        reader, writer = await served.connect()
        body = json.dumps(chat(max_tokens=1)).encode()
        sent = http("POST", CHAT, body, headers=f"{JSON}Expect: 100-continue\r\n", close=False)
        writer.write(sent.removesuffix(body))
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        writer.close()


@pytest.mark.parametrize("model", ["nope", "", "../../etc/passwd", "..%2f..", "a\0b", "a\nb", "x" * 10240])
async def test_unknown_model_is_not_found(model: str) -> None:
    """The name is compared with the served ones and used for nothing else."""
    async with serving() as served:
        answer = await served.post(CHAT, chat(model=model))

    assert (answer.status, answer.error["code"], answer.error["param"]) == (404, "model_not_found", "model")
    assert len(answer.body) < 400


async def test_prompt_beyond_the_context_names_both_numbers() -> None:
    """context_length_exceeded, with the prompt's length and the context's; one less fits."""
    async with serving() as served:
        answer = await served.post(TEXT, {"prompt": "a" * 512, "max_tokens": 1})
        one_more = await served.post(TEXT, {"prompt": "a" * 504, "max_tokens": 9})
        exact = await served.post(TEXT, {"prompt": "a" * 504, "max_tokens": 8})
        as_chat = await served.post(CHAT, {"messages": [{"role": "user", "content": "a" * 600}]})

    assert (answer.status, answer.error["code"], answer.error["param"]) == (400, "context_length_exceeded", "prompt")
    assert "512" in answer.error["message"]
    assert (one_more.status, one_more.error["param"], exact.status) == (400, "max_tokens", 200)
    assert (as_chat.error["code"], as_chat.error["param"]) == ("context_length_exceeded", "messages")


@pytest.mark.parametrize(
    ("refusal", "options", "status", "code", "retry_after"),
    [
        (Overloaded("full", retry_after_s=2.1), {}, 503, "server_overloaded", "3"),
        (Overloaded("full", retry_after_s=0.1), {"queue_full_status": 429}, 429, "server_overloaded", "1"),
        (ModelLoading("not yet", retry_after_s=5), {}, 503, "model_loading", "5"),
        (EngineDead("gone"), {}, 503, "engine_dead", None),
        (InvalidRequest("no", param="x"), {}, 400, None, None),
        (ValueError("bug"), {}, 500, "internal_error", None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_engine_that_refuses_gives_the_real_status(
    refusal: Exception, options: dict[str, Any], status: int, code: str, retry_after: str | None, stream: bool
) -> None:
    """A refusal is JSON with its own status, for a stream as well; our bug is a 500 that tells nothing."""
    async with serving(**options) as served:
        served.engine.refusal = refusal
        answer = await served.post(CHAT, chat(stream=stream))

        assert (answer.status, answer.error["code"], answer.headers.get("Retry-After")) == (status, code, retry_after)
        assert "bug" not in answer.body.decode()
        assert answer.headers["Content-Type"].startswith("application/json")
        logged = served.log.fields_of("request.failed")
        assert [fields["exc_info"] for fields in logged] == ([refusal] if status == 500 else [])


@pytest.mark.parametrize(
    ("reason", "status", "code"),
    [
        (FinishReason.ERROR, 500, "generation_failed"),
        (FinishReason.TIMEOUT, 504, "deadline_exceeded"),
        (FinishReason.ABORT, 499, "request_aborted"),
    ],
)
async def test_fault_before_the_first_token_has_its_status(reason: FinishReason, status: int, code: str) -> None:
    """The 200 is held back, so an early fault of a stream is an ordinary error; a plain answer's fault always is."""
    async with serving() as served:
        served.engine.hold()
        for index, stream in enumerate((True, False)):
            answer = asyncio.create_task(served.post(CHAT, chat(stream=stream)))
            (await served.engine.call(index)).end(reason, error="The step failed.")
            assert ((await answer).status, (await answer).error["code"]) == (status, code)
            assert (await answer).error["message"] == "The step failed."


async def test_fault_of_one_choice_fails_a_plain_answer_and_aborts_the_others() -> None:
    """Half an answer is none."""
    async with serving() as served:
        served.engine.hold()
        answer = asyncio.create_task(served.post(CHAT, chat(n=2)))
        call = await served.engine.call()
        call.say("a", 0)
        call.push(Delta(index=1, finish=FinishReason.ERROR, error="NaN"))

        assert (await answer).status == 500
        assert call.is_closed


async def test_fault_after_the_first_token_is_a_last_event() -> None:
    """An error event without [DONE], the end of the body, and a closed connection."""
    async with serving() as served:
        served.engine.hold()
        reader, writer = await served.connect()
        writer.write(http("POST", CHAT, chat(stream=True), close=False))
        call = await served.engine.call()
        call.say("a")
        await reader.readuntil(b'"content":"a"')
        call.push(Delta(index=0, text="b", tokens=(98,)), Delta(index=0, finish=FinishReason.ERROR, error="NaN"))
        rest = await reader.read()
        writer.close()

        assert b'"content":"b"' in rest and b"[DONE]" not in rest
        last = json.loads(rest.split(b"data: ")[-1].partition(b"\n\n")[0])
        assert last == {"error": {"message": "NaN", "type": "server_error", "param": None, "code": "generation_failed"}}
        assert rest.endswith(b"\r\n0\r\n\r\n")
        assert served.log.fields_of("request.finished")[-1]["fault"] == "generation_failed"


async def test_bug_in_the_middle_of_a_stream_does_not_look_like_its_end() -> None:
    """An exception of ours becomes an error event and is logged with its traceback."""
    async with serving() as served:
        served.engine.hold()
        answer = asyncio.create_task(served.post(CHAT, chat(stream=True)))
        call = await served.engine.call()
        call.say("a")
        call.push(Delta(index=7, text="b"))
        body = (await answer).body.decode()

        assert "[DONE]" not in body and "internal_error" in body
        assert isinstance(served.log.fields_of("request.finished")[-1]["exc_info"], IndexError)


async def test_stream_that_just_stops_is_an_error() -> None:
    """No tokens, no reason: never a success with nothing in it."""
    async with serving() as served:
        served.engine.hold()
        for index, stream in enumerate((True, False)):
            answer = asyncio.create_task(served.post(CHAT, chat(stream=stream)))
            call = await served.engine.call(index)
            call.num_unread = 0
            call.news.set()
            assert ((await answer).status, (await answer).error["code"]) == (500, "generation_failed")


async def test_unknown_fields_are_ignored_named_and_logged_once() -> None:
    """The names are the client's: stripped of what a header or a log cannot take, cut, and bounded in number."""
    unknown = {"top_a": 1, "x\r\nEvil: 1": 2, "é" * 3: 3, "y" * 100: 4}
    async with serving() as served:
        first = await served.post(CHAT, chat(**unknown))
        second = await served.post(CHAT, chat(**{f"field_{i}": i for i in range(100)}, top_a=2))
        noted = [fields["name"] for fields in served.log.fields_of("request.unknown_field")]

    assert first.status == 200
    assert first.headers["x-aserve-ignored-params"] == f"top_a, xEvil1, ?, {'y' * 64}"
    assert len(second.headers["x-aserve-ignored-params"].split(", ")) == 16
    assert len(noted) == len(set(noted)) == 4 + 16


async def test_deadline_counts_from_the_request() -> None:
    """timeout reaches the engine less what has passed; a timeout that has passed already is a 504."""
    async with serving() as served:
        await served.post(CHAT, chat(timeout=30))
        late = await served.post(CHAT, chat(timeout=1e-9))

        deadline_s = served.engine.calls[0].request.deadline_s
        assert deadline_s is not None and 29 < deadline_s < 30
        assert (late.status, late.error["code"], len(served.engine.calls)) == (504, "deadline_exceeded", 1)


@pytest.mark.parametrize(
    "path", ["/", "/nope", "/v1", "/v1/chat/completions/", "/metricsx", "/%00", "//health", "/..%2f"]
)
async def test_unknown_path_is_not_found(path: str) -> None:
    """404 in the usual shape."""
    async with serving() as served:
        raw = await served.raw(http("GET", path))

    assert raw.startswith(b"HTTP/1.1 404 ")
    assert json.loads(raw.partition(b"\r\n\r\n")[2])["error"]["code"] == "not_found"


async def test_wrong_method_names_the_right_ones() -> None:
    """405 with Allow."""
    async with serving() as served:
        answer = await served.get(CHAT)

    assert (answer.status, answer.headers["Allow"]) == (405, "OPTIONS, POST")
    assert answer.error["code"] == "method_not_allowed"


@pytest.mark.parametrize(
    "sent",
    [
        b"hello\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nBad Header: x\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: +5\r\n\r\nhello",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0_5\r\n\r\nhello",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: other\r\nConnection: close\r\n\r\n",
        b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 20000 + b"\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
async def test_what_is_not_http_is_refused_in_our_shape(sent: bytes) -> None:
    """400 as JSON with a request id, and the connection closes."""
    async with serving() as served:
        raw = await served.raw(sent)

    assert raw.startswith((b"HTTP/1.1 400 ", b"HTTP/1.0 400 "))
    assert b"X-Request-ID: req-" in raw
    assert json.loads(raw.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"
