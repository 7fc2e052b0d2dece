"""Two pool nodes on a simulated wire: copies come whole or not at all, and go when nobody reads."""

from __future__ import annotations

from random import Random

import msgspec

from mooncake.base import (
    BlockEvents,
    Drain,
    PeerLost,
    PinBlocks,
    PinGranted,
    PutEnd,
    PutGranted,
    PutStart,
    Role,
    Unpin,
    Welcome,
    WorkerHello,
    WorkerRef,
    packed_places,
)
from mooncake.base.messages import Replicate
from mooncake.base.pool_messages import FindReplicas, RemoveBlocks, ReplicasFound, TakenOver
from mooncake.kvstore.config import KvStoreConfig
from mooncake.kvstore.node.node import KvNode
from mooncake.kvstore.node.replication import ANSWER_S, MAX_CLIENT_PULLS, MAX_PULLS
from mooncake.sim.world.clock import EventHeap
from mooncake.sim.world.disk import SimDiskConfig, SimDisks
from mooncake.sim.world.network import Endpoint, Network, NetworkConfig, SimChannel, SimTransfer
from mooncake.sim.world.process import SimProcess
from tests.support.kvstore.node_world import (
    BLOCK,
    LAYOUT,
    REGION_ID,
    CountedKey,
    LocalTransfer,
    NodeWorld,
    key,
    keys,
)
from tests.support.kvstore.node_world import (
    GATEWAY as NODE_GATEWAY,
)
from tests.support.kvstore.pool_world import PoolWorld

CLIENT = WorkerRef("client", "c1", "client")
GATEWAY = WorkerRef("gateway", "g1", "gateway")


class TwoNodes:
    """Nodes "a" and "b", and one client that reads and writes their memory through its wire."""

    def __init__(self, corruption: float = 0.0, b_blocks: int = 8, **settings) -> None:
        self.heap = EventHeap()
        self.network = Network(self.heap, NetworkConfig(corruption=corruption), Random(1))
        self.inbox: list = []
        self.told: list = []
        self.endpoint = Endpoint("client", "node-c", self.inbox.append)
        self.network.attach(self.endpoint)
        self.network.attach(Endpoint("gateway", "node-g", self.told.append))
        self.channel = SimChannel(self.network, self.endpoint)
        self.nodes: dict[str, KvNode] = {}
        self.refs: dict[str, WorkerRef] = {}
        self.processes: dict[str, SimProcess] = {}
        for name, blocks in (("a", 8), ("b", b_blocks)):
            self._start(name, KvStoreConfig(dram_bytes=blocks * BLOCK, **settings))
        self.run(0.1)
        self.ticket = 0

    def _start(self, name: str, config: KvStoreConfig) -> None:
        ref = self.refs[name] = WorkerRef(name, "e1", name)
        process = self.processes[name] = SimProcess(name, self.heap)
        endpoint = Endpoint(name, f"node-{name}", process.deliver)
        self.network.attach(endpoint)
        hello = WorkerHello(
            worker=ref, role=Role.KVSTORE, node_id=name, host=name, pid=1,
            layout_fingerprint="test", block_tokens=4, num_blocks=0,
        )  # fmt: skip
        transfer = SimTransfer(self.network, endpoint, with_bytes=True)
        disks = SimDisks(self.heap, SimDiskConfig(), [], [], LAYOUT, process.deliver)
        node = KvNode(
            config, hello, LAYOUT, SimChannel(self.network, endpoint), transfer, "gateway", disks
        )
        self.nodes[name] = node
        process.start(node)
        process.deliver(Welcome(gateway=GATEWAY, kvstore=None, send_snapshot=True))

    def run(self, seconds: float) -> None:
        self.heap.run_until(self.heap.now() + seconds)
        for node in self.nodes.values():
            node.check_integrity()

    def ask(self, name: str, message, kind: type):
        before = len(self.inbox)
        self.channel.send(self.refs[name].address, message)
        self.run(0.01)
        [answer] = [m for m in self.inbox[before:] if isinstance(m, kind)]
        return answer

    def put(self, name: str, wanted: list[bytes]) -> None:
        self.ticket += 1
        start = PutStart(writer=CLIENT, ticket=self.ticket, keys=wanted)
        granted = self.ask(name, start, PutGranted)
        assert granted.keys == wanted
        for block, offset in zip(granted.keys, granted.places.offsets, strict=True):
            self.nodes[name].region.buffer[offset : offset + BLOCK] = block.ljust(BLOCK, b"\x07")
        end = PutEnd(writer=CLIENT, ticket=self.ticket, written=wanted)
        self.channel.send(self.refs[name].address, end)
        self.run(0.1)

    def read(self, name: str, wanted: list[bytes]) -> list[bytes]:
        """Return the bytes of the leading blocks that are there."""
        self.ticket += 1
        pin = PinBlocks(reader=CLIENT, ticket=self.ticket, keys=wanted)
        granted = self.ask(name, pin, PinGranted)
        buffer = self.nodes[name].region.buffer
        found = [bytes(buffer[offset : offset + BLOCK]) for offset in granted.places.offsets]
        self.channel.send(self.refs[name].address, Unpin(reader=CLIENT, ticket=self.ticket))
        self.run(0.01)
        return found

    def replicate(self, wanted: list[bytes]) -> None:
        order = Replicate(source=self.refs["a"], keys=wanted)
        self.channel.send(self.refs["b"].address, order)

    def right(self, wanted: list[bytes]) -> list[bytes]:
        return [block.ljust(BLOCK, b"\x07") for block in wanted]


def test_a_copy_has_the_bytes_is_announced_and_leaves_nothing_held() -> None:
    world = TwoNodes()
    world.put("a", keys(1, 2, 3))
    world.replicate(keys(1, 2, 3))
    world.run(0.1)
    assert world.read("b", keys(1, 2, 3)) == world.right(keys(1, 2, 3))
    told = [m for m in world.told if isinstance(m, BlockEvents) and m.worker == world.refs["b"]]
    assert told[-1].stored == keys(1, 2, 3)
    assert world.nodes["a"].num_open == 0
    assert world.nodes["b"].quiet


def test_what_the_owner_lacks_is_not_made_up() -> None:
    world = TwoNodes()
    world.put("a", keys(1))
    world.replicate(keys(1, 2, 3))
    world.run(0.1)
    assert world.read("b", keys(1, 2, 3)) == world.right(keys(1))
    world.replicate(keys(7))
    world.run(0.1)
    assert world.nodes["b"].counters["replicas_failed"] == 0, "a miss is not a failure"
    assert world.nodes["b"].quiet


def test_only_what_is_missing_is_copied_and_only_where_there_is_room() -> None:
    world = TwoNodes(b_blocks=2)
    world.put("a", keys(1, 2, 3))
    world.put("b", keys(1))
    world.replicate(keys(1, 2, 3))
    world.run(0.1)
    assert world.nodes["b"].counters["blocks_replicated"] == 1
    found = world.read("b", keys(1, 2, 3))
    assert found == world.right(keys(1, 2)), "the head does not go for the tail"


def test_a_silent_owner_is_given_up() -> None:
    world = TwoNodes(replicate_timeout_s=1.0)
    world.put("a", keys(1))
    world.processes["a"].kill()
    world.network.detach("a")
    del world.nodes["a"]
    world.replicate(keys(1))
    world.run(2.0)
    assert world.nodes["b"].quiet
    assert world.nodes["b"].counters["replicas_failed"] == 1
    world.put("b", keys(*range(20, 28)))


def test_an_owner_lost_in_mid_copy_leaves_no_half_block() -> None:
    world = TwoNodes()
    world.put("a", keys(1, 2))
    world.replicate(keys(1, 2))
    world.run(0.00025)
    world.network.detach("a")
    world.processes["a"].kill()
    del world.nodes["a"]
    world.channel.send("b", PeerLost(worker=world.refs["a"]))
    world.run(30.0)
    assert world.nodes["b"].quiet
    assert world.read("b", keys(1, 2)) in ([], world.right(keys(1, 2)))


def test_unread_copies_are_dropped_and_others_stay() -> None:
    world = TwoNodes(replica_idle_s=10.0)
    world.put("a", keys(1, 2))
    world.put("b", keys(9))
    world.replicate(keys(1))
    world.run(0.1)
    world.replicate(keys(2))
    world.run(6.0)
    assert world.read("b", keys(1))
    world.run(6.0)
    assert [bool(world.read("b", keys(n))) for n in (1, 2, 9)] == [True, False, True]
    assert world.nodes["b"].counters["replicas_dropped"] == 1
    world.run(60.0)
    assert world.read("b", keys(9))
    assert not world.read("b", keys(1))


def test_a_copy_damaged_on_the_way_is_found_out_and_given_up() -> None:
    world = TwoNodes(corruption=1.0)
    world.put("a", keys(1))
    world.replicate(keys(1))
    world.run(1.0)
    assert world.read("b", keys(1)) == []
    assert world.nodes["b"].counters["blocks_damaged"] == 1
    assert world.read("a", keys(1)) == world.right(keys(1))


def test_the_asker_is_told_which_blocks_lie_there_now() -> None:
    world = TwoNodes(b_blocks=3)
    world.put("a", keys(1, 2, 3, 4))

    def told(*numbers: int, name: str = "b") -> TakenOver:
        world.ticket += 1
        order = Replicate(
            source=world.refs["a"], keys=keys(*numbers), asker=CLIENT, ticket=world.ticket
        )
        answer = world.ask(name, order, TakenOver)
        assert (answer.ticket, answer.store) == (world.ticket, world.refs[name])
        return answer

    assert told(1, 2).keys == keys(1, 2)
    assert told(1, 2).keys == keys(1, 2), "they are here already"
    assert told(9).keys == [], "the owner has none"
    few = told(1, 2, 3, 4)
    assert (few.keys, few.is_full) == (keys(1, 2, 3), True)
    assert told(1, 2, name="a").keys == keys(1, 2), "the owner itself"
    world.channel.send(world.refs["b"].address, Drain())
    assert (told(1, 4).keys, told(4).is_full) == (keys(1), True), "it goes, and takes nothing"
    assert world.nodes["b"].counters["replicas_refused"] == 0


def test_an_order_repeated_while_it_is_carried_out_copies_once() -> None:
    world = TwoNodes()
    world.put("a", keys(1, 2))
    world.replicate(keys(1, 2))
    world.replicate(keys(1, 2))
    world.run(0.1)
    assert world.nodes["b"].counters["blocks_replicated"] == 2


def test_a_run_that_comes_up_from_a_disk_in_pieces_is_copied_whole() -> None:
    world = PoolWorld()
    disk = {"high_watermark": 1.0, "ssd_min_uses": 1, "ssd_write_at": 0.0}
    world.start("a", 4, ssd_blocks=64, **disk)
    world.start("b", 16)
    run = keys(*range(12))
    for block in run:
        world.put("a", [block])
        world.run(0.1)
    assert len(world.holders(run[0])) == 0, "it is on the disk"
    order = Replicate(source=world.refs["a"], keys=run, asker=CLIENT, ticket=1)
    assert world.ask("b", order, TakenOver).keys == run
    assert world.read("b", run) == len(run)
    world.run(0.1)
    assert all(node.quiet for node in world.nodes.values())


def test_one_client_s_orders_leave_pulls_to_others() -> None:
    """Its sources may never answer."""
    world, silent = NodeWorld(num_blocks=256), WorkerRef("kv-1", "e1", "inproc://kv-1")
    asked: list[int] = []
    for client in (client_of("aa"), client_of("bb")):
        before = len(world.channel.sent)
        for number in range(MAX_CLIENT_PULLS + 4):
            block = keys(1000 * len(asked) + number)
            order = Replicate(source=silent, keys=block, asker=client, ticket=world.ticket())
            world.handle(order)
        world.handle(named(world, silent))
        sent = [message for _, message in world.channel.sent[before:]]
        asked.append(sum(isinstance(message, PinBlocks) for message in sent))
    assert asked == [MAX_CLIENT_PULLS] * 2
    assert sum(asked) < MAX_PULLS


def test_a_removal_of_many_blocks_compares_few_with_those_that_are_copied() -> None:
    number = 400
    world, silent = NodeWorld(num_blocks=number), WorkerRef("kv-1", "e1", "inproc://kv-1")
    copied, removed = ([CountedKey(key(n + at)) for n in range(number)] for at in (0, number))
    assert world.answer(Replicate(source=silent, keys=list(copied)), PinBlocks).keys == copied
    CountedKey.num_compared = 0
    world.handle(RemoveBlocks(asker=client_of("aa"), ticket=1, keys=[*removed, copied[0]]))
    assert CountedKey.num_compared < 20 * number


def client_of(channel_key: str) -> WorkerRef:
    return WorkerRef(f"client-{channel_key}", "e1", f"tcp://10.0.0.7:1#{channel_key}")


def named(world: NodeWorld, *nodes: WorkerRef) -> ReplicasFound:
    """Return a gateway's answer: there are these nodes."""
    return ReplicasFound(
        asker=world.store, ticket=0, stores=[*nodes], num_blocks=[0 for _ in nodes]
    )


def test_an_order_of_a_client_connects_to_no_address_but_that_of_a_node() -> None:
    """The client chooses the address; it may be that of any port in the node's network."""
    world, client = NodeWorld(), client_of("aa")
    owner = WorkerRef("kv-1", "e1", "tcp://10.0.0.8:1#bb")
    other = WorkerRef("kv-1", "e1", "tcp://10.0.0.9:5432#aa")

    def order(source: WorkerRef, number: int) -> list[tuple[str, type]]:
        sent = world.handle(
            Replicate(source=source, keys=keys(number), asker=client, ticket=world.ticket())
        )
        return [(address, type(message)) for address, message in sent]

    question = [(NODE_GATEWAY.address, FindReplicas)]
    assert order(owner, 1) == question
    assert order(other, 2) == question
    pulled = [sent for sent in world.handle(named(world, owner)) if sent[0] == owner.address]
    assert [type(message) for _, message in pulled] == [PinBlocks]
    assert not world.node.quiet
    world.tick(world.now + ANSWER_S)
    [refused] = [message for _, message in world.channel.sent if isinstance(message, TakenOver)]
    assert (refused.asker, refused.ticket, refused.keys) == (client, 2, [])
    assert world.node.counters["replicas_refused"] == 1
    assert order(owner, 3) == [(owner.address, PinBlocks)], "it is known"
    world.handle(PeerLost(worker=owner))
    assert order(owner, 4) == question
    world.handle(Drain())
    assert not [sent for sent in world.handle(named(world, owner)) if sent[0] == owner.address]
    assert {address for address, _ in world.channel.sent} <= {
        NODE_GATEWAY.address, owner.address, client.address
    }  # fmt: skip


def test_a_late_answer_to_an_earlier_boot_is_not_taken_for_one_to_this() -> None:
    """Its places are those of other blocks, under the same ticket: each boot begins with 1."""
    world, owner = NodeWorld(), WorkerRef("kv-1", "e1", "inproc://kv-1")
    earlier = world.answer(Replicate(source=owner, keys=keys(1)), PinBlocks)
    world.boot()
    asked = world.answer(Replicate(source=owner, keys=keys(2)), PinBlocks)
    assert asked.ticket == earlier.ticket
    nothing = PinGranted(
        asker=earlier.reader, ticket=1, store=owner, num_blocks=0,
        places=packed_places(LAYOUT, LocalTransfer.segment, REGION_ID, []),
    )  # fmt: skip
    assert world.handle(nothing) == []
    granted = msgspec.structs.replace(nothing, asker=asked.reader)
    assert [sent for _, sent in world.handle(granted)] == [Unpin(reader=asked.reader, ticket=1)]
