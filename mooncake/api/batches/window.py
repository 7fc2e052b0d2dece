"""How many lines of batches are asked at a time: as many as the gateway finds room for, beside the
interactive load. It decides by numbers that its caller gives.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

from mooncake.api.http.limits import Shares

MAX_LINES = 1024
"""Lines that one gateway asks at a time."""
FIRST_LINES = 8
"""Lines that are asked before one has been answered."""
MAX_BYTES = 64 << 20
"""Bytes of these lines."""


class Window:
    """The lines that are being asked, by tenant.

    While batch work waits for room, only a tenant of which nothing is asked gets a place: its one
    line takes the tenant's turns at the gateway. Otherwise each answer makes room for its line and
    one more, so that few lines are on their way when the gateway begins to let them wait. A tenant
    has at most half of what others leave, and always room for one line. A tenant gets no
    further place while one of its lines waits after a refusal for now (429).
    """

    def __init__(self, max_line_bytes: int) -> None:
        self._limit = FIRST_LINES
        self._lines = Shares(MAX_LINES, least=1)
        self._bytes = Shares(MAX_BYTES, least=max_line_bytes)
        self._refused = Counter[str]()
        """Lines of each tenant that wait because they were refused."""

    def take(self, tenant: str, num_bytes: int, *, has_waiting_batch: bool) -> bool:
        """Take a place for a line of `tenant`, if it may have one. `has_waiting_batch`: work of the
        class batch waits at the gateway until there is room.
        """
        if has_waiting_batch:
            self._limit = max(FIRST_LINES, self.num_lines)
        is_full = has_waiting_batch or self.num_lines >= self._limit
        if tenant in self._refused or (is_full and self._lines.held_by(tenant)):
            return False
        if not self._lines.take(tenant, 1):
            return False
        if not self._bytes.take(tenant, num_bytes):
            self._lines.give_back(tenant, 1)
            return False
        return True

    def give_back(self, tenant: str, num_bytes: int) -> None:
        """Give the place of a line back, which was answered."""
        if tenant not in self._refused:
            self._limit = min(MAX_LINES, self._limit + 1)
        self._lines.give_back(tenant, 1)
        self._bytes.give_back(tenant, num_bytes)

    @contextlib.contextmanager
    def refused(self, tenant: str) -> Iterator[None]:
        """Give `tenant` no further place in this block: a line of it waits to be asked again."""
        self._refused[tenant] += 1
        try:
            yield
        finally:
            self._refused[tenant] -= 1
            if not self._refused[tenant]:
                del self._refused[tenant]

    @property
    def num_lines(self) -> int:
        """Number of lines that are being asked."""
        return self._lines.num_held

    def check_integrity(self) -> None:
        """Raise AssertionError when more is held than exists."""
        self._lines.check_integrity()
        self._bytes.check_integrity()
