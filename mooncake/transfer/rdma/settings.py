"""The settings of transfers by RDMA, for processes that only pass them on, too: nothing that moves
bytes is imported here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mooncake.transfer.batches import SliceLimits
from mooncake.transfer.net.retries import BreakerLimits


@dataclass(frozen=True, kw_only=True)
class RdmaLimits:
    """Bounds of what goes to one peer."""

    slices: SliceLimits = field(
        default_factory=lambda: SliceLimits(target_bytes=2**20, min_bytes=64 * 1024, max_pieces=32)
    )
    """64 KiB if that spreads a batch over more NICs, more if there is much to move."""
    in_flight_bytes: int = 8 * 2**20
    """Bytes that one queue pair has under way. Further ones are queued, so that other paths can
    take them.
    """
    signal_every: int = 16
    num_failures: int = 4
    """A slice whose path broke this often fails its batch."""
    fence_s: float = 0.25
    """How long a stopped batch may go on before its queue pairs are torn down, and again how long
    the owner may take to confirm.
    """
    connect_s: float = 5.0
    breaker: BreakerLimits = field(default_factory=BreakerLimits)


@dataclass(frozen=True, kw_only=True)
class OwnerLimits:
    """Bounds of the owner's side."""

    num_sessions: int = 4096
    num_pairs: int = 8192
    """Queue pairs that clients may have with us, all together."""
    handshake_s: float = 5.0


@dataclass(frozen=True, kw_only=True)
class RdmaSettings:
    """The settings by which one engine uses RDMA. Devices, ports, GIDs and MTU are found where they
    are not given.
    """

    devices: Sequence[str] = ()
    """Names such as "mlx5_0"; empty = all that are up."""
    near: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Location as in the topology matrix -> NICs to prefer for memory there."""
    gid_index: int | None = None
    mtu_bytes: int | None = None
    traffic_class: int = 0
    """Traffic class of packets, for switches that tell classes apart (RoCE: six bits of DSCP, two
    of ECN).
    """
    service_level: int = 0
    max_endpoints: int = 512
    """Queue pairs that may be open to peers at a time, or fewer if a NIC's completion queue is too
    short for them. When there would be more, those not used lately are closed.
    """
    num_spins: int = 32
    """How often to look at an empty completion queue before the thread sleeps."""
    link_look_s: float = 0.1
    """Seconds between two looks at a NIC whose link is down."""
    lost_look_s: float = 1.0
    """Seconds between two attempts to open a failed NIC again."""
    limits: RdmaLimits = field(default_factory=RdmaLimits)
    owner: OwnerLimits = field(default_factory=OwnerLimits)
