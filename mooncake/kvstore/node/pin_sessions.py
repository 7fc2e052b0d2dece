"""Pins at one node: a reader is told where the blocks of a run lie. The blocks then stay until the
reader unpins them or is lost. Blocks on a disk are loaded first.

Pure; owned by the node.
"""

from __future__ import annotations

from functools import partial

from mooncake.base import BlockKey, PinBlocks, PinGranted, Unpin, WorkerRef
from mooncake.kvstore.node.blocks import NodeBlocks, NodePorts
from mooncake.kvstore.node.peers import Peers, PeerState, peer_of


class PinSessions:
    """All pins of one node."""

    def __init__(self, ports: NodePorts, blocks: NodeBlocks, peers: Peers) -> None:
        self._ports = ports
        self._blocks = blocks
        self._peers = peers
        self._counters = ports.counters

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

    def _on_loaded(self, message: PinBlocks, now: float, more: bool) -> None:
        """Answer a reader: no more of its run will be loaded for this answer."""
        del self._peers.find(message.reader).waits[message.ticket]
        self._pin(message, self._blocks.dram.leading(message.keys), now, more=more)

    def _pin(self, message: PinBlocks, num_blocks: int, now: float, *, more: bool = False) -> None:
        reader, ticket = message.reader, message.ticket
        run = message.keys[: min(num_blocks, max(0, self._blocks.room_of(reader)))]
        if run:
            self._blocks.use([*message.head.keys, *run], message.head.counted, reader, now)
            self._blocks.dram.pin(run)
            self._blocks.lend(reader, run, write=False)
            self._peers.state_of(reader, now).pins[ticket] = run
        else:
            self._peers.remember_ended(reader, "pin", ticket)
            self._peers.drop_if_idle(reader)
        self._counters["pins"] += 1
        self._counters["blocks_hit"] += len(run)
        self._counters["blocks_missed"] += 0 if more else len(message.keys) - len(run)
        self.answer(reader, ticket, run, more=more and 0 < len(run) < len(message.keys))

    def answer(
        self, reader: WorkerRef, ticket: int, run: list[BlockKey], *, more: bool = False
    ) -> None:
        """Tell a reader where its blocks lie, and whether it can have `more` by asking again."""
        granted = PinGranted(
            asker=reader,
            ticket=ticket,
            store=self._ports.worker,
            num_blocks=len(run),
            places=self._blocks.places(run),
            checksums=self._blocks.hashing.known(run),
            more=more,
            num_from_ssd=self._blocks.dram.num_from_ssd(run),
        )
        self._ports.channel.send(reader.address, granted)

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

    def check_integrity(self) -> None:
        """Raise AssertionError when a reader waits for an answer that will not come."""
        for peer, state in self._peers.states.items():
            for ticket in state.waits:
                assert (peer, ticket) in self._blocks.promotions, "waits in vain"
