"""The probes of an API server whose workers are threads of its process, or that has none."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from mooncake.api.app import create_app
from mooncake.api.config import ApiConfig
from mooncake.engine.plan import StepPlan
from mooncake.launch.cluster import colocated
from mooncake.launch.cluster.colocated import ColocatedWorkers
from mooncake.launch.cluster.gateways.gateway_process import GatewayProcess
from mooncake.launch.config.config import resolve
from mooncake.launch.config.plan import make_plan
from tests.support.api.server import tiny_model
from tests.support.model.checkpoints import write_config_only
from tests.support.serve.local_world import POLL_S, HashModel, request
from tests.support.waiting import LONG_S

OK = (200, "")


class SlowModel(HashModel):
    """Stops in the middle of its weights until it is told to go on."""

    def __init__(self, revision: str) -> None:
        super().__init__(revision)
        self.is_loading = threading.Event()
        self.may_go_on = threading.Event()

    def load(self, progress: Callable[[int, int], None] | None = None) -> None:
        assert progress is not None
        progress(2, 5)
        self.is_loading.set()
        assert self.may_go_on.wait(LONG_S)


class World:
    """`--colocated` without its sockets and signals: workers, gateway and API server."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        model = write_config_only(directory / "hash-model", max_position_embeddings=1024)
        written = {"model": str(model), "colocated": True, "num_gpu_blocks_override": 64}
        written |= {"max_model_len": 512, "self_profile": False, "step_timeout": 1}
        config = resolve(written, None, {})
        plan = make_plan(config, 2)
        self.model = SlowModel(plan.model.revision)
        monkeypatch.setattr(colocated, "open_model", lambda *_: self.model)
        self.workers = ColocatedWorkers(config, plan)
        self.gateway_process = GatewayProcess(plan, self.workers.gateway_channel, "m")
        app = create_app(
            self.gateway_process.backend, tiny_model(), ApiConfig(), vitals=self.workers.vitals
        )
        transport = httpx.ASGITransport(app, client=("127.0.0.1", 1))
        self.client = httpx.AsyncClient(transport=transport, base_url="http://localhost")

    async def probes(self) -> dict[str, tuple[int, str]]:
        """Return (status, message) of each probe."""
        found = {}
        for probe in ("startup", "ready", "live"):
            reply = await self.client.get(f"/health/{probe}")
            message = reply.json()["error"]["message"] if reply.content else ""
            found[probe] = (reply.status_code, message)
        return found

    async def until(self, holds: Callable[[dict[str, tuple[int, str]]], bool]) -> Any:
        """Wait until the probes are so; return them."""
        while not holds(found := await self.probes()):
            await asyncio.sleep(POLL_S)
        return found


def hang(machine: Any, now: float) -> None:
    machine.instance.engine._runner.submit = lambda plan: None


def stick(machine: Any, now: float) -> None:
    def submit(plan: StepPlan) -> None:
        freed.wait(LONG_S)

    machine.instance.engine._runner.submit = submit


freed = threading.Event()


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (hang, "failed: decode-0 failed: step 0 made no progress for 10 s"),
        (stick, "stuck: its loop has not turned for"),
    ],
)
def test_a_process_that_loads_serves_and_whose_engine_hangs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[Any, float], None],
    told: str,
) -> None:
    freed.clear()

    async def main() -> None:
        world = World(tmp_path, monkeypatch)
        world.gateway_process.backend.start()
        starting = asyncio.create_task(
            asyncio.to_thread(world.workers.start, world.gateway_process, lambda *_: None)
        )
        await asyncio.to_thread(world.model.is_loading.wait, LONG_S)
        no_worker = (503, "not ready: no decode worker takes requests")
        loading = {"startup": (503, "starting: loading weights, 2 of 5"), "live": OK}
        assert await world.probes() == loading | {"ready": no_worker}
        world.model.may_go_on.set()
        await starting
        await world.until(lambda probes: set(probes.values()) == {OK})
        assert world.workers.gone() == ""
        cluster = world.workers._cluster
        assert cluster is not None
        done = cluster._workers["decode-0"].driver.call(fault)
        await asyncio.to_thread(done.result, LONG_S)
        world.gateway_process.backend.submit(request(1, [1, 2, 3]), lambda _: None)
        await world.until(lambda probes: probes["live"] != OK)
        found = await world.probes()
        for probe in ("live", "startup"):
            status, message = found[probe]
            assert (status, message.startswith(told)) == (503, True), message
        kind, _, why = told.partition(": ")
        await world.until(lambda _: bool(world.workers.gone()))
        assert why in world.workers.gone(), f"{kind}: the process is told to end"
        freed.set()
        world.gateway_process.backend.stop()
        await asyncio.to_thread(world.workers.stop)
        world.gateway_process.channel.close()
        await world.client.aclose()

    asyncio.run(main())


def test_a_gateway_without_workers_of_its_own_has_started_and_is_live() -> None:
    from tests.support.api.server import ScriptedBackend, says

    async def main() -> None:
        backend = ScriptedBackend(says("x"))
        app = create_app(backend, tiny_model(), ApiConfig())
        transport = httpx.ASGITransport(app, client=("127.0.0.1", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            for probe in ("startup", "ready", "live"):
                reply = await client.get(f"/health/{probe}")
                assert (reply.status_code, reply.content) == (200, b"")

    asyncio.run(main())
