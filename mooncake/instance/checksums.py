"""Checksums of blocks in this instance's pages. With them decode detects that a block arrived with
other contents than prefill sent, whatever carried it.

The hashing itself is behind a port and runs beside the instance's work. Owns which operation
belongs to whom.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from mooncake.base.kv_layout import PageArray
from mooncake.engine.ranks.kv_moves import Hashed
from mooncake.kvstore.block_checksum import added

ChecksumsFound = Callable[[list[int], float], None]
"""(checksum of each block, now)"""


class Hasher(Protocol):
    """Hashes blocks. Each operation ends with one `Hashed`, which the driver brings."""

    def start(self, pages: Sequence[int]) -> int:
        """Begin to hash the blocks in `pages`; return the operation's id."""


class PolledHasher(Hasher, Protocol):
    """A hasher that a driver's loop reads."""

    def fileno(self) -> int:
        """A descriptor that becomes readable when an operation ended."""

    def poll(self) -> Sequence[Hashed]:
        """Return what ended since the last call, without waiting."""

    def close(self) -> None:
        """End what runs. Afterwards nothing reads the pages."""


class HashingRank(Protocol):
    """A rank that hashes the pages in its memory."""

    @property
    def array(self) -> PageArray: ...

    def hash(self, pages: Sequence[int]) -> int:
        """Begin to hash; return the number by which the end names the operation."""


class FoundParts:
    """The parts of one block's checksum that the memories of an instance found."""

    def __init__(self) -> None:
        self._parts: dict[range, int] = {}
        """The parts by the layers that they cover."""
        self._differ = False

    def add(self, layers: range, part: int) -> None:
        """Add the part that one memory found for the layers that it holds."""
        self._differ |= self._parts.setdefault(layers, part) != part

    @property
    def checksum(self) -> int:
        """The block's checksum, once each layer was found. It is 0, which no block has, if copies
        differ.
        """
        return 0 if self._differ else added(self._parts.values())


@dataclass
class _Hashing:
    """Blocks that are being hashed."""

    found_all: ChecksumsFound
    found: dict[int, FoundParts]
    """Parts by page, in the order in which pages were given."""
    num_open: int = 0


class BlockChecksums:
    """All hashing of one instance. Each memory finds its part; a block with several copies counts
    as right only if all copies are equal.
    """

    def __init__(self, ranks: Sequence[HashingRank]) -> None:
        """`ranks`: the memories of this instance, that of this process first. If it is empty,
        `start` may not be called.
        """
        self._ranks = ranks
        self._open: dict[tuple[int, int], tuple[_Hashing, list[int]]] = {}
        """The blocks that a rank hashes, by (rank, its number)."""

    @property
    def can_hash(self) -> bool:
        """True if `start` works here."""
        return bool(self._ranks)

    def start(self, pages: Sequence[int], hashed: ChecksumsFound) -> None:
        """Hash the blocks in `pages`, which the caller holds; `hashed` is called once."""
        assert self._ranks, "nothing here can hash"
        hashing = _Hashing(hashed, {page: FoundParts() for page in pages})
        for number, rank in enumerate(self._ranks):
            held = [page for page in pages if rank.array.holds(page)]
            if held:
                hashing.num_open += 1
                self._open[number, rank.hash(held)] = hashing, held

    def on_done(self, event: Hashed, now: float, rank: int = 0) -> None:
        """Record what a rank found. Call the callback when that was the last rank."""
        hashing, held = self._open.pop((rank, event.number))
        hashing.num_open -= 1
        layers = self._ranks[rank].array.layers
        for page, part in zip(held, event.checksums, strict=True):
            hashing.found[page].add(layers, part)
        if not hashing.num_open:
            hashing.found_all([parts.checksum for parts in hashing.found.values()], now)
