"""Which cores the two ends of a benchmark run on.

Left to itself, a kernel with two cores in one cache may start a process that is woken on the core
of the one that woke it, which is still sending: the two then take turns where two machines would
work side by side. `Ends(apart=True)` gives each end half of the cores.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


class Ends:
    """This process is one end; what it starts within `other` is the other."""

    def __init__(self, *, apart: bool) -> None:
        """Raises RuntimeError when the ends are to be apart and there is but one core."""
        cores = sorted(os.sched_getaffinity(0))
        if apart and len(cores) < 2:
            raise RuntimeError("two ends with cores of their own need two cores")
        self.apart = apart
        self._ours = set(cores[1::2] if apart else cores)
        self._theirs = set(cores[::2] if apart else cores)
        os.sched_setaffinity(0, self._ours)

    @contextmanager
    def other(self) -> Iterator[None]:
        """Processes started within belong to the other end."""
        os.sched_setaffinity(0, self._theirs)
        try:
            yield
        finally:
            os.sched_setaffinity(0, self._ours)
