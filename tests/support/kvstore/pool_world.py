"""A pool in the simulator: a gateway, any number of nodes with bytes and disks, and one client that
reads and writes their memory through its wire.
"""

from __future__ import annotations

from random import Random
from typing import TypeVar

import msgspec

from mooncake.base import (
    Drain,
    PinBlocks,
    PinGranted,
    PutEnd,
    PutGranted,
    PutStart,
    Role,
    SeededIds,
    Unpin,
    WorkerHello,
    WorkerRef,
)
from mooncake.base.pool_messages import LastingPin, PinsSet, SetPins
from mooncake.kvstore.config import KvStoreConfig, SsdConfig
from mooncake.kvstore.node.node import KvNode
from mooncake.scheduler.config import SchedulerConfig
from mooncake.scheduler.gateway.gateway import Gateway
from mooncake.scheduler.placement.conductor import Conductor
from mooncake.sim.world.clock import EventHeap
from mooncake.sim.world.disk import SimDiskConfig, SimDisks, SimMedium
from mooncake.sim.world.network import Endpoint, Network, NetworkConfig, SimChannel, SimTransfer
from mooncake.sim.world.process import SimProcess
from mooncake.telemetry.events import Recorders
from tests.support.kvstore.node_world import BLOCK, LAYOUT

CLIENT = WorkerRef("client", "c1", "client")
Answer = TypeVar("Answer")


class PoolWorld:
    """Give nodes by `start`; let time pass by `run`."""

    def __init__(self, seed: int = 1, **wires: float) -> None:
        self.heap = EventHeap()
        self.network = Network(self.heap, NetworkConfig(**wires), Random(seed))
        self.inbox: list[msgspec.Struct] = []
        self._client = Endpoint("client", "node-c", self.inbox.append)
        self.network.attach(self._client)
        self._channel = SimChannel(self.network, self._client)
        self.nodes: dict[str, KvNode] = {}
        self.refs: dict[str, WorkerRef] = {}
        self.processes: dict[str, SimProcess] = {}
        self._ticket = 0
        process = SimProcess("gateway", self.heap)
        endpoint = Endpoint("gateway", "node-g", process.deliver)
        self.network.attach(endpoint)
        config, ids = SchedulerConfig(), SeededIds(seed)
        self.gateway = Gateway(
            config, WorkerRef("gateway", "g1", "gateway"), Conductor(config, ids),
            SimChannel(self.network, endpoint), ids, Recorders(),
        )  # fmt: skip
        process.start(self.gateway)

    def start(self, name: str, num_blocks: int, ssd_blocks: int = 0, **settings: object) -> None:
        """Start one node; `ssd_blocks`: with a disk of so many."""
        ssd = [SsdConfig(directory="/0", num_bytes=ssd_blocks * BLOCK)] if ssd_blocks else []
        config = KvStoreConfig(dram_bytes=num_blocks * BLOCK, ssd=ssd, **settings)
        ref = self.refs[name] = WorkerRef(name, "e1", name)
        process = self.processes[name] = SimProcess(name, self.heap)
        endpoint = Endpoint(name, f"node-{name}", process.deliver)
        self.network.attach(endpoint)
        hello = WorkerHello(
            worker=ref, role=Role.KVSTORE, node_id=name, host=name, pid=1,
            layout_fingerprint=LAYOUT.fingerprint, block_tokens=4, num_blocks=0,
        )  # fmt: skip
        transfer = SimTransfer(self.network, endpoint, with_bytes=True)
        media, slots = ([SimMedium()], [ssd_blocks]) if ssd_blocks else ([], [])
        disks = SimDisks(self.heap, SimDiskConfig(), media, slots, LAYOUT, process.deliver)
        node = self.nodes[name] = KvNode(
            config, hello, LAYOUT, SimChannel(self.network, endpoint), transfer, "gateway", disks
        )
        process.start(node)
        self.run(0.2)

    def kill(self, name: str) -> None:
        """End a process at once; its silence tells."""
        self.processes[name].kill()
        self.network.detach(name)
        del self.nodes[name]

    def run(self, seconds: float) -> None:
        """Let time pass; every node and the gateway are checked after each millisecond or so."""
        end_s = self.heap.now() + seconds
        while self.heap.now() < end_s:
            self.heap.run_until(min(end_s, self.heap.now() + max(seconds / 50, 0.001)))
            for node in self.nodes.values():
                node.check_integrity()
        self.gateway.check_integrity()

    def send(self, name: str, message: msgspec.Struct) -> None:
        self._channel.send(self.refs[name].address, message)

    def ask(self, name: str, message: msgspec.Struct, kind: type[Answer]) -> Answer:
        """Bring a message that wants one answer of `kind`; return it."""
        before = len(self.inbox)
        self.send(name, message)
        for _ in range(300):
            self.run(0.01)
            found = [answer for answer in self.inbox[before:] if isinstance(answer, kind)]
            if found:
                return found[0]
        raise AssertionError(f"no {kind.__name__}")

    def drain(self, name: str) -> None:
        self.send(name, Drain())

    def put(self, name: str, wanted: list[bytes], tenant: str = "", uses: int = 1) -> None:
        """Put blocks; `uses` more than one: read them again as often."""
        self._ticket += 1
        start = PutStart(writer=CLIENT, ticket=self._ticket, keys=wanted, tenant=tenant)
        granted = self.ask(name, start, PutGranted)
        assert granted.keys == wanted
        for block, offset in zip(granted.keys, granted.places.offsets, strict=True):
            self.nodes[name].region.buffer[offset : offset + BLOCK] = bytes_of(block)
        self.send(name, PutEnd(writer=CLIENT, ticket=self._ticket, written=wanted))
        self.run(0.01)
        for _ in range(uses - 1):
            self.read(name, wanted)

    def read(self, name: str, wanted: list[bytes]) -> int:
        """Read the leading blocks that are there; return how many. Their bytes are right."""
        self._ticket += 1
        pin = PinBlocks(reader=CLIENT, ticket=self._ticket, keys=wanted)
        granted = self.ask(name, pin, PinGranted)
        buffer = self.nodes[name].region.buffer
        for block, offset in zip(wanted, granted.places.offsets, strict=False):
            assert buffer[offset : offset + BLOCK] == bytes_of(block), "wrong bytes"
        self.send(name, Unpin(reader=CLIENT, ticket=self._ticket))
        self.run(0.01)
        return granted.num_blocks

    def set_pins(self, name: str, wanted: list[bytes], pin: LastingPin) -> None:
        self._ticket += 1
        message = SetPins(asker=CLIENT, ticket=self._ticket, keys=wanted, pin=pin)
        assert all(self.ask(name, message, PinsSet).done)

    def holders(self, key: bytes) -> list[str]:
        """Return the nodes that hold a block in DRAM."""
        return [name for name, node in self.nodes.items() if node.stores(key)]


def bytes_of(key: bytes) -> bytes:
    """Return what a block holds when it is right."""
    return key.ljust(BLOCK, b"\x07")
