"""Who may talk to the server: keys, the pages of foreign origins, and names that resolve to us by somebody else's
trick."""

import hashlib
import hmac
import ipaddress
from collections.abc import Mapping, Sequence
from typing import Final

from aiohttp import web

from aserve.errors import AuthenticationFailed, Forbidden, InvalidRequest
from aserve.server.websocket import offered_keys

EXPOSED_HEADERS: Final = "X-Request-ID, x-aserve-ignored-params, x-should-retry, Retry-After"
_LOOPBACK_NAMES: Final = frozenset({"localhost", "127.0.0.1", "::1"})


class Keys:
    """The API keys, kept as hashes. Without any key everybody is admitted, as the owner ''."""

    __slots__ = ("_digests",)

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def owner_of(self, request: web.BaseRequest) -> str:
        """Who sent the request: the hash of its key. Raises AuthenticationFailed. Compares with all keys, in constant
        time."""
        if not self._digests:
            return ""
        digest = hashlib.sha256(_sent_key(request).encode("utf-8", "surrogateescape")).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if not any(matches):
            raise AuthenticationFailed("The API key is not valid.")
        return digest.hex()


def _sent_key(request: web.BaseRequest) -> str:
    values = request.headers.getall("Authorization", ())
    if not values and len(keys := offered_keys(request.headers)) == 1:
        return keys[0]
    if len(values) != 1:
        raise AuthenticationFailed("Send one header 'Authorization: Bearer KEY'.")
    scheme, _, key = values[0].partition(" ")
    if scheme.lower() != "bearer":
        raise AuthenticationFailed("The API key is not valid.")
    return key.strip()


class Origins:
    """Which web pages may call: the server's own, and those that are listed."""

    __slots__ = ("_any", "_listed")

    def __init__(self, listed: Sequence[str]) -> None:
        self._any = "*" in listed
        self._listed = frozenset(origin.rstrip("/").lower() for origin in listed)

    def headers_for(self, request: web.BaseRequest) -> dict[str, str]:
        """The CORS headers of the answer, for errors too. Empty for requests that no foreign page sent."""
        origin = request.headers.get("Origin")
        if origin is None or not self._is_listed(origin):
            return {}
        return {
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Expose-Headers": EXPOSED_HEADERS,
            "Vary": "Origin",
        }

    def check(self, request: web.BaseRequest) -> None:
        """Raises Forbidden for a page that is neither listed nor ours: it could act with the user's network
        position."""
        origin = request.headers.get("Origin")
        if origin is None or self._is_listed(origin):
            return
        host = request.headers.get("Host", "").lower()
        if origin.lower() not in (f"http://{host}", f"https://{host}"):
            raise Forbidden(
                "Pages of this origin may not call the server; the option server.cors_origins lists those that may."
            )

    def _is_listed(self, origin: str) -> bool:
        return self._any or origin.lower() in self._listed

    def preflight(self, request: web.BaseRequest, methods: str) -> Mapping[str, str]:
        """Headers of the answer to OPTIONS."""
        if not self.headers_for(request):
            return {"Allow": methods}
        return {
            "Allow": methods,
            "Access-Control-Allow-Methods": methods,
            "Access-Control-Allow-Headers": "Authorization, Content-Type, X-Request-ID, *",
            "Access-Control-Max-Age": "600",
        }


class Hosts:
    """Which Host headers are ours. On a loopback address a page's own name in it is DNS rebinding."""

    __slots__ = ("_names",)

    def __init__(self, bound_to: str, allowed: Sequence[str]) -> None:
        """``allowed`` names are taken with any port. Without any, an address that the network sees checks nothing."""
        self._names: frozenset[str] | None = None
        if allowed or _is_loopback(bound_to):
            self._names = _LOOPBACK_NAMES | {bound_to.lower()} | {name.lower() for name in allowed}

    def check(self, request: web.BaseRequest) -> None:
        """Raises InvalidRequest for no or several Host headers (HTTP/1.0 may go without), Forbidden for a foreign
        one."""
        values = request.headers.getall("Host", ())
        if len(values) > 1 or (not values and request.version >= (1, 1)):
            raise InvalidRequest("The request must have one Host header.")
        if values and self._names is not None and _name_of(values[0]) not in self._names:
            raise Forbidden("This host name is not served here; the option server.allowed_hosts lists those that are.")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _name_of(host: str) -> str:
    """The name in ``host[:port]``, brackets of an IPv6 address taken off."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()
