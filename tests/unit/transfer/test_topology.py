"""The topology matrix from a made-up /sys, GIDs and rails."""

from __future__ import annotations

from pathlib import Path

import pytest

from mooncake.base import ConfigError
from mooncake.transfer import topology
from mooncake.transfer.topology import (
    ANYWHERE,
    NicChoice,
    Place,
    build_matrix,
    choose_gid,
    choose_nics,
    memory_location,
    prefer,
    rank_remote,
)

LINK_LOCAL = bytes.fromhex("fe80" + "00" * 13 + "01")
GLOBAL_V6 = bytes.fromhex("2001" + "00" * 13 + "01")


def v4(*octets: int) -> bytes:
    return bytes(10) + b"\xff\xff" + bytes(octets)


def test_nics_of_the_same_numa_node_come_first() -> None:
    nics = [Place(name="mlx5_0", numa_node=0), Place(name="mlx5_1", numa_node=1)]
    matrix = build_matrix(nics, numa_nodes=(0, 1))
    assert matrix["cpu:0"] == NicChoice(("mlx5_0",), ("mlx5_1",))
    assert matrix["cpu:1"] == NicChoice(("mlx5_1",), ("mlx5_0",))
    assert choose_nics(matrix, "cpu:7") == matrix[ANYWHERE] == NicChoice(("mlx5_0", "mlx5_1"), ())


def test_a_gpu_prefers_the_nic_behind_its_own_switch() -> None:
    root = ("pci0000:00", "0000:00:01.0")
    gpu = Place(name="gpu:0000:03:00.0", numa_node=0, pci_path=(*root, "switch", "0000:03:00.0"))
    near = Place(name="near", numa_node=0, pci_path=(*root, "switch", "0000:04:00.0"))
    same_node = Place(name="same", numa_node=0, pci_path=("pci0000:80", "0000:80:01.0"))
    matrix = build_matrix([same_node, near], [gpu])
    assert matrix[gpu.name] == NicChoice(("near",), ("same",))


def test_what_is_said_to_be_near_comes_first() -> None:
    nics = [Place(name=name, numa_node=node) for name, node in (("a", 0), ("b", 0), ("c", 1))]
    found = build_matrix(nics, numa_nodes=(0, 1))
    matrix = prefer(found, {"cpu:1": ["b", "a"], "gpu:0000:03:00.0": ["c"]})
    assert matrix["cpu:0"] == found["cpu:0"]
    assert matrix["cpu:1"] == NicChoice(("b", "a"), ("c",))
    assert choose_nics(matrix, "gpu:0000:03:00.0") == NicChoice(("c",), ("a", "b"))
    only = prefer(found, {ANYWHERE: ["c"]})
    assert choose_nics(only, "cpu:9") == NicChoice(("c",), ("a", "b"))
    with pytest.raises(
        ConfigError, match="rdma-near: this process does not use d; it uses a, b, c"
    ):
        prefer(found, {"cpu:0": ["a", "d"]})


def test_without_nics_there_is_nothing_to_choose() -> None:
    assert build_matrix([])["cpu:0"] == NicChoice((), ())


@pytest.mark.parametrize(
    ("gids", "index"),
    [
        ({0: (LINK_LOCAL, "RoCE v2"), 1: (v4(10, 0, 0, 1), "IB/RoCE v1"),
          2: (v4(10, 0, 0, 1), "RoCE v2")}, 2),
        ({0: (LINK_LOCAL, "RoCE v2"), 5: (GLOBAL_V6, "RoCE v2")}, 5),
        ({3: (LINK_LOCAL, "RoCE v2")}, 3),
        # A bond: its port has the link-local GIDs of both kinds before the address of the bond.
        ({0: (LINK_LOCAL, "IB/RoCE v1"), 1: (LINK_LOCAL, "RoCE v2"),
          2: (v4(10, 0, 0, 7), "IB/RoCE v1"), 3: (v4(10, 0, 0, 7), "RoCE v2")}, 3),
        # IPv6 only.
        ({0: (LINK_LOCAL, "IB/RoCE v1"), 1: (LINK_LOCAL, "RoCE v2"),
          2: (GLOBAL_V6, "IB/RoCE v1"), 3: (GLOBAL_V6, "RoCE v2")}, 3),
        # Two addresses of version 2: the first, whatever their order in the table.
        ({5: (v4(10, 0, 1, 1), "RoCE v2"), 3: (v4(10, 0, 0, 1), "RoCE v2")}, 3),
        ({2: (GLOBAL_V6, "RoCE v2"), 7: (v4(10, 0, 0, 1), "RoCE v2")}, 7),
        ({1: (v4(10, 0, 0, 1), "IB/RoCE v1")}, None),
        ({}, None),
    ],
)  # fmt: skip
def test_the_gid_that_is_routed_farthest(
    gids: dict[int, tuple[bytes, str]], index: int | None
) -> None:
    assert choose_gid(gids) == index


def test_the_same_rail_comes_first_then_the_same_name() -> None:
    remotes = {"a": v4(10, 0, 1, 9), "b": v4(10, 0, 0, 9), "c": v4(10, 0, 0, 8)}
    assert rank_remote(v4(10, 0, 0, 1), "c", remotes) == ["c", "b", "a"]
    assert rank_remote(v4(10, 0, 1, 1), "z", remotes)[0] == "a"


def test_where_memory_lies() -> None:
    text = "7f0000 default anon=6 N0=1 N1=5\n800000 default N0=2 kernelpagesize_kB=4\n"
    assert memory_location(text, 0x7F1000) == "cpu:1"
    assert memory_location(text, 0x800000) == "cpu:0"
    assert memory_location(text, 0x1000) == ANYWHERE
    assert memory_location("", 0x1000) == ANYWHERE


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """A machine with one NIC on NUMA node 1 and one GPU."""
    pci = tmp_path / "devices/pci0000:00/0000:00:01.0/0000:01:00.0"
    pci.mkdir(parents=True)
    (pci / "numa_node").write_text("1\n")
    port = tmp_path / "class/infiniband/mlx5_0/ports/1"
    (port / "gids").mkdir(parents=True)
    (port / "gid_attrs/types").mkdir(parents=True)
    (tmp_path / "class/infiniband/mlx5_0/device").symlink_to(pci)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "link_layer").write_text("Ethernet\n")
    (port / "gids/0").write_text("0000:0000:0000:0000:0000:0000:0000:0000\n")
    (port / "gids/3").write_text("0000:0000:0000:0000:0000:ffff:0a00:0001\n")
    (port / "gid_attrs/types/3").write_text("RoCE v2\n")
    for node in (0, 1):
        (tmp_path / f"devices/system/node/node{node}").mkdir(parents=True)
    gpu = tmp_path / "bus/pci/devices/0000:17:00.0"
    gpu.mkdir(parents=True)
    (gpu / "vendor").write_text("0x10de\n")
    (gpu / "class").write_text("0x030200\n")
    (gpu / "numa_node").write_text("0\n")
    return tmp_path


def test_what_sysfs_says(sysfs: Path) -> None:
    (port,) = topology.read_ports("mlx5_0", sysfs)
    assert (port.device, port.port, port.active, port.ethernet) == ("mlx5_0", 1, True, True)
    assert port.gids == {3: (v4(10, 0, 0, 1), "RoCE v2")}
    assert topology.list_rdma_devices(sysfs) == ["mlx5_0"]
    assert topology.read_numa_nodes(sysfs) == [0, 1]
    (nic,) = topology.read_rdma_places(sysfs)
    assert (nic.name, nic.numa_node) == ("mlx5_0", 1)
    assert nic.pci_path == ("pci0000:00", "0000:00:01.0", "0000:01:00.0")
    matrix = topology.read_matrix(["mlx5_0"], sysfs)
    assert set(matrix) == {"cpu:0", "cpu:1", "gpu:0000:17:00.0", ANYWHERE}
    assert matrix["cpu:1"] == NicChoice(("mlx5_0",), ())


def test_a_machine_without_any(tmp_path: Path) -> None:
    assert topology.list_rdma_devices(tmp_path) == []
    assert topology.read_numa_nodes(tmp_path) == [0]
    assert topology.read_matrix([], tmp_path)["cpu:0"] == NicChoice((), ())
