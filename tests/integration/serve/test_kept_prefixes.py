"""The next turn of an agent finds its marked prefix in the pool, although others have filled all
memory since. Gateway, prefill, decode and the pool node are processes.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mooncake.model.checkpoint.making.presets import init_checkpoint
from tests.support.serve.server import Server, serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

BLOCK = 64
WAIT_S = 240.0
MARK = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


def pool(server: Server) -> dict[str, Any]:
    """Return the last load report of the pool node."""
    [node] = [each for each in server.status()["workers"] if each["role"] == "kvstore"]
    return dict(node["load"] or {"counters": {}})


def wait_for(what: str, holds: Callable[[], bool]) -> None:
    deadline, pause = time.monotonic() + WAIT_S, threading.Event()
    while not holds():
        assert time.monotonic() < deadline, what
        pause.wait(0.1)


def ask(server: Server, *turns: dict[str, Any]) -> dict[str, Any]:
    """Send a conversation to the Messages API; return its usage."""
    body = {"model": server.model, "messages": list(turns), "max_tokens": 1}
    reply = server.client.post("/v1/messages", json=body)
    assert reply.status_code == 200, reply.text
    usage: dict[str, Any] = reply.json()["usage"]
    return usage


def said(words: str, **mark: object) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": words, **mark}]}


def test_the_next_turn_finds_the_marked_prefix_after_a_flood(tmp_path: Path) -> None:
    model = init_checkpoint("k2-nano", seed=5, out=tmp_path / "nano", dtype="float32")
    words = [
        str(model), "--prefill", "1", "--decode", "1", "--kvstore", "1", "--max-model-len", "1024",
        "--kv-cache-memory-bytes", "1MiB", "--dram", "4MiB", "--no-self-profile",
    ]  # fmt: skip
    draw = random.Random(7)
    marked, plain = (" ".join(str(draw.randrange(10**6)) for _ in range(60)) for _ in range(2))
    with serving(*words, log=tmp_path / "log") as server:
        first = ask(server, said(marked, **MARK))
        control = ask(server, said(plain))
        assert (first["cache_read_input_tokens"], control["cache_read_input_tokens"]) == (0, 0)
        kept = first["input_tokens"] // BLOCK
        assert kept > 2, first
        wait_for("nothing is kept", lambda: pool(server)["counters"].get("blocks_kept", 0) == kept)
        put = pool(server)["counters"]["blocks_put"]

        def is_flooded() -> bool:
            prompt = [draw.randrange(512) for _ in range(700)]
            server.complete(prompt, max_tokens=1)
            load = pool(server)
            return bool(load["counters"]["blocks_put"] - put > 2 * load["num_total_blocks"])

        wait_for("the pool was not filled", is_flooded)
        again = ask(server, said(marked, **MARK), {"role": "assistant", "content": "so"}, said("?"))
        lost = ask(server, said(plain), {"role": "assistant", "content": "so"}, said("?"))
    assert lost["mooncake"]["misses"]["evicted"] >= 2 * BLOCK, "without a mark it is evicted"
    # So small a model may look cheaper to run than blocks to fetch: then the pool has them in vain.
    hits, misses = again["mooncake"]["hits"], again["mooncake"]["misses"]
    assert sum(hits.values()) + misses["recomputed"] >= (kept - 1) * BLOCK, again
    assert misses["evicted"] == 0
