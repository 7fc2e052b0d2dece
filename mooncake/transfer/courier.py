"""Takes what an engine's batches have to say to their peers: straight where a peer lives in this
process, else over a link of its own.

Owns one outbox for each peer. `settled` comes from whatever thread a batch ends in.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Protocol

from mooncake.transfer.batches import Job
from mooncake.transfer.engine import MAX_NOTICE_BYTES
from mooncake.transfer.notices import Ear, Outbox

NOTICES = "notices"
"""Names in `SegmentRef.endpoints` where an engine can be told something."""
_MANY_OUTBOXES = 256


class Links(Protocol):
    """What carries words to other processes."""

    @property
    def endpoint(self) -> str:
        """Where peers reach this engine."""

    def pump(self, outbox: Outbox, engine_id: str, endpoint: str) -> None:
        """Say what is due in `outbox` to the engine there; from any thread, never blocks."""

    def close(self) -> None:
        """Hang up; what is under way stays unconfirmed."""


class Courier:
    """See the module."""

    def __init__(
        self, engine_id: str, find_local: Callable[[str], Ear | None], links: Links | None
    ) -> None:
        """`find_local` returns the ear of an engine of this process, or None."""
        self._engine_id = engine_id
        self._find_local = find_local
        self._links = links
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._outboxes: dict[str, Outbox] = {}
        self._closed = False

    @property
    def endpoints(self) -> dict[str, str]:
        """What peers need to know to tell this engine something."""
        return {} if self._links is None else {NOTICES: self._links.endpoint}

    def expect(self, job: Job) -> str | None:
        """A batch with something to say is submitted; return why that can never be said."""
        peer, num_bytes = job.peer, len(job.notify or b"")
        if num_bytes > MAX_NOTICE_BYTES:
            return f"a notice of {num_bytes} bytes is longer than {MAX_NOTICE_BYTES}"
        is_linked = self._links is not None and NOTICES in peer.endpoints
        if not is_linked and self._find_local(peer.engine_id) is None:
            return f"{peer.engine_id} cannot be told anything"
        with self._lock:
            if len(self._outboxes) >= _MANY_OUTBOXES:
                self._outboxes = {
                    name: box for name, box in self._outboxes.items() if not box.is_empty
                }
            outbox = self._outboxes.get(peer.engine_id)
            if outbox is None:
                outbox = self._outboxes[peer.engine_id] = Outbox(peer.engine_id, self._numbers)
            outbox.add(job)
        return None

    def settled(self, job: Job) -> None:
        """A batch with something to say has arrived, or has ended: say what is due now."""
        with self._lock:
            outbox = self._outboxes.get(job.peer.engine_id)
        if outbox is None or not outbox.is_due:
            return
        ear = self._find_local(job.peer.engine_id)
        endpoint = job.peer.endpoints.get(NOTICES)
        if self._closed:
            outbox.give_up("the transfer engine is closed")
        elif ear is not None:
            while (words := outbox.take()) is not None:
                outbox.answered(ear.hear(self._engine_id, words))
        elif self._links is not None and endpoint is not None:
            self._links.pump(outbox, job.peer.engine_id, endpoint)
        else:
            outbox.give_up("it has left this process")

    def close(self) -> None:
        """Say nothing more. What is under way ends unconfirmed when the links are closed."""
        self._closed = True
        if self._links is not None:
            self._links.close()

    def check_integrity(self) -> None:
        """Raise AssertionError when an outbox waits for nothing."""
        with self._lock:
            for outbox in self._outboxes.values():
                outbox.check_integrity()
