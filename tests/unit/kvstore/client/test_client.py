"""A client of the pool on simulated wires: every call ends once, and nothing is left behind."""

from __future__ import annotations

from random import Random

import pytest

from mooncake.base import (
    MooncakeError,
    PeerLost,
    PinGranted,
    PutGranted,
    Role,
    SeededIds,
    SegmentRef,
    Tier,
    TransferError,
    Unavailable,
    Welcome,
    WorkerHello,
    WorkerRef,
    packed_places,
)
from mooncake.base.pool_messages import (
    AskPool,
    BlocksFound,
    BlocksRemoved,
    FindBlocks,
    PoolState,
    RemoveBlocks,
)
from mooncake.kvstore.client.calls import Attempt, Call
from mooncake.kvstore.client.client import ClientPorts, PoolClient
from mooncake.kvstore.config import KvStoreConfig
from mooncake.kvstore.node.node import KvNode
from mooncake.scheduler.config import SchedulerConfig
from mooncake.scheduler.gateway.gateway import Gateway
from mooncake.scheduler.placement.conductor import Conductor
from mooncake.sim.world.clock import EventHeap
from mooncake.sim.world.disk import SimDiskConfig, SimDisks
from mooncake.sim.world.network import Endpoint, Network, NetworkConfig, SimChannel, SimTransfer
from mooncake.sim.world.process import SimProcess
from mooncake.telemetry.events import EventList
from tests.support.kvstore.node_world import BLOCK, LAYOUT, keys

NUM_PLACES = 8
WIRES = {"questions": False}


@pytest.fixture(autouse=True, params=[False, True], ids=["pins", "questions"])
def wires(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes take questions over the data connection, or not, as those of earlier releases."""
    monkeypatch.setitem(WIRES, "questions", request.param)


class Scene:
    """A gateway, a pool node and a client on one node."""

    def __init__(self, *, blocks: int = 4, timeout_s: float = 5.0, **network) -> None:
        self.heap = EventHeap()
        config = NetworkConfig(encode=True, **WIRES, **network)
        self.network = Network(self.heap, config, Random(1))
        self.processes: dict[str, SimProcess] = {}
        self.gateway = self._gateway()
        channel, transfer, process, hello = self._worker("kv", Role.KVSTORE)
        disks = SimDisks(self.heap, SimDiskConfig(), [], [], LAYOUT, process.deliver)
        config = KvStoreConfig(dram_bytes=blocks * BLOCK, quarantine_s=1.0)
        self.node = KvNode(config, hello, LAYOUT, channel, transfer, "gateway", disks)
        process.start(self.node)
        channel, transfer, process, hello = self._worker("client", Role.CLIENT)
        region = transfer.allocate(NUM_PLACES * BLOCK, "mine")
        self.memory = region.buffer
        ports = ClientPorts(channel, transfer, region, "gateway")
        self.timeout_s = timeout_s
        self.client = PoolClient(hello, LAYOUT, ports)
        process.start(self.client)
        self.answers: list = []

    def _endpoint(self, name: str) -> tuple[Endpoint, SimProcess]:
        process = self.processes[name] = SimProcess(name, self.heap)
        endpoint = Endpoint(name, "node", process.deliver)
        self.network.attach(endpoint)
        return endpoint, process

    def _gateway(self) -> Gateway:
        endpoint, process = self._endpoint("gateway")
        config = SchedulerConfig()
        gateway = Gateway(
            config, WorkerRef("gateway", "g0", "gateway"), Conductor(config, SeededIds(1)),
            SimChannel(self.network, endpoint), SeededIds(2), EventList(),
        )  # fmt: skip
        process.start(gateway)
        return gateway

    def _worker(
        self, name: str, role: Role
    ) -> tuple[SimChannel, SimTransfer, SimProcess, WorkerHello]:
        endpoint, process = self._endpoint(name)
        hello = WorkerHello(
            worker=WorkerRef(name, "e1", name), role=role, node_id="node", host="here", pid=1,
            layout_fingerprint=LAYOUT.fingerprint, block_tokens=4, num_blocks=0,
        )  # fmt: skip
        transfer = SimTransfer(self.network, endpoint, with_bytes=True)
        return SimChannel(self.network, endpoint), transfer, process, hello

    def run(self, seconds: float = 1.0) -> None:
        self.heap.run_until(self.heap.now() + seconds)
        for machine in (self.node, self.client, self.gateway):
            machine.check_integrity()

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.network.detach(name)

    def begin(self, make) -> None:
        """Begin the call that `make` makes of an attempt at the client's own node."""
        now = self.heap.now()
        at = Attempt(self.client.store, now + self.timeout_s)

        async def policy():
            return await make(at)

        self.client.run(policy(), self.answers.append, now)

    def call(self, name: str, *args, seconds: float = 1.0):
        """Make a call and return its one answer."""
        before = len(self.answers)
        self.begin(lambda at: getattr(self, name)(at, *args))
        self.processes["client"].wake(self.heap.now())
        self.run(seconds)
        [answer] = self.answers[before:]
        return answer

    def fill(self, *places: int) -> None:
        for place in places:
            self.memory[place * BLOCK : (place + 1) * BLOCK] = bytes([place + 1]) * BLOCK

    def at(self, place: int) -> bytes:
        return bytes(self.memory[place * BLOCK : (place + 1) * BLOCK])

    def put_from(self, at: Attempt, wanted: list[bytes], offsets: list[int]) -> Call:
        return self.client.write(at, wanted, self.client.places(wanted, offsets))

    def get_into(self, at: Attempt, wanted: list[bytes], offsets: list[int]) -> Call:
        return self.client.read(at, wanted, self.client.places(wanted, offsets))

    def exists(self, at: Attempt, wanted: list[bytes]) -> Call:
        question = FindBlocks(asker=self.client.ref, ticket=0, keys=wanted)
        return self.client.request(at, question, BlocksFound)

    def remove(self, at: Attempt, wanted: list[bytes]) -> Call:
        question = RemoveBlocks(asker=self.client.ref, ticket=0, keys=wanted)
        return self.client.request(at, question, BlocksRemoved)

    def stat(self, at: Attempt) -> Call:
        return self.client.request(at, AskPool(asker=self.client.ref, ticket=0), PoolState)

    def put(self, numbers: list[int]):
        offsets = [place * BLOCK for place in range(len(numbers))]
        return self.call("put_from", keys(*numbers), offsets)


@pytest.fixture
def scene() -> Scene:
    scene = Scene()
    scene.fill(0, 1, 2, 3)
    scene.run(2.0)
    return scene


def test_blocks_come_back_to_where_they_are_wanted(scene: Scene) -> None:
    assert scene.put([1, 2]) == keys(1, 2)
    assert scene.call("get_into", keys(1, 2, 3), [7 * BLOCK, 5 * BLOCK, 6 * BLOCK]) == 2
    assert (scene.at(7), scene.at(5)) == (scene.at(0), scene.at(1))
    assert scene.node.num_open == scene.client.num_open == 0


def test_what_is_there_already_is_not_written_again(scene: Scene) -> None:
    scene.put([1, 2])
    assert scene.put([1, 2]) == []
    assert scene.put([1, 2, 3]) == keys(3)


def test_a_put_of_more_than_there_is_room_for_writes_what_fits(scene: Scene) -> None:
    offsets = [0] * 6
    assert scene.call("put_from", keys(*range(6)), offsets) == keys(0, 1, 2, 3)


def test_looking_removing_and_asking(scene: Scene) -> None:
    scene.put([1, 2])
    assert scene.call("exists", keys(1, 9)).tiers == [Tier.DRAM, None]
    assert scene.call("remove", keys(1, 9)).removed == [True, False]
    assert scene.call("exists", keys(1, 2)).tiers == [None, Tier.DRAM]
    state = scene.call("stat")
    assert isinstance(state, PoolState)
    assert (state.load.num_total_blocks, state.load.num_cached_blocks) == (4, 1)
    assert state.layout_fingerprint == LAYOUT.fingerprint


def test_what_arrives_damaged_is_not_counted() -> None:
    scene = Scene(corruption=1.0)
    scene.fill(0, 1)
    scene.run(2.0)
    assert scene.put([1, 2]) == keys(1, 2)
    assert scene.call("get_into", keys(1, 2), [4 * BLOCK, 5 * BLOCK]) == 0
    assert scene.node.counters["blocks_reported_corrupt"] == 1
    assert scene.node.counters["blocks_damaged"] == 0


def test_answers_to_an_earlier_boot_at_the_same_address_are_not_taken(scene: Scene) -> None:
    """They have the tickets of its own questions: each boot begins with 1."""
    earlier = WorkerRef("client", "e0", "client")
    store, places = scene.client.store, packed_places(LAYOUT, SegmentRef("gone", {}, "gone"), 0, [])
    late = [
        PutGranted(asker=earlier, ticket=1, store=store, keys=[], places=places),
        PinGranted(asker=earlier, ticket=1, store=store, num_blocks=0, places=places),
        BlocksFound(asker=earlier, ticket=1, store=store, tiers=[None]),
    ]
    scene.begin(lambda at: scene.put_from(at, keys(1), [0]))
    scene.client.handle(late[0], scene.heap.now())
    scene.run()
    scene.begin(lambda at: scene.get_into(at, keys(1), [BLOCK]))
    scene.client.handle(late[1], scene.heap.now())
    scene.begin(lambda at: scene.exists(at, keys(1)))
    scene.client.handle(late[2], scene.heap.now())
    scene.run()
    written, found, num_read = scene.answers
    assert (written, num_read, found.tiers) == (keys(1), 1, [Tier.DRAM])


@pytest.mark.parametrize("name", ["put_from", "get_into", "exists", "stat"])
def test_a_pool_that_is_silent_is_given_up(scene: Scene, name: str) -> None:
    scene.put([1])
    scene.kill("kv")
    args = {"put_from": (keys(5), [0]), "get_into": (keys(1), [0]), "exists": (keys(1),)}
    assert isinstance(scene.call(name, *args.get(name, ()), seconds=6.0), TransferError)
    assert scene.client.num_open == 0


def test_calls_to_a_lost_pool_end_when_that_is_known(scene: Scene) -> None:
    scene.kill("kv")
    scene.begin(lambda at: scene.get_into(at, keys(1), [0]))
    scene.gateway.worker_lost("kv", scene.heap.now())
    scene.run(0.1)
    assert [type(answer) for answer in scene.answers] == [Unavailable]


@pytest.mark.parametrize("after_s", [0.0, 1.5e-4, 2.5e-4, 3.5e-4])
def test_a_client_that_dies_in_mid_call_leaves_nothing_in_the_pool(
    scene: Scene, after_s: float
) -> None:
    scene.put([1])
    scene.begin(lambda at: scene.put_from(at, keys(5, 6), [0, BLOCK]))
    scene.begin(lambda at: scene.get_into(at, keys(1), [3 * BLOCK]))
    scene.heap.run_until(scene.heap.now() + after_s)
    scene.kill("client")
    scene.run(20.0)  # no heartbeat: the gateway tells the pool
    assert scene.node.num_open == 0
    assert scene.node.quiet


def test_an_answer_that_comes_too_late_is_given_back() -> None:
    slow = Scene(timeout_s=0.5, message_delay_s=0.3)
    slow.run(5.0)
    answer = slow.call("put_from", keys(1), [0], seconds=10.0)
    assert isinstance(answer, MooncakeError)
    assert slow.node.num_open == 0
    assert slow.node.counters["blocks_put"] == 0
    assert isinstance(slow.call("get_into", keys(1), [0], seconds=10.0), MooncakeError)
    assert slow.node.num_open == 0


def test_the_gateway_places_nothing_on_a_client_and_refuses_another_layout(scene: Scene) -> None:
    assert [worker.id for worker in scene.gateway.status(scene.heap.now()).workers] == ["kv"]
    scene.run(30.0)
    assert scene.client.store is not None, "its heartbeats keep it in the cluster"
    stranger = WorkerHello(
        worker=WorkerRef("other", "e1", "other"), role=Role.CLIENT, node_id="node", host="here",
        pid=1, layout_fingerprint="another", block_tokens=4, num_blocks=0,
    )  # fmt: skip
    heard: list = []
    scene.network.attach(Endpoint("other", "node", heard.append))
    scene.gateway.handle(stranger, scene.heap.now())
    scene.run()
    assert not any(isinstance(message, Welcome) for message in heard)
    assert not any(isinstance(message, PeerLost) for message in heard)
