"""The blocks of one node in all their tiers, and what concerns all tiers at once: a use, a loss, a
report to the gateways, checksums, the node's counters. Pure; owned by the node.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from mooncake.base import BlockKey, BlockPlaces, KvLayout, WorkerRef, packed_places
from mooncake.base.rights import client_key
from mooncake.kvstore.config import MAX_KEEP_S, KvStoreConfig
from mooncake.kvstore.eviction import Keys
from mooncake.kvstore.node.drain_migration import DrainMigration
from mooncake.kvstore.node.peers import Peers
from mooncake.kvstore.node.replication import Replicator
from mooncake.kvstore.storage.disk import DiskDone, Disks
from mooncake.kvstore.storage.dram import DramTier
from mooncake.kvstore.storage.promotion import Promotions
from mooncake.kvstore.storage.tiering import Tiering
from mooncake.rpc.channel import Channel
from mooncake.rpc.membership import Membership
from mooncake.transfer.engine import Pieces, Region, Transfer

MAX_OP_BYTES = 16 << 20
"""Bytes hashed by one operation: about a millisecond."""


class Hashing:
    """Computes checksums of blocks in DRAM, one operation at a time: once a block is complete, and
    again when it is suspected. Blocks are held meanwhile. The `Disks` adapter hashes the bytes
    beside the node's work. A reader that comes before a block's checksum is known gets none.
    """

    def __init__(
        self, dram: DramTier, disks: Disks | None, damaged: Callable[[BlockKey], None]
    ) -> None:
        """Call `damaged` with each block whose bytes have changed. Nothing is hashed if `disks` is
        None.
        """
        self._dram = dram
        self._disks = disks
        self._damaged = damaged
        self._queue: OrderedDict[BlockKey, None] = OrderedDict()
        """Blocks in DRAM in the order in which they came, and some that have left it since: never
        more than twice as many as DRAM holds.
        """
        self._op_blocks = max(1, MAX_OP_BYTES // dram.block_bytes)
        self._op_id: int | None = None
        self._keys: list[BlockKey] = []

    def stored(self, keys: Iterable[BlockKey]) -> None:
        """Hash blocks that have become complete, unless their checksums are known."""
        if self._disks is not None:
            self._add(key for key in keys if self._dram.block(key).checksum is None)

    def suspect(self, keys: Iterable[BlockKey]) -> None:
        """Hash blocks again that reached a reader damaged, to tell whether the wire or the memory
        is at fault.
        """
        if self._disks is not None:
            self._add(key for key in keys if self._dram.has(key))

    def _add(self, keys: Iterable[BlockKey]) -> None:
        self._queue.update(dict.fromkeys(keys))
        if len(self._queue) > 2 * self._dram.num_blocks:
            self._queue = OrderedDict.fromkeys(filter(self._dram.has, self._queue))

    def start(self) -> None:
        """Begin with the blocks that wait, unless an operation is under way."""
        if self._disks is None or self._op_id is not None:
            return
        keys: dict[BlockKey, None] = {}
        while self._queue and len(keys) < self._op_blocks:
            key, _ = self._queue.popitem(last=False)
            if self._dram.has(key):
                keys[key] = None
        if keys:
            self._keys = list(keys)
            self._dram.pin(self._keys)
            self._op_id = self._disks.checksum(self._dram.offsets(self._keys))

    def on_done(self, event: DiskDone) -> bool:
        """Record the checksums found. Return False when the operation is not one of these."""
        if event.op_id != self._op_id:
            return False
        keys, self._keys, self._op_id = self._keys, [], None
        self._dram.unpin(keys)
        for key, checksum in zip(keys, event.checksums, strict=True):
            if not self._dram.has(key):  # the block was removed meanwhile
                continue
            known = self._dram.block(key).checksum
            if known is None:
                self._dram.learn_checksum(key, checksum)
            elif known != checksum:
                self._damaged(key)
        return True

    @property
    def quiet(self) -> bool:
        """True if nothing waits or is under way."""
        return self._op_id is None and not self._queue

    def pins(self) -> Counter[BlockKey]:
        """Return the blocks pinned in DRAM meanwhile (for checks)."""
        return Counter(self._keys)

    def known(self, keys: Sequence[BlockKey]) -> list[int]:
        """Return the checksums of stored blocks, 0 where unknown; none when all are unknown."""
        checksums = [self._dram.block(key).checksum or 0 for key in keys]
        return checksums if any(checksums) else []


COUNTERS = {
    "puts": "PutStart messages handled",
    "blocks_granted": "blocks given room",
    "blocks_refused": "blocks that were not here and were not given room",
    "blocks_put": "blocks completely written by their writers",
    "bytes_put": "bytes of the blocks in blocks_put",
    "blocks_dropped": "granted blocks that their writer gave up",
    "blocks_evicted": "blocks evicted from DRAM to make room",
    "pins": "PinBlocks messages handled",
    "blocks_hit": "blocks asked for and pinned",
    "blocks_missed": "blocks asked for and not pinned, because they or earlier ones are not here",
    "grants_reclaimed": "puts open when their writer was lost",
    "pins_reclaimed": "pins held when their reader was lost",
    "blocks_quarantined": "blocks of lost writers whose memory was put into quarantine",
    "puts_overdue": "puts open for longer than put_timeout_s although their writer lives",
    "ssd_blocks_found": "blocks that an earlier boot had left on the disks",
    "ssd_blocks_torn": "slots of the disks that held no valid block at the start",
    "ssd_blocks_written": "blocks written to a disk",
    "ssd_blocks_read": "blocks read from a disk",
    "ssd_read_seconds": "seconds in which blocks were being read from the disks",
    "ssd_blocks_evicted": "blocks on a disk overwritten by others",
    "ssd_blocks_too_late": "blocks evicted from DRAM before their turn to be written to a disk",
    "ssd_blocks_corrupt": "blocks read from a disk with other contents than were written",
    "ssd_blocks_no_room": "blocks not written because the file system was full",
    "ssd_read_errors": "blocks that a disk failed to read",
    "ssd_write_errors": "blocks that a disk failed to write",
    "object_blocks_found": "blocks that listings of the bucket showed",
    "object_blocks_written": "blocks written to the bucket",
    "object_blocks_read": "blocks read from the bucket",
    "object_read_seconds": "seconds in which blocks were being read from the bucket",
    "object_blocks_evicted": "blocks in the bucket that this node no longer uses; other nodes may",
    "object_blocks_too_late": "blocks evicted from DRAM before their turn to be written to the "
    "bucket",
    "object_blocks_corrupt": "blocks read from the bucket with other contents than were written",
    "object_blocks_gone": "blocks that the bucket did not hold any more",
    "object_read_errors": "blocks that the bucket did not return in time",
    "object_write_errors": "blocks that the bucket did not take in time",
    "object_list_errors": "listings of the bucket that failed or ended early",
    "blocks_replicated": "blocks copied from other nodes",
    "replicas_refused": "orders to copy that were refused: no room, too many other orders, or a "
    "node that no gateway names",
    "replicas_failed": "copies that did not arrive",
    "replicas_dropped": "copies dropped because they were not read",
    "blocks_taken_over": "blocks copied from nodes that drained",
    "blocks_prefetched": "blocks read from a disk or the bucket before their reader came",
    "blocks_removed": "blocks removed on request",
    "blocks_reported_corrupt": "blocks that arrived at a reader with a wrong checksum",
    "blocks_damaged": "blocks whose contents in DRAM have changed since they were written",
    "messages_refused": "messages whose sender's credential does not allow them",
    "blocks_kept": "blocks that requests began to keep for a time",
    "keeps_expired": "blocks kept no longer, because their time was over",
    "keeps_displaced": "blocks kept no longer, because newer ones had to fit into the limits",
    "stray_messages": "messages about unknown or ended tickets, or from lost workers",
}
"""Counter name -> what it counts."""


@dataclass(frozen=True, slots=True)
class NodePorts:
    """The ports that the parts of one node use."""

    config: KvStoreConfig
    layout: KvLayout
    channel: Channel
    transfer: Transfer
    region: Region
    """The arena: the memory of the DRAM tier."""
    membership: Membership
    counters: Counter[str]
    """Counters by the names of `COUNTERS`."""

    @property
    def worker(self) -> WorkerRef:
        return self.membership.worker


class NodeBlocks:
    """Owns the tiers of one node, and moves blocks between them and to other nodes."""

    def __init__(self, ports: NodePorts, dram: DramTier, disks: Disks, peers: Peers) -> None:
        """Start to scan the disks."""
        config, counters = ports.config, ports.counters
        self._ports = ports
        self._membership = ports.membership
        self._peers = peers
        self.dram = dram
        self.tiering = Tiering(
            config, dram, disks, self._membership.send_blocks, self._on_loaded, counters
        )  # fmt: skip
        self.promotions = Promotions(self.tiering, config.ssd_load_timeout_s, self.evicted)
        may_hash = config.checksums and disks.can_hash
        self.hashing = Hashing(dram, disks if may_hash else None, self._on_damaged)
        self.replicator = Replicator(ports, self.tiering, self._on_copied)
        self.migration = DrainMigration(
            ports, self.tiering, lambda: peers.num_puts > 0 or not self.replicator.quiet
        )
        for tier in self.tiering.lower:
            self._membership.add_tier(tier.rules.tier, tier.places.stored_keys)
        disks.attach(ports.region)
        self._max_lent = config.client_blocks(dram.num_blocks)
        self._num_lent: Counter[str] = Counter()
        """Blocks lent to the pool clients of each credential, by its key."""

    def places(self, keys: list[BlockKey], grant: int = 0) -> BlockPlaces:
        """Return the places of blocks that DRAM knows, in the arena. The peer may write them if it
        has a grant.
        """
        segment, region_id = self._ports.transfer.segment, self._ports.region.region_id
        return packed_places(self._ports.layout, segment, region_id, self.dram.offsets(keys), grant)

    def room_of(self, peer: WorkerRef) -> int:
        """Return how many more blocks a peer may be granted or pin."""
        client = client_key(peer)
        return self._max_lent - self._num_lent[client] if client else self.dram.num_blocks

    def lend(self, peer: WorkerRef, keys: Sequence[BlockKey], *, write: bool) -> None:
        """Let a peer touch blocks that it was granted or has pinned. Workers need no loan."""
        borrower = client_key(peer)
        if borrower and keys:
            ports = self._ports
            self._num_lent[borrower] += len(keys)
            ports.transfer.lend(borrower, ports.region, self._pieces(keys), write=write)

    def take_back(self, peer: WorkerRef, keys: Sequence[BlockKey], *, write: bool) -> None:
        """End a loan that `lend` began. Call it before the blocks' memory is used again."""
        borrower = client_key(peer)
        if borrower and keys:
            ports = self._ports
            self._num_lent[borrower] -= len(keys)
            if not self._num_lent[borrower]:
                del self._num_lent[borrower]
            ports.transfer.take_back(borrower, ports.region, self._pieces(keys), write=write)

    def _pieces(self, keys: Sequence[BlockKey]) -> Pieces:
        return Pieces(self.dram.offsets(keys), self.dram.block_bytes)

    @property
    def quiet(self) -> bool:
        """True if peers have nothing open, and nothing moves between the tiers."""
        parts = (self.tiering, self.hashing, self.replicator)
        return self._peers.num_open == 0 and all(part.quiet for part in parts)

    @property
    def drained(self) -> bool:
        """True if the node was told to drain, and its end would lose no block that other nodes, or
        its own disks, could have taken.
        """
        return self.migration.over and self.quiet and self.tiering.drained

    def use(self, run: list[BlockKey], counted: Keys, user: WorkerRef, now: float) -> None:
        """Count a request that wrote or asked for this run, except for blocks `counted` before."""
        self.dram.use(run, counted)
        if not self.migration.is_home(user):  # a node that takes over blocks is not a request
            self.tiering.used(run, counted)
        self.replicator.used(run, now)

    def keep(self, run: Sequence[BlockKey], seconds: float, now: float) -> None:
        """Keep the stored blocks of a run for so long, within the limits. They are expected to be
        asked for again, so all of them go down like blocks that were used twice.
        """
        if not run:
            return
        num_new, num_displaced = self.dram.keep(run, now + min(seconds, MAX_KEEP_S))
        self._ports.counters["blocks_kept"] += num_new
        self._ports.counters["keeps_displaced"] += num_displaced
        self.tiering.adopt([key for key in run if self.dram.has(key)])

    def end_keeps(self, now: float) -> float | None:
        """Let blocks be evicted whose time is over. Return when to call again."""
        end_s = self.dram.keeps_end_s
        if end_s is None or now < end_s:
            return end_s
        self._ports.counters["keeps_expired"] += self.dram.end_keeps(now)
        return self.dram.keeps_end_s

    def stored(self, keys: list[BlockKey]) -> None:
        """Report blocks that have become complete in DRAM."""
        self._membership.send_blocks(keys, [])
        self.migration.add(keys)

    def evicted(self, keys: list[BlockKey]) -> None:
        """Count and report blocks that DRAM evicted for room, if there are any."""
        if not keys:
            return
        self._ports.counters["blocks_evicted"] += len(keys)
        self.gone(keys)

    def gone(self, keys: list[BlockKey]) -> None:
        """Forget and report blocks that are no longer in DRAM."""
        self.tiering.evicted(keys)
        self.replicator.evicted(keys)
        self._membership.send_blocks([], keys)

    def _on_loaded(self, whole: list[BlockKey], lost: list[BlockKey], now: float) -> None:
        self.promotions.on_loaded(whole, lost, now)

    def _on_copied(self, whole: list[BlockKey], gone: list[BlockKey]) -> None:
        self.gone(gone)
        self.hashing.suspect(whole)
        self.stored(whole)

    def _on_damaged(self, key: BlockKey) -> None:
        """Discard a block whose bytes changed in memory, unless a peer is reading it."""
        self._ports.counters["blocks_damaged"] += 1
        if self.dram.discard(key):
            self.gone([key])

    def _lent(self) -> Counter[str]:
        """Return what is lent to clients, counted again from the peers."""
        found: Counter[str] = Counter()
        for state in self._peers.states.values():
            if client := client_key(state.ref):
                found[client] += sum(map(len, state.pins.values()))
                found[client] += sum(len(grant.pending) for grant in state.grants.values())
        return +found

    def check_integrity(self) -> None:
        """Raise AssertionError when tiers, pins and writers do not add up."""
        for part in (self.dram, self.tiering, self.promotions, self.replicator, self.migration):
            part.check_integrity()
        pins = self.tiering.pins() + self.promotions.pins() + self.hashing.pins()
        writing = [*self.tiering.loading(), *self.replicator.filling()]
        for state in self._peers.states.values():
            for keys in state.pins.values():
                pins.update(keys)
            for grant in state.grants.values():
                writing.extend(grant.pending)
        assert dict(pins) == self.dram.pin_counts()
        assert len(set(writing)) == len(writing), "two writers of one block"
        assert len(writing) == self.dram.num_writing
        assert self._lent() == self._num_lent
        assert all(number <= self._max_lent for number in self._num_lent.values())
        assert not any(self.dram.has(key) for key in writing)
