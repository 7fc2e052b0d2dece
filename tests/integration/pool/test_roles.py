"""Credentials of fewer rights than the cluster secret, at a real pool node and gateway."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import pytest

from mooncake.base import (
    ConfigError,
    Drain,
    Forbidden,
    KvLayout,
    MonotonicClock,
    MooncakeError,
    PeerLost,
    PinBlocks,
    PinGranted,
    PutEnd,
    PutGranted,
    PutStart,
    Role,
    SystemIds,
    Tier,
    Unpin,
    WorkerHello,
    WorkerRef,
)
from mooncake.base.messages import Refused
from mooncake.base.rights import CredentialRole, client_id, tenant_key
from mooncake.identity.credential import issue, own_credential
from mooncake.kvstore.config import KvStoreConfig
from mooncake.kvstore.node.node import KvNode
from mooncake.launch.host import machine_facts
from mooncake.launch.host.driver import Driver
from mooncake.launch.pool_client.session import PoolSession, PoolSessionConfig
from mooncake.rpc.zmq_channel import ZmqChannel
from mooncake.scheduler.config import SchedulerConfig
from mooncake.scheduler.gateway.gateway import Gateway
from mooncake.scheduler.placement.conductor import Conductor
from mooncake.telemetry.events import EventList
from mooncake.transfer import factory
from mooncake.transfer.engine import Op, TransferOp
from mooncake.transfer.factory import TransferConfig, open_transfer
from mooncake.transfer.net.handshake import Credentials
from mooncake.transfer.tcp.backend import TcpBackend
from tests.support.clock import Calendar
from tests.support.kvstore.pool_process import until
from tests.support.transfer.driving import move

LAYOUT = KvLayout(num_layers=3, block_tokens=8, kv_width=40, dtype="float16", fingerprint="test")
SECRET = "a secret of this test"
NUM_BLOCKS = 16
Kind = TypeVar("Kind")
CLIENT, OPERATOR = CredentialRole.POOL_CLIENT, CredentialRole.OPERATOR


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def data(number: int) -> bytes:
    return bytes([number + 1]) * LAYOUT.block_bytes


def text(role: CredentialRole, tenant: str | None = None, expires_s: float = 0.0) -> str:
    """Return a credential, as its file has it."""
    return issue(SECRET, f"{role.value} {tenant}", [role], tenant=tenant, expires_s=expires_s).text


class Pool:
    """A node and a gateway in threads, and sessions of what credentials they are asked with."""

    def __init__(self, gateway_text: str = SECRET) -> None:
        self.channel = ZmqChannel(
            "127.0.0.1", credential=own_credential(SECRET, CredentialRole.WORKER)
        )
        gateway = ZmqChannel(
            "127.0.0.1", credential=own_credential(gateway_text, CredentialRole.GATEWAY)
        )
        self.gateway = gateway
        clock = MonotonicClock()
        protocols = ["tcp", "shm"]
        config = TransferConfig(secret=SECRET, host=machine_facts.boot_id(), protocols=protocols)
        self.transfer = open_transfer(config, "kv-boot", clock)
        hello = WorkerHello(
            worker=WorkerRef("kv", "e1", self.channel.address), role=Role.KVSTORE, node_id="n",
            host="h", pid=1, layout_fingerprint="test", block_tokens=8, num_blocks=0,
        )  # fmt: skip
        self.node = KvNode(
            KvStoreConfig(dram_bytes=NUM_BLOCKS * LAYOUT.block_bytes), hello, LAYOUT, self.channel,
            self.transfer, gateway.address,
        )  # fmt: skip
        plan, ids, own = SchedulerConfig(), SystemIds(), WorkerRef("gateway", "g1", gateway.address)
        machine = Gateway(plan, own, Conductor(plan, ids), gateway, ids, EventList())
        self.drivers = [
            Driver(self.node, self.channel, transfer=self.transfer, clock=clock),
            Driver(machine, gateway, own=own),
        ]
        self._threads = [
            threading.Thread(target=driver.run, daemon=True) for driver in self.drivers
        ]
        for thread in self._threads:
            thread.start()
        self._workers = partial(self.drivers[1].call, lambda front, _: front.status(0.0).workers)

    def joined(self) -> set[str]:
        return {worker.id for worker in self._workers().result()}

    def session(self, proof: str, **settings: Any) -> PoolSession:
        return PoolSession(PoolSessionConfig(
            gateway_address=self.gateway.address, cluster_secret=proof, layout=LAYOUT,
            store_address=self.channel.address, num_places=4,
            **{"timeout_s": 20.0, **settings},
        ))  # fmt: skip

    def close(self) -> None:
        for driver, thread in zip(self.drivers, self._threads, strict=True):
            driver.stop()
            thread.join()
        self.channel.close()
        self.gateway.close()
        self.transfer.close()


@pytest.fixture
def calendar(monkeypatch: pytest.MonkeyPatch) -> Calendar:
    """The clock by which credentials expire."""
    made = Calendar()
    monkeypatch.setattr(factory, "Credentials", partial(Credentials, unix_time=made))
    return made


@pytest.fixture
def pool(calendar: Calendar) -> Iterator[Pool]:
    opened = Pool()
    until(lambda: "kv" in opened.joined(), "the gateway knows the node")
    yield opened
    opened.close()


def test_a_client_of_a_tenant_has_a_world_of_its_own(pool: Pool) -> None:
    blocks = {key(n): data(n) for n in range(6)}
    with pool.session(text(CLIENT, "acme")) as acme, pool.session(text(CLIENT, "b")) as other:
        assert acme.put(blocks) == list(blocks)
        assert acme.get(list(blocks)) == list(blocks.values())
        assert acme.exists([key(0), key(9)]) == [Tier.DRAM, None]
        assert other.get(list(blocks)) == []
        assert other.exists([key(0)]) == [None]
        assert other.put({key(0): data(7)}) == [key(0)], "keys of tenants never meet"
        assert acme.get([key(0)]) == [data(0)]
        assert other.remove([key(1)]) == [False]
        assert acme.pin([key(1)]).blocks == [True]
        assert [replica.copy.tier for replica in acme.replicas([key(1)])[0]] == [Tier.DRAM]
        assert other.replicas([key(1)]) == [[]]
        assert acme.unpin([key(1)]).blocks == [True]
        assert acme.remove([key(0), key(1)]) == [True, True]
        assert other.get([key(0)]) == [data(7)]
    with pool.session(SECRET) as everything:
        assert everything.exists([key(2), tenant_key(key(2), "acme")]) == [None, Tier.DRAM]


def test_values_of_a_tenant_are_the_same_by_its_credential_and_by_the_secret(pool: Pool) -> None:
    with pool.session(text(CLIENT, "acme")) as acme, pool.session(SECRET) as everything:
        assert acme.put_value("notes", b"x" * 2000)
        assert everything.get_value("notes", "acme") == b"x" * 2000
        assert everything.get_value("notes") is None
        assert everything.put_value("notes", b"others'")
        assert acme.get_value("notes", "acme") == b"x" * 2000
        assert acme.remove_value("notes")
        assert everything.get_value("notes") == b"others'"
        with pytest.raises(Forbidden, match="of tenant 'acme', not 'b': take one of"):
            acme.put_value("notes", b"", "b")


def test_an_operator_reads_figures_and_drains_and_touches_no_block(pool: Pool) -> None:
    with pool.session(text(OPERATOR)) as operator:
        assert operator.stat().load.num_total_blocks == NUM_BLOCKS
        for call in (
            lambda: operator.put({key(1): data(1)}),
            lambda: operator.get([key(1)]),
            lambda: operator.remove([key(1)]),
            lambda: operator.pin([key(1)]),
            lambda: operator.replicas([key(1)]),
        ):
            with pytest.raises(MooncakeError, match=r"pool-client|handles no blocks"):
                call()
        assert operator.drain().draining


def test_a_client_may_not_drain(pool: Pool) -> None:
    with pool.session(text(CLIENT, "acme")) as acme:
        assert not acme.drain().draining
        assert acme.stat().load.counters["messages_refused"] == 1


def test_what_has_expired_is_refused_with_words(pool: Pool) -> None:
    with (
        pool.session(text(CLIENT, "acme", expires_s=1.0)) as late,
        pytest.raises(MooncakeError, match="has expired; make a new one"),
    ):
        late.stat()


def test_a_credential_of_another_cluster_opens_nothing(pool: Pool) -> None:
    strange = issue("another secret", "etl", [CLIENT], tenant="acme").text
    with pool.session(strange, timeout_s=1.0) as session, pytest.raises(MooncakeError):
        session.stat()
    assert pool.joined() == {"kv"}


class Raw:
    """A client that says what it likes with its credential."""

    def __init__(self, pool: Pool, proof: str) -> None:
        self._pool = pool
        credential = own_credential(proof, *CredentialRole)
        self.channel = ZmqChannel("127.0.0.1", credential=credential)
        name = client_id(credential.certificate.channel_key.hex()) + "1"
        self.ref = WorkerRef(name, "e", self.channel.address)

    def answer(self, message: Any, kind: type[Kind]) -> Kind:
        """Send a message to the node; return its answer."""
        self.channel.send(self._pool.channel.address, message)
        found: list[Any] = []
        until(lambda: bool(found.extend(self.channel.receive()) or found), "an answer")
        assert isinstance(found[0], kind), found
        return found[0]

    def refusal(self, message: Any) -> str:
        """Send a message to the node; return why it was refused."""
        return self.answer(message, Refused).reason


@pytest.fixture
def raw(pool: Pool) -> Iterator[Callable[[str], Raw]]:
    opened: list[Raw] = []

    def make(proof: str) -> Raw:
        opened.append(Raw(pool, proof))
        return opened[-1]

    yield make
    for each in opened:
        each.channel.close()


def test_the_owner_refuses_whatever_the_client_program_sends(
    pool: Pool, raw: Callable[[str], Raw], caplog: pytest.LogCaptureFixture
) -> None:
    client, other = raw(text(CLIENT, "acme")), raw(text(CLIENT, "b"))
    foreign = PinBlocks(reader=client.ref, ticket=7, keys=[tenant_key(key(1), "b")])
    assert "keys of tenant 'acme' only" in client.refusal(foreign)
    assert "keys of tenant 'acme' only" in client.refusal(
        PutEnd(writer=client.ref, ticket=1, written=[key(1)])
    )
    num_refused = pool.channel.counters.num_refused
    node = WorkerRef("kv", "e1", pool.channel.address)
    for silent in (
        PeerLost(worker=node),
        PeerLost(worker=other.ref),
        Drain(),
        PinBlocks(reader=other.ref, ticket=1, keys=[]),
    ):
        client.channel.send(pool.channel.address, silent)
    until(lambda: pool.channel.counters.num_refused == num_refused + 4, "all are refused")
    assert other.channel.receive() == [], "nobody is sent a refusal of what he did not send"
    complaints = [each for each in caplog.messages if each.startswith("message refused")]
    assert len(complaints) == 1, "once for each peer"
    assert not pool.node.state().draining


def test_a_certificate_counts_only_on_its_own_connection(
    pool: Pool, raw: Callable[[str], Raw]
) -> None:
    """Certificates are no secrets: who has seen a worker's cannot use it."""
    client = raw(text(CLIENT, "acme"))
    client.channel._head = pool.channel._head
    client.channel.send(pool.channel.address, PeerLost(worker=client.ref))
    until(lambda: pool.channel.counters.num_refused == 1, "it is refused")


@pytest.fixture
def gateway_without_secret() -> Iterator[Pool]:
    opened = Pool(gateway_text=text(CredentialRole.GATEWAY))
    yield opened
    opened.close()


def test_a_gateway_needs_no_secret(gateway_without_secret: Pool) -> None:
    pool = gateway_without_secret
    assert pool.gateway.address.partition("#")[2], "its address says its key"
    until(lambda: "kv" in pool.joined(), "the gateway knows the node")
    with pool.session(text(CLIENT, "acme")) as acme:
        assert acme.put({key(1): data(1)}) == [key(1)]
        assert acme.remove([key(1)]) == [True], "through the gateway's list of nodes"
    assert pool.channel.counters.num_refused == pool.gateway.counters.num_refused == 0


def test_a_gateway_pins_no_blocks(pool: Pool, raw: Callable[[str], Raw]) -> None:
    posing = raw(text(CredentialRole.GATEWAY))
    pin = PinBlocks(reader=posing.ref, ticket=1, keys=[key(1)])
    assert "may not send PinBlocks: it takes" in posing.refusal(pin)


class Hands:
    """A client's transfer engine, used as its program likes."""

    def __init__(self, pool: Pool, proof: str, protocol: str) -> None:
        config = TransferConfig(
            secret=proof, roles=(CLIENT,), host=machine_facts.boot_id(), protocols=[protocol]
        )
        self.transfer = open_transfer(config, "client-boot", MonotonicClock())
        self._own = self.transfer.allocate(NUM_BLOCKS * LAYOUT.block_bytes, "own")
        self._theirs, self._segment = pool.node.region.region_id, pool.transfer.segment
        self.grant = 0
        """What is written carries it."""

    def move(self, op: Op, offset: int, num_bytes: int = LAYOUT.block_bytes) -> str | None:
        """Read or write the pool's memory; return why not."""
        ops = [TransferOp(self._own.region_id, 0, self._theirs, offset, num_bytes)]
        grant = self.grant if op is Op.WRITE else 0
        return move(self.transfer, op, self._segment, ops, grant=grant).error


@pytest.fixture(params=["tcp", "shm"])
def hands(pool: Pool, request: pytest.FixtureRequest) -> Iterator[tuple[Raw, Hands]]:
    proof = text(CLIENT, "acme")
    client, engine = Raw(pool, proof), Hands(pool, proof, request.param)
    yield client, engine
    engine.transfer.close()
    client.channel.close()


def test_a_client_touches_what_it_was_lent_while_it_is_lent(
    pool: Pool, hands: tuple[Raw, Hands]
) -> None:
    client, engine = hands
    keys = [tenant_key(key(n), "acme") for n in range(2)]
    ask = PutStart(writer=client.ref, ticket=1, keys=keys, tenant="acme")
    granted = client.answer(ask, PutGranted)
    first, second = granted.places.offsets
    size = LAYOUT.block_bytes
    if "tcp" in engine.transfer.segment.endpoints:
        assert "written to by grants only" in str(engine.move(Op.WRITE, first))
    engine.grant = granted.places.grant
    if "tcp" not in engine.transfer.segment.endpoints:
        assert "may not move blocks this way" in str(engine.move(Op.WRITE, first))
        return
    others = [
        offset for offset in range(0, NUM_BLOCKS * size, size) if offset not in (first, second)
    ]
    assert engine.move(Op.WRITE, first) is None
    assert engine.move(Op.WRITE, min(first, second), 2 * size) is None, "pieces that adjoin"
    for op, offset, length in (
        (Op.READ, first, size), (Op.WRITE, others[0], size), (Op.READ, others[0], size),
        (Op.READ, 0, NUM_BLOCKS * size), (Op.WRITE, max(first, second), size + 1),
    ):  # fmt: skip
        assert "this client may not" in str(engine.move(op, offset, length))
    client.channel.send(pool.channel.address, PutEnd(writer=client.ref, ticket=1, written=keys[:1]))
    until(lambda: pool.node.stores(keys[0]), "the first is stored")
    assert "may not write this memory" in str(engine.move(Op.WRITE, first))
    assert engine.move(Op.WRITE, second) is None, "the other put is open"
    for ticket in (2, 3):
        pinned = client.answer(
            PinBlocks(reader=client.ref, ticket=ticket, keys=keys[:1]), PinGranted
        )
        assert pinned.places.offsets == [first]
    client.channel.send(pool.channel.address, Unpin(reader=client.ref, ticket=2))
    until(lambda: pool.transfer.num_loans == 2, "one pin is over")
    assert engine.move(Op.READ, first) is None, "it has pinned the block twice"
    assert "may not write this memory" in str(engine.move(Op.WRITE, first))
    pool.channel.send(pool.channel.address, PeerLost(worker=client.ref))
    until(lambda: pool.transfer.num_loans == 0, "the client was given up")
    assert "may not read this memory" in str(engine.move(Op.READ, first))
    assert "may not write this memory" in str(engine.move(Op.WRITE, second))


def test_loans_are_of_one_client(pool: Pool, hands: tuple[Raw, Hands]) -> None:
    client, _ = hands
    ask = PutStart(writer=client.ref, ticket=1, keys=[tenant_key(key(1), "acme")], tenant="acme")
    granted = client.answer(ask, PutGranted)
    [offset] = granted.places.offsets
    other = Hands(pool, text(CLIENT, "acme"), "tcp")
    other.grant = granted.places.grant
    assert "this client may not" in str(other.move(Op.WRITE, offset))
    other.transfer.close()


def test_a_client_that_may_not_use_tcp_is_told(pool: Pool) -> None:
    with pytest.raises(ConfigError, match="moves blocks over TCP only; add tcp"):
        pool.session(text(CLIENT, "acme"), transfer_protocols=["shm"])


def test_of_too_many_connections_of_one_client_the_oldest_go(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its programs connect again when they have something to move; a worker's stay."""
    monkeypatch.setattr("mooncake.transfer.net.listener.MAX_PER_CLIENT", 2)
    (served,) = [each for each in pool.transfer.backends if isinstance(each, TcpBackend)]
    proof, blocks = text(CLIENT, "acme"), {key(0): data(0)}
    with ExitStack() as opened:
        worker = opened.enter_context(pool.session(SECRET, transfer_protocols=["tcp"]))
        worker.put({key(1): data(1)})
        sessions = [opened.enter_context(pool.session(proof)) for _ in range(4)]
        sessions[0].put(blocks)
        for _ in range(2):
            for session in sessions:
                assert session.get(list(blocks)) == list(blocks.values())
        # Far sooner than connections end that are idle.
        until(lambda: served.num_connections == 3, "two of the client, one of the worker")


def test_a_session_ends_with_its_credential(
    pool: Pool, calendar: Calendar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mooncake.transfer.net.standing.LOOK_S", 0.1)
    (served,) = [each for each in pool.transfer.backends if isinstance(each, TcpBackend)]
    proof = text(CLIENT, "acme", expires_s=time.time() + 600.0)
    blocks = {key(0): data(0)}
    with pool.session(proof) as session:
        session.put(blocks)
        assert session.get(list(blocks)) == list(blocks.values())
        assert served.num_connections > 0
        calendar.ahead_s = 1000.0
        until(lambda: served.num_connections == 0, "its connections have ended")
        with pytest.raises(MooncakeError, match="expired"):
            session.get(list(blocks))
