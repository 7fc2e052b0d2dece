"""The pool's blocking client against a real pool node and gateway: real sockets and transfers."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from functools import partial

import pytest
import safetensors.torch
import torch

from mooncake.base import (
    KvLayout,
    MonotonicClock,
    MooncakeError,
    Role,
    SystemIds,
    Tier,
    TransferError,
    WorkerHello,
    WorkerRef,
)
from mooncake.base.rights import CredentialRole
from mooncake.identity.credential import own_credential
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
from mooncake.transfer.device import read_now, write_now
from mooncake.transfer.factory import TransferConfig, open_transfer
from tests.support.kvstore.pool_process import until
from tests.support.transfer.fake_device import FakeDeviceMemory

LAYOUT = KvLayout(num_layers=3, block_tokens=8, kv_width=40, dtype="float16", fingerprint="test")
SECRET = "a secret of this test"
NUM_BLOCKS = 16


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def data(number: int) -> bytes:
    return bytes([number + 1]) * LAYOUT.block_bytes


@pytest.fixture(params=["tcp", "shm"])
def session(request: pytest.FixtureRequest) -> Iterator[PoolSession]:
    channel, gateway = (
        ZmqChannel("127.0.0.1", credential=own_credential(SECRET, *CredentialRole))
        for _ in range(2)
    )
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
    plan, ids, own = SchedulerConfig(), SystemIds(), WorkerRef("gateway", "g1", gateway.address)
    machine = Gateway(plan, own, Conductor(plan, ids), gateway, ids, EventList())
    drivers = [
        Driver(node, channel, transfer=transfer, clock=clock), Driver(machine, gateway, own=own),
    ]  # fmt: skip
    threads = [threading.Thread(target=driver.run) for driver in drivers]
    for thread in threads:
        thread.start()
    settings = PoolSessionConfig(
        gateway_address=gateway.address, cluster_secret=SECRET, layout=LAYOUT,
        store_address=channel.address, transfer_protocols=["tcp", "shm"], num_places=4,
        timeout_s=20.0,
    )  # fmt: skip
    with PoolSession(settings) as opened:
        workers = partial(drivers[1].call, lambda front, _: front.status(0.0).workers)
        until(lambda: len(workers().result()) == 1, "the gateway knows the node")
        yield opened
    for driver, thread in zip(drivers, threads, strict=True):
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
    until(lambda: session.match([*blocks, key(99)]) == len(blocks), "the gateway knows them")
    assert session.remove([key(3), key(99)]) == [True, False]
    assert session.get(list(blocks)) == [data(n) for n in range(3)]
    load = session.stat().load
    assert (load.num_total_blocks, load.num_cached_blocks) == (NUM_BLOCKS, 9)

    def at_rest() -> bool:
        load = session.stat().load
        return load.num_running == load.num_waiting == 0

    until(at_rest, "the node has sent the last block and dropped the pin")


def test_blocks_go_straight_from_and_to_registered_memory(session: PoolSession) -> None:
    size = session.block_bytes
    assert len(session.memory) == 4 * size
    session.memory[size : 3 * size] = data(1) + data(2)
    assert session.put_from([key(1), key(2)], [size, 2 * size]) == [key(1), key(2)]
    session.memory[:] = bytes(4 * size)
    assert session.get_into([key(1), key(2), key(3)], [3 * size, 0, size]) == 2
    assert bytes(session.memory[3 * size :]) == data(1)
    assert bytes(session.memory[:size]) == data(2)


@pytest.mark.parametrize("shape", ["pages of one tensor", "a tensor for each layer"])
def test_blocks_of_another_engine_go_straight_from_and_to_its_pages(
    session: PoolSession, shape: str
) -> None:
    size, num_pages = LAYOUT.slice_bytes, 6
    tensors = [random.Random(n).randbytes(num_pages * size) for n in range(LAYOUT.num_layers)]
    joined = [b"".join(tensors)] if shape.startswith("pages") else tensors
    mine, theirs = ([memoryview(bytearray(one)) for one in joined] for _ in range(2))
    for one in theirs:
        one[:] = bytes(len(one))
    stride = num_pages * size if len(joined) == 1 else None
    source, target = (session.register(*each, layer_stride=stride) for each in (mine, theirs))
    pages, blocks = [4, 0, 3], [key(n) for n in range(3)]
    assert session.put_from(blocks, source.at([page * size for page in pages])) == blocks
    packed = [b"".join(t[p * size : (p + 1) * size] for t in tensors) for p in pages]
    assert session.get(blocks) == packed, "in the pool the layers of a block lie together"
    assert session.get_into([*blocks, key(9)], target.at([n * size for n in (5, 2, 1, 0)])) == 3
    layers = b"".join(theirs)
    for page, block in zip((5, 2, 1), packed, strict=True):
        starts = [(layer * num_pages + page) * size for layer in range(LAYOUT.num_layers)]
        assert b"".join(layers[at : at + size] for at in starts) == block
    session.unregister(source)
    with pytest.raises(MooncakeError, match="not registered"):
        session.put_from([key(7)], source.at([0]))


def test_blocks_go_from_and_to_the_memory_of_a_device(session: PoolSession) -> None:
    device = FakeDeviceMemory(4 * LAYOUT.block_bytes)
    device.is_strict = False
    write_now(device, [(0, LAYOUT.block_bytes)], memoryview(bytearray(data(5))))
    memory = session.register(device)
    assert session.put_from([key(5)], memory.at([0])) == [key(5)]
    assert session.get_into([key(5)], memory.at([2 * LAYOUT.block_bytes])) == 1
    assert read_now(device, [(2 * LAYOUT.block_bytes, LAYOUT.block_bytes)]) == data(5)
    device.fails = lambda kind: "broken" if kind == "out" else None
    with pytest.raises(TransferError, match="broken"):
        session.get_into([key(5)], memory.at([0]))
    device.fails = lambda _kind: None
    assert session.stat().num_pinned == 0


def test_places_that_do_not_exist_are_refused_before_a_node_is_asked(
    session: PoolSession,
) -> None:
    with pytest.raises(ValueError, match="the last may begin at"):
        session.get_into([key(1)], [4 * session.block_bytes])
    with pytest.raises(ValueError, match="2 places for 1 blocks"):
        session.put_from([key(1)], [0, session.block_bytes])
    with pytest.raises(TransferError, match="writable"):
        session.register(memoryview(bytes(session.block_bytes)))
    with pytest.raises(ValueError, match="2 regions for 3 layers"):
        session.register(*(memoryview(bytearray(9)) for _ in range(2)))


def test_tensors_are_values(session: PoolSession) -> None:
    tensors = {
        "a.weight": torch.arange(700, dtype=torch.bfloat16).reshape(7, 100),
        "b": torch.tensor([], dtype=torch.int8),
        "c": torch.tensor(3.5),
    }
    assert session.put_value("layer", safetensors.torch.save(tensors))
    found = safetensors.torch.load(session.get_value("layer") or b"")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_data_of_the_wrong_size_is_refused(session: PoolSession) -> None:
    with pytest.raises(ValueError, match="not 1920"):
        session.put({key(1): b"short"})


def test_an_address_without_a_node_is_an_error_not_a_hang() -> None:
    gone = ZmqChannel("127.0.0.1", credential=own_credential(SECRET, *CredentialRole))
    address = gone.address
    gone.close()
    settings = PoolSessionConfig(
        gateway_address=address, cluster_secret=SECRET, layout=LAYOUT, store_address=address,
        timeout_s=0.3,
    )  # fmt: skip
    with PoolSession(settings) as session, pytest.raises(TransferError, match="does not answer"):
        session.stat()
