"""A worker is told to end in mid-work. Decode without a pool: another one goes on with what it
decodes, from the KV in its pages. Prefill: it finishes its prompts, and others find in the pool
what it has computed.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tests.support.serve.server_process import ServerProcess, nano_checkpoint
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SMALL = ("--dtype", "float32", "--kv-cache-memory-bytes", "64MiB", "--max-model-len", "4096")
ALIKE = "--no-self-profile"
"""Workers that measured their speed on a busy machine would not share the requests."""
LEAVES = ("--shutdown-timeout", "200")
"""A worker may take as long to end well: on a busy machine longer than the default."""
NUM_PROMPT, NUM_TOKENS, NUM_ASKING = 2100, 500, 4
NUM_QUEUING = 8
"""Prompts at once, so that some wait at each of two prefill workers."""
BLOCK_TOKENS = 64
WAIT_S = 400.0


class Stream:
    """The tokens of one streamed answer, as they come."""

    def __init__(self, url: str, seed: int, salt: str, num_tokens: int) -> None:
        """`salt`: answers of one salt reuse nothing of another's."""
        draw = random.Random(seed)
        self._url = f"{url}/v1/completions"
        self._body = {
            "prompt": [draw.randrange(512) for _ in range(NUM_PROMPT)], "max_tokens": num_tokens,
            "temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True,
            "cache_salt": salt,
        }  # fmt: skip
        self.ids: list[int] = []
        self.times_s: list[float] = []

    def read(self) -> None:
        with httpx.stream("POST", self._url, json=self._body, timeout=WAIT_S) as reply:
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    chunk = msgspec.json.decode(line.removeprefix("data: "))
                    assert "error" not in chunk, chunk
                    self.ids += [
                        one for each in chunk["choices"] for one in each["token_ids"] or []
                    ]
                    self.times_s.append(time.monotonic())


def ask(
    url: str, pool: ThreadPoolExecutor, salt: str, seeds: Iterable[int], num_tokens: int
) -> tuple[list[Stream], list[Future[None]]]:
    streams = [Stream(url, seed, salt, num_tokens) for seed in seeds]
    return streams, [pool.submit(stream.read) for stream in streams]


def load(server: ServerProcess, worker_id: str) -> dict[str, Any]:
    """Return what a worker last reported; the first reports have no counters."""
    [worker] = [w for w in server.get("/v1/cluster/status")["workers"] if w["id"] == worker_id]
    return {"num_running": 0, "counters": {}, **worker["load"]}


def joins(role: str, address: str) -> tuple[str, ...]:
    """Return the words of a worker that joins, and leaves later."""
    return ("--role", role, "--join", address, *SMALL[2:4], ALIKE, *LEAVES)


def decodes_all(load: dict[str, Any]) -> bool:
    """Whether a worker has requests, and has computed the prompts of all of them."""
    num_running = load["num_running"]
    computed = load.get("num_context_tokens", 0) >= num_running * NUM_PROMPT
    return bool(num_running and computed and not load.get("num_waiting"))


def rested(server: ServerProcess, worker_id: str, num_prompt_tokens: float = 0) -> dict[str, float]:
    """Return the counters of a worker once it reports that it has nothing to do, and that it was
    given so many tokens of prompts: its last report may be older than the last answer.
    """

    def told() -> dict[str, float] | None:
        last = load(server, worker_id)
        counts: dict[str, float] = last["counters"]
        is_busy = last["num_running"] or last.get("num_waiting") or last.get("num_queued_tokens")
        return None if is_busy or counts.get("prompt_tokens", 0) < num_prompt_tokens else counts

    return wait_until(told, f"{worker_id} is at rest") or {}


def computed(counts: dict[str, float]) -> float:
    """Return how many tokens of prompts a worker has computed."""
    return counts.get("prompt_tokens", 0) - counts.get("prompt_tokens_cached", 0)


def test_what_a_leaving_worker_decodes_is_fetched_from_it(tmp_path: Path) -> None:
    words = (*SMALL, ALIKE, "--port", "0", "--prefill", "0", "--kvstore", "0")
    with (
        ThreadPoolExecutor(NUM_ASKING) as pool,
        ServerProcess(str(nano_checkpoint(tmp_path)), *words) as server,
    ):
        server.wait_until_serving()
        address = server.wait_for(r"--join (\S+)").group(1)
        with ServerProcess(*joins("decode", address)) as leaver:
            name = leaver.wait_for(r"(decode-\S+) \(pid \d+\) serves").group(1)
            server.wait_for_workers({"decode-0", name})
            before = load(server, "decode-0")["counters"]
            streams, reading = ask(server.url, pool, "moved", range(NUM_ASKING), NUM_TOKENS)
            while not decodes_all(load(server, name)):
                _, left = wait(reading, 0.1, FIRST_COMPLETED)
                assert left, "all went to the other worker"
            num_of_leaver = computed(load(server, name)["counters"]) // NUM_PROMPT
            assert leaver.stop(signal.SIGTERM) == (0, []), leaver.output
            for each in reading:
                each.result(WAIT_S)
        after = rested(server, "decode-0", NUM_PROMPT)
        status = server.get("/v1/cluster/status")
        calm, reading = ask(server.url, pool, "calm", range(len(streams)), NUM_TOKENS)
        for each in reading:
            each.result(WAIT_S)
    assert [stream.ids for stream in streams] == [stream.ids for stream in calm]
    num_moved = status["counters"].get("requests_moved", 0)
    assert num_moved >= 1, "it waited for all answers to end"
    assert status["counters"].get("attempts_lost", 0) == 0
    fetched = after["blocks_fetched"] - before.get("blocks_fetched", 0)
    assert fetched >= num_moved * (NUM_PROMPT // BLOCK_TOKENS)
    num_again = computed(after) - computed(before) - (len(streams) - num_of_leaver) * NUM_PROMPT
    assert 0 <= num_again <= num_moved * 2 * BLOCK_TOKENS
    gaps_s = sorted(b - a for stream in streams for a, b in pairwise(stream.times_s))
    print(
        f"{num_moved} moved, {fetched:.0f} blocks fetched, "
        f"{num_again:.0f} tokens computed again; gaps: 99th percentile "
        f"{gaps_s[len(gaps_s) * 99 // 100]:.3f} s, longest {gaps_s[-1]:.3f} s"
    )


def test_what_a_leaving_prefill_worker_computes_is_finished_and_found_in_the_pool(
    tmp_path: Path,
) -> None:
    words = (*SMALL, ALIKE, "--port", "0", "--kvstore-dram-bytes", "64MiB")
    with (
        ThreadPoolExecutor(NUM_QUEUING) as pool,
        ServerProcess(str(nano_checkpoint(tmp_path)), *words) as server,
    ):
        server.wait_until_serving()
        address = server.wait_for(r"--join (\S+)").group(1)

        def counted(num_prompt_tokens: float) -> dict[str, float]:
            prefill = rested(server, "prefill-0", num_prompt_tokens)
            each = [prefill, rested(server, "decode-0")]
            fetched = sum(counts.get("blocks_fetched", 0) for counts in each)
            total = {"computed": sum(map(computed, each)), "fetched": fetched}
            return total | {"given": prefill["prompt_tokens"]}

        with ServerProcess(*joins("prefill", address)) as leaver:
            name = leaver.wait_for(r"(prefill-\S+) \(pid \d+\) serves").group(1)
            server.wait_for_workers({"prefill-0", "decode-0", "kvstore-0", name})
            first, reading = ask(server.url, pool, "one", range(NUM_QUEUING), 8)
            wait_until(lambda: load(server, name).get("num_queued_tokens"), "prompts queue there")
            assert leaver.stop(signal.SIGTERM) == (0, []), leaver.output
            for each in reading:
                each.result(WAIT_S)
        before = counted(NUM_PROMPT)
        again, reading = ask(server.url, pool, "one", range(NUM_QUEUING), 8)
        for each in reading:
            each.result(WAIT_S)
        after = counted(before["given"] + NUM_QUEUING * NUM_PROMPT)
        status = server.get("/v1/cluster/status")
    assert [stream.ids for stream in again] == [stream.ids for stream in first]
    assert status["counters"].get("attempts_lost", 0) == 0
    assert status["counters"].get("requests_moved", 0) == 0
    num_of_leaver = NUM_QUEUING * NUM_PROMPT - before["computed"]
    assert num_of_leaver >= NUM_PROMPT, "it computed a prompt to its end after it was told to end"
    num_again, num_fetched = (after[key] - before[key] for key in ("computed", "fetched"))
    print(
        f"{num_of_leaver:.0f} tokens computed by the one that left; then {num_fetched:.0f} blocks "
        f"fetched, {num_again:.0f} tokens computed again"
    )
    # Blocks that decode still has need not be fetched.
    assert num_again <= NUM_QUEUING * 2 * BLOCK_TOKENS
