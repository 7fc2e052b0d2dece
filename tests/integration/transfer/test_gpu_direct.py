"""NICs that reach the memory of a device by themselves, over fakes of both: for any machine."""

from __future__ import annotations

import ctypes
import mmap
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mooncake.base.clock import MonotonicClock
from mooncake.base.ids import SystemIds
from mooncake.base.rights import CredentialRole
from mooncake.identity.credential import own_credential
from mooncake.transfer.engine import Op, TransferBatch, TransferOp
from mooncake.transfer.local import InprocFabric
from mooncake.transfer.net.endpoint import ListenAddress
from mooncake.transfer.net.handshake import Credentials
from mooncake.transfer.net.io_loop import IoLoop
from mooncake.transfer.net.retries import BreakerLimits
from mooncake.transfer.rdma.backend import RdmaBackend
from mooncake.transfer.rdma.memory import RdmaMemory
from mooncake.transfer.rdma.nic import Outcome, WorkRequest
from mooncake.transfer.rdma.settings import RdmaLimits, RdmaSettings
from mooncake.transfer.regions import DeviceRegion, RegionTable
from mooncake.transfer.router import RoutedTransfer
from mooncake.transfer.staging.engine import StagingEngine
from mooncake.transfer.tcp.backend import TcpBackend, TcpSettings
from mooncake.transfer.topology import Place, build_matrix, has_peer_memory
from tests.support.transfer.device_pair import LIMITS, until
from tests.support.transfer.driving import move, wait_for
from tests.support.transfer.fake_device import PAGE, FakeDeviceMemory
from tests.support.transfer.fake_nics import FakeFabric, FakeNic

SIZE = 64 * 1024
GPU = "gpu:0000:3b:00.0"
RDMA_LIMITS = RdmaLimits(fence_s=0.02, breaker=BreakerLimits(first_s=0.01, longest_s=0.02))


class PeerMemory(FakeDeviceMemory):
    """Memory whose driver lets NICs register its address."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(num_bytes, location=GPU)
        self.nics_reach = True
        self._mapped = mmap.mmap(self._fd, num_bytes)

    @property
    def address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self._mapped))


def by_dmabuf(num_bytes: int) -> FakeDeviceMemory:
    memory = FakeDeviceMemory(num_bytes, location=GPU, gap=3 * PAGE)
    memory.has_dmabuf = True
    return memory


def out_of_reach(num_bytes: int) -> FakeDeviceMemory:
    return FakeDeviceMemory(num_bytes, location=GPU)


class Engine:
    """A transfer engine with fake NICs, the second of them beside the GPU, and TCP."""

    def __init__(self, fabric: FakeFabric, name: str) -> None:
        self.nics = [FakeNic(fabric, f"{name}-{rail}", rail) for rail in range(2)]
        gates, clock = InprocFabric().gates, MonotonicClock()
        table = RegionTable(gates)
        self.transfer = RoutedTransfer(name, f"host of {name}", table, clock)
        credentials = Credentials(
            engine_id=name,
            credential=own_credential("secret", CredentialRole.WORKER),
            ids=SystemIds(),
        )
        loop = IoLoop(gates, "transfer-rdma")
        self.transfer.add_closer(loop.close)
        listen = ListenAddress()
        self.transfer.add_staging_engine(
            StagingEngine(credentials, table, self.transfer, LIMITS, listen)
        )
        switch = ("pci0", "root", "switch")
        places = [
            Place(name=self.nics[0].address.name, numa_node=0, pci_path=("pci0", "other", "far")),
            Place(name=self.nics[1].address.name, numa_node=0, pci_path=(*switch, "nic")),
        ]
        gpu = Place(name=GPU, numa_node=0, pci_path=(*switch, "gpu"))
        memory = RdmaMemory(table, self.nics, build_matrix(places, [gpu]))
        settings = RdmaSettings(limits=RDMA_LIMITS, link_look_s=0.01)
        self.transfer.add_backend(
            RdmaBackend(credentials, memory, self.nics, loop, self.transfer, settings, listen)
        )
        tcp = TcpBackend(credentials, table, [loop], self.transfer, TcpSettings())
        self.transfer.add_backend(tcp)
        self.memories: list[FakeDeviceMemory] = []

    def device(self, memory: FakeDeviceMemory, seed: int) -> DeviceRegion:
        memory.fill(random.Random(seed).randbytes(SIZE))
        self.memories.append(memory)
        return self.transfer.register_device(memory, "pages")

    @property
    def staged_bytes(self) -> float:
        return self.transfer.counters()["transfer_stage_bytes"]


@pytest.fixture
def fabric() -> FakeFabric:
    return FakeFabric()


@pytest.fixture
def pair(fabric: FakeFabric) -> Iterator[tuple[Engine, Engine]]:
    engines = Engine(fabric, "us"), Engine(fabric, "owner")
    yield engines
    for engine in engines:
        engine.transfer.close()
        engine.transfer.check_integrity()
    assert not fabric.keys, "memory was left registered"


Make = Callable[[int], FakeDeviceMemory]


def odd(ours: DeviceRegion, theirs: DeviceRegion) -> list[TransferOp]:
    """Return two pieces whose bytes lie elsewhere on the other side."""
    return [
        TransferOp(ours.region_id, 1, theirs.region_id, 7, 30_001),
        TransferOp(ours.region_id, 31_000, theirs.region_id, 40_003, 9_999),
    ]


def same(ours: FakeDeviceMemory, theirs: FakeDeviceMemory) -> bool:
    here, there = ours.content(), theirs.content()
    return here[1:30_002] == there[7:30_008] and here[31_000:40_999] == there[40_003:50_002]


@pytest.mark.parametrize("op", [Op.READ, Op.WRITE])
@pytest.mark.parametrize("make", [by_dmabuf, PeerMemory])
def test_bytes_go_from_device_to_device(
    pair: tuple[Engine, Engine], fabric: FakeFabric, make: Make, op: Op
) -> None:
    us, owner = pair
    ours, theirs = us.device(make(SIZE), 1), owner.device(make(SIZE), 2)
    before = us.memories[0].content(), owner.memories[0].content()
    done = move(us.transfer, op, owner.transfer.segment, odd(ours, theirs))
    assert (done.error, done.num_bytes) == (None, 40_000)
    assert same(us.memories[0], owner.memories[0])
    assert (us.memories[0].content(), owner.memories[0].content())[op is Op.READ] == before[
        op is Op.READ
    ]
    assert us.staged_bytes == 0
    written = (us if op is Op.READ else owner).memories[0]
    assert written.log == ["settle", "flush"], "before the NIC writes, and after"
    assert {copied.nic for copied in fabric.copied} == {"us-1"}, "the NIC beside the GPU"
    assert not any(copied.request.in_host for copied in fabric.copied), "the CPU reads none of it"


def test_a_driver_that_helps_in_vain_is_followed_by_dmabuf(pair: tuple[Engine, Engine]) -> None:
    us, owner = pair
    memory = by_dmabuf(SIZE)
    memory.nics_reach = True
    theirs = owner.device(by_dmabuf(SIZE), 2)
    us.transfer.register_device(
        FakeDeviceMemory(PAGE, "fake:1"), "first"
    )  # brings the host memory it needs
    us.nics[1].refuses_registrations = True
    ours = us.device(memory, 1)
    us.nics[1].refuses_registrations = False
    assert ours.protocols == {"rdma"}
    assert move(us.transfer, Op.WRITE, owner.transfer.segment, odd(ours, theirs)).error is None
    assert same(us.memories[0], owner.memories[0])
    assert us.staged_bytes == 0


@pytest.mark.parametrize("makes", [(by_dmabuf, out_of_reach), (out_of_reach, by_dmabuf)])
@pytest.mark.parametrize("op", [Op.READ, Op.WRITE])
def test_where_one_end_is_out_of_reach_bytes_are_staged(
    pair: tuple[Engine, Engine], makes: tuple[Make, Make], op: Op
) -> None:
    us, owner = pair
    ours, theirs = us.device(makes[0](SIZE), 1), owner.device(makes[1](SIZE), 2)
    done = move(us.transfer, op, owner.transfer.segment, odd(ours, theirs))
    assert (done.error, done.protocol) == (None, "stage")
    assert done.nics, "of what carried the staged slices"
    assert set(done.nics) <= {nic.address.name for nic in us.nics}
    assert same(us.memories[0], owner.memories[0])
    assert us.staged_bytes == 40_000


def test_nics_that_take_no_device_memory_leave_none_registered(
    pair: tuple[Engine, Engine], fabric: FakeFabric
) -> None:
    us, owner = pair
    us.transfer.register_device(
        FakeDeviceMemory(PAGE, "fake:1"), "first"
    )  # brings the host memory it needs
    num_keys = len(fabric.keys)
    us.nics[1].refuses_dmabufs = True
    ours, theirs = us.device(by_dmabuf(SIZE), 1), owner.device(by_dmabuf(SIZE), 2)
    assert ours.protocols == set()
    assert theirs.protocols == {"rdma"}
    assert sum(key[1] == SIZE for key in fabric.keys.values()) == 2, "the owner's, on two NICs"
    assert num_keys > 0
    assert move(us.transfer, Op.WRITE, owner.transfer.segment, odd(ours, theirs)).error is None
    assert same(us.memories[0], owner.memories[0])


def test_a_batch_whose_nics_fail_on_the_device_goes_by_staging(
    pair: tuple[Engine, Engine], fabric: FakeFabric
) -> None:
    us, owner = pair
    ours, theirs = us.device(by_dmabuf(SIZE), 1), owner.device(by_dmabuf(SIZE), 2)
    behind = fabric.behind

    def fails(_nic: FakeNic, request: WorkRequest) -> Outcome | None:
        return Outcome.REFUSED if request.remote_key in behind else None

    fabric.fails = fails
    assert move(us.transfer, Op.WRITE, owner.transfer.segment, odd(ours, theirs)).error is None
    assert same(us.memories[0], owner.memories[0])
    assert us.staged_bytes == 40_000


@pytest.mark.parametrize("op", [Op.READ, Op.WRITE])
def test_bytes_that_cannot_be_shown_to_the_device_have_not_arrived(
    pair: tuple[Engine, Engine], op: Op
) -> None:
    us, owner = pair
    ours, theirs = us.device(by_dmabuf(SIZE), 1), owner.device(by_dmabuf(SIZE), 2)
    written = (us if op is Op.READ else owner).memories[0]
    written.fails = lambda what: "the GPU is gone" if what == "flush" else None
    done = move(us.transfer, op, owner.transfer.segment, odd(ours, theirs))
    assert done.error is not None
    assert "the GPU is gone" in done.error
    written.fails = lambda what: None
    assert move(us.transfer, op, owner.transfer.segment, odd(ours, theirs)).error is None


def test_a_direct_batch_can_be_cancelled(pair: tuple[Engine, Engine], fabric: FakeFabric) -> None:
    us, owner = pair
    ours, theirs = us.device(by_dmabuf(SIZE), 1), owner.device(by_dmabuf(SIZE), 2)
    ops = odd(ours, theirs)
    assert move(us.transfer, Op.WRITE, owner.transfer.segment, ops).error is None
    fabric.hold()
    batch = TransferBatch(op=Op.WRITE, peer=owner.transfer.segment, ops=ops)
    batch_id = us.transfer.submit(batch)
    until(lambda: fabric.num_held > 0)
    us.transfer.cancel(batch_id)
    assert wait_for(us.transfer, [batch_id])[batch_id].error == "cancelled"
    fabric.release()
    assert us.staged_bytes == 0


def test_sysfs_tells_whether_the_driver_helps(tmp_path: Path) -> None:
    assert not has_peer_memory(tmp_path)
    (tmp_path / "module/nvidia_peermem").mkdir(parents=True)
    assert has_peer_memory(tmp_path)
