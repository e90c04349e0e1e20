"""Errors as the wire has them: body, status and the headers that tell a client whether to come back."""

import math
from typing import Any

import orjson

from aserve.core.request import FinishReason
from aserve.engine.generation import Delta
from aserve.errors import AserveError, DeadlineExceeded, Draining, GenerationFailed, Overloaded, RequestAborted

MAX_MESSAGE_CHARS = 1000
"""Messages may quote what the client sent; a long quotation helps nobody."""


class InternalError(AserveError):
    """Ours: an exception that no handler expected. Says nothing of its cause; the log does."""

    code = "internal_error"


def error_object(error: AserveError) -> dict[str, Any]:
    message = error.message
    if len(message) > MAX_MESSAGE_CHARS:
        message = message[:MAX_MESSAGE_CHARS] + "…"
    return {"error": {"message": message, "type": error.type, "param": error.param, "code": error.code}}


def error_body(error: AserveError) -> bytes:
    """JSON of the error. A message that is not valid Unicode (a lone surrogate of a path, say) is escaped, never
    raised."""
    try:
        return orjson.dumps(error_object(error))
    except TypeError:
        plain = AserveError(error.message.encode("ascii", "backslashreplace").decode(), param=None, code=error.code)
        plain.type = error.type
        return orjson.dumps(error_object(plain))


def error_status(error: AserveError, queue_full_status: int) -> int:
    return queue_full_status if isinstance(error, Overloaded) else error.status


def error_headers(error: AserveError) -> dict[str, str]:
    headers = {}
    if not error.should_retry:
        headers["x-should-retry"] = "false"
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return headers


def fault_of(delta: Delta, *, draining: bool) -> AserveError | None:
    """The error that a choice's end stands for; None for stop, length and deltas that end nothing.

    An abort while the server drains is the server's doing, and another server may take the request.
    """
    match delta.finish:
        case None | FinishReason.STOP | FinishReason.LENGTH:
            return None
        case FinishReason.TIMEOUT:
            return DeadlineExceeded(delta.error or "The request's time limit passed.")
        case FinishReason.ABORT if draining:
            return Draining("The server shut down before the answer was complete.", retry_after_s=1.0)
        case FinishReason.ABORT:
            return RequestAborted(delta.error or "The request was aborted.")
        case FinishReason.ERROR:
            return GenerationFailed(delta.error or "The model failed on this request.")
