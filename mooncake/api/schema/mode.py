"""The body and the reply of the routes by which operators pause a cluster, let it sleep, or replace
its weights.
"""

from __future__ import annotations

import msgspec
from pydantic import Field

from mooncake.api.schema.fields import RequestBody
from mooncake.base.cluster_mode import ClusterMode


class UpdateWeightsRequest(RequestBody):
    """The body of `POST /update_weights`."""

    path: str = Field(min_length=2, max_length=4096, pattern="^/")
    """The directory of the checkpoint on the machines of engines."""


class ModeReply(msgspec.Struct, frozen=True):
    """What operators want of the cluster."""

    is_paused: bool
    is_sleeping: bool
    sleep_level: int
    weights_path: str
    """The directory of the weights; empty: those that the cluster was started with."""
    weights_revision: str
    """The revision of these weights; empty as above."""

    @classmethod
    def of(cls, mode: ClusterMode) -> ModeReply:
        weights = mode.weights
        return cls(
            mode.paused, mode.sleep_level > 0, mode.sleep_level, weights.model, weights.revision
        )
