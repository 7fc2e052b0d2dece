"""Holds the questions that peers ask over TCP until they end. Any thread may use it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from mooncake.base.rights import Sender
from mooncake.transfer.engine import Asked, AskEnded, AskerLeft, Pieces, Region

if TYPE_CHECKING:
    from mooncake.transfer.tcp.server import ServerConnection

Hear = Callable[[Asked | AskEnded | AskerLeft], None]


class Questions:
    """All open questions of one server, by number. Each is heard once, and so is its end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hear: Hear | None = None
        self._open: dict[int, ServerConnection] = {}
        self._last = 0
        self._askers: dict[ServerConnection, int] = {}
        """The number of each connection that has asked and has not ended: that of its first
        question.
        """

    @property
    def num_open(self) -> int:
        return len(self._open)

    def hear(self, hear: Hear) -> None:
        """Have `hear` called with all questions and their ends, from the threads of connections."""
        self._hear = hear

    def open(
        self,
        asker: ServerConnection,
        question: bytes,
        piece_bytes: int,
        sender: Sender,
        whence: str,
    ) -> int:
        """Return the number of a new question, or 0 if nobody here hears questions."""
        if self._hear is None:
            return 0
        with self._lock:
            self._last += 1
            number = self._last
            self._open[number] = asker
            first = self._askers.setdefault(asker, number)
        self._hear(Asked(
            number=number, question=question, piece_bytes=piece_bytes, sender=sender,
            whence=whence, asker=first,
        ))  # fmt: skip
        return number

    def end(self, number: int) -> None:
        """Tell that nothing is sent any more for a question."""
        with self._lock:
            known = self._open.pop(number, None)
        if known is not None and self._hear is not None:
            self._hear(AskEnded(number=number))

    def left(self, asker: ServerConnection) -> None:
        """Tell that a connection has ended, if it has asked anything."""
        with self._lock:
            first = self._askers.pop(asker, 0)
        if first and self._hear is not None:
            self._hear(AskerLeft(asker=first))

    def answer(self, number: int, answer: bytes, region: Region, pieces: Pieces) -> None:
        """Have the connection of a question send its answer, and the pieces behind it. Nothing
        happens if the question is over.
        """
        asker = self._open.get(number)
        if asker is not None:
            asker.loop.post(
                functools.partial(asker.answer, number, answer, region.region_id, pieces)
            )

    def refuse(self, number: int, reason: str) -> None:
        """Have the connection of a question refuse it. Nothing happens if it is over."""
        asker = self._open.get(number)
        if asker is not None:
            asker.loop.post(functools.partial(asker.refuse, number, reason))
