"""Fetch: blocks of a pool node into pages of this instance. Pin at the owner, READ, unpin.

A fetch ends exactly once, with the number of leading blocks that arrived (0 when anything failed:
a lost cache is a miss). It ends only when nothing writes to its pages any more.
"""

from __future__ import annotations

from collections.abc import Callable

from mooncake.base.blocks import BlockKey
from mooncake.base.messages import PinBlocks, PinGranted, Unpin, WorkerRef
from mooncake.instance.mover import SliceMover
from mooncake.rpc.channel import Channel
from mooncake.transfer.engine import Op, TransferDone

Fetched = Callable[[int, float], None]
"""(number of leading blocks that arrived, now)"""
Moved = Callable[[WorkerRef, TransferDone], None]
"""(the pool the blocks came from, how their batch went): for learning how fast pools are."""


class _Fetch:
    def __init__(
        self, store: WorkerRef, pages: list[int], deadline_s: float, fetched: Fetched
    ) -> None:
        self.store = store
        self.pages = pages
        self.deadline_s = deadline_s
        self.fetched = fetched
        self.batch_id: int | None = None


class Fetcher:
    """All fetches of one worker."""

    def __init__(
        self,
        worker: WorkerRef,
        channel: Channel,
        mover: SliceMover,
        timeout_s: float,
        moved: Moved = lambda _store, _done: None,
    ) -> None:
        self._moved = moved
        self._worker = worker
        self._channel = channel
        self._mover = mover
        self._timeout_s = timeout_s
        self._fetches: dict[int, _Fetch] = {}
        self._last_ticket = 0
        self.num_blocks_fetched = 0
        self.num_fetches_failed = 0

    @property
    def num_open(self) -> int:
        return len(self._fetches)

    def start(
        self,
        store: WorkerRef,
        keys: list[BlockKey],
        pages: list[int],
        now: float,
        fetched: Fetched,
    ) -> int:
        """Fetch the blocks `keys` into `pages` (held by the caller); return the fetch's ticket."""
        self._last_ticket += 1
        ticket = self._last_ticket
        self._fetches[ticket] = _Fetch(store, pages, now + self._timeout_s, fetched)
        self._send(store, PinBlocks(reader=self._worker, ticket=ticket, keys=keys))
        return ticket

    def cancel(self, ticket: int, now: float) -> None:
        """Stop a fetch; it still ends through its callback."""
        fetch = self._fetches.get(ticket)
        if fetch is None:
            return
        if fetch.batch_id is None:
            self._end(ticket, 0, now)
        else:
            self._mover.cancel(fetch.batch_id)

    def on_pin_granted(self, message: PinGranted, now: float) -> None:
        """The owner holds the blocks for us: read them."""
        fetch = self._fetches.get(message.ticket)
        if fetch is None or fetch.store != message.store:
            self._send(message.store, Unpin(reader=self._worker, ticket=message.ticket))
            return
        if fetch.batch_id is not None:
            return
        num_blocks = min(message.num_blocks, len(fetch.pages))
        if num_blocks == 0:
            self._end(message.ticket, 0, now)
            return

        def ended(done: TransferDone, at: float) -> None:
            if done.error is None:
                self._moved(fetch.store, done)
            self._end(message.ticket, num_blocks if done.error is None else 0, at)

        slices = (
            (page, offset, layer)
            for page, offset in zip(fetch.pages, message.places.offsets[:num_blocks], strict=False)
            for layer in range(self._mover.layout.num_layers)
        )
        fetch.batch_id = self._mover.move(Op.READ, message.places, slices, fetch.deadline_s, ended)

    def on_peer_lost(self, worker: WorkerRef, now: float) -> None:
        """The owner is gone: what was not being read yet is a miss; a running read fails by
        itself.
        """
        for ticket in [t for t, fetch in self._fetches.items() if fetch.store == worker]:
            if self._fetches[ticket].batch_id is None:
                self._end(ticket, 0, now)

    def tick(self, now: float) -> float | None:
        """Give up on owners that do not answer; return the next deadline."""
        waiting = {t: f for t, f in self._fetches.items() if f.batch_id is None}
        for ticket in [t for t, fetch in waiting.items() if fetch.deadline_s <= now]:
            del waiting[ticket]
            self._end(ticket, 0, now)
        return min((fetch.deadline_s for fetch in waiting.values()), default=None)

    def _end(self, ticket: int, num_blocks: int, now: float) -> None:
        fetch = self._fetches.pop(ticket)
        self._send(fetch.store, Unpin(reader=self._worker, ticket=ticket))
        self.num_blocks_fetched += num_blocks
        self.num_fetches_failed += num_blocks == 0
        fetch.fetched(num_blocks, now)

    def _send(self, store: WorkerRef, message: PinBlocks | Unpin) -> None:
        self._channel.send(store.address, message)
