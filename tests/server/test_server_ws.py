"""Responses over a websocket: one and several, lanes, conversations, warming, cancelling, timings."""

import re
from typing import Any

import pytest
from fake_engine import TEXT, FakeCall
from response_builders import RESPONSES, create, running, socket_of, text_of, types
from server_builders import serving
from wire_builders import until

from aserve.core.request import FinishReason
from aserve.engine.stream import Timings
from aserve.server.lanes import Lanes


def prompt_of(call: FakeCall) -> str:
    return bytes(call.request.prompts[0].tolist()).decode()


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
