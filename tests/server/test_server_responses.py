"""The Responses API over HTTP: fields, events, objects, storage and faults, judged by the published types too."""

import asyncio
from typing import Any

import openresponses_types.types as published
import pytest
from fake_engine import TEXT, FakeEngine
from response_builders import RESPONSES, body, sse_events, text_of, types
from server_builders import Served, http, serving, unchunked
from wire_builders import until

from aserve.core.request import FinishReason
from aserve.engine.generation import Delta
from aserve.errors import Overloaded

WHOLE = [
    "created",
    "in_progress",
    "output_item.added",
    "content_part.added",
    "output_text.delta",
    "output_text.done",
    "content_part.done",
    "output_item.done",
]


async def stream(served: Served, **fields: Any) -> list[dict[str, Any]]:
    answer = await served.post(RESPONSES, body(stream=True, **fields))
    assert answer.status == 200
    return sse_events(answer.body)


async def prompt_of(served: Served, **fields: Any) -> str:
    """What the model was given for these fields."""
    answer = await served.post(RESPONSES, body(**fields))
    assert answer.status == 200, answer.body
    return bytes(served.engine.calls[-1].request.prompts[0].tolist()).decode()


# --- plain


async def test_plain_response_is_the_published_object() -> None:
    """Text, status and usage; every required field is there."""
    async with serving() as served:
        answer = await served.post(RESPONSES, body(max_output_tokens=40, metadata={"a": "b"}))

    published.ResponseResource.model_validate(answer.json)
    assert answer.json["status"] == "completed"
    assert answer.json["output"][0]["content"][0]["text"] == TEXT
    assert (answer.json["metadata"], answer.json["max_output_tokens"]) == ({"a": "b"}, 40)
    assert answer.json["usage"] == {
        "input_tokens": 18,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 14},
        "output_tokens": len(TEXT),
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 18 + len(TEXT),
    }


async def test_nothing_is_written_to_a_prefix_cache_that_is_off() -> None:
    """Usage then says 0."""
    async with serving() as served:
        served.engine.caches_prefixes = False
        answer = await served.post(RESPONSES, body())

    assert answer.json["usage"]["input_tokens_details"]["cache_write_tokens"] == 0


async def test_response_that_was_cut_by_its_length_is_incomplete() -> None:
    """The reason names the field that cut it."""
    async with serving() as served:
        answer = await served.post(RESPONSES, body(max_output_tokens=2))

    assert (answer.json["status"], answer.json["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (answer.json["completed_at"], answer.json["output"][0]["status"]) == (None, "incomplete")


async def test_logprobs_come_where_included() -> None:
    """By include, or by a number of alternatives; without either there are none."""
    async with serving() as served:
        with_top = await served.post(RESPONSES, body(top_logprobs=2))
        included = await served.post(RESPONSES, body(include=["message.output_text.logprobs"]))
        without = await served.post(RESPONSES, body())

    def logprobs(answer: Any) -> Any:
        return answer.json["output"][0]["content"][0]["logprobs"]

    assert [item["token"] for item in logprobs(with_top)] == list(TEXT)
    assert {len(item["top_logprobs"]) for item in logprobs(with_top)} == {2}
    assert {len(item["top_logprobs"]) for item in logprobs(included)} == {0}
    assert logprobs(without) == []


async def test_many_logprobs_are_written_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain and streamed, the large objects take a thread."""
    threads: list[Any] = []
    real = asyncio.to_thread

    async def to_thread(function: Any, *args: Any) -> Any:
        threads.append(function)
        return await real(function, *args)

    async with serving() as served:
        monkeypatch.setattr("aserve.server.response_events.MAX_INLINE_LOGPROBS", 10)
        monkeypatch.setattr("aserve.server.response_calls.asyncio.to_thread", to_thread)
        await served.post(RESPONSES, body(top_logprobs=2, store=False))
        assert len(threads) == 1
        events = await stream(served, top_logprobs=2, store=False)

    assert len(threads) == 1 + 1
    assert [item["token"] for item in events[-4]["logprobs"]] == list(TEXT)


# --- events


async def test_streamed_response_has_the_published_events() -> None:
    """In their order, numbered, about one item; the text joins to what done repeats."""
    async with serving() as served:
        events = await stream(served)

    assert types(events) == [*WHOLE, "completed"]
    assert text_of(events) == TEXT == events[-4]["text"] == events[-1]["response"]["output"][0]["content"][0]["text"]
    assert len({event["item_id"] for event in events if "item_id" in event}) == 1
    assert {event["output_index"] for event in events if "output_index" in event} == {0}
    assert events[0]["response"]["usage"] is None
    assert events[-1]["response"]["usage"]["output_tokens"] == len(TEXT)


async def test_streamed_and_plain_objects_are_the_same() -> None:
    """But for ids and times."""
    async with serving() as served:
        streamed = (await stream(served, seed=1, top_logprobs=1))[-1]["response"]
        plain = (await served.post(RESPONSES, body(seed=1, top_logprobs=1))).json

    for response in (streamed, plain):
        response["output"][0]["id"] = response["id"] = "x"
        response["created_at"] = response["completed_at"] = 0
    assert streamed == plain


async def test_deltas_carry_the_logprobs_of_their_tokens() -> None:
    """Those of a token without text wait for the next text."""
    async with serving() as served:
        events = await stream(served, top_logprobs=1)
        deltas = [event for event in events if event["type"] == "response.output_text.delta"]

    assert [[item["token"] for item in event["logprobs"]] for event in deltas] == [[char] for char in TEXT]


async def test_text_that_is_held_back_makes_no_event() -> None:
    """A token without text opens the item; line separators are escaped; an end without text has its done events."""
    async with serving() as served:
        served.engine.hold()
        asking = asyncio.create_task(served.post(RESPONSES, body(stream=True)))
        call = await served.engine.call()
        call.push(Delta(index=0, tokens=(1,)))
        call.push(Delta(index=0, text="\u2028\x85", tokens=(2,)))
        call.end()
        raw = (await asking).body
        events = sse_events(raw)

    assert types(events) == [*WHOLE, "completed"]
    assert text_of(events) == "\u2028\x85"
    assert b"\\u2028" in raw and len(raw.decode().splitlines()) == 3 * len(events)


async def test_events_of_one_step_leave_in_one_write() -> None:
    """Opening, item and first text are one chunk; the end of the text and of the body another."""
    async with serving() as served:
        served.engine.hold()
        reader, writer = await served.connect()
        writer.write(http("POST", RESPONSES, body(stream=True)))
        call = await served.engine.call()
        call.say("one")
        await reader.readuntil(b"\r\n\r\n")
        size = int((await reader.readuntil(b"\r\n")).strip(), 16)
        first = await reader.readexactly(size + 2)
        call.end()
        rest = await reader.read()
        writer.close()

    assert types(sse_events(first[:-2])) == WHOLE[:5]
    assert rest.count(b"event: response.completed") == 1


async def test_keep_alive_comes_before_a_late_first_token() -> None:
    """A silent stream carries comments; the events follow as ever."""
    async with serving(keepalive_comment_s=0.02) as served:
        served.engine.hold()
        reader, writer = await served.connect()
        writer.write(http("POST", RESPONSES, body(stream=True)))
        call = await served.engine.call()
        await reader.readuntil(b": keep-alive\n\n")
        call.say("late")
        call.end()
        rest = await reader.read()
        writer.close()

    assert b"response.completed" in rest


# --- faults


async def test_early_fault_has_its_own_status() -> None:
    """Before the first token nothing was promised."""
    async with serving() as served:
        served.engine.refusal = Overloaded("full", retry_after_s=2)
        refused = await served.post(RESPONSES, body(stream=True))
        served.engine.refusal = None
        served.engine.hold()
        asking = asyncio.create_task(served.post(RESPONSES, body(stream=True)))
        (await served.engine.call()).end(FinishReason.ERROR, error="The step failed.")
        failed = await asking

    assert (refused.status, refused.headers["Retry-After"]) == (503, "2")
    assert (failed.status, failed.error["message"]) == (500, "The step failed.")


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        (FinishReason.ERROR, "generation_failed"),
        (FinishReason.TIMEOUT, "deadline_exceeded"),
        (FinishReason.ABORT, "request_aborted"),
    ],
)
async def test_late_fault_is_the_last_event(reason: FinishReason, code: str) -> None:
    """response.failed has the cause and what was said before; such a response is forgotten."""
    async with serving() as served:
        served.engine.hold()
        asking = asyncio.create_task(served.post(RESPONSES, body(stream=True)))
        call = await served.engine.call()
        call.say("half")
        await until(lambda: not call.mail)
        call.end(reason, error="It broke.")
        events = sse_events((await asking).body)
        gone = await served.get(f"{RESPONSES}/{events[0]['response']['id']}")

    assert types(events)[-2:] == ["output_text.delta", "failed"]
    assert events[-1]["response"]["status"] == "failed"
    assert events[-1]["response"]["error"] == {"code": code, "message": "It broke."}
    assert gone.status == 404


async def test_fault_of_ours_is_told_and_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception between two events ends in response.failed, never in a cut that looks like an end."""
    async with serving() as served:
        served.engine.hold()
        asking = asyncio.create_task(served.post(RESPONSES, body(stream=True)))
        call = await served.engine.call()
        call.say("half")
        await until(lambda: not call.mail)
        monkeypatch.setattr("aserve.server.response_events.ResponseEvents._ending", None)
        call.end()
        events = sse_events((await asking).body)

    assert events[-1]["response"]["error"]["code"] == "internal_error"
    assert served.log.fields_of("request.finished")[0]["fault"] == "internal_error"


async def test_client_that_leaves_aborts_at_once() -> None:
    """Streamed and plain."""
    async with serving() as served:
        served.engine.hold()
        for index, streams in enumerate((True, False)):
            _, writer = await served.connect()
            writer.write(http("POST", RESPONSES, body(stream=streams), close=False))
            call = await served.engine.call(index)
            if streams:
                call.say("x")
            writer.close()
            await call.closed.wait()


async def test_keys_share_counts_responses_too() -> None:
    """The limit on open generations of a key is one for all endpoints."""
    keys = {"Authorization": "Bearer k"}
    async with serving(api_keys=("k",), max_requests_per_key=1) as served:
        served.engine.hold()
        asking = asyncio.create_task(served.post(RESPONSES, body(), headers=keys))
        call = await served.engine.call()
        refused = await served.post(RESPONSES, body(), headers=keys)
        call.end()
        await asking

    assert (refused.status, refused.error["code"]) == (429, "rate_limit_exceeded")


# --- input


async def test_input_shapes() -> None:
    """A string, messages of strings and of parts, earlier output, instructions first, developer as system."""
    item = {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "b", "annotations": [], "logprobs": []}],
    }
    async with serving() as served:
        text = await prompt_of(served, input="a", instructions="be brief")
        items = await prompt_of(
            served,
            input=[
                {"role": "developer", "content": "d"},
                {"role": "user", "content": [{"type": "input_text", "text": t} for t in "ab"]},
                item,
                {"type": "message", "role": "user", "content": "c"},
            ],
        )

    assert text == "system:be brief\nuser:a\nassistant:"
    assert items == "system:d\nuser:a\nb\nassistant:b\nuser:c\nassistant:"


async def test_sampling_fields_arrive() -> None:
    """The API's own, and those that all endpoints share."""
    async with serving() as served:
        await served.post(
            RESPONSES, body(temperature=0.5, top_p=0.25, max_output_tokens=7, top_k=3, seed=5, stop="x", min_p=0.1)
        )
        request = served.engine.calls[0].request

    params = request.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.max_tokens) == (0.5, 0.25, 3, 0.1, 7)
    assert (request.seed, request.stop) == (5, ("x",))


async def test_truncation_drops_the_oldest_turns() -> None:
    """auto keeps leading system turns and the most that fits, from a user's turn on; disabled is a 400."""
    turns = [{"role": role, "content": f"{role[0]}{i}" + "." * 20} for i in range(20) for role in ("user", "assistant")]
    turns.append({"role": "user", "content": "last"})
    async with serving(FakeEngine(max_model_len=164)) as served:
        kept = await prompt_of(served, input=turns, truncation="auto", instructions="s", max_output_tokens=8)
        refused = await served.post(RESPONSES, body(input=turns))
        hopeless = await served.post(RESPONSES, body(input="x" * 500, truncation="auto"))

    assert kept.startswith("system:s\nuser:u18.") and kept.endswith("user:last\nassistant:")
    assert (refused.status, refused.error["code"], refused.error["param"]) == (400, "context_length_exceeded", "input")
    assert (hopeless.status, hopeless.error["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "name": "f"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {}}}}, "text.format"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"n": 2}, "n"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 100000}, "max_output_tokens"),
        ({"include": ["message.output_text.logprobs", "all"]}, "include[1]"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input[0].type"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"temperature": 3}, "temperature"),
        ({"metadata": {"k": "x" * 513}}, "metadata"),
        ({"previous_response_id": "resp_nope"}, "previous_response_id"),
        ({"stream_options": {}}, "stream_options"),
    ],
)
async def test_fields_that_are_refused(fields: dict[str, Any], param: str) -> None:
    """Each with its path: what cannot be honoured is never ignored."""
    async with serving() as served:
        answer = await served.post(RESPONSES, body(**fields))

    assert (answer.status, answer.error["param"]) == (400, param)


async def test_fields_that_change_nothing_pass() -> None:
    """Defaults of official clients and what only concerns tools; what is not known is named in the header."""
    async with serving() as served:
        answer = await served.post(
            RESPONSES,
            body(
                tools=[],
                tool_choice="auto",
                parallel_tool_calls=False,
                max_tool_calls=3,
                background=False,
                store=False,
                service_tier="auto",
                user="u",
                safety_identifier="s",
                prompt_cache_key="k",
                reasoning={"effort": "low"},
                text={"format": {"type": "text"}},
                include=["reasoning.encrypted_content"],
                made_up=1,
            ),
        )

    assert answer.status == 200
    assert answer.headers["x-aserve-ignored-params"] == "made_up"
    assert (answer.json["user"], answer.json["reasoning"]["effort"]) == ("u", "low")


async def test_warming_says_nothing_and_can_be_gone_on_from() -> None:
    """generate false computes the prompt without a cue to answer; the next turn follows it."""
    async with serving() as served:
        warm = (await served.post(RESPONSES, body(instructions="s", generate=False))).json
        warmed = served.engine.calls[0].request
        prompt = await prompt_of(served, input="b", instructions="s", previous_response_id=warm["id"])
        events = await stream(served, prompt_cache_options={"prewarm": True})

    assert (warm["status"], warm["output"], warm["usage"]["output_tokens"]) == ("completed", [], 0)
    assert (bytes(warmed.prompts[0].tolist()), warmed.params.max_tokens) == (b"system:s\nuser:hi", 0)
    assert prompt == "system:s\nuser:hi\nuser:b\nassistant:"
    assert types(events) == ["created", "in_progress", "completed"]


# --- stored responses


async def test_stored_response_is_retrieved_gone_on_from_and_deleted() -> None:
    """Instructions are each response's own; the rest of the conversation is carried on."""
    async with serving() as served:
        first = (await served.post(RESPONSES, body(instructions="s"))).json
        retrieved = await served.get(f"{RESPONSES}/{first['id']}")
        prompt = await prompt_of(served, input="b", previous_response_id=first["id"])
        deleted = await served.request("DELETE", f"{RESPONSES}/{first['id']}")
        gone = await served.get(f"{RESPONSES}/{first['id']}")

    assert retrieved.json == first
    assert prompt == f"user:hi\nassistant:{TEXT}\nuser:b\nassistant:"
    assert deleted.json["deleted"] is True
    assert (gone.status, gone.error["code"]) == (404, "response_not_found")


async def test_what_is_not_to_be_stored_is_not() -> None:
    """store false leaves nothing behind."""
    async with serving() as served:
        first = (await served.post(RESPONSES, body(store=False))).json
        assert (await served.get(f"{RESPONSES}/{first['id']}")).status == 404
        refused = await served.post(RESPONSES, body(previous_response_id=first["id"]))

    assert refused.error["code"] == "previous_response_not_found"


async def test_stored_responses_are_their_owners() -> None:
    """Another key can neither see, go on from, cancel nor delete one."""
    mine, yours = ({"Authorization": f"Bearer {key}"} for key in ("mine", "yours"))
    async with serving(api_keys=("mine", "yours")) as served:
        first = (await served.post(RESPONSES, body(), headers=mine)).json
        path = f"{RESPONSES}/{first['id']}"
        answers = [
            await served.get(path, headers=yours),
            await served.request("DELETE", path, headers=yours),
            await served.post(f"{path}/cancel", headers=yours),
        ]
        refused = await served.post(RESPONSES, body(previous_response_id=first["id"]), headers=yours)
        own = await served.get(path, headers=mine)

    assert [answer.status for answer in answers] == [404] * 3
    assert (refused.status, own.status) == (400, 200)


async def test_store_is_bounded() -> None:
    """In number and in bytes, the oldest goes first; one that is too large for all of it is not kept."""
    async with serving(max_stored_responses=2) as served:
        ids = [(await served.post(RESPONSES, body())).json["id"] for _ in range(3)]
        assert [(await served.get(f"{RESPONSES}/{id}")).status for id in ids] == [404, 200, 200]
    async with serving(max_stored_bytes=100) as served:
        large = (await served.post(RESPONSES, body())).json
        assert (await served.get(f"{RESPONSES}/{large['id']}")).status == 404


async def test_running_response_is_seen_and_cancelled() -> None:
    """It keeps its text; its stream ends in an event, and what was said can be gone on from."""
    async with serving() as served:
        served.engine.hold()
        asking = asyncio.create_task(served.post(RESPONSES, body(stream=True)))
        call = await served.engine.call()
        call.say("half")
        await until(lambda: not call.mail)
        running = await served.get(f"{RESPONSES}/{call.request_id}")
        cancelled = await served.post(f"{RESPONSES}/{call.request_id}/cancel")
        events = sse_events((await asking).body)
        served.engine.release()
        prompt = await prompt_of(served, input="b", previous_response_id=call.request_id)
        again = await served.post(f"{RESPONSES}/{call.request_id}/cancel")

    assert running.json["status"] == "in_progress"
    assert cancelled.json["status"] == "cancelled"
    assert types(events)[-1] == "incomplete"
    assert events[-1]["response"]["incomplete_details"] == {"reason": "cancelled"}
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "half"
    assert prompt == "user:hi\nassistant:half\nuser:b\nassistant:"
    assert again.json["status"] == "cancelled"


async def test_plain_response_that_is_cancelled_is_answered() -> None:
    """With what there is, not with an error."""
    async with serving() as served:
        served.engine.hold()
        asking = asyncio.create_task(served.post(RESPONSES, body()))
        call = await served.engine.call()
        call.say("half")
        await served.post(f"{RESPONSES}/{call.request_id}/cancel")
        answer = await asking

    assert (answer.status, answer.json["status"]) == (200, "cancelled")


async def test_paths_around_an_id() -> None:
    """cancel is taken by its own path, everything else below an id is none of ours."""
    async with serving() as served:
        statuses = [
            (await served.request(method, path)).status
            for method, path in [
                ("GET", f"{RESPONSES}/resp_1/cancel"),
                ("POST", f"{RESPONSES}/resp_1/cancel"),
                ("POST", f"{RESPONSES}/resp_1"),
                ("GET", f"{RESPONSES}/resp_1/input_items"),
                ("HEAD", RESPONSES),
            ]
        ]

    assert statuses == [405, 404, 405, 404, 404]


async def test_http_1_0_gets_its_stream_without_chunks() -> None:
    """The body ends with the connection."""
    async with serving() as served:
        raw = await served.raw(http("POST", RESPONSES, body(stream=True)).replace(b"HTTP/1.1", b"HTTP/1.0", 1))
        chunked = await served.raw(http("POST", RESPONSES, body(stream=True)))

    assert types(sse_events(raw.partition(b"\r\n\r\n")[2])) == [*WHOLE, "completed"]
    assert types(sse_events(unchunked(chunked)[1])) == [*WHOLE, "completed"]
