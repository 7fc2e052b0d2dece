"""Who is in the cluster: hellos answered, heartbeats watched, lost epochs fenced off.

Owned by the gateway. It speaks to workers about membership only; requests are not its business.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass

from mooncake.base import AnyMessage, PeerLost, Role, Welcome, WorkerHello, WorkerRef
from mooncake.base.messages import WhoAreYou
from mooncake.rpc.channel import Channel

MAX_FENCED = 4096
TELL_EVERY_S = 1.0
"""How often at most a worker is told the same thing again."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Member:
    """A live worker."""

    hello: WorkerHello
    joined_s: float
    last_heard_s: float
    snapshot_asked_s: float
    draining: bool = False


class Roster:
    """The live workers by id, one epoch each."""

    def __init__(self, gateway: WorkerRef, channel: Channel, heartbeat_timeout_s: float) -> None:
        self._gateway = gateway
        self._channel = channel
        self._timeout_s = heartbeat_timeout_s
        self._gateways: list[WorkerRef] = []
        self._members: dict[str, Member] = {}
        self._fenced: OrderedDict[tuple[str, str], float] = OrderedDict()
        """(id, epoch) of workers declared lost -> when they were last told."""
        self._refused: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._checked_s: float | None = None
        self._first_join_s: float | None = None

    @property
    def members(self) -> list[Member]:
        """The live workers, in the order they joined."""
        return list(self._members.values())

    def __len__(self) -> int:
        return len(self._members)

    def live(self, worker: WorkerRef) -> bool:
        """Whether this very epoch is alive."""
        member = self._members.get(worker.worker_id)
        return member is not None and member.hello.worker.epoch == worker.epoch

    def get(self, worker_id: str) -> Member | None:
        """Return a live worker."""
        return self._members.get(worker_id)

    def hear(self, worker: WorkerRef, now: float) -> bool:
        """Note a sign of life; False when it is not from a live member (and must be ignored)."""
        member = self._members.get(worker.worker_id)
        if member is not None and member.hello.worker.epoch == worker.epoch:
            member.last_heard_s = now
            return True
        told_s = self._fenced.get((worker.worker_id, worker.epoch))
        if told_s is not None and now - told_s >= TELL_EVERY_S:
            # It was given up while it still lived (a pause, a cut line): peers have reclaimed what
            # it held, so it must not go on as it was.
            self._fenced[worker.worker_id, worker.epoch] = now
            self._channel.send(worker.address, PeerLost(worker=worker))
        return False

    def ask_hello(self, worker: WorkerRef) -> None:
        """A stranger's heartbeat: it was welcomed by a gateway before this one."""
        if not self.fenced(worker):
            self._channel.send(worker.address, WhoAreYou(gateway=self._gateway))

    def settle_doubts(self, peers: list[WorkerRef], now: float) -> None:
        """Say of those that are not members that they are lost, and mean it.

        A gateway that is new itself says nothing until all that live have had time to come.
        """
        if self._first_join_s is None or now - self._first_join_s < self._timeout_s:
            return
        for peer in peers:
            if not self.live(peer):
                self.fence(peer)
                self.broadcast(PeerLost(worker=peer))

    def fenced(self, worker: WorkerRef) -> bool:
        """Whether this epoch has been declared lost."""
        return (worker.worker_id, worker.epoch) in self._fenced

    def fence(self, worker: WorkerRef) -> None:
        """Never listen to this epoch again."""
        self._fenced[worker.worker_id, worker.epoch] = float("-inf")
        while len(self._fenced) > MAX_FENCED:
            self._fenced.popitem(last=False)

    def refuse(self, worker: WorkerRef, reason: str) -> None:
        """Say once for each epoch and reason that a worker cannot be used."""
        name = (worker.worker_id, worker.epoch)
        if self._refused.get(name) != reason:
            logger.error("worker %s is not used: %s", worker.worker_id, reason)
        self._refused[name] = reason
        while len(self._refused) > MAX_FENCED:
            self._refused.popitem(last=False)

    def join(self, hello: WorkerHello, now: float) -> None:
        """Take in a worker (the id is free) and welcome it; a new pool is made known on its
        node.
        """
        worker_id = hello.worker.worker_id
        self._first_join_s = now if self._first_join_s is None else self._first_join_s
        assert worker_id not in self._members, "the old epoch must be lost first"
        self._members[worker_id] = Member(
            hello=hello, joined_s=now, last_heard_s=now, snapshot_asked_s=now
        )
        self.welcome(hello.worker, now, send_snapshot=True)
        if hello.role == Role.KVSTORE:
            self._welcome_node(hello.node_id, now)

    def welcome(self, worker: WorkerRef, now: float, *, send_snapshot: bool) -> None:
        """Greet a member, with the pool of its node as it is now."""
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
            ),
        )

    def introduce(self, gateways: list[WorkerRef], now: float) -> None:
        """Name the other gateways to all members, and to those that join from now on."""
        self._gateways = gateways
        for member in self.members:
            self.welcome(member.hello.worker, now, send_snapshot=False)

    def ask_snapshot(self, worker: WorkerRef, now: float) -> None:
        """Block events of a member were missed; ask again at most every second."""
        member = self._members[worker.worker_id]
        if now - member.snapshot_asked_s >= TELL_EVERY_S:
            self.welcome(worker, now, send_snapshot=True)

    def lose(self, worker_id: str, now: float) -> WorkerHello | None:
        """Take a worker out, fence its epoch and tell all others; None when it is not a member."""
        member = self._members.pop(worker_id, None)
        if member is None:
            return None
        hello = member.hello
        self.fence(hello.worker)
        self.broadcast(PeerLost(worker=hello.worker))
        if hello.role == Role.KVSTORE:
            self._welcome_node(hello.node_id, now)
        return hello

    def broadcast(self, message: AnyMessage) -> None:
        """Send to every live worker."""
        for member in self._members.values():
            self._channel.send(member.hello.worker.address, message)

    def silent(self, now: float) -> list[str]:
        """Return the workers not heard from for too long.

        Time this process itself did not run (it was stopped, or the machine slept) is nobody's
        silence: heartbeats of that time may still lie unread.
        """
        if self._checked_s is not None and now - self._checked_s < self._timeout_s / 16:
            return []  # looked a moment ago: messages come far more often than silence grows
        if self._checked_s is not None and now - self._checked_s > self._timeout_s / 2:
            pause_s = now - self._checked_s
            logger.warning("the gateway stood still for %.1f s; heartbeats get as long", pause_s)
            for member in self._members.values():
                member.last_heard_s += pause_s
        self._checked_s = now
        return [
            worker_id
            for worker_id, member in self._members.items()
            if now - member.last_heard_s > self._timeout_s
        ]

    def next_check_s(self, now: float) -> float | None:
        """Return when `silent` is to be asked again; None while there is no worker."""
        if not self._members:
            self._checked_s = None
            return None
        return now + self._timeout_s / 8

    def check_integrity(self) -> None:
        """Raise AssertionError when a live epoch is fenced."""
        for member in self._members.values():
            assert not self.fenced(member.hello.worker), "a fenced worker is a member"

    def _welcome_node(self, node_id: str, now: float) -> None:
        for member in self.members:
            if member.hello.node_id == node_id and member.hello.role != Role.KVSTORE:
                self.welcome(member.hello.worker, now, send_snapshot=False)

    def _pool_of(self, hello: WorkerHello) -> WorkerRef | None:
        """Return the pool of the worker's node (a pool itself has none)."""
        if hello.role == Role.KVSTORE:
            return None
        pools = [
            member.hello.worker
            for member in self._members.values()
            if member.hello.role == Role.KVSTORE and member.hello.node_id == hello.node_id
        ]
        return min(pools, key=lambda pool: pool.worker_id, default=None)
