"""A stage on another address than its worker's: it joins over TCP, holds and moves its layers
there, and ends with its worker.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from mooncake.base import InternalError, SamplingParams, block_keys
from mooncake.base.models.parallel import PP_FLAG
from mooncake.base.rights import CredentialRole
from mooncake.identity.credential import own_credential
from mooncake.launch.worker.direct import DirectEngine
from mooncake.launch.worker.ranks import rank_processes
from mooncake.launch.worker.ranks.far_ranks import FarStages
from mooncake.launch.worker.ranks.rank_host import MAX_RANKS, RankHost
from mooncake.model.checkpoint.making.presets import init_checkpoint
from tests.integration.cluster.test_rank_memories import (
    SETTINGS,
    checksums_of,
    prompt,
    tokens_of_all,
)
from tests.support.followers import followers
from tests.support.serve.model_cluster import model_cluster
from tests.support.waiting import LONG_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

HOST = "127.0.0.2"
CREDENTIAL = own_credential("hush", CredentialRole.WORKER, name="test")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return init_checkpoint("k2-nano", seed=3, out=tmp_path / "nano", dtype="float32")


@pytest.fixture(autouse=True)
def far(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have every engine's first stage computed by a host of ranks at `HOST`."""
    host = RankHost(HOST, 0, CREDENTIAL)
    serving = threading.Thread(target=host.run)
    serving.start()
    stages = FarStages(((HOST, host.port),), "127.0.0.1", CREDENTIAL)
    start = rank_processes.start_ranks

    def elsewhere(*arguments: object) -> object:
        return functools.partial(start, far=stages)(*arguments[:4])  # type: ignore[arg-type]

    monkeypatch.setattr(rank_processes, "start_ranks", elsewhere)
    yield
    host.close()
    serving.join(LONG_S)
    assert not serving.is_alive()
    for _ in range(MAX_RANKS):  # its ranks have ended and are waited for
        assert host._places.acquire(timeout=LONG_S)
    assert followers() == []


def listening(process: psutil.Process) -> set[str]:
    return {each.laddr.ip for each in process.net_connections("tcp") if each.status == "LISTEN"}


def test_a_stage_elsewhere_hands_over_what_one_process_computes(model: Path) -> None:
    with model_cluster(model, 0, 1, kvstore=0, **SETTINGS) as cluster:
        truth = tokens_of_all(cluster, "r")
    with model_cluster(
        model, 1, 1, by_role=True, protocols=("tcp",), rank_backend="gloo", push_checksums="on",
        prefill_set=((PP_FLAG, 2),), **SETTINGS,
    ) as cluster:  # fmt: skip
        assert tokens_of_all(cluster, "pushed") == truth
        assert cluster.counter("blocks_pushed_compared") > 0
        assert cluster.counter("blocks_pushed_corrupt") == 0
        keys = block_keys(cluster.layout.fingerprint, prompt(300), cluster.layout.block_tokens)
        here, there = (checksums_of(cluster, name, keys) for name in ("prefill-0", "decode-0"))
        assert here == there
        assert len(here) == 4
        [stage] = followers()
        assert listening(stage) == {HOST}


def test_a_stage_elsewhere_that_dies_ends_the_engine(model: Path) -> None:
    long = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    sizes = {"pipeline_parallel_size": 2, "rank_backend": "gloo"}
    with DirectEngine.open(
        str(model), dtype="float32", device="cpu", num_threads=1, max_model_len=512, **sizes
    ) as engine:
        engine.generate([[1, 2]], [SamplingParams(temperature=0, max_tokens=2)])
        [stage] = followers()
        threading.Timer(0.2, stage.kill).start()
        ended = "rank 1 of this model has ended|another rank of this model failed"
        with pytest.raises(InternalError, match=ended):
            engine.generate([[1, 2]] * 400, [long] * 400)
