"""One HTTP request on its way through the server."""

import re
import secrets
import time
from dataclasses import dataclass, field
from typing import Any, Final

from aiohttp import web

_LABEL: Final = re.compile(r"[A-Za-z0-9._-]{1,128}")
_NOT_PLAIN: Final = re.compile(r"[^A-Za-z0-9_.-]")
CLIENT_GONE: Final = 499
"""Counted for a client that left before its answer; never sent."""
MAX_NAMES = 16
MAX_NAME_CHARS = 64


def request_label(request: web.BaseRequest) -> str:
    """The client's X-Request-ID if it is safe to repeat, else a fresh one. It only names the request to people."""
    label = request.headers.get("X-Request-ID", "")
    return label if _LABEL.fullmatch(label) else f"req-{secrets.token_hex(16)}"


def plain_names(names: list[str]) -> list[str]:
    """Field names of a client's, safe in a header and a log line, and bounded in length and number."""
    return [_NOT_PLAIN.sub("", name[:MAX_NAME_CHARS]) or "?" for name in names[:MAX_NAMES]]


@dataclass(slots=True)
class Call:
    """headers: go onto the answer, whatever it is. facts: go into the request's one log line. began_s: monotonic.
    upgraded_s: how long the answer 101 took, None where there was none; the socket's life behind it is no latency."""

    request: web.BaseRequest
    label: str
    began_s: float = field(default_factory=time.monotonic)
    route: str = "other"
    parameter: str = ""
    owner: str = ""
    is_probe: bool = False
    upgraded_s: float | None = None
    headers: dict[str, str] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.began_s

    @property
    def status_if_gone(self) -> int:
        """What counts when the client has left."""
        return CLIENT_GONE if self.upgraded_s is None else 101

    def json(self, body: bytes, status: int = 200) -> web.Response:
        return web.Response(body=body, status=status, content_type="application/json", headers=self.headers)
