"""A client of several pool nodes on simulated wires: nodes and the gateway die at any moment, calls
end in time, and never with wrong bytes.
"""

from __future__ import annotations

from random import Random

import pytest

from mooncake.base import (
    MooncakeError,
    PeerLost,
    PinBlocks,
    PutStart,
    Role,
    SeededIds,
    Unavailable,
    WorkerHello,
    WorkerRef,
    rights,
)
from mooncake.base.pool_messages import FindReplicas, ForgetBlocks
from mooncake.kvstore.client.calls import Attempt
from mooncake.kvstore.client.client import ClientPorts, PoolClient
from mooncake.kvstore.client.failover import FailoverClient
from mooncake.kvstore.client.nodes import REFRESH_S, SUSPECT_S
from mooncake.kvstore.config import KvStoreConfig, SsdConfig
from mooncake.kvstore.node.node import KvNode
from mooncake.scheduler.config import SchedulerConfig
from mooncake.scheduler.gateway.gateway import Gateway
from mooncake.scheduler.placement.conductor import Conductor
from mooncake.sim.world.clock import EventHeap
from mooncake.sim.world.disk import SimDiskConfig, SimDisks, SimMedium
from mooncake.sim.world.network import Endpoint, Network, NetworkConfig, SimChannel, SimTransfer
from mooncake.sim.world.process import SimProcess
from mooncake.telemetry.events import EventList
from tests.support.kvstore.node_world import BLOCK, LAYOUT, keys

NUM_PLACES = 8
TIMEOUT_S = 4.0
SLACK_S = 0.1
"""Over its time a call may take what calling off a transfer takes."""


WIRES = {"questions": False}


@pytest.fixture(autouse=True, params=[False, True], ids=["pins", "questions"])
def wires(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes take questions over the data connection, or not, as those of earlier releases."""
    monkeypatch.setitem(WIRES, "questions", request.param)


class Scene:
    """A gateway, pool nodes kv0, kv1, ... on nodes n0, n1, ..., and a client on n0. Wires are so
    slow that a block takes a millisecond.
    """

    def __init__(
        self, num_nodes: int = 3, heartbeat_timeout_s: float = 2.0, ssd_blocks: int = 0, **settings
    ) -> None:
        """`ssd_blocks`: each node has a disk of so many, which outlives it."""
        self.heartbeat_timeout_s = heartbeat_timeout_s
        self.ssd_blocks = ssd_blocks
        self.settings = {"dram_bytes": 32 * BLOCK, "quarantine_s": 1.0, **settings}
        self.media: dict[str, list[SimMedium]] = {}
        self.heap = EventHeap()
        rate = BLOCK / 1e-3
        config = NetworkConfig(
            encode=True, failure_s=0.01, link_bytes_per_s=rate, local_bytes_per_s=rate, **WIRES
        )
        self.network = Network(self.heap, config, Random(1))
        self.asked: list[FindReplicas] = []
        self.network.listener = lambda _from, _to, message: (
            self.asked.append(message) if isinstance(message, FindReplicas) else None
        )
        self.processes: dict[str, SimProcess] = {}
        self.nodes: dict[str, KvNode] = {}
        self.boots = 0
        self.gateway = self.boot_gateway()
        for number in range(num_nodes):
            self.boot_node(number)
        channel, transfer, process, hello = self._worker("client", Role.CLIENT, "n0")
        region = transfer.allocate(NUM_PLACES * BLOCK, "mine")
        self.memory = region.buffer
        ports = ClientPorts(channel, transfer, region, "gateway")
        self.inner = PoolClient(hello, LAYOUT, ports)
        self.client = FailoverClient(self.inner, TIMEOUT_S)
        process.start(self.client)
        self.run(1.0)
        self.asked.clear()

    def _endpoint(self, name: str, node: str) -> tuple[Endpoint, SimProcess]:
        process = self.processes[name] = SimProcess(name, self.heap)
        endpoint = Endpoint(name, node, process.deliver)
        self.network.attach(endpoint)
        return endpoint, process

    def boot_gateway(self) -> Gateway:
        endpoint, process = self._endpoint("gateway", "front")
        self.boots += 1
        config = SchedulerConfig(heartbeat_timeout_s=self.heartbeat_timeout_s)
        self.gateway = Gateway(
            config, WorkerRef("gateway", f"g{self.boots}", "gateway"),
            Conductor(config, SeededIds(1)), SimChannel(self.network, endpoint), SeededIds(2),
            EventList(),
        )  # fmt: skip
        process.start(self.gateway)
        return self.gateway

    def _worker(
        self, name: str, role: Role, node: str
    ) -> tuple[SimChannel, SimTransfer, SimProcess, WorkerHello]:
        """Every boot has an address of its own."""
        self.boots += 1
        address = f"{name}.{self.boots}"
        endpoint, process = self._endpoint(address, node)
        hello = WorkerHello(
            worker=WorkerRef(name, f"e{self.boots}", address), role=role, node_id=node, host=node,
            pid=1, layout_fingerprint=LAYOUT.fingerprint, block_tokens=4, num_blocks=0,
        )  # fmt: skip
        transfer = SimTransfer(self.network, endpoint, with_bytes=True)
        return SimChannel(self.network, endpoint), transfer, process, hello

    def boot_node(self, number: int) -> None:
        name = f"kv{number}"
        channel, transfer, process, hello = self._worker(name, Role.KVSTORE, f"n{number}")
        sizes = [self.ssd_blocks] if self.ssd_blocks else []
        media = self.media.setdefault(name, [SimMedium() for _ in sizes])
        disks = SimDisks(self.heap, SimDiskConfig(), media, sizes, LAYOUT, process.deliver)
        ssd = [SsdConfig(directory="/0", num_bytes=size * BLOCK) for size in sizes]
        config = KvStoreConfig(ssd=ssd, **self.settings)
        self.nodes[name] = KvNode(config, hello, LAYOUT, channel, transfer, "gateway", disks)
        process.start(self.nodes[name])

    def address(self, name: str) -> str:
        [address] = [one for one in self.processes if one.split(".")[0] == name]
        return address

    def kill(self, name: str) -> None:
        address = self.address(name)
        self.processes.pop(address).kill()
        self.network.detach(address)
        self.nodes.pop(name, None)

    def run(self, seconds: float) -> None:
        self.heap.run_until(self.heap.now() + seconds)
        for machine in (*self.nodes.values(), self.client, self.gateway):
            machine.check_integrity()

    def begin(self, name: str, *args, **extra) -> list:
        """Begin a call; return where (its one answer, the seconds it took) will be."""
        ended: list = []
        began_s = self.heap.now()

        def done(answer) -> None:
            ended.append((answer, self.heap.now() - began_s))

        of = self.client if hasattr(self.client, name) else self.client.broadcast
        self.client.run(getattr(of, name)(*args, **extra), done, began_s)
        self.processes[self.address("client")].wake(began_s)
        return ended

    def end(self, ended: list):
        """Return the answer of a call, which came once and in time."""
        self.run(TIMEOUT_S + SLACK_S)
        [(answer, took_s)] = ended
        assert took_s <= TIMEOUT_S + SLACK_S
        return answer

    def call(self, name: str, *args, **extra):
        return self.end(self.begin(name, *args, **extra))

    def fill(self, *numbers: int) -> list[int]:
        """Put the one content that each block may have to the first places."""
        for place, number in enumerate(numbers):
            self.memory[place * BLOCK : (place + 1) * BLOCK] = content(number)
        return offsets(len(numbers))

    def found(self, *numbers: int) -> bool:
        """Whether these blocks lie at the first places."""
        return bytes(self.memory[: len(numbers) * BLOCK]) == b"".join(map(content, numbers))

    def store(self, name: str, *numbers: int) -> None:
        """Have one node hold these blocks."""
        answers: list = []
        now = self.heap.now()
        at = Attempt(WorkerRef("", "", self.address(name)), now + 1.0)
        places = self.inner.places(keys(*numbers), self.fill(*numbers))

        async def put():
            return await self.inner.write(at, keys(*numbers), places)

        self.inner.run(put(), answers.append, now)
        self.run(1.0)
        assert answers == [keys(*numbers)]
        self.memory[:] = bytes(len(self.memory))


def content(number: int) -> bytes:
    return Random(number).randbytes(BLOCK)


def offsets(count: int) -> list[int]:
    return [place * BLOCK for place in range(count)]


@pytest.fixture
def scene() -> Scene:
    return Scene()


RUN = (1, 2, 3, 4, 5)
MOMENTS = [0.0, 1.5e-4, 2.5e-4, 1e-3, 3.3e-3, 5e-3]
"""Before the node has heard, before it has answered, while bytes move, and after them."""


def test_the_own_node_is_used_while_it_lives(scene: Scene) -> None:
    assert scene.call("put_from", keys(*RUN), scene.fill(*RUN)) == keys(*RUN)
    assert [scene.nodes[name].stores(keys(1)[0]) for name in ("kv0", "kv1", "kv2")] == [
        True, False, False,
    ]  # fmt: skip
    assert scene.call("get_into", keys(*RUN), offsets(5)) == 5
    assert scene.found(*RUN)
    assert scene.asked == [], "nobody else was needed"


@pytest.mark.parametrize("name", ["stat", "drain", "get_into", "put_from", "exists"])
def test_without_a_pool_calls_fail_at_once(name: str) -> None:
    scene = Scene(num_nodes=0)
    args = {"get_into": (keys(1), [0]), "put_from": (keys(1), [0]), "exists": (keys(1),)}
    ended = scene.begin(name, *args.get(name, ()))
    scene.run(0.1)
    [(error, _)] = ended
    assert isinstance(error, Unavailable)


@pytest.mark.parametrize("after_s", MOMENTS)
def test_a_put_goes_to_another_node_when_its_own_dies(scene: Scene, after_s: float) -> None:
    ended = scene.begin("put_from", keys(*RUN), scene.fill(*RUN))
    scene.heap.run_until(scene.heap.now() + after_s)
    scene.kill("kv0")
    assert scene.end(ended) == keys(*RUN)
    scene.run(3.0)
    for node in scene.nodes.values():
        assert node.quiet, "nothing is left open"
    if after_s < 5e-3:  # else it was stored before
        assert scene.call("get_into", keys(*RUN), offsets(5)) == 5
        assert scene.found(*RUN)


@pytest.mark.parametrize("after_s", MOMENTS)
def test_a_get_goes_to_a_replica_when_its_node_dies(scene: Scene, after_s: float) -> None:
    scene.store("kv0", *RUN)
    scene.store("kv2", *RUN)
    ended = scene.begin("get_into", keys(*RUN), offsets(5))
    scene.heap.run_until(scene.heap.now() + after_s)
    scene.kill("kv0")
    assert scene.end(ended) == 5
    assert scene.found(*RUN)
    assert scene.nodes["kv2"].quiet


def test_a_run_that_lies_at_several_nodes_comes_from_all_of_them(scene: Scene) -> None:
    scene.store("kv0", 1, 2)
    scene.store("kv1", 3)
    scene.store("kv2", 4, 5)
    assert scene.call("get_into", keys(*RUN, 6), offsets(6)) == 5
    assert scene.found(*RUN)


def test_a_match_counts_what_all_nodes_hold_together(scene: Scene) -> None:
    assert scene.call("match", keys(*RUN)) == 0
    scene.store("kv1", 1, 2)
    assert scene.call("match", keys(*RUN)) == 2
    scene.store("kv2", 3)
    scene.store("kv0", 4)
    assert scene.call("match", keys(*RUN)) == 4
    assert scene.call("match", keys(9, *RUN)) == 0
    assert scene.call("match", keys(1, 2)) == 2


def test_a_match_without_a_gateway_asks_the_node_that_puts_go_to(scene: Scene) -> None:
    scene.store("kv0", 1, 2)
    scene.kill("gateway")
    assert scene.call("match", keys(*RUN)) == 2
    assert scene.call("match", keys(1, 2)) == 2


def test_a_block_that_no_node_has_is_a_miss_and_no_error(scene: Scene) -> None:
    assert scene.call("get_into", keys(77), [0]) == 0
    scene.kill("kv0")
    assert scene.call("get_into", keys(77), [0]) == 0


def test_a_client_that_knows_one_node_asks_a_gateway_for_holders_of_missing_blocks() -> None:
    scene = Scene()
    scene.store("kv1", *RUN)
    fresh = FailoverClient(scene.inner, TIMEOUT_S)
    ended: list = []
    fresh.run(fresh.get_into(keys(*RUN), offsets(5)), ended.append, scene.heap.now())
    scene.run(TIMEOUT_S)
    assert ended == [5]
    assert scene.found(*RUN)


def test_a_miss_on_a_lone_node_asks_no_other() -> None:
    scene = Scene(num_nodes=1)
    assert scene.call("get_into", keys(77), [0]) == 0
    assert scene.asked == []


def test_a_node_that_hangs_is_left_in_time_and_found_again() -> None:
    scene = Scene(heartbeat_timeout_s=30.0)  # nobody says that it is lost
    scene.processes[scene.address("kv0")].hang(TIMEOUT_S)
    assert scene.call("put_from", keys(8, 9), scene.fill(8, 9)) == keys(8, 9)
    assert not scene.nodes["kv0"].stores(keys(8)[0])
    scene.run(SUSPECT_S)
    assert scene.call("put_from", keys(10), scene.fill(10)) == keys(10)
    assert scene.nodes["kv0"].stores(keys(10)[0]), "it is not suspected for ever"


def test_when_no_node_is_left_the_error_says_so(scene: Scene) -> None:
    names = [scene.address(name) for name in scene.nodes]
    ended = scene.begin("get_into", keys(*RUN), offsets(5))
    for name in list(scene.nodes):
        scene.kill(name)
    error = scene.end(ended)
    assert isinstance(error, MooncakeError)
    assert any(name in error.message for name in names)
    for name in ("kv0", "kv1", "kv2"):
        scene.gateway.worker_lost(name, scene.heap.now())
    scene.run(0.1)
    ended = scene.begin("put_from", keys(1), scene.fill(1))
    scene.run(0.1)
    [(error, _)] = ended
    assert isinstance(error, Unavailable), "known to be lost: at once"


def test_without_a_gateway_the_nodes_known_are_turned_to(scene: Scene) -> None:
    scene.store("kv0", *RUN)
    scene.store("kv2", *RUN)
    scene.kill("gateway")
    ended = scene.begin("get_into", keys(*RUN), offsets(5))
    scene.heap.run_until(scene.heap.now() + 1e-3)
    scene.kill("kv0")
    assert scene.end(ended) in (0, 5), "kv1 may be asked first, and has none of it"
    assert scene.call("put_from", keys(8, 9), scene.fill(8, 9)) == keys(8, 9)
    for _ in range(10):  # nobody says that kv0 is lost, but no call waits for it again
        ended = scene.begin("get_into", keys(77), [0])
        scene.run(1.7)
        [(answer, took_s)] = ended
        assert answer == 0
        assert took_s < 0.1


def test_a_front_that_dies_with_its_node_and_comes_back(scene: Scene) -> None:
    scene.store("kv1", *RUN)
    scene.kill("gateway")
    scene.kill("kv0")
    assert scene.call("put_from", keys(8), scene.fill(8)) == keys(8)
    scene.boot_gateway()
    scene.boot_node(0)
    scene.run(2.0)
    assert scene.client.own_store.address == scene.address("kv0"), "at its new address"
    scene.run(SUSPECT_S)
    assert scene.call("put_from", keys(9), scene.fill(9)) == keys(9)
    assert scene.nodes["kv0"].stores(keys(9)[0])
    assert scene.call("get_into", keys(*RUN), offsets(5)) == 5, "the new directory is whole"
    assert scene.found(*RUN)


def test_a_node_that_was_named_comes_back_at_another_address(scene: Scene) -> None:
    """A client that was told an address learns who is there, and follows."""
    scene.inner._store = WorkerRef("", "", scene.address("kv2"))
    scene.run(REFRESH_S)
    scene.kill("kv2")
    scene.gateway.worker_lost("kv2", scene.heap.now())
    assert scene.call("exists", keys(1)) == [None]
    scene.boot_node(2)
    scene.run(REFRESH_S)
    assert scene.call("put_from", keys(1), scene.fill(1)) == keys(1)
    assert scene.nodes["kv2"].stores(keys(1)[0])


def test_a_client_follows_the_blocks_not_the_word_of_a_loss(scene: Scene) -> None:
    """A lost node that was only paused is used again once a gateway names it."""
    lost = PeerLost(worker=scene.client.own_store)
    scene.client.handle(lost, scene.heap.now())
    scene.run(2.0)
    assert scene.call("put_from", keys(1), scene.fill(1)) == keys(1)
    assert scene.nodes["kv0"].stores(keys(1)[0])


@pytest.mark.parametrize("seed", range(8))
def test_nodes_come_and_go_and_nothing_wrong_is_ever_got(seed: int) -> None:
    chance, scene = Random(seed), Scene()
    down: dict[str, float] = {}
    joined_s = num_got = 0
    for _ in range(60):
        now = scene.heap.now()
        for name in [name for name, back_s in down.items() if back_s <= now]:
            del down[name]
            joined_s = now
            if name == "gateway":
                scene.boot_gateway()
            else:
                scene.boot_node(int(name[2:]))
        first = chance.randrange(20)
        numbers = range(first, first + chance.randrange(1, 6))
        if chance.random() < 0.5:
            ended = scene.begin("put_from", keys(*numbers), scene.fill(*numbers))
            is_put = True
        else:
            scene.memory[:] = bytes(len(scene.memory))
            ended = scene.begin("get_into", keys(*numbers), offsets(len(numbers)))
            is_put = False
        # Two at most, so one node lives; and who is new becomes known before the gateway dies.
        is_news = now < joined_s + REFRESH_S + TIMEOUT_S
        victim = chance.choice(["kv0", "kv1", "kv2"] + ["gateway"] * (not is_news))
        if chance.random() < 0.3 and victim not in down and len(down) < 2:
            scene.heap.run_until(now + chance.random() * 6e-3)
            scene.kill(victim)
            down[victim] = now + chance.random() * 20
        answer = scene.end(ended)
        assert not isinstance(answer, MooncakeError), "somebody lives"
        if not is_put:
            num_got += answer
            assert scene.found(*numbers[:answer])
    assert num_got > 0


def test_a_long_run_goes_in_messages_that_hold_up_no_others(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And all of it comes back, and its end is evicted before its head."""
    monkeypatch.setattr(rights, "MAX_KEYS_AT_ONCE", 3)
    named: list[tuple[str, int, int]] = []

    def listen(_from: str, _to: str, message: object) -> None:
        if isinstance(message, PutStart | PinBlocks):
            named.append((type(message).__name__, len(message.keys), len(message.head.keys)))

    scene.network.listener = listen
    run = tuple(range(1, 9))
    assert scene.call("put_from", keys(*run), scene.fill(*run)) == keys(*run)
    puts = [("PutStart", 3, 0), ("PutStart", 3, 0), ("PutStart", 2, 0)]
    if WIRES["questions"]:  # what follows the first put goes over the data connection
        del puts[1:]
    assert named == [*puts, ("PutStart", 0, 3), ("PutStart", 0, 3)]
    named.clear()
    scene.memory[:] = bytes(len(scene.memory))
    assert scene.call("get_into", keys(*run), offsets(len(run))) == len(run)
    assert scene.found(*run)
    if not WIRES["questions"]:
        pins = [("PinBlocks", 3, 0), ("PinBlocks", 3, 0), ("PinBlocks", 2, 0)]
        assert named == [*pins, ("PutStart", 0, 3), ("PutStart", 0, 3)]
    evicted, _ = scene.nodes["kv0"].blocks.dram.reserve(keys(*range(50, 50 + 32 - 8 + 3)), "")
    held = [number for number in run if scene.nodes["kv0"].stores(keys(number)[0])]
    assert held == list(run[: len(held)]), "a tail without its head is worth nothing"
    assert len(held) < len(run)
    for block in evicted:
        scene.nodes["kv0"].blocks.dram.abandon(block)


@pytest.mark.parametrize("num_there", [0, 2, 3, 4, 6])
def test_a_long_run_comes_as_far_as_nodes_have_it(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, num_there: int
) -> None:
    monkeypatch.setattr(rights, "MAX_KEYS_AT_ONCE", 3)
    run = tuple(range(1, 9))
    if num_there:
        scene.store("kv0", *run[:num_there])
    scene.store("kv1", *run[3:6])
    there = max(num_there, 6 if num_there >= 3 else 0)
    assert scene.call("get_into", keys(*run), offsets(len(run))) == there
    assert scene.found(*run[:there])


def test_gateways_are_asked_about_long_runs_in_parts(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rights, "MAX_KEYS_AT_ONCE", 3)
    named: list[tuple[str, int]] = []

    def listen(_from: str, _to: str, message: object) -> None:
        if isinstance(message, FindReplicas | ForgetBlocks) and message.asker.worker_id == "client":
            named.append((type(message).__name__, len(message.keys)))

    run = tuple(range(1, 9))
    scene.store("kv0", *run[:4])
    scene.store("kv1", *run[4:7])
    scene.network.listener = listen
    assert scene.call("match", keys(*run)) == 7
    assert {count for _, count in named if count} <= {1, 2, 3}
    named.clear()
    assert scene.call("remove", keys(*run)) == [*[True] * 7, False]
    assert [each for each in named if each[0] == "ForgetBlocks"] == [
        ("ForgetBlocks", 3), ("ForgetBlocks", 3), ("ForgetBlocks", 2),
    ]  # fmt: skip
