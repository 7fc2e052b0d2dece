"""The values that `mooncake status` shows: the cluster at one moment."""

from __future__ import annotations

import msgspec

from mooncake.base import Role, WorkerLoad
from mooncake.base.messages import Asleep
from mooncake.scheduler.membership_table import Member
from mooncake.scheduler.placement.views import InstanceView
from mooncake.scheduler.scaling.policy import RoleAdvice


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One worker. `state` is "up", "draining" or "asleep"."""

    id: str
    role: Role
    pid: int
    host: str
    node_id: str
    state: str
    load: WorkerLoad
    silent_s: float
    """Seconds since its last message."""
    cost_error_ratio: float | None
    """Mean relative error of its cost model; None before the first measured step."""
    health_url: str = ""
    """The URL at which probes ask its process; empty when it has no port of its own."""


class GatewayStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One gateway. `state` is "up", "draining" or "silent"."""

    id: str
    address: str
    """Host and port of its channel, for workers and other gateways; without the channel's key."""
    state: str
    silent_s: float = 0.0
    """Seconds since its last message; 0 for the gateway that reports."""
    num_inflight: int = 0
    """Requests it has placed that have not ended, as far as the reporting gateway knows."""


class PoolStatus(msgspec.Struct, frozen=True, kw_only=True):
    """All kvstore workers together."""

    num_nodes: int
    num_total_blocks: int
    num_used_blocks: int
    total_bytes: int
    used_bytes: int
    num_indexed_blocks: int
    """Distinct blocks known anywhere, HBM included."""


class LoadStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The requests of this gateway, and the loads that the engines report."""

    num_inflight: int
    num_queued: int
    num_prefilling: int
    num_decoding: int
    num_queued_tokens: int
    num_context_tokens: int
    num_free_blocks: int
    """HBM blocks of decode workers."""
    num_total_blocks: int


class ReplicaStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How many replicas of a role there are, and how many there should be."""

    role: Role
    now: int
    """Live ones that are not about to leave."""
    wanted: int
    why: str


class ClusterStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The whole cluster. `ready` is true when a new request would find all the workers it needs."""

    ready: bool
    draining: bool
    gateways: list[GatewayStatus] = []
    """The reporting gateway comes first."""
    missing: list[str] = []
    """Roles that a request needs and for which no worker accepts work."""
    workers: list[WorkerStatus]
    pool: PoolStatus
    load: LoadStatus
    replicas: list[ReplicaStatus] = []
    """What the scaling policy advises; empty before its first look."""
    counters: dict[str, int]
    """Counts of this gateway since it started."""
    paused: bool = False
    """An operator wants no requests to be taken."""
    sleep_level: int = 0
    """How an operator wants engines to sleep; 0: they are awake."""
    weights_path: str = ""
    """The directory of the weights that have replaced those the cluster was started with."""
    weights_revision: str = ""
    """Their revision; both are empty if no weights were replaced."""


def shown_address(address: str) -> str:
    """Return a channel's address without the key by which its traffic is encrypted."""
    return address.partition("#")[0]


def replica_status(advice: RoleAdvice) -> ReplicaStatus:
    """Return the advice about a role as it is shown."""
    return ReplicaStatus(role=advice.role, now=advice.now, wanted=advice.wanted, why=advice.why)


def worker_status(member: Member, view: InstanceView, now: float) -> WorkerStatus:
    """Return the status of one worker."""
    hello = member.hello
    return WorkerStatus(
        id=hello.worker.worker_id,
        role=hello.role,
        pid=hello.pid,
        host=hello.host,
        node_id=hello.node_id,
        state="draining" if view.draining else "up",
        load=view.load,
        silent_s=round(now - member.last_heard_s, 3),
        cost_error_ratio=view.cost.error_ratio,
        health_url=hello.health_url,
    )


def asleep_status(asleep: Asleep) -> WorkerStatus:
    """Return the status of an engine that sleeps."""
    return WorkerStatus(
        id=asleep.worker.worker_id,
        role=asleep.role,
        pid=asleep.pid,
        host=asleep.host,
        node_id=asleep.node_id,
        state="asleep",
        load=WorkerLoad(),
        silent_s=0.0,
        cost_error_ratio=None,
        health_url=asleep.health_url,
    )


def missing_roles(views: list[InstanceView], *, needs_prefill: bool) -> list[str]:
    """Return the roles that a request needs and for which there is no worker. A draining worker
    counts while there is no other.
    """
    needed = (Role.PREFILL, Role.DECODE) if needs_prefill else (Role.DECODE,)
    there = {view.role for view in views}
    return [role.value for role in needed if role not in there]


def pool_status(views: list[InstanceView], num_indexed_blocks: int) -> PoolStatus:
    """Return the summed figures of the kvstore workers. Cached blocks of a pool count as used."""
    pools = [view for view in views if view.role == Role.KVSTORE]
    used = {
        view.worker_id: max(
            view.load.num_cached_blocks, view.load.num_total_blocks - view.load.num_free_blocks
        )
        for view in pools
    }
    return PoolStatus(
        num_nodes=len({view.hello.node_id for view in pools}),
        num_total_blocks=sum(view.load.num_total_blocks for view in pools),
        num_used_blocks=sum(used.values()),
        total_bytes=sum(v.load.num_total_blocks * v.hello.block_bytes for v in pools),
        used_bytes=sum(used[v.worker_id] * v.hello.block_bytes for v in pools),
        num_indexed_blocks=num_indexed_blocks,
    )


def load_status(views: list[InstanceView], states: dict[str, int]) -> LoadStatus:
    """Return the figures of the engines, and of the requests counted by state."""
    engines = [view for view in views if view.role in (Role.PREFILL, Role.DECODE)]
    decodes = [view for view in engines if view.role == Role.DECODE]
    return LoadStatus(
        num_inflight=sum(states.values()),
        num_queued=states.get("queued", 0),
        num_prefilling=states.get("prefilling", 0),
        num_decoding=states.get("decoding", 0),
        num_queued_tokens=sum(view.num_queued_tokens() for view in engines),
        num_context_tokens=sum(view.num_context_tokens() for view in decodes),
        num_free_blocks=sum(view.load.num_free_blocks for view in decodes),
        num_total_blocks=sum(view.load.num_total_blocks for view in decodes),
    )
