"""The pool's blocking client against a real pool node: real sockets, real transfers, no gateway."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from mooncake.base import (
    KvLayout,
    MonotonicClock,
    Role,
    Tier,
    TransferError,
    WorkerHello,
    WorkerRef,
)
from mooncake.kvstore import KvNode, KvStoreConfig
from mooncake.launch import machine_facts
from mooncake.launch.driver import Driver
from mooncake.launch.pool_session import PoolSession, PoolSessionConfig
from mooncake.rpc.zmq_channel import ZmqChannel
from mooncake.transfer.factory import TransferConfig, open_transfer

LAYOUT = KvLayout(num_layers=3, block_tokens=8, kv_width=40, dtype="float16", fingerprint="test")
SECRET = "a secret of this test"
NUM_BLOCKS = 16


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def data(number: int) -> bytes:
    return bytes([number + 1]) * LAYOUT.block_bytes


@pytest.fixture(params=["tcp", "shm"])
def session(request: pytest.FixtureRequest) -> Iterator[PoolSession]:
    channel, gateway = (ZmqChannel("127.0.0.1", secret=SECRET) for _ in range(2))
    clock = MonotonicClock()
    config = TransferConfig(secret=SECRET, host=machine_facts.boot_id(), protocols=[request.param])
    transfer = open_transfer(config, "kv-boot", clock)
    hello = WorkerHello(
        worker=WorkerRef("kv", "e1", channel.address), role=Role.KVSTORE, node_id="n", host="h",
        pid=1, layout_fingerprint="test", block_tokens=8, num_blocks=0,
    )  # fmt: skip
    node = KvNode(
        KvStoreConfig(dram_bytes=NUM_BLOCKS * LAYOUT.block_bytes), hello, LAYOUT, channel,
        transfer, gateway.address,
    )  # fmt: skip
    driver = Driver(node, channel, transfer=transfer, clock=clock)
    thread = threading.Thread(target=driver.run)
    thread.start()
    settings = PoolSessionConfig(
        gateway_address=gateway.address, cluster_secret=SECRET, layout=LAYOUT,
        store_address=channel.address, transfer_protocols=["tcp", "shm"], num_places=4,
        timeout_s=20.0,
    )  # fmt: skip
    with PoolSession(settings) as opened:
        yield opened
    driver.stop()
    thread.join()
    channel.close()
    gateway.close()
    transfer.close()


def test_blocks_come_back_and_can_be_looked_at_and_removed(session: PoolSession) -> None:
    blocks = {key(n): data(n) for n in range(10)}
    assert session.put(blocks) == list(blocks), "more blocks than fit through its memory at once"
    assert session.put(blocks) == []
    assert session.get([*blocks, key(99)]) == list(blocks.values())
    assert session.exists([key(3), key(99)]) == [Tier.DRAM, None]
    assert session.remove([key(3), key(99)]) == [True, False]
    assert session.get(list(blocks)) == [data(n) for n in range(3)]
    state = session.stat()
    assert (state.load.num_total_blocks, state.load.num_cached_blocks) == (NUM_BLOCKS, 9)
    assert state.load.num_running == state.load.num_waiting == 0


def test_blocks_go_straight_from_and_to_registered_memory(session: PoolSession) -> None:
    size = session.block_bytes
    assert len(session.memory) == 4 * size
    session.memory[size : 3 * size] = data(1) + data(2)
    assert session.put_from([key(1), key(2)], [size, 2 * size]) == [key(1), key(2)]
    session.memory[:] = bytes(4 * size)
    assert session.get_into([key(1), key(2), key(3)], [3 * size, 0, size]) == 2
    assert bytes(session.memory[3 * size :]) == data(1)
    assert bytes(session.memory[:size]) == data(2)


def test_data_of_the_wrong_size_is_refused(session: PoolSession) -> None:
    with pytest.raises(ValueError, match="not 1920"):
        session.put({key(1): b"short"})


def test_nobody_at_the_address_is_an_error_not_a_hang() -> None:
    gone = ZmqChannel("127.0.0.1", secret=SECRET)
    address = gone.address
    gone.close()
    settings = PoolSessionConfig(
        gateway_address=address, cluster_secret=SECRET, layout=LAYOUT, store_address=address,
        timeout_s=0.3,
    )  # fmt: skip
    with PoolSession(settings) as session, pytest.raises(TransferError, match="does not answer"):
        session.stat()
