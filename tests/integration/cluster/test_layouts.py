"""The same request gives the same tokens however the cluster is cut up: real model, real blocks,
real copies.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from random import Random
from typing import Any

import pytest

from mooncake.launch.config.plan import ServePlan
from mooncake.model.checkpoint.making.presets import init_checkpoint
from mooncake.scheduler.config import SchedulerConfig
from mooncake.telemetry.events import FirstToken
from tests.support.serve.model_cluster import ModelCluster, model_cluster, request

MAX_MODEL_LEN = 1024
LENGTHS = [1, 5, 16, 17, 63, 64, 65, 130, 257, 300]
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("checkpoints") / "nano"
    return init_checkpoint("k2-nano", seed=3, out=out, dtype="float32")


def prompt(length: int, seed: int = 0) -> list[int]:
    random = Random(seed * 10_007 + length)
    return [random.randrange(512) for _ in range(length)]


def tokens_of_all(
    cluster: ModelCluster, *, cached_share: float = 0.0, **sampling: Any
) -> list[list[int]]:
    """Send all prompts at once and return their tokens. At least `cached_share` of the prompts'
    full blocks, those without the last token, must come from a cache.
    """
    answers = [
        cluster.submit(request(f"r{length}", prompt(length), NUM_TOKENS, **sampling))
        for length in LENGTHS
    ]
    cached = [answer.final().num_cached_tokens for answer in answers]
    block = cluster.layout.block_tokens
    whole = [(length - 1) // block * block for length in LENGTHS]
    assert all(
        found in range(0, most + 1, block) for found, most in zip(cached, whole, strict=True)
    )
    assert sum(cached) >= cached_share * sum(whole)
    return [answer.tokens for answer in answers]


SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "top_p": 0.95, "seed": 42, "repetition_penalty": 1.1},
}


@pytest.fixture(scope="module")
def truth(model: Path) -> dict[str, list[list[int]]]:
    """What one engine gives, one request at a time, without any cache."""
    found: dict[str, list[list[int]]] = {}
    with model_cluster(
        model, 0, 1, kvstore=0, max_model_len=MAX_MODEL_LEN, enable_prefix_caching=False
    ) as cluster:
        for name, sampling in SAMPLINGS.items():
            found[name] = [
                cluster.generate(
                    request(f"{name}{length}", prompt(length), NUM_TOKENS, **sampling)
                )[0]
                for length in LENGTHS
            ]
    return found


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("layout", [(0, 1, 0), (0, 1, 1), (1, 1, 0), (1, 1, 1), (2, 2, 2)])
def test_any_layout(
    model: Path, truth: dict[str, list[list[int]]], layout: tuple[int, int, int], sampling: str
) -> None:
    prefill, decode, kvstore = layout
    with model_cluster(
        model, prefill, decode, kvstore=kvstore, max_model_len=MAX_MODEL_LEN
    ) as cluster:
        assert tokens_of_all(cluster, **SAMPLINGS[sampling]) == truth[sampling]
        # Of two prefill workers, one may find computing a block cheaper than a copy from the other.
        share = 1.0 if prefill <= 1 else 0.5
        again = tokens_of_all(cluster, cached_share=share, **SAMPLINGS[sampling])
        assert again == truth[sampling], "from the cache"


@pytest.mark.parametrize("chunk_tokens", [16, 64, 4096])
def test_any_chunk_size(model: Path, truth: dict[str, list[list[int]]], chunk_tokens: int) -> None:
    with model_cluster(
        model,
        1,
        1,
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=chunk_tokens,
        max_num_seqs=16,
    ) as cluster:
        assert tokens_of_all(cluster) == truth["greedy"]


def test_preemption(model: Path) -> None:
    prompts, settings = [prompt(40, seed) for seed in range(6)], {"max_model_len": 256}
    found = []
    for num_pages in (64, 10):
        with model_cluster(
            model, 0, 1, kvstore=0, num_gpu_blocks_override=num_pages, block_size=32, **settings
        ) as cluster:
            answers = [
                cluster.submit(request(f"r{i}", tokens, 150)) for i, tokens in enumerate(prompts)
            ]
            for answer in answers:
                answer.final()
            found.append([answer.tokens for answer in answers])
            assert (cluster.counter("preemptions") > 0) == (num_pages == 10)
    assert found[0] == found[1]


def eager(plan: ServePlan) -> ServePlan:
    """Make any fetch look cheaper than computing: the model here is too small for a fair race."""
    scheduler = SchedulerConfig(
        fetch_latency_s=0.0, local_bytes_per_s=1e15, remote_bytes_per_s=1e15
    )
    return dataclasses.replace(plan, scheduler=scheduler)


def test_a_prefix_fetched_from_another_node(model: Path, truth: dict[str, list[list[int]]]) -> None:
    with model_cluster(
        model, 2, 2, kvstore=2, max_model_len=MAX_MODEL_LEN, change_plan=eager
    ) as cluster:
        index = LENGTHS.index(300)
        first, final = cluster.generate(request("first", prompt(300), NUM_TOKENS))
        computed_by = next(e.worker_id for e in cluster.events.events if isinstance(e, FirstToken))
        cluster.wait_until_pooled(300 // cluster.layout.block_tokens)
        cluster.workers.kill(computed_by)
        again, cached = cluster.generate(request("again", prompt(300), NUM_TOKENS))
        assert first == again == truth["greedy"][index]
        assert final.num_cached_tokens == 0
        assert cached.num_cached_tokens == 256
        assert cluster.counter("blocks_fetched") == 4


def test_decode_holds_the_bytes_that_prefill_computed(model: Path) -> None:
    with model_cluster(model, 1, 1, max_model_len=MAX_MODEL_LEN) as cluster:
        tokens = prompt(300)
        cluster.generate(request("one", tokens, 1 + NUM_TOKENS))
        digests = [cluster.checksums(name, tokens) for name in ("prefill-0", "decode-0")]
        assert len(digests[0]) == 4
        assert digests[0] == digests[1]
