"""A cluster in threads that sleeps, wakes and gets other weights: tokens are those of one set of
weights, from the first to the last.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mooncake.base import FinalEvent, FinishReason, GenerateRequest, InvalidRequest, KvLayout
from mooncake.base.cluster_mode import ClusterMode
from mooncake.launch.cluster.facts import ClusterFacts, encode_facts, read_facts
from mooncake.launch.worker.settings import WorkerSettings
from mooncake.launch.worker.weights.held_model import HeldModel
from mooncake.scheduler.config import SchedulerConfig
from tests.support.engine.fake_runner import expected_output
from tests.support.model.checkpoints import write_config_only
from tests.support.serve.local_world import LocalWorld, read_hashes, request

PROMPT = [random.Random(7).randrange(90) for _ in range(150)]


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(write_config_only(tmp_path / "old", max_position_embeddings=1024))


@pytest.fixture
def new(tmp_path: Path) -> str:
    """Another checkpoint of the same model: its bytes differ."""
    directory = write_config_only(tmp_path / "new", max_position_embeddings=1024)
    config = directory / "config.json"
    config.write_text(config.read_text() + "\n")
    return str(directory)


def decode_0(world: World) -> list[WorkerSettings]:
    return [each for each in world.workers if each.worker_id == "decode-0"]


class World(LocalWorld):
    """Has the orders of an operator."""

    num_asked = 0

    def __init__(self, model_path: str, **settings: Any) -> None:
        super().__init__(model_path, kvstore=1, **settings)
        self.control = self.gateway_process.backend

    @property
    def mode(self) -> ClusterMode:
        return self.control.mode

    def layout_of(self, path: str) -> KvLayout:
        signature, revision = read_hashes(path)
        return KvLayout.for_model(
            signature.spec, block_tokens=self.layout.block_tokens, dtype=self.layout.dtype,
            weights_revision=revision,
        )  # fmt: skip

    async def ask(self, prompt: list[int]) -> tuple[GenerateRequest, list[int], FinalEvent]:
        self.num_asked += 1
        asked = request(self.num_asked, prompt, 40)
        return asked, *await self.generate(asked)

    async def check(self, layout: KvLayout, prompt: list[int] = PROMPT) -> int:
        """Ask, compare with the oracle of a layout, and return how many tokens were cached."""
        asked, tokens, final = await self.ask(prompt)
        assert final.reason is FinishReason.LENGTH, final
        assert tokens == expected_output(layout, asked)
        return final.num_cached_tokens

    async def update_weights(self, path: str) -> None:
        await self.control.order(lambda to, done: to.update_weights(path, done))

    def states(self) -> dict[str, str]:
        """Return the state of each worker by its id."""
        return {worker.id: worker.state for worker in self.gateway_process.status().workers}


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(main)


@pytest.mark.parametrize("settings", [{"prefill": 1, "decode": 1}, {"colocated": True}])
@pytest.mark.parametrize("level", [1, 2])
def test_a_cluster_that_slept_gives_the_same_tokens_from_the_pool(
    model: str, settings: dict[str, Any], level: int
) -> None:
    async def serve() -> None:
        async with World(model, **settings) as world:
            await world.check(world.layout)
            await world.settle()
            num_opened = len(world.models)
            await world.control.order(lambda to, done: to.sleep(level, done, aborts=False))
            assert set(world.states().values()) == {"up", "asleep"}, "the pool is up"
            asked, _, final = await world.ask(PROMPT)
            assert final.reason is FinishReason.REJECTED, asked
            await world.control.order(lambda to, done: to.wake(done))
            assert len(world.models) - num_opened == level - 1, "opened again where it was dropped"
            assert await world.check(world.layout) > 0, "the pool has the prompt"
            await world.settle()
            assert world.lost == []

    run(serve())


def test_new_weights_compute_every_token_and_find_no_block_of_the_old(model: str, new: str) -> None:
    async def serve() -> None:
        async with World(model, prefill=1, decode=1) as world:
            layout = world.layout_of(new)
            assert layout.fingerprint != world.layout.fingerprint
            gateway, [worker] = world.gateway_process.gateway, decode_0(world)
            facts = ClusterFacts(
                gateway_address="", worker=worker, scheduler=SchedulerConfig(), names=["small"]
            )
            gateway.facts = encode_facts(facts)
            await world.check(world.layout)
            assert await world.check(world.layout) > 0
            await world.control.order(lambda to, done: to.pause(done, aborts=False))
            await world.update_weights(new)
            assert world.mode.weights.fingerprint == layout.fingerprint
            assert read_facts(gateway.facts).worker.mode.weights == world.mode.weights
            await world.control.order(lambda to, done: to.resume(done))
            assert await world.check(layout) == 0
            assert await world.check(layout) > 0
            await world.settle()
            assert world.lost == []

    run(serve())


def test_under_load_each_answer_is_of_one_set_of_weights(model: str, new: str) -> None:
    async def serve() -> None:
        async with World(model, prefill=2, decode=2) as world:
            done = asyncio.Event()
            layouts = world.layout, world.layout_of(new)
            counts = [0, 0]

            async def client(number: int) -> None:
                draw = random.Random(number)
                while not done.is_set() or not counts[1]:
                    prompt = [draw.randrange(90) for _ in range(draw.randrange(1, 180))]
                    asked, tokens, final = await world.ask(prompt)
                    if final.reason is not FinishReason.LENGTH:
                        assert final.failure is not None
                        assert final.failure.status == 503
                        await asyncio.sleep(0.01)
                        continue
                    [which] = [
                        index
                        for index, layout in enumerate(layouts)
                        if tokens == expected_output(layout, asked)
                    ]
                    counts[which] += 1

            clients = [asyncio.create_task(client(number)) for number in range(8)]
            await world.until(lambda: counts[0] > 8)
            await world.control.order(lambda to, done: to.pause(done, aborts=True))
            await world.update_weights(new)
            await world.control.order(lambda to, done: to.resume(done))
            before = counts[0]
            await world.until(lambda: counts[1] > 8)
            done.set()
            await asyncio.gather(*clients)
            assert counts[0] == before, "no answer of the old weights came after them"
            await world.settle()

    run(serve())


def test_weights_of_another_model_are_refused_and_the_old_ones_serve_on(
    model: str, tmp_path: Path
) -> None:
    other = write_config_only(
        tmp_path / "other", max_position_embeddings=1024, intermediate_size=96
    )

    async def serve() -> None:
        async with World(model, prefill=1, decode=1) as world:
            await world.control.order(lambda to, done: to.pause(done, aborts=False))
            for path, why in ((str(other), "intermediate_size"), ("/nowhere", "no such directory")):
                with pytest.raises(InvalidRequest, match=why):
                    await world.update_weights(path)
            assert world.mode.weights.number == 0
            await world.control.order(lambda to, done: to.resume(done))
            await world.check(world.layout)

    run(serve())


def test_a_check_that_fails_is_told_and_the_old_weights_serve_on(
    model: str, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a defect")

    async def serve() -> None:
        async with World(model, colocated=True) as world:
            monkeypatch.setattr(HeldModel, "check", fail)
            await world.control.order(lambda to, done: to.pause(done, aborts=False))
            with pytest.raises(InvalidRequest, match=r"cannot be checked \(RuntimeError\)"):
                await world.update_weights(new)
            await world.control.order(lambda to, done: to.resume(done))
            await world.check(world.layout)

    run(serve())


def test_a_worker_that_starts_with_the_old_weights_loads_the_new_ones(model: str, new: str) -> None:
    async def serve() -> None:
        async with World(model, prefill=1, decode=1) as world:
            layout = world.layout_of(new)
            await world.control.order(lambda to, done: to.pause(done, aborts=False))
            await world.update_weights(new)
            await world.control.order(lambda to, done: to.resume(done))
            [settings] = decode_0(world)
            late = msgspec.structs.replace(settings, worker_id="decode-1")
            await asyncio.to_thread(world.cluster.start, [late])
            await world.until(lambda: world.states().get("decode-1") == "up")
            await asyncio.to_thread(world.cluster.kill, "decode-0")
            await world.check(layout)

    run(serve())


def test_weights_may_change_while_engines_sleep(model: str, new: str) -> None:
    """After an order in vain they sleep on."""

    async def serve() -> None:
        async with World(model, prefill=1, decode=1) as world:
            await world.control.order(lambda to, done: to.sleep(2, done, aborts=False))
            with pytest.raises(InvalidRequest, match="no such directory"):
                await world.update_weights("/nowhere")
            assert "asleep" in world.states().values()
            assert world.mode.sleep_level == 2
            await world.update_weights(new)
            assert "asleep" in world.states().values()
            await world.control.order(lambda to, done: to.wake(done))
            await world.check(world.layout_of(new))

    run(serve())
