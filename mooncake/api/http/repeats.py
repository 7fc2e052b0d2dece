"""Requests with an `Idempotency-Key`: a client that repeats one gets the answer of the first, from
its start.

Plain ASGI between `Access` and the routes. It records the messages of replies, so no route knows
about it. Owns the answers that are being given or kept, and the memory for them.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mooncake.api.config import ApiConfig
from mooncake.api.errors import ApiError, Repeated
from mooncake.api.http.limits import Shares
from mooncake.api.http.response import ErrorResponse, until_gone
from mooncake.base import InvalidRequest

HEADER = "Idempotency-Key"
REPLAYED = "Idempotent-Replayed"
"""A header of answers that were made for an earlier request."""
MAX_READERS = 8
"""Connections that may read one answer at a time."""
ANSWER_BYTES = 4096
"""Bytes that an answer costs besides its messages."""
PART_BYTES = 512
"""Bytes that a recorded message costs besides its body."""
MAX_JOINED = 256
"""Recorded messages that are sent as one: a repeat may read thousands at once."""

_KEY = re.compile(r"[\x20-\x7e]{1,255}")


class _Answer:
    """The messages of a reply so far, and how far each reader has come."""

    def __init__(
        self, take: Callable[[_Answer, int], bool], give_back: Callable[[_Answer], None]
    ) -> None:
        """`take` takes memory for more bytes; it returns False if there is none. `give_back`
        returns all of it. It is called once no part is held any more for which memory was taken.
        """
        self.digest = b""
        """Digest of path and body."""
        self.begun = asyncio.Event()
        """Set once the body has arrived and the request does not repeat another one."""
        self.abandoned = asyncio.Event()
        """Set if it ends before it is complete."""
        self.is_whole = True
        """True if all messages are here for new readers. Without memory for them, the answer moves
        at its readers' speed.
        """
        self.ended = False
        self.error: Exception | None = None
        self.num_bytes = 0
        self.source = self
        """The answer that the client gets: another request's, if this one repeats it."""
        self.readers: dict[_Answer, int] = {self: 0}
        """Readers whose clients get this answer, and how many messages each has received."""
        self.forgetting: asyncio.TimerHandle | None = None
        self._take, self._give_back = take, give_back
        self._left_s = 0.0
        """The time when the last reader left, by the loop's clock."""
        self._parts: list[Message] = []
        self._num_dropped = 0
        self._news = asyncio.Event()

    @property
    def cannot_be_read(self) -> str:
        """The reason why no other client may read it now; "" = others may."""
        if not self.is_whole:
            return "its answer does not fit the memory for repeats (`max-kept-answer-bytes`)"
        if self.abandoned.is_set():
            return "is being ended, because its client left"
        if len(self.readers) >= MAX_READERS:
            return f"{MAX_READERS} connections read its answer"
        return ""

    async def add(self, message: Message) -> None:
        """Record the next message. Before the request has begun, a message belongs to a refusal,
        which is small: no memory is taken, and nobody else reads it.
        """
        self._parts.append(message)
        self._tell()
        if not self.begun.is_set():
            return
        num_bytes = len(message.get("body", b"")) + PART_BYTES
        num_bytes += 0 if self.num_bytes else ANSWER_BYTES
        self.is_whole = self.is_whole and self._take(self, num_bytes)
        if self.is_whole:
            return
        while self._drop():
            await self._news.wait()
        self._give_back(self)

    def end(self, error: Exception | None) -> None:
        """Record that nothing more comes."""
        self.error, self.ended = error, True
        self._tell()

    async def send_to(self, reader: _Answer, send: Send, gone: asyncio.Future[None]) -> None:
        """Send everything from the start to the client of `reader`, until the end or until it has
        `gone`.

        Raises:
            Exception: the exception that the application has raised.
        """
        while not gone.done():
            if (at := self.readers[reader]) < self._num_dropped + len(self._parts):
                message, num = self._from(at, replayed=reader is not self)
                await send(message)
                self.readers[reader] = at + num
                if not self.is_whole:
                    self._tell()
                await asyncio.sleep(0)  # other tasks' turn
            elif not self.ended:
                news: asyncio.Future[Any] = asyncio.ensure_future(self._news.wait())
                await asyncio.wait((news, gone), return_when=asyncio.FIRST_COMPLETED)
                news.cancel()
            elif self.error is not None:
                raise self.error
            else:
                return

    def leave(self, reader: _Answer) -> None:
        """Forget a reader."""
        if self.readers.pop(reader, None) is not None:
            self._left_s = asyncio.get_running_loop().time()
            self._tell()
            self._free()

    def discard(self) -> None:
        """Give the memory back once nobody reads the answer any more; no further reader will
        come.
        """
        self.is_whole = False
        self._free()

    async def over(self, linger_s: float) -> None:
        """Wait until the answer has ended, or nobody has read it for `linger_s`."""
        while not self.ended and (self.is_whole or self.readers):
            until_s = None if self.readers else self._left_s + linger_s
            try:
                async with asyncio.timeout_at(until_s):
                    await self._news.wait()
            except TimeoutError:
                if not self.readers:  # a reader may have come meanwhile
                    return

    def _from(self, at: int, *, replayed: bool) -> tuple[Message, int]:
        """Return the messages after the first `at` as one message, and their number."""
        first = at - self._num_dropped
        message = dict(self._parts[first])
        if message["type"] == "http.response.start":
            if replayed:
                header = (REPLAYED.lower().encode(), b"true")
                message["headers"] = [*message.get("headers", ()), header]
            return message, 1
        parts = self._parts[first : first + MAX_JOINED]
        message["body"] = b"".join(part.get("body", b"") for part in parts)
        message["more_body"] = parts[-1].get("more_body", False)
        return message, len(parts)

    def _drop(self) -> bool:
        """Drop what all readers have received. Return whether anything is left."""
        least = min(self.readers.values(), default=self._num_dropped + len(self._parts))
        del self._parts[: least - self._num_dropped]
        self._num_dropped = least
        return bool(self._parts)

    def _free(self) -> None:
        if not self.is_whole and not self.readers:
            self._parts.clear()
            self._give_back(self)

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


class Repeats:
    """ASGI application around the routes, for requests with a key.

    The first request with a key does not depend on its connection. If the connection breaks, the
    request continues for `ApiConfig.linger_s`, and the caller's permits are held meanwhile. A
    repeat with the same body reads the same messages. A complete answer is kept for
    `kept_answer_s`; an error is not.
    """

    def __init__(self, app: ASGIApp, config: ApiConfig) -> None:
        self._app = app
        self._config = config
        self._memory = Shares(config.max_kept_answer_bytes, least=0)
        self._running: dict[tuple[str | None, str], _Answer] = {}
        self._kept: dict[str | None, dict[str, _Answer]] = defaultdict(dict)
        """The ended answers of each API key, the oldest first."""
        self._holding: set[_Answer] = set()
        """All answers that hold memory: running, kept, or still read after they were forgotten."""

    def knows(self, owner: str | None, headers: Headers) -> bool:
        """Return whether a request of the API key `owner` repeats one whose answer is here."""
        key = headers.get(HEADER, "")
        return (owner, key) in self._running or key in self._kept.get(owner, ())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = Headers(scope=scope)[HEADER]
        if not _KEY.fullmatch(key):
            error = InvalidRequest(f"{HEADER}: must be 1 to 255 printable ASCII characters")
            await ErrorResponse(error)(scope, receive, send)
            return
        state: dict[str, Any] = scope["state"]
        owner: str | None = state.get("key_name")
        state["seed"] = seed_of(owner, key)
        answer = _Answer(
            lambda answer, num_bytes: self._take(owner, answer, num_bytes),
            lambda answer: self._give_back(owner, answer),
        )
        digest = hashlib.sha256(scope["path"].encode() + b"\n")

        async def receive_body() -> Message:
            if answer.begun.is_set():
                await answer.abandoned.wait()
                return {"type": "http.disconnect"}
            message = await receive()
            digest.update(message.get("body", b""))
            if message["type"] == "http.request" and not message.get("more_body"):
                answer.digest = digest.digest()
                self._begin(owner, key, answer, is_repeat=bool(state.get("is_repeat")))
            return message

        running: asyncio.Future[Any] = asyncio.ensure_future(self._run(scope, receive_body, answer))
        tasks = [running, asyncio.ensure_future(answer.begun.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            tasks.append(gone := asyncio.ensure_future(until_gone(receive)))
            await answer.source.send_to(answer, send, gone)
            answer.source.leave(answer)
            await answer.over(self._config.linger_s)
            if not answer.ended:
                answer.abandoned.set()
            await running
        finally:
            for task in tasks:
                task.cancel()
            answer.source.leave(answer)
            self._settle(owner, key, answer, is_complete=bool(state.get("is_complete")))

    async def _run(self, scope: Scope, receive: Receive, answer: _Answer) -> None:
        error = None
        try:
            await self._app(scope, receive, answer.add)
        except Repeated:
            pass
        except Exception as raised:
            error = raised  # the readers raise it
        finally:
            answer.end(error)

    def _begin(self, owner: str | None, key: str, answer: _Answer, *, is_repeat: bool) -> None:
        """Register a request whose body has arrived. `is_repeat`: the limits of its API key were
        not checked, because it repeats another request; so it may not run itself.

        Raises:
            ApiError: 422, this key came with another body; 409, the answer cannot be read again
                now.
            Repeated: the answer exists.
        """
        known = self._running.get((owner, key)) or self._kept.get(owner, {}).get(key)
        if known is None and is_repeat:
            raise ApiError(
                409,
                "ConflictError",
                f"{HEADER}: the answer to the first request with this key was forgotten while this "
                "one was read; send it again",
            )
        if known is None:
            self._running[owner, key] = answer
            answer.begun.set()
        elif known.digest != answer.digest:
            raise ApiError(
                422,
                "UnprocessableEntityError",
                f"{HEADER}: a request with another path or body had this key; take a new key for "
                "each new request",
            )
        elif why := known.cannot_be_read:
            raise ApiError(
                409,
                "ConflictError",
                f"{HEADER}: the first request with this key still runs, and {why}; try again once "
                "it has ended",
            )
        else:
            known.readers[answer] = 0
            answer.readers.clear()
            answer.source = known
            raise Repeated

    def _take(self, owner: str | None, answer: _Answer, num_bytes: int) -> bool:
        """Take memory for an answer, if necessary from its owner's oldest answers. An answer that
        is being read is not forgotten for this, because that would free nothing.
        """
        while not self._memory.take(owner, num_bytes):
            kept = self._kept.get(owner, {})
            oldest = next((key for key, other in kept.items() if not other.readers), None)
            if oldest is None:
                return False
            self._forget(owner, oldest)
        answer.num_bytes += num_bytes
        self._holding.add(answer)
        return True

    def _settle(self, owner: str | None, key: str, answer: _Answer, *, is_complete: bool) -> None:
        """Keep the answer of a request that has ended, or discard it."""
        registered = self._running.get((owner, key)) is answer
        if registered:
            del self._running[owner, key]
        if not (registered and is_complete and answer.is_whole):
            answer.discard()
            return
        self._kept[owner][key] = answer
        loop = asyncio.get_running_loop()
        answer.forgetting = loop.call_later(self._config.kept_answer_s, self._forget, owner, key)

    def _forget(self, owner: str | None, key: str) -> None:
        kept = self._kept[owner]
        answer = kept.pop(key)
        if not kept:
            del self._kept[owner]
        if answer.forgetting is not None:
            answer.forgetting.cancel()
        answer.discard()

    def _give_back(self, owner: str | None, answer: _Answer) -> None:
        if answer in self._holding:
            self._holding.remove(answer)
            self._memory.give_back(owner, answer.num_bytes)
            answer.num_bytes = 0

    def check_integrity(self) -> None:
        """Raise AssertionError when the memory held differs from what the answers hold."""
        self._memory.check_integrity()
        assert self._memory.num_held == sum(answer.num_bytes for answer in self._holding)
        kept = {answer for answers in self._kept.values() for answer in answers.values()}
        left = self._holding - kept - {*self._running.values()}
        assert all(answer.readers for answer in left), "nobody reads it, and it holds memory"


def seed_of(owner: str | None, key: str) -> int:
    """Return the seed of a keyed request that has no seed. It is the same at every gateway."""
    digest = hashlib.sha256(f"{owner or ''}\n{key}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
