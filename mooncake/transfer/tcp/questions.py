"""The questions that peers have asked over TCP and that are not over. Any thread may use it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from mooncake.base.rights import Sender
from mooncake.transfer.engine import Asked, AskEnded, Brought, Pieces, QuestionEvent
from mooncake.transfer.net.io_loop import IoLoop

Hear = Callable[[QuestionEvent], None]


class Asker(Protocol):
    """A connection on which one question waits for its answer."""

    @property
    def loop(self) -> IoLoop:
        """The loop in which it lives."""

    def take(self, number: int, region_id: int, offsets: Sequence[int | None], grant: int) -> None:
        """Write the pieces behind the question `number`, if that is still open. Called in
        `loop`.
        """

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

    def open(
        self,
        asker: Asker,
        question: bytes,
        sender: Sender,
        whence: str,
        num_pieces: int = 0,
        num_bytes: int = 0,
    ) -> int:
        """Return the number of a new question, which may bring pieces, or 0 if nobody here hears
        questions.
        """
        if self._hear is None:
            return 0
        with self._lock:
            self._last += 1
            number = self._last
            self._open[number] = asker
        self._hear(Asked(
            number=number, question=question, sender=sender, whence=whence,
            num_pieces=num_pieces, num_bytes=num_bytes,
        ))  # fmt: skip
        return number

    def brought(self, number: int, sums: list[int]) -> None:
        """Tell that the pieces behind a question lie in memory."""
        if number in self._open and self._hear is not None:
            self._hear(Brought(number=number, sums=sums))

    def end(self, number: int) -> None:
        """Tell that nothing is sent any more for a question."""
        with self._lock:
            known = self._open.pop(number, None)
        if known is not None and self._hear is not None:
            self._hear(AskEnded(number=number))

    def take(self, number: int, region_id: int, offsets: Sequence[int | None], grant: int) -> None:
        """Have the connection of a question write its pieces. Nothing happens if it is over."""
        asker = self._open.get(number)
        if asker is not None:
            asker.loop.post(functools.partial(asker.take, number, region_id, offsets, grant))

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
