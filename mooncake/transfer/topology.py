"""Tells which NICs are near which memory: the topology matrix, and what Linux reports about RDMA
devices.

Pure, except that it reads files under a given root. The health of a NIC plays no part here.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mooncake.base.errors import ConfigError

SYSFS = Path("/sys")
ANYWHERE = "anywhere"
"""The location of memory whose place is not known: all NICs count as equally near."""
_NO_GID = b":".join([b"0000"] * 8) + b"\n"
_V4_PREFIX = bytes(10) + b"\xff\xff"
_DISPLAY_CLASS = "0x03"


@dataclass(frozen=True, kw_only=True)
class Place:
    """The place of a device in its machine."""

    name: str
    numa_node: int = -1
    """-1: not known (virtual devices, machines with one node)."""
    pci_path: tuple[str, ...] = ()
    """Bridges from the root down to the device, e.g. ("pci0000:00", "0000:00:01.0", ...)."""


@dataclass(frozen=True, kw_only=True)
class PortFacts:
    """What sysfs reports about one port of an RDMA device."""

    device: str
    port: int
    active: bool
    ethernet: bool
    gids: Mapping[int, tuple[bytes, str]]
    """Index -> (GID, type such as "RoCE v2"); empty entries are left out."""


@dataclass(frozen=True)
class NicChoice:
    """NICs for memory at one location, best first within each list."""

    preferred: tuple[str, ...]
    secondary: tuple[str, ...]


Matrix = Mapping[str, NicChoice]


def distance(one: Place, other: Place) -> int:
    """Return how far apart two devices are: 0 same PCIe switch, 1 same NUMA node, 2 unknown, 3 far.

    Two devices share a switch when a bridge below the root port is on both paths.
    """
    shared = 0
    for ours, theirs in zip(one.pci_path, other.pci_path, strict=False):
        if ours != theirs:
            break
        shared += 1
    if shared >= 3:
        return 0
    if one.numa_node < 0 or other.numa_node < 0:
        return 2
    return 1 if one.numa_node == other.numa_node else 3


def build_matrix(
    nics: Sequence[Place], gpus: Sequence[Place] = (), numa_nodes: Iterable[int] = (0,)
) -> dict[str, NicChoice]:
    """Return location -> NICs for "cpu:<node>" of each NUMA node, each GPU's name, and ANYWHERE."""
    locations = {f"cpu:{node}": Place(name="", numa_node=node) for node in numa_nodes}
    locations |= {gpu.name: gpu for gpu in gpus}
    matrix = {name: _nearest(place, nics) for name, place in locations.items()}
    matrix[ANYWHERE] = NicChoice(tuple(sorted(nic.name for nic in nics)), ())
    return matrix


def _nearest(place: Place, nics: Sequence[Place]) -> NicChoice:
    ranked = sorted((distance(place, nic), nic.name) for nic in nics)
    if not ranked:
        return NicChoice((), ())
    best = ranked[0][0]
    return NicChoice(
        tuple(name for far, name in ranked if far == best),
        tuple(name for far, name in ranked if far != best),
    )


def prefer(matrix: Matrix, near: Mapping[str, Sequence[str]]) -> dict[str, NicChoice]:
    """Return the matrix with these NICs first for memory at these locations, and all others after
    them. It is needed where sysfs does not show what is near, as in a virtual machine.

    Raises ConfigError for a NIC that is not in use.
    """
    everyone, chosen = matrix[ANYWHERE].preferred, dict(matrix)
    for location, names in near.items():
        unknown = [name for name in names if name not in everyone]
        if unknown:
            raise ConfigError(
                f"rdma-near: this process does not use {', '.join(unknown)}; it uses "
                f"{', '.join(everyone)}"
            )
        others = tuple(name for name in everyone if name not in names)
        chosen[location] = NicChoice(tuple(names), others)
    return chosen


def choose_nics(matrix: Matrix, location: str) -> NicChoice:
    """Return the NICs for memory at `location`; unknown locations may use all."""
    return matrix.get(location) or matrix[ANYWHERE]


def rank_remote(local_gid: bytes, local_name: str, remotes: Mapping[str, bytes]) -> list[str]:
    """Return the peer's NICs, the one on our NIC's own rail first.

    Rails are separate networks: the GIDs of one rail share the longest prefix. If that decides
    nothing, NICs of the same name are usually wired to the same switch.
    """

    def key(name: str) -> tuple[int, bool, str]:
        return (-_common_bits(local_gid, remotes[name]), name != local_name, name)

    return sorted(remotes, key=key)


def _common_bits(one: bytes, other: bytes) -> int:
    """Return the length of the common prefix, in steps of 8 bits; network masks are seldom
    finer.
    """
    count = 0
    for left, right in zip(one, other, strict=True):
        if left != right:
            break
        count += 8
    return min(count, 120)  # the last byte names the host


# ------------------------------------------------------------------ read from sysfs


def read_rdma_places(sysfs: Path = SYSFS) -> list[Place]:
    """Return where the RDMA devices of this machine sit, by name. A software device sits where its
    network device does.
    """
    places = []
    for device in _entries(sysfs / "class/infiniband"):
        at = device / "device"
        if not at.exists():
            netdev = _text(device / "parent")
            at = sysfs / "class/net" / netdev / "device" if netdev else at
        places.append(_place(device.name, at))
    return places


def list_rdma_devices(sysfs: Path = SYSFS) -> list[str]:
    """Return the names of the RDMA devices of this machine."""
    return [device.name for device in _entries(sysfs / "class/infiniband")]


def has_rdma_devices() -> bool:
    """Return whether this machine has any RDMA device."""
    return bool(list_rdma_devices())


def has_peer_memory(sysfs: Path = SYSFS) -> bool:
    """Return whether NICs can register the memory of NVIDIA GPUs by its address."""
    return (sysfs / "module/nvidia_peermem").exists()


def read_gpu_places(sysfs: Path = SYSFS) -> list[Place]:
    """Return where NVIDIA GPUs sit, named "gpu:<PCI address>"."""
    return [
        _place(f"gpu:{device.name}", device)
        for device in _entries(sysfs / "bus/pci/devices")
        if _text(device / "vendor") == "0x10de"
        and _text(device / "class").startswith(_DISPLAY_CLASS)
    ]


def read_numa_nodes(sysfs: Path = SYSFS) -> list[int]:
    """Return the NUMA nodes of this machine; [0] where the kernel knows none."""
    found = [
        int(entry.name.removeprefix("node"))
        for entry in _entries(sysfs / "devices/system/node")
        if entry.name.removeprefix("node").isdigit()
    ]
    return sorted(found) or [0]


def read_matrix(devices: Sequence[str], sysfs: Path = SYSFS) -> dict[str, NicChoice]:
    """Return the matrix of this machine for the named RDMA devices."""
    nics = [place for place in read_rdma_places(sysfs) if place.name in devices]
    return build_matrix(nics, read_gpu_places(sysfs), read_numa_nodes(sysfs))


def read_ports(device: str, sysfs: Path = SYSFS) -> list[PortFacts]:
    """Return the ports of an RDMA device, in order."""
    return [
        PortFacts(
            device=device,
            port=int(port.name),
            active=_text(port / "state").startswith("4"),
            ethernet=_text(port / "link_layer") == "Ethernet",
            gids=_gids(port),
        )
        for port in sorted(
            _entries(sysfs / "class/infiniband" / device / "ports"), key=lambda at: int(at.name)
        )
    ]


def gid_to_use(port: PortFacts) -> int | None:
    """Return the index of the GID at which peers reach a port; None: there is none."""
    return choose_gid(port.gids) if port.ethernet else min(port.gids, default=None)


def choose_gid(gids: Mapping[int, tuple[bytes, str]]) -> int | None:
    """Return the index of the GID to use on Ethernet, or None.

    Only RoCE v2 is used, because v1 is not routed. IPv4 comes first, then routable IPv6, then
    link-local, which works only between direct neighbours. The lowest index of the best kind is
    chosen.
    """
    usable = [(_gid_rank(gid), index) for index, (gid, kind) in gids.items() if "v2" in kind]
    return min(usable)[1] if usable else None


def _gid_rank(gid: bytes) -> int:
    if gid.startswith(_V4_PREFIX):
        return 0
    return 2 if gid[0] == 0xFE and gid[1] & 0xC0 == 0x80 else 1


def _gids(port: Path) -> dict[int, tuple[bytes, str]]:
    """Return the GIDs of a port and their types, by index. Most of a thousand entries are empty."""
    found = {}
    folder = port / "gids"
    for name in os.listdir(folder) if folder.exists() else ():
        try:
            with open(f"{folder}/{name}", "rb", buffering=0) as file:
                text = file.read()
        except OSError:
            continue
        if text and text != _NO_GID:
            # Reading the type of an entry without one fails; InfiniBand ports have none.
            gid = bytes.fromhex(text.decode().strip().replace(":", ""))
            found[int(name)] = (gid, _text(port / "gid_attrs/types" / name))
    return dict(sorted(found.items()))


def _place(name: str, at: Path) -> Place:
    if not at.exists():
        return Place(name=name)
    path = at.resolve().parts
    roots = [index for index, part in enumerate(path) if part.startswith("pci")]
    node = _text(at / "numa_node")
    return Place(
        name=name,
        numa_node=int(node) if node.lstrip("-").isdigit() else -1,
        pci_path=path[roots[0] :] if roots else (),
    )


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def memory_location(numa_maps: str, address: int) -> str:
    """Return "cpu:<node>" of the mapping that starts at or below `address`; ANYWHERE if not known.

    `numa_maps` is the text of /proc/self/numa_maps. If there are several nodes, the one with most
    pages is chosen.
    """
    best: tuple[int, str] | None = None
    for line in numa_maps.splitlines():
        start, _, rest = line.partition(" ")
        try:
            at = int(start, 16)
        except ValueError:
            continue
        if at <= address and (best is None or at > best[0]):
            best = (at, rest)
    pages = {}
    for word in best[1].split() if best else ():
        node, equals, count = word.partition("=")
        if equals and node[:1] == "N" and node[1:].isdigit() and count.isdigit():
            pages[int(node[1:])] = int(count)
    if not pages:
        return ANYWHERE
    return f"cpu:{max(sorted(pages), key=lambda node: pages[node])}"
