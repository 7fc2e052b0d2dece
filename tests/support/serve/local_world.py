"""A whole cluster in this process with a model of hashes: real threads, channels and copies."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from mooncake.base import (
    FinalEvent,
    GenerateRequest,
    Grammar,
    KvLayout,
    ModelSpec,
    OutputEvent,
    RequestOutput,
    Role,
    SamplingParams,
    pack_tokens,
)
from mooncake.base.rights import CredentialRole
from mooncake.engine.config import EngineConfig
from mooncake.engine.plan import RunnerEvent, StepPlan
from mooncake.identity.credential import own_credential
from mooncake.launch.cluster.gateways.gateway_process import GATEWAY_ID, GatewayProcess
from mooncake.launch.cluster.workers import cluster_workers
from mooncake.launch.config.config import resolve
from mooncake.launch.config.plan import ServePlan, make_plan
from mooncake.launch.worker.settings import WorkerSettings
from mooncake.launch.worker.weights.held_model import HeldModel
from mooncake.model.checkpoint.files.checkpoint_files import CheckpointFiles
from mooncake.model.checkpoint.files.signature import Signature
from mooncake.rpc.inproc import InprocChannel, InprocNetwork
from mooncake.rpc.zmq_channel import ZmqChannel
from mooncake.transfer.device import DeviceMemory
from tests.support.engine.fake_runner import FakeRunner
from tests.support.serve.watched_workers import WatchedWorkers

POLL_S = 0.002


class PolledFakeRunner:
    """A `FakeRunner` with the descriptor a driver waits for."""

    def __init__(self, runner: FakeRunner) -> None:
        self.inner = runner
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def prepare(self, grammar: Grammar) -> None:
        self.inner.prepare(grammar)

    def submit(self, plan: StepPlan) -> None:
        self.inner.submit(plan)
        os.eventfd_write(self._fd, 1)

    def fileno(self) -> int:
        return self._fd

    def poll(self) -> Sequence[RunnerEvent]:
        events = self.inner.poll()
        if events:
            os.eventfd_read(self._fd)
        return events

    def close(self) -> None:
        self.inner.close()
        os.close(self._fd)


class HashModel:
    """A `ModelSource` whose KV and tokens are hashes of the token history."""

    can_rest = True

    def __init__(self, revision: str, signature: Signature | None = None) -> None:
        self.revision = revision
        self.signature = signature
        self.owns_pages = False
        self.num_loads = 0

    def load(self, progress: Callable[[int, int], None] | None = None) -> None:
        self.num_loads += 1
        if progress is not None:
            progress(1, 1)

    def warm_up(
        self, config: EngineConfig, progress: Callable[[int, int], None] | None = None
    ) -> None:
        """There is nothing to build."""

    def num_pages(self, layout: KvLayout, config: EngineConfig) -> int:
        return config.num_blocks

    def device_pages(self, layout: KvLayout, num_pages: int) -> DeviceMemory:
        raise AssertionError("pages of this model lie in host memory")

    def runner(
        self,
        layout: KvLayout,
        config: EngineConfig,
        pages: memoryview | DeviceMemory,
        num_threads: int | None,
        descriptor: int | None = None,
    ) -> PolledFakeRunner:
        assert isinstance(pages, memoryview)
        return PolledFakeRunner(FakeRunner(layout, config.num_blocks, memory=pages))

    def close(self) -> None:
        """There are no other ranks."""


def read_hashes(path: str) -> tuple[Signature, str]:
    """Return what `opening.read_weights` does, of a directory without tensors."""
    files = CheckpointFiles.open(Path(path))
    return Signature(ModelSpec.from_config(files.config), {}), files.revision()


class LocalWorld:
    """Gateway in the running event loop, workers in threads. Use as an async context."""

    def __init__(
        self, model_path: str, *, protocols: Sequence[str] = ("inproc",), **settings: Any
    ) -> None:
        wanted = {"model": model_path, "num_gpu_blocks_override": 64, "max_model_len": 64 * 8}
        wanted |= {"self_profile": False, "kvstore_dram_bytes": "1MiB", **settings}
        self.config = resolve(wanted, None, {})
        self.plan: ServePlan = make_plan(self.config, 2)
        self.layout = self.plan.layout
        self.models: list[HashModel] = []
        """All that were opened, oldest first."""
        self.network = InprocNetwork()
        self.gateway_process = GatewayProcess(
            self.plan, InprocChannel(self.network, GATEWAY_ID), "hash-model"
        )
        self.lost: list[str] = []
        self.cluster = WatchedWorkers(
            self.network,
            HeldModel(self._open, lambda asked: read_hashes(asked.model)),
            lost=self._on_lost,
            protocols=protocols,
        )
        self.workers: list[WorkerSettings] = cluster_workers(
            self.config, self.plan, GATEWAY_ID, "secret", "here"
        )

    def _open(self, path: str, _: str) -> HashModel:
        signature, revision = read_hashes(path)
        self.models.append(HashModel(revision, signature))
        return self.models[-1]

    def _on_lost(self, worker_id: str) -> None:
        self.lost.append(worker_id)
        self.gateway_process.worker_lost(worker_id)

    async def __aenter__(self) -> LocalWorld:
        self.gateway_process.backend.start()
        await asyncio.to_thread(self.cluster.start, self.workers)
        await self.until(
            lambda: self.gateway_process.knows([each.worker_id for each in self.workers])
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        self.gateway_process.backend.stop()
        await asyncio.to_thread(self.cluster.stop)
        self.gateway_process.channel.close()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until `holds()`; pytest's own time limit ends what never does."""
        while not holds():
            await asyncio.sleep(POLL_S)

    async def generate(
        self, request: GenerateRequest, on_tokens: Callable[[int], None] | None = None
    ) -> tuple[list[int], FinalEvent]:
        """Run a request to its final event; `on_tokens` is told how many tokens there are."""
        tokens: list[int] = []
        final: asyncio.Future[FinalEvent] = asyncio.get_running_loop().create_future()

        def sink(event: OutputEvent) -> None:
            if isinstance(event, RequestOutput):
                assert event.start == len(tokens)
                tokens.extend(event.tokens)
                if on_tokens is not None:
                    on_tokens(len(tokens))
            else:
                final.set_result(event)

        self.gateway_process.backend.submit(request, sink)
        return tokens, await final

    async def settle(self) -> None:
        """Wait until every engine is quiet, then have every machine check its integrity."""
        for worker_id in self.cluster.worker_ids:
            if not worker_id.startswith("kvstore"):
                while not await asyncio.to_thread(
                    self.cluster.call, worker_id, lambda machine, _: machine.quiet
                ):
                    await asyncio.sleep(POLL_S)
        await asyncio.to_thread(self.cluster.check_integrity)
        self.gateway_process.gateway.check_integrity()

    def counters(self, worker_id: str) -> dict[str, float]:
        """Return the counters of a worker's load report."""
        load = self.cluster.call(worker_id, lambda machine, _: machine.instance.load())
        return dict(msgspec.to_builtins(load.counters))


class SocketWorld(LocalWorld):
    """A gateway that worker processes reach over sockets."""

    def __init__(self, model_path: str, **settings: Any) -> None:
        super().__init__(model_path, **settings)
        channel = ZmqChannel("127.0.0.1", credential=own_credential("s", CredentialRole.GATEWAY))
        self.gateway_process = GatewayProcess(self.plan, channel, "hash-model")
        address = self.gateway_process.channel.address
        self.workers = cluster_workers(self.config, self.plan, address, "s", "here")

    def settings_of(self, role: Role) -> WorkerSettings:
        [settings] = [each for each in self.workers if each.role is role]
        return settings

    def health_urls(self) -> dict[str, str]:
        """Return what `mooncake status` says of each worker's health port."""
        return {each.id: each.health_url for each in self.gateway_process.status().workers}

    @asynccontextmanager
    async def driven(self) -> AsyncIterator[None]:
        """Have the gateway answer."""
        self.gateway_process.backend.start()
        try:
            yield
        finally:
            self.gateway_process.backend.stop()


def request(number: int, prompt: list[int], max_tokens: int = 12, **more: Any) -> GenerateRequest:
    """Return a greedy request."""
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, **more)
    return GenerateRequest(request_id=f"r{number}", prompt=pack_tokens(prompt), sampling=sampling)
