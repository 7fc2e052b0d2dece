"""The kvstore role: the authority on one node's pool blocks. Grants room, makes blocks readable,
pins them, evicts, and tells the gateway what it holds.

Owns who is writing and who is reading; `dram` owns the memory. No bytes pass through here: peers
read and write the registered arena themselves.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from mooncake.base import (
    BlockKey,
    Drain,
    KvLayout,
    PeerLost,
    PinBlocks,
    PinGranted,
    PutEnd,
    PutGranted,
    PutStart,
    Tier,
    Unpin,
    Welcome,
    WorkerHello,
    WorkerLoad,
    WorkerRef,
    packed_places,
)
from mooncake.base.messages import Replicate, WhoAreYou
from mooncake.base.pool_messages import DrainProgress, HomesFound, PoolState, TakenOver, TakeOver
from mooncake.kvstore.config import KvStoreConfig
from mooncake.kvstore.counters import COUNTERS
from mooncake.kvstore.disk import DiskDone, Disks, DiskScanned, NoDisks
from mooncake.kvstore.dram import DramTier
from mooncake.kvstore.evacuation import Evacuation
from mooncake.kvstore.eviction import Keys
from mooncake.kvstore.hashing import Hashing
from mooncake.kvstore.inquiries import Inquiries
from mooncake.kvstore.peers import Grant, Peers, PeerState, peer_of
from mooncake.kvstore.promotion import Promotions
from mooncake.kvstore.replicate import Replicator
from mooncake.kvstore.tiering import Tiering
from mooncake.rpc.channel import Channel
from mooncake.rpc.membership import Membership
from mooncake.transfer.engine import Region, Transfer, TransferDone


class KvNode:
    """The pool of one node, as a machine.

    Two-phase: nobody is told of a block before its writer said that it is whole. A grant ends by
    its `PutEnd` or by the loss of its writer, never by time: while a writer lives, what was granted
    to it may still be written. Memory of a lost writer rests in quarantine before it is used again.
    """

    def __init__(
        self,
        config: KvStoreConfig,
        hello: WorkerHello,
        layout: KvLayout,
        channel: Channel,
        transfer: Transfer,
        gateway_address: str,
        disks: Disks | None = None,
    ) -> None:
        """Allocate the arena and start to scan the disks. `num_blocks` and `block_bytes` of `hello`
        are filled in here. Raises ConfigError when the byte limit holds no block.
        """
        num_blocks = config.num_blocks(layout)
        self._config, self._layout = config, layout
        self._channel = channel
        self._segment, self._moved = transfer.segment, transfer.counters
        self._region = transfer.allocate(num_blocks * layout.block_bytes, "kvstore-dram")
        self._tier = DramTier(config, num_blocks, layout.block_bytes)
        self._membership = Membership(
            msgspec.structs.replace(hello, num_blocks=num_blocks, block_bytes=layout.block_bytes),
            channel,
            gateway_address,
            Tier.DRAM,
            self._tier.stored_keys,
            config.report_interval_s,
        )
        self._counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        disks = disks or NoDisks()
        self._tiering = Tiering(
            config, self._tier, disks, self._announce, self._on_loaded, self._counters
        )
        self._promotions = Promotions(
            self._tier, self._tiering, config.ssd_load_timeout_s, self._evicted
        )
        may_hash = config.checksums and disks.can_hash
        self._hashing = Hashing(self._tier, disks if may_hash else None, self._on_damaged)
        if disks.num_slots:
            self._membership.add_tier(Tier.SSD, self._tiering.ssd.stored_keys)
        disks.attach(self._region)
        tiers = (self._tier, self._tiering)
        self._replicator = Replicator(
            config, layout, tiers, (channel, transfer, self._region.region_id),
            hello.worker, self._on_copied, self._counters,
        )  # fmt: skip
        self._inquiries = Inquiries(
            hello.worker, layout, channel, (*tiers, self._promotions, self._replicator),
            self._figures, self._gone, self._counters,
        )  # fmt: skip
        self._evacuation = Evacuation(
            config, hello.worker, channel, tiers, lambda: self._membership.welcoming,
            lambda: self._peers.num_puts > 0 or not self._replicator.quiet,
        )  # fmt: skip
        self._peers = Peers(config, self._counters)
        self._doubt_s = 0.0
        self._draining = False

    @property
    def region(self) -> Region:
        """The arena (its owner may release it once the machine is driven no more)."""
        return self._region

    @property
    def counters(self) -> dict[str, float]:
        """Counts since start, by name; see `COUNTERS`."""
        return dict(self._counters)

    def stores(self, key: BlockKey) -> bool:
        """Whether a whole block of that key lies in DRAM here."""
        return self._tier.has(key)

    @property
    def joined(self) -> bool:
        """Whether some gateway knows this node: until then nobody is sent to it."""
        return self._membership.welcomed

    @property
    def num_open(self) -> int:
        """Puts and pins that peers have open."""
        return self._peers.num_open

    @property
    def quiet(self) -> bool:
        """Nothing is open, and nothing moves between the tiers."""
        parts = (self._tiering, self._hashing, self._replicator)
        return self.num_open == 0 and all(part.quiet for part in parts)

    @property
    def drained(self) -> bool:
        """Told to drain, and its end would lose nothing that others, or its disks, could have."""
        return self._evacuation.over and self.quiet and self._tiering.drained

    def state(self) -> PoolState:
        """Return how the node is doing, as `AskPool` is answered."""
        return self._inquiries.state(0)

    # ------------------------------------------------------------------ the machine

    def handle(self, event: msgspec.Struct, now: float) -> None:
        """Take one message; unknown ones are ignored."""
        if isinstance(event, PutStart):
            self._on_put_start(event, now)
        elif isinstance(event, PutEnd):
            self._on_put_end(event, now)
        elif isinstance(event, PinBlocks):
            self._on_pin(event, now)
        elif isinstance(event, Unpin):
            self._on_unpin(event, now)
        elif isinstance(event, PeerLost):
            self._on_peer_lost(event.worker, now)
        elif isinstance(event, Welcome):
            self._membership.on_welcome(event)
        elif isinstance(event, WhoAreYou):
            self._membership.on_who(event)
        elif isinstance(event, Drain | HomesFound | TakenOver):
            self._drain(event, now)
        else:
            self._move_blocks(event, now)

    def _drain(self, event: Drain | HomesFound | TakenOver, now: float) -> None:
        """Take nothing any more, hand over what only this node holds, send down what is worth a
        disk. When that is over nobody is sent here; what is read stays until then.
        """
        if isinstance(event, HomesFound):
            self._evacuation.on_homes(event, now)
        elif isinstance(event, TakenOver):
            self._evacuation.on_taken(event, now)
        else:
            self._draining = True
            self._tiering.drain()
            self._evacuation.begin(now)
        self._withdraw()

    def _withdraw(self) -> None:
        if self._evacuation.over:
            self._membership.withdraw()

    def _move_blocks(self, event: msgspec.Struct, now: float) -> None:
        """Take what disks and transfers have done, and what is wished for beyond puts and pins."""
        if isinstance(event, DiskDone):
            if not self._hashing.on_done(event):
                self._tiering.on_done(event, now)
        elif isinstance(event, DiskScanned):
            self._tiering.on_scanned(event)
        elif isinstance(event, PinGranted):
            self._replicator.on_pin_granted(event)
        elif isinstance(event, TransferDone):
            self._replicator.on_transfer_done(event, now)
        elif isinstance(event, Replicate):
            self._replicator.begin(event, now, refused=self._draining)
        elif isinstance(event, TakeOver):
            self._replicator.take_over(event, now, refused=self._draining)
        else:
            self._inquiries.handle(event, now)

    def tick(self, now: float) -> float | None:
        """End quarantines, count overdue puts, evict to the watermark, report."""
        times = [self._tier.end_quarantine(now), self._peers.tick(now)]
        times += [self._promotions.tick(now), self._replicator.tick(now)]
        self._hashing.start()
        self._tiering.start_writes(now)
        self._evicted(self._tier.evict_to_watermark())
        times.append(self._evacuation.tick(now))
        self._withdraw()
        times.append(self._doubt_old_peers(now))
        times.append(self._membership.tick(now, self._load))
        return min(time for time in times if time is not None)

    def check_integrity(self) -> None:
        """Raise AssertionError when memory, grants and pins do not add up."""
        self._tier.check_integrity()
        pins: Counter[BlockKey] = Counter()
        writing: set[BlockKey] = set()
        self._peers.check_integrity()
        for peer, state in self._peers.states.items():
            for keys in state.pins.values():
                pins.update(keys)
            for grant in state.grants.values():
                assert grant.pending, "an ended grant is still open"
                assert writing.isdisjoint(grant.pending), "two writers of one block"
                writing.update(grant.pending)
            for ticket in state.waits:
                assert (peer, ticket) in self._promotions, "waits for an answer that does not come"
        self._tiering.check_integrity()
        self._promotions.check_integrity()
        self._replicator.check_integrity()
        self._evacuation.check_integrity()
        self._inquiries.check_integrity()
        pins += self._tiering.held() + self._promotions.held() + self._hashing.held()
        assert writing.isdisjoint(self._tiering.loading())
        assert self._replicator.filling().isdisjoint(writing | self._tiering.loading())
        writing |= self._tiering.loading() | self._replicator.filling()
        assert dict(pins) == self._tier.pin_counts()
        assert len(writing) == self._tier.num_writing
        assert not any(self._tier.has(key) for key in writing)

    # ------------------------------------------------------------------ writing

    def _on_put_start(self, message: PutStart, now: float) -> None:
        peer = peer_of(message.writer)
        state = self._peers.get(peer)
        grant = state.grants.get(message.ticket) if state is not None else None
        may_open = grant is None and not self._draining
        if may_open and self._peers.may_open(peer, "put", message.ticket):
            wanted = [key for key in message.keys if not self._tiering.can_load(key)]
            head = message.head
            granted, evicted = self._tier.reserve(wanted, message.tenant, head=head.keys)
            self._evicted(evicted)
            new = Grant(message, list(granted))
            self._use(new.before if granted else new.run, head.counted, message.writer, now)
            if granted:
                grant = self._peers.grant(message, new, now)
            self._count_put(message.keys, granted)
        if grant is None:
            self._peers.remember_ended(peer, "put", message.ticket)
        keys = list(grant.pending) if grant is not None else []
        self._send_granted(message.writer, message.ticket, keys)

    def _send_granted(self, writer: WorkerRef, ticket: int, keys: list[BlockKey]) -> None:
        self._channel.send(
            writer.address,
            PutGranted(
                ticket=ticket,
                store=self._membership.worker,
                keys=keys,
                places=packed_places(
                    self._layout, self._segment, self._region.region_id, self._tier.offsets(keys)
                ),
            ),
        )

    def _on_put_end(self, message: PutEnd, now: float) -> None:
        peer = peer_of(message.writer)
        state = self._peers.get(peer)
        grant = state.grants.get(message.ticket) if state is not None else None
        if state is None or grant is None:
            self._counters["stray_messages"] += bool(message.written or message.dropped)
            self._peers.remember_ended(peer, "put", message.ticket)
            return
        written = [key for key in dict.fromkeys(message.written) if key in grant.pending]
        for key in written:
            del grant.pending[key]
        self._tier.commit(written)
        if len(message.checksums) == len(message.written):
            known = dict(zip(message.written, message.checksums, strict=True))
            for key in written:
                self._tier.learn_checksum(key, known[key])
        self._hashing.stored(written)
        for key in message.dropped:
            if key in grant.pending:
                del grant.pending[key]
                self._tier.abandon(key, None)
                self._counters["blocks_dropped"] += 1
        self._counters["blocks_put"] += len(written)
        self._counters["bytes_put"] += len(written) * self._layout.block_bytes
        self._membership.send_blocks(written, [])
        self._evacuation.add(written)
        if not grant.pending:
            self._use(grant.run, frozenset(grant.before), message.writer, now)
            grant.run = []
            del state.grants[message.ticket]
            self._peers.remember_ended(peer, "put", message.ticket)
            self._peers.drop_if_idle(peer)

    # ------------------------------------------------------------------ reading

    def _on_pin(self, message: PinBlocks, now: float) -> None:
        peer = peer_of(message.reader)
        state = self._peers.get(peer)
        if state is not None and message.ticket in state.waits:
            return
        run = state.pins.get(message.ticket, []) if state is not None else []
        if run:
            self._send_pinned(message.reader, message.ticket, run)
        elif not self._peers.may_open(peer, "pin", message.ticket):
            self._pin(message, 0, now)
        else:
            more = self._promotions.begin(
                (peer, message.ticket), message.keys, now, lambda *ended: self._up(message, *ended)
            )
            if more is None:
                self._peers.state_of(message.reader, now).waits[message.ticket] = None
            else:
                self._pin(message, self._tier.leading(message.keys), now, more=more)

    def _up(self, message: PinBlocks, now: float, more: bool) -> None:
        """A run that was waited for lies in DRAM, as far as it will for this answer."""
        del self._peers.states[peer_of(message.reader)].waits[message.ticket]
        self._pin(message, self._tier.leading(message.keys), now, more=more)

    def _pin(self, message: PinBlocks, num_blocks: int, now: float, *, more: bool = False) -> None:
        peer = peer_of(message.reader)
        run = message.keys[:num_blocks]
        if run:
            head = message.head
            self._use([*head.keys, *run], head.counted, message.reader, now)
            self._tier.hold(run)
            self._peers.state_of(message.reader, now).pins[message.ticket] = run
        else:
            self._peers.remember_ended(peer, "pin", message.ticket)
            self._peers.drop_if_idle(peer)
        self._counters["pins"] += 1
        self._counters["blocks_hit"] += len(run)
        self._counters["blocks_missed"] += 0 if more else len(message.keys) - len(run)
        more = more and 0 < len(run) < len(message.keys)
        self._send_pinned(message.reader, message.ticket, run, more=more)

    def _send_pinned(
        self, reader: WorkerRef, ticket: int, run: list[BlockKey], *, more: bool = False
    ) -> None:
        offsets = self._tier.offsets(run)
        self._channel.send(
            reader.address,
            PinGranted(
                ticket=ticket,
                store=self._membership.worker,
                num_blocks=len(run),
                places=packed_places(self._layout, self._segment, self._region.region_id, offsets),
                checksums=self._hashing.known(run),
                more=more,
            ),
        )

    def _on_unpin(self, message: Unpin, now: float) -> None:
        peer = peer_of(message.reader)
        state = self._peers.get(peer)
        if state is not None and message.ticket in state.pins:
            self._tier.unpin(state.pins.pop(message.ticket))
            self._peers.drop_if_idle(peer)
        elif state is not None and message.ticket in state.waits:
            del state.waits[message.ticket]
            self._promotions.cancel((peer, message.ticket), now)
            self._peers.drop_if_idle(peer)
        self._peers.remember_ended(peer, "pin", message.ticket)
        self._counters["blocks_reported_corrupt"] += len(message.corrupt)
        self._hashing.suspect(message.corrupt)

    # ------------------------------------------------------------------ peers

    def _on_peer_lost(self, worker: WorkerRef, now: float) -> None:
        peer = peer_of(worker)
        self._membership.on_peer_lost(worker)
        self._replicator.on_peer_lost(worker)
        self._evacuation.on_peer_lost(worker, now)
        self._withdraw()
        state = self._peers.lose(peer)
        if state is None:
            return
        reuse_at_s = now + self._config.quarantine_s
        for grant in state.grants.values():
            for key in grant.pending:
                self._tier.abandon(key, reuse_at_s)
            self._counters["grants_reclaimed"] += 1
            self._counters["blocks_quarantined"] += len(grant.pending)
            grant.pending, grant.run = {}, []
        for run in state.pins.values():
            self._tier.unpin(run)
            self._counters["pins_reclaimed"] += 1
        for ticket in state.waits:
            self._promotions.cancel((peer, ticket), now)

    def _doubt_old_peers(self, now: float) -> float:
        """Ask the gateway about peers that have held something for long; return when to again."""
        if now >= self._doubt_s:
            self._doubt_s = now + self._config.doubt_interval_s
            old_s = now - self._config.doubt_interval_s
            old = [state for state in self._peers.states.values() if state.since_s <= old_s]
            self._membership.doubt([state.ref for state in old])
            for state in old:
                self._ask_again(state)
        return self._doubt_s

    def _ask_again(self, state: PeerState) -> None:
        """Repeat to a living peer what it was given long ago: what it has ended, though the word of
        that was lost, it ends again, and what it still uses it keeps.
        """
        known, state.old = state.old, {
            *(("put", ticket) for ticket in state.grants),
            *(("pin", ticket) for ticket in state.pins),
        }  # fmt: skip
        for kind, ticket in sorted(known & state.old):
            if kind == "put":
                self._send_granted(state.ref, ticket, list(state.grants[ticket].pending))
            else:
                self._send_pinned(state.ref, ticket, state.pins[ticket])

    # ------------------------------------------------------------------ what is told

    def _evicted(self, keys: list[BlockKey]) -> None:
        self._counters["blocks_evicted"] += len(keys)
        self._gone(keys)

    def _gone(self, keys: list[BlockKey]) -> None:
        self._tiering.evicted(keys)
        self._replicator.evicted(keys)
        self._membership.send_blocks([], keys)

    def _on_copied(self, whole: list[BlockKey], gone: list[BlockKey]) -> None:
        self._gone(gone)
        self._hashing.suspect(whole)
        self._membership.send_blocks(whole, [])
        self._evacuation.add(whole)

    def _announce(self, tier: Tier, stored: list[BlockKey], removed: list[BlockKey]) -> None:
        self._membership.send_blocks(stored, removed, tier)

    def _on_loaded(self, whole: list[BlockKey], lost: list[BlockKey], now: float) -> None:
        self._promotions.on_loaded(whole, lost, now)

    def _on_damaged(self, key: BlockKey) -> None:
        """Memory does not hold any more what was written; while somebody reads it, it stays."""
        self._counters["blocks_damaged"] += 1
        if self._tier.discard(key):
            self._gone([key])

    def _use(self, run: list[BlockKey], counted: Keys, user: WorkerRef, now: float) -> None:
        self._tier.use(run, counted)
        if not self._evacuation.is_home(user):  # a node that copies is no request
            self._tiering.used(run, counted)
        self._replicator.used(run, now)

    def _count_put(self, keys: list[BlockKey], granted: dict[BlockKey, int]) -> None:
        self._counters["puts"] += 1
        ssd = self._tiering.ssd
        refused = sum(not (self._tier.is_known(key) or ssd.has(key)) for key in keys)
        self._counters["blocks_granted"] += len(granted)
        self._counters["blocks_refused"] += refused

    def _figures(self) -> tuple[WorkerLoad, bool, bool, DrainProgress | None]:
        return self._load(), self._draining, self.drained, self._evacuation.progress()

    def _load(self) -> WorkerLoad:
        return WorkerLoad(
            num_running=sum(len(state.pins) for state in self._peers.states.values()),
            num_waiting=self._peers.num_puts,
            num_free_blocks=self._tier.num_free,
            num_total_blocks=self._tier.num_blocks,
            num_cached_blocks=self._tier.num_stored,
            draining=self._draining,
            counters={**self.counters, **self._moved()},
        )
