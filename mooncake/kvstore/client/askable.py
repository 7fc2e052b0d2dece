"""Knows which pool nodes may be asked over the data connection: those that have granted something
by a message, so that their memory is known, and that have answered the latest questions.

Pure; owned by a reader or a writer of blocks.
"""

from __future__ import annotations

from mooncake.base import SegmentRef
from mooncake.base.bounded_map import BoundedMap

MAX_UNANSWERED = 3
"""After so many questions in a row without an answer, as where the data connection comes from
another host than the messages, a node is asked no more.
"""
_MAX_KNOWN = 1024
"""Nodes whose segments are remembered."""


class AskableNodes:
    """The nodes that one reader or writer may ask, by their addresses."""

    def __init__(self) -> None:
        self._segments: BoundedMap[str, SegmentRef] = BoundedMap(_MAX_KNOWN)
        """The memory of each node that has granted something, by the node's address."""
        self._unanswered: BoundedMap[str, tuple[int, int]] = BoundedMap(_MAX_KNOWN)
        """How many times in a row a node has not answered, and the newest question when that was
        counted last, by the id of its engine.
        """
        self._last = 0

    def learn(self, address: str, segment: SegmentRef) -> None:
        """Remember the memory of a node."""
        self._segments[address] = segment

    def forget(self, address: str) -> None:
        """Forget a node that is lost."""
        self._segments.pop(address, None)

    def segment_of(self, address: str) -> SegmentRef | None:
        """Return the memory of a node that may be asked; None: send it messages."""
        segment = self._segments.get(address)
        if segment is None or self._unanswered.get(segment.engine_id, (0, 0))[0] >= MAX_UNANSWERED:
            return None
        return segment

    def begin(self) -> int:
        """Return the number of a new question."""
        self._last += 1
        return self._last

    def ended(self, number: int, segment: SegmentRef, *, is_answered: bool) -> None:
        """Count whether a question was answered. Questions that were under way together count once:
        one broken connection ends all of them.
        """
        missed, newest = self._unanswered.get(segment.engine_id, (0, 0))
        if is_answered:
            self._unanswered[segment.engine_id] = 0, 0
        elif number > newest:
            self._unanswered[segment.engine_id] = missed + 1, self._last
