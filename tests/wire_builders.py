"""What tests of the wire share, whatever stands behind the server: requests as bytes, answers, and patience."""

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

JSON = "Content-Type: application/json\r\n"
PATIENCE_S = 10.0


@dataclass
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error, whose object has exactly the four keys."""
        assert list(self.json) == ["error"] and list(self.json["error"]) == ["message", "type", "param", "code"]
        return self.json["error"]


def http(method: str, path: str, body: Any = None, *, headers: str = "", close: bool = False) -> bytes:
    """One request as bytes. ``body``: bytes as they are, else JSON."""
    raw = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{headers}"
    if body is not None:
        head += f"Content-Length: {len(raw)}\r\n" + ("" if "content-type" in headers.lower() else JSON)
    return f"{head}{'Connection: close' + chr(13) + chr(10) if close else ''}\r\n".encode("latin-1") + raw


def events(body: bytes) -> list[Any]:
    """The payloads of a stream, comments left out, "[DONE]" as it is; every event is one data line and a blank one."""
    blocks = body.decode().split("\n\n")[:-1]
    assert all(block.startswith(("data: ", ":")) and "\n" not in block for block in blocks), body[:200]
    payloads = [block.removeprefix("data: ") for block in blocks if block.startswith("data: ")]
    return [payload if payload == "[DONE]" else json.loads(payload) for payload in payloads]


async def until(condition: Callable[[], object]) -> None:
    """Let the loop turn until the condition holds: what it waits for is on its way through sockets, threads, timers."""
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > end_s:
            raise AssertionError("It never came true.")
        await asyncio.sleep(0)
