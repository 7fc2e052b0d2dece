"""The tree of errors. Each says what happened, what to do, the HTTP status it becomes, and whether
a retry can help.

MooncakeError
├── UserError                 400   the caller can fix it
│   ├── InvalidRequest        400   a field is missing, malformed or out of range (`param` names it)
│   ├── ContextTooLong        400   prompt plus wanted output exceed the model's context length
│   ├── ModelNotFound         404   no such model is served here
│   ├── Unauthorized          401   missing or wrong API key
│   └── ConfigError            -    a flag or a configuration key is wrong (start-up)
├── Overloaded                429   a limit would be missed; retry after `retry_after_s`
├── Unavailable               503   no worker can take the request now (starting, draining, lost)
│   └── Unreachable            -    nobody answers at an address (clients and joining processes)
├── Forbidden                 403   the credential does not allow it
├── RequestTimeout            408   the request's own deadline passed
├── CheckpointError            -    a checkpoint cannot be read (names the tensor and the file)
├── TransferError             500   bytes did not arrive: take another replica or recompute
├── ProtocolError             500   a peer sent something that breaks the agreed protocol or version
└── InternalError             500   our fault; the message says what to report
"""

from __future__ import annotations


class MooncakeError(Exception):
    """The root of all errors that are raised on purpose."""

    http_status: int = 500
    error_type: str = "InternalServerError"
    retryable: bool = False

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class UserError(MooncakeError):
    """The caller can correct the request or configuration."""

    http_status = 400
    error_type = "BadRequestError"


class InvalidRequest(UserError):
    """A field of a request is missing, malformed or out of range; `param` names it."""


class ContextTooLong(UserError):
    """The prompt, or prompt plus wanted output, does not fit the model's context length."""


class ModelNotFound(UserError):
    """The requested model is not served here."""

    http_status = 404
    error_type = "NotFoundError"


class Unauthorized(UserError):
    """The API key is missing or wrong."""

    http_status = 401
    error_type = "Unauthorized"


class ConfigError(UserError):
    """A flag or configuration key is wrong; the message names it and the correction."""


class Overloaded(MooncakeError):
    """The request would miss a limit, or a queue is full; `retry_after_s` says when to retry."""

    http_status = 429
    error_type = "RateLimitError"
    retryable = True


class Unavailable(MooncakeError):
    """No worker can take the request now."""

    http_status = 503
    error_type = "ServiceUnavailableError"
    retryable = True


class Unreachable(Unavailable):
    """Nobody answers at an address; the message names it and what to look at."""


class Forbidden(MooncakeError):
    """The credential does not have the role, or is not of the tenant, that this request needs."""

    http_status = 403
    error_type = "Forbidden"


class RequestTimeout(MooncakeError):
    """The request's own deadline has passed."""

    http_status = 408
    error_type = "RequestTimeoutError"
    retryable = True


class CheckpointError(MooncakeError):
    """A checkpoint cannot be read; the message names the tensor and the file."""


class TransferError(MooncakeError):
    """Bytes did not arrive: read another replica, or compute the blocks again."""

    retryable = True


class ProtocolError(MooncakeError):
    """A peer violated the protocol or uses another version of it."""


class InternalError(MooncakeError):
    """A bug in this project."""
