"""Looks at the processes of hosts from outside: which there are, and what they hold."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from tests.support.hosts.hosts import Host
from tests.support.hosts.soak.verdict import Sample

_ROLE = re.compile(rb"--role=(\w+)\0")
_UP = re.compile(rb"mooncake\0up\0")
MEMORY = ("tmp", "home", "dev/shm")
"""File systems of a host that lie in memory."""


class Watch:
    """What was seen of each process, by its name and boot."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        self._hosts = hosts
        self.seen: dict[tuple[str, str], list[Sample]] = defaultdict(list)
        """Role and host, as "decode on a", and what tells one boot from another -> its samples."""
        self.kinds: dict[tuple[str, str], Counter[str]] = {}
        """What the descriptors of each were when it was seen last."""

    def look(self) -> None:
        """Note what all processes hold now."""
        for host in self._hosts:
            with contextlib.suppress(
                OSError, IndexError, AssertionError
            ):  # it has no power, or loses it
                self._look_at(host)

    def _look_at(self, host: Host) -> None:
        root, running = host.path(""), list(host.path("/proc").glob("[0-9]*"))
        num_bytes = sum(map(_num_held, (root / name for name in MEMORY)))
        self.kinds[key := (f"host {host.name}", str(root))] = Counter()
        self.seen[key].append(Sample(time.time(), num_bytes, len(running)))
        for place in running:
            with contextlib.suppress(OSError):  # it ends meanwhile
                words = (place / "cmdline").read_bytes()
                role = "up" if _UP.search(words) else ""
                if found := _ROLE.search(words):
                    role = found.group(1).decode()
                if not role:
                    continue
                born = (place / "stat").read_text().rpartition(")")[2].split()[19]
                anonymous = re.search(r"RssAnon:\s+(\d+)", (place / "status").read_text())
                num_bytes = 1024 * int(anonymous.group(1)) if anonymous else 0
                opened = [_kind(each) for each in (place / "fd").iterdir()]
                key = (f"{role} on {host.name}", f"{place.name} {born}")
                self.kinds[key] = Counter(opened)
                self.seen[key].append(Sample(time.time(), num_bytes, len(opened)))


def _num_held(place: Path) -> int:
    """Return how many bytes a file system holds."""
    found = os.statvfs(place)
    return found.f_frsize * (found.f_blocks - found.f_bfree)


def _kind(descriptor: Path) -> str:
    """Return what a descriptor is of, as "socket" or "anon_inode:[eventfd]"; of a file, where."""
    try:
        target = str(descriptor.readlink())
    except OSError:  # it has just been closed
        return "closed"
    if target.startswith("/"):
        return target.rpartition("/")[0]
    return target if target.startswith("anon") else target.partition(":")[0]
