"""The pods' network: a bridge of this machine, a namespace for each pod, Services' addresses."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import itertools
import json
import os
import sys
import tempfile
from pathlib import Path

from tests.support import namespaces
from tests.support.namespaces import ip, sweep

PREFIX = "mk"
"""Of the names of bridges and namespaces; the pid of who made them follows."""
_LISTEN = "0A"
"""A socket's state in proc(5)'s tables of TCP."""


def why_not() -> str:
    """Return why this machine cannot have pods; empty: it can."""
    return namespaces.why_not(PREFIX)


class PodNetwork:
    """Addresses 10.N.0.0/16 for one cluster; N is one that this machine does not use."""

    _numbers = itertools.count(1)
    """Of pods, through all clusters of this process: the name of a namespace that could not be
    taken away at once is used by no later cluster.
    """

    def __init__(self) -> None:
        self._tag = f"{PREFIX}{os.getpid()}"
        with Path(tempfile.gettempdir(), f"{PREFIX}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two clusters that begin at once would take one N
            sweep(PREFIX)
            used = {
                address["local"].split(".")[1]
                for link in json.loads(ip("-json", "address", "show"))
                for address in link["addr_info"]
                if address.get("local", "").startswith("10.")
            }
            self._net = next(f"10.{n}" for n in range(200, 250) if str(n) not in used)
            ip("link", "add", self._tag, "type", "bridge")
            ip("address", "add", f"{self.gateway}/16", "dev", self._tag)
        self._services = itertools.count(1)
        ip("link", "set", self._tag, "up")

    @property
    def gateway(self) -> str:
        return f"{self._net}.0.1"

    def attach(self) -> tuple[str, str]:
        """Return the name of a fresh namespace, and its address."""
        number = next(self._numbers)
        name, link = f"{self._tag}-{number}", f"{self._tag}v{number}"
        address = f"{self._net}.{1 + number // 250}.{1 + number % 250}"
        ip("netns", "add", name)
        ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
        ip("link", "set", link, "master", self._tag, "up")
        inside = ("-netns", name)
        ip(*inside, "link", "set", "lo", "up")
        ip(*inside, "address", "add", f"{address}/16", "dev", "eth0")
        ip(*inside, "link", "set", "eth0", "up")
        ip(*inside, "route", "add", "default", "via", self.gateway)
        return name, address

    def detach(self, name: str) -> None:
        with contextlib.suppress(OSError):
            ip("netns", "delete", name)

    def service_address(self) -> str:
        """Return a fresh address of this machine for a Service."""
        address = f"{self._net}.255.{next(self._services)}"
        ip("address", "add", f"{address}/32", "dev", self._tag)
        return address

    def close(self) -> None:
        with contextlib.suppress(OSError):
            ip("link", "delete", self._tag)


def listening(pid: int) -> set[int]:
    """Return the TCP ports that are open beyond loopback in a process' network namespace."""
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, place, _, state, *_ = line.split()
            words, _, port = place.partition(":")
            if state == _LISTEN and not _is_loopback(words):
                found.add(int(port, 16))
    return found


def _is_loopback(words: str) -> bool:
    """`words`: an address as proc(5) has it, 32-bit words in this machine's order of bytes."""
    parts = [int(words[at : at + 8], 16) for at in range(0, len(words), 8)]
    packed = b"".join(part.to_bytes(4, sys.byteorder) for part in parts)
    address = ipaddress.ip_address(packed)
    inner = getattr(address, "ipv4_mapped", None)
    return (inner or address).is_loopback
