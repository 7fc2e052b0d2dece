"""The RDMA device of a host made of namespaces.

The kernel's software devices send and receive in its first network namespace alone, and cannot be
given to another (`rdma dev set ... netns` says that it is not supported). So the Ethernet device
below lies in this namespace, at the bridge that joins the hosts, and processes of hosts use the
RDMA device as containers do that share their machine's NICs.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from tests.support.hosts.hosts import Host
from tests.support.namespaces import ip


class HostNic:
    """A NIC beside the `eth0` of a host, with an address of its own."""

    def __init__(self, host: Host) -> None:
        network, _, number = host.address.rpartition(".")
        self.device, self._ethernet = f"roce_{host.name}", f"nic_{host.name}"
        self.address = f"{network}.{100 + int(number)}"
        ip("-netns", host.switch, "link", "add", f"{host.port}n", "type", "veth",
           "peer", "name", self._ethernet, "netns", str(os.getpid()))  # fmt: skip
        ip("-netns", host.switch, "link", "set", f"{host.port}n", "master", "bridge", "up")
        # What another NIC sends comes from an address of this very namespace.
        settings = Path("/proc/sys/net/ipv4/conf") / self._ethernet
        (settings / "accept_local").write_text("1")
        (settings / "arp_ignore").write_text("1")
        ip("address", "add", f"{self.address}/24", "dev", self._ethernet)
        self.set_link("up")
        _rdma("link", "add", self.device, "type", "rxe", "netdev", self._ethernet)

    def set_link(self, state: str) -> None:
        """Take its link "down", like a cable, or "up"."""
        ip("link", "set", self._ethernet, state)

    def num_packets(self) -> int:
        """Return what the kernel has counted as sent."""
        counters = Path("/sys/class/infiniband") / self.device / "ports/1/hw_counters"
        return int((counters / "sent_pkts").read_text())

    def held(self) -> dict[str, int]:
        """Return how many objects of each kind processes have at the device: `mr` is memory."""
        [found] = json.loads(_rdma("-j", "resource", "show", self.device))
        return {kind: number for kind, number in found.items() if isinstance(number, int)}

    def close(self) -> None:
        """Take it away."""
        _rdma("link", "delete", self.device)
        ip("link", "delete", self._ethernet)


def _rdma(*words: str) -> str:
    done = subprocess.run(["rdma", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"rdma {' '.join(words)}: {done.stderr}"
    return done.stdout
