"""What the gateway needs of the world, in one value. Ports only."""

from __future__ import annotations

from dataclasses import dataclass

from mooncake.base import IdSource, WorkerRef
from mooncake.rpc.channel import Channel
from mooncake.telemetry.events import Recorder


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewayPorts:
    """The gateway's own name, and what it sends through, draws from and tells."""

    worker: WorkerRef
    channel: Channel
    ids: IdSource
    recorder: Recorder
