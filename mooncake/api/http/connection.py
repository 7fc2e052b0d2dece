"""Limits HTTP connections: slow or oversized requests and clients that do not read are cut off.
When there are too many connections, the oldest one that has proven no key is closed.

Owns how much one connection has sent and taken so far, and one timer for each direction. uvicorn
closes idle connections between requests (`keep_alive_s`).

The class here extends `HttpToolsProtocol`, which uvicorn does not document. So uvicorn is pinned
(`UVICORN`, constraints.txt). To upgrade it, change both and run
`tests/integration/api/test_connection.py`; it must pass unchanged.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from enum import Enum
from typing import Any, NoReturn, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from mooncake.api.config import ApiConfig
from mooncake.api.errors import ApiError, error_reply
from mooncake.base import ConfigError

UVICORN = "0.54.0"
"""The release that this module was tested with."""

_ATTRIBUTES = frozenset({"cycle", "flow", "headers", "loop", "pipeline", "transport"})
"""uvicorn's attributes of a connection that are used here. Its constructor sets all of them."""

_OWN = frozenset({"forget", "is_idle", "is_unserved", "promote"})
"""Attributes that connections use of each other; uvicorn does not know them."""

_log = logging.getLogger(__name__)

_PHRASES = {400: "Bad Request", 408: "Request Timeout", 431: "Request Header Fields Too Large"}


LAST_LOOK_S = 0.05
"""How long a connection may still send after a time-out. A blocked event loop runs its timers
before it reads what has arrived.
"""


class _Phase(Enum):
    IDLE = "idle"
    """No part of a next request has arrived."""
    HEAD = "head"
    BODY = "body"


MAX_PIPELINED = 16
"""Requests that may wait for the answers before them. A client that sends thousands at once would
hold the event loop while they are parsed.
"""


class Unreadable(Exception):
    """Raised inside the parser, which then stops reading the connection."""


def limited_protocol(config: ApiConfig) -> type[HttpToolsProtocol]:
    """Return the protocol class for uvicorn, with the limits of `config`.

    Raises:
        ConfigError: the installed uvicorn lacks something that this module extends.
    """
    check_uvicorn(HttpToolsProtocol)
    kept = {"limits": config, "unproven": {}, "proven": {}}
    return type("LimitedProtocol", (_LimitedProtocol,), kept)


def check_uvicorn(base: type) -> None:
    """Check that `base` has every method that is overridden here and every attribute that is used.

    Raises:
        ConfigError: something is missing; the message names it and the release to install.
    """
    overridden = {name for name in vars(_LimitedProtocol) if not name.startswith("_")} - _OWN
    missing = {name for name in overridden if not hasattr(base, name)}
    missing |= _ATTRIBUTES - set(vars(base)["__init__"].__code__.co_names)
    if missing:
        raise ConfigError(
            f"uvicorn {uvicorn.__version__} has no {', '.join(sorted(missing))} in its HTTP "
            f"protocol: install uvicorn=={UVICORN}, as constraints.txt pins it"
        )


class _LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, which also refuses slow or large requests and cuts off slow readers."""

    limits: ApiConfig
    unproven: dict[_LimitedProtocol, None]
    """Connections that are not known to have a key, the oldest first; most prove one soon."""
    proven: dict[_LimitedProtocol, None]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._phase = _Phase.IDLE
        self._num_head_bytes = 0
        self._refusal: ApiError | None = None
        """The reason why we stopped the parser, if we did."""
        self._num_rest_bytes = 0
        """Bytes since the last part of a body: extensions of chunks, and fields after it."""
        self._num_body_bytes = 0
        self._body_since_s = 0.0
        self._read_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    # ------------------------------------------------------------ reading

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have all the methods and are not of this class.
        super().connection_made(cast(asyncio.Transport, transport))
        self._watch_head()
        self.unproven[self] = None
        if len(self.unproven) + len(self.proven) > self.limits.max_connections:
            self._make_room()

    def _make_room(self) -> None:
        """Close the oldest connection that has proven no key. If all have, close the oldest one
        between two requests, otherwise the oldest one of whose request the head is not here or the
        answer has been given; otherwise this one.
        """
        closed = next(iter(self.unproven))  # each is looked at until it is known, and not again
        while closed is not self and closed.promote():
            closed = next(iter(self.unproven))
        if closed is self:
            idle = (each for each in self.proven if each.is_idle)
            unserved = (each for each in self.proven if each.is_unserved)
            closed = next(idle, None) or next(unserved, self)
        _log.warning(
            "a connection was closed: more than %d are open (`max-connections`)",
            self.limits.max_connections,
        )
        closed.forget()
        closed.transport.abort()

    def promote(self) -> bool:
        """Count this connection as proven from now on, if its last request was accepted.
        Return whether it was.
        """
        if not (
            self in self.unproven and self.cycle and self.cycle.scope["state"].get("is_proven")
        ):
            return False
        del self.unproven[self]
        self.proven[self] = None
        return True

    @property
    def is_idle(self) -> bool:
        """True if the connection is between two requests."""
        return self._phase is _Phase.IDLE and self.is_unserved

    @property
    def is_unserved(self) -> bool:
        """True if no answer is being made for it. More of a request may still come."""
        return self.cycle is None or bool(self.cycle.response_complete)

    def forget(self) -> None:
        self.unproven.pop(self, None)
        self.proven.pop(self, None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.forget()
        self._stop_read_timer()
        self._stop_write_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        num_body_bytes = self._num_body_bytes
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._phase is _Phase.BODY:
            came = self._num_body_bytes != num_body_bytes
            self._num_rest_bytes = 0 if came else self._num_rest_bytes + len(data)
            if self._num_rest_bytes > self.limits.max_header_bytes:
                self._refuse(self._head_too_large())
        elif self._phase is _Phase.HEAD:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > self.limits.max_header_bytes:
                self._refuse(self._head_too_large())
        elif self._read_timer is None and (self.cycle is None or self.cycle.response_complete):
            self._watch_head()  # something came that begins no request, and ended the idle time

    def on_message_begin(self) -> None:
        self.promote()
        super().on_message_begin()
        self._phase = _Phase.HEAD
        self._num_head_bytes = 0
        if self._read_timer is None:
            self._watch_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self.headers) >= self.limits.max_headers:
            self._stop(self._head_too_large())
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self.limits.max_header_bytes:
            self._stop(self._head_too_large())
        if len(self.pipeline) >= MAX_PIPELINED:
            limit = f"at most {MAX_PIPELINED} requests wait on a connection for the answers before"
            self._stop(ApiError(400, "BadRequestError", f"{limit} them"))
        self._stop_read_timer()
        super().on_headers_complete()
        self._phase = _Phase.BODY
        self._num_body_bytes = self._num_rest_bytes = 0
        self._body_since_s = self.loop.time()
        self._read_within(self.limits.body_timeout_s, self._check_body)

    def on_body(self, body: bytes) -> None:
        self._num_body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._stop_read_timer()
        self._phase = _Phase.IDLE
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer a request that the parser could not read, and close the connection."""
        self._refuse(self._refusal or ApiError(400, "BadRequestError", msg))

    def _watch_head(self) -> None:
        self._read_within(self.limits.header_timeout_s, self._head_too_slow)

    def _read_within(self, seconds: float, late: Callable[[], None]) -> None:
        def last_look() -> None:
            self._read_timer = self.loop.call_later(LAST_LOOK_S, late)

        self._read_timer = self.loop.call_later(seconds, last_look)

    def _head_too_slow(self) -> None:
        self._read_timer = None
        if self._phase is _Phase.HEAD:
            self._refuse(
                ApiError(
                    408,
                    "RequestTimeoutError",
                    f"the headers took longer than {self.limits.header_timeout_s:g} s",
                )
            )
        elif not self.transport.is_closing():
            self.transport.close()  # a connection that was opened for nothing

    def _check_body(self) -> None:
        """Refuse a body that is past its time-out and came too slowly."""
        limits = self.limits
        taken_s = self.loop.time() - self._body_since_s
        allowed_s = limits.body_timeout_s + self._num_body_bytes / limits.min_body_bytes_per_s
        if self.flow.read_paused:  # the server stopped reading, not the client
            allowed_s = max(allowed_s, taken_s + limits.body_timeout_s)
        if taken_s < allowed_s:
            self._read_within(allowed_s - taken_s, self._check_body)
            return
        self._read_timer = None
        self._refuse(
            ApiError(
                408,
                "RequestTimeoutError",
                f"the body came too slowly: {self._num_body_bytes} bytes in {taken_s:.0f} s",
            )
        )

    def _stop(self, refusal: ApiError) -> NoReturn:
        """Make the parser, which has called us, read no further."""
        self._refusal = refusal
        raise Unreadable

    def _head_too_large(self) -> ApiError:
        return ApiError(
            431,
            "RequestHeaderFieldsTooLargeError",
            f"at most {self.limits.max_headers} headers and "
            f"{self.limits.max_header_bytes} bytes of them are taken",
        )

    def _refuse(self, error: ApiError) -> None:
        """Send `error`, unless the application's own answer has begun, and close the connection."""
        self._stop_read_timer()
        cycle = self.cycle
        busy = cycle is not None and not cycle.response_complete
        if not (busy and cycle.response_started):
            body = error_reply(error)
            head = (
                f"HTTP/1.1 {error.http_status} {_PHRASES[error.http_status]}\r\n"
                "content-type: application/json\r\nconnection: close\r\n"
                f"content-length: {len(body)}\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
            if self.limits.access_log:
                _log.info("a request was refused unread, with status %d", error.http_status)
        if busy:  # as after a disconnect: nothing more of the application's answer is sent
            cycle.disconnected = True
            cycle.message_event.set()
        self.transport.close()

    # ------------------------------------------------------------ writing

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writing()

    def resume_writing(self) -> None:
        self._stop_write_timer()
        super().resume_writing()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._write_timer is None and self.transport.get_write_buffer_size():
            self._watch_writing()

    def _watch_writing(self) -> None:
        self._stop_write_timer()

        def last_look() -> None:
            self._write_timer = self.loop.call_later(LAST_LOOK_S, self._not_read)

        self._write_timer = self.loop.call_later(self.limits.write_timeout_s, last_look)

    def _not_read(self) -> None:
        self._write_timer = None
        if self.flow.write_paused or self.transport.get_write_buffer_size():
            _log.info("a client took nothing for %g s and was cut off", self.limits.write_timeout_s)
            self.transport.abort()

    def _stop_read_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
