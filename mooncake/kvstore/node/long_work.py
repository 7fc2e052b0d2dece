"""Does what one message asks for many blocks in pieces, between which the node serves others.

Pure; owned by the node.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mooncake.base import BlockKey

PIECE_KEYS = 1024
"""Blocks of one piece."""
MAX_BEGUN = 64
"""Messages that are begun and not finished. When there are more, the oldest is finished at once."""


@dataclass(slots=True)
class _Work:
    keys: Sequence[BlockKey]
    each: Callable[[Sequence[BlockKey], float], None]
    end: Callable[[float], None]
    num_done: int = 0


class LongWork:
    """The work of one node that is begun and not finished."""

    def __init__(self) -> None:
        self._begun: deque[_Work] = deque()

    @property
    def quiet(self) -> bool:
        """Whether all that was begun is finished."""
        return not self._begun

    def begin(
        self,
        keys: Sequence[BlockKey],
        each: Callable[[Sequence[BlockKey], float], None],
        end: Callable[[float], None],
        now: float,
    ) -> None:
        """Call `each` with one piece of the keys after the other, and then `end`. The first call is
        made now, the others at later ticks. Both get the time by then.
        """
        self._go_on(_Work(keys, each, end), now)
        if len(self._begun) > MAX_BEGUN:
            oldest = self._begun.popleft()
            while not self._did(oldest, now):
                pass

    def tick(self, now: float) -> float | None:
        """Do one more piece. Return when to call again."""
        if self._begun:
            self._go_on(self._begun.popleft(), now)
        return now if self._begun else None

    def _go_on(self, work: _Work, now: float) -> None:
        if not self._did(work, now):
            self._begun.append(work)

    def _did(self, work: _Work, now: float) -> bool:
        """Do one more piece, and return whether it was the last one."""
        begin, work.num_done = work.num_done, work.num_done + PIECE_KEYS
        work.each(work.keys[begin : work.num_done], now)
        if work.num_done < len(work.keys):
            return False
        work.end(now)
        return True
