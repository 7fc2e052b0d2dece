"""A frame being sent, and a payload being received, each sealed while its bytes pass.

A head (header and ranges) has a tag of its own, checked before any byte of the payload is taken. A
payload goes straight from and to registered memory, in chunks, each followed by its tag. The
request succeeds only when all tags are checked.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Iterator, Sequence

from mooncake.transfer.net.seals import CHUNK_BYTES, MAX_CHUNKS, Seals
from mooncake.transfer.tcp import wire

_MAX_IOVECS = 1024


def cuts(lengths: Sequence[int], chunk_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Cut a payload of pieces into chunks, and return (piece, start, stop) of each. Both ends know
    the lengths of the pieces, so they cut alike. The first bytes of a long payload, which go ahead,
    form a chunk of their own.
    """
    ahead = wire.AHEAD_BYTES if wire.is_long(sum(lengths)) else 0
    for piece, length in enumerate(lengths):
        start = 0
        while start < length:
            stop = min(start + (ahead or chunk_bytes), length)
            yield piece, start, stop
            ahead = max(0, ahead - (stop - start))
            start = stop


class Outgoing:
    """A frame that is being sent."""

    def __init__(
        self,
        messages: Sequence[bytes],
        payload: Sequence[memoryview],
        seals: Seals,
        secret: bytes = b"",
    ) -> None:
        """`messages`: a head, and nothing or b"" behind it. They are never encrypted. `secret`: the
        question, answer or reason that ends the last of them.
        """
        sealed = [*map(seals.seal, messages[:-1]), seals.seal(messages[-1], secret)]
        self._ready = [memoryview(b"".join(sealed))]
        self._step_bytes = CHUNK_BYTES if seals.num_tag_bytes else wire.MAX_REQUEST_BYTES
        lengths = [len(view) for view in payload]
        self._chunks = deque(
            payload[piece][start:stop] for piece, start, stop in cuts(lengths, self._step_bytes)
        )
        self._seal = seals.begin() if payload else None
        self._is_due = True
        self.is_ahead = wire.is_long(sum(lengths))
        """True if the first bytes of a long payload are still to go, alone."""

    @property
    def is_sent(self) -> bool:
        """True if all of it has been sent."""
        return not (self._ready or self._chunks)

    def views(self) -> list[memoryview]:
        """Return what to send next. Call it inside the gate: it reads the payload."""
        if self._is_due and self._seal is not None:
            self._is_due = False
            room = wire.AHEAD_BYTES if self.is_ahead else self._step_bytes
            step: list[memoryview] = []
            while self._chunks and len(self._chunks[0]) <= room and len(step) < MAX_CHUNKS:
                step.append(self._chunks.popleft())
                room -= len(step[-1])
            self._ready += self._seal.seal(step)
        return self._ready

    def advance(self, num_bytes: int) -> None:
        """Remove what was sent."""
        wire.advance(self._ready, num_bytes)
        self._is_due = not self._ready and bool(self._chunks)


class Incoming:
    """A payload that is being received, with its tags."""

    def __init__(self, views: Sequence[memoryview], lengths: Sequence[int], seals: Seals) -> None:
        """Receive pieces of `lengths` into `views`; `views` may be empty if the payload is only
        dropped.
        """
        self._seal = seals.begin()
        self._views = list(views)
        self._sealed: deque[tuple[memoryview, memoryview, int]] = deque()
        """Chunks not checked yet: their place, the place of the tag, and the value of `num_left` at
        which both have arrived.
        """
        self._step_views = _MAX_IOVECS
        self.num_left = sum(lengths)
        if seals.num_tag_bytes:
            self._expect_tags(lengths, seals.num_tag_bytes)

    def _expect_tags(self, lengths: Sequence[int], tag_bytes: int) -> None:
        places = list(cuts(lengths, CHUNK_BYTES))
        tags = memoryview(bytearray(tag_bytes * len(places)))
        self.num_left += len(tags)
        # No more than a chunk at a time, so that it is checked while it is in the core's cache.
        num_chunks = max(1, CHUNK_BYTES * len(places) // self.num_left)
        self._step_views = min(_MAX_IOVECS, 2 * num_chunks)
        pieces, self._views = self._views, []
        if not pieces:
            return
        left = self.num_left
        for index, (piece, start, stop) in enumerate(places):
            chunk = pieces[piece][start:stop]
            tag = tags[index * tag_bytes : (index + 1) * tag_bytes]
            left -= len(chunk) + tag_bytes
            self._views += (chunk, tag)
            self._sealed.append((chunk, tag, left))

    def receive(self, sock: socket.socket) -> int:
        """Receive some of the payload. Return the number of bytes, 0 at the end of the stream.

        Call it inside the gate. Raises ProtocolError when a chunk was altered.
        """
        if len(self._views) == 1:
            count = sock.recv_into(self._views[0])
        else:
            count = sock.recvmsg_into(self._views[: self._step_views])[0]
        wire.advance(self._views, count)
        self.num_left -= count
        while self._sealed and self.num_left <= self._sealed[0][2]:
            chunk, tag, _ = self._sealed.popleft()
            self._seal.open(chunk, tag)
        return count

    def drop(self, sock: socket.socket, scratch: memoryview) -> int:
        """Receive some of the payload and discard it. The rest is not checked any more."""
        count = sock.recv_into(scratch[: self.num_left])
        self.num_left -= count
        self._sealed.clear()
        return count
