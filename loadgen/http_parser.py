"""One HTTP/1.1 response from bytes, split anywhere: status, headers and the body's bytes as they come. Pure.

Bodies are chunked, of a given length, or end with the connection (RFC 9112, section 6.3). Only what a client that sent
one POST and accepts no compression can meet is read; anything else raises WireError.
"""

import re
from enum import Enum, auto

from loadgen.errors import WireError

HEAD_BYTES_MAX = 64 << 10
CHUNK_LINE_BYTES_MAX = 4 << 10

_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9]{2})(?: [^\r\n]*)?\Z")
_CHUNK_SIZE = re.compile(rb"[0-9A-Fa-f]{1,15}\Z")


class _State(Enum):
    HEAD = auto()
    LENGTH = auto()
    CHUNK_SIZE = auto()
    CHUNK_DATA = auto()
    CHUNK_END = auto()
    TRAILERS = auto()
    UNTIL_EOF = auto()
    COMPLETE = auto()


class ResponseParser:
    """Feed it bytes as they come; it returns those of the body.

    ``status`` is 0 and ``headers`` empty until the head is whole; header names are lower case, values stripped, the
    last of equal names wins. ``keep_alive`` says whether the connection may carry another request once ``is_complete``.
    After an upgrade that was asked for, the body is what the other protocol begins with.
    """

    __slots__ = ("_accepts_upgrade", "_buffer", "_remaining", "_state", "headers", "keep_alive", "status")

    def __init__(self, *, accepts_upgrade: bool = False) -> None:
        self._accepts_upgrade = accepts_upgrade
        self.status = 0
        self.headers: dict[str, str] = {}
        self.keep_alive = False
        self._state = _State.HEAD
        self._buffer = b""  # of an unfinished head, chunk line or trailer; never of a body
        self._remaining = 0  # bytes of the body, or of the chunk, still to come

    @property
    def is_complete(self) -> bool:
        """Whether the whole response has been read."""
        return self._state is _State.COMPLETE

    @property
    def ends_with_connection(self) -> bool:
        """Whether the end of the connection is the regular end of this body."""
        return self._state is _State.UNTIL_EOF

    def feed(self, data: bytes) -> bytes:
        """Take the next bytes and return the body's bytes among them. Raises WireError."""
        if self._state is _State.CHUNK_SIZE and not self._buffer:
            # The common case: one read, one whole chunk.
            line_end = data.find(b"\r\n", 0, 18)
            if line_end > 0 and _CHUNK_SIZE.match(data[:line_end]):
                size = int(data[:line_end], 16)
                body_end = line_end + 2 + size
                if size and len(data) == body_end + 2 and data.endswith(b"\r\n"):
                    return data[line_end + 2 : body_end]
        return self._feed_general(data)

    def _feed_general(self, data: bytes) -> bytes:
        text = self._buffer + data if self._buffer else data
        self._buffer = b""
        at = 0
        body: list[bytes] = []
        while at < len(text):
            match self._state:
                case _State.HEAD:
                    end = text.find(b"\r\n\r\n", at)
                    if end < 0:
                        self._keep(text, at, HEAD_BYTES_MAX)
                        break
                    self._read_head(text[at:end])
                    at = end + 4
                case _State.LENGTH | _State.CHUNK_DATA:
                    piece = text[at : at + self._remaining]
                    body.append(piece)
                    at += len(piece)
                    self._remaining -= len(piece)
                    if not self._remaining:
                        self._state = _State.CHUNK_END if self._state is _State.CHUNK_DATA else _State.COMPLETE
                case _State.CHUNK_SIZE:
                    end = text.find(b"\r\n", at)
                    if end < 0:
                        self._keep(text, at, CHUNK_LINE_BYTES_MAX)
                        break
                    size = text[at:end].partition(b";")[0].strip()
                    if not _CHUNK_SIZE.match(size):
                        raise WireError(f"a chunk of size {size[:40]!r}")
                    self._remaining = int(size, 16)
                    self._state = _State.CHUNK_DATA if self._remaining else _State.TRAILERS
                    at = end + 2
                case _State.CHUNK_END:
                    if len(text) - at < 2:
                        self._keep(text, at, 2)
                        break
                    if text[at : at + 2] != b"\r\n":
                        raise WireError("a chunk longer than its size")
                    at += 2
                    self._state = _State.CHUNK_SIZE
                case _State.TRAILERS:
                    end = text.find(b"\r\n", at)
                    if end < 0:
                        self._keep(text, at, HEAD_BYTES_MAX)
                        break
                    if end == at:
                        self._state = _State.COMPLETE
                    at = end + 2
                case _State.UNTIL_EOF:
                    body.append(text[at:])
                    break
                case _State.COMPLETE:
                    raise WireError("bytes after the end of the response")
        return body[0] if len(body) == 1 else b"".join(body)

    def _keep(self, text: bytes, at: int, bytes_max: int) -> None:
        if len(text) - at > bytes_max:
            raise WireError(f"a head, chunk line or trailer of more than {bytes_max} bytes")
        self._buffer = text[at:]

    def _read_head(self, head: bytes) -> None:
        status_line, *lines = head.split(b"\r\n")
        match = _STATUS_LINE.match(status_line)
        if match is None:
            raise WireError(f"not an HTTP/1.1 answer: {status_line[:80]!r}")
        status = int(match[2])
        if status == 101 and not self._accepts_upgrade:
            raise WireError("an upgrade that was not asked for")
        if status < 200 and status != 101:
            return  # an interim answer; the real one follows
        for line in lines:
            name, colon, value = line.partition(b":")
            if not colon:
                raise WireError(f"a header line without a colon: {line[:80]!r}")
            self.headers[name.strip().lower().decode("latin-1")] = value.strip().decode("latin-1")
        self.status = status
        connection = self.headers.get("connection", "").lower()
        self.keep_alive = connection == "keep-alive" if match[1] == b"0" else connection != "close"
        if self.headers.get("content-encoding", "identity").lower() != "identity":
            raise WireError(f"a compressed answer: {self.headers['content-encoding']}")
        self._begin_body()

    def _begin_body(self) -> None:
        coding = self.headers.get("transfer-encoding", "").lower()
        length = self.headers.get("content-length")
        if self.status == 101:
            self._state = _State.UNTIL_EOF
        elif coding:
            if coding != "chunked":
                raise WireError(f"a transfer coding of {coding}")
            self._state = _State.CHUNK_SIZE
        elif self.status in (204, 304):
            self._state = _State.COMPLETE
        elif length is not None:
            if not (length.isascii() and length.isdigit()):
                raise WireError(f"a content length of {length}")
            self._remaining = int(length)
            self._state = _State.LENGTH if self._remaining else _State.COMPLETE
        else:
            self.keep_alive = False
            self._state = _State.UNTIL_EOF
