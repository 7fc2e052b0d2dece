"""A pool alone on three machines, by the commands in configs/serve/pool.yaml."""

from __future__ import annotations

import json
import re
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from tests.support.hosts.hosts import DISK, HOME, SHARED, Host, Program, hosts
from tests.support.model.checkpoints import write_config_only
from tests.support.waiting import LONG_S, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TOP = Path(__file__).parents[3]
OPERATING = TOP / "docs" / "operating.md"
EXAMPLE = TOP / "configs" / "serve" / "pool.yaml"
MOONCAKE = str(Path(sys.executable).parent / "mooncake")
DISK_BYTES = 20 * 2**20
FREE_BYTES = 2**20
NUM_VALUES = 4
VALUE_BYTES = 3 * 2**19
"""More than the disk has free, and with all others more than the memory of a node."""


class Pool:
    """Nodes by the settings of the example, with less memory, and with a small disk each."""

    def __init__(self, machines: Sequence[Host], model: str, disk: str = f"{HOME}/disk") -> None:
        self._secret = {"MOONCAKE_CLUSTER_SECRET": secrets.token_hex(16)}
        self._first = machines[0]
        told = yaml.safe_load(EXAMPLE.read_text())
        assert {"model", "kvstore-dram-bytes", "ssd", "tenant-quota"} <= told.keys()
        told |= {
            "model": model, "kvstore-dram-bytes": "4MiB", "ssd": f"{disk}/pool:16MiB",
            "tenant-quota": ["alice=1MiB"], "ssd-min-uses": 1, "ssd-write-at": 0,
        }  # fmt: skip
        for each in machines:
            each.path(f"{HOME}/pool.yaml").write_text(yaml.safe_dump(told))
            if disk != DISK:
                each.check("mkdir", disk)
                each.check("mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "disk", disk)

    def start(self, host: Host) -> Program:
        """Type the command of the file for this host."""
        first, further = re.findall(r"^#   mooncake (serve .*)$", EXAMPLE.read_text(), re.MULTILINE)
        line = first if host is self._first else further
        for told, own in (
            ("configs/serve/pool.yaml", "pool.yaml"),
            ("10.0.0.7", self._first.address), ("10.0.0.8", host.address),
        ):  # fmt: skip
            line = line.replace(told, own)
        return host.mooncake(*line.split(), environment=self._secret)

    def run(self, host: Host, *words: str) -> tuple[int, str]:
        """Run a command of `mooncake pool` on a host; return its exit code and what it prints, but
        for warnings, which a busy machine may cause.
        """
        quietly = ("sh", "-c", 'exec "$@" 2>>warnings', "sh", MOONCAKE, "pool", *words)
        program = host.run(*quietly, environment=self._secret)
        return program.process.wait(LONG_S), program.output

    def count(self, host: Host, name: str) -> float:
        """Return a count of a host's node, such as `ssd_blocks_written`."""
        code, said = self.run(host, "stats", "--json")
        assert code == 0, said
        return float(json.loads(said)["counters"][name])


def test_three_machines_lend_memory_and_one_has_a_full_disk(tmp_path: Path) -> None:
    """What one machine puts the others get, also once it has gone. A disk that is full costs only
    what would go there.
    """
    model = write_config_only(tmp_path / "shared" / "small")
    with hosts(3, tmp_path / "hosts", tmp_path / "shared") as machines:
        a, b, c = machines
        pool = Pool(machines, f"{SHARED}/{model.name}")
        nodes = {each.name: pool.start(each) for each in machines}
        for each in (b, c):
            nodes[each.name].wait_for("has joined the pool")
        a.path(f"{HOME}/notes.txt").write_text("shared")
        assert pool.run(a, "put", "notes", "notes.txt")[0] == 0
        for each in (b, c):
            assert pool.run(each, "get", "notes") == (0, "shared")
        assert pool.run(b, "replicate", "notes", "--nodes", "3")[1] == "notes: on 3 nodes\n"

        a.vanish()
        c.path(f"{HOME}/disk/other").write_bytes(bytes(DISK_BYTES - FREE_BYTES))
        for number in range(NUM_VALUES):
            c.path(f"{HOME}/value").write_bytes(bytes([number]) * VALUE_BYTES)
            code, said = pool.run(c, "put", f"value {number}", "value")
            assert code == 0, said
        wait_until(lambda: pool.count(c, "ssd_blocks_no_room") > 0, "the disk is full")
        newest = f"value {NUM_VALUES - 1}"
        assert pool.run(c, "get", newest, "--out", "found")[0] == 0
        assert c.path(f"{HOME}/found").read_bytes() == c.path(f"{HOME}/value").read_bytes()
        assert pool.run(b, "get", "notes") == (0, "shared")
        assert [nodes[each.name].process.poll() for each in (b, c)] == [None, None]


def test_a_disk_that_stands_still_holds_up_nothing_else(tmp_path: Path) -> None:
    """While nothing comes back from the disk of a node, others reach what is in its memory, and
    puts go on. Afterwards the disk is used again.
    """
    model = write_config_only(tmp_path / "shared" / "small")
    with hosts(2, tmp_path / "hosts", tmp_path / "shared") as machines:
        a, b = machines
        pool = Pool(machines, f"{SHARED}/{model.name}", DISK)
        nodes = [pool.start(each) for each in machines]
        nodes[1].wait_for("has joined the pool")
        b.slow_disk(10**6)
        for number in range(NUM_VALUES):
            value = bytes([number]) * VALUE_BYTES
            b.path(f"{HOME}/value").write_bytes(value)
            code, said = pool.run(b, "put", f"value {number}", "value")
            assert code == 0, said
            assert pool.run(a, "get", f"value {number}", "--out", "found")[0] == 0
            assert a.path(f"{HOME}/found").read_bytes() == value
        assert pool.count(b, "ssd_blocks_written") == 0
        b.slow_disk(0.0)
        wait_until(lambda: pool.count(b, "ssd_blocks_written") > 0, "the disk is used again")
        assert [each.process.poll() for each in nodes] == [None, None]


def test_a_disk_is_replaced_by_the_steps_of_the_page(tmp_path: Path) -> None:
    """Nothing is lost, for the node hands its blocks on first. Then the new disk is used."""
    model = write_config_only(tmp_path / "shared" / "small")
    [drain] = re.findall(
        r"^1\. `mooncake pool (.*)`, then end", OPERATING.read_text(), re.MULTILINE
    )
    with hosts(2, tmp_path / "hosts", tmp_path / "shared") as machines:
        a, b = machines
        pool = Pool(machines, f"{SHARED}/{model.name}", DISK)
        pool.start(a).wait_for("clients and other nodes")
        node = pool.start(b)
        node.wait_for("has joined the pool")
        b.path(f"{HOME}/value").write_bytes(bytes(range(256)) * 2**11)
        assert pool.run(b, "put", "value", "value")[0] == 0
        wait_until(lambda: pool.count(b, "ssd_blocks_written") > 0, "the old disk is used")

        assert pool.run(b, *drain.replace("HOST", "127.0.0.1").split())[0] == 0
        assert node.stop() == 0, node.output
        b.check("mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "new", DISK)
        pool.start(b).wait_for("has joined the pool")
        assert pool.count(b, "ssd_blocks_found") == 0
        assert pool.run(b, "get", "value", "--out", "found")[0] == 0
        assert b.path(f"{HOME}/found").read_bytes() == b.path(f"{HOME}/value").read_bytes()
        assert pool.run(b, "put", "one more", "value")[0] == 0
        wait_until(lambda: pool.count(b, "ssd_blocks_written") > 0, "the new disk is used")


def test_a_node_whose_disk_is_not_mounted_does_not_start(tmp_path: Path) -> None:
    """By the directory that the page names: with the mount point alone, the node would fill the
    disk of the system. Once the disk is mounted, the same command starts the node.
    """
    model = write_config_only(tmp_path / "shared" / "small")
    [(made, named)] = re.findall(
        r"`mkdir (/mnt/disk/\w+)`, then `--ssd (/mnt/disk\S+):SIZE`", OPERATING.read_text()
    )
    point = f"{HOME}/disk"
    mount = ("mount", "--bind", DISK, point)
    with hosts(1, tmp_path / "hosts", tmp_path / "shared") as [host]:
        pool = Pool([host], f"{SHARED}/{model.name}", DISK)
        file = host.path(f"{HOME}/pool.yaml")
        own = named.replace("/mnt/disk", point)
        file.write_text(file.read_text().replace(f"{DISK}/pool", own))
        host.check("mkdir", point)
        host.check(*mount)
        host.check("mkdir", made.replace("/mnt/disk", point))
        host.check("umount", point)
        node = pool.start(host)
        node.wait_for("is not there; create it, or mount the disk first")
        assert node.process.wait(LONG_S) == 2
        host.check("rmdir", point)  # nothing was made there
        host.check("mkdir", point)
        host.check(*mount)
        node = pool.start(host)
        node.wait_for("clients and other nodes")
        assert node.stop() == 0, node.output
        host.check("test", "-d", f"{DISK}/blocks/pool")
