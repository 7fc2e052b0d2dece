"""Puts and pins at one node. A writer is granted memory, writes to it, and says which blocks are
complete. A reader is told where the blocks of a run lie, which stay until the reader unpins them or
is lost. Blocks on a disk are loaded first.

Pure; owned by the node. No other worker learns of a block before its writer has said that it is
complete. A worker's grant ends by `PutEnd` or when the worker is lost, never by time: a live worker
may still write to it. A pool client's grant also ends by time. Memory that is taken back rests
until nothing can be written to it by its grant any more.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial

from mooncake.base import (
    BlockKey,
    PinBlocks,
    PinGranted,
    PutEnd,
    PutGranted,
    PutStart,
    Tier,
    TransferError,
    Unpin,
    WorkerRef,
)
from mooncake.base.rights import client_key
from mooncake.kvstore.node.blocks import NodeBlocks, NodePorts
from mooncake.kvstore.node.peers import Grant, Peers, PeerState, peer_of
from mooncake.rpc.codec import encode
from mooncake.transfer.engine import MAX_ANSWER_BYTES, Pieces
from mooncake.transfer.grants import Resting


class PutSessions:
    """Serves all puts of one node."""

    def __init__(self, ports: NodePorts, blocks: NodeBlocks, peers: Peers) -> None:
        self._ports = ports
        self._blocks = blocks
        self._peers = peers
        self._counters = ports.counters
        self._overdue_at: OrderedDict[Grant, tuple[float, WorkerRef, int]] = OrderedDict()
        """When each open grant becomes overdue, with its writer and ticket, the earliest first.
        Grants that were counted have left.
        """
        self._resting: Resting[list[int]] = Resting(
            ports.transfer.fence, ports.config.quarantine_s, blocks.dram.reuse
        )
        """Resting memory, as byte offsets."""

    def on_start(self, message: PutStart, now: float) -> None:
        """Grant memory for blocks that are not here, and answer with `PutGranted`."""
        grant = self._peers.find(message.writer).grants.get(message.ticket)
        may_open = grant is None and not self._blocks.migration.begun
        num_keys = len(message.keys) + len(message.head.keys)
        if may_open and self._peers.may_open(message.writer, "put", message.ticket, num_keys):
            grant = self._grant(message, now)
        if grant is None:
            self._peers.remember_ended(message.writer, "put", message.ticket)
        self.answer(message.writer, message.ticket, grant)

    def _grant(self, message: PutStart, now: float) -> Grant | None:
        dram, tiering = self._blocks.dram, self._blocks.tiering
        wanted = tiering.not_near(message.keys)
        head = message.head
        try:
            number = self._ports.transfer.grant()
        except TransferError:  # as where there is no room
            wanted, number = [], 0
        wanted = wanted[: max(0, self._blocks.room_of(message.writer))]
        granted, evicted = dram.reserve(wanted, message.tenant, head=head.keys)
        self._blocks.evicted(evicted)
        grant = Grant(message, list(granted), number)
        run = grant.before if granted else grant.run
        self._blocks.use(run, head.counted, message.writer, now)
        self._blocks.keep(grant.kept, head.keep_s, now)
        self._counters["puts"] += 1
        self._counters["blocks_granted"] += len(granted)
        if len(granted) < len(message.keys):
            left = [key for key in message.keys if not dram.is_known(key)]
            self._counters["blocks_refused"] += sum(not tiering.stored_in(key) for key in left)
        if not granted:
            if number:
                self._ports.transfer.revoke(number)
            return None
        self._peers.state_of(message.writer, now).grants[message.ticket] = grant
        self._blocks.lend(message.writer, list(grant.pending), write=True)
        overdue_s = now + self._ports.config.put_timeout_s
        self._overdue_at[grant] = overdue_s, message.writer, message.ticket
        return grant

    def answer(self, writer: WorkerRef, ticket: int, grant: Grant | None) -> None:
        """Tell a writer where the blocks lie that it may still write."""
        keys = list(grant.pending) if grant is not None else []
        places = self._blocks.places(keys, grant.number if grant is not None else 0)
        granted = PutGranted(
            asker=writer, ticket=ticket, store=self._ports.worker, keys=keys, places=places
        )
        self._ports.channel.send(writer.address, granted)

    def on_end(self, message: PutEnd, now: float) -> None:
        """Make the blocks that were written readable, and free those that were dropped."""
        grant = self._peers.find(message.writer).grants.get(message.ticket)
        if grant is None:
            self._counters["stray_messages"] += bool(message.written or message.dropped)
            self._peers.remember_ended(message.writer, "put", message.ticket)
            return
        dram = self._blocks.dram
        pending, named = grant.pending, dict.fromkeys(message.written)
        written = [key for key in named if key in pending]
        others = pending.keys() - named
        dropped = [key for key in dict.fromkeys(message.dropped) if key in others]
        self._blocks.take_back(message.writer, [*written, *dropped], write=True)
        for key in written:
            del grant.pending[key]
        dram.commit(written)
        checksums = message.checksums  # negative ones would fit no record of a disk
        if len(checksums) == len(message.written) and min(checksums, default=0) >= 0:
            known = dict(zip(message.written, checksums, strict=True))
            for key in written:
                dram.learn_checksum(key, known[key])
        self._blocks.hashing.stored(written)
        for key in dropped:
            del grant.pending[key]
            dram.abandon(key)
            self._counters["blocks_dropped"] += 1
        self._counters["blocks_put"] += len(written)
        self._counters["bytes_put"] += len(written) * dram.block_bytes
        self._blocks.stored(written)
        if not grant.pending:
            self._blocks.use(grant.run, frozenset(grant.before), message.writer, now)
            self._blocks.keep(grant.kept, grant.keep_s, now)
            grant.run = grant.kept = []
            self._overdue_at.pop(grant, None)
            self._ports.transfer.revoke(grant.number)
            self._close(message.writer, message.ticket)

    def _close(self, writer: WorkerRef, ticket: int) -> None:
        """Forget a grant that has ended."""
        del self._peers.find(writer).grants[ticket]
        self._peers.remember_ended(writer, "put", ticket)
        self._peers.drop_if_idle(writer)

    def reclaim(self, state: PeerState, now: float) -> None:
        """Take back the memory granted to a lost writer. It is reused once it is fenced."""
        for grant in state.grants.values():
            self._overdue_at.pop(grant, None)
            self._reclaim(state.ref, grant, now)

    def release(self, state: PeerState, now: float) -> None:
        """Take back what a writer was granted that hung up. It gets nothing by these tickets any
        more.
        """
        self.reclaim(state, now)
        for ticket in list(state.grants):
            self._close(state.ref, ticket)

    def _reclaim(self, writer: WorkerRef, grant: Grant, now: float) -> None:
        self._blocks.take_back(writer, list(grant.pending), write=True)
        self._ports.transfer.revoke(grant.number)
        offsets = [self._blocks.dram.abandon(key, rests=True) for key in grant.pending]
        self._resting.add(grant.number, offsets, now)
        self._counters["grants_reclaimed"] += 1
        self._counters["blocks_quarantined"] += len(grant.pending)
        grant.pending, grant.run = {}, []

    def may_be_written(self, grant: int) -> set[int]:
        """Return the offsets of blocks that a write by this grant may land in (for checks)."""
        dram = self._blocks.dram
        pending = [
            offset
            for state in self._peers.states.values()
            for each in state.grants.values()
            if each.number == grant
            for offset in dram.offsets(list(each.pending))
        ]
        return {*pending, *(offset for some in self._resting.held_by(grant) for offset in some)}

    def tick(self, now: float) -> float | None:
        """Count the puts that have been open for too long, take back those of pool clients, and
        reuse memory that has rested. Return when to call again.
        """
        at_s: float | None = None
        while (found := next(iter(self._overdue_at.items()), None)) is not None:
            grant, (at_s, writer, ticket) = found
            if at_s > now:
                break
            at_s = None
            del self._overdue_at[grant]
            self._counters["puts_overdue"] += 1
            if client_key(writer):
                self._reclaim(writer, grant, now)
                self._close(writer, ticket)
        look_s = self._resting.tick(now)
        return min((time_s for time_s in (at_s, look_s) if time_s is not None), default=None)

    def check_integrity(self) -> None:
        """Raise AssertionError when a put that is over is still watched."""
        assert all(grant.pending for grant in self._overdue_at), "a put that is over is watched"


class PinSessions:
    """Serves all pins of one node."""

    def __init__(self, ports: NodePorts, blocks: NodeBlocks, peers: Peers) -> None:
        self._ports = ports
        self._blocks = blocks
        self._peers = peers
        self._counters = ports.counters
        self._asked: dict[int, PinBlocks] = {}
        """The orders to pin blocks that are sent behind the answer, by the number of the question.
        """

    def on_pin(self, message: PinBlocks, now: float) -> None:
        """Pin the leading blocks of a run, once they are loaded, and answer with `PinGranted`."""
        reader, ticket = message.reader, message.ticket
        state = self._peers.find(reader)
        if ticket in state.waits:
            return
        if ticket in state.pins:
            self.answer(reader, ticket, state.pins[ticket])
            return
        num_keys = len(message.keys) + len(message.head.keys)
        if not self._peers.may_open(reader, "pin", ticket, num_keys):
            self._pin(message, 0, now)
            return
        more = self._blocks.promotions.begin(
            (peer_of(reader), ticket), message.keys, now, partial(self._on_loaded, message)
        )
        if more is None:
            self._peers.state_of(reader, now).waits[ticket] = num_keys
        else:
            self._pin(message, self._blocks.dram.leading(message.keys), now, more=more)

    def waits(self, reader: WorkerRef, ticket: int) -> bool:
        """Return whether a pin waits for blocks from a disk."""
        return ticket in self._peers.find(reader).waits

    def send(self, number: int, message: PinBlocks, now: float) -> str | None:
        """Pin the leading blocks of a run, and send them behind the answer to a question. They are
        unpinned when they are out. The reader asks by a message for blocks that the answer lacks:
        they may be on a disk, or their `PutEnd` may still be on its way. Return why the question is
        refused.
        """
        blocks = self._blocks
        reader, ticket, keys = message.reader, message.ticket, message.keys
        state = self._peers.find(reader)
        if ticket in state.pins or ticket in state.waits:
            return f"the ticket {ticket} is open"
        may_open = self._peers.may_open(reader, "pin", ticket, len(keys) + len(message.head.keys))
        most = MAX_ANSWER_BYTES // blocks.dram.block_bytes
        count = min(blocks.dram.leading(keys), most) if may_open else 0
        run = self._take(message, count, now, more=True)
        if run:
            self._asked[number] = message
        granted = self._granted(reader, ticket, run, more=len(run) < len(keys))
        pieces = Pieces(blocks.dram.offsets(run), blocks.dram.block_bytes)
        self._ports.transfer.answer(number, encode(granted), self._ports.region, pieces)
        return None

    def on_sent(self, number: int, now: float) -> None:
        """Unpin blocks that were sent behind an answer, or whose reader hung up. Their use counts
        only now, so that the bytes do not wait for that.
        """
        message = self._asked.pop(number, None)
        if message is not None:
            reader, ticket = message.reader, message.ticket
            self._use(message, self._peers.find(reader).pins.get(ticket, []), now)
            self.on_unpin(Unpin(reader=reader, ticket=ticket), now)

    def _on_loaded(self, message: PinBlocks, now: float, more: bool) -> None:
        """Answer a reader: no more of its run will be loaded for this answer."""
        del self._peers.find(message.reader).waits[message.ticket]
        self._pin(message, self._blocks.dram.leading(message.keys), now, more=more)

    def _pin(self, message: PinBlocks, num_blocks: int, now: float, *, more: bool = False) -> None:
        run = self._take(message, num_blocks, now, more=more)
        self._use(message, run, now)
        more = more and 0 < len(run) < len(message.keys)
        self.answer(message.reader, message.ticket, run, more=more)

    def _take(
        self, message: PinBlocks, num_blocks: int, now: float, *, more: bool
    ) -> list[BlockKey]:
        """Pin this many leading blocks of a run, as far as the reader may have them. Return
        those.
        """
        reader, ticket = message.reader, message.ticket
        run = message.keys[: min(num_blocks, max(0, self._blocks.room_of(reader)))]
        if run:
            self._blocks.dram.pin(run)
            self._blocks.lend(reader, run, write=False)
            self._peers.state_of(reader, now).pins[ticket] = run
        else:
            self._peers.remember_ended(reader, "pin", ticket)
            self._peers.drop_if_idle(reader)
        self._counters["pins"] += 1
        self._counters["blocks_hit"] += len(run)
        self._counters["blocks_missed"] += 0 if more else len(message.keys) - len(run)
        return run

    def _use(self, message: PinBlocks, run: list[BlockKey], now: float) -> None:
        """Count the use of blocks that a reader has pinned, and keep them as it asks."""
        if run:
            head = message.head
            self._blocks.use([*head.keys, *run], head.counted, message.reader, now)
            self._blocks.keep(head.kept(run), head.keep_s, now)

    def answer(
        self, reader: WorkerRef, ticket: int, run: list[BlockKey], *, more: bool = False
    ) -> None:
        """Tell a reader where its blocks lie, and whether it can have `more` by asking again."""
        granted = self._granted(reader, ticket, run, more=more)
        self._ports.channel.send(reader.address, granted)

    def _granted(
        self, reader: WorkerRef, ticket: int, run: list[BlockKey], *, more: bool
    ) -> PinGranted:
        return PinGranted(
            asker=reader,
            ticket=ticket,
            store=self._ports.worker,
            num_blocks=len(run),
            places=self._blocks.places(run),
            checksums=self._blocks.hashing.known(run),
            more=more,
            num_from_ssd=self._blocks.dram.num_from(Tier.SSD, run),
            num_from_object=self._blocks.dram.num_from(Tier.OBJECT, run),
        )

    def on_unpin(self, message: Unpin, now: float) -> None:
        """End a pin, or the wait for one. Blocks that the reader reports as corrupt are hashed
        again.
        """
        state = self._peers.find(message.reader)
        if message.ticket in state.pins:
            run = state.pins.pop(message.ticket)
            self._blocks.dram.end_read(run)
            self._unpin(message.reader, run)
        elif message.ticket in state.waits:
            del state.waits[message.ticket]
            self._blocks.promotions.cancel((peer_of(message.reader), message.ticket), now)
        self._peers.drop_if_idle(message.reader)
        self._peers.remember_ended(message.reader, "pin", message.ticket)
        self._counters["blocks_reported_corrupt"] += len(message.corrupt)
        self._blocks.hashing.suspect(message.corrupt)

    def _unpin(self, reader: WorkerRef, run: list[BlockKey]) -> None:
        self._blocks.take_back(reader, run, write=False)
        self._blocks.dram.unpin(run)

    def reclaim(self, state: PeerState, now: float) -> None:
        """Unpin what a lost reader had pinned or was waiting for."""
        for run in state.pins.values():
            self._unpin(state.ref, run)
            self._counters["pins_reclaimed"] += 1
        for ticket in state.waits:
            self._blocks.promotions.cancel((peer_of(state.ref), ticket), now)

    def release(self, state: PeerState, now: float) -> None:
        """End what a reader has pinned, or waits for, that hung up."""
        self._counters["pins_reclaimed"] += len(state.pins)
        for ticket in [*state.pins, *state.waits]:
            self.on_unpin(Unpin(reader=state.ref, ticket=ticket), now)

    def check_integrity(self) -> None:
        """Raise AssertionError when a reader waits for an answer that will not come."""
        for peer, state in self._peers.states.items():
            for ticket in state.waits:
                assert (peer, ticket) in self._blocks.promotions, "waits in vain"
