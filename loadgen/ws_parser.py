"""RFC 6455 without extensions: frames from bytes, split anywhere, and frames to bytes. Pure."""

from base64 import b64encode
from enum import IntEnum
from hashlib import sha1

from loadgen.errors import WireError

MESSAGE_BYTES_MAX = 64 << 20

_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


class Opcode(IntEnum):
    """What a frame is."""

    CONTINUATION = 0
    TEXT = 1
    BINARY = 2
    CLOSE = 8
    PING = 9
    PONG = 10


def accept_of(key: bytes) -> str:
    """Return the ``Sec-WebSocket-Accept`` that answers a key."""
    return b64encode(sha1(key + _GUID, usedforsecurity=False).digest()).decode()


def client_frame(opcode: Opcode, payload: bytes, mask: bytes) -> bytes:
    """Return a whole frame, masked with four bytes as a client's must be."""
    return _head(opcode, len(payload), 0x80) + mask + _masked(payload, mask)


def server_frame(opcode: Opcode, payload: bytes) -> bytes:
    """Return a whole frame without a mask, as a server's must be."""
    return _head(opcode, len(payload), 0) + payload


def _head(opcode: Opcode, length: int, mask_bit: int) -> bytes:
    if length < 126:
        return bytes((0x80 | opcode, mask_bit | length))
    if length < 1 << 16:
        return bytes((0x80 | opcode, mask_bit | 126)) + length.to_bytes(2)
    return bytes((0x80 | opcode, mask_bit | 127)) + length.to_bytes(8)


def _masked(payload: bytes, mask: bytes) -> bytes:
    """Return the payload masked, or unmasked: one big exclusive or instead of a loop over bytes."""
    length = len(payload)
    masks = (mask * (length // 4 + 1))[:length]
    return (int.from_bytes(payload) ^ int.from_bytes(masks)).to_bytes(length)


class FrameParser:
    """Feed it bytes as they come; it returns the messages and control frames that they complete, in order."""

    __slots__ = ("_buffer", "_is_server", "_mask_bytes", "_message", "_opcode")

    def __init__(self, *, is_server: bool = False) -> None:
        self._is_server = is_server
        self._mask_bytes = 4 if is_server else 0  # what comes from clients is masked, what comes from servers is not
        self._buffer = b""
        self._message = b""  # the fragments of an unfinished message
        self._opcode: Opcode | None = None  # of that message

    def feed(self, data: bytes) -> list[tuple[Opcode, bytes]]:
        """Take the next bytes. Raises WireError for what the other side must not send."""
        text = self._buffer + data if self._buffer else data
        frames: list[tuple[Opcode, bytes]] = []
        at, end = 0, len(text)
        while end - at >= 2:
            first, length = text[at], text[at + 1]
            begin = at + 2
            if (length > 127) != self._is_server:
                raise WireError("a frame with a mask from a server, or without one from a client")
            length &= 127
            if length == 126:
                length = int.from_bytes(text[begin : begin + 2])
                begin += 2
            elif length == 127:
                length = int.from_bytes(text[begin : begin + 8])
                begin += 8
            begin += self._mask_bytes
            if begin > end:
                break
            if length > MESSAGE_BYTES_MAX:
                raise WireError(f"a frame of more than {MESSAGE_BYTES_MAX} bytes")
            if begin + length > end:
                break
            at = begin + length
            payload = text[begin:at]
            if self._is_server:
                payload = _masked(payload, text[begin - 4 : begin])
            if first == 0x81 and self._opcode is None:  # a whole text message, as nearly all are
                frames.append((Opcode.TEXT, payload))
            else:
                self._take(first, payload, frames)
        self._buffer = text[at:]
        return frames

    def _take(self, first: int, payload: bytes, frames: list[tuple[Opcode, bytes]]) -> None:
        if first & 0x70:
            raise WireError("a frame with reserved bits")
        try:
            opcode = Opcode(first & 0x0F)
        except ValueError as error:
            raise WireError(f"a frame of unknown kind {first & 0x0F}") from error
        is_final = bool(first & 0x80)
        if opcode >= Opcode.CLOSE:
            if not is_final or len(payload) > 125:
                raise WireError("a control frame that is split or too long")
            frames.append((opcode, payload))
            return
        if (opcode is Opcode.CONTINUATION) != (self._opcode is not None):
            raise WireError("a fragment out of order")
        if len(self._message) + len(payload) > MESSAGE_BYTES_MAX:
            raise WireError(f"a message of more than {MESSAGE_BYTES_MAX} bytes")
        if self._opcode is None:
            self._opcode = opcode
        self._message += payload
        if is_final:
            frames.append((self._opcode, self._message))
            self._opcode, self._message = None, b""
