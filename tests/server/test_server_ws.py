"""Responses over a websocket: lanes, conversations, cancelling, faults, heartbeat, draining and closing."""

import asyncio
import json
import re
import socket
from typing import Any

import aiohttp
import pytest
from fake_engine import TEXT, FakeCall
from response_builders import (
    RESPONSES,
    Socket,
    client_frame,
    create,
    raw_socket,
    socket_of,
    text_of,
    types,
)
from server_builders import Served, serving
from wire_builders import until

from aserve.core.request import FinishReason
from aserve.engine.generation import Delta
from aserve.engine.stream import Timings
from aserve.errors import Overloaded
from aserve.server.lanes import Lanes


def prompt_of(call: FakeCall) -> str:
    return bytes(call.request.prompts[0].tolist()).decode()


async def running(served: Served, ws: Socket, **fields: Any) -> FakeCall:
    """The call of a response that has been sent and begun; its opening events are taken."""
    index = len(served.engine.calls)
    await ws.send(create(**fields))
    call = await served.engine.call(index)
    await ws.until("in_progress")
    return call


# --- one response


async def test_response_over_a_websocket_has_the_events_of_sse() -> None:
    """In the same order, numbered; several on one socket, each numbered from 0."""
    async with serving() as served, socket_of(served) as ws:
        for _ in range(2):
            await ws.send(create())
            events = await ws.whole()

            assert types(events) == [
                "created",
                "in_progress",
                "output_item.added",
                "content_part.added",
                "output_text.delta",
                "output_text.done",
                "content_part.done",
                "output_item.done",
                "completed",
            ]
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
            assert text_of(events) == TEXT
            assert not any("stream_id" in event for event in events)


async def test_upgrade_is_answered_with_our_headers() -> None:
    """X-Request-ID is on the 101; no extension and no subprotocol are taken."""
    async with serving() as served:
        async with served.session.ws_connect(
            served.url + RESPONSES, headers={"X-Request-ID": "mine"}, compress=15, protocols=("x",)
        ) as ws:
            headers = ws._response.headers

            assert headers["X-Request-ID"] == "mine"
            assert not {"Sec-WebSocket-Extensions", "Sec-WebSocket-Protocol", "Content-Length"} & set(headers)
            assert (ws.compress, ws.protocol) == (0, None)
        await until(lambda: served.log.fields_of("request.finished"))
        line = served.log.fields_of("request.finished")[0]

    assert (line["status"], line["close_code"], line["request_id"]) == (101, 1000, "mine")


async def test_life_of_a_socket_is_no_latency() -> None:
    """The histogram gets the time of the upgrade and that of the response, the log line the whole."""
    async with serving() as served:
        async with socket_of(served) as ws:
            await ws.send(create())
            await ws.whole()
        await until(lambda: served.log.fields_of("request.finished"))
        line = served.log.fields_of("request.finished")[0]

        assert served.metrics.http_duration.count == 2
        assert 0 < served.metrics.http_duration.sum * 1000 < line["ms"]


async def test_each_response_counts_like_an_answer_of_its_own() -> None:
    """By the status that it would have had over HTTP: ended, refused, failed, and left by its client."""
    async with serving() as served:
        async with socket_of(served) as ws:
            await ws.send(create())
            await ws.whole()
            await ws.send(create(model="other"))
            await ws.whole()
            served.engine.hold()
            call = await running(served, ws)
            call.end(FinishReason.ERROR, error="The step failed.")
            await ws.whole()
            await running(served, ws)
        await until(lambda: served.log.fields_of("request.finished"))
        page = served.metrics.render().decode()

    statuses = re.findall(
        r'aserve_http_responses_total{method="WEBSOCKET",route="/v1/responses",status="(\d+)"} 1.0', page
    )
    assert sorted(statuses) == ["200", "404", "499", "500"]


async def test_opening_comes_before_the_first_token() -> None:
    """So that the client knows the id by which it may cancel."""
    async with serving() as served, socket_of(served) as ws:
        served.engine.hold()
        await ws.send(create())
        created = await ws.receive()
        call = await served.engine.call()
        call.end()

        assert created["response"]["id"] == call.request_id


async def test_unknown_fields_and_needless_ones() -> None:
    """stream may be true; what is not known is logged."""
    async with serving() as served, socket_of(served) as ws:
        await ws.send(create(stream=True, made_up=1, background=False))
        assert types(await ws.whole())[-1] == "completed"

        assert [fields["name"] for fields in served.log.fields_of("request.unknown_field")] == ["made_up"]


# --- lanes


async def test_lane_is_first_in_first_out() -> None:
    """The next request of a lane is not submitted before the last event of the one ahead of it."""
    async with serving() as served, socket_of(served) as ws:
        served.engine.hold()
        first = await running(served, ws, input="1")
        await ws.send(create(input="2"), create(input="3"), {"type": "aserve:response.cancel", "response_id": "none"})
        await ws.until("error")  # all three have been read
        assert len(served.engine.calls) == 1
        for number in (1, 2, 3):
            call = await served.engine.call(number - 1)
            assert prompt_of(call) == f"user:{number}\nassistant:"
            call.say(str(number))
            call.end()
            assert text_of(await ws.whole()) == str(number)

        assert first is served.engine.calls[0]


async def test_lanes_run_side_by_side() -> None:
    """A later lane may end first; every event names its lane, and numbers count within a response."""
    async with serving() as served, socket_of(served) as ws:
        served.engine.hold()
        slow = await running(served, ws, stream_id="slow.1")
        quick = await running(served, ws, stream_id="quick_2-x")
        slow.say("s")
        await ws.until("output_text.delta")
        quick.say("q")
        quick.end()
        of_quick = await ws.whole()
        slow.end()
        of_slow = await ws.whole()

    assert {event["stream_id"] for event in of_quick} == {"quick_2-x"}
    assert {event["stream_id"] for event in of_slow} == {"slow.1"}
    assert (of_quick[0]["sequence_number"], of_slow[0]["sequence_number"]) == (2, 5)


async def test_events_of_several_lanes_leave_in_one_write() -> None:
    """What one turn of the loop brings to a socket is one packet."""
    async with serving() as served, socket_of(served) as ws:
        served.engine.hold()
        calls = [await running(served, ws, stream_id=str(lane)) for lane in range(8)]
        transport = next(iter(served.server._http.connections)).transport
        writes: list[bytes] = []
        real = transport.write
        connection = next(iter(served.server._http.connections))

        class Counting:
            def __getattr__(self, name: str) -> Any:
                return getattr(transport, name)

            def write(self, data: bytes) -> None:
                writes.append(data)
                real(data)

        connection.transport = Counting()
        for call in calls:
            call.say("x")
        for _ in calls:
            await ws.until("output_text.delta")
        connection.transport = transport
        for call in calls:
            call.end()
        for _ in calls:
            await ws.whole()

    assert len(writes) == 1


@pytest.mark.parametrize("name", ["", "a b", "ä", "x" * 257, 5, ["x"]])
async def test_lane_names_are_checked(name: Any) -> None:
    """An error event that names the field, and no lane."""
    async with serving() as served, socket_of(served) as ws:
        await ws.send(create(stream_id=name))
        error = await ws.receive()

    assert (error["status"], error["error"]["param"]) == (400, "stream_id")
    assert "stream_id" not in error


async def test_lanes_are_bounded() -> None:
    """In lanes and in what waits: a typed error for each request too many; what runs is not disturbed."""
    async with serving(max_lanes=2, max_lane_requests=1) as served, socket_of(served) as ws:
        served.engine.hold()
        calls = [await running(served, ws, stream_id=name) for name in ("a", "b")]
        await ws.send(create(stream_id="c"), create(stream_id="a"), create(stream_id="b"))
        errors = [await ws.receive() for _ in range(2)]
        for call in calls:
            call.end()
        assert [types(await ws.until("completed"))[-1] for _ in calls] == ["completed"] * 2
        (await served.engine.call(2)).end()
        await ws.whole()

    assert [(error["stream_id"], error["status"]) for error in errors] == [("c", 429), ("b", 429)]
    assert errors[0]["error"]["code"] == "rate_limit_exceeded"


async def test_socket_that_does_not_heed_refusals_is_closed() -> None:
    """1013 after many in a row: nobody reads them."""
    async with serving(max_lanes=1, max_lane_requests=0) as served, socket_of(served) as ws:
        served.engine.hold()
        await running(served, ws)
        await ws.send(*[create()] * 64)

        assert (await ws.closed())[0] == 1013
        await served.engine.calls[0].closed.wait()


def test_lanes_count_bytes_and_forget() -> None:
    """Waiting bytes are bounded, and free again when their request runs; an empty lane is gone."""
    lanes: Lanes[str] = Lanes(max_lanes=2, max_waiting=9, max_waiting_bytes=10)
    assert (lanes.add(None, "1", 100), lanes.add(None, "2", 10)) == (True, False)
    with pytest.raises(Exception, match="further one"):
        lanes.add(None, "3", 1)
    assert (lanes.next(None), lanes.add(None, "4", 10), lanes.take_waiting()) == ("2", False, [(None, "4")])
    assert (lanes.next(None), lanes.num_open, lanes.num_waiting) == (None, 0, 0)


# --- conversations


async def test_conversation_goes_on_from_an_earlier_response() -> None:
    """Also stored nowhere but on this socket, across lanes, and as a fork."""
    async with serving() as served, socket_of(served) as ws:
        await ws.send(create(input="a", store=False, instructions="only here"))
        first = (await ws.whole())[-1]["response"]["id"]
        for lane in ("x", "y"):
            await ws.send(create(input=lane, store=False, previous_response_id=first, stream_id=lane))
            await ws.whole()

        assert [prompt_of(call) for call in served.engine.calls[1:]] == [
            f"user:a\nassistant:{TEXT}\nuser:{lane}\nassistant:" for lane in ("x", "y")
        ]


async def test_what_is_not_stored_ends_with_its_socket() -> None:
    """A stored response outlives it."""
    async with serving() as served:
        ids = []
        async with socket_of(served) as ws:
            for store in (False, True):
                await ws.send(create(store=store))
                ids.append((await ws.whole())[-1]["response"]["id"])
        async with socket_of(served) as ws:
            await ws.send(*[create(previous_response_id=id) for id in ids])
            refused = await ws.receive()
            went_on = await ws.whole()

    assert (refused["status"], refused["error"]["code"]) == (400, "previous_response_not_found")
    assert types(went_on)[-1] == "completed"


async def test_memory_of_conversations_is_bounded() -> None:
    """The oldest goes first, by number and by bytes."""
    for bound in ({"max_socket_responses": 1}, {"max_socket_history_bytes": 20}):
        async with serving(**bound) as served, socket_of(served) as ws:
            ids = []
            for _ in range(2):
                await ws.send(create(store=False))
                ids.append((await ws.whole())[-1]["response"]["id"])
            await ws.send(*[create(previous_response_id=id, store=False) for id in ids])

            assert [(await ws.whole())[-1]["type"] for _ in ids] == ["error", "response.completed"]


async def test_warming() -> None:
    """generate false completes without output and can be gone on from."""
    async with serving() as served, socket_of(served) as ws:
        await ws.send(create(input=[], instructions="s", generate=False, store=False))
        events = await ws.whole()
        await ws.send(create(instructions="s", previous_response_id=events[-1]["response"]["id"]))
        await ws.whole()

        assert types(events) == ["created", "in_progress", "completed"]
        assert [prompt_of(call) for call in served.engine.calls] == ["system:s", "system:s\nuser:hi\nassistant:"]
        assert served.engine.calls[0].request.params.max_tokens == 0


# --- the extensions


@pytest.mark.parametrize("by", ["response_id", "lane"])
async def test_cancelling(by: str) -> None:
    """Ends the response with its text so far; the lane goes on with what waits, and the text can be gone on from."""
    async with serving() as served, socket_of(served) as ws:
        served.engine.hold()
        call = await running(served, ws, stream_id="a")
        await ws.send(create(stream_id="a", previous_response_id=call.request_id, input="next"))
        call.say("half")
        await ws.until("output_text.delta")
        which = {"response_id": call.request_id} if by == "response_id" else {"stream_id": "a"}
        await ws.send({"type": "aserve:response.cancel", **which})
        last = (await ws.whole())[-1]
        following = await served.engine.call(1)
        following.end()
        await ws.whole()

    assert (last["type"], last["response"]["status"]) == ("response.incomplete", "cancelled")
    assert last["response"]["output"][0]["content"][0]["text"] == "half"
    assert prompt_of(following) == "user:hi\nassistant:half\nuser:next\nassistant:"


async def test_cancelling_what_is_not_there() -> None:
    """Nothing running, a foreign id, a wrong type: typed errors."""
    async with serving() as served, socket_of(served) as ws:
        for fields in ({}, {"response_id": "resp_nope"}, {"response_id": 5}):
            await ws.send({"type": "aserve:response.cancel", **fields})
        errors = [await ws.receive() for _ in range(3)]

    assert [error["status"] for error in errors] == [404, 404, 400]


async def test_timing_is_told_when_asked() -> None:
    """What happened so far, in milliseconds since the request was submitted; null for what has not."""
    async with serving() as served, socket_of(served) as ws:
        served.engine.hold()
        call = await running(served, ws, stream_id="a")
        call.timings = Timings(submitted_s=1.0)
        ask = {"type": "aserve:request.timing", "response_id": call.request_id}
        await ws.send(ask)
        early = await ws.receive()
        call.end()
        await ws.whole()
        await ws.send(ask, {"type": "aserve:request.timing", "response_id": "resp_nope"})
        late, unknown = await ws.receive(), await ws.receive()

    lane_ms = early.pop("lane_ms")
    assert early == {
        "type": "aserve:request.timing",
        "response_id": call.request_id,
        "queue_ms": None,
        "first_token_ms": None,
        "last_token_ms": None,
        "stream_id": "a",
    }
    assert 0 <= lane_ms == late["lane_ms"]
    assert unknown["error"]["code"] == "response_not_found"


# --- faults


@pytest.mark.parametrize(
    ("sent", "param"),
    [
        ("nonsense", None),
        ("[]", None),
        ('{"type":"response.create"' + "," * 3 + "}", None),
        ('{"type":"response.steer","stream_id":"a"}', "type"),
        ("{}", "type"),
        (json.dumps(create(temperature=9)), "temperature"),
        (json.dumps(create(tools=[{"type": "function"}])), "tools"),
        (json.dumps(create(stream=False)), "stream"),
        (json.dumps(create(model="other")), "model"),
        (json.dumps(create(input="x" * 5000)), "input"),
    ],
)
async def test_bad_requests_are_typed_errors(sent: str, param: str | None) -> None:
    """The socket stays open, and the next request is served."""
    async with serving() as served, socket_of(served) as ws:
        await ws.ws.send_str(sent)
        error = await ws.receive()
        await ws.send(create())

        assert (error["type"], error["error"]["param"]) == ("error", param)
        assert error["status"] == (404 if param == "model" else 400)
        assert types(await ws.whole())[-1] == "completed"


async def test_refusal_of_the_engine_is_a_typed_error() -> None:
    """With the headers that an HTTP answer would have; status as configured."""
    async with serving(queue_full_status=429) as served, socket_of(served) as ws:
        served.engine.refusal = Overloaded("full", retry_after_s=2.5)
        await ws.send(create(stream_id="a"))
        error = await ws.receive()

    assert (error["status"], error["stream_id"], error["error"]["code"]) == (429, "a", "server_overloaded")
    assert error["error"]["headers"] == {"Retry-After": "3"}


async def test_failed_response_says_so() -> None:
    """The lane goes on."""
    async with serving() as served, socket_of(served) as ws:
        served.engine.hold()
        call = await running(served, ws)
        call.end(FinishReason.ERROR, error="The step failed.")
        last = (await ws.whole())[-1]
        served.engine.release()
        await ws.send(create())

        assert last["response"]["error"] == {"code": "generation_failed", "message": "The step failed."}
        assert types(await ws.whole())[-1] == "completed"


@pytest.mark.parametrize(
    "broken",
    ["aserve.server.response_events.ResponseEvents._ending", "aserve.server.response_calls.ResponseCalls.prepare"],
)
async def test_fault_of_ours_ends_the_response_only(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told without its cause, logged with it; the socket goes on."""
    async with serving() as served, socket_of(served) as ws:
        with monkeypatch.context() as patch:
            patch.setattr(broken, None)
            await ws.send(create())
            last = (await ws.whole())[-1]
        await ws.send(create())

        assert (last.get("error") or last["response"]["error"])["code"] == "internal_error"
        assert len(served.log.fields_of("request.failed")) == 1
        assert types(await ws.whole())[-1] == "completed"


async def test_fault_of_ours_outside_of_any_response_closes_with_1011(monkeypatch: pytest.MonkeyPatch) -> None:
    """No HTTP answer lands among the frames."""
    async with serving() as served, socket_of(served) as ws:
        monkeypatch.setattr("aserve.server.response_socket.ResponsesSocket._take", None)
        await ws.send(create())

        assert (await ws.closed())[0] == 1011
        assert len(served.log.fields_of("request.failed")) == 1


async def test_lone_surrogate_in_a_message_is_escaped() -> None:
    """An error may quote what the client sent, whatever it is."""
    async with serving() as served, socket_of(served) as ws:
        await ws.ws.send_str(json.dumps(create(model="\ud800")))

        assert (await ws.receive())["type"] == "error"


# --- who may connect


async def test_upgrade_is_refused_before_it_happens() -> None:
    """A bad key, a foreign page, a plain GET and a draining server have their own status."""
    statuses = []
    async with serving(api_keys=("k",)) as served:
        key = {"Authorization": "Bearer k"}
        for headers in ({}, {**key, "Origin": "http://evil.example"}):
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                await served.session.ws_connect(served.url + RESPONSES, headers=headers)
            statuses.append(refused.value.status)
        plain = await served.get(RESPONSES, headers=key)
        served.server._intake.is_draining = True
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await served.session.ws_connect(served.url + RESPONSES, headers=key)
        statuses.append(refused.value.status)

    assert statuses == [401, 403, 503]
    assert (plain.status, plain.error["type"]) == (400, "invalid_request_error")


async def test_listed_page_may_connect() -> None:
    """The option for CORS counts for websockets."""
    async with serving(cors_origins=("http://page.example",)) as served:
        async with socket_of(served, headers={"Origin": "http://page.example"}) as ws:
            await ws.send(create())
            assert types(await ws.whole())[-1] == "completed"


async def test_page_sends_its_key_as_a_subprotocol() -> None:
    """Beside another one, which is the one taken: a browser's script can set no headers. No key comes back."""
    async with serving(api_keys=("k",)) as served:
        async with socket_of(served, protocols=("openai-insecure-api-key.k", "realtime")) as ws:
            assert ws.ws.protocol == "realtime"
            await ws.send(create())
            assert types(await ws.whole())[-1] == "completed"
        for protocols in (("openai-insecure-api-key.other", "realtime"), ("realtime",)):
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                await served.session.ws_connect(served.url + RESPONSES, protocols=protocols)
            assert (refused.value.status, "openai" in str(refused.value.headers)) == (401, False)


async def test_number_of_sockets_is_bounded() -> None:
    """One more is closed with 1013; a place is free again when a socket has closed."""
    async with serving(max_websockets=1) as served:
        async with socket_of(served), socket_of(served) as further:
            assert (await further.closed())[0] == 1013
        await until(lambda: served.server.statistics()["websockets"] == 0)
        async with socket_of(served) as ws:
            await ws.send(create())
            assert types(await ws.whole())[-1] == "completed"


# --- closing


async def test_client_that_closes_or_leaves_aborts_at_once() -> None:
    """With a close frame and without; what runs and what waits."""
    for frames in ([client_frame(b"", opcode=8)], []):
        async with serving() as served:
            served.engine.hold()
            async with raw_socket(served) as ws:
                create_frame = client_frame(json.dumps(create()).encode())
                ws.send(create_frame, create_frame, client_frame(json.dumps(create(stream_id="b")).encode()))
                calls = [await served.engine.call(index) for index in range(2)]
                ws.send(*frames)
                if not frames:
                    ws.writer.close()
                for call in calls:
                    await call.closed.wait()
            await until(lambda: served.server.statistics()["websockets"] == 0)
            assert len(served.engine.calls) == 2


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        ([client_frame(b"{}", mask=None)], 1002),
        ([client_frame(b"\xff")], 1007),
        ([client_frame(b"{}", opcode=2)], 1003),
        ([client_frame(b"x" * 1001)], 1009),
        ([client_frame(b"", opcode=8)], 1000),
        ([client_frame((4000).to_bytes(2) + b"bye", opcode=8)], 4000),
    ],
)
async def test_close_codes(frames: list[bytes], code: int) -> None:
    """Faults have their code, a close is answered with its own; the running response is aborted."""
    async with serving(max_body_bytes=1000) as served:
        served.engine.hold()
        async with raw_socket(served) as ws:
            ws.send(client_frame(json.dumps(create()).encode()))
            call = await served.engine.call()
            for _ in range(2):
                await ws.receive()
            ws.send(*frames)
            assert await ws.closed() == code
            await call.closed.wait()
        await until(lambda: served.log.fields_of("request.finished"))

        assert served.log.fields_of("request.finished")[0]["close_code"] == code


async def test_close_code_survives_a_client_that_is_still_sending() -> None:
    """Megabytes behind the fault cause no reset that would overtake the close frame."""
    async with serving(max_body_bytes=1000) as served, raw_socket(served) as ws:
        ws.send(client_frame(b"x" * 4_000_000))

        assert await ws.closed() == 1009


async def test_messages_sent_along_with_the_upgrade_are_read() -> None:
    """A client need not wait for the 101."""
    async with serving() as served:
        reader, writer = await served.connect()
        head = (
            "GET /v1/responses HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        )
        writer.write(head.encode() + client_frame(json.dumps(create()).encode()))
        await reader.readuntil(b"response.completed")
        writer.close()


# --- heartbeat, backpressure


async def test_silent_peer_is_pinged_and_then_cut() -> None:
    """Any byte counts as life; without one the connection ends, and what ran on it."""
    async with serving(websocket_heartbeat_s=0.05) as served:
        served.engine.hold()
        async with raw_socket(served) as ws:
            ws.send(client_frame(json.dumps(create()).encode()))
            call = await served.engine.call()
            for _ in range(2):
                await ws.receive()
            for _ in range(2):
                assert await ws.receive() == (9, b"")
                ws.send(client_frame(b"", opcode=10))
            assert await ws.receive() == (9, b"")
            with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
                await ws.receive()
            await call.closed.wait()


async def test_pings_are_answered() -> None:
    """Each with its own payload, also between the fragments of a message."""
    async with serving() as served, raw_socket(served) as ws:
        ws.send(client_frame(b"{", is_last=False), client_frame(b"a", opcode=9), client_frame(b"b", opcode=9))

        assert [await ws.receive(), await ws.receive()] == [(10, b"a"), (10, b"b")]


async def test_peer_that_floods_pings_and_never_reads_costs_no_memory() -> None:
    """Behind a full send buffer few pongs are owed; the write deadline ends the peer."""
    async with serving(write_stall_s=0.3, write_buffer_bytes=1024) as served:
        served.engine.hold()
        async with raw_socket(served) as ws:
            ws.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            ws.send(client_frame(json.dumps(create()).encode()))
            call = await served.engine.call()
            call.say("x" * 8_000_000)
            connection = next(iter(served.server._http.connections))
            await until(lambda: connection.writing_paused)
            size = connection.transport.get_write_buffer_size()
            ws.send(*[client_frame(b"p" * 125, opcode=9)] * 5000)
            await ws.writer.drain()
            await until(lambda: connection.transport is None or connection._payload_parser._num_owed_pongs >= 5000)
            assert connection.transport is None or connection.transport.get_write_buffer_size() <= size + 64 * 127
            await call.closed.wait()

        assert served.server.statistics()["connections"]["write_stalls"] == 1


async def test_peer_that_never_reads_is_cut_off_and_its_responses_aborted() -> None:
    """Past the buffer every lane waits, past the deadline the connection is gone."""
    async with serving(write_stall_s=0.1) as served:
        served.engine.hold()
        async with raw_socket(served) as ws:
            ws.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            for lane in "ab":
                ws.send(client_frame(json.dumps(create(stream_id=lane)).encode()))
            calls = [await served.engine.call(index) for index in range(2)]
            for call in calls:
                call.say("x" * 8_000_000)
            for call in calls:
                await call.closed.wait()

        assert served.server.statistics()["connections"]["write_stalls"] == 1


async def test_client_that_sends_faster_than_it_is_served_is_slowed_down() -> None:
    """Reading pauses while messages lie unread, and goes on when they are taken: none is lost."""
    async with serving(max_lanes=1, max_lane_requests=0, offload_bytes=0) as served, socket_of(served) as ws:
        await ws.send(*[{"type": "no"}] * 200)

        assert {(await ws.receive())["error"]["param"] for _ in range(200)} == {"type"}


async def test_joined_deltas_are_one_event() -> None:
    """What a lagging stream joined arrives whole."""
    async with serving() as served, socket_of(served) as ws:
        served.engine.hold()
        call = await running(served, ws)
        call.push(Delta(index=0, text="one two three", tokens=(1, 2, 3), num_output=3))
        call.end()

        assert text_of(await ws.whole()) == "one two three"


# --- draining


async def test_draining_lets_responses_finish_and_closes_with_1001() -> None:
    """What waits and what comes is refused; an idle socket closes at once."""
    async with serving() as served, socket_of(served) as idle, socket_of(served) as ws:
        served.engine.hold()
        call = await running(served, ws, stream_id="a")
        await ws.send(create(stream_id="a", input="waits"), {"type": "no"})
        await ws.until("error")
        stopping = asyncio.create_task(served.server.drain_and_stop())
        assert (await idle.closed())[0] == 1001
        refused = await ws.receive()
        await ws.send(create(stream_id="b"))
        refused_too = await ws.receive()
        call.say("x")
        call.end()
        last = (await ws.whole())[-1]

        assert await ws.closed() == (1001, "The server is shutting down.")
        await stopping
    assert [(error["stream_id"], error["error"]["code"]) for error in (refused, refused_too)] == [
        ("a", "server_draining"),
        ("b", "server_draining"),
    ]
    assert last["type"] == "response.completed"


async def test_draining_past_its_time_fails_what_runs() -> None:
    """The last event says why, and 1001 follows."""
    async with serving(drain_timeout_s=0.05) as served, socket_of(served) as ws:
        served.engine.hold()
        await running(served, ws)
        stopping = asyncio.create_task(served.server.drain_and_stop())
        last = (await ws.whole())[-1]

        assert last["response"]["error"]["code"] == "server_draining"
        assert (await ws.closed())[0] == 1001
        await stopping


async def test_client_is_heard_while_the_server_drains() -> None:
    """It may still cancel what runs."""
    async with serving() as served, socket_of(served) as ws:
        served.engine.hold()
        await running(served, ws)
        stopping = asyncio.create_task(served.server.drain_and_stop())
        await until(lambda: served.server.statistics()["draining"])
        await ws.send({"type": "aserve:response.cancel"})

        assert (await ws.whole())[-1]["response"]["status"] == "cancelled"
        assert (await ws.closed())[0] == 1001
        await stopping


async def test_draining_does_not_mind_a_socket_that_is_being_cut() -> None:
    """Between the cut and its notice nothing can be written, and nobody is hurt by it."""
    async with serving() as served, socket_of(served) as ws:
        served.engine.hold()
        call = await running(served, ws)
        await ws.send(create(), {"type": "no"})
        await ws.until("error")
        next(iter(served.server._http.connections)).abort()
        await served.server.drain_and_stop()

        assert call.is_closed
        assert served.log.fields_of("request.failed") == []
