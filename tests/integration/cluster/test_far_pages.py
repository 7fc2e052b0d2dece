"""Pages that the host cannot address: the same tokens, however the cluster is cut up, over every
protocol. Real model, real blocks; the device is the only thing that is not there.
"""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest

from mooncake.model.checkpoint.making.presets import init_checkpoint
from mooncake.model.running.runner import ModelRunner
from mooncake.transfer.engine import Region
from tests.integration.cluster.test_layouts import eager, prompt
from tests.support.model.page_device import FarPages
from tests.support.serve.model_cluster import ModelCluster, model_cluster, request
from tests.support.serve.watched_workers import WatchedWorkers

NUM_TOKENS = 12
LENGTHS = [5, 64, 65, 200]
SETTINGS = {"max_model_len": 512}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("checkpoints") / "nano"
    return init_checkpoint("k2-nano", seed=3, out=out, dtype="float32")


@pytest.fixture(scope="module")
def truth(model: Path) -> list[list[int]]:
    """What one engine gives whose pages are plain host memory."""
    with model_cluster(model, 0, 1, kvstore=0, **SETTINGS) as cluster:
        return tokens_of(cluster, "truth")


def tokens_of(cluster: ModelCluster, name: str) -> list[list[int]]:
    answers = [
        cluster.submit(request(f"{name}{length}", prompt(length), NUM_TOKENS)) for length in LENGTHS
    ]
    for answer in answers:
        answer.final()
    return [answer.tokens for answer in answers]


def pages_of(workers: WatchedWorkers, worker_id: str) -> Region:
    worker: Any = workers._workers[worker_id]
    pages: Region = worker._transfer._regions.find_any(
        worker.machine.instance._own_pages.region_id, 0, 0
    )
    return pages


@pytest.mark.parametrize("protocol", ["inproc", "tcp", "shm"])
def test_prefill_and_decode_with_pages_on_a_device(
    model: Path, truth: list[list[int]], protocol: str
) -> None:
    source = FarPages(model, "float32")
    with model_cluster(model, 1, 1, source=source, protocols=(protocol,), **SETTINGS) as cluster:
        for worker_id in ("prefill-0", "decode-0"):
            region = pages_of(cluster.workers, worker_id)
            assert region.device == "far:0"
            with pytest.raises(ValueError, match="lies in memory of far:0"):
                _ = region.buffer
        assert tokens_of(cluster, "once") == truth
        assert min(source.far.num_copies.values()) > 0
        assert cluster.counter("transfer_stage_bytes") > 0
        tokens = prompt(200)
        digests = [cluster.checksums(name, tokens) for name in ("prefill-0", "decode-0")]
        assert len(digests[0]) == 3
        assert digests[0] == digests[1]
    assert not source.far.pinned


def test_a_prefix_comes_from_the_pool_into_a_device(model: Path, truth: list[list[int]]) -> None:
    source = FarPages(model, "float32")
    with model_cluster(
        model, 2, 1, kvstore=1, source=source, protocols=("shm",), change_plan=eager, **SETTINGS
    ) as cluster:
        index = LENGTHS.index(200)
        first, _ = cluster.generate(request("first", prompt(200), NUM_TOKENS))
        cluster.wait_until_pooled(200 // cluster.layout.block_tokens)
        done = {
            worker_id: cluster.workers.call(
                worker_id, lambda machine, _: machine.instance.load().counters["steps"]
            )
            for worker_id in ("prefill-0", "prefill-1")
        }
        cluster.workers.kill(max(done, key=lambda worker_id: done[worker_id]))
        again, final = cluster.generate(request("again", prompt(200), NUM_TOKENS))
        assert first == again == truth[index]
        assert final.num_cached_tokens == 192
        assert cluster.counter("blocks_fetched") == 3


def test_workers_that_have_ended_keep_no_pages(model: Path) -> None:
    """At once, whoever still knows them: what they come back as measures how many there is room
    for.
    """
    source = FarPages(model, "float32")
    gc.collect()
    gc.disable()
    try:
        with model_cluster(model, 1, 1, source=source, protocols=("tcp",), **SETTINGS) as cluster:
            cluster.generate(request("once", prompt(65), 2))
            known = list(cluster.workers._workers.values())
            regions = [pages_of(cluster.workers, name) for name in ("prefill-0", "decode-0")]
            kept = [weakref.ref(region.memory.kv) for region in regions]
        assert [ref() for ref in kept] == [None, None]
        assert len(known) == 3
    finally:
        gc.enable()


def test_pages_on_a_device_beside_pages_in_memory(model: Path, truth: list[list[int]]) -> None:
    """Decode is the model's own source with plain pages, prefill has them on a device."""

    class OnlyPrefill(FarPages):
        num_runners = 0

        @property
        def owns_pages(self) -> bool:
            return self.num_runners == 1  # decode is built first

        def runner(self, *pages: Any) -> ModelRunner:
            made = super().runner(*pages)
            self.num_runners += 1
            return made

    source = OnlyPrefill(model, "float32")
    with model_cluster(model, 1, 1, source=source, protocols=("tcp",), **SETTINGS) as cluster:
        devices = {
            worker_id: pages_of(cluster.workers, worker_id).device
            for worker_id in ("prefill-0", "decode-0")
        }
        assert devices == {"prefill-0": "far:0", "decode-0": "host"}
        assert tokens_of(cluster, "mixed") == truth
