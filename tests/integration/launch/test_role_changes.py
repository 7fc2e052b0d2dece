"""Workers that change between prefill and decode while requests run: threads, sockets and all."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from mooncake.base import FinishReason, GenerateRequest, MonotonicClock, Role
from mooncake.base.rights import CredentialRole
from mooncake.identity.credential import own_credential
from mooncake.launch.cluster.gateways.gateway_process import GatewayProcess
from mooncake.launch.cluster.workers import cluster_workers
from mooncake.launch.host.processes.start_phases import phases_said
from mooncake.launch.worker import process
from mooncake.launch.worker.settings import WorkerSettings
from mooncake.launch.worker.worker import Worker
from mooncake.rpc.zmq_channel import ZmqChannel
from mooncake.transfer.regions import no_progress
from tests.support.engine.fake_runner import expected_output
from tests.support.model.checkpoints import write_config_only
from tests.support.serve.local_world import HashModel, LocalWorld, request
from tests.support.waiting import LONG_S

NOW = MonotonicClock().now


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(write_config_only(tmp_path / "hash-model", max_position_embeddings=1024))


def requests(first: int, count: int, max_tokens: int = 60) -> list[GenerateRequest]:
    draw = random.Random(first)
    prompts = [[draw.randrange(90) for _ in range(draw.randrange(1, 180))] for _ in range(count)]
    return [request(first + number, prompt, max_tokens) for number, prompt in enumerate(prompts)]


class ChangingWorld(LocalWorld):
    """Lets workers change their roles under load."""

    num_changes = 0

    def roles(self) -> dict[str, Role]:
        """Return the role of each worker that takes work."""
        workers = self.gateway_process.gateway.status(NOW()).workers
        return {worker.id: worker.role for worker in workers if worker.state == "up"}

    async def change(self, worker_id: str, role: Role) -> None:
        """Tell a worker to change, serve meanwhile, and wait until it is back."""
        self.num_changes += 1
        asked = requests(1000 * self.num_changes, 6)
        running = asyncio.gather(*(self.generate(each) for each in asked))
        await asyncio.sleep(0)
        assert self.gateway_process.gateway.change_role(worker_id, role, NOW())
        for each, (tokens, final) in zip(asked, await running, strict=True):
            assert final.reason is FinishReason.LENGTH
            assert tokens == expected_output(self.layout, each)
        await self.until(lambda: self.roles().get(worker_id) is role)
        await self.until(lambda: self.num_switched == self.num_changes)

    @property
    def num_switched(self) -> int:
        return self.gateway_process.gateway.status(NOW()).counters.get("roles_switched", 0)


def test_workers_change_there_and_back_and_no_request_misses_a_token(model: str) -> None:
    async def serve() -> None:
        async with ChangingWorld(model, prefill=2, decode=2) as world:
            await world.change("decode-1", Role.PREFILL)
            assert Counter(world.roles().values())[Role.PREFILL] == 3
            await world.change("decode-1", Role.DECODE)
            await world.change("prefill-0", Role.DECODE)
            await world.settle()
            assert world.lost == []

    asyncio.run(serve())


class ZmqWorld(ChangingWorld):
    """A gateway that workers in processes of their own could reach."""

    def __init__(self, model_path: str, **settings: object) -> None:
        super().__init__(model_path, **settings)
        self.gateway_process = GatewayProcess(
            self.plan,
            ZmqChannel("127.0.0.1", credential=own_credential("s", *CredentialRole)),
            "hash-model",
        )
        self.workers = cluster_workers(
            self.config, self.plan, self.gateway_process.channel.address, "s", "here"
        )


class Hosts:
    """`process.run` in threads: what each worker's own process does, sockets included."""

    def __init__(self) -> None:
        self.workers: dict[str, list[Worker]] = {}
        self._threads: list[threading.Thread] = []

    def start(self, settings: WorkerSettings) -> None:
        started = self.workers.setdefault(settings.worker_id, [])

        def run() -> None:
            process.run(settings, progress=no_progress, started=started.append)

        self._threads.append(threading.Thread(target=run, daemon=True))
        self._threads[-1].start()

    def stop(self) -> None:
        for started in self.workers.values():
            started[-1].leave(0.0)
        for thread in self._threads:
            thread.join(LONG_S)
            assert not thread.is_alive(), "a worker did not end"


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    yield Hosts()
    gc.unfreeze()


def test_a_process_comes_back_in_the_other_role_over_the_same_weights(
    model: str, hosts: Hosts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    opened: list[HashModel] = []

    async def serve() -> None:
        world = ZmqWorld(model, prefill=1, decode=2, kvstore=1, transport="tcp")

        def open_model(*_: object) -> HashModel:
            opened.append(HashModel(world.plan.model.revision))
            return opened[-1]

        monkeypatch.setattr(process, "open_model", open_model)
        world.gateway_process.backend.start()
        for each in world.workers:
            hosts.start(each)
        try:
            await world.until(lambda: len(world.roles()) == 4)
            await world.change("decode-0", Role.PREFILL)
            await world.change("decode-0", Role.DECODE)
        finally:
            await asyncio.to_thread(hosts.stop)
            world.gateway_process.backend.stop()
            world.gateway_process.channel.close()

    asyncio.run(serve())
    assert len(opened) == 3, "each engine opened its model once"
    starts = [each for line in caplog.messages if (each := phases_said(line))]
    changes = [each for each in starts if each[0].name == "changing its role"]
    assert (len(starts), len(changes)) == (4 + 2, 2)
    assert all(phase.name != "ready" for each in starts for phase in each), "that is no start"
    first, second, third = hosts.workers["decode-0"]
    assert len({worker.ref.epoch for worker in (first, second, third)}) == 3
    assert gc.get_freeze_count(), "a process that ends has looked for no garbage"
