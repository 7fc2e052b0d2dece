"""Puts at one node: a writer is granted memory, writes to it, and says which blocks are complete.

Pure; owned by the node. No other worker learns of a block before its writer has said that it is
complete. A worker's grant ends by `PutEnd` or when the worker is lost, never by time: a live worker
may still write to it. A pool client's grant also ends by time. Memory that is taken back rests
until nothing can be written to it by its grant any more.
"""

from __future__ import annotations

from collections import OrderedDict

from mooncake.base import PutEnd, PutGranted, PutStart, TransferError, WorkerRef
from mooncake.base.rights import client_key
from mooncake.kvstore.node.blocks import NodeBlocks, NodePorts
from mooncake.kvstore.node.peers import Grant, Peers, PeerState
from mooncake.transfer.resting import Resting


class PutSessions:
    """All puts of one node."""

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
        wanted = [key for key in message.keys if not tiering.can_load(key)]
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
        self._counters["puts"] += 1
        self._counters["blocks_granted"] += len(granted)
        refused = sum(not (dram.is_known(key) or tiering.ssd.has(key)) for key in message.keys)
        self._counters["blocks_refused"] += refused
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
        written = [key for key in dict.fromkeys(message.written) if key in grant.pending]
        dropped = [key for key in dict.fromkeys(message.dropped) if key in grant.pending]
        dropped = [key for key in dropped if key not in written]
        self._blocks.take_back(message.writer, [*written, *dropped], write=True)
        for key in written:
            del grant.pending[key]
        dram.commit(written)
        if len(message.checksums) == len(message.written):
            known = dict(zip(message.written, message.checksums, strict=True))
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
            grant.run = []
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
