"""Reading a request's body: what may come, how much, and how long it may take."""

import asyncio

from aiohttp import web
from aiohttp.client_exceptions import ClientPayloadError

from aserve.errors import BodyTimeout, InvalidRequest, PayloadTooLarge, UnsupportedMediaType


def check_json_headers(request: web.BaseRequest) -> None:
    """Refuse from the headers alone. UTF-8 is the only encoding of JSON, so a charset may say nothing else."""
    encodings = {value.strip().lower() for value in request.headers.get("Content-Encoding", "").split(",")}
    if encodings - {"", "identity"}:
        raise UnsupportedMediaType("Compressed bodies are not supported; send it without Content-Encoding.")
    media_type, *parameters = request.headers.get("Content-Type", "").split(";")
    if media_type.strip().lower() != "application/json":
        raise InvalidRequest("The Content-Type must be application/json.")
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip().lower() == "charset" and value.strip().strip('"').lower() not in ("utf-8", "utf8", "us-ascii"):
            raise InvalidRequest("The charset must be utf-8.")


async def read_body(request: web.BaseRequest, *, cap: int, timeout_s: float) -> bytes:
    """The whole body. Raises PayloadTooLarge above ``cap`` bytes (from the header, where there is one), BodyTimeout
    when it has not arrived in time, InvalidRequest for a broken transfer coding. The connection closes after each of
    these."""
    length = request.content_length
    if length is not None and length > cap:
        raise PayloadTooLarge(f"The body has {length} bytes; at most {cap} are accepted.")
    content = request.content
    if content.is_eof():
        whole = content.read_nowait()
        _check_size(whole, cap)
        return whole
    if request.headers.get("Expect", "").lower() == "100-continue" and request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            while chunk := await content.readany():
                body += chunk
                _check_size(body, cap)
    except TimeoutError:
        raise BodyTimeout(f"The body did not arrive within {timeout_s:g} seconds.") from None
    except (web.RequestPayloadError, ClientPayloadError) as error:
        raise InvalidRequest(f"The body could not be read: {error}.") from None
    return bytes(body)


def _check_size(body: bytes | bytearray, cap: int) -> None:
    if len(body) > cap:
        raise PayloadTooLarge(f"At most {cap} bytes are accepted in a body.")
