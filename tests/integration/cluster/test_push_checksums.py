"""A byte of pushed KV that changes on its way, whatever carries it, costs time and no token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from mooncake.base import WorkerRef
from mooncake.base.kv_layout import KvPart
from mooncake.base.messages import BlocksPushed
from mooncake.instance.instance import Instance
from mooncake.instance.mover import SliceMover
from mooncake.launch.cluster import colocated
from mooncake.model.checkpoint.making.presets import init_checkpoint
from mooncake.transfer.engine import Ended, TransferDone
from mooncake.transfer.rdma.nic import WorkRequest
from mooncake.transfer.regions import HostRegion
from mooncake.transfer.router import RoutedTransfer
from tests.support.serve.model_cluster import ModelCluster, model_cluster, request
from tests.support.transfer.fake_nics import FakeFabric
from tests.support.transfer.rdma_engines import engines_on
from tests.support.waiting import wait_until

LENGTHS = [5, 64, 65, 200, 300]
NUM_TOKENS = 12
SETTINGS: dict[str, Any] = {"max_model_len": 512, "kvstore": 0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("checkpoints") / "nano"
    return init_checkpoint("k2-nano", seed=3, out=out, dtype="float32")


def tokens_of_all(cluster: ModelCluster) -> list[list[int]]:
    random = Random(11)
    answers = [
        cluster.submit(
            request(f"r{length}", [random.randrange(512) for _ in range(length)], NUM_TOKENS)
        )
        for length in LENGTHS
    ]
    for answer in answers:
        answer.final()
    return [answer.tokens for answer in answers]


@pytest.fixture(scope="module")
def truth(model: Path) -> list[list[int]]:
    """What one engine gives that computes all by itself."""
    with model_cluster(model, 0, 1, **SETTINGS) as cluster:
        return tokens_of_all(cluster)


class Spoiler:
    """Alters one byte of every third batch of a push, after it has arrived at decode."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.works = False
        self.num_spoiled = 0
        self._num_batches = 0
        self._pages: dict[str, HostRegion] = {}
        """By the id of the engine they belong to."""
        self._write, self._allocate = SliceMover.write, RoutedTransfer.allocate

        def written(mover: SliceMover, *given: Any) -> int | None:
            return self._written(mover, *given)

        def allocated(transfer: RoutedTransfer, num_bytes: int, label: str) -> HostRegion:
            return self._allocated(transfer, num_bytes, label)

        monkeypatch.setattr(SliceMover, "write", written)
        monkeypatch.setattr(RoutedTransfer, "allocate", allocated)

    def _allocated(self, transfer: RoutedTransfer, num_bytes: int, label: str) -> HostRegion:
        region = self._allocate(transfer, num_bytes, label)
        self._pages[transfer.segment.engine_id] = region
        return region

    def _written(
        self,
        mover: SliceMover,
        parts: Sequence[KvPart],
        blocks: Mapping[int, int],
        layers: range,
        deadline_s: float,
        ended: Ended,
    ) -> int | None:
        [part] = parts
        places = part.places
        self._num_batches += 1
        number = self._num_batches
        index, layer = list(blocks)[number % len(blocks)], layers[number % len(layers)]
        offset = places.offsets[part.indexes.index(index)]

        def arrived(done: TransferDone, now: float) -> None:
            if self.works and done.error is None:
                self.num_spoiled += 1
                at = offset + layer * places.layer_stride + number % 97
                self._pages[places.segment.engine_id].buffer[at] ^= 1
            ended(done, now)

        wrong = arrived if number % 3 == 0 else ended
        return self._write(mover, parts, blocks, layers, deadline_s, wrong)


@pytest.mark.parametrize("protocol", ["inproc", "shm", "tcp"])
def test_a_pushed_byte_that_was_altered_is_found_and_computed_anew(
    model: Path, truth: list[list[int]], monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    spoiler = Spoiler(monkeypatch)
    with model_cluster(
        model, 1, 1, protocols=(protocol,), push_checksums="on", max_num_batched_tokens=64,
        **SETTINGS,
    ) as cluster:  # fmt: skip
        assert tokens_of_all(cluster) == truth
        assert cluster.counter("blocks_pushed_compared") > len(LENGTHS)
        assert cluster.counter("blocks_pushed_corrupt") == 0
    with model_cluster(
        model, 1, 1, protocols=(protocol,), push_checksums="on", max_num_batched_tokens=64,
        **SETTINGS,
    ) as cluster:  # fmt: skip
        spoiler.works = True
        assert tokens_of_all(cluster) == truth
        assert spoiler.num_spoiled > 0
        assert cluster.counter("blocks_pushed_corrupt") > 0


def test_nothing_is_compared_on_one_machine_unless_it_is_asked_for(model: Path) -> None:
    with model_cluster(model, 1, 1, **SETTINGS) as cluster:
        tokens_of_all(cluster)
        assert cluster.counter("blocks_pushed_compared") == 0


def test_a_byte_that_a_nic_alters_is_found_and_computed_anew(
    model: Path, truth: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    fabric, writes, altered = FakeFabric(), list[WorkRequest](), list[WorkRequest]()

    def alters(work: WorkRequest) -> bool:
        if not work.is_write or work.num_bytes < 1000:  # no word of the protocol itself
            return False
        writes.append(work)
        if len(writes) % 5 == 0:
            altered.append(work)
        return len(writes) % 5 == 0

    fabric.alters = alters
    with engines_on(fabric) as opened:
        monkeypatch.setattr(
            colocated,
            "open_transfer",
            lambda _config, engine_id, *_, **__: opened(engine_id).transfer,
        )
        with model_cluster(model, 1, 1, push_checksums="on", **SETTINGS) as cluster:
            assert tokens_of_all(cluster) == truth
            assert altered
            assert cluster.counter("blocks_pushed_corrupt") > 0


def test_early_words_of_checksums_may_be_lost(
    model: Path, truth: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    lost, send = list[BlocksPushed](), Instance.send

    def lossy(instance: Instance, worker: WorkerRef, message: Any) -> None:
        if isinstance(message, BlocksPushed):
            lost.append(message)
        else:
            send(instance, worker, message)

    monkeypatch.setattr(Instance, "send", lossy)
    spoiler = Spoiler(monkeypatch)
    settings = {"push_checksums": "on", "max_num_batched_tokens": 64, **SETTINGS}
    with model_cluster(model, 1, 1, **settings) as cluster:
        spoiler.works = True
        assert tokens_of_all(cluster) == truth
        assert lost
        assert cluster.counter("blocks_pushed_corrupt") > 0


def test_requests_that_end_while_their_blocks_are_compared_leave_nothing_held(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Integrity is checked when the cluster stops: pages that nobody uses are free."""
    spoiler = Spoiler(monkeypatch)
    random = Random(5)
    settings = {"push_checksums": "on", "max_num_batched_tokens": 64, **SETTINGS}
    with model_cluster(model, 2, 1, **settings) as cluster:
        spoiler.works = True
        answers = {}
        for number in range(40):
            name = f"r{number}"
            prompt = [random.randrange(512) for _ in range(random.choice(LENGTHS))]
            answers[name] = cluster.submit(request(name, prompt, NUM_TOKENS))
            if number % 2:
                victim = random.choice(list(answers))
                cluster.gateway(lambda gateway, now, victim=victim: gateway.abort(victim, now))
        for answer in answers.values():
            answer.final()

        def is_quiet() -> bool:
            each = cluster.workers.worker_ids
            return all(cluster.workers.call(of, lambda machine, _: machine.quiet) for of in each)

        wait_until(is_quiet, "all workers are quiet")
