"""The membership table knows which workers are alive. It answers hellos, watches heartbeats and
fences lost epochs.

Owned by the gateway. It sends messages about membership only and knows no requests.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from mooncake.base import AnyMessage, PeerLost, Role, Welcome, WorkerHello, WorkerRef
from mooncake.base.bounded_map import BoundedMap, SharedMap
from mooncake.base.messages import OWN_RELEASE, Refused, WhoAreYou
from mooncake.base.rights import client_key
from mooncake.rpc.channel import Channel

MAX_FENCED = 4096
MAX_MEMBERS = 4096
"""Number of workers and clients. When there are more, a client that has sent nothing since its
hello is removed.
"""
REPEAT_S = 1.0
"""The same message is repeated to a worker at most this often."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Member:
    """A live worker."""

    hello: WorkerHello
    joined_s: float
    last_heard_s: float
    snapshot_asked_s: float
    is_ending: bool = False
    """A worker with which it shares routed experts was lost. So it will end too, through no fault
    of a request on it.
    """


class MembershipTable:
    """Keeps the live workers by id, with one epoch each."""

    def __init__(self, gateway: WorkerRef, channel: Channel, heartbeat_timeout_s: float) -> None:
        self._gateway = gateway
        self._channel = channel
        self._timeout_s = heartbeat_timeout_s
        self._gateways: list[WorkerRef] = []
        self._members: dict[str, Member] = {}
        self._fenced: SharedMap[tuple[str, str], float] = SharedMap(MAX_FENCED)
        """(id, epoch) of workers declared lost -> when they were last told so."""
        self._refused: BoundedMap[tuple[str, str], str] = BoundedMap(MAX_FENCED)
        self._checked_s: float | None = None
        self._first_join_s: float | None = None

    @property
    def members(self) -> list[Member]:
        """The live workers, in the order they joined."""
        return list(self._members.values())

    def __len__(self) -> int:
        return len(self._members)

    def is_live(self, worker: WorkerRef) -> bool:
        """Return whether a worker is alive in exactly this epoch."""
        member = self._members.get(worker.worker_id)
        return member is not None and member.hello.worker.epoch == worker.epoch

    def hears(self, worker: WorkerRef, now: float) -> bool:
        """Return whether a worker is alive in exactly this epoch and has been heard within the
        timeout.
        """
        member = self._members.get(worker.worker_id)
        return (
            self.is_live(worker)
            and member is not None
            and (now - member.last_heard_s <= self._timeout_s)
        )

    def hears_half(self, num_cut_off: int, now: float) -> bool:
        """Return whether at least half of the workers have been heard in the last half of the
        timeout. `num_cut_off`: those that are members no more, as they were not heard, and may
        live. If fewer have, the fault may be at this end: on a machine without a network, a gateway
        hears the workers of its own machine.
        """
        heard = [
            now - member.last_heard_s <= self._timeout_s / 2
            for member in self._members.values()
            if member.hello.role is not Role.CLIENT
        ]
        return any(heard) and 2 * sum(heard) >= len(heard) + num_cut_off

    def get(self, worker_id: str) -> Member | None:
        """Return a live worker, or None."""
        return self._members.get(worker_id)

    def at(self, address: str) -> list[str]:
        """Return the live workers that are reached at an address."""
        refs = [member.hello.worker for member in self._members.values()]
        return [ref.worker_id for ref in refs if ref.address == address]

    def note_alive(self, worker: WorkerRef, now: float) -> bool:
        """Record a message of a worker. Returns False when it is not a live member: the message
        must be ignored then.
        """
        member = self._members.get(worker.worker_id)
        if member is not None and member.hello.worker.epoch == worker.epoch:
            member.last_heard_s = now
            return True
        sent_s = self._fenced.get((worker.worker_id, worker.epoch))
        if sent_s is not None and now - sent_s >= REPEAT_S:
            # It was given up while it still lived (a pause, a cut line): peers have reclaimed what
            # it held, so it must not go on as it was.
            self._set_fenced(worker, now)
            replaced = member is not None
            self._channel.send(worker.address, PeerLost(worker=worker, replaced=replaced))
        return False

    def request_hello(self, worker: WorkerRef) -> None:
        """Ask an unknown worker for its hello: it was welcomed by an earlier gateway."""
        if not self.is_fenced(worker):
            self._channel.send(worker.address, WhoAreYou(gateway=self._gateway))

    def missing(self, peers: list[WorkerRef], now: float) -> list[WorkerRef]:
        """Return those of `peers` that are not members.

        A gateway that has just started misses none until every live worker has had time to join.
        """
        if self._first_join_s is None or now - self._first_join_s < self._timeout_s:
            return []
        return [peer for peer in peers if not self.is_live(peer)]

    def declare_lost(self, worker: WorkerRef) -> None:
        """Fence an epoch that is not a member, and notify all members."""
        self.fence(worker)
        self.broadcast(PeerLost(worker=worker))

    def is_fenced(self, worker: WorkerRef) -> bool:
        """Return whether this epoch has been declared lost."""
        return (worker.worker_id, worker.epoch) in self._fenced

    def fence(self, worker: WorkerRef) -> None:
        """Ignore this epoch from now on."""
        self._set_fenced(worker, float("-inf"))

    def _set_fenced(self, worker: WorkerRef, told_s: float) -> None:
        # Clients of one credential that come and go make only their own be forgotten.
        self._fenced.put(client_key(worker), (worker.worker_id, worker.epoch), told_s)

    @property
    def is_full(self) -> bool:
        """Return whether there is no room for one more member."""
        return len(self._members) >= MAX_MEMBERS

    def oldest_silent_client(self) -> str | None:
        """Return the pool client that joined first among those that have sent nothing since."""
        for worker_id, member in self._members.items():
            if member.hello.role is Role.CLIENT and member.last_heard_s == member.joined_s:
                return worker_id
        return None

    def foreign(self, hello: WorkerHello) -> str | None:
        """Return the members with whom a worker cannot work, because they understand no common
        version of the protocol. Return None if it can work with all. Pool clients among the
        members do not count.
        """
        present = {"this gateway": OWN_RELEASE}
        present |= {
            name: member.hello.release
            for name, member in self._members.items()
            if member.hello.role is not Role.CLIENT
        }
        for name, release in present.items():
            if not hello.release.speaks_with(release):
                return (
                    f"it is of {hello.release}, {name} of {release}: update a cluster by one "
                    "release at a time"
                )
        return None

    def refuse(self, worker: WorkerRef, reason: str) -> None:
        """Tell a worker why it cannot be used, and log it once for each epoch and reason."""
        refused = Refused(asker=worker, ticket=0, message=WorkerHello.__name__, reason=reason)
        self._channel.send(worker.address, refused)
        name = (worker.worker_id, worker.epoch)
        if self._refused.get(name) != reason:
            logger.error("worker %s is not used: %s", worker.worker_id, reason)
        self._refused[name] = reason

    def join(self, hello: WorkerHello, now: float) -> None:
        """Add a worker whose id is free, and welcome it. A new pool is announced on its node."""
        worker_id = hello.worker.worker_id
        self._first_join_s = now if self._first_join_s is None else self._first_join_s
        assert worker_id not in self._members, "the old epoch must be lost first"
        self._members[worker_id] = Member(
            hello=hello, joined_s=now, last_heard_s=now, snapshot_asked_s=now
        )
        self.welcome(hello.worker, now, send_snapshot=True)
        if hello.role == Role.KVSTORE:
            self._welcome_node(hello.node_id, now)

    def welcome(
        self, worker: WorkerRef, now: float, *, send_snapshot: bool, relieved: bool = False
    ) -> None:
        """Send a member a `Welcome` that names the current pool of its node."""
        member = self._members[worker.worker_id]
        if send_snapshot:
            member.snapshot_asked_s = now
        self._channel.send(
            worker.address,
            Welcome(
                gateway=self._gateway,
                kvstore=self._pool_of(member.hello),
                send_snapshot=send_snapshot,
                gateways=self._gateways,
                relieved=relieved,
            ),
        )

    def set_gateways(self, gateways: list[WorkerRef], now: float) -> None:
        """Set the other gateways and name them to all members, now and when they join."""
        self._gateways = gateways
        for member in self.members:
            self.welcome(member.hello.worker, now, send_snapshot=False)

    def request_snapshot(self, worker: WorkerRef, now: float) -> None:
        """Ask a member whose block events were missed for a snapshot, once per `REPEAT_S`."""
        member = self._members[worker.worker_id]
        if now - member.snapshot_asked_s >= REPEAT_S:
            self.welcome(worker, now, send_snapshot=True)

    def remove(self, worker_id: str, now: float) -> Member | None:
        """Remove a lost worker, fence its epoch and notify all others. Returns None when it is not
        a member.
        """
        member = self.cut_off(worker_id, now)
        if member is not None:
            self.declare_lost(member.hello.worker)
        return member

    def cut_off(self, worker_id: str, now: float) -> Member | None:
        """Remove a worker that is not heard here but may live: once it is heard, it can join again
        in the same epoch. Returns None when it is not a member.
        """
        member = self._members.pop(worker_id, None)
        if member is None:
            return None
        if member.hello.role == Role.KVSTORE:
            self._welcome_node(member.hello.node_id, now)
        for other in self._members.values() if member.hello.expert_group else ():
            other.is_ending |= other.hello.expert_group == member.hello.expert_group
        return member

    def broadcast(self, message: AnyMessage) -> None:
        """Send a message to every live worker."""
        for member in self._members.values():
            self._channel.send(member.hello.worker.address, message)

    def silent_workers(self, now: float) -> list[str]:
        """Return the ids of workers that have sent nothing for too long.

        Time in which this process itself did not run (it was stopped, or the machine slept) does
        not count: heartbeats of that time may still be unread.
        """
        if self._checked_s is not None and now - self._checked_s < self._timeout_s / 16:
            return []  # checked a moment ago: messages come much more often than a check is needed
        if self._checked_s is not None and now - self._checked_s > self._timeout_s / 2:
            pause_s = now - self._checked_s
            logger.warning(
                "the gateway stood still for %.1f s and waits that much longer for heartbeats",
                pause_s,
            )
            for member in self._members.values():
                member.last_heard_s += pause_s
        self._checked_s = now
        return [
            worker_id
            for worker_id, member in self._members.items()
            if now - member.last_heard_s > self._timeout_s
        ]

    def next_check_s(self, now: float) -> float | None:
        """Return when to call `silent_workers` again; None while there is no worker."""
        if not self._members:
            self._checked_s = None
            return None
        return now + self._timeout_s / 8

    def check_integrity(self) -> None:
        """Raise AssertionError when a live epoch is fenced."""
        for member in self._members.values():
            assert not self.is_fenced(member.hello.worker), "a fenced worker is a member"

    def _welcome_node(self, node_id: str, now: float) -> None:
        for member in self.members:
            if member.hello.node_id == node_id and member.hello.role != Role.KVSTORE:
                self.welcome(member.hello.worker, now, send_snapshot=False)

    def _pool_of(self, hello: WorkerHello) -> WorkerRef | None:
        """Return the pool of the worker's node; a pool itself has none."""
        if hello.role == Role.KVSTORE:
            return None
        pools = [
            member.hello.worker
            for member in self._members.values()
            if member.hello.role == Role.KVSTORE and member.hello.node_id == hello.node_id
        ]
        return min(pools, key=lambda pool: pool.worker_id, default=None)
