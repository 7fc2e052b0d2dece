"""Blocking calls on a pool, for programs and operators: the pool's client in a thread.

Wires `kvstore.failover` to real messages and transfers; decides nothing. What `mooncake pool` does
is a call each.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import msgspec

from mooncake.base import (
    BlockKey,
    KvLayout,
    MonotonicClock,
    MooncakeError,
    PeerLost,
    Role,
    SystemIds,
    Tier,
    TransferError,
    Unavailable,
    WorkerHello,
    WorkerRef,
    format_bytes,
)
from mooncake.base.pool_messages import Keep, PoolState
from mooncake.kvstore import values
from mooncake.kvstore.block_memory import BlockMemory, Where
from mooncake.kvstore.client import ClientPorts, PoolClient
from mooncake.kvstore.failover import MAX_ATTEMPTS, FailoverClient
from mooncake.kvstore.whole_pool import KeptAt, Replica
from mooncake.launch import machine_facts
from mooncake.launch.client import Client
from mooncake.launch.driver import Driver
from mooncake.rpc.zmq_channel import ZmqChannel
from mooncake.transfer.backends.rdma import RdmaSettings
from mooncake.transfer.backends.tcp import TcpSettings
from mooncake.transfer.device import DeviceMemory
from mooncake.transfer.engine import Region
from mooncake.transfer.factory import TransferConfig, open_transfer, usable_protocols
from mooncake.transfer.link_stats import LinkSnapshot

CONNECT_POLL_S = 0.02
_Answer = TypeVar("_Answer")
STATS_PATH = "/v1/pool/stats"


class PoolSessionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the pool is and who may use it."""

    gateway_address: str
    cluster_secret: str
    layout: KvLayout
    node_id: str = ""
    """The node whose pool is used, as its workers name it."""
    store_address: str = ""
    """Or the pool worker itself."""
    bind_host: str = "127.0.0.1"
    """Where the pool's answers come to."""
    transfer_protocols: list[str] = msgspec.field(default_factory=lambda: list(usable_protocols()))
    rdma: RdmaSettings = RdmaSettings()
    num_places: int = 16
    """Blocks of memory that data passes through: the most one transfer carries."""
    timeout_s: float = 10.0
    """Within which a call ends, all the nodes it turns to together."""


def locate(url: str, cluster_secret: str, api_key: str | None = None) -> PoolSessionConfig:
    """Ask the HTTP door of a pool node where and of what shape it is. The session listens where
    that node can reach it: at this machine's address on the way there.

    Raises:
        Unavailable: nobody answers at `url`, or there is no way to the node.
        MooncakeError: it refuses, or is no pool node.
    """
    about = Client(url, api_key or cluster_secret).get(STATS_PATH)
    try:
        return PoolSessionConfig(
            gateway_address=about["gateway_address"],
            cluster_secret=cluster_secret,
            layout=msgspec.convert(about["layout"], KvLayout),
            node_id=about["node_id"],
            store_address=about["address"],
            bind_host=machine_facts.address_towards(str(about["address"])),
        )
    except (KeyError, TypeError, msgspec.ValidationError) as error:
        raise MooncakeError(f"{url} is no pool node of this version: {error}") from error


class PoolSession:
    """One connection to a pool; calls may come from any thread, one at a time each.

    Its own node is used as long as it answers. When it fails, also in mid-operation, blocks are put
    to another node and got from others that hold them, as they are when it has not all of a run.
    All calls raise MooncakeError (TransferError, Unavailable) when no node is left.
    """

    def __init__(self, config: PoolSessionConfig) -> None:
        """Raises ConfigError when `bind_host` cannot be bound or a protocol is unknown."""
        self._config = config
        ids = SystemIds()
        self._channel = ZmqChannel(config.bind_host, secret=config.cluster_secret)
        clock = MonotonicClock()
        self._transfer = open_transfer(
            TransferConfig(
                secret=config.cluster_secret,
                host=machine_facts.boot_id(),
                protocols=config.transfer_protocols,
                tcp=TcpSettings(bind_host=config.bind_host),
                rdma=config.rdma,
            ),
            ids.hex(8),
            clock,
        )
        self._block_bytes = config.layout.block_bytes
        self._region = self._transfer.allocate(
            config.num_places * self._block_bytes, "pool-session"
        )
        ref = self._ref = WorkerRef(f"client-{ids.hex(4)}", ids.hex(8), self._channel.address)
        hello = WorkerHello(
            worker=ref, role=Role.CLIENT, node_id=config.node_id, host=machine_facts.host_name(),
            pid=os.getpid(), layout_fingerprint=config.layout.fingerprint,
            block_tokens=config.layout.block_tokens, num_blocks=0,
        )  # fmt: skip
        store = WorkerRef("", "", config.store_address) if config.store_address else None
        ports = ClientPorts(self._channel, self._transfer, self._region, config.gateway_address)
        self._client = FailoverClient(
            PoolClient(hello, config.layout, ports, store=store, timeout_s=config.timeout_s),
            config.timeout_s,
        )
        self._driver = Driver(
            self._client, self._channel, transfer=self._transfer, clock=clock, own=ref
        )
        self._memory_lock = threading.Lock()
        self._thread = threading.Thread(target=self._driver.run, name="pool-session", daemon=True)
        self._thread.start()

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self._block_bytes

    def connect(self) -> None:
        """Wait until the gateway has named the pool. Raises Unavailable after `timeout_s`."""
        pause = threading.Event()
        for _ in range(int(self._config.timeout_s / CONNECT_POLL_S)):
            if self._client.own_store is not None:
                return
            pause.wait(CONNECT_POLL_S)
        raise Unavailable(
            f"{self._config.gateway_address} names no pool on node {self._config.node_id!r}: is "
            "the cluster up, and the secret right?"
        )

    @property
    def nodes(self) -> list[str]:
        """Addresses of the nodes that calls turn to, the first one first."""
        asked = self._driver.call(lambda client, _: client.nodes)
        known: list[str] = asked.result()
        return known

    @property
    def memory(self) -> memoryview:
        """The registered memory that blocks go from and come to: `num_places` blocks. `put` and
        `get` use all of it; who uses `put_from` and `get_into` must not call them meanwhile.
        """
        return self._region.buffer

    def register(
        self, *pieces: memoryview | DeviceMemory, layer_stride: int | None = None
    ) -> BlockMemory:
        """Have blocks go from and come to memory of the caller's own, which stays where it is until
        `unregister`; `at` of what is returned names places in it.

        Args:
            pieces: writable host memory (of a tensor: `memoryview(t.view(torch.uint8).numpy())`)
                or a device's, one piece for all layers or one for each.
            layer_stride: bytes between the slices of a block in one piece; None: blocks lie packed.

        Raises:
            ValueError: another number of layers, or slices that overlap.
            TransferError: memory that cannot be registered.
        """
        layout, regions = self._config.layout, list[Region]()
        try:
            for piece in pieces:
                regions.append(self._register(piece))
            if len(regions) != 1:
                return BlockMemory.layered(regions, layout)
            return BlockMemory.strided(regions[0], layout, layer_stride or layout.slice_bytes)
        except (ValueError, TransferError):
            for region in regions:
                self._transfer.unregister(region)
            raise

    def unregister(self, memory: BlockMemory) -> None:
        """Withdraw memory that was registered: calls that still use it fail, and when this returns
        nothing touches it any more.
        """
        for region in memory.regions:
            self._transfer.unregister(region)

    def _register(self, piece: memoryview | DeviceMemory) -> Region:
        if isinstance(piece, memoryview):
            return self._transfer.register(piece, "pool-session")
        return self._transfer.register_device(piece, "pool-session")

    def put_from(
        self, keys: Sequence[BlockKey], offsets: Where, tenant: str = ""
    ) -> list[BlockKey]:
        """Store blocks, a run of one chain, that lie at `offsets` in `memory` or at places in what
        was registered; return those that were written. Nothing is copied on the way.
        """
        start = partial(FailoverClient.put_from, keys=keys, offsets=offsets, tenant=tenant)
        written: list[BlockKey] = self._call(start)
        return written

    def get_into(self, keys: Sequence[BlockKey], offsets: Where) -> int:
        """Bring a run of blocks to `offsets` in `memory` or to places in what was registered;
        return how many came, from the first on. Nothing is copied on the way.
        """
        count: int = self._call(partial(FailoverClient.get_into, keys=keys, offsets=offsets))
        return count

    def put(self, blocks: dict[BlockKey, bytes], tenant: str = "") -> list[BlockKey]:
        """Store blocks, a run of one chain; return those that were written. The others were there
        already, or there was no room. What this session asks next sees them, others a moment
        later. All lie at one node: when that is lost meanwhile, they are put to another one from
        the first on. Raises ValueError for data of the wrong size.
        """
        for key, data in blocks.items():
            if len(data) != self._block_bytes:
                raise ValueError(
                    f"block {key.hex()} has {len(data)} bytes, not {self._block_bytes}"
                )
        return self._at_one_node(lambda: self._put_run(blocks, tenant))

    def _put_run(self, blocks: dict[BlockKey, bytes], tenant: str) -> list[BlockKey]:
        written: list[BlockKey] = []
        for keys in self._batches(list(blocks)):
            with self._memory_lock:
                for place, key in enumerate(keys):
                    self._view(place)[:] = blocks[key]
                offsets = [place * self._block_bytes for place in range(len(keys))]
                written += self.put_from(keys, offsets, tenant)
        return written

    def _at_one_node(self, work: Callable[[], _Answer]) -> _Answer:
        """Do work that puts something, again when puts have gone to another node meanwhile."""
        for _ in range(MAX_ATTEMPTS - 1):
            before = self._client.num_moves
            try:
                answer = work()
            except Unavailable:
                if self._client.num_moves == before:
                    raise
            else:
                if self._client.num_moves == before:
                    return answer
        return work()

    def get(self, keys: Sequence[BlockKey]) -> list[bytes]:
        """Return the bytes of a run of blocks, as far as it is there from the first on."""
        found: list[bytes] = []
        for batch in self._batches(list(keys)):
            with self._memory_lock:
                offsets = [place * self._block_bytes for place in range(len(batch))]
                count = self.get_into(batch, offsets)
                found += [bytes(self._view(place)) for place in range(count)]
            if count < len(batch):
                break
        return found

    def put_value(self, name: str, data: bytes, tenant: str = "") -> bool:
        """Store a value of any size; False when there is one of that name. Tensors of any type and
        shape are the value `safetensors.torch.save(tensors)`.

        Raises:
            Unavailable: there is no room for it.
            ValueError: blocks of this pool are too small for values.
        """
        layout = self._config.layout
        if not values.fits(layout):
            raise ValueError(f"blocks of {layout.block_bytes} bytes are too small for values")
        head, key = values.ValueHead.of(data), values.head_key(layout, name, tenant)
        if self.exists([key]) != [None]:
            return False
        size, packed, before = layout.block_bytes, head.pack(layout), self._client.num_moves
        keys = head.keys(layout, tenant)
        if len(keys) > self._config.num_places:  # else it would drive out others' for nothing
            state = self.stat()
            if len(keys) >= state.load.num_total_blocks + state.num_ssd_blocks:
                raise self._no_room(name, data)
        blocks = {
            each: data[start * size : (start + 1) * size].ljust(size, b"\0")
            for start, each in enumerate(keys)
        }

        def store() -> bool:
            self.put(blocks, tenant)
            if None in self.exists(keys):
                raise self._no_room(name, data)
            written = self.put({key: packed}, tenant)
            if self._client.num_moves != before:  # it may be there from our last attempt
                return self.get([key]) == [packed]
            if self.exists([key]) == [None]:  # whoever asks now does not find it
                raise self._no_room(name, data)
            return bool(written)

        return self._at_one_node(store)

    def _no_room(self, name: str, data: bytes) -> Unavailable:
        """Return what to say of a value that a node did not take."""
        what, state = f"no room for {name!r} ({format_bytes(len(data))})", self.stat()
        worker = state.store.worker_id
        if state.draining:
            return Unavailable(f"{what}: {worker} drains and takes nothing; put it to another node")
        dram, ssd = (
            format_bytes(count * state.block_bytes)
            for count in (state.load.num_total_blocks, state.num_ssd_blocks)
        )
        return Unavailable(
            f"{what}: all of a value lies at one node, and {worker} has {dram} of DRAM and {ssd} "
            "on SSD, pinned blocks included; give it more (--dram, --ssd) or put it to another"
        )

    def get_value(self, name: str, tenant: str = "") -> bytes | None:
        """Return the value of that name; None when it is not there, or not all of it is."""
        layout = self._config.layout
        found = self.get([values.head_key(layout, name, tenant)])
        head = values.ValueHead.unpack(found[0]) if found else None
        if head is None:
            return None
        data = b"".join(self.get(head.keys(layout, tenant)))[: head.num_bytes]
        return data if head.is_of(data) else None

    def value_keys(self, name: str, tenant: str = "") -> list[BlockKey]:
        """Return the keys of the blocks of a value that is stored, its head first; none: it is not
        there.
        """
        layout = self._config.layout
        key = values.head_key(layout, name, tenant)
        found = self.get([key])
        head = values.ValueHead.unpack(found[0]) if found else None
        return [] if head is None else [key, *head.keys(layout, tenant)]

    def remove_value(self, name: str, tenant: str = "") -> bool:
        """Take a value out of the pool for good; False: it was not there, or is left (`remove`)."""
        keys = self.value_keys(name, tenant)
        if not keys or not all(self.remove(keys[:1])):
            return False
        self.remove(keys[1:])
        return True

    def exists(self, keys: Sequence[BlockKey]) -> list[Tier | None]:
        """Return the tier of each block; None: not stored."""
        answer: list[Tier | None] = self._call(partial(FailoverClient.exists, keys=keys))
        return answer

    def remove(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Take blocks out of all nodes and tiers for good: no node finds them again, not after a
        restart nor when it was away meanwhile. Who is reading reads on. False: it was not there, or
        is left: a hard pin is on it, or a disk could not erase it.

        Raises Unavailable when a node, or every gateway, does not answer: some may have it still.
        """
        answer: list[bool] = self._call(partial(FailoverClient.remove, keys=keys))
        return answer

    def pin(self, keys: Sequence[BlockKey], *, hard: bool = False) -> KeptAt:
        """Have blocks stay in the DRAM of all nodes that have them there, after this session's end,
        until `unpin` or the end of the node: hard pins are never evicted, soft ones after all other
        blocks. What is on SSD only, one node brings up. Of each, False: it is not in the pool, or
        there is no room, or none for more hard pins.
        """
        return self._keep(keys, Keep.HARD if hard else Keep.SOFT)

    def unpin(self, keys: Sequence[BlockKey], epochs: Sequence[str] = ()) -> KeptAt:
        """Undo `pin` on all nodes; with the epochs that `pin` returned, only those boots' pins."""
        return self._keep(keys, Keep.NO, epochs)

    def _keep(self, keys: Sequence[BlockKey], keep: Keep, epochs: Sequence[str] = ()) -> KeptAt:
        answer: KeptAt = self._call(
            partial(FailoverClient.keep, keys=keys, keep=keep, epochs=epochs)
        )
        return answer

    def replicas(self, keys: Sequence[BlockKey]) -> list[list[Replica]]:
        """Return all copies of each block: node, tier, bytes, pins. Holds nothing.

        Raises Unavailable when a node, or every gateway, does not answer.
        """
        answer: list[list[Replica]] = self._call(partial(FailoverClient.describe, keys=keys))
        return answer

    def stat_all(self) -> list[tuple[WorkerRef, PoolState | MooncakeError]]:
        """Return how each node of the pool is doing, or why it does not say."""
        answer: list[tuple[WorkerRef, PoolState | MooncakeError]] = self._call(
            FailoverClient.stat_all
        )
        return answer

    def replicate(self, keys: Sequence[BlockKey], num_nodes: int, tenant: str = "") -> int:
        """Have a run lie whole on `num_nodes` nodes; return on how many it does: less when there
        are no more nodes with room, 0 when none has all of it. Copies that nobody reads go before
        their originals, unless they are pinned.
        """
        call = partial(FailoverClient.replicate, keys=keys, num_nodes=num_nodes, tenant=tenant)
        count: int = self._call(call)
        return count

    def stat(self) -> PoolState:
        """Return how this session's own node is doing."""
        answer: PoolState = self._call(FailoverClient.stat)
        return answer

    def drain(self) -> PoolState:
        """Have the node take nothing more; `drained` of what `stat` returns tells the end of it."""
        answer: PoolState = self._call(FailoverClient.drain)
        return answer

    def links(self) -> Sequence[LinkSnapshot]:
        """Return what this session moved, by protocol, NIC and peer."""
        return self._transfer.links()

    def close(self) -> None:
        """Leave the cluster. To be called once."""
        self._driver.stop()
        self._thread.join()
        self._channel.send(self._config.gateway_address, PeerLost(worker=self._ref))
        self._channel.close()
        self._transfer.close()

    def __enter__(self) -> PoolSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, start: Callable[..., None]) -> Any:
        """Start a call (a method of the client) in its thread and wait for its one answer."""
        answer: Future[Any] = Future()
        started = self._driver.call(
            lambda client, now: start(client, done=answer.set_result, now=now)
        )
        started.result()
        try:
            # The client ends every call in time; only a client that was given up does not.
            result = answer.result(timeout=3 * self._config.timeout_s)
        except TimeoutError as error:
            raise Unavailable("this client was given up by the cluster: open a new one") from error
        if isinstance(result, MooncakeError):
            raise result
        return result

    def _batches(self, keys: list[BlockKey]) -> list[list[BlockKey]]:
        step = self._config.num_places
        return [keys[start : start + step] for start in range(0, len(keys), step)]

    def _view(self, place: int) -> memoryview:
        return self._region.buffer[place * self._block_bytes : (place + 1) * self._block_bytes]
