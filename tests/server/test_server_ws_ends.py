"""How a websocket of responses ends, and what it bears until then: close codes, heartbeat, flow control, draining."""

import asyncio
import json
import socket

import pytest
from response_builders import client_frame, create, raw_socket, running, socket_of, text_of
from server_builders import serving
from wire_builders import until

from aserve.engine.generation import Delta

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
