"""Ends the descendants of a process by descriptor, so that a reused pid is never hit."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from pathlib import Path


class Descendants:
    """Remembers the processes below another one, and can end them. Use as a context."""

    def __init__(self, root: int | None = None) -> None:
        """`root` is the process they descend from; None: this one."""
        self._root = os.getpid() if root is None else root
        self._descriptors: dict[int, int] = {}
        """pidfd -> pid"""

    def __enter__(self) -> Descendants:
        for pid in _descendants(self._root):
            with contextlib.suppress(OSError):
                self._descriptors[os.pidfd_open(pid)] = pid
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)

    @property
    def pids(self) -> list[int]:
        """Processes of the snapshot that still run."""
        return [self._descriptors[descriptor] for descriptor in self._alive(0.0)]

    def end(self, timeout_s: float) -> None:
        """Return when all have ended. Those that have not after `timeout_s` are killed."""
        for descriptor in self._alive(timeout_s):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        self._alive(timeout_s)

    def _alive(self, timeout_s: float) -> list[int]:
        """Wait up to `timeout_s` for all to end; return the descriptors of those that have not."""
        poll = select.poll()
        waiting = set(self._descriptors)
        for descriptor in waiting:
            poll.register(descriptor, select.POLLIN)
        end_s = time.monotonic() + timeout_s
        while waiting:
            ended = poll.poll(max(0.0, end_s - time.monotonic()) * 1000)
            if not ended:
                break
            for descriptor, _ in ended:
                poll.unregister(descriptor)
                waiting.discard(descriptor)
        return sorted(waiting)


def has_ended(descriptor: int, limit_s: float) -> bool:
    """Wait up to `limit_s` for the process of a pidfd; return whether it has ended."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(limit_s * 1000))


def _descendants(root: int) -> list[int]:
    """Return the pids below `root`, parents before children."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError):
            # The name in parentheses may hold anything, also parentheses and spaces.
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.name))
    found: list[int] = []
    pending = [root]
    while pending:
        below = children.get(pending.pop(), [])
        found += below
        pending += below
    return found
