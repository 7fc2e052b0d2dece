"""A cluster as users run it, one process a worker: loads, aborts and kill -9 in mid-
stream, nothing left behind.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest

from mooncake.model.checkpoint.making.presets import init_checkpoint
from tests.support.monitoring import check, labels_of, panels, rules
from tests.support.serve.server import Server, serving
from tests.support.waiting import LONG_S, wait_until

WORKERS = {"kvstore-0", "kvstore-1", "prefill-0", "prefill-1", "decode-0", "decode-1"}
NUM_CLIENTS, NUM_OF_EACH = 64, 4
"""Clients that ask at once, and how often each asks."""
FEW_TOKENS = 10
MOST_LATE = 40
"""Prompts sent until a prefill worker that stands still has one."""
MANY_TOKENS = 240


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("cluster")
    model = init_checkpoint("k2-nano", seed=5, out=home / "nano", dtype="float32")
    small = ["--kv-cache-memory-bytes", "32MiB", "--kvstore-dram-bytes", "32MiB"]
    counts = ["--prefill", "2", "--decode", "2", "--kvstore", "2", "--max-model-len", "2048"]
    with serving(str(model), *counts, *small, log=home / "log") as running:
        yield running


@pytest.fixture(scope="module")
def calm(server: Server) -> list[list[int]]:
    """What streams that nobody disturbs give to `STREAMED`."""
    return [stream(server, tokens, MANY_TOKENS)["ids"] for tokens in STREAMED]


def prompt(length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(512) for _ in range(length)]


STREAMED = [prompt(40 + 20 * index, seed=index) for index in range(8)]


def stream(
    server: Server,
    tokens: list[int],
    max_tokens: int,
    stop_after: int | None = None,
    begun: threading.Semaphore | None = None,
) -> dict[str, Any]:
    """Stream a completion; return its token ids and how it ended ("abort" when we went away).

    `begun` is released once a few tokens have come.
    """
    body = {
        "model": "nano",
        "prompt": tokens,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    ids: list[int] = []
    ends: list[str] = []
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=LONG_S) as reply:
        if reply.status_code != 200:
            reply.read()
            return {"ids": ids, "ends": [f"status {reply.status_code}"], "text": reply.text}
        for line in reply.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                ends.append("error")
                continue
            for choice in chunk["choices"]:
                ids += choice.get("token_ids") or []
                if choice["finish_reason"]:
                    ends.append(choice["finish_reason"])
            if begun is not None and len(ids) >= FEW_TOKENS:
                begun.release()
                begun = None
            if stop_after is not None and len(ids) >= stop_after:
                return {"ids": ids, "ends": ["abort"], "text": ""}
    return {"ids": ids, "ends": ends, "text": ""}


def idle_and_whole(server: Server) -> bool:
    """Say whether all workers are up, hold nothing for anybody, and no request is left."""
    status = server.status()
    up = {worker["id"] for worker in status["workers"] if worker["state"] == "up"}
    loads = [worker["load"] for worker in status["workers"] if worker["load"] is not None]
    return (
        up == WORKERS
        and len(loads) == len(WORKERS)
        and status["load"]["num_inflight"] == 0
        and all(load.get("num_running", 0) == 0 for load in loads)
        and all(num_held(worker) == 0 for worker in status["workers"])
    )


def num_held(worker: dict[str, Any]) -> int:
    """Return how many blocks of a worker are neither free nor merely cached."""
    load = worker["load"]
    cached = load.get("num_cached_blocks", 0) if worker["role"] == "kvstore" else 0
    return int(load["num_total_blocks"] - load["num_free_blocks"] - cached)


def test_workers_are_processes_of_their_own(server: Server) -> None:
    status = server.status()
    assert {worker["id"] for worker in status["workers"]} == WORKERS
    assert len({worker["pid"] for worker in status["workers"]}) == len(WORKERS)
    answer = stream(server, prompt(300, 1), 20)
    assert answer["ends"] == ["length"]
    assert len(answer["ids"]) == 20


@pytest.mark.parametrize("victim", ["decode-0", "prefill-0", "kvstore-0"])
def test_kill_9_in_mid_stream(server: Server, calm: list[list[int]], victim: str) -> None:
    """Streams are open when it dies. A prefill worker dies with prompts that it was given."""
    wait_until(lambda: idle_and_whole(server), "all workers up and idle")
    prompts, late, given = STREAMED, list[list[int]](), "prefill" not in victim
    pid, begun = server.pid_of(victim), threading.Semaphore(0)
    with ThreadPoolExecutor(len(prompts) + MOST_LATE) as pool:
        answers = [
            pool.submit(stream, server, tokens, MANY_TOKENS, begun=begun) for tokens in prompts
        ]
        for _ in prompts:
            assert begun.acquire(timeout=LONG_S)
        if not given:
            os.kill(pid, signal.SIGSTOP)
        while not given and len(late) < MOST_LATE:  # the other one takes a few first
            some = [prompt(500, seed=20 + len(late) + index) for index in range(MOST_LATE // 2)]
            late += some
            answers += [
                pool.submit(stream, server, tokens, FEW_TOKENS, begun=begun) for tokens in some
            ]
            given = not all(begun.acquire(timeout=5) for _ in some)
        os.kill(pid, signal.SIGKILL)
        assert given, "it was given no prompt"
        found = [answer.result(LONG_S) for answer in answers]
    late_calm = [stream(server, tokens, FEW_TOKENS)["ids"] for tokens in late]
    for answer, expected in zip(found, calm + late_calm, strict=True):
        assert len(answer["ends"]) == 1, answer
        if answer["ends"] == ["length"]:
            assert answer["ids"] == expected
        else:
            assert answer["ids"] == expected[: len(answer["ids"])]
    assert all(answer["ends"] == ["length"] for answer in found), "a loss is only a pause"
    assert stream(server, prompts[0], MANY_TOKENS)["ids"] == calm[0]
    wait_until(lambda: idle_and_whole(server), "restarted, idle, no block held")
    assert server.pid_of(victim) != pid
    wait_until(lambda: not psutil.pid_exists(pid), "it is reaped")


def test_64_clients_with_random_aborts(server: Server) -> None:
    wait_until(lambda: idle_and_whole(server), "all workers up and idle")
    ends: list[str] = []

    def client(number: int) -> None:
        draw = random.Random(number)
        for _ in range(NUM_OF_EACH):
            tokens = prompt(draw.randrange(1, 400), seed=draw.randrange(20))
            max_tokens = draw.randrange(1, 60)
            leave = draw.randrange(1, max_tokens + 1) if draw.random() < 0.4 else None
            answer = stream(server, tokens, max_tokens, leave)
            assert len(answer["ends"]) == 1, answer
            ends.extend(answer["ends"])

    stream(server, prompt(64, 1), 8)
    before = memory_of(server)
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        for future in [pool.submit(client, number) for number in range(NUM_CLIENTS)]:
            future.result()
    assert set(ends) <= {"length", "abort"}, {end: ends.count(end) for end in set(ends)}
    assert len(ends) == NUM_CLIENTS * NUM_OF_EACH
    wait_until(lambda: idle_and_whole(server), "idle, no block held")
    assert memory_of(server) < before + 300 * 2**20


def test_workers_outlive_their_fork_server_and_start_again_without_it(server: Server) -> None:
    wait_until(lambda: idle_and_whole(server), "all workers up and idle")
    own = psutil.Process(server.process.pid).children()
    lasting = [each for each in own if each.status() != psutil.STATUS_ZOMBIE]
    [forks] = [each for each in lasting if "fork_server" in " ".join(each.cmdline())]
    pid = server.pid_of("decode-0")
    assert pid in [each.pid for each in forks.children()]
    expected = stream(server, prompt(64, 3), MANY_TOKENS)["ids"]
    forks.kill()
    assert stream(server, prompt(64, 3), MANY_TOKENS)["ids"] == expected
    wait_until(lambda: "fork server has ended" in server.output, "the log says so")
    os.kill(pid, signal.SIGKILL)

    def pids() -> set[int]:
        return {worker["pid"] for worker in server.status()["workers"]}

    wait_until(lambda: pid not in pids(), "its loss is known")
    wait_until(lambda: idle_and_whole(server), "restarted by itself")
    assert stream(server, prompt(64, 3), MANY_TOKENS)["ids"] == expected


def memory_of(server: Server) -> int:
    """Return the resident bytes of the server and its workers, without KV pages and pool."""
    pids = {worker["pid"] for worker in server.status()["workers"]} | {server.process.pid}
    each = [psutil.Process(pid).memory_info() for pid in pids]
    return sum(memory.rss - memory.shared for memory in each)


RARE = {
    "mooncake:request_failure_total": {"model_name", "status"},
    "mooncake:requests_rejected_total": {"model_name", "reason", "status"},
}
"""Series that begin with what no request of this module met; a unit test sets them."""


def test_dashboard_and_alerts_ask_for_what_these_processes_show(server: Server) -> None:
    """Every series and label of every expression is in what Prometheus would scrape here."""
    answer = stream(server, prompt(300, 2), 20)
    assert answer["ends"] == ["length"]
    wait_until(lambda: idle_and_whole(server), "all workers up and idle")
    wait_until(lambda: server.status()["replicas"], "a look at the load")
    urls = [server.url, *(worker["health_url"] for worker in server.status()["workers"])]
    shown = labels_of(*(httpx.get(f"{url}/metrics", timeout=LONG_S).text for url in urls))
    assert "mooncake_build_info" in shown
    assert {"version", "revision", "role", "layout"} < shown["mooncake:build_info"]
    for expression in [
        *(rule["expr"] for rule in rules()),
        *(target["expr"] for panel in panels() for target in panel["targets"]),
    ]:
        check(expression, RARE | shown)
