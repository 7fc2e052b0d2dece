"""Several pool nodes with disks, as processes of their own: what is removed through one is gone
from all, whoever is killed, restarted or away; pins and figures are those of the whole pool.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from mooncake.base import MooncakeError, Tier
from mooncake.base.pool_messages import LastingPin
from mooncake.cli import main as cli
from mooncake.launch.pool_client.session import PoolSession
from tests.support.kvstore.forked_node import ForkedNode
from tests.support.kvstore.pool_process import SECRET, until
from tests.support.kvstore.pool_traffic import blocks_of
from tests.support.model.checkpoints import write_config_only
from tests.support.ports import free_port

NAMES = ("gateway", "b", "c")


class Pool:
    """A gateway whose process is a node too, and two nodes that join it; each with a disk to which
    every block goes at once.
    """

    def __init__(self, home: Path) -> None:
        self._home = home
        self._model = write_config_only(home / "model")
        self._port = str(free_port())
        self.nodes: dict[str, ForkedNode] = {}
        self._num_boots = 0
        for name in NAMES:
            self.start(name)

    def start(self, name: str) -> None:
        """Start a node, for the first time or again, over the disk it had."""
        self._num_boots += 1
        where = ("--join-port", self._port)
        if name != "gateway":
            where = ("--join", f"tcp://127.0.0.1:{self._port}")
        self.nodes[name] = ForkedNode(
            self._model, self._home / f"log{self._num_boots}", "--dram", "1MiB",
            "--ssd", f"{self._home / name}:8MiB", "--ssd-min-uses", "1", "--ssd-write-at", "0",
            "--node-id", name, *where,
        )  # fmt: skip

    def kill(self, name: str) -> None:
        self.nodes.pop(name).stop(signal.SIGKILL)

    def session(self, name: str) -> PoolSession:
        return self.nodes[name].session(store_address="", node_id=name)

    def run(self, *words: str, at: str = "gateway") -> int:
        """`mooncake pool WORDS`"""
        return cli.run(["pool", *words, "--url", self.nodes[at].url, "--cluster-secret", SECRET])

    def close(self) -> None:
        for node in self.nodes.values():
            node.__exit__(None, None, None)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    pool = Pool(tmp_path_factory.mktemp("pool"))
    yield pool
    pool.close()


@pytest.fixture
def session(pool: Pool) -> Iterator[PoolSession]:
    """A client of the gateway, once all nodes have joined and answer."""
    with pool.session("gateway") as session:
        session.connect()
        until(lambda: num_well(session) == len(NAMES), "all nodes have joined")
        yield session


def num_well(session: PoolSession) -> int:
    return sum(not isinstance(state, MooncakeError) for _, state in session.stat_all())


def nodes_of(session: PoolSession, key: bytes, tier: Tier) -> set[str]:
    """Return the nodes that hold a block in one tier."""
    [found] = session.replicas([key])
    ids = {one.store.worker_id for one in found if one.copy.tier is tier}
    return {name.removeprefix("kvstore-") for name in ids}


def test_what_is_removed_is_gone_from_all_nodes_also_from_one_that_was_away(
    pool: Pool, session: PoolSession
) -> None:
    blocks = blocks_of(session, range(1, 4))
    keys = list(blocks)
    with pool.session("b") as other:
        other.connect()
        other.put(blocks)
    until(lambda: session.replicate(keys, 3) == 3, "a copy on every node")
    until(lambda: nodes_of(session, keys[0], Tier.SSD) >= {"b"}, "its first node has it on disk")
    assert nodes_of(session, keys[0], Tier.DRAM) == set(NAMES)
    assert session.remove(keys[2:]) == [True]
    pool.kill("b")
    assert session.remove(keys[:2]) == [True, True], "though one died a moment ago"
    assert session.remove(keys) == [False] * 3
    pool.start("b")
    pool.kill("c")
    pool.start("c")
    until(lambda: num_well(session) == len(NAMES), "both are back")
    assert session.replicas(keys) == [[], [], []]
    assert session.get(keys) == []


def test_pins_hold_on_all_nodes_and_after_their_client(pool: Pool, session: PoolSession) -> None:
    blocks = blocks_of(session, range(11, 13))
    keys = list(blocks)
    session.put(blocks)
    until(lambda: session.replicate(keys, 3) == 3, "a copy on every node")
    with pool.session("c") as other:
        other.connect()
        pinned = other.pin([*keys, b"not there".ljust(16)], hard=True)
    assert pinned.blocks == [True, True, False]
    assert len(pinned.epochs) == len(NAMES)
    assert session.remove(keys) == [False, False], "they protect it"
    assert session.unpin(keys, ["an earlier boot"]).blocks == [False, False]
    assert session.unpin(keys, pinned.epochs[:1]).epochs == pinned.epochs[:1]
    pins = [one.copy.pin for one in session.replicas(keys[:1])[0] if one.copy.tier is Tier.DRAM]
    assert sorted(pins) == [LastingPin.HARD, LastingPin.HARD, LastingPin.NONE]
    assert session.unpin(keys).blocks == [True, True]
    assert session.remove(keys) == [True, True]


def test_a_tenants_value_is_found_pinned_and_evicted_through_any_node(
    pool: Pool, session: PoolSession, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    value = bytes(range(256)) * 200
    with pool.session("b") as other:
        other.connect()
        assert other.put_value("thing", value, "alice")
        until(lambda: nodes_of(other, other.value_keys("thing", "alice")[0], Tier.SSD) == {"b"},
              "it is on its disk")  # fmt: skip

    def run(*words: str, at: str = "gateway", tenant: str = "alice") -> tuple[int, bytes]:
        capsysbinary.readouterr()
        code = pool.run(*words, "--tenant", tenant, at=at)
        return code, capsysbinary.readouterr().out

    assert not session.remove_value("thing", "bob"), "another tenant's"
    assert run("where", "thing", tenant="bob") == (1, b"nowhere\n")
    code, out = run("where", "thing", "--json", at="c")
    shown = json.loads(out)
    nodes = {one["worker"] for block in shown["blocks"] for one in block["replicas"]}
    assert (code, nodes, shown["num_missing"]) == (0, {"kvstore-b"}, 0)
    pool.kill("b")
    pool.start("b")
    until(lambda: num_well(session) == len(NAMES), "it is back")
    until(lambda: session.get_value("thing", "alice") == value, "its disk is scanned")
    assert run("pin", "thing", "--hard")[0] == 0, "what lies on its disk, too"
    assert b"hard" in run("where", "thing", at="c")[1]
    assert run("evict", "thing")[0] == 1
    assert run("unpin", "thing", at="c")[0] == 0
    assert run("evict", "thing", at="c")[0] == 0
    assert session.get_value("thing", "alice") is None


def test_the_figures_of_the_whole_pool(
    pool: Pool, session: PoolSession, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert pool.run("stats", "--all", "--json") == 0
    shown = json.loads(capsysbinary.readouterr().out)
    assert {node["worker"] for node in shown["nodes"]} == {f"kvstore-{name}" for name in NAMES}
    sums = [sum(node[name] for node in shown["nodes"]) for name in ("dram_blocks", "ssd_blocks")]
    assert [shown["total"][name] for name in ("dram_blocks", "ssd_blocks")] == sums
    assert shown["total"]["nodes"] == len(NAMES)
    assert pool.run("stats", "--all") == 0
    assert capsysbinary.readouterr().out.count(b"\n") == 2 + len(NAMES)
    assert len(session.stat_all()) == len(NAMES)
