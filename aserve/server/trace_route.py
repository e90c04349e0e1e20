"""``GET /v1/trace``: what the server did in the last seconds, as a file that Perfetto and chrome://tracing open."""

import asyncio
import re
from typing import Final

from aiohttp import web

from aserve.errors import InvalidRequest, NotFound
from aserve.server.call import Call
from aserve.server.ports import Trace

DEFAULT_SECONDS: Final = 10.0
MAX_SECONDS: Final = 3600.0

_NUMBER: Final = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")


class TraceRoute:
    """The handler. One file at a time: each keeps a worker thread busy, some 6 us an event."""

    def __init__(self, trace: Trace | None) -> None:
        self._trace = trace
        self._drawing = asyncio.Lock()

    async def get(self, call: Call) -> web.StreamResponse:
        """Raises InvalidRequest for ``seconds`` that are none, NotFound where no trace is kept."""
        seconds = seconds_of(call.request.query.getall("seconds", []))
        if self._trace is None:
            raise NotFound("The server keeps no trace; the option trace.num_steps turns it on.", code="trace_off")
        async with self._drawing:
            cut = self._trace.cut(seconds)
            parts = await asyncio.to_thread(lambda: list(cut.pieces()))
        response = web.StreamResponse(
            headers={
                **call.headers,
                "Content-Type": "application/json",
                "Content-Length": str(sum(map(len, parts))),
                "Content-Disposition": 'attachment; filename="aserve-trace.json"',
            }
        )
        await response.prepare(call.request)
        if call.request.method != "HEAD":
            for part in parts:
                await response.write(part)
        await response.write_eof()
        return response


def seconds_of(values: list[str]) -> float:
    """What the query says, or the default. Raises InvalidRequest."""
    if not values:
        return DEFAULT_SECONDS
    if len(values) == 1 and _NUMBER.fullmatch(values[0]) and 0 < float(values[0]) <= MAX_SECONDS:
        return float(values[0])
    raise InvalidRequest(f"'seconds' must be one number above 0, at most {MAX_SECONDS:.0f}.", param="seconds")
