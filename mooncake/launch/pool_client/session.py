"""Blocking calls on a pool, for programs and operators: a pool client in its own thread.

Wires `kvstore.client.failover` to real messages and transfers. Each command of `mooncake pool` is
a call or two of these.
"""

from __future__ import annotations

import os
import ssl
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import msgspec

from mooncake.base import (
    BlockKey,
    ConfigError,
    Forbidden,
    KvLayout,
    MonotonicClock,
    MooncakeError,
    PeerLost,
    Role,
    SystemIds,
    Tier,
    TransferError,
    Unavailable,
    Unreachable,
    WorkerHello,
    WorkerRef,
    format_bytes,
)
from mooncake.base.pool_messages import LastingPin, PoolState
from mooncake.base.rights import CredentialRole, client_id, tenant_key
from mooncake.identity.credential import PREFIX, own_credential
from mooncake.kvstore.client import values
from mooncake.kvstore.client.block_memory import BlockMemory, Where
from mooncake.kvstore.client.broadcast import PinnedAt, Replica
from mooncake.kvstore.client.calls import Policy
from mooncake.kvstore.client.client import ClientPorts, PoolClient
from mooncake.kvstore.client.failover import MAX_ATTEMPTS, FailoverClient
from mooncake.launch.host import machine_facts
from mooncake.launch.host.driver import Driver
from mooncake.launch.host.http_client import TIMEOUT_S, Client
from mooncake.launch.host.secrets.credentials import sign_request
from mooncake.rpc.zmq_channel import ZmqChannel
from mooncake.transfer.choices import AUTO, choose_protection, usable_protocols
from mooncake.transfer.device import DeviceMemory
from mooncake.transfer.engine import Region
from mooncake.transfer.factory import TransferConfig, open_transfer
from mooncake.transfer.link_stats import LinkSnapshot
from mooncake.transfer.net.endpoint import ListenAddress
from mooncake.transfer.rdma.settings import RdmaSettings
from mooncake.transfer.tcp.backend import TcpSettings

CONNECT_POLL_S = 0.02
_ROLES = (CredentialRole.POOL_CLIENT, CredentialRole.OPERATOR)
_TRANSFER_ROLES = (*_ROLES, CredentialRole.WORKER)
"""Roles with the cluster secret: its holder moves bytes as workers do, by all protocols."""
_Answer = TypeVar("_Answer")
STATS_PATH = "/v1/pool/stats"


class PoolSessionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the pool is, what it requires of clients, and this client's limits."""

    gateway_address: str
    cluster_secret: str
    """The cluster secret, or the text of a pool client's credential."""
    layout: KvLayout
    node_id: str = ""
    """The machine whose pool node is used first, as its workers name it."""
    store_address: str = ""
    """The address of the pool node that is used first, in place of its machine's name."""
    bind_host: str = "127.0.0.1"
    """The address of this machine at which the pool's answers arrive."""
    transfer_protocols: list[str] = msgspec.field(default_factory=lambda: list(usable_protocols()))
    transfer_protection: str = AUTO
    """The least protection of what passes over sockets; pool nodes may want more."""
    rdma: RdmaSettings = RdmaSettings()
    num_places: int = 16
    """Number of blocks of memory that `put` and `get` copy through: the most that one transfer
    carries.
    """
    timeout_s: float = 10.0
    """Time limit of a call, with all the nodes that it uses."""

    def __repr__(self) -> str:
        """Return only the place of the pool: one of the settings is a secret."""
        return f"PoolSessionConfig(gateway_address={self.gateway_address!r})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        """Return the same for rich, which would otherwise print all fields."""
        return [("gateway_address", self.gateway_address)]


def locate(
    url: str,
    cluster_secret: str,
    tls: ssl.SSLContext | None = None,
    timeout_s: float = TIMEOUT_S,
) -> PoolSessionConfig:
    """Ask the HTTP API server of a pool node for its address and block layout. Return settings for
    a session that listens at the address by which this machine reaches that node. The request is
    signed, so the server at `url` does not learn the secret. A server that sends nothing for
    `timeout_s` counts as not answering.

    Raises:
        Unreachable: no server answers at `url`.
        Unauthorized, Forbidden: the server refuses the secret or the credential.
        MooncakeError: there is no way to the node, or the server refuses, or is no pool node.
    """

    credential = own_credential(cluster_secret, *_ROLES)

    def sign(method: str, path: str, challenge: str) -> str:
        return sign_request(credential, method, path, challenge)

    about = Client(url, sign=sign, tls=tls, timeout_s=timeout_s).get(STATS_PATH)
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
        raise MooncakeError(f"{url} is not a pool node of this version: {error}") from error


def _protocols(config: PoolSessionConfig) -> list[str]:
    """Return the protocols of a session. A pool node lends memory in pieces only over TCP, so a
    session with a credential uses no other protocol.
    """
    if not config.cluster_secret.startswith(PREFIX):
        return config.transfer_protocols
    if "tcp" not in config.transfer_protocols:
        raise ConfigError(
            "transport: a client with a credential moves blocks over TCP only; add tcp"
        )
    return ["tcp"]


class PoolSession:
    """Connects this process to a pool. All threads may call it, also at the same time.

    It uses its own node as long as that answers. When the node fails, even in the middle of a call,
    blocks are put to another node and read from others that hold them. Blocks of a run that its own
    node lacks are read from others too. All calls raise MooncakeError (TransferError, Unavailable)
    when no node is left.
    """

    def __init__(self, config: PoolSessionConfig) -> None:
        """Start the session. Raises ConfigError when `bind_host` cannot be bound or a protocol is
        unknown.
        """
        self._config = config
        ids, protocols = SystemIds(), _protocols(config)
        credential = own_credential(config.cluster_secret, *_ROLES, name="pool client")
        self._tenant = credential.certificate.tenant
        self._channel = ZmqChannel(config.bind_host, credential=credential)
        clock = MonotonicClock()
        self._transfer = open_transfer(
            TransferConfig(
                secret=config.cluster_secret,
                roles=_TRANSFER_ROLES,
                host=machine_facts.boot_id(),
                protocols=protocols,
                protection=choose_protection(config.transfer_protection),
                tcp=TcpSettings(listen=ListenAddress(config.bind_host)),
                rdma=config.rdma,
            ),
            ids.hex(8),
            clock,
        )
        self._block_bytes = config.layout.block_bytes
        self._region = self._transfer.allocate(
            config.num_places * self._block_bytes, "pool-session"
        )
        ref = self._ref = WorkerRef(
            client_id(credential.certificate.channel_key.hex()) + ids.hex(4), ids.hex(8),
            self._channel.address,
        )  # fmt: skip
        hello = WorkerHello(
            worker=ref, role=Role.CLIENT, node_id=config.node_id, host=machine_facts.host_name(),
            pid=os.getpid(), layout_fingerprint=config.layout.fingerprint,
            block_tokens=config.layout.block_tokens, num_blocks=0,
        )  # fmt: skip
        store = WorkerRef("", "", config.store_address) if config.store_address else None
        ports = ClientPorts(self._channel, self._transfer, self._region, config.gateway_address)
        client = PoolClient(hello, config.layout, ports, store=store)
        self._client = FailoverClient(client, config.timeout_s)
        self._driver = Driver(
            self._client, self._channel, transfer=self._transfer, clock=clock, own=ref, shares=True
        )
        self._memory_lock = threading.Lock()
        self._thread = threading.Thread(target=self._driver.run, name="pool-session", daemon=True)
        self._thread.start()

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self._block_bytes

    def connect(self) -> None:
        """Wait until the gateway has named the pool. Raises Unreachable after `timeout_s`."""
        pause = threading.Event()
        for _ in range(int(self._config.timeout_s / CONNECT_POLL_S)):
            if self._client.own_store is not None:
                return
            pause.wait(CONNECT_POLL_S)
        raise Unreachable(
            f"{self._config.gateway_address} names no pool on node {self._config.node_id!r}: is "
            "the cluster up, and the secret right?"
        )

    @property
    def nodes(self) -> list[str]:
        """Addresses of the nodes that calls use, the preferred one first."""
        asked = self._driver.call(lambda client, _: client.nodes)
        known: list[str] = asked.result()
        return known

    @property
    def memory(self) -> memoryview:
        """The registered memory that blocks are copied through: `num_places` blocks. `put` and
        `get` use all of it; do not call them while you use it with `put_from` and `get_into`.
        """
        return self._region.buffer

    def register(
        self, *pieces: memoryview | DeviceMemory, layer_stride: int | None = None
    ) -> BlockMemory:
        """Register the caller's own memory, so that blocks are written from and read into it
        directly. It must not move until `unregister`. `at` of the result names places in it.

        Args:
            pieces: writable host memory (for a tensor: `memoryview(t.view(torch.uint8).numpy())`)
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
        """Withdraw registered memory. Calls that still use it fail, and on return nothing touches
        it any more.
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
        """Store blocks, a run of one chain, from `offsets` in `memory` or from places in registered
        memory. Return those that were written. Nothing is copied on the way.
        """
        names = dict(zip(self._named(keys), keys, strict=True))
        tenant = self._tenant_of(tenant)
        written = self._call(lambda client: client.put_from(list(names), offsets, tenant))
        return [names[name] for name in written]

    def get_into(self, keys: Sequence[BlockKey], offsets: Where) -> int:
        """Read a run of blocks into `offsets` in `memory` or into places in registered memory.
        Return how many came, counted from the first. Nothing is copied on the way.
        """
        return self._call(lambda client: client.get_into(self._named(keys), offsets))

    def put(self, blocks: dict[BlockKey, bytes], tenant: str = "") -> list[BlockKey]:
        """Store blocks, a run of one chain; return those that were written. The others were stored
        already, or there was no room. The next calls of this session see them, other sessions a
        moment later. All of them are on one node; if that is lost meanwhile, all are put to another
        one. Raises ValueError for data of the wrong size.
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
        """Call `work`, which puts blocks, until all its puts went to one node."""
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
        """Return the bytes of a run of blocks, up to the first block that is missing."""
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
        """Store a value of any size. Return False when a value has that name already. To store
        tensors of any type and shape, use the value `safetensors.torch.save(tensors)`.

        Raises:
            Unavailable: there is no room for the value.
            ValueError: blocks of this pool are too small for values.
        """
        layout, tenant = self._config.layout, self._tenant_of(tenant)
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
        """Return the error for a value that a node did not take."""
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
        """Return the value of that name; None when it is missing or not complete."""
        layout, tenant = self._config.layout, self._tenant_of(tenant)
        found = self.get([values.head_key(layout, name, tenant)])
        head = values.ValueHead.unpack(found[0]) if found else None
        if head is None:
            return None
        data = b"".join(self.get(head.keys(layout, tenant)))[: head.num_bytes]
        return data if head.is_of(data) else None

    def value_keys(self, name: str, tenant: str = "") -> list[BlockKey]:
        """Return the keys of the blocks of a stored value, its head first; empty: it is not
        stored.
        """
        layout, tenant = self._config.layout, self._tenant_of(tenant)
        key = values.head_key(layout, name, tenant)
        found = self.get([key])
        head = values.ValueHead.unpack(found[0]) if found else None
        return [] if head is None else [key, *head.keys(layout, tenant)]

    def remove_value(self, name: str, tenant: str = "") -> bool:
        """Remove a value from the pool for good. Return False when it was not stored, or remains,
        as `remove` explains.
        """
        keys = self.value_keys(name, tenant)
        if not keys or not all(self.remove(keys[:1])):
            return False
        self.remove(keys[1:])
        return True

    def exists(self, keys: Sequence[BlockKey]) -> list[Tier | None]:
        """Return the tier of each block, or None if it is not stored."""
        return self._call(lambda client: client.exists(self._named(keys)))

    def match(self, keys: Sequence[BlockKey]) -> int:
        """Return how many leading blocks of a run the pool holds, on all its nodes together. This
        is a hint: it does not keep the blocks, and only `get_into` tells what came.
        """
        return self._call(lambda client: client.match(self._named(keys)))

    def remove(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Remove blocks from all nodes and tiers for good. No node finds them again, neither after
        a restart nor after an absence. Readers finish what they read. For each block, False means
        that it was not stored, or that it remains: it has a hard pin, or a disk could not erase it.
        Raises Unavailable when a node, or every gateway, does not answer: a block may remain.
        """
        return self._call(lambda client: client.broadcast.remove(self._named(keys)))

    def pin(self, keys: Sequence[BlockKey], *, hard: bool = False) -> PinnedAt:
        """Keep blocks in the DRAM of all nodes that have them there, also after this session ends,
        until `unpin` or the end of the node. Hard-pinned blocks are never evicted, soft-pinned ones
        after all others. One node brings up blocks that are on SSD only. For each block, False
        means that it is not in the pool, or that there is no room for it or for more hard pins.
        """
        pin = LastingPin.HARD if hard else LastingPin.SOFT
        return self._call(lambda client: client.broadcast.pin(self._named(keys), pin))

    def unpin(self, keys: Sequence[BlockKey], epochs: Sequence[str] = ()) -> PinnedAt:
        """Undo `pin` on all nodes. With the epochs that `pin` returned, undo only the pins of those
        boots.
        """
        names = self._named(keys)
        return self._call(lambda client: client.broadcast.pin(names, LastingPin.NONE, epochs))

    def replicas(self, keys: Sequence[BlockKey]) -> list[list[Replica]]:
        """Return all copies of each block: node, tier, bytes, pins. A copy may disappear at any
        moment. Raises Unavailable when a node, or every gateway, does not answer.
        """
        return self._call(lambda client: client.broadcast.describe(self._named(keys)))

    def stat_all(self) -> list[tuple[WorkerRef, PoolState | MooncakeError]]:
        """Return the figures of each node of the pool, or why it does not answer."""
        return self._call(lambda client: client.broadcast.stat_all())

    def replicate(self, keys: Sequence[BlockKey], num_nodes: int, tenant: str = "") -> int:
        """Copy a run until `num_nodes` nodes hold all of it, and return how many do. That is fewer
        when no more nodes have room, and 0 when none has all of it. Copies that are not read are
        dropped before their originals, unless they are pinned.
        """
        names, tenant = self._named(keys), self._tenant_of(tenant)
        return self._call(lambda client: client.replicate(names, num_nodes, tenant))

    def stat(self) -> PoolState:
        """Return the figures of this session's own node."""
        return self._call(lambda client: client.stat())

    def drain(self) -> PoolState:
        """Have the session's own node accept nothing more. It may be ended once `stat` shows
        `drained`.
        """
        return self._call(lambda client: client.drain())

    def links(self) -> Sequence[LinkSnapshot]:
        """Return what this session has moved, by protocol, NIC and peer."""
        return self._transfer.links()

    def close(self) -> None:
        """Leave the cluster. Call it once."""
        self._driver.stop()
        self._thread.join()
        self._channel.send(self._config.gateway_address, PeerLost(worker=self._ref))
        self._channel.close()
        self._transfer.close()

    def __enter__(self) -> PoolSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, make: Callable[[FailoverClient], Policy[_Answer]]) -> _Answer:
        """Start a call of the client and wait for its answer. Raises the MooncakeError that it ends
        with.
        """
        answer: Future[_Answer | MooncakeError] = Future()

        def answered(result: _Answer | MooncakeError) -> None:
            self._driver.at_end(partial(answer.set_result, result))

        started = self._driver.call(lambda client, now: client.run(make(client), answered, now))
        started.result()
        try:
            # The client ends every call in time; only a client that was given up does not.
            result = answer.result(timeout=3 * self._config.timeout_s)
        except TimeoutError as error:
            raise Unavailable("the cluster has given this client up: open a new one") from error
        if isinstance(result, MooncakeError):
            raise result
        return result

    def _named(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Return the keys under which the pool stores blocks of this session. A credential of one
        tenant reaches only its own keys, which are derived from those given.
        """
        tenant = self._tenant
        return list(keys) if tenant is None else [tenant_key(key, tenant) for key in keys]

    def _tenant_of(self, tenant: str) -> str:
        """Return the tenant whose blocks are meant. Raises Forbidden if it is not the credential's
        tenant.
        """
        if self._tenant is None or tenant in ("", self._tenant):
            return tenant or self._tenant or ""
        raise Forbidden(
            f"the credential is of tenant {self._tenant!r}, not {tenant!r}: take one of "
            f"`mooncake credential --role pool-client --tenant {tenant}`"
        )

    def _batches(self, keys: list[BlockKey]) -> list[list[BlockKey]]:
        step = self._config.num_places
        return [keys[start : start + step] for start in range(0, len(keys), step)]

    def _view(self, place: int) -> memoryview:
        return self._region.buffer[place * self._block_bytes : (place + 1) * self._block_bytes]
