"""Workers whose ranks are processes with memories of their own: any shape hands over to any other,
through pushes and through the pool, byte for byte; no page is shared.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from random import Random
from typing import Any

import pytest

from mooncake.base import Shape, block_keys
from mooncake.base.models.parallel import DCP_FLAG, PP_FLAG, TP_FLAG
from mooncake.launch.config.plan import ServePlan
from mooncake.model.checkpoint.making.presets import init_checkpoint
from mooncake.scheduler.config import SchedulerConfig
from tests.support.followers import followers, forked_followers
from tests.support.serve.model_cluster import ModelCluster, model_cluster, request
from tests.support.serve.slow_process import in_short_turns
from tests.support.waiting import LONG_S, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LENGTHS = [5, 64, 130, 300]
NUM_TOKENS = 24
SETTINGS: dict[str, Any] = {"max_model_len": 512, "max_num_batched_tokens": 64}


@pytest.fixture(scope="module", autouse=True)
def forked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with forked_followers(tmp_path_factory.mktemp("forks")):
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("checkpoints") / "nano"
    return init_checkpoint("k2-nano", seed=3, out=out, dtype="float32")


def prompt(length: int) -> list[int]:
    random = Random(length)
    return [random.randrange(512) for _ in range(length)]


def tokens_of_all(cluster: ModelCluster, name: str) -> list[list[int]]:
    answers = [
        cluster.submit(request(f"{name}{length}", prompt(length), NUM_TOKENS)) for length in LENGTHS
    ]
    for answer in answers:
        answer.final()
    return [answer.tokens for answer in answers]


def checksums_of(cluster: ModelCluster, worker_id: str, keys: list[bytes]) -> list[int]:
    """The checksums of cached blocks, which each rank that holds one has found; 0 where copies
    differ.
    """
    found: Future[list[int]] = Future()

    def ask(machine: Any, _now: float) -> None:
        pages = machine.instance.pool.match(keys)
        machine.instance.checksums.start(pages, lambda sums, _: found.set_result(sums))

    cluster.workers.call(worker_id, ask)
    return found.result(LONG_S)


def page_memories(pid: int) -> set[int]:
    """The files of KV pages that a process maps, by inode."""
    with open(f"/proc/{pid}/maps") as maps:
        return {int(line.split()[4]) for line in maps if "mooncake-kv-pages" in line}


def eager(plan: ServePlan) -> ServePlan:
    """Make any fetch look cheaper than computing: the model here is too small for a fair race."""
    scheduler = SchedulerConfig(
        fetch_latency_s=0.0, local_bytes_per_s=1e15, remote_bytes_per_s=1e15
    )
    return dataclasses.replace(plan, scheduler=scheduler)


@pytest.fixture(scope="module")
def truth(model: Path) -> list[list[int]]:
    """What one engine of one process gives."""
    with model_cluster(model, 0, 1, kvstore=0, **SETTINGS) as cluster:
        return tokens_of_all(cluster, "r")


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert followers() == []


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ("tp2", "tp1"),
        ("tp1", "tp2-dcp2"),
        ("tp2-dcp2", "tp2"),
        ("tp1-pp2", "tp1"),
        ("tp1", "tp1-pp2"),
        ("tp1-pp2", "tp2-dcp2"),
    ],
)
def test_blocks_of_one_shape_are_those_of_another(
    model: Path, truth: list[list[int]], prefill: str, decode: str
) -> None:
    shapes = {"prefill": Shape.parse(prefill), "decode": Shape.parse(decode)}
    flags = {
        f"{role}_set": ((TP_FLAG, shape.tp), (PP_FLAG, shape.pp), (DCP_FLAG, shape.dcp))
        for role, shape in shapes.items()
    }
    with model_cluster(
        model, 1, 1, by_role=True, protocols=("tcp",), rank_backend="gloo", push_checksums="on",
        change_plan=eager, **flags, **SETTINGS,
    ) as cluster:  # fmt: skip
        assert tokens_of_all(cluster, "pushed") == truth
        assert cluster.counter("blocks_pushed_compared") > 0
        assert cluster.counter("blocks_pushed_corrupt") == 0

        keys = block_keys(cluster.layout.fingerprint, prompt(300), cluster.layout.block_tokens)
        here, there = (checksums_of(cluster, name, keys) for name in ("prefill-0", "decode-0"))
        assert here == there
        assert len(here) == 4
        assert 0 not in here, "copies of a block are the same in all memories"

        others = followers()
        assert len(others) == sum(shape.num_ranks - 1 for shape in shapes.values())
        memories = [page_memories(each.pid) for each in others]
        assert all(len(memory) == 1 for memory in memories)
        own = page_memories(os.getpid())
        assert len(own.union(*memories)) == len(own) + len(others), "no page is shared"

        cluster.wait_until_pooled(sum(length // cluster.layout.block_tokens for length in LENGTHS))
        cluster.start_again("prefill-0")
        assert tokens_of_all(cluster, "fetched") == truth
        assert cluster.counter("blocks_fetched") >= 4
        assert cluster.counter("blocks_fetched_corrupt") == 0
        assert checksums_of(cluster, "prefill-0", keys) == here


def test_a_slow_stage_is_named(
    model: Path, truth: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    """A process that stands still most of the time, never for long; what is computed stays so."""
    flags = {"decode_set": ((PP_FLAG, 2),)}
    with model_cluster(
        model,
        0,
        1,
        kvstore=0,
        by_role=True,
        protocols=("tcp",),
        **flags,
        **SETTINGS,
    ) as cluster:
        [first_stage] = followers()
        with in_short_turns(first_stage):
            rounds = itertools.count()

            def is_named() -> bool:
                assert tokens_of_all(cluster, f"round {next(rounds)} ") == truth
                return bool(cluster.counter("stage_slow_s_0"))

            wait_until(is_named, "the stage that is slow is named")
        assert not cluster.counter("stage_slow_s_1")
        assert "stage 0 of 2 of this worker is slow" in caplog.text
