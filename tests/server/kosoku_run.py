"""The Autobahn websocket cases against our websocket: ``PYTHONPATH=. python tests/server/kosoku_run.py [CASE ...]``.

The cases want an echo, so this serves one: the same parser, frames and closing as the endpoint's, with the message cap
raised to the 16 MiB that the cases send. ``kosoku`` (its own environment; ``KOSOKU`` names the program) must be
installed. Compression (12.*, 13.*) is never negotiated and is left out. Prints the cases that are not passed strictly.
Not collected by pytest.

Of 301 cases 286 pass, 12 are "non-strict" and none fails: 3.2 to 3.4, 4.1.3 to 4.2.5 and 5.15 want the answer to a
message that came before a fault, but a fault aborts what the connection still does; 6.4.3 and 6.4.4 want bad UTF-8 to
be noticed before its frame is whole.
"""

import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import uvloop
from aiohttp import web

sys.path.insert(0, str(Path(__file__).parents[1]))

from server_builders import RecordingLog

from aserve.server.connection import HttpServer
from aserve.server.options import LimitOptions, ServerOptions
from aserve.server.stream_ws import WebSocket
from aserve.server.websocket import Opcode, check_upgrade, encode_frame

MAX_MESSAGE_BYTES = 1 << 25


class Echo(WebSocket):
    """Gives back texts, and binary messages too, which the endpoint refuses with 1003."""

    def _on_event(self, event: Any) -> None:
        if getattr(event, "opcode", None) is Opcode.BINARY:
            self._write(encode_frame(Opcode.BINARY, event.payload))
        else:
            super()._on_event(event)


async def echo(request: web.BaseRequest) -> web.StreamResponse:
    check_upgrade(request.headers)
    socket = Echo(request, max_message_bytes=MAX_MESSAGE_BYTES, heartbeat_s=ServerOptions().websocket_heartbeat_s)
    response = await socket.accept({})
    try:
        while (text := await socket.receive()) is not None:
            socket.write_nowait(encode_frame(Opcode.TEXT, text))
            await socket.drain()
        await socket.close()
    finally:
        socket.stop_clocks()
    return response


def never(request: web.BaseRequest, status: int, cause: BaseException | None) -> web.Response:
    return web.Response(status=status)


async def run(cases: list[str]) -> int:
    server = HttpServer(echo, limits=LimitOptions(), fault_handler=never, log=RecordingLog())
    listener = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        chosen = [part for case in cases or ["*"] for part in ("-i", case)]
        process = await asyncio.create_subprocess_exec(
            os.environ.get("KOSOKU", "kosoku"),
            *chosen,
            *("-x", "12.*", "-x", "13.*", "-p", "8", "-o", folder, f"127.0.0.1:{port}"),
            stdout=asyncio.subprocess.DEVNULL,
        )
        await process.wait()
        index = json.loads((Path(folder) / "index.json").read_text())
    listener.close()
    await server.cut_all()
    (results,) = index.values()
    counts: dict[str, int] = {}
    for case, result in sorted(results.items(), key=lambda entry: [int(part) for part in entry[0].split(".")]):
        outcome = f"{result['behavior']} / close {result['behaviorClose']}"
        counts[outcome] = counts.get(outcome, 0) + 1
        if outcome != "OK / close OK":
            sys.stdout.write(f"{case}: {outcome}\n")
    sys.stdout.write(f"{json.dumps(counts)}\n")
    return 1 if any("FAILED" in outcome for outcome in counts) else 0


if __name__ == "__main__":
    sys.exit(uvloop.run(run(sys.argv[1:])))
