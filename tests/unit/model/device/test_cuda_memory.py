"""What a GPU's driver is asked, and when copies are said to have ended: over a driver and streams
that need no GPU.
"""

from __future__ import annotations

import ctypes
import os
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from mooncake.base import KvLayout, TransferError
from mooncake.model.device.cuda_memory import CudaDevice, Driver, Gpu
from mooncake.model.device.pages import PageMemory
from mooncake.model.kv_tensors import KvTensors
from mooncake.transfer.rdma.memory import RdmaMemory
from mooncake.transfer.regions import Gates, RegionTable
from mooncake.transfer.topology import build_matrix
from tests.support.transfer.fake_cuda import FakeCuda
from tests.support.transfer.fake_nics import FakeFabric, FakeNic
from tests.support.waiting import LONG_S

OUT_OF_MEMORY, INVALID_CONTEXT = 2, 201


class FakeStream:
    """Work of a stream: what was begun there, in order. Ends when a test says so."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.ended = threading.Event()
        self.broken = False


class FakeEvent:
    def __init__(self, blocking: bool) -> None:
        assert blocking, "a thread that waits must not spin"

    def record(self, stream: FakeStream) -> None:
        self.stream = stream

    def synchronize(self) -> None:
        assert self.stream.ended.wait(LONG_S)
        if self.stream.broken:
            raise RuntimeError("illegal address")


class FakeStreams:
    """torch's streams: those that were made, and those that work is begun on, the last one now."""

    def __init__(self) -> None:
        self.made: list[FakeStream] = []
        self.current: list[FakeStream] = []

    def new(self, device: torch.device) -> FakeStream:
        self.made.append(FakeStream(device))
        return self.made[-1]

    @contextmanager
    def use(self, stream: FakeStream) -> Iterator[None]:
        self.current.append(stream)
        try:
            yield
        finally:
            self.current.pop()


@pytest.fixture(autouse=True)
def streams(monkeypatch: pytest.MonkeyPatch) -> FakeStreams:
    made = FakeStreams()
    monkeypatch.setattr(torch.cuda, "Stream", made.new)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "stream", made.use)
    return made


@pytest.fixture
def cuda(tmp_path: Path) -> FakeCuda:
    return FakeCuda(tmp_path)


@pytest.fixture
def device(cuda: FakeCuda) -> CudaDevice:
    made = CudaDevice(torch.device("cuda"), Gpu(1, cuda.driver))
    assert cuda.calls() == ["cuInit 0", "cuDeviceGet 1"]
    return made


@pytest.fixture
def elsewhere() -> Iterator[Callable[[Callable[[], object]], object]]:
    """Runs a call on a thread that has not touched the GPU before, as transfers do."""
    with ThreadPoolExecutor(1) as threads:
        yield lambda call: threads.submit(call).result()


# ------------------------------------------------------------------ the driver


def test_calls_go_to_the_gpus_context_from_any_thread(
    cuda: FakeCuda, device: CudaDevice, elsewhere: Callable[[Callable[[], object]], object]
) -> None:
    host = memoryview(bytearray(2**20))
    elsewhere(lambda: device.pin(host))
    elsewhere(device.flush)
    elsewhere(lambda: device.unpin(host))
    assert cuda.calls() == [
        f"cuMemHostRegister_v2 {2**20} 1",
        "cuDeviceGetAttribute 118 11",
        "cuFlushGPUDirectRDMAWrites 0 100",
        "cuMemHostUnregister",
    ]


def test_location_is_as_sysfs_has_it(cuda: FakeCuda, device: CudaDevice) -> None:
    assert device.location == "gpu:0000:3c:00.0"
    cuda.fail("cuDeviceGetPCIBusId", OUT_OF_MEMORY)
    assert CudaDevice(torch.device("cuda"), Gpu(0, cuda.driver)).location == "anywhere"


def test_what_cannot_be_pinned_is_said(cuda: FakeCuda, device: CudaDevice) -> None:
    host = memoryview(bytearray(4096))
    cuda.fail("cuMemHostRegister_v2", OUT_OF_MEMORY)
    with pytest.raises(TransferError, match=r"cannot pin 4096 bytes.*CUDA error 2.*ulimit"):
        device.pin(host)
    device.unpin(host)  # never pinned: nobody is troubled with it


def test_without_a_driver_there_is_a_reason(cuda: FakeCuda, tmp_path: Path) -> None:
    with pytest.raises(TransferError, match="no-such"):
        Driver(str(tmp_path / "no-such.so"))
    with pytest.raises(TransferError, match="cuDeviceGet: CUDA error 101"):
        Gpu(7, cuda.driver)


# ------------------------------------------------------------------ NICs


def test_what_nics_wrote_is_flushed_where_the_gpu_needs_it(
    cuda: FakeCuda, device: CudaDevice
) -> None:
    cuda.set(ordering=100)
    ordered = CudaDevice(torch.device("cuda"), Gpu(0, cuda.driver))
    ordered.flush()
    assert not [line for line in cuda.calls() if line.startswith("cuFlush")]
    cuda.set(ordering=0)
    device.flush()
    cuda.fail("cuFlushGPUDirectRDMAWrites", INVALID_CONTEXT)
    with pytest.raises(TransferError, match="RDMAWrites: CUDA_ERROR_INVALID_CONTEXT"):
        device.flush()


@pytest.mark.parametrize(("ordering", "flushes"), [(0, 0), (0, 1), (100, 0), (200, 1)])
def test_nics_reach_only_what_the_gpu_can_be_shown(
    cuda: FakeCuda, device: CudaDevice, monkeypatch: pytest.MonkeyPatch, ordering: int, flushes: int
) -> None:
    monkeypatch.setattr("mooncake.model.device.cuda_memory.has_peer_memory", lambda: True)
    cuda.set(ordering=ordering, flushes=flushes)
    shown = bool(ordering or flushes)
    assert device.reachable_by_nics() is shown
    found = device.dmabuf(cuda.allocate(2**21), 2**21)
    assert (found is not None) is shown
    if found is not None:
        os.close(found.fd)


def test_a_dmabuf_is_of_whole_pages(cuda: FakeCuda, device: CudaDevice) -> None:
    start = cuda.allocate(2**21)
    cuda.calls()
    found = device.dmabuf(start + 5000, 100_000)
    assert found is not None
    assert found.offset == 5000
    assert os.fstat(found.fd).st_size == 2**21
    os.close(found.fd)
    assert cuda.calls()[-1] == f"cuMemGetHandleForAddressRange {2 * 2**16} 1 0"
    assert device.dmabuf(start + 2**30, 4096) is None, "no memory of the device"


def test_without_the_kernels_help_there_is_no_dmabuf(cuda: FakeCuda, device: CudaDevice) -> None:
    cuda.set(dmabufs=0)
    assert device.dmabuf(cuda.allocate(2**21), 4096) is None
    assert not [line for line in cuda.calls() if "AddressRange" in line]


def test_nics_register_the_pages_of_a_gpu(cuda: FakeCuda, device: CudaDevice) -> None:
    layout = KvLayout(num_layers=2, block_tokens=16, kv_width=32, dtype="bfloat16", fingerprint="f")
    num_pages, fabric = 4, FakeFabric()
    num_bytes = num_pages * layout.block_bytes
    raw = (ctypes.c_uint8 * num_bytes).from_address(cuda.allocate(2**21))
    shape = (layout.num_layers, num_pages, layout.block_tokens, layout.kv_width)
    pages = torch.frombuffer(raw, dtype=torch.bfloat16).view(shape)
    memory = PageMemory(KvTensors(layout, pages), device)
    table, nic = RegionTable(Gates()), FakeNic(fabric, "nic", 0)
    rdma = RdmaMemory(table, [nic], build_matrix([]))
    region = table.register_device(memory, "pages")
    assert region.protocols == {"rdma"}
    assert list(fabric.keys.values()) == [(0, num_bytes)]
    rdma.close()
    nic.close()


# ------------------------------------------------------------------ copies


def test_copies_end_when_their_stream_has_got_there(
    device: CudaDevice, streams: FakeStreams
) -> None:
    told: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    used: list[FakeStream] = []
    for outwards in (True, False, True):
        device.run(outwards, lambda: used.append(streams.current[-1]), told.put)
    out, back = streams.made
    assert out.device == back.device == torch.device("cuda", 0)
    assert used == [out, back, out], "one stream each way"
    assert told.empty()
    back.ended.set()
    assert told.get(timeout=LONG_S) is None
    assert told.empty()
    out.ended.set()
    assert [told.get(timeout=LONG_S) for _ in range(2)] == [None, None]


def test_what_fails_half_way_ends_when_what_it_began_has_ended(
    device: CudaDevice, streams: FakeStreams
) -> None:
    told: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def fails() -> None:
        raise ValueError("out of memory")

    device.run(True, fails, told.put)
    assert told.empty(), "a copy that it began may still write to the host"
    streams.made[0].ended.set()
    assert told.get(timeout=LONG_S) == "cuda:0: out of memory"


def test_a_gpu_that_fails_is_told_of_each_time(device: CudaDevice, streams: FakeStreams) -> None:
    told: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    out = streams.made[0]
    out.broken = True
    out.ended.set()
    for _ in range(2):
        device.run(True, lambda: None, told.put)
        assert told.get(timeout=LONG_S) == "illegal address"
