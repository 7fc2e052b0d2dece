"""Whole clusters in one process, threads and all: tokens right, books right, also after a crash."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mooncake.base import CheckpointError, FinishReason, Role
from mooncake.launch.cluster import colocated
from mooncake.launch.worker.weights.held_model import HeldModel
from tests.support.engine.fake_runner import expected_output
from tests.support.model.checkpoints import write_config_only
from tests.support.serve.local_world import HashModel, LocalWorld, read_hashes, request

LAYOUTS = [
    pytest.param({"colocated": True}, id="colocated"),
    pytest.param({"colocated": True, "kvstore": 1}, id="colocated with a pool"),
    pytest.param({}, id="1 + 1"),
    pytest.param({"prefill": 2, "decode": 2, "kvstore": 2}, id="2 + 2 on two nodes"),
    pytest.param({"kvstore": 0}, id="no pool"),
    pytest.param({"prefill": 0}, id="decode alone"),
]


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(write_config_only(tmp_path / "hash-model", max_position_embeddings=1024))


def prompts(number: int) -> list[list[int]]:
    chance = random.Random(number)
    shared = [chance.randrange(90) for _ in range(130)]
    return [
        shared[: chance.randrange(131)] + [chance.randrange(90) for _ in range(1 + number % 70)]
        for number in range(number)
    ]


@pytest.mark.parametrize("settings", LAYOUTS)
def test_every_layout_gives_the_tokens_of_the_oracle(model: str, settings: dict[str, Any]) -> None:
    async def serve() -> None:
        async with LocalWorld(model, **settings) as world:
            asked = [request(number, prompt) for number, prompt in enumerate(prompts(16))]
            answers = await asyncio.gather(*(world.generate(each) for each in asked))
            for each, (tokens, final) in zip(asked, answers, strict=True):
                assert final.reason is FinishReason.LENGTH
                assert tokens == expected_output(world.layout, each)
            await world.settle()
            assert world.lost == []

    asyncio.run(serve())


def test_a_crashed_decode_worker_costs_no_token(model: str) -> None:
    async def serve() -> None:
        async with LocalWorld(model, prefill=1, decode=2) as world:
            asked = [request(number, prompt, 200) for number, prompt in enumerate(prompts(6))]
            streaming = asyncio.Event()
            answers = [
                asyncio.create_task(world.generate(each, lambda count: streaming.set()))
                for each in asked
            ]
            await streaming.wait()
            await asyncio.to_thread(world.cluster.kill, "decode-0")
            for each, answer in zip(asked, answers, strict=True):
                tokens, final = await answer
                assert final.reason is FinishReason.LENGTH, final
                assert tokens == expected_output(world.layout, each)
            assert world.lost == ["decode-0"]
            await world.settle()

    asyncio.run(serve())


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_a_worker_that_is_to_leave_finishes_what_no_pool_holds(model: str, role: str) -> None:
    async def serve() -> None:
        async with LocalWorld(model, prefill=2, decode=2, kvstore=0) as world:
            asked = [request(number, prompt, 200) for number, prompt in enumerate(prompts(6))]
            streaming = asyncio.Event()
            answers = [
                asyncio.create_task(world.generate(each, lambda count: streaming.set()))
                for each in asked
            ]
            await streaming.wait()
            leaving = world.cluster._workers[f"{role}-0"]
            leaving.leave(60.0, waits=True)
            later = request(9, prompts(9)[8])
            answers.append(asyncio.create_task(world.generate(later)))
            for each, answer in zip([*asked, later], answers, strict=True):
                tokens, final = await answer
                assert final.reason is FinishReason.LENGTH, final
                assert tokens == expected_output(world.layout, each)
            await world.until(lambda: not world.cluster._threads[f"{role}-0"].is_alive())
            assert not leaving.machine.check_integrity()
            counts = world.gateway_process.gateway._request_manager.counters
            assert counts["attempts_lost"] == 0
            world.cluster.remove(f"{role}-0")

    asyncio.run(serve())


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_the_last_of_its_role_serves_until_another_one_has_come(model: str, role: str) -> None:
    async def serve() -> None:
        async with LocalWorld(model, prefill=1, decode=1, kvstore=1) as world:
            leaving = world.cluster._workers[f"{role}-0"]
            thread = world.cluster._threads[f"{role}-0"]
            leaving.leave(600.0, waits=True)
            gateway = world.gateway_process.gateway
            await world.until(
                lambda: "draining" in {worker.state for worker in gateway.status(0).workers}
            )
            assert gateway.status(0).ready
            asked = request(0, prompts(3)[2], 40)
            tokens, final = await world.generate(asked)
            assert final.reason is FinishReason.LENGTH, final
            assert tokens == expected_output(world.layout, asked)
            assert thread.is_alive()
            [settings] = [each for each in world.workers if each.worker_id == f"{role}-0"]
            later = msgspec.structs.replace(settings, worker_id=f"{role}-1")
            await asyncio.to_thread(world.cluster.start, [later])
            await world.until(lambda: not thread.is_alive())
            tokens, final = await world.generate(request(1, prompts(5)[4], 40))
            assert final.reason is FinishReason.LENGTH, final
            assert gateway._request_manager.counters["attempts_lost"] == 0
            world.cluster.remove(f"{role}-0")
            await world.settle()

    asyncio.run(serve())


def test_a_worker_whose_step_hangs_ends_and_another_finishes_its_requests(model: str) -> None:
    def hang(machine: Any, now: float) -> None:
        machine.instance.engine._runner.submit = lambda plan: None

    async def serve() -> None:
        async with LocalWorld(model, prefill=1, decode=2, step_timeout=5) as world:
            asked = [request(number, prompt, 200) for number, prompt in enumerate(prompts(6))]
            streaming = asyncio.Event()
            answers = [
                asyncio.create_task(world.generate(each, lambda count: streaming.set()))
                for each in asked
            ]
            await streaming.wait()
            await asyncio.to_thread(world.cluster.call, "decode-0", hang)
            for each, answer in zip(asked, answers, strict=True):
                tokens, final = await answer
                assert final.reason is FinishReason.LENGTH, final
                assert tokens == expected_output(world.layout, each)
            assert world.lost == ["decode-0"]

    asyncio.run(serve())


def test_a_machine_that_fails_is_told_and_its_worker_can_be_started_again(model: str) -> None:
    async def serve() -> None:
        async with LocalWorld(model, prefill=1, decode=1, kvstore=0) as world:

            def broken(machine: Any, now: float) -> None:
                machine.tick = None  # the next turn of the loop is a fault

            await asyncio.to_thread(world.cluster.call, "prefill-0", broken)
            await world.until(lambda: world.lost == ["prefill-0"])
            await world.until(lambda: not world.gateway_process.knows(["prefill-0"]))
            await asyncio.to_thread(world.cluster.remove, "prefill-0")
            again = [each for each in world.workers if each.worker_id == "prefill-0"]
            await asyncio.to_thread(world.cluster.start, again)
            await world.until(lambda: world.gateway_process.knows(["prefill-0"]))
            asked = request(1, list(range(70)))
            tokens, _ = await world.generate(asked)
            assert tokens == expected_output(world.layout, asked)
            await world.settle()

    asyncio.run(serve())


def test_prefixes_are_fetched_from_the_other_node(model: str) -> None:
    """The second prompt goes where its prefix is not; blocks come instead of being computed."""

    async def serve() -> None:
        async with LocalWorld(model, prefill=2, decode=2, kvstore=2, policy="round-robin") as world:
            shared = [number % 89 for number in range(256)]
            for number in range(4):
                asked = request(number, [*shared, number])
                tokens, _ = await world.generate(asked)
                assert tokens == expected_output(world.layout, asked)
                await world.settle()
            reports = [
                world.counters(each.worker_id)
                for each in world.workers
                if each.role is Role.PREFILL
            ]
            num_fetched = sum(report.get("blocks_fetched", 0) for report in reports)
            assert num_fetched >= 4
            moved = sum(
                value
                for report in reports
                for name, value in report.items()
                if name.startswith("transfer_") and name.endswith("_bytes")
            )
            assert moved >= num_fetched * world.layout.block_bytes, "a report says what was moved"

    asyncio.run(serve())


def test_nothing_is_left_when_a_worker_cannot_be_built(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def serve() -> None:
        world = LocalWorld(model)
        closed: list[str] = []
        real = colocated.build

        def build(settings: Any, *args: Any, **more: Any) -> Any:
            if settings.role is Role.PREFILL:
                raise CheckpointError("the weights are torn")
            worker = real(settings, *args, **more)
            close = worker.close
            monkeypatch.setattr(
                worker, "close", lambda: (closed.append(settings.worker_id), close())
            )
            return worker

        monkeypatch.setattr(colocated, "build", build)
        with pytest.raises(CheckpointError, match="torn"):
            world.cluster.start(world.workers)
        assert closed == ["kvstore-0", "decode-0"]
        assert world.cluster.worker_ids == []
        assert all(
            world.network.find(f"{name}#{boot}") is None
            for boot, name in enumerate(("kvstore-0", "decode-0", "prefill-0"), 1)
        )
        world.gateway_process.channel.close()

    asyncio.run(serve())


def test_other_weights_than_the_clusters_are_refused(model: str) -> None:
    async def serve() -> None:
        world = LocalWorld(model, kvstore=0)
        world.cluster._model = HeldModel(
            lambda *_: HashModel("other"), lambda asked: read_hashes(asked.model)
        )  # type: ignore[arg-type,return-value]  # a model of hashes
        with pytest.raises(CheckpointError, match=r"holds other weights \(revision other\)"):
            world.cluster.start(world.workers)
        world.gateway_process.channel.close()

    asyncio.run(serve())
