"""Every exception of aserve, by whose fault it is. A mistake from outside carries a status and a plain sentence."""


class AserveError(Exception):
    """Base of all errors that a client may see.

    status, type and code are the HTTP answer's; ``param`` is the path of the field at fault; ``retry_after_s`` is set
    where waiting helps, and ``should_retry`` is False where repeating the same request cannot.
    """

    status = 500
    type = "server_error"
    code: str | None = None
    should_retry = True

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        if code is not None:
            self.code = code


# --- the client's fault


class InvalidRequest(AserveError):
    """A field is missing, of the wrong type or out of range."""

    status = 400
    type = "invalid_request_error"
    should_retry = False


class Unsupported(InvalidRequest):
    """A known field or value that would change the answer and is not served here."""

    code = "unsupported"


class ContextLengthExceeded(InvalidRequest):
    """Prompt, or prompt and sent length, do not fit the context or the KV pool."""

    code = "context_length_exceeded"


class AuthenticationFailed(AserveError):
    """Key missing or wrong."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"
    should_retry = False


class Forbidden(AserveError):
    """An origin or host that is not listed, or another key's request."""

    status = 403
    type = "permission_error"
    should_retry = False


class NotFound(AserveError):
    """No such route or request."""

    status = 404
    type = "invalid_request_error"
    should_retry = False


class ModelNotFound(NotFound):
    """The request names a model that is not served here."""

    code = "model_not_found"


class MethodNotAllowed(AserveError):
    """The path exists, the method does not."""

    status = 405
    type = "invalid_request_error"
    should_retry = False


class BodyTimeout(AserveError):
    """The body did not arrive in time."""

    status = 408
    type = "invalid_request_error"


class PayloadTooLarge(AserveError):
    """The body exceeds the cap."""

    status = 413
    type = "invalid_request_error"
    should_retry = False


class UnsupportedMediaType(AserveError):
    """A compressed body."""

    status = 415
    type = "invalid_request_error"
    should_retry = False


class RateLimited(AserveError):
    """This key has too many requests open."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


# --- nobody's fault: the server's state


class Overloaded(AserveError):
    """The queue is full."""

    status = 503
    type = "server_error"
    code = "server_overloaded"


class ModelLoading(AserveError):
    """The model is not ready yet."""

    status = 503
    code = "model_loading"


class Draining(AserveError):
    """The server is shutting down and takes no new work."""

    status = 503
    code = "server_draining"


class DeadlineExceeded(AserveError):
    """The request's own time limit passed."""

    status = 504
    type = "timeout_error"
    code = "deadline_exceeded"
    should_retry = False


class RequestAborted(AserveError):
    """The request was aborted: by its own DELETE, by shutdown, or because its reader stalled."""

    status = 499
    type = "request_aborted"
    code = "request_aborted"
    should_retry = False


# --- the operator's fault: one sentence and a non-zero exit


class ConfigError(AserveError):
    """An option is unknown, of the wrong type or out of range."""


class ModelError(AserveError):
    """The model cannot be found, read or served: the sentence says which and what to do."""


class NotOnGpu(ModelError):
    """A GPU does not run this model's code, whatever its memory and the other options: a CPU may."""


# --- our fault


class GenerationFailed(AserveError):
    """A step failed under this request, or its row turned invalid."""

    code = "generation_failed"


class DeviceLost(AserveError):
    """A sticky device error: no later step can succeed."""

    status = 503
    code = "device_lost"


class EngineDead(AserveError):
    """The engine's loop ended on a fault; every open and later request is told so."""

    status = 503
    code = "engine_dead"


class IllegalTransition(AssertionError):
    """A state machine was asked for a move that its table does not have. Nothing was changed."""


class InvariantViolated(AssertionError):
    """An independent recount disagrees with the scheduler's own state."""
