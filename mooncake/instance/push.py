"""Layer-wise push: writes the blocks of one sequence to any number of destinations, slice by slice
as they become final.

    add_block ──► advance(layers) ──► … ──► close
                     │  every present destination gets the new slices at once;
    add_destination ─┘  one that comes late gets what is final already.

So one mechanism fills decode's reserved pages and the pool's blocks (Mooncake, FAST'25, section 5:
layer-wise prefill). Pages stay held from `add_block` until the push is closed *and* none of it is
in flight.

Write-through is one such destination: full blocks of this instance go to the pool of its own node.
The `BlockWriter` asks for room and reports when the blocks are complete. The push of the sequence
fills the granted memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

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
        self._closed = False
        self._on_released: Callable[[float], None] | None = None

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

    def close(self, now: float, on_released: Callable[[float], None] | None = None) -> None:
        """Cancel what is in flight and accept no more blocks. `on_released` is called with now once
        nothing of this push touches memory any more. Raises ValueError when it is closed already.
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
        num_layers = self._mover.layout.num_layers
        final = [index for index in moved if destination.sent_layers[index] == num_layers]
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
            num_layers = self._mover.layout.num_layers
            whole = [
                index
                for index in moved
                if destination.sent_layers[index] == num_layers
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
        if self._on_released is not None:
            on_released, self._on_released = self._on_released, None
            on_released(now)


class _Put:
    """One put, and the destination of its push once the pool node has given room."""

    def __init__(self, push: Push, indexes: dict[BlockKey, int], settled: Settled) -> None:
        self.push = push
        self.indexes = indexes
        """Key -> index of the block in its sequence."""
        self.settled = settled
        self.ticket = 0
        self.granted: Sequence[BlockKey] = ()
        self.destination: Destination | None = None


class WriteThrough:
    """All puts of one worker."""

    def __init__(self, writer: BlockWriter, num_layers: int, grant_timeout_s: float) -> None:
        """`num_layers`: the layers of a block, all of which pool nodes hold."""
        self._writer = writer
        self._num_layers = num_layers
        self._grant_timeout_s = grant_timeout_s
        self._puts: dict[int, _Put] = {}
        """Puts by ticket."""
        self.num_blocks_put = 0
        self.num_puts_failed = 0

    def put(
        self,
        store: WorkerRef,
        push: Push,
        blocks: dict[BlockKey, int],
        tenant: str,
        settled: Settled,
        head: ChainHead = NO_HEAD,
    ) -> None:
        """Ask `store` for room for `blocks` (key -> index in the sequence); `push` will fill it.
        `head` lies before them, and is used as they are.

        `settled` is called with now when the put has ended, successfully or not.
        """
        put = _Put(push, blocks, settled)
        write = BlockWrite(
            store=store, keys=list(blocks), timeout_s=self._grant_timeout_s,
            fill=partial(self._fill, put), stop=partial(self._stop, put),
            ended=partial(self._on_ended, put),
        )  # fmt: skip
        put.ticket = self._writer.start(write, tenant, head)
        self._puts[put.ticket] = put

    def is_open(self, push: Push) -> bool:
        """Return whether a put of this push has not ended yet."""
        return any(put.push is push for put in self._puts.values())

    def abandon(self, push: Push, now: float) -> None:
        """End the open puts of a push that is closed and has nothing in flight."""
        for put in [put for put in self._puts.values() if put.push is push]:
            self._end(put, now)

    def _fill(self, put: _Put, keys: Sequence[BlockKey], places: BlockPlaces, now: float) -> None:
        if put.push.closed:
            self._end(put, now)
            return
        put.granted = keys

        def progress(_destination: Destination, _whole: list[int], at: float) -> None:
            self._advance(put, at)

        indexes = [put.indexes[key] for key in keys]
        part = KvPart(places, indexes, 0, self._num_layers)
        put.destination = put.push.add_destination([part], progress, now)
        self._advance(put, now)

    def _advance(self, put: _Put, now: float) -> None:
        destination = put.destination
        if destination is None or put.ticket not in self._puts:
            return
        if destination.complete or (destination.error is not None and not destination.moves):
            self._end(put, now)

    def _stop(self, put: _Put, now: float) -> None:
        """End a put to a lost node, unless batches are under way, which fail by themselves."""
        if put.destination is None or not put.destination.moves:
            self._end(put, now)

    def _end(self, put: _Put, now: float) -> None:
        whole = put.destination.whole if put.destination is not None else set()
        written = [key for key in put.granted if put.indexes[key] in whole]
        self.num_blocks_put += len(written)
        self.num_puts_failed += len(written) < len(put.granted)
        self._writer.end(put.ticket, written, now)

    def _on_ended(self, put: _Put, _answer: list[BlockKey] | MooncakeError, now: float) -> None:
        del self._puts[put.ticket]
        put.settled(now)
