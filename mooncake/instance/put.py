"""Write-through: full blocks of this instance go to the pool of its own node, two-phase, beside
any other push.

The pool grants room (`PutStart` -> `PutGranted`), the push fills it, `PutEnd` makes the blocks
readable. A ticket ends with exactly one `PutEnd`, sent when nothing writes to its blocks any more,
so the pool may then trust or reuse them.
"""

from __future__ import annotations

from collections.abc import Callable

from mooncake.base.blocks import BlockKey
from mooncake.base.messages import (
    NO_HEAD,
    ChainHead,
    PutEnd,
    PutGranted,
    PutStart,
    WorkerRef,
)
from mooncake.instance.push import Destination, Push
from mooncake.rpc.channel import Channel

Settled = Callable[[float], None]


class _Ticket:
    """One put: asked for, then (once granted) being filled."""

    def __init__(
        self, store: WorkerRef, push: Push, indexes: dict[BlockKey, int], settled: Settled
    ) -> None:
        self.store = store
        self.push = push
        self.indexes = indexes
        self.settled = settled
        self.deadline_s: float | None = None
        self.granted: list[BlockKey] = []
        self.destination: Destination | None = None


class WriteThrough:
    """All puts of one worker."""

    def __init__(self, worker: WorkerRef, channel: Channel, grant_timeout_s: float) -> None:
        self._worker = worker
        self._channel = channel
        self._grant_timeout_s = grant_timeout_s
        self._tickets: dict[int, _Ticket] = {}
        self._last_ticket = 0
        self.num_blocks_put = 0
        self.num_puts_failed = 0

    @property
    def num_open(self) -> int:
        return len(self._tickets)

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

        `settled` is called when the put has ended, well or not.
        """
        self._last_ticket += 1
        ticket = self._last_ticket
        self._tickets[ticket] = _Ticket(store, push, blocks, settled)
        self._send(
            store,
            PutStart(
                writer=self._worker, ticket=ticket, keys=list(blocks), tenant=tenant, head=head
            ),
        )

    def tell(self, store: WorkerRef, head: ChainHead) -> None:
        """Tell `store` that a chain is used of which nothing is to be written; should the word be
        lost, so be it.
        """
        self._last_ticket += 1
        self._send(
            store, PutStart(writer=self._worker, ticket=self._last_ticket, keys=[], head=head)
        )

    def is_open(self, push: Push) -> bool:
        """Whether a put of this push has not ended yet."""
        return any(ticket.push is push for ticket in self._tickets.values())

    def on_granted(self, message: PutGranted, now: float) -> None:
        """The pool gave room: fill it, or give it back when nobody wants it any more."""
        ticket = self._tickets.get(message.ticket)
        if ticket is None or ticket.store != message.store or ticket.push.closed:
            self._send(
                message.store,
                PutEnd(writer=self._worker, ticket=message.ticket, dropped=message.keys),
            )
            return
        if ticket.destination is not None:
            return
        ticket.granted = message.keys
        indexes = [ticket.indexes[key] for key in message.keys]

        def progress(_destination: Destination, _whole: list[int], at: float) -> None:
            self._advance(message.ticket, at)

        ticket.destination = ticket.push.add_destination(message.places, indexes, progress, now)
        self._advance(message.ticket, now)

    def on_peer_lost(self, worker: WorkerRef, now: float) -> None:
        """The pool is gone: its puts are over."""
        for number in [n for n, ticket in self._tickets.items() if ticket.store == worker]:
            ticket = self._tickets[number]
            if ticket.destination is None or not ticket.destination.batches:
                self._end(number, now)

    def tick(self, now: float) -> float | None:
        """Give up on grants that do not come; return the next deadline."""
        next_s: float | None = None
        for number, ticket in list(self._tickets.items()):
            if ticket.destination is not None:
                continue
            if ticket.deadline_s is None:
                ticket.deadline_s = now + self._grant_timeout_s
            if ticket.deadline_s <= now:
                self._end(number, now)
            elif next_s is None or ticket.deadline_s < next_s:
                next_s = ticket.deadline_s
        return next_s

    def abandon(self, push: Push, now: float) -> None:
        """End what is open of a push that is closed and in flight no more."""
        for number in [n for n, ticket in self._tickets.items() if ticket.push is push]:
            self._end(number, now)

    def _advance(self, number: int, now: float) -> None:
        ticket = self._tickets.get(number)
        if ticket is None or ticket.destination is None:
            return
        failed = ticket.destination.error is not None and not ticket.destination.batches
        if ticket.destination.complete or failed:
            self._end(number, now)

    def _end(self, number: int, now: float) -> None:
        ticket = self._tickets.pop(number)
        whole = ticket.destination.whole if ticket.destination is not None else set()
        written = [key for key in ticket.granted if ticket.indexes[key] in whole]
        dropped = [key for key in ticket.granted if ticket.indexes[key] not in whole]
        self.num_blocks_put += len(written)
        self.num_puts_failed += bool(dropped)
        if ticket.destination is not None:
            self._send(
                ticket.store,
                PutEnd(writer=self._worker, ticket=number, written=written, dropped=dropped),
            )
        ticket.settled(now)

    def _send(self, store: WorkerRef, message: PutStart | PutEnd) -> None:
        self._channel.send(store.address, message)
