"""A decode worker whose pages a lost peer might still write to. Where it is fenced they return at
once; where they rest, requests that fit go past one that waits for them, and it runs once they are
back.
"""

from __future__ import annotations

import msgspec
import pytest

from mooncake.base import GenerateRequest, WorkerRef
from mooncake.base.messages import KVReady, PeerLost, RequestTask, Reserved
from mooncake.decode.worker import DecodeWorker
from mooncake.instance.config import InstanceConfig
from mooncake.sim.world.network import Endpoint, NetworkConfig
from mooncake.sim.world.world import Worker
from tests.support.sim.cluster import Cluster, engine_config, request, specs

REST_S = 20.0
LOST = WorkerRef("prefill-9", "e1", "nowhere")
LIVING = WorkerRef("prefill-0", "e1", "living")
GATEWAY = WorkerRef("gateway", "e0", "gateway")


def give(worker: Worker, asked: GenerateRequest, prefill: WorkerRef) -> None:
    """Give a decode worker a request whose prompt `prefill` computes."""
    assert isinstance(worker.machine, DecodeWorker)
    decode = worker.machine.instance.worker
    deliver(worker, RequestTask(
        request=asked, attempt=1, gateway=GATEWAY, decode=decode, prefill=prefill
    ))  # fmt: skip


def deliver(worker: Worker, message: msgspec.Struct) -> None:
    assert worker.process is not None
    worker.process.deliver(message)


@pytest.mark.parametrize("by_hardware", [False, True], ids=["fenced", "resting"])
def test_requests_that_fit_go_past_one_that_waits_for_resting_pages(by_hardware: bool) -> None:
    # 48 pages of 4 tokens: 38 for each long request, 3 for each short one.
    cluster = Cluster(
        specs(0, 1, kvstores=False),
        decode=engine_config(48),
        network=NetworkConfig(writes_by_hardware=by_hardware),
        instance=InstanceConfig(quarantine_s=REST_S, ask_again_s=1000.0),
    )
    world = cluster.world
    worker = world.workers["decode-0"]
    reserved: list[str] = []

    def hear(message: msgspec.Struct) -> None:
        if isinstance(message, Reserved):
            reserved.append(message.request_id)

    for prefill in (LOST, LIVING):
        world.network.attach(Endpoint(prefill.address, "elsewhere", hear))

    def ask(name: str, num_tokens: int, prefill: WorkerRef) -> None:
        asked = request(name, [1] * num_tokens)
        give(worker, asked, prefill)

    ask("first", 150, LOST)
    deliver(worker, PeerLost(worker=LOST))
    ask("long", 150, LIVING)
    ask("short", 10, LIVING)
    ask("other", 10, LIVING)
    cluster.run(REST_S - 1 if by_hardware else 0.01)
    assert reserved == ["first", "short", "other"]
    cluster.run(2)
    assert reserved == ["first", "short", "other", "long"]
    cluster.check_integrity()


def test_pages_of_a_prefix_that_many_requests_share_count_once() -> None:
    """Half of 48 pages may be reserved: 20 of a prefix that lies here, and one more for each."""
    cluster = Cluster(specs(0, 1, kvstores=False), decode=engine_config(48))
    world = cluster.world
    worker = world.workers["decode-0"]
    reserved: list[str] = []

    def hear(message: msgspec.Struct) -> None:
        if isinstance(message, Reserved):
            reserved.append(message.request_id)

    world.network.attach(Endpoint(LIVING.address, "elsewhere", hear))

    def ask(name: str) -> None:
        asked = request(name, [1] * 82, max_tokens=2)
        give(worker, asked, LIVING)

    ask("first")
    cluster.run(0.01)
    ready = KVReady(
        request_id="first", attempt=1, prefill=LIVING, token=1, num_cached_tokens=0, pushed=False
    )
    deliver(worker, ready)  # it computes the prompt, whose pages stay
    cluster.run(1)
    for number in range(6):
        ask(f"{number}")
    cluster.run(0.01)
    assert reserved == ["first", "0", "1", "2", "3"]
    cluster.check_integrity()
