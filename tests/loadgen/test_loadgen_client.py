"""What only sockets show."""

import asyncio
import socket

import pytest
from loadgen_stub import HEAD, answer_well, chunk, content, event, loopback_server

from loadgen.client import Client, parse_target
from loadgen.errors import UsageError
from loadgen.exchange import Ticket

REFUSAL = b'HTTP/1.1 503 Busy\r\nContent-Length: 28\r\n\r\n{"error":{"message":"busy"}}'


async def send(base_url, *, num_requests=1, headers=None, timeout_s=5.0):
    """Send requests one after another."""
    target = parse_target(base_url, "chat", api_key="sk-1", headers=headers or {})
    client = Client(target, "chat", timeout_s=timeout_s, connect_timeout_s=5.0)
    try:
        tickets = [Ticket(index=i, process=0, intended_s=0.0, lag_s=0.0) for i in range(num_requests)]
        return [(await client.send(b"{}", ticket, origin_s=0.0)).sample() for ticket in tickets]
    finally:
        await client.aclose()


async def test_requests_share_a_connection():
    """A kept connection carries the next request, refused or not; only the first one paid for connecting."""

    async def alternate(writer):
        if len(server.heads) % 2:
            await answer_well(writer)
        else:
            writer.write(REFUSAL)

    async with loopback_server(alternate) as server:
        samples = await send(server.base_url, num_requests=4)

    assert [s.error_name for s in samples] == ["", "http_503", "", "http_503"]
    assert [s.connect_s is None for s in samples] == [False, True, True, True]
    assert [len(s.answer.event_ns) for s in samples] == [4, 0, 4, 0]


async def test_the_request_is_plain_http():
    """Path, host, key and further headers are what servers expect."""
    async with loopback_server(answer_well) as server:
        await send(server.base_url + "/v1/", headers={"X-Test": "1"})

    lines = server.heads[0].decode().split("\r\n")
    assert lines[0] == "POST /v1/chat/completions HTTP/1.1"
    assert {f"Host: 127.0.0.1:{server.port}", "Authorization: Bearer sk-1", "X-Test: 1"} < set(lines)


async def test_a_port_where_nobody_listens():
    """A refused connection is a failed request, not a crash."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    (sample,) = await send(f"http://127.0.0.1:{port}")

    assert (sample.error_name, sample.sent_s) == ("connect", None)


async def test_a_stream_that_is_cut():
    """The end of the connection inside a stream is a cut, and what came before it is kept."""

    async def cut(writer):
        writer.write(HEAD + chunk(content()))
        writer.close()

    async with loopback_server(cut) as server:
        (sample,) = await send(server.base_url)

    assert (sample.error_name, len(sample.answer.event_ns)) == ("cut", 1)


async def test_a_connection_that_is_closed_unanswered():
    """The end of the connection before any byte is told apart from a cut."""

    async def close(writer):
        writer.close()

    async with loopback_server(close) as server:
        (sample,) = await send(server.base_url)

    assert sample.error_name == "disconnect"


async def test_a_connection_that_is_reset():
    """A reset inside a stream is a cut, with the system's reason."""

    async def reset(writer):
        writer.write(HEAD + chunk(content()))
        await writer.drain()
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        writer.transport.abort()

    async with loopback_server(reset) as server:
        (sample,) = await send(server.base_url)

    assert sample.error_name in ("cut", "disconnect")
    assert "reset" in sample.detail


async def test_a_fault_inside_the_stream():
    """An error event fails the request with its message."""

    async def fail(writer):
        writer.write(HEAD + chunk(content() + event({"error": {"message": "out of memory"}})))

    async with loopback_server(fail) as server:
        (sample,) = await send(server.base_url)

    assert (sample.error_name, sample.detail) == ("error_event", "out of memory")


async def test_a_server_that_never_answers():
    """Each request has an end of its own."""

    async def hang(writer):
        await asyncio.Event().wait()

    async with loopback_server(hang) as server:
        (sample,) = await send(server.base_url, timeout_s=0.05)

    assert sample.error_name == "timeout"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://h", ("h", 80, False, "/v1/chat/completions")),
        ("https://h:1/", ("h", 1, True, "/v1/chat/completions")),
        ("http://[::1]:9/proxy/v1/", ("::1", 9, False, "/proxy/v1/chat/completions")),
    ],
)
def test_base_urls(url, expected):
    """A base URL may hold a path and its /v1 or not."""
    target = parse_target(url, "chat", api_key=None, headers={})

    assert (target.host, target.port, target.is_tls, target.path) == expected


def test_an_ipv6_host_is_bracketed():
    """The Host header of an IPv6 address has brackets."""
    assert b"\r\nHost: [::1]:9\r\n" in parse_target("http://[::1]:9", "chat", api_key=None, headers={}).request(b"")


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://h", "http://", "http://h:x", "http://h/?a=1"])
def test_a_bad_base_url_is_refused(url):
    """What is no base URL is a usage error."""
    with pytest.raises(UsageError):
        parse_target(url, "chat", api_key=None, headers={})


def test_headers_cannot_smuggle():
    """A line break in a header or key is a usage error."""
    with pytest.raises(UsageError):
        parse_target("http://h", "chat", api_key="a\r\nb: c", headers={})
