"""Server-sent events from bytes, by the rules of the HTML standard, split anywhere. Pure.

Only the ``data`` field is kept: on the endpoints measured here it says everything that ``event`` does. Comments, ids
and retry times are read over. A field's value loses one leading space, several data lines are joined by a newline, and
an event without data is none. An unfinished event at the end of the stream is dropped, as the standard asks.
"""

from loadgen.errors import WireError

EVENT_BYTES_MAX = 4 << 20
"""An unfinished event may grow to this; beyond it the server is not sending events."""

_BOM = b"\xef\xbb\xbf"


class SseParser:
    """Feed it bytes as they come; it returns the data of the events that they complete."""

    __slots__ = ("_after_cr", "_at_start", "_tail")

    def __init__(self) -> None:
        self._tail = b""  # of the unfinished event, with \n for every line end
        self._after_cr = False  # the last byte was \r: a \n that comes next belongs to it
        self._at_start = True  # a byte order mark may still come

    def feed(self, data: bytes) -> list[bytes]:
        """Take the next bytes and return the data of each event completed by them, in order.

        Raises WireError when an unfinished event outgrows EVENT_BYTES_MAX.
        """
        # The common case, one whole event in one read, costs no copy but the payload's own.
        if (
            not self._tail
            and not self._after_cr
            and data.startswith(b"data: ")
            and data.find(b"\n") == len(data) - 2
            and data.endswith(b"\n\n")
            and b"\r" not in data
        ):
            self._at_start = False
            return [data[6:-2]]
        return self._feed_general(data)

    def _feed_general(self, data: bytes) -> list[bytes]:
        if self._after_cr and data:
            self._after_cr = False
            if data.startswith(b"\n"):
                data = data[1:]
        if b"\r" in data:
            self._after_cr = data.endswith(b"\r")
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        text = self._tail + data if self._tail else data
        if self._at_start:
            if len(text) < len(_BOM) and _BOM.startswith(text):
                self._tail = text
                return []
            self._at_start = False
            text = text.removeprefix(_BOM)
        # An event that begins with the blank line which ended the one before is what a third \n in a row looks like
        # here; blank lines without data end nothing.
        *blocks, self._tail = text.split(b"\n\n")
        if len(self._tail) > EVENT_BYTES_MAX:
            raise WireError(f"an event of more than {EVENT_BYTES_MAX} bytes")
        events = []
        for block in blocks:
            if block.startswith(b"data: ") and b"\n" not in block:
                events.append(block[6:])
            else:
                event = _data_of(block)
                if event is not None:
                    events.append(event)
        return events


def _data_of(block: bytes) -> bytes | None:
    values = []
    for line in block.split(b"\n"):
        name, _, value = line.partition(b":")
        if name == b"data":
            values.append(value.removeprefix(b" "))
    return b"\n".join(values) if values else None
