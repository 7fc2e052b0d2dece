"""What each boot of each worker has open at a pool node, and who and what was open before. Pure;
owned by the node.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Sequence

from mooncake.base import BlockKey, PutStart, WorkerRef
from mooncake.kvstore.config import KvStoreConfig

MAX_REMEMBERED = 4_096
"""Lost epochs and ended tickets remembered, so that a late or repeated message finds nothing."""

Peer = tuple[str, str]
"""(worker id, epoch)"""


def peer_of(worker: WorkerRef) -> Peer:
    return worker.worker_id, worker.epoch


class Grant:
    """A put between `PutStart` and its last `PutEnd`."""

    __slots__ = ("before", "pending", "run")

    def __init__(self, message: PutStart, granted: Sequence[BlockKey]) -> None:
        keys = set(message.keys)
        self.before = [key for key in message.head.keys if key not in keys]
        """What lies before the keys asked for: its use is known when the put begins."""
        self.run = [*self.before, *message.keys]
        """One use of a chain, whether stored before or now; its order is when the put ends."""
        self.pending = dict.fromkeys(granted)


class PeerState:
    """What one boot of one worker has open here, by ticket."""

    __slots__ = ("grants", "old", "pins", "ref", "since_s", "waits")

    def __init__(self, ref: WorkerRef, since_s: float) -> None:
        self.ref = ref
        self.since_s = since_s
        """Something of it has been open ever since."""
        self.grants: dict[int, Grant] = {}
        self.pins: dict[int, list[BlockKey]] = {}
        self.waits: dict[int, None] = {}
        """Pins that are answered when blocks have come up from SSD."""
        self.old: set[tuple[str, int]] = set()
        """Tickets that were open at the last look."""

    @property
    def num_open(self) -> int:
        return len(self.grants) + len(self.pins) + len(self.waits)


class Peers:
    """All peers that have something open, by boot."""

    def __init__(self, config: KvStoreConfig, counters: Counter[str]) -> None:
        self.states: dict[Peer, PeerState] = {}
        self._max_tickets = config.max_tickets_per_worker
        self._put_timeout_s = config.put_timeout_s
        self._overdue_at: deque[tuple[float, Grant]] = deque()
        self._counters = counters
        self._lost: OrderedDict[Peer, None] = OrderedDict()
        self._ended: OrderedDict[tuple[Peer, str, int], None] = OrderedDict()

    @property
    def num_open(self) -> int:
        """Puts and pins that peers have open."""
        return sum(state.num_open for state in self.states.values())

    @property
    def num_puts(self) -> int:
        """Puts that peers have open."""
        return sum(len(state.grants) for state in self.states.values())

    def get(self, peer: Peer) -> PeerState | None:
        """Return what a peer has open."""
        return self.states.get(peer)

    def state_of(self, worker: WorkerRef, now: float) -> PeerState:
        """Return what a peer has open, for opening more."""
        return self.states.setdefault(peer_of(worker), PeerState(worker, now))

    def grant(self, message: PutStart, grant: Grant, now: float) -> Grant:
        """A put is open from now on."""
        self.state_of(message.writer, now).grants[message.ticket] = grant
        self._overdue_at.append((now + self._put_timeout_s, grant))
        return grant

    def tick(self, now: float) -> float | None:
        """Count the puts that have been open for too long; return when to come again."""
        while self._overdue_at and self._overdue_at[0][0] <= now:
            self._counters["puts_overdue"] += bool(self._overdue_at.popleft()[1].pending)
        return self._overdue_at[0][0] if self._overdue_at else None

    def may_open(self, peer: Peer, kind: str, ticket: int) -> bool:
        """Whether a new ticket is fresh, from a live worker, and within its worker's bound."""
        if peer in self._lost or (peer, kind, ticket) in self._ended:
            self._counters["stray_messages"] += 1
            return False
        state = self.states.get(peer)
        return state is None or state.num_open < self._max_tickets

    def remember_ended(self, peer: Peer, kind: str, ticket: int) -> None:
        """A ticket that ended, or was answered with nothing, never opens again."""
        self._ended[peer, kind, ticket] = None
        if len(self._ended) > MAX_REMEMBERED:
            self._ended.popitem(last=False)

    def drop_if_idle(self, peer: Peer) -> None:
        """Forget a peer that has nothing open."""
        state = self.states.get(peer)
        if state is not None and not state.num_open:
            del self.states[peer]

    def lose(self, peer: Peer) -> PeerState | None:
        """Never listen to a boot again; return what it had open, which is the caller's now."""
        self._lost[peer] = None
        if len(self._lost) > MAX_REMEMBERED:
            self._lost.popitem(last=False)
        return self.states.pop(peer, None)

    def check_integrity(self) -> None:
        """Raise AssertionError when somebody is known who should not be."""
        for peer, state in self.states.items():
            assert state.num_open, f"{peer} holds nothing and is still known"
            assert peer not in self._lost, f"{peer} is lost and still holds something"
