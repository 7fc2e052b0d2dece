"""Fetch: blocks of a pool node into pages of this instance. Pin at the owner, READ, unpin; again
while the owner has more of them that comes up from its disks in pieces.

A fetch ends exactly once, with the number of leading blocks that arrived (those of pieces before
anything failed: a lost cache is a miss). It ends only when nothing writes to its pages any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from mooncake.base.blocks import BlockKey
from mooncake.base.messages import (
    NO_HEAD,
    ChainHead,
    PinBlocks,
    PinGranted,
    Unpin,
    WorkerRef,
)
from mooncake.instance.mover import SliceMover
from mooncake.instance.verify import PageChecksums
from mooncake.rpc.channel import Channel
from mooncake.transfer.engine import Op, TransferDone

VERIFY_BYTES_PER_TICK = 8 << 20
"""Hashed at once: less than a millisecond."""

Fetched = Callable[[int, float], None]
"""(number of leading blocks that arrived, now)"""
Moved = Callable[[WorkerRef, TransferDone], None]
"""(the pool the blocks came from, how their batch went): for learning how fast pools are."""


class _Fetch:
    """A fetch, and the piece of it that is under way."""

    def __init__(
        self,
        number: int,
        store: WorkerRef,
        keys: list[BlockKey],
        pages: list[int],
        deadline_s: float,
        fetched: Fetched,
        head: ChainHead,
    ) -> None:
        self.number = number
        self.store = store
        self.keys = keys
        self.pages = pages
        """Of this piece and those to come, as are the keys."""
        self.deadline_s = deadline_s
        self.fetched = fetched
        self.head = head
        """What lies before this piece."""
        self.num_arrived = 0
        """In the pieces before."""
        self.batch_id: int | None = None
        self.more = False
        """The owner has blocks behind this piece."""
        self.checksums: list[int] = []
        self.num_verified = 0

    def advance(self, num_blocks: int) -> None:
        """So many blocks, a whole piece, have arrived: turn to the next."""
        self.num_arrived += num_blocks
        before = [*self.head.keys, *self.keys[:num_blocks]]
        self.head = ChainHead(before, len(before))
        self.keys, self.pages = self.keys[num_blocks:], self.pages[num_blocks:]
        self.batch_id, self.more = None, False
        self.checksums, self.num_verified = [], 0


class Fetcher:
    """All fetches of one worker."""

    def __init__(
        self,
        worker: WorkerRef,
        channel: Channel,
        mover: SliceMover,
        timeout_s: float,
        moved: Moved = lambda _store, _done: None,
        pages: PageChecksums | None = None,
    ) -> None:
        """With `pages`, what arrived is compared with the checksums that the owner gave."""
        self._moved = moved
        self._worker = worker
        self._channel = channel
        self._mover = mover
        self._timeout_s = timeout_s
        self._page_checksums = pages
        self._fetches: dict[int, _Fetch] = {}
        self._verifying: deque[int] = deque()
        self._last_ticket = 0
        self.num_blocks_fetched = 0
        self.num_fetches_failed = 0
        self.num_blocks_corrupt = 0

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
        head: ChainHead = NO_HEAD,
    ) -> int:
        """Fetch the blocks `keys`, which follow `head`, into `pages` (held by the caller); return
        the fetch's number.
        """
        number = self._last_ticket + 1
        self._ask(_Fetch(number, store, keys, pages, now + self._timeout_s, fetched, head))
        return number

    def _ask(self, fetch: _Fetch) -> None:
        self._last_ticket += 1
        self._fetches[self._last_ticket] = fetch
        self._send(
            fetch.store,
            PinBlocks(
                reader=self._worker, ticket=self._last_ticket, keys=fetch.keys, head=fetch.head
            ),
        )

    def cancel(self, number: int, now: float) -> None:
        """Stop a fetch; it still ends through its callback."""
        tickets = [t for t, fetch in self._fetches.items() if fetch.number == number]
        if not tickets:
            return
        [ticket] = tickets
        fetch = self._fetches[ticket]
        fetch.deadline_s = now
        if fetch.batch_id is None or ticket in self._verifying:
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
        fetch.more = message.more and num_blocks < len(fetch.pages)
        if num_blocks == 0:
            self._end(message.ticket, 0, now)
            return

        def ended(done: TransferDone, at: float) -> None:
            if done.error is None:
                self._moved(fetch.store, done)
            if done.error is None and message.checksums and self._page_checksums is not None:
                fetch.checksums = message.checksums[:num_blocks]
                self._verifying.append(message.ticket)
            else:
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
        """Verify some of what arrived, give up on owners that do not answer; return when to come
        again.
        """
        self._verify_some(now)
        waiting = {t: f for t, f in self._fetches.items() if f.batch_id is None}
        for ticket in [t for t, fetch in waiting.items() if fetch.deadline_s <= now]:
            del waiting[ticket]
            self._end(ticket, 0, now)
        if self._verifying:
            return now
        return min((fetch.deadline_s for fetch in waiting.values()), default=None)

    def _verify_some(self, now: float) -> None:
        """Hash a few blocks, so that nothing else here waits long."""
        budget = max(1, VERIFY_BYTES_PER_TICK // self._mover.layout.block_bytes)
        pages = self._page_checksums
        while self._verifying and budget and pages is not None:
            fetch = self._fetches[self._verifying[0]]
            index = fetch.num_verified
            if index == len(fetch.checksums):
                self._end(self._verifying[0], index, now)
                continue
            promised = fetch.checksums[index]
            if promised and pages.checksum(fetch.pages[index]) != promised:
                self.num_blocks_corrupt += 1
                self._end(self._verifying[0], index, now, [fetch.keys[index]])
                continue
            fetch.num_verified += 1
            budget -= 1

    def _end(
        self, ticket: int, num_blocks: int, now: float, corrupt: list[BlockKey] | None = None
    ) -> None:
        """A piece has ended, with so many leading blocks of it; so has the fetch, unless it was
        whole, the owner has more, and there is time.
        """
        fetch = self._fetches.pop(ticket)
        if ticket in self._verifying:
            self._verifying.remove(ticket)
        self._send(fetch.store, Unpin(reader=self._worker, ticket=ticket, corrupt=corrupt or []))
        self.num_blocks_fetched += num_blocks
        if num_blocks and fetch.more and not corrupt and now < fetch.deadline_s:
            fetch.advance(num_blocks)
            self._ask(fetch)
            return
        num_arrived = fetch.num_arrived + num_blocks
        self.num_fetches_failed += num_arrived == 0
        fetch.fetched(num_arrived, now)

    def _send(self, store: WorkerRef, message: PinBlocks | Unpin) -> None:
        self._channel.send(store.address, message)
