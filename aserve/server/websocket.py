"""The websocket protocol (RFC 6455) as a server speaks it, pure: bytes in, events out.

aiohttp has one too. It takes unmasked frames, which section 5.1 forbids, and on a fault it closes the socket at once,
so that a reset overtakes the close frame and a client that is still sending never learns its code. No extension is
offered: compression costs more than it saves on messages of a token each.
"""

import base64
import binascii
import codecs
import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from aserve.errors import InvalidRequest

_GUID: Final = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
MAX_CONTROL_BYTES: Final = 125
MAX_REASON_BYTES: Final = MAX_CONTROL_BYTES - 2
VERSION: Final = "13"
KEY_PROTOCOL: Final = "openai-insecure-api-key."
"""A page's script can set no headers on a websocket: it offers its API key as a subprotocol with this prefix."""


class Opcode(IntEnum):
    CONTINUATION = 0x0
    TEXT = 0x1
    BINARY = 0x2
    CLOSE = 0x8
    PING = 0x9
    PONG = 0xA


class CloseCode(IntEnum):
    """Those that we send."""

    OK = 1000
    GOING_AWAY = 1001
    PROTOCOL_ERROR = 1002
    UNSUPPORTED_DATA = 1003
    INVALID_TEXT = 1007
    TOO_BIG = 1009
    INTERNAL_ERROR = 1011
    TRY_AGAIN_LATER = 1013


# --- the upgrade


def check_upgrade(headers: Mapping[str, str]) -> None:
    """Raises InvalidRequest unless the headers ask for a websocket of the version that everybody speaks."""
    connection = {token.strip().lower() for token in headers.get("Connection", "").split(",")}
    if headers.get("Upgrade", "").strip().lower() != "websocket" or "upgrade" not in connection:
        raise InvalidRequest("GET on this path opens a websocket: it needs an upgrade. For plain HTTP use POST.")
    if headers.get("Sec-WebSocket-Version", "") != VERSION:
        raise InvalidRequest(f"The websocket version must be {VERSION}.", param="Sec-WebSocket-Version")
    try:
        key = base64.b64decode(headers.get("Sec-WebSocket-Key", ""), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if len(key) != 16:
        raise InvalidRequest("The websocket key must be 16 bytes in base64.", param="Sec-WebSocket-Key")


def offered_keys(headers: Mapping[str, str]) -> list[str]:
    """API keys among the subprotocols that the client offers."""
    offers = _offered_protocols(headers)
    return [offer.removeprefix(KEY_PROTOCOL) for offer in offers if offer.startswith(KEY_PROTOCOL)]


def _offered_protocols(headers: Mapping[str, str]) -> list[str]:
    offers = headers.get("Sec-WebSocket-Protocol", "").split(",")
    return [offer.strip() for offer in offers if offer.strip()]


def accept_headers(request_headers: Mapping[str, str]) -> dict[str, str]:
    """Headers of the 101 that answers a checked upgrade.

    Browsers fail a socket that takes none of the subprotocols that were offered. So beside a key the first other one
    is taken, whatever its name; never the key itself, which has no place in an answer. Without a key none is.
    """
    digest = hashlib.sha1(request_headers["Sec-WebSocket-Key"].encode() + _GUID, usedforsecurity=False).digest()
    headers = {
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec-WebSocket-Accept": base64.b64encode(digest).decode(),
    }
    if offered_keys(request_headers):
        others = (offer for offer in _offered_protocols(request_headers) if not offer.startswith(KEY_PROTOCOL))
        if (other := next(others, None)) is not None:
            headers["Sec-WebSocket-Protocol"] = other
    return headers


# --- frames that we send


def encode_frame(opcode: Opcode, payload: bytes) -> bytes:
    """One unfragmented frame, unmasked as a server's are."""
    size, first = len(payload), 0x80 | opcode
    if size < 126:
        return bytes((first, size)) + payload
    if size < 65536:
        return struct.pack("!BBH", first, 126, size) + payload
    return struct.pack("!BBQ", first, 127, size) + payload


def encode_close(code: int, reason: str = "") -> bytes:
    """A close frame; a long reason is cut between two characters."""
    cut = reason.encode()[:MAX_REASON_BYTES].decode("utf-8", "ignore").encode()
    return encode_frame(Opcode.CLOSE, struct.pack("!H", code) + cut)


# --- frames that we receive


@dataclass(frozen=True, slots=True)
class Message:
    """A whole message, or a control frame: a text's payload is valid UTF-8."""

    opcode: Opcode
    payload: bytes


@dataclass(frozen=True, slots=True)
class Closing:
    """The end of what is read: the peer's close frame (code 1005 where it gave none), or its fault against the
    protocol, for which ``code`` is what we close with."""

    code: int
    reason: str
    is_fault: bool


class _Fault(Exception):
    def __init__(self, code: CloseCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class FrameParser:
    """A client's bytes to messages. After a close frame or a fault everything that still comes is dropped."""

    def __init__(self, max_message_bytes: int) -> None:
        """A message above the bound is a fault as soon as its length is declared: it is never buffered."""
        self._max_message_bytes = max_message_bytes
        self._buffer = bytearray()
        self._has_ended = False
        self._opcode: Opcode | None = None  # of a message whose last frame has not come
        self._parts = bytearray()
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    def feed(self, data: bytes) -> list[Message | Closing]:
        """What is complete now. A Closing comes once, as the last of all."""
        events: list[Message | Closing] = []
        if self._has_ended:
            return events
        self._buffer += data
        try:
            while not self._has_ended and (frame := self._next_frame()) is not None:
                if (event := self._on_frame(*frame)) is not None:
                    events.append(event)
        except _Fault as fault:
            events.append(self._end(fault.code, str(fault), is_fault=True))
        return events

    def _end(self, code: int, reason: str, *, is_fault: bool) -> Closing:
        self._has_ended = True
        self._buffer.clear()
        self._parts.clear()
        return Closing(code, reason, is_fault)

    def _next_frame(self) -> tuple[Opcode, bool, bytes] | None:
        """opcode, whether it is a message's last, and payload; None until all of it is there."""
        buffer = self._buffer
        if len(buffer) < 2:
            return None
        first, second = buffer[0], buffer[1]
        is_last, size, start = bool(first & 0x80), second & 0x7F, 2
        opcode = self._check_head(first, second)
        if size == 126:
            start = 4
            if len(buffer) < start:
                return None
            size = int.from_bytes(buffer[2:4])
        elif size == 127:
            start = 10
            if len(buffer) < start:
                return None
            size = int.from_bytes(buffer[2:10])
        if opcode < Opcode.CLOSE and len(self._parts) + size > self._max_message_bytes:
            raise _Fault(CloseCode.TOO_BIG, f"A message may have {self._max_message_bytes} bytes.")
        end = start + 4 + size
        if len(buffer) < end:
            return None
        payload = _unmask(bytes(buffer[start + 4 : end]), bytes(buffer[start : start + 4]))
        del buffer[:end]
        return opcode, is_last, payload

    @staticmethod
    def _check_head(first: int, second: int) -> Opcode:
        if first & 0x70:
            raise _Fault(CloseCode.PROTOCOL_ERROR, "A reserved bit is set.")
        try:
            opcode = Opcode(first & 0x0F)
        except ValueError:
            raise _Fault(CloseCode.PROTOCOL_ERROR, "The opcode is not known.") from None
        if not second & 0x80:
            raise _Fault(CloseCode.PROTOCOL_ERROR, "A client must mask its frames.")
        if opcode >= Opcode.CLOSE and (not first & 0x80 or second & 0x7F > MAX_CONTROL_BYTES):
            raise _Fault(CloseCode.PROTOCOL_ERROR, "A control frame is fragmented or too long.")
        return opcode

    def _on_frame(self, opcode: Opcode, is_last: bool, payload: bytes) -> Message | Closing | None:
        if opcode is Opcode.CLOSE:
            return self._on_close(payload)
        if opcode > Opcode.CLOSE:
            return Message(opcode, payload)
        if (opcode is Opcode.CONTINUATION) != (self._opcode is not None):
            raise _Fault(CloseCode.PROTOCOL_ERROR, "A fragment is out of place.")
        whole = self._opcode or opcode
        if whole is Opcode.TEXT:
            try:
                self._decoder.decode(payload, is_last)
            except UnicodeDecodeError:
                raise _Fault(CloseCode.INVALID_TEXT, "A text is not valid UTF-8.") from None
        if not is_last:
            self._opcode = whole
            self._parts += payload
            return None
        if self._opcode is not None:
            payload = bytes(self._parts) + payload
            self._opcode = None
            self._parts.clear()
        return Message(whole, payload)

    def _on_close(self, payload: bytes) -> Closing:
        if not payload:
            return self._end(1005, "", is_fault=False)
        code = int.from_bytes(payload[:2])
        if len(payload) < 2 or not (3000 <= code <= 4999 or code in _PEER_CODES):
            raise _Fault(CloseCode.PROTOCOL_ERROR, "The close code is not valid.")
        try:
            reason = payload[2:].decode()
        except UnicodeDecodeError:
            raise _Fault(CloseCode.INVALID_TEXT, "The close reason is not valid UTF-8.") from None
        return self._end(code, reason, is_fault=False)


_PEER_CODES: Final = frozenset({1000, 1001, 1002, 1003, *range(1007, 1015)})
"""Below 3000, what a close frame may carry: RFC 6455 section 7.4.1 and the registry's later entries."""


def _unmask(payload: bytes, mask: bytes) -> bytes:
    """One XOR over the whole payload as an integer: 1 MiB takes about a millisecond."""
    size = len(payload)
    key = (mask * (size // 4 + 1))[:size]
    return (int.from_bytes(payload) ^ int.from_bytes(key)).to_bytes(size)
