"""A pool of several nodes, as processes of their own, of which one after the other is killed in
mid-put and mid-get: its clients go on at the others, without an error, and see no wrong byte.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from mooncake.base import MooncakeError
from mooncake.launch.pool_client.session import locate
from tests.support.kvstore.forked_node import ForkedNode
from tests.support.kvstore.pool_process import SECRET, until
from tests.support.kvstore.pool_traffic import Traffic, blocks_of, check_nothing_is_held
from tests.support.model.checkpoints import write_config_only
from tests.support.ports import free_port
from tests.support.waiting import LONG_S

NUM_KILLS = int(os.environ.get("MOONCAKE_NUM_KILLS", "2"))
NUM_KEYS = 60
CALL_S = 60.0
"""Most that a call takes. A node that says nothing is left much sooner."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose blocks are of 144 KiB: a put takes long enough to be interrupted."""
    changes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_hidden_layers": 2}
    return write_config_only(tmp_path_factory.mktemp("model") / "wide", **changes)


class Pool:
    """A gateway whose process is a node too, and nodes that join it."""

    def __init__(self, model: Path, home: Path) -> None:
        self._model = model
        self._home = home
        self._port = str(free_port())
        self._nodes: dict[str, ForkedNode] = {}
        self._num_boots = 0

    def start(self, name: str) -> ForkedNode:
        """Start a node, for the first time or again."""
        self._num_boots += 1
        where = ("--join-port", self._port)
        if name != "gateway":
            where = ("--join", f"tcp://127.0.0.1:{self._port}")
        log = self._home / f"log{self._num_boots}"
        words = ("--dram", "16MiB", "--node-id", name, *where)
        node = self._nodes[name] = ForkedNode(self._model, log, *words)
        return node

    def kill(self, name: str) -> None:
        self._nodes.pop(name).stop(signal.SIGKILL)

    def close(self) -> None:
        for node in self._nodes.values():
            node.__exit__(None, None, None)


@pytest.fixture
def pool(model: Path, tmp_path: Path) -> Iterator[Pool]:
    with ExitStack() as opened:
        pool = Pool(model, tmp_path)
        opened.callback(pool.close)
        yield pool


def knows(client: Traffic, count: int) -> bool:
    """Whether a client knows so many nodes."""
    return len(client.session.nodes) == count


def go_on(clients: list[Traffic], count: int, what: str) -> None:
    """Wait until each client has done so much more, and without an error."""
    until_ok = [client.num_ok + count for client in clients]

    def done() -> bool:
        pairs = list(zip(clients, until_ok, strict=True))
        assert not any(client.num_errors for client, _ in pairs), "a client gave up"
        return all(client.num_ok >= wanted for client, wanted in pairs)

    until(done, what)


def test_clients_go_on_while_nodes_are_killed(pool: Pool) -> None:
    chance = random.Random(3)
    nodes = {name: pool.start(name) for name in ("gateway", "b", "c")}
    ways = [("b", "tcp"), ("b", "shm"), ("c", "tcp")]
    clients = [
        Traffic(nodes[at].session(transfer_protocols=[way], timeout_s=CALL_S), seed, NUM_KEYS)
        for seed, (at, way) in enumerate(ways)
    ]
    for client in clients:
        client.start()
    for number in range(NUM_KILLS):
        until(lambda: all(knows(client, 3) for client in clients), "clients know all nodes")
        go_on(clients, 1, "bytes move")
        threading.Event().wait(chance.random() * 0.1)  # then at any moment
        victim = "bc"[number % 2]
        pool.kill(victim)
        go_on(clients, 4, "all go on")
        pool.start(victim)
    for client in clients:
        client.stop()
        client.join(LONG_S)
        assert (client.wrong, client.num_errors) == ([], 0)
        client.session.close()
    with nodes["gateway"].session() as session:
        check_nothing_is_held(session)


def test_nodes_may_start_before_the_gateway_they_join(pool: Pool) -> None:
    early = pool.start("b")
    with early.session(timeout_s=CALL_S) as session:
        blocks = blocks_of(session, range(4))
        assert session.put(blocks) == list(blocks), "it serves those who know it"
        gateway = pool.start("gateway")
        with gateway.session(timeout_s=CALL_S) as other:
            until(lambda: len(other.nodes) == 2, "the gateway knows both nodes")
            found = list(blocks.values())
            until(lambda: other.get(list(blocks)) == found, "and what was put before it came")


def test_a_node_is_killed_whose_blocks_were_copied(pool: Pool) -> None:
    gateway = pool.start("gateway")
    others = [pool.start("b"), pool.start("c")]
    with others[0].session(timeout_s=CALL_S) as session, gateway.session() as asker:
        until(lambda: len(session.nodes) == 3, "the client knows all nodes")
        blocks = blocks_of(session, range(8))
        assert session.put(blocks) == list(blocks)
        assert session.replicate(list(blocks), 2) == 2
        assert session.replicate(list(blocks), 2) == 2, "they stay as many"
        pool.kill("b")
        assert session.get(list(blocks)) == list(blocks.values())
        assert session.replicate(list(blocks), 2) == 2, "there are as many as were wanted again"
        check_nothing_is_held(asker)


def test_the_gateway_is_killed_and_comes_back(pool: Pool) -> None:
    """With it the registry goes, which is the directory, and a node that clients use."""
    gateway, other = pool.start("gateway"), pool.start("b")
    config = locate(gateway.url, SECRET)
    with gateway.session(timeout_s=CALL_S) as session, other.session(timeout_s=CALL_S) as direct:
        until(lambda: len(session.nodes) == 2, "the client knows both nodes")
        blocks, data = blocks_of(session, range(8)), random.Random(1).randbytes(500_000)
        assert direct.put(blocks) == list(blocks)
        found = list(blocks.values())
        until(lambda: session.get(list(blocks)) == found, "from the other node, once it is known")
        client = Traffic(gateway.session(timeout_s=CALL_S), 1, NUM_KEYS)
        until(lambda: knows(client, 2), "so does this one")
        client.start()
        until(lambda: client.num_ok > 3, "bytes move")
        pool.kill("gateway")
        assert session.put_value("thing", data)
        go_on([client], 4, "it goes on without the gateway")
        until(lambda: session.get(list(blocks)) == found, "the other node is asked itself")
        gateway = pool.start("gateway")
        assert locate(gateway.url, SECRET).gateway_address == config.gateway_address
        with gateway.session() as fresh:
            count = "blocks_put"
            until(lambda: fresh.stat().load.counters[count] > 0, "it is used again")
            until(lambda: fresh.get(list(blocks)) == found, "its directory is whole again")
        client.stop()
        client.join(LONG_S)
        assert (client.wrong, client.num_errors) == ([], 0)
        client.session.close()
        until(lambda: session.get_value("thing") == data, "what was put meanwhile")


def test_when_no_node_is_left_an_error_says_so_in_time(pool: Pool) -> None:
    gateway, _ = pool.start("gateway"), pool.start("b")
    with gateway.session(timeout_s=2.0) as session:
        until(lambda: len(session.nodes) == 2, "the client knows both nodes")
        names = session.nodes
        blocks = blocks_of(session, range(4))
        session.put(blocks)
        pool.kill("b")
        pool.kill("gateway")
        with pytest.raises(MooncakeError, match="does not answer") as caught:
            session.get(list(blocks))
        assert any(name in caught.value.message for name in names)
