"""Pulls copies of other pool nodes' blocks on request, and drops them when they are not used. It
also takes blocks over from draining nodes; these are this node's own from then on.

Pure; owned by the node. A copy is an ordinary block once it is complete: it has the checksum that
its owner promised, and is hashed again here. A pool client chooses the node that this one copies
from; so this node connects to the address of a node that a gateway names, and to no other. An order
whose source is unknown waits for the gateways' answers (`Sources`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from mooncake.base import BlockKey, PinGranted, WorkerRef
from mooncake.base.messages import Replicate
from mooncake.base.pool_messages import FindReplicas, LastingPin, ReplicasFound, TakenOver, TakeOver
from mooncake.base.rights import client_key
from mooncake.kvstore.client.block_memory import BlockMemory, MemoryTransfers
from mooncake.kvstore.client.block_reader import BlockReader, ReadResult
from mooncake.kvstore.storage.tiering import Tiering
from mooncake.transfer.engine import TransferDone

if TYPE_CHECKING:
    from mooncake.kvstore.node.blocks import NodePorts

ANSWER_S = 1.0
"""An order is refused when no gateway has named its source within this time."""


class Sources:
    """The nodes to copy from, and the orders that wait until a gateway names theirs."""

    def __init__(self, ports: NodePorts) -> None:
        self._membership, self._channel = ports.membership, ports.channel
        self._named: set[str] = set()
        """The addresses of the nodes that gateways name."""
        self._waiting: list[tuple[float, Replicate]] = []
        """When each order is refused; the oldest order comes first."""

    @property
    def waiting(self) -> list[Replicate]:
        """The orders that wait. The replicator bounds their number."""
        return [order for _, order in self._waiting]

    @property
    def next_s(self) -> float | None:
        """When `overdue` returns the next order."""
        return self._waiting[0][0] if self._waiting else None

    def knows(self, source: WorkerRef) -> bool:
        """Return whether a gateway has named a node with this address. A client may know no more of
        a node than that.
        """
        return source.address in self._named

    def ask(self, order: Replicate, now: float) -> None:
        """Ask all gateways which nodes there are; the order waits for their answers."""
        self._waiting.append((now + ANSWER_S, order))
        question = FindReplicas(asker=self._membership.worker, ticket=0, keys=[], every=True)
        for address in self._membership.welcoming:
            self._channel.send(address, question)

    def on_named(self, answer: ReplicasFound) -> list[Replicate]:
        """Take a gateway's answer; return the orders whose source it names."""
        self._named = {store.address for store in answer.stores}
        found = [order for order in self.waiting if self.knows(order.source)]
        self._waiting = [each for each in self._waiting if not self.knows(each[1].source)]
        return found

    def overdue(self, now: float) -> list[Replicate]:
        """Return the orders whose source no gateway has named in time; they wait no longer."""
        late = [order for end_s, order in self._waiting if end_s <= now]
        del self._waiting[: len(late)]
        return late

    def lose(self, worker: WorkerRef) -> None:
        """Forget a node that was lost."""
        self._named.discard(worker.address)


MAX_PULLS = 64
"""Runs pulled at a time. Further orders are dropped, and may be sent again."""
MAX_CLIENT_PULLS = 16
"""The same limit for all pool clients that share a credential."""

_Order = Replicate | TakeOver


def _client_of(order: _Order) -> str:
    """Return the key of the pool client that gave an order; empty when it was none."""
    asker = order.asker if isinstance(order, Replicate) else None
    return "" if asker is None else client_key(asker)


Copied = Callable[[list[BlockKey], list[BlockKey]], None]
"""Called with (blocks that are complete now, blocks evicted to make room for copies or dropped as
cold).
"""


@dataclass
class _Pull:
    """A run that is being copied."""

    order: _Order
    keys: list[BlockKey]
    here: list[BlockKey]
    """Blocks of the order that are already here: they are in the answer to the sender."""
    is_full: bool
    """True if there was no room for the others."""
    known: frozenset[BlockKey]
    """The same as `keys`."""
    unwanted: set[BlockKey] = field(default_factory=set)
    """Blocks that were removed from the pool meanwhile."""


class Replicator:
    """Pulls copies of blocks from other nodes, and knows which blocks of its own are copies."""

    def __init__(self, ports: NodePorts, tiering: Tiering, copied: Copied) -> None:
        self._config, self._counters = ports.config, ports.counters
        self._dram, self._tiering = tiering.dram, tiering
        self._channel, self._worker = ports.channel, ports.worker
        self._arena = BlockMemory.packed(ports.region, ports.layout)
        self._transfers = MemoryTransfers(ports.transfer)
        self._reader = BlockReader(ports.worker, ports.channel, self._transfers, verify=False)
        """Does not verify checksums, because the node hashes copies like all other blocks."""
        self._copied = copied
        self._sources = Sources(ports)
        self._pulls: dict[int, _Pull] = {}
        """Pulls by the number of their read."""
        self._copies: OrderedDict[BlockKey, float] = OrderedDict()
        """Copy -> when it was used last; longest ago first."""

    @property
    def quiet(self) -> bool:
        """True if nothing is being pulled or waits to be."""
        return not self._pulls and not self._sources.waiting

    def begin(self, order: Replicate, now: float, *, refused: bool) -> None:
        """Pull the blocks of a run that are not known here, as far as there is room, from the first
        on. `refused`: nothing is pulled, because this node drains or no gateway names the source.
        """
        run = dict.fromkeys(self._wanted(order, now))
        here = [key for key in run if self._dram.has(key)]
        wanted = [key for key in run if not self._dram.is_known(key)]
        granted: dict[BlockKey, int] = {}
        may_pull = self._may_pull(order) and order.source != self._worker and not refused
        if wanted and may_pull and _client_of(order) and not self._sources.knows(order.source):
            self._sources.ask(order, now)
            return
        if wanted and may_pull:
            # All of the run: what of it is here is not to make room for the rest.
            granted, evicted = self._dram.reserve(list(run), order.tenant)
            self._copied([], evicted)
        is_full = len(granted) < len(wanted)
        self._counters["replicas_refused"] += bool(wanted and not granted and not refused)
        self._pull(order, granted, here, now, is_full=is_full)

    def _may_pull(self, order: Replicate) -> bool:
        client = _client_of(order)
        begun = [*(pull.order for pull in self._pulls.values()), *self._sources.waiting]
        num_own = sum(_client_of(each) == client for each in begun)
        return len(begun) < MAX_PULLS and not (client and num_own >= MAX_CLIENT_PULLS)

    def on_named(self, answer: ReplicasFound, now: float, *, refused: bool) -> None:
        """Go on with the orders whose source a gateway names. `refused`: this node drains."""
        for order in self._sources.on_named(answer):
            self.begin(order, now, refused=refused)

    def take_over(self, order: TakeOver, now: float, *, refused: bool) -> None:
        """Pull the blocks of a draining node, and answer it. `refused`: this node drains too.

        Blocks that were asked for more than once may push out blocks that were not. No block pushes
        out one that has been asked for as often.
        """
        if refused:
            self._answer(order, [], is_full=True)
            return
        ssd, known = self._tiering.ssd, self._dram.is_known
        run = self._wanted(order, now)
        here = [key for key in run if self._dram.has(key) or ssd.has(key)]
        self._inherit(order, [key for key in here if self._dram.has(key)])
        wanted = [key for key in run if not (known(key) or ssd.has(key))]
        granted: dict[BlockKey, int] = {}
        is_full = False
        if wanted and len(self._pulls) < MAX_PULLS:
            granted, evicted = self._dram.reserve(wanted, order.tenant, self._may_evict(order))
            self._copied([], evicted)
            is_full = len(granted) < len(wanted)
        self._pull(order, granted, here, now, is_full=is_full)

    def _wanted(self, order: _Order, now: float) -> list[BlockKey]:
        """Leave out blocks that are being removed from the pool; their owner may not know that
        yet.
        """
        tombstones = self._tiering.tombstones
        return [key for key in order.keys if not tombstones.is_fresh(key, now)]

    def _may_evict(self, order: TakeOver) -> Callable[[BlockKey], bool]:
        if order.pin is not LastingPin.NONE:
            return lambda _key: True
        return self._tiering.is_one_off if order.reused else lambda _key: False

    def _pull(
        self,
        order: _Order,
        granted: Mapping[BlockKey, int],
        here: list[BlockKey],
        now: float,
        *,
        is_full: bool,
    ) -> None:
        """Begin to read the blocks that were granted memory. Answer at once if no block was."""
        if not granted:
            self._answer(order, here, is_full=is_full)
            return
        pull = _Pull(order, list(granted), here, is_full, frozenset(granted))
        places = self._arena.at(self._dram.offsets(pull.keys))
        deadline_s = now + self._config.replicate_timeout_s
        ended = partial(self._on_read, pull)
        number = self._reader.start(order.source, pull.keys, places, deadline_s, ended)
        self._pulls[number] = pull

    def on_pin_granted(self, message: PinGranted, now: float) -> None:
        """Read what the owner has pinned."""
        self._reader.on_granted(message, now)

    def on_transfer_done(self, event: TransferDone, now: float) -> None:
        """Take the end of a read."""
        self._transfers.on_done(event, now)

    def _on_read(self, pull: _Pull, result: ReadResult, now: float) -> None:
        """Make blocks that came readable, free the memory of the others, and answer."""
        [number] = [number for number, each in self._pulls.items() if each is pull]
        del self._pulls[number]
        came = dict(zip(pull.keys, result.checksums, strict=False))
        stored = [key for key in came if key not in pull.unwanted]
        self._dram.commit(stored)
        for key in stored:
            if came[key]:
                self._dram.learn_checksum(key, came[key])
        self._own(pull, stored, now)
        self._copied(stored, [])
        for key in pull.keys:
            if key not in came or key in pull.unwanted:
                self._dram.abandon(key)
        self._counters["replicas_failed"] += result.error is not None
        self._answer(pull.order, pull.here, is_full=pull.is_full)

    def _own(self, pull: _Pull, keys: list[BlockKey], now: float) -> None:
        """Keep blocks that became complete: as copies, or for good."""
        order = pull.order
        pull.here += keys
        if isinstance(order, Replicate):
            for key in reversed(keys):
                self._copies[key] = now
            self._counters["blocks_replicated"] += len(keys)
            return
        if not order.reused:
            self._tiering.used(keys)
        self._inherit(order, keys)
        self._counters["blocks_taken_over"] += len(keys)

    def _inherit(self, order: TakeOver, keys: Sequence[BlockKey]) -> None:
        """Make these blocks in DRAM the node's own, with the pins that they had at the draining
        node.
        """
        self.evicted(keys)
        if order.reused:
            self._tiering.adopt(keys)
        for key in keys if order.pin is not LastingPin.NONE else []:
            is_hard = self._dram.is_hard_pinned(key)
            if not is_hard and not self._dram.set_lasting_pin(key, order.pin):
                self._dram.set_lasting_pin(key, LastingPin.SOFT)

    def forget(self, key: BlockKey) -> None:
        """Drop a block that was removed from the pool, if it is being pulled."""
        for pull in self._pulls.values():
            if key in pull.known:
                pull.unwanted.add(key)

    def on_peer_lost(self, worker: WorkerRef, now: float) -> None:
        """End pulls from a node that was lost."""
        self._reader.on_peer_lost(worker, now)
        self._sources.lose(worker)

    def used(self, keys: Sequence[BlockKey], now: float) -> None:
        """Note that this run was read, because copies may be in it."""
        if not self._copies:
            return
        for key in reversed(keys):
            if key in self._copies:
                self._copies[key] = now
                self._copies.move_to_end(key)

    def evicted(self, keys: Sequence[BlockKey]) -> None:
        """Forget copies that are gone, or that are now the node's own."""
        for key in keys:
            self._copies.pop(key, None)

    def tick(self, now: float) -> float | None:
        """Give up reads that take too long and orders whose source is unknown, and drop cold
        copies. Return when to call again.
        """
        for order in self._sources.overdue(now):
            self._counters["replicas_refused"] += 1
            self.begin(order, now, refused=True)
        wakes = (self._reader.tick(now), self._sources.next_s)
        idle_s = self._config.replica_idle_s
        cold: list[BlockKey] = []
        while self._copies:
            key, used_s = next(iter(self._copies.items()))
            if used_s + idle_s > now:
                break
            del self._copies[key]
            held = self._dram.is_hard_pinned(key) or self._dram.is_kept(key)
            if not held and self._dram.discard(key):
                cold.append(key)
            else:
                self._copies[key] = now  # it is pinned or kept: it is not cold
        if cold:
            self._counters["replicas_dropped"] += len(cold)
            self._copied([], cold)
        times = [wake_s for wake_s in wakes if wake_s is not None]
        if self._copies:
            times.append(next(iter(self._copies.values())) + idle_s)
        return min(times, default=None)

    def _answer(self, order: _Order, here: list[BlockKey], *, is_full: bool) -> None:
        """Answer the sender of the order, if it asked for an answer."""
        asker = order.asker if isinstance(order, Replicate) else order.source
        if asker is not None:
            self._channel.send(asker.address, TakenOver(
                asker=asker, ticket=order.ticket, store=self._worker, keys=here, is_full=is_full
            ))  # fmt: skip

    def filling(self) -> set[BlockKey]:
        """Return what is being filled in DRAM (for checks)."""
        return {key for pull in self._pulls.values() for key in pull.keys}

    def check_integrity(self) -> None:
        """Raise AssertionError when a copy is missing, or a block is pulled twice."""
        assert all(self._dram.has(key) for key in self._copies), "a copy that is not here"
        keys = [key for pull in self._pulls.values() for key in pull.keys]
        assert len(set(keys)) == len(keys), "a block is pulled twice"
        self._reader.check_integrity()
