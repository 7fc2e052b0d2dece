"""The kvstore role: the authority on one node's pool blocks. It grants room, makes blocks readable,
pins them, evicts, and tells the gateways what it holds.

Each message goes to the part that handles it, by one table. No bytes pass through here: peers read
and write the registered arena themselves, or the transfer engine sends them blocks from it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from mooncake.base import (
    BlockKey,
    Drain,
    KvLayout,
    PeerLost,
    PinBlocks,
    PinGranted,
    PutEnd,
    PutStart,
    Tier,
    Unpin,
    Welcome,
    WorkerHello,
)
from mooncake.base.messages import (
    Answer,
    NextLife,
    Refused,
    Replicate,
    Restart,
    WhoAreYou,
)
from mooncake.base.pool_messages import (
    HomesFound,
    PoolState,
    RemoveBlocks,
    ReplicasFound,
    TakenOver,
    TakeOver,
)
from mooncake.kvstore.config import KvStoreConfig
from mooncake.kvstore.node.blocks import COUNTERS, NodeBlocks, NodePorts
from mooncake.kvstore.node.inquiries import Inquiries
from mooncake.kvstore.node.long_work import LongWork
from mooncake.kvstore.node.peers import Peers, PeerState
from mooncake.kvstore.node.questions import ANSWERS, AnsweringChannel, Questions
from mooncake.kvstore.node.removal import Removals
from mooncake.kvstore.node.sessions import PinSessions, PutSessions
from mooncake.kvstore.storage.disk import DiskDone, Disks, DiskScanned, NoDisks
from mooncake.kvstore.storage.dram import DramTier
from mooncake.rpc.channel import Channel
from mooncake.rpc.membership import Membership
from mooncake.transfer.engine import Asked, AskEnded, AskerLeft, Transfer, TransferDone

RESTART_S = 30.0
"""A node that is to come back waits so long for peers that have something open: a pool client may
never end what it has.
"""


class KvNode:
    """Runs the pool of one node, as a machine driven by `handle` and `tick`."""

    def __init__(
        self,
        config: KvStoreConfig,
        hello: WorkerHello,
        layout: KvLayout,
        channel: Channel,
        transfer: Transfer,
        gateway_address: str,
        disks: Disks | None = None,
        seeds: Sequence[str] = (),
    ) -> None:
        """Allocate the arena and start to scan the disks. `num_blocks` and `block_bytes` of `hello`
        are filled in here. `seeds`: see `Membership`.

        Raises:
            ConfigError: the byte limit of DRAM is smaller than a block.
        """
        num_blocks = config.num_blocks(layout)
        hello = msgspec.structs.replace(
            hello, num_blocks=num_blocks, block_bytes=layout.block_bytes
        )
        self._config = config
        self.region = transfer.allocate(num_blocks * layout.block_bytes, "kvstore-dram")
        """The arena (its owner may release it once the machine is not driven any more)."""
        transfer.guard(self.region)
        transfer.hear_questions()
        dram = DramTier(config, num_blocks, layout.block_bytes)
        self._membership = Membership(
            hello, channel, gateway_address, Tier.DRAM, dram.stored_keys, config.report_interval_s,
            seeds,
        )  # fmt: skip
        self._counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        answering = AnsweringChannel(channel, transfer, self.region)
        ports = NodePorts(
            config, layout, answering, transfer, self.region, self._membership, self._counters
        )
        self._peers = Peers(config, self._counters)
        self.blocks = NodeBlocks(ports, dram, disks or NoDisks(), self._peers)
        self._puts = PutSessions(ports, self.blocks, self._peers)
        self._pins = PinSessions(ports, self.blocks, self._peers)
        self._long_work = LongWork(channel)
        self._removals = Removals(ports, self.blocks, self._long_work)
        self._inquiries = Inquiries(ports, self.blocks, self._peers, self._long_work)
        self._doubt_s = 0.0
        self._next_life: NextLife | None = None
        self._restart_by_s = math.inf
        self._is_late = False
        """True if it waits for nobody any more."""
        self._handlers = self._table()
        asked = {kind: self._handlers[kind] for kind in ANSWERS}
        questions = Questions(
            answering, transfer, self._pins, asked, self._counters, self._peers, self._release
        )
        self._handlers |= {
            Asked: questions.on_asked, AskEnded: questions.on_ended, AskerLeft: questions.on_left
        }  # fmt: skip

    @property
    def counters(self) -> dict[str, float]:
        """Counters since the start, by name; see `COUNTERS`."""
        return dict(self._counters)

    def stores(self, key: BlockKey) -> bool:
        """Return whether a complete block of that key lies in DRAM here."""
        return self.blocks.dram.has(key)

    def may_be_written(self, grant: int) -> set[int]:
        """Return the offsets of blocks that a write by this grant may land in (for checks)."""
        return self._puts.may_be_written(grant)

    @property
    def joined(self) -> bool:
        """True once some gateway knows this node. Gateways send no reader to it before that."""
        return self._membership.welcomed

    @property
    def num_open(self) -> int:
        """Number of puts and pins that peers have open."""
        return self._peers.num_open

    @property
    def quiet(self) -> bool:
        """True if peers have nothing open, and nothing moves between the tiers."""
        return self.blocks.quiet and self._long_work.quiet

    @property
    def draining(self) -> bool:
        """True if the node was told to drain; it accepts nothing new."""
        return self.blocks.migration.begun

    @property
    def drained(self) -> bool:
        """True if the process may be ended; see `NodeBlocks.drained`."""
        return self.blocks.drained and self._long_work.quiet

    @property
    def next_life(self) -> NextLife | None:
        """How to come back, with nothing in DRAM, once nothing is in progress here any more, or
        `RESTART_S` after it was told to, or None to go on.
        """
        may_leave = self._next_life is not None and (self._is_late or self.quiet)
        return self._next_life if may_leave else None

    def state(self) -> PoolState:
        """Return the figures of the node, as the answer to `AskPool`."""
        return self._inquiries.state(self._membership.worker, 0)

    # ------------------------------------------------------------------ the machine

    def handle(self, event: msgspec.Struct, now: float) -> None:
        """Take one message. Unknown ones are ignored, and so are answers to an earlier boot."""
        if isinstance(event, Answer) and event.asker != self._membership.worker:
            return
        handler = self._handlers.get(type(event))
        if handler is not None:
            handler(event, now)
            self._withdraw_if_drained()

    def tick(self, now: float) -> float | None:
        """Reuse memory that has rested long enough, count overdue puts, evict to the watermark,
        report.
        """
        blocks = self.blocks
        self._is_late = now >= self._restart_by_s
        times = [self._long_work.tick(now), self._puts.tick(now)]
        times += [blocks.promotions.tick(now), blocks.replicator.tick(now)]
        times.append(blocks.end_keeps(now))
        blocks.hashing.start()
        blocks.tiering.start_writes(now)
        blocks.evicted(blocks.dram.evict_to_watermark())
        times.append(blocks.migration.tick(now))
        self._withdraw_if_drained()
        times.append(self._doubt_old_peers(now))
        times.append(self._membership.tick(now, self._inquiries.load))
        return min(time for time in times if time is not None)

    def _table(self) -> dict[type, Callable[[Any, float], object]]:
        """Return the handler of each type of message."""
        blocks, membership, removals = self.blocks, self._membership, self._removals
        replicator, migration = blocks.replicator, blocks.migration
        return {
            PutStart: self._puts.on_start,
            PutEnd: self._puts.on_end,
            PinBlocks: self._pins.on_pin,
            Unpin: self._pins.on_unpin,
            **dict.fromkeys(
                (Welcome, WhoAreYou, Refused), lambda message, _: membership.handle(message)
            ),
            PeerLost: self._on_peer_lost,
            Drain: self._on_drain,
            Restart: self._on_restart,
            HomesFound: migration.on_homes,
            TakenOver: migration.on_taken,
            Replicate: lambda order, now: replicator.begin(order, now, refused=migration.begun),
            ReplicasFound: lambda a, now: replicator.on_named(a, now, refused=migration.begun),
            TakeOver: lambda order, now: replicator.take_over(order, now, refused=migration.begun),
            PinGranted: replicator.on_pin_granted,
            TransferDone: replicator.on_transfer_done,
            DiskDone: self._on_disk_done,
            DiskScanned: lambda e, now: removals.on_scanned(blocks.tiering.on_scanned(e, now)),
            RemoveBlocks: removals.on_remove,
            **self._inquiries.handlers,
        }

    def _on_drain(self, _message: Drain, now: float) -> None:
        """Accept no more blocks, hand those that only this node holds to others, and write those
        that are worth it to disks. Readers are served until that is over.
        """
        self.blocks.tiering.drain()
        self.blocks.migration.begin(now)

    def _on_restart(self, message: Restart, now: float) -> None:
        """Come back as told. No block is handed on: none is wanted under the weights to come."""
        if message.worker == self._membership.worker:
            self._next_life = NextLife(mode=message.mode)
            self._restart_by_s = min(self._restart_by_s, now + RESTART_S)

    def _withdraw_if_drained(self) -> None:
        if self.blocks.migration.over:
            self._membership.withdraw()

    def _on_disk_done(self, event: DiskDone, now: float) -> None:
        if not self.blocks.hashing.on_done(event):
            self._removals.settle(self.blocks.tiering.on_done(event, now))

    def _on_peer_lost(self, message: PeerLost, now: float) -> None:
        worker = message.worker
        self._membership.handle(message)
        self.blocks.replicator.on_peer_lost(worker, now)
        self.blocks.migration.on_peer_lost(worker, now)
        state = self._peers.lose(worker)
        self._puts.reclaim(state, now)
        self._pins.reclaim(state, now)

    def _release(self, state: PeerState, now: float) -> None:
        """End what a peer has open that hung up."""
        self._puts.release(state, now)
        self._pins.release(state, now)

    def _doubt_old_peers(self, now: float) -> float:
        """Ask the gateways about peers that have held something for long. Return when to ask
        again.
        """
        if now >= self._doubt_s:
            self._doubt_s = now + self._config.doubt_interval_s
            old_s = now - self._config.doubt_interval_s
            old = [state for state in self._peers.states.values() if state.since_s <= old_s]
            self._membership.ask_about([state.ref for state in old])
            for state in old:
                self._answer_again(state)
        return self._doubt_s

    def _answer_again(self, state: PeerState) -> None:
        """Send a living peer again what it was granted long ago. If the message that ended it was
        lost, the peer ends it again; otherwise it keeps what it still uses.
        """
        known, state.old = state.old, {
            *(("put", ticket) for ticket in state.grants),
            *(("pin", ticket) for ticket in state.pins),
        }  # fmt: skip
        for kind, ticket in sorted(known & state.old):
            if kind == "put":
                self._puts.answer(state.ref, ticket, state.grants[ticket])
            else:
                self._pins.answer(state.ref, ticket, state.pins[ticket])

    def check_integrity(self) -> None:
        """Raise AssertionError when memory, grants and pins do not add up."""
        self._peers.check_integrity()
        self._puts.check_integrity()
        self._pins.check_integrity()
        self._inquiries.check_integrity()
        self._removals.check_integrity()
        self.blocks.check_integrity()
