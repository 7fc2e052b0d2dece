"""A server that is started again finds the prefixes of its former life on disk. Another finds them
in a bucket.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mooncake.model.checkpoint.making.presets import init_checkpoint
from tests.support.kvstore.s3_server import BUCKET, s3_server
from tests.support.serve.server import Server, serving
from tests.support.waiting import wait_until

NUM_TOKENS = 700
NUM_PROMPTS = 3


def below(server: Server, tier: str) -> float:
    """Return how many blocks lie on disk or in a bucket, of this life and of those before."""
    [pool] = [w for w in server.status()["workers"] if w["role"] == "kvstore"]
    counters = (pool["load"] or {}).get("counters", {})
    return float(sum(counters.get(f"{tier}_blocks_{what}", 0) for what in ("written", "found")))


def test_prefixes_outlive_the_server(tmp_path: Path) -> None:
    ssd = ("--ssd", f"{tmp_path / 'ssd'}:32MiB", "--ssd-min-uses", "1", "--ssd-write-at", "0")
    check(tmp_path, "ssd", *ssd)


def test_prefixes_outlive_the_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second cluster has another secret, and shares nothing with the first but the bucket."""
    pytest.importorskip("botocore", reason="make install brings it")
    pytest.importorskip("moto", reason="make install brings it")
    with s3_server(monkeypatch) as there:
        words = ("--object-store", f"s3://{BUCKET}", "--object-endpoint", there.url)
        check(tmp_path, "object", *words, "--object-min-uses", "1")


def check(tmp_path: Path, tier: str, *storage: str) -> None:
    """Serve prompts in two lives with this storage: the second has them in `tier`."""
    model = init_checkpoint("k2-nano", seed=5, out=tmp_path / "nano", dtype="float32")
    words = [
        str(model), "--colocated", "--kvstore", "1", "--max-model-len", "1024",
        "--kv-cache-memory-bytes", "16MiB", "--dram", "16MiB",
        *storage, "--ssd-load-timeout-s", "60",
        # Timed on a busy machine, so small a model may look cheaper to run than blocks to fetch.
        "--no-self-profile",
    ]  # fmt: skip
    draw = random.Random(1)
    prompts = [[draw.randrange(512) for _ in range(NUM_TOKENS)] for _ in range(NUM_PROMPTS)]
    num_blocks = NUM_TOKENS // 64

    def answers(server: Server) -> Iterator[tuple[list[int], dict[str, Any]]]:
        for prompt in prompts:
            said = server.complete(prompt, max_tokens=4, temperature=0, ignore_eos=True)
            yield said["choices"][0]["token_ids"], said["usage"]["prompt_tokens_details"]

    def wait_for(server: Server, number: int) -> None:
        wait_until(lambda: below(server, tier) >= number, f"{number} blocks are in {tier}")

    with serving(*words, log=tmp_path / "log0") as server:
        first = list(answers(server))
        assert [usage["cached_tokens"] for _, usage in first] == [0] * NUM_PROMPTS
        wait_for(server, NUM_PROMPTS * num_blocks)
    with serving(*words, log=tmp_path / "log1") as server:
        wait_for(server, NUM_PROMPTS * num_blocks)
        seen = []
        for (tokens, _), (again, usage) in zip(first, answers(server), strict=False):
            assert again == tokens
            seen.append(usage)
            # A worker fetches for a few seconds, in which a busy machine may not bring all up.
            if usage["cached_tokens"] == num_blocks * 64:
                assert usage["mooncake"]["hits"][tier] == num_blocks * 64
                return
        pytest.fail(f"no prompt came from {tier}: {seen}")
