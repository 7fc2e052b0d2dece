"""The pods' network: a bridge of this machine, a namespace for each pod, Services' addresses."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.support import namespaces
from tests.support.namespaces import SINK, ip, sweep

PREFIX = "mk"
"""The prefix of names of bridges and namespaces; the maker's pid follows."""
_LISTEN = "0A"
"""A socket's state in proc(5)'s tables of TCP."""


def why_not() -> str:
    """Return why this machine cannot have pods; empty: it can."""
    return namespaces.why_not(PREFIX)


class PodNetwork:
    """Addresses 10.N.0.0/16 for one cluster; N is one that this machine does not use."""

    _numbers = itertools.count(1)
    """Numbers of pods in all clusters of this process, so that no later cluster uses the name of a
    namespace that could not be removed at once.
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
            ip("link", "add", self.sink, "type", "bridge")
        self._services = itertools.count(1)
        self._filtered: dict[str, str] = {}
        """The links that have filters, and which."""
        for name in (self._tag, self.sink):
            ip("link", "set", name, "up")

    @property
    def sink(self) -> str:
        """The device for what no policy allows."""
        return f"{self._tag}{SINK}"

    @property
    def gateway(self) -> str:
        return f"{self._net}.0.1"

    def attach(self) -> tuple[str, str]:
        """Return the name of a fresh namespace, and its address."""
        number = next(self._numbers)
        name = f"{self._tag}-{number}"
        link = self.link_of(name)
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

    @staticmethod
    def link_of(name: str) -> str:
        """Return this machine's end of the link to a namespace."""
        return name.replace("-", "v")

    def filter(self, wanted: Mapping[str, str]) -> None:
        """Have links filtered by these words of tc(8), and no others."""
        words = []
        for link in wanted.keys() | self._filtered.keys():
            before, now = self._filtered.get(link, ""), wanted.get(link, "")
            if before != now:
                words += [f"qdisc del dev {link} clsact"] * bool(before) + [now] * bool(now)
        self._filtered = {link: now for link, now in wanted.items() if now}
        if words:  # a link may be gone by now
            subprocess.run(
                ["tc", "-force", "-batch", "-"], input="\n".join([*words, ""]), text=True,
                capture_output=True, check=False,
            )  # fmt: skip

    def detach(self, name: str) -> None:
        self._filtered.pop(self.link_of(name), None)
        with contextlib.suppress(OSError):
            ip("netns", "delete", name)

    def service_address(self) -> str:
        """Return a fresh address of this machine for a Service."""
        address = f"{self._net}.255.{next(self._services)}"
        ip("address", "add", f"{address}/32", "dev", self._tag)
        return address

    def close(self) -> None:
        for name in (self._tag, self.sink):
            with contextlib.suppress(OSError):
                ip("link", "delete", name)


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
