"""The key by which an engine finds its peers."""

from __future__ import annotations

from typing import NamedTuple


class PeerKey(NamedTuple):
    """Names one peer of one protocol. An engine that restarts has another id, so it is another
    peer.
    """

    endpoint: str
    engine_id: str
