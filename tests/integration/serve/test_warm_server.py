"""A server that is started again finds the prefixes of its former life on disk."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

from mooncake.model.checkpoint.making.presets import init_checkpoint
from tests.support.serve.server import Server, serving

NUM_TOKENS = 700
WAIT_S = 60.0


def on_ssd(server: Server) -> float:
    """Return how many blocks lie on disk, of this life and of those before."""
    [pool] = [w for w in server.status()["workers"] if w["role"] == "kvstore"]
    counters = (pool["load"] or {}).get("counters", {})
    return float(sum(counters.get(f"ssd_blocks_{what}", 0) for what in ("written", "found")))


def test_prefixes_outlive_the_server(tmp_path: Path) -> None:
    model = init_checkpoint("k2-nano", seed=5, out=tmp_path / "nano", dtype="float32")
    words = [
        str(model), "--colocated", "--kvstore", "1", "--max-model-len", "1024",
        "--kv-cache-memory-bytes", "16MiB", "--dram", "16MiB",
        "--ssd", f"{tmp_path / 'ssd'}:32MiB", "--ssd-min-uses", "1", "--ssd-write-at", "0",
        # Timed on a busy machine, so small a model may look cheaper to run than blocks to fetch.
        "--no-self-profile",
    ]  # fmt: skip
    draw = random.Random(1)
    prompt = [draw.randrange(512) for _ in range(NUM_TOKENS)]
    answers = []
    for life in range(2):
        with serving(*words, log=tmp_path / f"log{life}") as server:
            deadline, pause = time.monotonic() + WAIT_S, threading.Event()
            while life and not on_ssd(server):
                assert time.monotonic() < deadline, "nothing was found on disk"
                pause.wait(0.1)
            answers.append(server.complete(prompt, max_tokens=4, temperature=0, ignore_eos=True))
            counters = {
                w["id"]: (w["load"] or {}).get("counters") for w in server.status()["workers"]
            }
            while on_ssd(server) < NUM_TOKENS // 64:
                assert time.monotonic() < deadline, "the prompt did not go down to disk"
                pause.wait(0.1)
    first, second = answers
    assert first["choices"][0]["token_ids"] == second["choices"][0]["token_ids"]
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == NUM_TOKENS // 64 * 64, (
        counters
    )
