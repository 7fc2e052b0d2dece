"""Checksums of blocks in this instance's pages: by them decode finds out that a block arrived
otherwise than prefill sent it, whatever carried it.

The hashing itself is behind a port, beside the instance's work. Owns which operation is whose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

Hashed = Callable[[list[int], float], None]
"""(checksum of each block, now)"""


class HashDone(msgspec.Struct, frozen=True):
    """Blocks have been hashed: their xxh3-64, in the order in which they were given."""

    op_id: int
    checksums: list[int]


class Hasher(Protocol):
    """Hashes blocks; each operation ends with one `HashDone` that the driver brings."""

    def start(self, pages: Sequence[int]) -> int:
        """Begin to hash the blocks in `pages`; return the operation's id."""


class PolledHasher(Hasher, Protocol):
    """A hasher that a driver's loop reads."""

    def fileno(self) -> int:
        """A descriptor that becomes readable when an operation ended."""

    def poll(self) -> Sequence[HashDone]:
        """Return what ended since the last call, without waiting."""

    def close(self) -> None:
        """End what runs; afterwards nothing reads the pages."""


class BlockChecksums:
    """All hashing of one instance."""

    def __init__(self, hasher: Hasher | None) -> None:
        """Without a hasher nothing may be started."""
        self._hasher = hasher
        self._hashed: dict[int, Hashed] = {}

    @property
    def can_hash(self) -> bool:
        """Whether `start` works here."""
        return self._hasher is not None

    def start(self, pages: Sequence[int], hashed: Hashed) -> None:
        """Hash the blocks in `pages`, which the caller holds; `hashed` is called once."""
        assert self._hasher is not None, "nothing here can hash"
        self._hashed[self._hasher.start(pages)] = hashed

    def on_done(self, event: HashDone, now: float) -> None:
        """Call the callback of the operation that ended."""
        self._hashed.pop(event.op_id)(event.checksums, now)
