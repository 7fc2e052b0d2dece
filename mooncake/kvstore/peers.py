"""What each boot of each worker has open at a pool node: values only, owned by the node."""

from __future__ import annotations

from collections.abc import Sequence

from mooncake.base import BlockKey, WorkerRef

Peer = tuple[str, str]
"""(worker id, epoch)"""


def peer_of(worker: WorkerRef) -> Peer:
    return worker.worker_id, worker.epoch


class Grant:
    """A put between `PutStart` and its last `PutEnd`."""

    __slots__ = ("pending", "run")

    def __init__(self, run: list[BlockKey], granted: Sequence[BlockKey]) -> None:
        self.run = run
        """All keys asked for, head first: one use of a chain, whether stored before or now."""
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
