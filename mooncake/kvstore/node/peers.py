"""Knows what each boot of each worker has open at a pool node, which boots are lost, and which
tickets have ended. Pure; owned by the node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from mooncake.base import BlockKey, PutStart, WorkerRef
from mooncake.base.bounded_map import SharedMap
from mooncake.base.rights import client_key
from mooncake.kvstore.config import KvStoreConfig

MAX_REMEMBERED = 4_096
"""Number of lost boots and ended tickets that are remembered, so that a late or repeated message
has no effect. A client that ends many makes none of others be forgotten.
"""

Peer = tuple[str, str]
"""(worker id, epoch)"""


def peer_of(worker: WorkerRef) -> Peer:
    """Return the name of one boot of a worker."""
    return worker.worker_id, worker.epoch


class Grant:
    """A put between `PutStart` and its last `PutEnd`."""

    __slots__ = ("before", "keep_s", "kept", "number", "pending", "run")

    def __init__(self, message: PutStart, granted: Sequence[BlockKey], number: int) -> None:
        keys = set(message.keys)
        self.before = [key for key in message.head.keys if key not in keys]
        """The chain before the keys asked for: its use is known when the put begins."""
        self.run = [*self.before, *message.keys]
        """The whole chain, stored before or now: its order is given to eviction at the end."""
        self.pending = dict.fromkeys(granted)
        """Blocks that may still be written."""
        self.kept = message.head.kept(message.keys)
        """The blocks of the chain that the writer's request wants kept for `keep_s` seconds."""
        self.keep_s = message.head.keep_s
        self.number = number
        """The number by which they are written."""


class PeerState:
    """What one boot of one worker has open here, by ticket."""

    __slots__ = ("grants", "old", "pins", "ref", "since_s", "waits")

    def __init__(self, ref: WorkerRef, since_s: float) -> None:
        self.ref = ref
        self.since_s = since_s
        """The time since which this boot has always had something open."""
        self.grants: dict[int, Grant] = {}
        self.pins: dict[int, list[BlockKey]] = {}
        self.waits: dict[int, int] = {}
        """Pins that are answered once blocks have come from SSD: the number of blocks that each
        names.
        """
        self.old: set[tuple[str, int]] = set()
        """(kind, ticket) of puts and pins that were open at the last look."""

    @property
    def num_open(self) -> int:
        return len(self.grants) + len(self.pins) + len(self.waits)

    @property
    def num_named(self) -> int:
        """Number of blocks that are remembered for what is open."""
        runs = [*(grant.run for grant in self.grants.values()), *self.pins.values()]
        return sum(map(len, runs)) + sum(self.waits.values())


class Peers:
    """Keeps all boots of workers that have something open."""

    def __init__(self, config: KvStoreConfig, counters: Counter[str]) -> None:
        """`config` says how much a boot, and all pool clients of one credential, may have open."""
        self.states: dict[Peer, PeerState] = {}
        self._config = config
        self._counters = counters
        self._lost: SharedMap[Peer, None] = SharedMap(MAX_REMEMBERED)
        self._ended: SharedMap[tuple[Peer, str, int], None] = SharedMap(MAX_REMEMBERED)

    @property
    def num_open(self) -> int:
        """Number of puts and pins that peers have open."""
        return sum(state.num_open for state in self.states.values())

    @property
    def num_puts(self) -> int:
        """Number of puts that peers have open."""
        return sum(len(state.grants) for state in self.states.values())

    def find(self, worker: WorkerRef) -> PeerState:
        """Return what a peer has open. Use `state_of` to open more."""
        return self.states.get(peer_of(worker)) or PeerState(worker, 0.0)

    def state_of(self, worker: WorkerRef, now: float) -> PeerState:
        """Return what a peer has open, for opening more."""
        return self.states.setdefault(peer_of(worker), PeerState(worker, now))

    def may_open(self, worker: WorkerRef, kind: str, ticket: int, num_keys: int) -> bool:
        """Return whether a ticket that names this many blocks is new, comes from a live boot, and
        stays within the bounds of that boot and of its credential.
        """
        peer = peer_of(worker)
        if peer in self._lost or (peer, kind, ticket) in self._ended:
            self._counters["stray_messages"] += 1
            return False
        config = self._config
        if self.find(worker).num_open >= config.max_tickets_per_worker:
            return False
        client = client_key(worker)
        if not client:
            return True
        own = [state for state in self.states.values() if client_key(state.ref) == client]
        return (
            sum(state.num_open for state in own) < config.max_tickets_per_client
            and sum(state.num_named for state in own) + num_keys <= config.max_keys_per_client
        )

    def remember_ended(self, worker: WorkerRef, kind: str, ticket: int) -> None:
        """Never again open a ticket that ended, or that was granted nothing."""
        self._ended.put(client_key(worker), (peer_of(worker), kind, ticket), None)

    def drop_if_idle(self, worker: WorkerRef) -> None:
        """Forget a peer that has nothing open."""
        peer = peer_of(worker)
        if peer in self.states and not self.states[peer].num_open:
            del self.states[peer]

    def lose(self, worker: WorkerRef) -> PeerState:
        """Ignore a boot from now on. Return what it had open, for the caller to end."""
        state = self.find(worker)
        self.states.pop(peer_of(worker), None)
        self._lost.put(client_key(worker), peer_of(worker), None)
        return state

    def check_integrity(self) -> None:
        """Raise AssertionError when a lost or idle boot is still known, or an ended grant open."""
        for peer, state in self.states.items():
            assert state.num_open, f"{peer} holds nothing and is still known"
            assert peer not in self._lost, f"{peer} is lost and still holds something"
            assert all(grant.pending for grant in state.grants.values()), "an ended grant is open"
