"""A pool node whose disk hangs in mid-write: it goes on in DRAM, and nobody takes it for dead."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from mooncake.base import (
    KvLayout,
    LoadReport,
    MonotonicClock,
    Role,
    SeededIds,
    WorkerHello,
    WorkerRef,
)
from mooncake.base.rights import CredentialRole
from mooncake.identity.credential import own_credential
from mooncake.kvstore.config import KvStoreConfig, SsdConfig
from mooncake.kvstore.node.node import KvNode
from mooncake.kvstore.storage.disk_files import FileDisks
from mooncake.kvstore.storage.segment_files import SegmentFiles
from mooncake.launch.host import machine_facts
from mooncake.launch.host.driver import Driver
from mooncake.launch.pool_client.session import PoolSession, PoolSessionConfig
from mooncake.rpc.zmq_channel import ZmqChannel
from mooncake.scheduler.config import SchedulerConfig
from mooncake.scheduler.gateway.gateway import Gateway
from mooncake.scheduler.placement.conductor import Conductor
from mooncake.telemetry.events import EventList
from mooncake.transfer.factory import TransferConfig, open_transfer
from tests.support.kvstore.pool_process import until
from tests.support.waiting import LONG_S

LAYOUT = KvLayout(num_layers=2, block_tokens=16, kv_width=64, dtype="float32", fingerprint="test")
SECRET = "a secret of this test"
DRAM_BLOCKS = 16


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def data(number: int) -> bytes:
    return number.to_bytes(4, "big") * (LAYOUT.block_bytes // 4)


class HungWrites:
    """Writes of blocks wait until `over`; reads do not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.over = threading.Event()
        self.begun = threading.Event()
        plain = SegmentFiles.blocks

        def blocks(files, call, slot: int, vectors) -> None:
            if call.__name__ == "pwritev":
                self.begun.set()
                self.over.wait()
            plain(files, call, slot, vectors)

        monkeypatch.setattr(SegmentFiles, "blocks", blocks)


@pytest.fixture
def hung(monkeypatch: pytest.MonkeyPatch) -> Iterator[HungWrites]:
    hung = HungWrites(monkeypatch)
    yield hung
    hung.over.set()


class GatewayProcess(Gateway):
    """Counts what it hears from the node."""

    num_reports = 0

    def handle(self, event: msgspec.Struct, now: float) -> None:
        self.num_reports += isinstance(event, LoadReport)
        super().handle(event, now)


@pytest.fixture
def channels() -> Iterator[dict[str, ZmqChannel]]:
    opened = {
        name: ZmqChannel("127.0.0.1", credential=own_credential(SECRET, *CredentialRole))
        for name in ("kv", "gateway")
    }
    yield opened
    for channel in opened.values():
        channel.close()


@pytest.fixture
def front(channels: dict[str, ZmqChannel]) -> GatewayProcess:
    config = SchedulerConfig()
    return GatewayProcess(
        config, WorkerRef("gateway", "g1", channels["gateway"].address),
        Conductor(config, SeededIds(1)), channels["gateway"], SeededIds(2), EventList(),
    )  # fmt: skip


@pytest.fixture
def session(
    tmp_path: Path, channels: dict[str, ZmqChannel], front: GatewayProcess, hung: HungWrites
) -> Iterator[PoolSession]:
    clock = MonotonicClock()
    settings = TransferConfig(secret=SECRET, host=machine_facts.boot_id(), protocols=["tcp"])
    transfer = open_transfer(settings, "kv-boot", clock)
    ssd = SsdConfig(directory=str(tmp_path), num_bytes=4 << 20)
    disks = FileDisks([ssd], LAYOUT, num_threads=2)
    hello = WorkerHello(
        worker=WorkerRef("kv", "e1", channels["kv"].address), role=Role.KVSTORE, node_id="n",
        host="h", pid=1, layout_fingerprint="test", block_tokens=16, num_blocks=0,
    )  # fmt: skip
    node = KvNode(
        KvStoreConfig(
            dram_bytes=DRAM_BLOCKS * LAYOUT.block_bytes, ssd=[ssd], ssd_min_uses=1,
            ssd_write_at=0.0, report_interval_s=0.02,
        ),
        hello, LAYOUT, channels["kv"], transfer, channels["gateway"].address, disks,
    )  # fmt: skip
    drivers = [
        Driver(front, channels["gateway"], clock=clock),
        Driver(node, channels["kv"], transfer=transfer, polled=[disks], clock=clock),
    ]
    threads = [threading.Thread(target=driver.run) for driver in drivers]
    for thread in threads:
        thread.start()
    reached = PoolSessionConfig(
        gateway_address=channels["gateway"].address, cluster_secret=SECRET, layout=LAYOUT,
        node_id="n", transfer_protocols=["tcp"], num_places=4, timeout_s=60.0,
    )  # fmt: skip
    with PoolSession(reached) as opened:
        opened.connect()
        yield opened
    hung.over.set()
    for driver, thread in zip(drivers, threads, strict=True):
        driver.stop()
        thread.join()
    disks.close()
    transfer.close()


def test_memory_goes_on_while_a_disk_hangs(
    session: PoolSession, front: GatewayProcess, hung: HungWrites
) -> None:
    assert session.put({key(0): data(0)}) == [key(0)]
    assert hung.begun.wait(LONG_S), "it is on its way to the disk"
    epoch = session.stat().store.epoch
    for number in range(1, 6 * DRAM_BLOCKS):
        assert session.put({key(number): data(number)}) == [key(number)]
        assert session.get([key(number)]) == [data(number)]
    state = session.stat()
    assert state.num_ssd_stored == 0
    assert state.load.counters["blocks_refused"] == 0
    assert session.get([key(0)]) == [data(0)], "what is being written stays until it is"
    before = front.num_reports
    until(lambda: front.num_reports > before + 20, "the node is heard as ever")
    assert session.stat().store.epoch == epoch
    hung.over.set()
    until(lambda: session.stat().num_ssd_stored > 0, "the disk goes on where it was")
    assert session.stat().load.counters["ssd_write_errors"] == 0
