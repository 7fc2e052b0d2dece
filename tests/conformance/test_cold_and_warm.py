"""Cold against warm: clusters of all layouts, dtypes and weights live one after another over one
SSD directory. Each gives the tokens of one engine without a cache, and finds on the disk what its
own kind left there and nothing of another's.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from mooncake.base.kv_layout import KvLayout
from mooncake.model.checkpoint.making.presets import init_checkpoint
from tests.integration.cluster.test_layouts import eager
from tests.support.kvstore.pool_process import until
from tests.support.serve.model_cluster import ModelCluster, model_cluster, request
from tests.support.waiting import LONG_S

DTYPES: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "float32, KV in float8": {"dtype": "float32", "kv_cache_dtype": "fp8"},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "together": {"prefill": 0, "decode": 1},
    "apart": {"prefill": 1, "decode": 1},
    "apart, blocks of 32": {"prefill": 1, "decode": 1, "block_size": 32},
}
LIVES = ["together", "apart", "apart, blocks of 32", "apart, blocks of 32", "together"]
WEIGHTS = [3, 4]
NUM_TOKENS, NUM_OUTPUTS = 200, 12
PROMPT = [Random(1).randrange(512) for _ in range(NUM_TOKENS)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {
        seed: init_checkpoint("k2-nano", seed=seed, out=folder / f"nano{seed}", dtype="float32")
        for seed in WEIGHTS
    }


def has_blocks(cluster: ModelCluster, count: int) -> bool:
    """Tell whether the disk holds so many blocks of this kind, written now or by former lives."""
    counters = cluster.workers.call("kvstore-0", lambda node, _: dict(node.counters))
    return bool(counters["ssd_blocks_found"] + counters["ssd_blocks_written"] >= count)


@contextmanager
def alive(model: Path, ssd: Path, settings: dict[str, Any]) -> Iterator[ModelCluster]:
    with model_cluster(
        model, settings["prefill"], settings["decode"], max_model_len=512, change_plan=eager,
        ssd=((str(ssd), 2**25),), ssd_min_uses=1, ssd_write_at=0.0,
        **{name: settings[name] for name in settings.keys() - {"prefill", "decode"}},
    ) as cluster:  # fmt: skip
        yield cluster


def answer(cluster: ModelCluster) -> tuple[list[int], int]:
    """Return the tokens of the prompt, and how many of it were found in a cache."""
    tokens, final = cluster.generate(request("r", PROMPT, NUM_OUTPUTS))
    return tokens, final.num_cached_tokens


def lived(model: Path, ssd: Path, settings: dict[str, Any], *, found: bool) -> list[int]:
    """Ask once in a life of such a cluster, whose blocks lie on the disk afterwards. `found`:
    whether a former life left them there; the gateway may hear of them too late, and then another
    life begins.
    """
    whole = NUM_TOKENS // settings.get("block_size", 64)
    deadline = time.monotonic() + LONG_S
    while True:
        with alive(model, ssd, settings) as cluster:
            is_whole = partial(has_blocks, cluster, whole)
            if found:
                until(is_whole, "a former life's blocks on the disk", LONG_S)
            tokens, num_cached = answer(cluster)
            until(is_whole, "the blocks to go down to the disk", LONG_S)
        assert found or not num_cached, "another kind's blocks were found"
        if bool(num_cached) is found:
            return tokens
        assert time.monotonic() < deadline, "the blocks of a former life are never found"


def test_each_kind_finds_its_own_blocks_and_no_others(
    models: dict[int, Path], tmp_path: Path
) -> None:
    """A directory is of one kind at a time: what another one left is removed, and never read."""
    last = None
    for dtype, seed in itertools.product(DTYPES.values(), WEIGHTS):
        with model_cluster(
            models[seed], 0, 1, kvstore=0, max_model_len=512, enable_prefix_caching=False, **dtype
        ) as cluster:
            truth = answer(cluster)[0]
        for layout in LIVES:
            settings = LAYOUTS[layout] | dtype
            kind = (seed, settings.get("block_size"), dtype.get("kv_cache_dtype"), dtype["dtype"])
            assert lived(models[seed], tmp_path, settings, found=kind == last) == truth, kind
            last = kind


def test_a_key_that_names_no_weights_would_be_found(
    models: dict[int, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same name for all weights, the second cluster answers from the first one's KV."""
    settings, for_model = LAYOUTS["together"] | DTYPES["float32"], KvLayout.for_model
    truth = lived(models[WEIGHTS[1]], tmp_path / "other", settings, found=False)

    def nameless(*arguments: Any, **named: Any) -> KvLayout:
        return msgspec.structs.replace(for_model(*arguments, **named), fingerprint="the same")

    monkeypatch.setattr(KvLayout, "for_model", nameless)
    lived(models[WEIGHTS[0]], tmp_path / "one", settings, found=False)
    assert lived(models[WEIGHTS[1]], tmp_path / "one", settings, found=True) != truth
