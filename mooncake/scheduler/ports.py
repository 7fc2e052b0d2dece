"""Everything that the gateway needs from outside, in one value. Ports only."""

from __future__ import annotations

from dataclasses import dataclass

from mooncake.base import IdSource, WorkerRef
from mooncake.rpc.channel import Channel
from mooncake.telemetry.events import Recorder


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewayPorts:
    """The gateway's own reference, its channel, source of identifiers and event recorder."""

    worker: WorkerRef
    channel: Channel
    ids: IdSource
    recorder: Recorder
