"""The questions that peers have asked over TCP and that are not over. Any thread may use it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Protocol

from mooncake.base.rights import Sender
from mooncake.transfer.engine import Asked, AskEnded, Pieces
from mooncake.transfer.net.io_loop import IoLoop

Hear = Callable[[Asked | AskEnded], None]


class Asker(Protocol):
    """A connection on which one question waits for its answer."""

    @property
    def loop(self) -> IoLoop:
        """The loop in which it lives."""

    def answer(self, number: int, answer: bytes, region_id: int, pieces: Pieces) -> None:
        """Send the answer to the question `number`, if that is still open. Called in `loop`."""

    def refuse(self, number: int, reason: str) -> None:
        """Refuse the question `number`, if that is still open. Called in `loop`."""


class Questions:
    """All open questions of one server, by number. Each is heard once, and so is its end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hear: Hear | None = None
        self._open: dict[int, Asker] = {}
        self._last = 0

    @property
    def num_open(self) -> int:
        return len(self._open)

    def hear(self, hear: Hear) -> None:
        """Have `hear` called with all questions and their ends, from the threads of connections."""
        self._hear = hear

    def open(self, asker: Asker, question: bytes, sender: Sender, whence: str) -> int:
        """Return the number of a new question, or 0 if nobody here hears questions."""
        if self._hear is None:
            return 0
        with self._lock:
            self._last += 1
            number = self._last
            self._open[number] = asker
        self._hear(Asked(number=number, question=question, sender=sender, whence=whence))
        return number

    def end(self, number: int) -> None:
        """Tell that nothing is sent any more for a question."""
        with self._lock:
            known = self._open.pop(number, None)
        if known is not None and self._hear is not None:
            self._hear(AskEnded(number=number))

    def answer(self, number: int, answer: bytes, region_id: int, pieces: Pieces) -> None:
        """Have the connection of a question send its answer. Nothing happens if it is over."""
        asker = self._open.get(number)
        if asker is not None:
            asker.loop.post(functools.partial(asker.answer, number, answer, region_id, pieces))

    def refuse(self, number: int, reason: str) -> None:
        """Have the connection of a question refuse it. Nothing happens if it is over."""
        asker = self._open.get(number)
        if asker is not None:
            asker.loop.post(functools.partial(asker.refuse, number, reason))
