"""The pages of this instance in the memory of each rank: moves slices between them and block places
elsewhere, hashes their blocks, and reserves them for peers that write to them.

With checksums decode detects that a block arrived with other contents than prefill sent, whatever
carried it. Owns which rank's batches belong to which move, and which operations to which hashing;
each ends once, when all ranks have ended it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from mooncake.base.errors import TransferError
from mooncake.base.kv_layout import (
    BlockPlaces,
    KvPart,
    Move,
    PageArray,
    SegmentRef,
    copies,
    part_of,
    reshard,
)
from mooncake.engine.block_pool import BlockPool
from mooncake.engine.ranks.kv_moves import Hashed
from mooncake.kvstore.block_checksum import added
from mooncake.kvstore.client.block_memory import BlockMemory
from mooncake.transfer.engine import (
    Carried,
    Ended,
    Op,
    Region,
    Transfer,
    TransferBatch,
    TransferDone,
    TransferOp,
)
from mooncake.transfer.grants import Fence, Resting

ChecksumsFound = Callable[[list[int], float], None]
"""(checksum of each block, now)"""


class Hasher(Protocol):
    """Hashes blocks. Each operation ends with one `Hashed`, which the driver brings."""

    def start(self, pages: Sequence[int]) -> int:
        """Begin to hash the blocks in `pages`; return the operation's id."""


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


class RankPages(Protocol):
    """The pages in the memory of one rank, and its transfer engine."""

    @property
    def array(self) -> PageArray:
        """The part of the instance's pages and layers that these are."""

    @property
    def segment(self) -> SegmentRef: ...

    @property
    def region_id(self) -> int: ...

    def start(self, op: Op, move: Move, deadline_s: float) -> int:
        """Begin a move. Return its number on this rank, by which its end names it."""

    def cancel(self, number: int) -> None:
        """Ask a move to stop. Its end still comes."""

    def hash(self, pages: Sequence[int]) -> int:
        """Begin to hash the blocks in pages that lie here. Return the number by which the end names
        this.
        """

    def revoke(self, grant: int) -> None:
        """Refuse what peers write by a grant into pages that lie here."""

    def fence(self, grant: int) -> Fence:
        """Return whether anything may still be written here under a revoked grant."""

    def on_fenced(self, grant: int, fence: Fence) -> None:
        """Record what the rank itself says about a revoked grant."""


class OwnPages:
    """The pages in this process's memory: a `RankPages`."""

    def __init__(
        self, array: PageArray, transfer: Transfer, region: Region, hasher: Hasher | None = None
    ) -> None:
        self.array = array
        self.hasher = hasher
        self._transfer = transfer
        self.region_id = region.region_id
        transfer.guard(region)
        self._blocks = BlockMemory.strided(region, array.layout, array.layer_stride, array.layers)

    @property
    def segment(self) -> SegmentRef:
        return self._transfer.segment

    def start(self, op: Op, move: Move, deadline_s: float) -> int:
        """Begin a move as one batch. Its `TransferDone` ends the move."""
        array, there, size = self.array, move.there, self.array.layout.slice_bytes
        before = move.first_layer - array.first_layer
        steps = [
            ((before + number) * array.layer_stride, number * there.layer_stride)
            for number in range(len(move.layers))
        ]
        ops = [
            TransferOp(self.region_id, here + mine, there.region, offset + theirs, size)
            for here, offset in zip(map(array.offset, move.pages), there.offsets, strict=True)
            for mine, theirs in steps
        ]
        return self._transfer.submit(
            TransferBatch(
                op=op, peer=there.segment, ops=ops, deadline_s=deadline_s, grant=there.grant
            )
        )

    def cancel(self, number: int) -> None:
        self._transfer.cancel(number)

    def revoke(self, grant: int) -> None:
        self._transfer.revoke(grant)

    def fence(self, grant: int) -> Fence:
        return self._transfer.fence(grant)

    def on_fenced(self, grant: int, fence: Fence) -> None:
        """Do nothing: this process asks its own transfer engine."""

    @property
    def has_whole_blocks(self) -> bool:
        """True if all layers of all the instance's pages lie here."""
        array = self.array
        is_all = array.home is None or array.num_homes == 1
        return is_all and len(array.layers) == array.layout.num_layers

    def places(self, pages: Sequence[int]) -> BlockPlaces:
        """Return where peers may read the blocks in pages that lie here."""
        return self.array.places(self.segment, self.region_id, pages)

    def hash(self, pages: Sequence[int]) -> int:
        assert self.hasher is not None, "nothing here can hash"
        return self.hasher.start(pages)

    def checksum(self, page: int) -> int:
        """Return the checksum of the block in a page, or the part of it that the layers here
        contribute. Raises TransferError when a device fails.
        """
        return self._blocks.checksum(self.array.offset(page))


@dataclass
class _Moving:
    """A move under way."""

    ended: Ended
    open: dict[tuple[int, int], Move] = field(default_factory=dict)
    """The parts that have not ended, by (rank, number on this rank)."""
    error: str | None = None
    carried: Carried = field(default_factory=Carried)
    seconds: float = 0.0
    """The time of the slowest part: ranks move theirs at the same time."""


class SliceMover:
    """Copies slices (one layer of one block each) between the ranks' pages and remote places. It is
    the `ReadPort` of the instance's reader.
    """

    def __init__(self, own: OwnPages, others: Sequence[RankPages] = ()) -> None:
        """Move the pages in this process's memory, and those in the memories of the other ranks."""
        self.layout = own.array.layout
        self._own = own
        self._ranks: list[RankPages] = [own, *others]
        self._arrays = [rank.array for rank in self._ranks]
        self._moving: dict[int, _Moving] = {}
        self._move_of: dict[tuple[int, int], int] = {}
        """(rank, number on this rank) -> move."""
        self._last_move = 0
        self._found: dict[int, FoundParts] = {}
        """Page -> the checksum parts of what other ranks have read into it."""

    @property
    def num_in_flight(self) -> int:
        return len(self._moving)

    def parts(self, pages: Sequence[int], first_index: int, grant: int) -> list[KvPart]:
        """Return where a peer may write, by `grant`, the blocks from `first_index` on, which go to
        `pages`. Each memory gets what it holds.
        """
        return [
            part_of(rank.array, rank.segment, rank.region_id, pages, first_index, grant)
            for rank in self._ranks
        ]

    def revoke(self, grant: int) -> None:
        """Refuse, in every memory, what is written under a grant from now on."""
        for rank in self._ranks:
            rank.revoke(grant)

    def on_fenced(self, rank: int, grant: int, fence: Fence) -> None:
        """Record what a rank says about a revoked grant."""
        self._ranks[rank].on_fenced(grant, fence)

    def fence(self, grant: int) -> Fence:
        """Return whether anything may still be written, in any memory, under a revoked grant."""
        return max(rank.fence(grant) for rank in self._ranks)

    def write(
        self,
        parts: Sequence[KvPart],
        blocks: Mapping[int, int],
        layers: range,
        deadline_s: float,
        ended: Ended,
    ) -> int | None:
        """Start to write `layers` of `blocks` (index -> page) to `parts`; return the move's id.
        `ended` is called once. Return None if no part takes any of these layers.
        """
        moves = reshard(self._arrays, parts, blocks, layers)
        return self._start(Op.WRITE, moves, deadline_s, ended) if moves else None

    def read(
        self, places: Sequence[int], there: BlockPlaces, deadline_s: float, ended: Ended
    ) -> int:
        """Start to read whole blocks into the pages `places`, in every memory that holds them.
        Return the move's id. `ended` is called once.
        """
        for page in places:
            self._found.pop(page, None)
        return self._start(Op.READ, copies(self._arrays, places, there), deadline_s, ended)

    def ask(
        self,
        places: Sequence[int],
        peer: SegmentRef,
        question: bytes,
        deadline_s: float,
        ended: Ended,
    ) -> None:
        """Return None: runs are read into the memories of all ranks, which takes pins."""

    def checksum(self, places: Sequence[int], index: int) -> int:
        """Return, once, the checksum of a block that was read. It is 0 if its copies in several
        memories differ; no block is promised to have 0.
        """
        page = places[index]
        found, own = self._found.pop(page, None) or FoundParts(), self._own.array
        if own.holds(page):
            found.add(own.layers, self._own.checksum(page))
        return found.checksum

    def _start(self, op: Op, moves: Sequence[Move], deadline_s: float, ended: Ended) -> int:
        self._last_move += 1
        moving = self._moving[self._last_move] = _Moving(ended)
        for move in moves:
            key = (move.rank, self._ranks[move.rank].start(op, move, deadline_s))
            moving.open[key] = move
            self._move_of[key] = self._last_move
        return self._last_move

    def cancel(self, move_id: int) -> None:
        """Ask a move to stop. Its callback is called when all of it has stopped."""
        moving = self._moving.get(move_id)
        for rank, number in sorted(moving.open) if moving is not None else ():
            self._ranks[rank].cancel(number)

    def on_done(
        self, done: TransferDone, now: float, rank: int = 0, checksums: Sequence[int] = ()
    ) -> None:
        """Record the end of one rank's part of a move, with the checksums of what another process's
        rank read. An unknown move is ignored.
        """
        key = (rank, done.batch_id)
        move_id = self._move_of.pop(key, None)
        if move_id is None:
            return
        moving = self._moving[move_id]
        move = moving.open.pop(key)
        for page, part in zip(move.pages, checksums, strict=False):
            self._found.setdefault(page, FoundParts()).add(move.layers, part)
        moving.carried.add(done)
        moving.seconds = max(moving.seconds, done.seconds)
        if done.error is not None and moving.error is None:
            moving.error = done.error
            self.cancel(move_id)
        if not moving.open:
            del self._moving[move_id]
            whole = TransferDone(
                batch_id=move_id,
                error=moving.error,
                num_bytes=moving.carried.num_bytes if moving.error is None else 0,
                seconds=moving.seconds,
                protocol=moving.carried.protocol,
                nics=tuple(sorted(moving.carried.nics)),
            )
            moving.ended(whole, now)

    def check_integrity(self) -> None:
        """Raise AssertionError when a batch belongs to no move, or a move waits for none."""
        for key, move_id in self._move_of.items():
            assert key in self._moving[move_id].open
        num_open = sum(len(moving.open) for moving in self._moving.values())
        assert num_open == len(self._move_of)
        assert all(moving.open for moving in self._moving.values())


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

    def __init__(self, ranks: Sequence[RankPages]) -> None:
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


class Reservations:
    """Pages that peers may write to, with a separate grant for each reservation, and pages that
    rest because a lost peer might still write to them.

    The pages stay held until their reservation ends. It ends at once when its writer has said that
    it no longer writes. If the writer was lost, it ends as soon as that is certain.
    """

    def __init__(
        self, transfer: Transfer, mover: SliceMover, pool: BlockPool, rest_s: float
    ) -> None:
        """`rest_s`: how long pages of a lost writer rest if it is not known whether it still
        writes.
        """
        self._transfer = transfer
        self._mover = mover
        self._open: dict[int, list[int]] = {}
        self._pool = pool
        self._resting: Resting[list[int]] = Resting(mover.fence, rest_s, self._give_back)
        self.num_rested = 0
        """How many pages of lost writers may be used again."""

    def _give_back(self, pages: list[int]) -> None:
        self._pool.release(pages)
        self.num_rested += len(pages)

    @property
    def num_resting(self) -> int:
        """Number of pages that are free and may not be used yet."""
        return self._resting.num_held

    def open(self, pages: Sequence[int]) -> int | None:
        """Return the grant under which one peer may write to `pages`, which the caller holds.
        Returns None when too many are open.
        """
        try:
            grant = self._transfer.grant()
        except TransferError:
            return None
        self._open[grant] = list(pages)
        return grant

    def end(self, grant: int) -> None:
        """End a reservation whose writer no longer writes. The caller still holds the pages."""
        del self._open[grant]
        self._mover.revoke(grant)

    def fence(self, grant: int, held: list[int], now: float) -> None:
        """End a reservation whose writer was lost, and take over the caller's hold on the pages.
        They are released once nothing can be written to them.
        """
        self.end(grant)
        self._resting.add(grant, held, now)

    def may_be_written(self, grant: int) -> set[int]:
        """Return the pages that a write under this grant may land in (for checks)."""
        pages = [self._open.get(grant, []), *self._resting.held_by(grant)]
        return {page for some in pages for page in some}

    def tick(self, now: float) -> float | None:
        """Release pages that need not rest any more. Return when to call again."""
        return self._resting.tick(now)
