"""One request to an engine: its head, then its body in the pieces in which it comes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from mooncake.api.http.client import Flow, HttpClient, RequestFailed

_log = logging.getLogger(__name__)

MAX_WHOLE_BYTES = 256 << 20
"""The longest answer that is kept until it is whole."""
MAX_UNREAD_BYTES = 1 << 20
"""While more than this waits to be passed on, no more is read from the engine."""
MAX_ASKED_BYTES = 16 << 20
"""The longest answer to what the gateway itself asks: it is read in the event loop."""


class EngineRefused(RequestFailed):
    """The engine does not answer the request, but says so."""

    def __init__(self, status: int) -> None:
        super().__init__(f"it answers with status {status}")
        self.status = status


class Exchange:
    """Sends a request at once. Leaving the `with` block ends it, which the engine notices."""

    def __init__(
        self, client: HttpClient, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self._pieces: list[bytes] = []
        self._num_unread = 0
        self._flow = Flow()
        self._news = asyncio.Event()
        self._ended = False
        self._failure: RequestFailed | None = None
        self._task = asyncio.create_task(self._run(client, method, path, headers, body))

    def __enter__(self) -> Exchange:
        return self

    def __exit__(self, *error: object) -> None:
        self._task.cancel()

    async def head(self) -> int:
        """Wait for the status and the headers of the answer. Return the status.

        Raises:
            RequestFailed: no answer came.
        """
        while not self.status:
            await self._wait()
        return self.status

    async def piece(self) -> bytes:
        """Wait for more of the body and return all that has come; nothing: it is whole.

        Raises:
            RequestFailed: the answer broke off.
        """
        while not self._pieces and not self._ended:
            await self._wait()
        found = b"".join(self._pieces)
        self._pieces.clear()
        self._num_unread = 0
        self._flow.resume()
        if not found and self._failure is not None:
            raise self._failure
        return found

    async def whole(self, max_bytes: int = MAX_WHOLE_BYTES) -> bytes:
        """Wait for the whole body.

        Raises:
            RequestFailed: the answer broke off, or is too long.
        """
        parts: list[bytes] = []
        num_bytes = 0
        while part := await self.piece():
            parts.append(part)
            num_bytes += len(part)
            if num_bytes > max_bytes:
                raise RequestFailed(f"its answer has more than {max_bytes} bytes")
        return b"".join(parts)

    def fail(self, reason: str) -> None:
        """End the exchange now: whoever waits for it gets RequestFailed."""
        if not self._ended:
            self._end(RequestFailed(reason))
            self._task.cancel()

    async def _wait(self) -> None:
        if self._failure is not None:
            raise self._failure
        self._news.clear()
        await self._news.wait()

    async def _run(
        self, client: HttpClient, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> None:
        try:
            await client.request(
                method, path, headers, body, self._on_data, self._on_head, self._flow
            )
        except RequestFailed as error:
            self._end(error)
        except Exception as error:  # who waits must hear of it
            _log.exception("a request to an engine failed")
            self._end(RequestFailed(f"{type(error).__name__}: {error}"))
        else:
            self._end(None)

    def _on_head(self, status: int, headers: dict[str, str]) -> None:
        self.status, self.headers = status, headers
        self._news.set()

    def _on_data(self, data: bytes, at_s: float) -> None:
        del at_s
        self._pieces.append(data)
        self._num_unread += len(data)
        if self._num_unread > MAX_UNREAD_BYTES:
            self._flow.pause()
        self._news.set()

    def _end(self, failure: RequestFailed | None) -> None:
        if not self._ended:
            self._ended, self._failure = True, failure
            self._news.set()


async def ask_json(
    client: HttpClient,
    method: str,
    path: str,
    headers: Mapping[str, str],
    body: bytes = b"",
    *,
    limit_s: float,
) -> Any:
    """Return the JSON that an engine answers with status 200, or None if the body is empty.

    Raises:
        RequestFailed: it does not answer so within `limit_s` seconds.
    """
    try:
        async with asyncio.timeout(limit_s):
            with Exchange(client, method, path, headers, body) as exchange:
                status = await exchange.head()
                found = await exchange.whole(MAX_ASKED_BYTES)
    except TimeoutError:
        raise RequestFailed(f"it gave no answer within {limit_s:g} s") from None
    if status != 200:
        raise EngineRefused(status)
    try:
        return msgspec.json.decode(found) if found.strip() else None
    except (msgspec.MsgspecError, RecursionError):
        raise RequestFailed("its answer is not JSON") from None
