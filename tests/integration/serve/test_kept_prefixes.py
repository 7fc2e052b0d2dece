"""The next turn of an agent finds its marked prefix in the pool, and that of a session also the
answer, although others have filled all memory since. Gateway, prefill, decode and the pool node are
processes.
"""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from mooncake.model.checkpoint.making.presets import init_checkpoint
from tests.support.serve.server import Server, serving
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

BLOCK = 64
WAIT_S = 240.0
MARK = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


def pool(server: Server) -> dict[str, Any]:
    """Return the last load report of the pool node; the first ones have no counters."""
    [node] = [each for each in server.status()["workers"] if each["role"] == "kvstore"]
    return {"counters": {}, **(node["load"] or {})}


def num_kept(server: Server) -> int:
    """Return how many blocks the pool node has been asked to keep so far."""
    return int(pool(server)["counters"].get("blocks_kept", 0))


def ask(server: Server, *turns: dict[str, Any]) -> dict[str, Any]:
    """Send a conversation to the Messages API; return its usage."""
    body = {"model": server.model, "messages": list(turns), "max_tokens": 1}
    reply = server.client.post("/v1/messages", json=body)
    assert reply.status_code == 200, reply.text
    usage: dict[str, Any] = reply.json()["usage"]
    return usage


def turn(words: str, **mark: object) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": words, **mark}]}


def test_the_next_turn_finds_the_marked_prefix_after_a_flood(tmp_path: Path) -> None:
    model = init_checkpoint("k2-nano", seed=5, out=tmp_path / "nano", dtype="float32")
    words = [
        str(model), "--prefill", "1", "--decode", "1", "--kvstore", "1", "--max-model-len", "1024",
        "--kv-cache-memory-bytes", "1MiB", "--dram", "4MiB", "--no-self-profile",
    ]  # fmt: skip
    draw = random.Random(7)
    with serving(*words, log=tmp_path / "log") as server:
        plain = text(draw)
        assert ask(server, turn(plain))["cache_read_input_tokens"] == 0
        marked, kept = keep_one(server, draw)
        said, num_said_blocks = keep_answer(server, draw)
        put = pool(server)["counters"]["blocks_put"]

        def is_flooded() -> bool:
            prompt = [draw.randrange(512) for _ in range(700)]
            server.complete(prompt, max_tokens=1)
            load = pool(server)
            return bool(load["counters"]["blocks_put"] - put > 2 * load["num_total_blocks"])

        wait_until(is_flooded, "the pool is filled")
        again = ask(server, turn(marked, **MARK), {"role": "assistant", "content": "so"}, turn("?"))
        after = server.complete([*said, 1, 2, 3], max_tokens=1)["usage"]["prompt_tokens_details"]
        lost = ask(server, turn(plain), {"role": "assistant", "content": "so"}, turn("?"))
    assert found(lost) == 0, "without a mark it is evicted"
    assert found(again) >= (kept - 1) * BLOCK
    assert again["mooncake"]["misses"]["evicted"] == 0
    assert found(after) >= num_said_blocks * BLOCK


def keep_one(server: Server, draw: random.Random) -> tuple[str, int]:
    """Return a marked text and how many blocks of its prompt are kept: those of the first prompt
    whose put did not time out, as one may on a busy machine.
    """
    deadline = time.monotonic() + WAIT_S
    while True:
        before = num_kept(server)
        marked = text(draw)
        kept = ask(server, turn(marked, **MARK))["input_tokens"] // BLOCK
        assert kept > 2
        until, pause = time.monotonic() + 15.0, threading.Event()
        while time.monotonic() < until:
            if num_kept(server) >= before + kept:
                return marked, kept
            pause.wait(0.1)
        assert time.monotonic() < deadline, "nothing is kept"


def keep_answer(server: Server, draw: random.Random) -> tuple[list[int], int]:
    """Return a prompt of a session with its answer, and how many whole blocks of them are kept. It
    is the first whose puts did not time out.
    """
    deadline = time.monotonic() + WAIT_S
    while True:
        before = num_kept(server)
        prompt = [draw.randrange(512) for _ in range(2 * BLOCK + 10)]
        asked = {"max_tokens": 2 * BLOCK, "ignore_eos": True, "session_id": "one"}
        answer = server.complete(prompt, **asked)["choices"][0]["token_ids"]
        num_blocks = (len(prompt) + len(answer) - 1) // BLOCK
        until, pause = time.monotonic() + 15.0, threading.Event()
        while time.monotonic() < until:
            if num_kept(server) >= before + num_blocks:
                return [*prompt, *answer], num_blocks
            pause.wait(0.1)
        assert time.monotonic() < deadline, "no answer is kept"


def text(draw: random.Random) -> str:
    return " ".join(str(draw.randrange(10**6)) for _ in range(60))


def found(usage: dict[str, Any]) -> int:
    """Return how many tokens of a prompt the cluster had, used or not: so small a model may look
    cheaper to run than blocks to fetch.
    """
    hits, misses = usage["mooncake"]["hits"], usage["mooncake"]["misses"]
    return int(sum(hits.values()) + misses["recomputed"] + misses["fetch_failed"])
