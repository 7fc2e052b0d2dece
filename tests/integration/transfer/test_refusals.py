"""Peers that refuse, by every protocol: each request says why, few of them ask again, and when the
peer would have us it has us, without a restart of either.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import pytest

from mooncake.base.clock import MonotonicClock
from mooncake.base.ids import SystemIds
from mooncake.base.kv_layout import SegmentRef
from mooncake.base.rights import CredentialRole
from mooncake.identity.credential import Credential, KeyAgreement, own_credential
from mooncake.transfer.engine import Op, TransferOp
from mooncake.transfer.local import CopyPool, InprocFabric
from mooncake.transfer.net.endpoint import ListenAddress
from mooncake.transfer.net.handshake import WORKERS, AcceptingSide, ConnectingSide, Credentials
from mooncake.transfer.net.io_loop import IoLoop
from mooncake.transfer.rdma.backend import RdmaBackend
from mooncake.transfer.rdma.memory import RdmaMemory
from mooncake.transfer.rdma.settings import RdmaSettings
from mooncake.transfer.regions import RegionTable
from mooncake.transfer.router import RoutedTransfer
from mooncake.transfer.shm.backend import ShmBackend
from mooncake.transfer.staging.engine import StagingEngine
from mooncake.transfer.staging.slots import StagingLimits
from mooncake.transfer.tcp.backend import TcpBackend, TcpSettings
from mooncake.transfer.topology import Place, build_matrix
from tests.support.transfer.device_pair import content, until
from tests.support.transfer.driving import move
from tests.support.transfer.fake_device import FakeDeviceMemory
from tests.support.transfer.fake_nics import FakeFabric, FakeNic

NUM_BYTES = 4096
NUM_REQUESTS = 200
FEW = 40
"""Requests of `NUM_REQUESTS` that may ask again, however slow the machine."""


def worker(secret: str) -> Credential:
    return own_credential(secret, CredentialRole.WORKER)


@dataclass(frozen=True, kw_only=True)
class Papers(Credentials):
    """Credentials that can be wrong, and counts of the requests for them."""

    faults: dict[str, str] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    def connect(self, wanted_engine_id: str, fenced: Sequence[str] = ()) -> ConnectingSide:
        self.asked.append(wanted_engine_id)
        hello = super().connect(wanted_engine_id, fenced).hello
        version = int(self.faults.get("version", hello.version))
        us, agreement = self._shown(), KeyAgreement(self.ids)
        hello = msgspec.structs.replace(
            hello, version=version, certificate=us.credential.signed, exchange=agreement.public
        )
        return ConnectingSide(us, agreement, hello)

    def accept(self, roles: frozenset[CredentialRole] = WORKERS) -> AcceptingSide:
        return AcceptingSide(self._shown(), roles)

    def _shown(self) -> Credentials:
        secret = self.faults.get("secret")
        return self if secret is None else replace(self, credential=worker(secret))


class Engine:
    """A transfer engine of one protocol; "stage": of a device's memory, over TCP."""

    def __init__(self, name: str, protocol: str, nics: FakeFabric) -> None:
        gates = InprocFabric().gates
        table, loop = RegionTable(gates), IoLoop(gates, "transfer-io")
        self.papers = Papers(engine_id=name, credential=worker("secret"), ids=SystemIds())
        router = self.transfer = RoutedTransfer(name, "host", table, MonotonicClock())
        router.use_loops([loop])
        router.add_closer(loop.close)
        self.memory: FakeDeviceMemory | None = None
        listen = ListenAddress()
        if protocol == "shm":
            pool = CopyPool(gates, 1, "transfer-copy")
            router.add_closer(pool.close)
            router.add_backend(ShmBackend(self.papers, table, pool, loop, router, "host"))
        elif protocol == "rdma":
            cards = [FakeNic(nics, f"{name}-0", 0)]
            memory = RdmaMemory(table, cards, build_matrix([Place(name=f"{name}-0", numa_node=0)]))
            router.add_backend(
                RdmaBackend(self.papers, memory, cards, loop, router, RdmaSettings(), listen)
            )
        else:
            router.add_backend(TcpBackend(self.papers, table, [loop], router, TcpSettings()))
        if protocol == "stage":
            limits = StagingLimits(slot_bytes=4096, num_slots=2, num_windows=2)
            router.add_staging_engine(StagingEngine(self.papers, table, router, limits, listen))
            self.memory = FakeDeviceMemory(NUM_BYTES)
            self.region = router.register_device(self.memory, "pages")
        else:
            self.region = router.allocate(NUM_BYTES, "host")

    def write(self, other: Engine, segment: SegmentRef | None = None) -> str | None:
        """Write all we have to another engine's memory; return what went wrong."""
        op = TransferOp(self.region.region_id, 0, other.region.region_id, 0, NUM_BYTES)
        return move(self.transfer, Op.WRITE, segment or other.transfer.segment, [op]).error

    def close(self) -> None:
        self.transfer.close()
        self.transfer.check_integrity()
        if self.memory is not None:
            self.memory.close()


class Relay:
    """A port that refuses, until `open` lets connections through to where they should go."""

    def __init__(self) -> None:
        self._listener = socket.socket()
        self._listener.bind(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets = [self._listener]

    def open(self, endpoint: str) -> None:
        self._listener.listen()
        threading.Thread(target=self._serve, args=(endpoint,), daemon=True).start()

    def _serve(self, endpoint: str) -> None:
        host, _, port = endpoint.rpartition(":")
        with contextlib.suppress(OSError):
            while True:
                near = self._listener.accept()[0]
                far = socket.create_connection((host, int(port)))
                self._sockets += [near, far]
                for source, target in ((near, far), (far, near)):
                    threading.Thread(target=_pump, args=(source, target), daemon=True).start()

    def close(self) -> None:
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


def _pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_RDWR)


Open = Callable[[str, str], Engine]


@pytest.fixture
def relay() -> Iterator[Relay]:
    relay = Relay()
    yield relay
    relay.close()


@pytest.fixture
def opened() -> Iterator[Open]:
    engines: list[Engine] = []
    nics = FakeFabric()

    def make(name: str, protocol: str) -> Engine:
        engines.append(Engine(name, protocol, nics))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
    assert not nics.pairs
    assert not nics.keys


FAULTS = [
    ("secret", "another", "wrong cluster secret"),
    ("version", "0", "transfer protocol version 0 is not"),
]


@pytest.mark.parametrize(("fault", "wrong", "words"), FAULTS)
@pytest.mark.parametrize("protocol", ["tcp", "shm", "rdma", "stage"])
def test_a_refused_peer_is_let_in_once_it_may(
    opened: Open, protocol: str, fault: str, wrong: str, words: str
) -> None:
    us, owner = opened("us", protocol), opened("owner", protocol)
    us.papers.faults[fault] = wrong
    errors = [us.write(owner) for _ in range(NUM_REQUESTS)]
    assert all(error is not None and words in error for error in errors), set(errors)
    assert 2 <= us.papers.asked.count("owner") < FEW
    del us.papers.faults[fault]
    until(lambda: us.write(owner) is None)
    assert us.write(owner) is None
    assert content(owner.region) == content(us.region)


@pytest.mark.parametrize("protocol", ["tcp", "rdma", "stage"])
def test_a_request_turned_away_gets_through_once_the_peer_is_there(
    opened: Open, relay: Relay, protocol: str
) -> None:
    us, owner = opened("us", protocol), opened("owner", protocol)
    endpoints = owner.transfer.segment.endpoints
    segment = SegmentRef("owner", {**endpoints, protocol: relay.endpoint}, "elsewhere")
    errors = [us.write(owner, segment) for _ in range(NUM_REQUESTS)]
    assert all(error is not None and "onnection refused" in error for error in errors), set(errors)
    assert us.papers.asked.count("owner") < FEW
    relay.open(endpoints[protocol])
    until(lambda: us.write(owner, segment) is None)
    assert content(owner.region) == content(us.region)
