"""What operators want of a whole cluster: whether it takes requests, whether its engines sleep, and
which weights it serves. Every process keeps the newest that it has heard of.

Values only; `scheduler.gateway.mode_control` carries them out.
"""

from __future__ import annotations

import msgspec

KEPT, DROPPED = 1, 2
"""The levels of sleep: weights stay in DRAM, or are dropped and loaded again."""


class Weights(msgspec.Struct, frozen=True, array_like=True):
    """The weights that a cluster serves. Those with the highest number are meant."""

    number: int = 0
    """How often the weights were replaced; 0: each process has those it was started with."""
    model: str = ""
    """The directory of the checkpoint on the machines of engines."""
    revision: str = ""
    fingerprint: str = ""
    """The fingerprint of the KV layout under these weights."""


class ClusterMode(msgspec.Struct, frozen=True, array_like=True):
    """The state that an operator has asked for. `weights` have a number of their own."""

    number: int = 0
    """How often the other fields were changed. The higher number wins, and of equal ones `by`."""
    by: str = ""
    """The gateway that changed them."""
    paused: bool = False
    """No new requests are taken."""
    sleep_level: int = 0
    """How engines sleep (`KEPT`, `DROPPED`); 0: they are awake."""
    aborts: bool = False
    """While requests are not taken, those that run are ended; otherwise they finish."""
    weights: Weights = Weights()

    @property
    def is_open(self) -> bool:
        """True if requests are taken."""
        return not self.paused and not self.sleep_level

    def merged(self, other: ClusterMode) -> ClusterMode:
        """Return the newest of both, weights apart. The order does not matter."""
        newest = max(self, other, key=lambda mode: (mode.number, mode.by))
        weights = max(self.weights, other.weights, key=_order)
        return msgspec.structs.replace(newest, weights=weights)

    def changed(
        self, by: str, *, paused: bool, sleep_level: int, aborts: bool = False
    ) -> ClusterMode:
        """Return a newer mode with the same weights."""
        return ClusterMode(self.number + 1, by, paused, sleep_level, aborts, self.weights)


def _order(weights: Weights) -> tuple[int, str]:
    return weights.number, weights.revision
