"""The websocket protocol without a socket: what a client may send, and what each fault closes with."""

import base64
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from response_builders import client_frame

from aserve.errors import InvalidRequest
from aserve.server.websocket import (
    Closing,
    FrameParser,
    Message,
    Opcode,
    accept_headers,
    check_upgrade,
    encode_close,
    encode_frame,
)

UPGRADE = {
    "Connection": "keep-alive, Upgrade",
    "Upgrade": "WebSocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
}


def parse(*frames: bytes, max_message_bytes: int = 1000) -> list[Message | Closing]:
    return FrameParser(max_message_bytes).feed(b"".join(frames))


def fault_code(*frames: bytes, **kwargs: Any) -> int:
    """The code of the fault that is the only event."""
    (event,) = parse(*frames, **kwargs)
    assert isinstance(event, Closing) and event.is_fault and event.reason
    return event.code


def test_accept_key_of_the_standard() -> None:
    """The example of RFC 6455, section 1.3."""
    check_upgrade(UPGRADE)

    assert accept_headers(UPGRADE)["Sec-WebSocket-Accept"] == "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="


@pytest.mark.parametrize(
    "changed",
    [
        {"Upgrade": "h2c"},
        {"Connection": "close"},
        {"Sec-WebSocket-Version": "8"},
        {"Sec-WebSocket-Key": ""},
        {"Sec-WebSocket-Key": "not base64!"},
        {"Sec-WebSocket-Key": base64.b64encode(b"short").decode()},
    ],
)
def test_upgrade_that_is_none(changed: dict[str, str]) -> None:
    """Each part of the handshake is asked for."""
    with pytest.raises(InvalidRequest):
        check_upgrade({**UPGRADE, **changed})


@pytest.mark.parametrize("size", [0, 125, 126, 65535, 65536])
def test_lengths_in_all_three_codings(size: int) -> None:
    """What is encoded with each length field comes back as it was; a server's frames are unmasked."""
    sent = encode_frame(Opcode.TEXT, b"x" * size)

    assert parse(client_frame(b"x" * size), max_message_bytes=1 << 20) == [Message(Opcode.TEXT, b"x" * size)]
    assert sent == client_frame(b"x" * size, mask=None)


@given(st.binary(max_size=300), st.data())
def test_bytes_arrive_in_any_pieces(payload: bytes, data: st.DataObject) -> None:
    """Fragments with a ping between them, cut anywhere, are one message."""
    cut = data.draw(st.integers(0, len(payload)))
    raw = (
        client_frame(payload[:cut], opcode=2, is_last=False)
        + client_frame(b"p", opcode=9)
        + client_frame(payload[cut:], opcode=0, mask=b"\xff\0\x80\x7f")
        + client_frame(b"", opcode=8)
        + b"rubbish"
    )
    parser = FrameParser(1000)
    events: list[Message | Closing] = []
    while raw:
        size = data.draw(st.integers(1, len(raw)))
        events += parser.feed(raw[:size])
        raw = raw[size:]

    assert events == [Message(Opcode.PING, b"p"), Message(Opcode.BINARY, payload), Closing(1005, "", False)]


@given(st.binary(max_size=200))
def test_rubbish_never_raises(raw: bytes) -> None:
    """Any bytes give messages and at most one end, the last of all."""
    events = parse(raw)

    assert not any(isinstance(event, Closing) for event in events[:-1])


@pytest.mark.parametrize(
    "frames",
    [
        (client_frame(b"x", mask=None),),
        (client_frame(b"x", opcode=3),),
        (client_frame(b"x", opcode=11),),
        (bytes([0xC1, 0x80]) + bytes(4),),
        (client_frame(b"x" * 126, opcode=9),),
        (client_frame(b"x", opcode=9, is_last=False),),
        (client_frame(b"x", opcode=0),),
        (client_frame(b"x", is_last=False), client_frame(b"x")),
        (client_frame(b"\3", opcode=8),),
        (client_frame((1005).to_bytes(2), opcode=8),),
        (client_frame((2000).to_bytes(2), opcode=8),),
    ],
    ids=[
        "unmasked",
        "reserved data opcode",
        "reserved control opcode",
        "reserved bit",
        "long control frame",
        "fragmented control frame",
        "continuation of nothing",
        "message within a message",
        "close code of one byte",
        "close code that must not be sent",
        "close code of nobody",
    ],
)
def test_protocol_faults(frames: tuple[bytes, ...]) -> None:
    """1002, and nothing is read behind it."""
    assert fault_code(*frames, client_frame(b"later")) == 1002


def test_text_must_be_utf8() -> None:
    """Across fragments too: a character may be cut in two, but not left so, and a bad byte faults its own frame."""
    whole = "é".encode()

    assert parse(client_frame(whole[:1], is_last=False), client_frame(whole[1:], opcode=0)) == [
        Message(Opcode.TEXT, whole)
    ]
    assert fault_code(client_frame(whole[:1])) == 1007
    assert fault_code(client_frame(b"\xff", is_last=False)) == 1007
    assert fault_code(client_frame((1000).to_bytes(2) + b"\xff", opcode=8)) == 1007


def test_size_is_refused_when_it_is_declared() -> None:
    """Before a byte of it has come, whole or in fragments."""
    head = bytes([0x81, 0xFF]) + (1 << 62).to_bytes(8)

    assert fault_code(head) == 1009
    assert fault_code(client_frame(b"x" * 600, is_last=False), client_frame(b"x" * 600, opcode=0)) == 1009
    assert parse(client_frame(b"x" * 1000)) == [Message(Opcode.TEXT, b"x" * 1000)]


def test_close_frames() -> None:
    """Code and reason arrive; a reason of ours is cut at a character."""
    frame = encode_close(1001, "é" * 100)

    assert parse(client_frame((3000).to_bytes(2) + b"bye", opcode=8)) == [Closing(3000, "bye", False)]
    assert (len(frame), frame[2:4]) == (2 + 2 + 122, (1001).to_bytes(2))
