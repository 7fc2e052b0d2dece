"""Layer-wise push: writes the blocks of one sequence to any number of destinations, slice by slice
as they become final.

    add_block ──► advance(layers) ──► … ──► close
                     │  every present destination gets the new slices at once;
    add_destination ─┘  one that comes late gets what is final already.

So one mechanism fills decode's reserved pages and the pool's blocks (Mooncake, FAST'25, section 5:
layer-wise prefill). Pages stay held from `add_block` until the push is closed *and* none of it is
in flight.

A put is one such destination: full blocks of this instance go to the pool of its own node. The
`BlockWriter` asks for room and reports when the blocks are complete. The push of the sequence fills
the granted memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from mooncake.base.blocks import BlockKey
from mooncake.base.errors import MooncakeError
from mooncake.base.kv_layout import BlockPlaces, KvPart
from mooncake.base.messages import NO_HEAD, ChainHead, WorkerRef
from mooncake.engine.block_pool import BlockPool
from mooncake.instance.mover import BlockChecksums, SliceMover
from mooncake.kvstore.client.block_writer import BlockWrite, BlockWriter
from mooncake.transfer.engine import Carried, TransferDone

Progress = Callable[["Destination", list[int], float], None]
"""Called with (destination, indexes of the blocks that have become complete there, or whose
checksums have become known, now); on failure with no indexes.
"""
Settled = Callable[[float], None]


class Destination:
    """A place to which some blocks of a sequence are pushed, and how far they are."""

    def __init__(
        self,
        parts: Sequence[KvPart],
        progress: Progress,
        checksums: BlockChecksums | None,
    ) -> None:
        self.parts = parts
        self.wanted = {index for part in parts for index in part.indexes}
        self.error: str | None = None
        self.begun_s: float | None = None
        """When the first slice was sent; None: no slice was sent."""
        self.carried = Carried()
        """What has arrived."""
        self.progress = progress
        self.moves: set[int] = set()
        self.in_flight_of: dict[int, int] = {}
        self.sent_layers: dict[int, int] = {}
        self.whole: set[int] = set()
        self.hashing = checksums
        self.checksums: dict[int, int] = {}
        """Checksums of the final blocks, by index, if they are wanted."""

    @property
    def complete(self) -> bool:
        """True if every block that the destination asked for is complete there and, if checksums
        are wanted, hashed.
        """
        num_blocks = len(self.wanted)
        is_hashed = self.hashing is None or len(self.checksums) == num_blocks
        return self.error is None and len(self.whole) == num_blocks and is_hashed


class Push:
    """All destinations of one sequence's blocks."""

    def __init__(self, mover: SliceMover, pool: BlockPool, timeout_s: float) -> None:
        self._mover = mover
        self._pool = pool
        self._timeout_s = timeout_s
        self._pages: dict[int, int] = {}
        self._ready_layers: dict[int, int] = {}
        self._destinations: list[Destination] = []
        self.puts: list[Put] = []
        """The puts that this push fills, if the pool node gives room, and that have not ended."""
        self._closed = False
        self._on_released: Callable[[float], None] | None = None

    @property
    def num_layers(self) -> int:
        """The layers of a block. Pool nodes hold all of them."""
        return self._mover.layout.num_layers

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def in_flight(self) -> bool:
        return any(destination.moves for destination in self._destinations)

    def add_block(self, index: int, page: int) -> None:
        """Push block `index` of the sequence, which lies in `page` or will lie there. A known block
        is ignored. Raises ValueError when the push is closed.
        """
        if self._closed:
            raise ValueError("a closed push takes no more blocks")
        if index not in self._pages:
            self._pool.hold([page])
            self._pages[index] = page
            self._ready_layers[index] = 0

    def advance(self, indexes: Iterable[int], num_layers: int, now: float) -> None:
        """Send what is new in these blocks, whose first `num_layers` layers are final."""
        moved = [index for index in indexes if self._ready_layers[index] < num_layers]
        for index in moved:
            self._ready_layers[index] = num_layers
        for destination in self._destinations:
            self._send(destination, moved, now)

    def add_destination(
        self,
        parts: Sequence[KvPart],
        progress: Progress,
        now: float,
        checksums: BlockChecksums | None = None,
    ) -> Destination:
        """Push blocks to `parts`. Each part gets the layers that it takes; those that are final are
        sent at once. With `checksums`, each block is hashed while it is on its way. Raises
        ValueError when the push is closed.
        """
        if self._closed:
            raise ValueError("a closed push takes no more destinations")
        destination = Destination(parts, progress, checksums)
        self._destinations.append(destination)
        self._send(destination, sorted(destination.wanted & self._pages.keys()), now)
        return destination

    def put(
        self,
        writer: BlockWriter,
        store: WorkerRef,
        blocks: dict[BlockKey, int],
        tenant: str,
        settled: Settled,
        head: ChainHead = NO_HEAD,
    ) -> None:
        """Have `writer` ask `store` for room for `blocks` (key -> index), which this push will
        fill. `head` lies before them, and is used as they are.

        `settled` is called with now when the put has ended, successfully or not.
        """
        put = Put(
            store=store, keys=list(blocks), timeout_s=self._timeout_s,
            writer=writer, push=self, indexes=blocks, settled=settled,
        )  # fmt: skip
        self.puts.append(put)
        writer.start(put, tenant, head)

    def close(self, now: float, on_released: Callable[[float], None] | None = None) -> None:
        """Cancel what is in flight and accept no more blocks. Once nothing of this push touches
        memory any more, its puts end, and `on_released` is called with now. Raises ValueError when
        it is closed already.
        """
        if self._closed:
            raise ValueError("the push is closed already")
        self._closed = True
        self._on_released = on_released
        for destination in self._destinations:
            for move_id in sorted(destination.moves):
                self._mover.cancel(move_id)
        self._release_if_idle(now)

    def _send(self, destination: Destination, indexes: list[int], now: float) -> None:
        if destination.error is not None:
            return
        runs: dict[tuple[int, int], list[int]] = {}
        for index in indexes:
            first, stop = destination.sent_layers.get(index, 0), self._ready_layers[index]
            if index in destination.wanted and first < stop:
                runs.setdefault((first, stop), []).append(index)
        for (first, stop), moved in runs.items():
            self._send_layers(destination, moved, range(first, stop), now)

    def _send_layers(
        self, destination: Destination, moved: list[int], layers: range, now: float
    ) -> None:
        """Send these layers of the blocks at `moved`."""
        if destination.begun_s is None:
            destination.begun_s = now
        blocks = {index: self._pages[index] for index in moved}
        for index in moved:
            destination.sent_layers[index] = layers.stop
            destination.in_flight_of[index] = destination.in_flight_of.get(index, 0) + 1

        def ended(done: TransferDone, at: float) -> None:
            self._on_move_done(destination, moved, done, at)

        deadline_s = now + self._timeout_s
        move_id = self._mover.write(destination.parts, blocks, layers, deadline_s, ended)
        if move_id is None:
            what = f"it takes no layers from {layers.start} to {layers.stop}"
            self._on_move_done(destination, moved, TransferDone(batch_id=0, error=what), now)
            return
        destination.moves.add(move_id)
        self._hash(destination, moved)

    def _hash(self, destination: Destination, moved: list[int]) -> None:
        """Hash the blocks whose last layer has just been sent."""
        final = [index for index in moved if destination.sent_layers[index] == self.num_layers]
        if destination.hashing is None or not final:
            return

        def hashed(checksums: list[int], at: float) -> None:
            destination.checksums.update(zip(final, checksums, strict=True))
            if not self._closed:
                destination.progress(destination, final, at)

        destination.hashing.start([self._pages[index] for index in final], hashed)

    def _on_move_done(
        self, destination: Destination, moved: list[int], done: TransferDone, now: float
    ) -> None:
        destination.moves.discard(done.batch_id)
        destination.carried.add(done)
        whole: list[int] = []
        for index in moved:
            destination.in_flight_of[index] -= 1
        if done.error is not None:
            destination.error = destination.error or done.error
        else:
            whole = [
                index
                for index in moved
                if destination.sent_layers[index] == self.num_layers
                and destination.in_flight_of[index] == 0
            ]
            if destination.error is None:
                destination.whole.update(whole)
        if not self._closed and (whole or destination.error is not None):
            destination.progress(destination, whole, now)
        self._release_if_idle(now)

    def _release_if_idle(self, now: float) -> None:
        if not self._closed or self.in_flight:
            return
        if self._pages:
            self._pool.release([self._pages[index] for index in sorted(self._pages)])
            self._pages = {}
        for put in list(self.puts):
            put.end(now)
        if self._on_released is not None:
            on_released, self._on_released = self._on_released, None
            on_released(now)


@dataclass(kw_only=True, eq=False)
class Put(BlockWrite):
    """Blocks of a sequence that go to a pool node: a destination of their push, once the node has
    given room.
    """

    writer: BlockWriter
    push: Push
    indexes: dict[BlockKey, int]
    """Key -> index of the block in its sequence."""
    settled: Settled
    destination: Destination | None = None

    def fill(self, keys: Sequence[BlockKey], places: BlockPlaces, now: float) -> None:
        if self.push.closed:
            self.end(now)
            return
        part = KvPart(places, [self.indexes[key] for key in keys], 0, self.push.num_layers)
        self.destination = self.push.add_destination([part], self._progress, now)
        self._advance(now)

    def _progress(self, _destination: Destination, _whole: list[int], now: float) -> None:
        self._advance(now)

    def _advance(self, now: float) -> None:
        destination = self.destination
        if destination is None or self not in self.push.puts:
            return
        if destination.complete or (destination.error is not None and not destination.moves):
            self.end(now)

    def stop(self, now: float) -> None:
        """End a put to a lost node, unless batches are under way, which fail by themselves."""
        if self.destination is None or not self.destination.moves:
            self.end(now)

    def end(self, now: float) -> None:
        """End the put with the blocks that are whole. Nothing writes to the node any more."""
        whole = self.destination.whole if self.destination is not None else set()
        written = [key for key in self.granted or () if self.indexes[key] in whole]
        self.writer.end(self, written, now)

    def ended(self, answer: list[BlockKey] | MooncakeError, now: float) -> None:
        del answer
        self.push.puts.remove(self)
        self.settled(now)
