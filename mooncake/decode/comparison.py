"""Compares the blocks that prefill pushed with the checksums of what it sent: plain state of one
job.

A block is compared once, when its checksum comes: ahead of `KVReady` or with it.
"""

from __future__ import annotations

from collections.abc import Sequence


class Comparison:
    """The progress of comparing the blocks of one request."""

    def __init__(self) -> None:
        self._sent: dict[int, int] = {}
        """Checksum of each block that is to be compared, by index."""
        self._num_open = 0
        self._wrong: set[int] = set()

    @property
    def open(self) -> bool:
        """True if the checksums of some blocks are not known yet on this side."""
        return self._num_open > 0

    @property
    def num_compared(self) -> int:
        return len(self._sent) - self._num_open

    @property
    def wrong(self) -> list[int]:
        """The indexes of blocks that differ from what was sent, in order."""
        return sorted(self._wrong)

    def ask(self, indexes: Sequence[int], checksums: Sequence[int]) -> list[int]:
        """Record what was sent. Return the indexes of blocks to hash here, for `found`."""
        new = {
            index: checksum
            for index, checksum in zip(indexes, checksums, strict=False)
            if index not in self._sent
        }
        self._sent.update(new)
        self._num_open += len(new)
        return list(new)

    def found(self, indexes: Sequence[int], checksums: Sequence[int]) -> None:
        """Record the checksums of what lies here."""
        self._num_open -= len(indexes)
        self._wrong.update(
            index
            for index, checksum in zip(indexes, checksums, strict=True)
            if checksum != self._sent[index]
        )
