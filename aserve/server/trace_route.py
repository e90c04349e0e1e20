"""``GET /v1/trace``: what the server did in the last seconds, as a file that Perfetto and chrome://tracing open."""

import asyncio
import re
import threading
from itertools import takewhile
from typing import Final

from aiohttp import web

from aserve.errors import InvalidRequest, NotFound, Overloaded
from aserve.server.call import Call
from aserve.server.ports import Trace, TraceCut

DEFAULT_SECONDS: Final = 10.0
MAX_SECONDS: Final = 3600.0

MAX_READERS: Final = 4
"""Clients that wait for a file or are sent one. A file lies in memory until it is read, and with all that is kept by
default it has 14 to 44 MB."""

_NUMBER: Final = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")


class TraceRoute:
    """The handler. One file is drawn at a time, some 6 us an event in a worker thread, for a few readers at once."""

    def __init__(self, trace: Trace | None) -> None:
        self._trace = trace
        self._drawing = asyncio.Lock()
        self._num_readers = 0

    async def get(self, call: Call) -> web.StreamResponse:
        """Raises InvalidRequest for ``seconds`` that are none, NotFound where no trace is kept, Overloaded where
        MAX_READERS are at it."""
        seconds = seconds_of(call.request.query.getall("seconds", []))
        if self._trace is None:
            raise NotFound("The server keeps no trace; the option trace.num_steps turns it on.", code="trace_off")
        if self._num_readers >= MAX_READERS:
            raise Overloaded("Too many clients read the trace at once.", code="trace_busy", retry_after_s=1.0)
        self._num_readers += 1
        try:
            return await self._send(call, await self._draw(self._trace, seconds))
        finally:
            self._num_readers -= 1

    async def _draw(self, trace: Trace, seconds: float) -> list[bytes]:
        """The file in parts, the last one first. Cancelled, it leaves at once and the thread after the part that it is
        at. No thread can be cancelled, so its end and not the caller's lets the next one draw."""
        await self._drawing.acquire()
        is_gone = threading.Event()
        try:
            # The cut has no name here: the thread alone holds it, and frees it.
            drawing = asyncio.get_running_loop().run_in_executor(None, _parts_reversed, trace.cut(seconds), is_gone)
        except BaseException:
            self._drawing.release()
            raise
        drawing.add_done_callback(lambda _: self._drawing.release())
        try:
            return await asyncio.shield(drawing)
        finally:
            is_gone.set()

    async def _send(self, call: Call, parts_reversed: list[bytes]) -> web.StreamResponse:
        """Takes the parts out of the list as it writes them: however slow the reader, no sent one stays in memory."""
        response = web.StreamResponse(
            headers={
                **call.headers,
                "Content-Type": "application/json",
                "Content-Length": str(sum(map(len, parts_reversed))),
                "Content-Disposition": 'attachment; filename="aserve-trace.json"',
            }
        )
        await response.prepare(call.request)
        if call.request.method != "HEAD":
            while parts_reversed:
                await response.write(parts_reversed.pop())
        await response.write_eof()
        return response


def _parts_reversed(cut: TraceCut, is_gone: threading.Event) -> list[bytes]:
    parts = list(takewhile(lambda _: not is_gone.is_set(), cut.pieces()))
    parts.reverse()
    return parts


def seconds_of(values: list[str]) -> float:
    """What the query says, or the default. Raises InvalidRequest."""
    if not values:
        return DEFAULT_SECONDS
    if len(values) == 1 and _NUMBER.fullmatch(values[0]) and 0 < float(values[0]) <= MAX_SECONDS:
        return float(values[0])
    raise InvalidRequest(f"'seconds' must be one number above 0, at most {MAX_SECONDS:.0f}.", param="seconds")
