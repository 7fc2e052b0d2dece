"""Transfer engines whose NICs are made of memory copies, and how tests drive them."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator

from mooncake.base.clock import MonotonicClock
from mooncake.base.ids import SystemIds
from mooncake.base.rights import CredentialRole
from mooncake.identity.credential import own_credential
from mooncake.transfer.engine import Region, TransferOp
from mooncake.transfer.local import InprocFabric
from mooncake.transfer.net.endpoint import ListenAddress
from mooncake.transfer.net.handshake import Credentials
from mooncake.transfer.net.io_loop import IoLoop
from mooncake.transfer.net.retries import BreakerLimits
from mooncake.transfer.rdma.backend import RdmaBackend
from mooncake.transfer.rdma.memory import RdmaMemory
from mooncake.transfer.rdma.settings import RdmaLimits, RdmaSettings
from mooncake.transfer.regions import RegionTable
from mooncake.transfer.router import RoutedTransfer
from mooncake.transfer.tcp.backend import TcpBackend, TcpSettings
from mooncake.transfer.topology import Place, build_matrix
from tests.support.transfer.driving import WAIT_S
from tests.support.transfer.fake_nics import FakeFabric, FakeNic

KIB, MIB = 2**10, 2**20
LIMITS = RdmaLimits(fence_s=0.02, breaker=BreakerLimits(first_s=0.01, longest_s=0.02))


class Engine:
    """A transfer engine whose NICs are made of memory copies."""

    def __init__(
        self, fabric: FakeFabric, name: str, num_nics: int, tcp: bool, max_endpoints: int
    ) -> None:
        self.nics = [FakeNic(fabric, f"{name}-{rail}", rail) for rail in range(num_nics)]
        gates, clock = InprocFabric().gates, MonotonicClock()
        self.table = table = RegionTable(gates)
        self.transfer = RoutedTransfer(name, f"host of {name}", table, clock)
        credentials = Credentials(
            engine_id=name,
            credential=own_credential("secret", CredentialRole.WORKER),
            ids=SystemIds(),
        )
        self.loop = loop = IoLoop(gates, "transfer-rdma")
        self.transfer.use_loops([loop])
        self.transfer.add_closer(loop.close)
        places = [Place(name=nic.address.name, numa_node=0) for nic in self.nics]
        memory = RdmaMemory(table, self.nics, build_matrix(places))
        settings = RdmaSettings(
            limits=LIMITS, max_endpoints=max_endpoints, link_look_s=0.01, lost_look_s=0.01
        )
        self.rdma = RdmaBackend(
            credentials, memory, self.nics, loop, self.transfer, settings, ListenAddress()
        )
        self.transfer.add_backend(self.rdma)
        if tcp:
            self.transfer.add_backend(
                TcpBackend(credentials, table, [loop], self.transfer, TcpSettings())
            )


class Open:
    """Opens engines on one fabric."""

    def __init__(self, fabric: FakeFabric) -> None:
        self._fabric = fabric
        self.engines: list[Engine] = []

    def __call__(
        self, name: str, *, num_nics: int = 2, tcp: bool = False, max_endpoints: int = 512
    ) -> Engine:
        self.engines.append(Engine(self._fabric, name, num_nics, tcp, max_endpoints))
        return self.engines[-1]


@contextlib.contextmanager
def engines_on(fabric: FakeFabric) -> Iterator[Open]:
    """Close all engines at the end, and see that they leave nothing behind."""
    opened = Open(fabric)
    yield opened
    for engine in opened.engines:
        engine.transfer.close()
        engine.transfer.check_integrity()
        assert all(nic.closed for nic in engine.nics)
    assert not fabric.pairs, "a queue pair was left open"
    assert not fabric.keys, "memory was left registered"


def filled(engine: Engine, num_bytes: int, seed: int) -> Region:
    """Return new memory of an engine, full of random bytes."""
    region = engine.transfer.allocate(num_bytes, "filled")
    region.buffer[:] = random.Random(seed).randbytes(num_bytes)
    return region


def pair_of(opened: Open, num_bytes: int, **ours: int) -> tuple[Engine, Engine, Region, Region]:
    """Return two engines and memory of each."""
    us, owner = opened("us", **ours), opened("owner")
    return us, owner, filled(us, num_bytes, 1), filled(owner, num_bytes, 2)


def whole(ours: Region, theirs: Region) -> list[TransferOp]:
    """Return one copy of all of `ours`."""
    return [TransferOp(ours.region_id, 0, theirs.region_id, 0, ours.num_bytes)]


def until(condition: Callable[[], bool], act: Callable[[], object]) -> None:
    """Do `act` again and again until the condition holds."""
    clock = MonotonicClock()
    end = clock.now() + WAIT_S
    while not condition():
        assert clock.now() < end, "never came true"
        act()
