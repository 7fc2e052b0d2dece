"""A light asyncio HTTP client: keeps connections open and hands body bytes over as they come.

Owns its connections; the caller interprets the bytes.
"""

from __future__ import annotations

import asyncio
import dataclasses
import ssl
import time
from collections.abc import Callable, Mapping
from typing import cast

from mooncake.api.http.client_wire import ResponseReader, WireError, request_head
from mooncake.base.urls import server_url

TIMEOUT_S = 6 * 3600.0
"""The limit for one whole request. Without it, a server that died without closing would block the
client for ever.
"""

OnData = Callable[[bytes, float], None]
"""A function that gets body bytes and the time when they came (`time.perf_counter`)."""
OnHead = Callable[[int, dict[str, str]], None]
"""A function that gets the status and the headers of an answer, by names in lower case."""


class RequestFailed(Exception):
    """No complete answer came; the message says why."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """The status line of a completed answer."""

    status: int
    reason: str


class Flow:
    """Lets a caller stop and resume the reading of one answer, so that its server waits."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self.is_paused = False

    def begin(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def end(self) -> None:
        """Let go of the connection, which may carry another answer now."""
        self.resume()
        self._transport = None

    def pause(self) -> None:
        if self._transport is not None and not self.is_paused:
            self.is_paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._transport is not None and self.is_paused:
            self.is_paused = False
            self._transport.resume_reading()


class _Connection(asyncio.Protocol):
    """One connection; at most one request at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.reader = ResponseReader()
        self._on_data: OnData | None = None
        self._on_head: OnHead | None = None
        self._ended: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have all the methods and are not of this class.
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self._ended is None or self._on_data is None:
            self.close()  # nothing was asked
            return
        try:
            body = self.reader.feed(data)
        except WireError as error:
            self._finish(RequestFailed(str(error)))
            return
        if self._on_head is not None and self.reader.status:
            self._on_head(self.reader.status, self.reader.headers)
            self._on_head = None
        if body:
            self._on_data(body, now)
        if self.reader.done:
            self._finish(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        if self._ended is None:
            return
        if self.reader.end():
            self._finish(None)
        else:
            why = f": {exc}" if exc else ""
            self._finish(RequestFailed(f"the server closed the connection{why}"))

    async def ask(
        self, request: bytes, on_data: OnData, on_head: OnHead | None, flow: Flow
    ) -> Answer:
        """Send `request` and wait for the end of the answer."""
        if self.transport is None:
            raise RequestFailed("the server closed the connection")
        self.reader = ResponseReader()
        self._on_data, self._on_head = on_data, on_head
        self._ended = asyncio.get_running_loop().create_future()
        flow.begin(self.transport)
        self.transport.write(request)
        try:
            await self._ended
        finally:
            flow.end()
            self._ended = self._on_data = self._on_head = None
            if not self.reader.done:
                self.close()
        return Answer(self.reader.status, self.reader.reason)

    @property
    def usable(self) -> bool:
        """Whether this connection may carry another request."""
        return self.transport is not None and not self.transport.is_closing()

    def close(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def _finish(self, error: Exception | None) -> None:
        if self._ended is None or self._ended.done():
            return
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)


class HttpClient:
    """Sends requests to one server. Close it in the event loop that used it."""

    def __init__(self, base_url: str, *, insecure: bool = False) -> None:
        """Talk to `base_url` ("http://127.0.0.1:8000"); `insecure` takes any certificate.

        Raises:
            ConfigError: `base_url` is not the URL of a server.
        """
        self._url = server_url("base-url", base_url)
        self._tls = _tls(insecure) if self._url.is_tls else None
        self._idle: list[_Connection] = []

    async def request(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: bytes,
        on_data: OnData,
        on_head: OnHead | None = None,
        flow: Flow | None = None,
    ) -> Answer:
        """Send a request, pass on the head of its answer and then its body as they come, return
        how it ended. `flow` stops and resumes that. A cancelled request closes its connection, by
        which the server notices.

        Raises:
            RequestFailed: no complete answer came.
        """
        head = request_head(method, self._url.prefix + path, self._url.netloc, headers, len(body))
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await self._exchange(head + body, on_data, on_head, flow or Flow())
        except TimeoutError as error:
            raise RequestFailed(f"no answer within {TIMEOUT_S:.0f} s") from error

    async def _exchange(
        self, request: bytes, on_data: OnData, on_head: OnHead | None, flow: Flow
    ) -> Answer:
        while self._idle:
            kept = self._idle.pop()
            if not kept.usable:
                continue
            try:
                return await self._ask(kept, request, on_data, on_head, flow)
            except RequestFailed:
                # A server may close an idle connection at any time, also as we write to it.
                if kept.reader.started:
                    raise
        return await self._ask(await self._connect(), request, on_data, on_head, flow)

    async def _ask(
        self,
        connection: _Connection,
        request: bytes,
        on_data: OnData,
        on_head: OnHead | None,
        flow: Flow,
    ) -> Answer:
        answer = await connection.ask(request, on_data, on_head, flow)
        if connection.reader.keep_alive and connection.usable:
            self._idle.append(connection)
        else:
            connection.close()
        return answer

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        opening = asyncio.ensure_future(
            loop.create_connection(_Connection, self._url.host, self._url.port, ssl=self._tls)
        )
        try:
            _, connection = await asyncio.shield(opening)
        except asyncio.CancelledError:  # the caller has left, and nobody else would close it
            opening.add_done_callback(_close_when_made)
            raise
        except OSError as error:
            raise RequestFailed(f"{self._url.netloc}: {error.strerror or error}") from error
        return connection

    def close(self) -> None:
        """Close the idle connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()


def _close_when_made(
    opening: asyncio.Future[tuple[asyncio.Transport, _Connection]],
) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result()[1].close()


def _tls(insecure: bool) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
