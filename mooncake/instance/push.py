"""Layer-wise push: the blocks of one sequence to any number of destinations, slice by slice as
they become final.

    add_block ──► advance(layers) ──► … ──► close
                     │  every present destination gets the new slices at once;
    add_destination ─┘  one that comes late gets what is final already.

So decode's reserved pages and the pool's blocks are filled by one mechanism (Mooncake, FAST'25,
section 5: layer-wise prefill). Pages stay held from `add_block` until the push is closed *and*
nothing of it is in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from mooncake.base.kv_layout import BlockPlaces
from mooncake.instance.mover import SliceMover
from mooncake.instance.pages import PagePool
from mooncake.transfer.engine import Op, TransferDone

Progress = Callable[["Destination", list[int], float], None]
"""(destination, indexes of blocks that are whole there now, now); also called on failure, with
none.
"""


class Destination:
    """Where some blocks of a sequence go, and how far they are."""

    def __init__(self, places: BlockPlaces, offsets: dict[int, int], progress: Progress) -> None:
        self.places = places
        self.error: str | None = None
        self.offsets = offsets
        self.progress = progress
        self.batches: set[int] = set()
        self.in_flight_of: dict[int, int] = {}
        self.sent_layers: dict[int, int] = {}
        self.whole: set[int] = set()

    @property
    def complete(self) -> bool:
        """Every block this destination asked for lies there whole."""
        return self.error is None and len(self.whole) == len(self.offsets)


class Push:
    """All destinations of one sequence's blocks."""

    def __init__(self, mover: SliceMover, pool: PagePool, timeout_s: float) -> None:
        self._mover = mover
        self._pool = pool
        self._timeout_s = timeout_s
        self._pages: dict[int, int] = {}
        self._ready_layers: dict[int, int] = {}
        self._destinations: list[Destination] = []
        self._closed = False
        self._on_released: Callable[[float], None] | None = None

    @property
    def num_blocks(self) -> int:
        return len(self._pages)

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def in_flight(self) -> bool:
        return any(destination.batches for destination in self._destinations)

    def add_block(self, index: int, page: int) -> None:
        """Block `index` of the sequence lies (or will lie) in `page`; a known one is left alone."""
        if self._closed:
            raise ValueError("a closed push takes no more blocks")
        if index not in self._pages:
            self._pool.hold([page])
            self._pages[index] = page
            self._ready_layers[index] = 0

    def advance(self, indexes: Iterable[int], num_layers: int, now: float) -> None:
        """The first `num_layers` layers of these blocks are final: send what is new."""
        moved = [index for index in indexes if self._ready_layers[index] < num_layers]
        for index in moved:
            self._ready_layers[index] = num_layers
        for destination in self._destinations:
            self._send(destination, moved, now)

    def add_destination(
        self, places: BlockPlaces, indexes: list[int], progress: Progress, now: float
    ) -> Destination:
        """Send the blocks at `indexes` to `places` (same order), what is final now at once."""
        if self._closed:
            raise ValueError("a closed push takes no more destinations")
        offsets = dict(zip(indexes, places.offsets, strict=True))
        destination = Destination(places, offsets, progress)
        self._destinations.append(destination)
        self._send(destination, [index for index in indexes if index in self._pages], now)
        return destination

    def close(self, now: float, on_released: Callable[[float], None] | None = None) -> None:
        """No more will come, and what is in flight is not wanted: cancel it.

        `on_released` is called once nothing of this push touches memory any more.
        """
        if self._closed:
            raise ValueError("the push is closed already")
        self._closed = True
        self._on_released = on_released
        for destination in self._destinations:
            for batch_id in sorted(destination.batches):
                self._mover.cancel(batch_id)
        self._release_if_idle(now)

    def _send(self, destination: Destination, indexes: list[int], now: float) -> None:
        if destination.error is not None:
            return
        slices: list[tuple[int, int, int]] = []
        moved: list[int] = []
        for index in indexes:
            offset = destination.offsets.get(index)
            if offset is None:
                continue
            first, stop = destination.sent_layers.get(index, 0), self._ready_layers[index]
            if first == stop:
                continue
            page = self._pages[index]
            slices.extend((page, offset, layer) for layer in range(first, stop))
            destination.sent_layers[index] = stop
            destination.in_flight_of[index] = destination.in_flight_of.get(index, 0) + 1
            moved.append(index)
        if not slices:
            return

        def ended(done: TransferDone, at: float) -> None:
            self._on_batch_done(destination, moved, done, at)

        deadline_s = now + self._timeout_s
        batch_id = self._mover.move(Op.WRITE, destination.places, slices, deadline_s, ended)
        destination.batches.add(batch_id)

    def _on_batch_done(
        self, destination: Destination, moved: list[int], done: TransferDone, now: float
    ) -> None:
        destination.batches.discard(done.batch_id)
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
