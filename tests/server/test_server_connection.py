"""Connections: their clocks, clients that leave, that do not read, that pipeline; draining and the port."""

import asyncio
import socket
import struct

import pytest
from fake_engine import FakeEngine
from server_builders import FakeRenderer, RecordingLog, chat, http, serving
from wire_builders import JSON, until

from aserve.errors import ConfigError
from aserve.obs.metrics import Metrics
from aserve.server.app import Server
from aserve.server.options import LimitOptions, ServerOptions

CHAT = "/v1/chat/completions"
HEALTH = http("GET", "/health")


@pytest.mark.parametrize("sent", [b"G", b"GET /health HTTP/1.1\r\nHost: localhost\r\nX"])
async def test_headers_that_do_not_end_are_cut(sent: bytes) -> None:
    """A clock runs from the first byte of a request; new bytes do not wind it up again."""
    async with serving(headers_timeout_s=0.05) as served:
        reader, writer = await served.connect()
        writer.write(sent)
        assert await reader.read() == b""
        writer.close()

        assert served.server.statistics()["connections"]["slow_headers"] == 1


async def test_second_request_has_a_clock_of_its_own() -> None:
    """After an answer the next headers are timed again."""
    async with serving(headers_timeout_s=0.05) as served:
        reader, writer = await served.connect()
        writer.write(http("GET", "/health", close=False))
        await reader.readuntil(b'{"status":"ok"}')
        writer.write(b"GET")
        assert await reader.read() == b""
        writer.close()


async def test_idle_connection_is_closed() -> None:
    """One that never sends anything, and one that has had its answer."""
    async with serving(idle_timeout_s=0.05) as served:
        for sent, received in ((b"", b""), (http("GET", "/health", close=False), b'{"status":"ok"}')):
            reader, writer = await served.connect()
            writer.write(sent)
            assert (await reader.read()).endswith(received)
            writer.close()


async def test_long_answer_outlives_the_idle_clock() -> None:
    """The clock of idle connections does not run while a request is answered."""
    async with serving(idle_timeout_s=0.02, headers_timeout_s=0.02, keepalive_comment_s=0.03) as served:
        served.engine.hold()
        reader, writer = await served.connect()
        writer.write(http("POST", CHAT, chat(stream=True)))
        for _ in range(3):
            await reader.readuntil(b": keep-alive\n\n")
        (await served.engine.call()).end()
        assert b"[DONE]" in await reader.read()
        writer.close()


async def test_body_that_does_not_come_is_a_408() -> None:
    """Headers alone do not hold a connection."""
    async with serving(body_timeout_s=0.05, headers_timeout_s=0.05) as served:
        reader, writer = await served.connect()
        writer.write(f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\n{JSON}Content-Length: 9\r\n\r\n{{".encode())
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 408 ")
        writer.close()


async def test_peer_that_never_reads_is_cut_off_and_its_request_aborted() -> None:
    """Past the transport's buffer the writer waits, past the deadline the connection is gone; memory stays bounded."""
    async with serving(write_stall_s=0.1, keepalive_comment_s=0.01) as served:
        served.engine.hold()
        sock = socket.create_connection((served.host, served.port))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.sendall(http("POST", CHAT, chat(stream=True)))
        call = await served.engine.call()
        call.say("x" * 20_000_000)
        await call.closed.wait()
        sock.close()

        assert served.server.statistics()["connections"]["write_stalls"] == 1


async def test_plain_answer_that_nobody_reads_is_cut_off() -> None:
    """The clock is the connection's, so it covers every kind of answer."""
    async with serving(write_stall_s=0.05) as served:
        served.engine.hold()
        sock = socket.create_connection((served.host, served.port))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.sendall(http("POST", CHAT, chat()))
        call = await served.engine.call()
        call.say("x" * 20_000_000)
        call.end()
        await until(lambda: served.num_connections == 0)
        sock.close()

        assert served.server.statistics()["connections"]["write_stalls"] == 1


async def test_closing_socket_does_not_wait_for_a_peer_that_never_reads() -> None:
    """The end of a stream lies unsent in the transport; closing waits for it no longer than the deadline."""
    async with serving(write_stall_s=0.05, write_buffer_bytes=1 << 30) as served:
        served.engine.hold()
        sock = socket.create_connection((served.host, served.port))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.sendall(http("POST", CHAT, chat(stream=True)))
        call = await served.engine.call()
        call.say("x" * 20_000_000)
        call.end()
        await until(lambda: served.num_connections == 0)
        sock.close()

        assert served.server.statistics()["connections"]["write_stalls"] == 0


async def test_slow_reader_does_not_slow_a_fast_one() -> None:
    """The loop never waits for one socket."""
    async with serving() as served:
        served.engine.hold()
        sock = socket.create_connection((served.host, served.port))
        sock.sendall(http("POST", CHAT, chat(stream=True)))
        slow = await served.engine.call(0)
        slow.say("x" * 20_000_000)
        reader, writer = await served.connect()
        writer.write(http("POST", CHAT, chat(stream=True)))
        fast = await served.engine.call(1)
        for i in range(20):
            fast.say(f"<{i}>")
            await reader.readuntil(f'"content":"<{i}>"'.encode())
        fast.end()
        assert b"[DONE]" in await reader.read()
        writer.close()
        sock.close()
        await slow.closed.wait()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["fin", "rst", "half"])
@pytest.mark.parametrize("after_tokens", [False, True])
async def test_client_that_leaves_aborts_its_request(stream: bool, how: str, after_tokens: bool) -> None:
    """Waiting or running, streaming or not; a half-closed socket has left, too. Counted as 499."""
    async with serving() as served:
        served.engine.hold()
        reader, writer = await served.connect()
        writer.write(http("POST", CHAT, chat(stream=stream, n=2)))
        call = await served.engine.call()
        if after_tokens:
            call.say("a")
            if stream:
                await reader.readuntil(b'"content":"a"')
        if how == "half":
            writer.write_eof()
        else:
            if how == "rst":
                linger = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.close()
        await call.closed.wait()
        writer.close()

        await until(lambda: served.log.fields_of("request.finished"))
        line = served.log.fields_of("request.finished")[0]
        assert (line["status"], line["prompt_tokens"]) == (499, len("user:hi\nassistant:"))
        assert line["completion_tokens"] == after_tokens
        assert not served.log.fields_of("request.failed")


async def test_client_that_leaves_its_body_unsent_starts_nothing() -> None:
    """A disconnect in the middle of the body ends the request without a trace in the engine."""
    async with serving() as served:
        _, writer = await served.connect()
        writer.write(http("POST", CHAT, chat())[:-5])
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        await until(lambda: served.num_connections == 0)

        assert served.engine.calls == []


async def test_request_behind_a_closing_one_is_never_run() -> None:
    """POST with Connection: close and a second one in the same packet: the packet is refused whole, nothing is run."""
    async with serving() as served:
        raw = await served.raw(http("POST", CHAT, chat()) + http("POST", CHAT, chat()))

        assert raw.count(b"HTTP/1.") == 1 and raw.split()[1] == b"400"
        assert served.engine.calls == []


async def test_pipelined_requests_of_a_client_that_leaves_are_never_started() -> None:
    """Forty streams in one packet: the first one runs and is aborted, the others never were."""
    async with serving() as served:
        served.engine.hold()
        reader, writer = await served.connect()
        writer.write(http("POST", CHAT, chat(stream=True), close=False) * 40)
        call = await served.engine.call()
        call.say("a")
        await reader.readuntil(b'"content":"a"')
        writer.transport.abort()
        await until(lambda: call.say("b") or call.is_closed)

        assert len(served.engine.calls) == 1


async def test_pipelined_requests_are_answered_in_order() -> None:
    """One connection, three requests in one packet, three answers."""
    async with serving() as served:
        sent = [http("GET", path, close=False) for path in ("/health", "/version")]
        raw = await served.raw(b"".join([*sent, HEALTH]))

    assert raw.count(b"HTTP/1.1 200 ") == 3
    assert raw.index(b"status") < raw.index(b"version") < raw.rindex(b"status")


async def test_refused_upgrade_does_not_hang_what_is_behind_it() -> None:
    """A websocket request that gets no websocket, with another request behind it."""
    upgrade = http("GET", "/v1/responses", headers="Connection: Upgrade\r\nUpgrade: websocket\r\n", close=False)
    async with serving() as served:
        raw = await served.raw(upgrade + HEALTH)

    assert raw.startswith(b"HTTP/1.1 400 ") and b'{"status":"ok"}' in raw


async def test_connection_over_the_cap_is_told_so() -> None:
    """A 503 at once, and room again when another one closes."""
    async with serving(max_connections=1) as served:
        _, first = await served.connect()
        await until(lambda: served.num_connections == 1)
        refused = await served.raw(HEALTH)
        first.close()
        await until(lambda: served.num_connections == 0)
        admitted = await served.raw(HEALTH)

    assert refused.startswith(b"HTTP/1.1 503 ") or refused == b""  # a reset may overtake the answer
    assert admitted.startswith(b"HTTP/1.1 200 ")


async def test_http_1_0_client_gets_a_plain_body() -> None:
    """No transfer coding; the end of the stream is the end of the connection."""
    sent = http("POST", CHAT, chat(stream=True)).replace(b"HTTP/1.1", b"HTTP/1.0")
    async with serving() as served:
        raw = await served.raw(sent)

    head, _, body = raw.partition(b"\r\n\r\n")
    assert b"Transfer-Encoding" not in head
    assert body.startswith(b"data: ") and body.endswith(b"data: [DONE]\n\n")


async def test_draining_refuses_new_work_and_finishes_the_old() -> None:
    """While running streams end in their own way, a new request gets 503 and readiness says no."""
    async with serving() as served:
        served.engine.hold()
        reader, writer = await served.connect()
        writer.write(http("POST", CHAT, chat(stream=True), close=False))
        call = await served.engine.call()
        call.say("a")
        await reader.readuntil(b'"content":"a"')
        stopping = asyncio.create_task(served.server.drain_and_stop())
        await asyncio.sleep(0)
        refused = await served.post(CHAT, chat())
        ready, health = await served.get("/ready"), await served.get("/health")
        call.say("b")
        call.end()
        rest = await reader.read()
        writer.close()
        await stopping

        assert (refused.status, refused.error["code"], refused.headers["Retry-After"]) == (503, "server_draining", "1")
        assert refused.headers["Connection"] == "close"
        assert (ready.status, health.status) == (503, 200)
        assert b'"content":"b"' in rest and rest.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        with pytest.raises(ConnectionRefusedError):
            await served.connect()


async def test_drain_that_takes_too_long_ends_with_an_event() -> None:
    """Streams get a last error event, plain answers a 503; idle connections are closed at once."""
    async with serving(drain_timeout_s=0.05) as served:
        served.engine.hold()
        idle, idle_writer = await served.connect()
        idle_writer.write(http("GET", "/health", close=False))
        await idle.readuntil(b'{"status":"ok"}')
        streaming, stream_writer = await served.connect()
        stream_writer.write(http("POST", CHAT, chat(stream=True), close=False))
        (await served.engine.call(0)).say("a")
        plain, plain_writer = await served.connect()
        plain_writer.write(http("POST", CHAT, chat(), close=False))
        await served.engine.call(1)
        await streaming.readuntil(b'"content":"a"')
        stopping = asyncio.create_task(served.server.drain_and_stop())

        assert await idle.read() == b""
        rest = await streaming.read()
        assert b"server_draining" in rest and b"[DONE]" not in rest
        answer = await plain.read()
        assert answer.startswith(b"HTTP/1.1 503 ") and b"server_draining" in answer
        await stopping
        for each in (idle_writer, stream_writer, plain_writer):
            each.close()


async def test_closing_cuts_everything_at_once() -> None:
    """What a second signal does: connections are cut, handlers cancelled, nothing is left."""
    async with serving() as served:
        served.engine.hold()
        reader, writer = await served.connect()
        writer.write(http("POST", CHAT, chat(stream=True)))
        call = await served.engine.call()
        await served.server.aclose()

        assert call.is_closed
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)
        writer.close()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"port": 65536}, "server.port is 65536, but ports go from 0 to 65535."),
        (
            {"host": "203.0.113.7", "port": 0},
            "This machine has no address 203.0.113.7; choose another one with --host.",
        ),
    ],
)
async def test_address_that_cannot_be_bound_is_one_sentence(options: dict[str, object], sentence: str) -> None:
    """The operator's fault, told plainly."""
    with pytest.raises(ConfigError) as caught:
        await _server(**{"port": 0, **options}).start()

    assert str(caught.value) == sentence


async def test_port_that_is_taken_is_one_sentence() -> None:
    """A second server on the same port."""
    async with serving() as served:
        with pytest.raises(ConfigError) as caught:
            await _server(port=served.port).start()

    assert str(caught.value) == (
        f"Port {served.port} on 127.0.0.1 is taken by another program; choose another one with --port."
    )


def _server(**options: object) -> Server:
    return Server(
        engine=FakeEngine(),
        renderer=FakeRenderer(),
        model_names=("m",),
        options=ServerOptions(**options),  # type: ignore[arg-type]
        limits=LimitOptions(),
        log=RecordingLog(),
        metrics=Metrics("m", process=False),
    )
