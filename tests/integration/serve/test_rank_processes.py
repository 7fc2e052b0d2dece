"""A cluster whose workers are two processes each, and one of mixed shapes: the tokens of one
process, kill -9 of every rank in mid-stream, and nothing left behind.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from mooncake.base import SamplingParams, Shape
from mooncake.launch.worker.direct import DirectEngine
from mooncake.model.checkpoint.presets import init_checkpoint
from tests.integration.serve.test_real_processes import prompt, stream, wait_until
from tests.support.serve.server import Server, serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SMALL = ("--kv-cache-memory-bytes", "16MiB", "--kvstore-dram-bytes", "16MiB", "--device", "cpu",
         "--max-model-len", "1024")  # fmt: skip
WORKERS = {"kvstore-0", "prefill-0", "decode-0"}
LENGTH = 150


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("model")
    return init_checkpoint("k2-nano", seed=5, out=home / "nano", dtype="float32")


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("ranks")
    counts = ["--prefill", "1", "--decode", "1", "-tp", "2"]
    with serving(str(model), *counts, *SMALL, log=home / "log") as running:
        yield running
    assert ranks_of(None) == []


def ranks_of(pid: int | None) -> list[psutil.Process]:
    """Return the followers of the worker `pid`, or all on this machine that are of this test."""
    root = psutil.Process(os.getpid() if pid is None else pid)
    return [
        child
        for child in root.children(recursive=True)
        if child.status() != psutil.STATUS_ZOMBIE and "rank_processes" in " ".join(child.cmdline())
    ]


def whole(server: Server) -> bool:
    status = server.status()
    up = {worker["id"] for worker in status["workers"] if worker["state"] == "up"}
    return up == WORKERS and status["load"]["num_inflight"] == 0


def alone(model: Path, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Return the tokens of one engine of one process."""
    greedy = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    with DirectEngine.open(
        str(model), dtype="float32", device="cpu", max_model_len=1024, num_threads=1
    ) as engine:
        return engine.generate(prompts, [greedy] * len(prompts))


def test_tokens_are_those_of_one_process(server: Server, model: Path) -> None:
    prompts = [prompt(30 + 90 * index, seed=index) for index in range(5)]
    expected = alone(model, prompts, 40)
    for _ in range(2):  # the second time from the pool and the prefix cache
        assert [stream(server, each, 40)["ids"] for each in prompts] == expected
    for worker in WORKERS - {"kvstore-0"}:
        assert len(ranks_of(server.pid_of(worker))) == 1


@pytest.mark.parametrize("role", ["decode", "prefill"])
@pytest.mark.parametrize("which", ["follower", "lead"])
def test_kill_9_of_a_rank_in_mid_stream(server: Server, role: str, which: str) -> None:
    wait_until(lambda: whole(server), 120, "all workers up and idle")
    prompts = [prompt(40 + 20 * index, seed=100 + index) for index in range(2)]
    calm = [stream(server, tokens, LENGTH)["ids"] for tokens in prompts]
    lead = server.pid_of(f"{role}-0")
    [follower] = ranks_of(lead)
    begun = threading.Semaphore(0)
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = [pool.submit(stream, server, tokens, LENGTH, begun=begun) for tokens in prompts]
        for _ in prompts:
            assert begun.acquire(timeout=60)
        os.kill(follower.pid if which == "follower" else lead, signal.SIGKILL)
        found = [answer.result(200) for answer in answers]
    assert [answer["ends"] for answer in found] == [["length"]] * len(prompts)
    assert [answer["ids"] for answer in found] == calm
    wait_until(lambda: whole(server), 120, "started again and idle")
    assert server.pid_of(f"{role}-0") != lead
    for pid in (lead, follower.pid):
        assert not psutil.pid_exists(pid)


def test_a_rank_that_stands_still_is_found_out(server: Server) -> None:
    """Within the 30 seconds that an exchange may take; its requests go on elsewhere."""
    wait_until(lambda: whole(server), 120, "all workers up and idle")
    tokens = prompt(50, seed=7)
    calm = stream(server, tokens, LENGTH)["ids"]
    lead = server.pid_of("decode-0")
    [stopped] = ranks_of(lead)
    begun = threading.Semaphore(0)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(stream, server, tokens, LENGTH, begun=begun)
        assert begun.acquire(timeout=60)
        os.kill(stopped.pid, signal.SIGSTOP)
        assert answer.result(200)["ids"] == calm
    wait_until(lambda: whole(server), 120, "started again and idle")
    assert server.pid_of("decode-0") != lead
    assert not psutil.pid_exists(stopped.pid)


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [("tp2", "tp1"), ("tp1", "tp2-dcp2"), ("tp2-dcp2", "tp1"), ("tp2-dcp2", "tp2-dcp2")],
)
def test_prefill_and_decode_of_different_shape(
    model: Path, tmp_path: Path, prefill: str, decode: str
) -> None:
    """Blocks written by one shape are read by the other: pushed, and the second time from the pool
    or the prefix cache.
    """
    flags, shapes = [], {"prefill": Shape.parse(prefill), "decode": Shape.parse(decode)}
    for role, shape in shapes.items():
        flags += [f"--{role}-set", f"tensor-parallel-size={shape.tp}"]
        flags += [f"--{role}-set", f"decode-context-parallel-size={shape.dcp}"]
    prompts = [prompt(30 + 90 * index, seed=index) for index in range(4)]
    expected = alone(model, prompts, 40)
    with serving(str(model), *flags, *SMALL, log=tmp_path / "log") as server:
        for _ in range(2):
            assert [stream(server, each, 40)["ids"] for each in prompts] == expected
        for role, shape in shapes.items():
            assert len(ranks_of(server.pid_of(f"{role}-0"))) == shape.tp - 1


def test_deterministic_logprobs_are_those_of_one_process(model: Path, tmp_path: Path) -> None:
    """In bfloat16, of several requests at once, the second time from caches; bit for bit."""
    prompts = [prompt(30 + 90 * index, seed=index) for index in range(4)]
    fields = {"max_tokens": 30, "temperature": 0, "ignore_eos": True, "logprobs": 3}
    found = {}
    for tp in ("1", "2"):
        flags = ["--colocated", "-tp", tp, "--deterministic", "--dtype", "bfloat16"]
        with serving(str(model), *flags, *SMALL, log=tmp_path / f"log{tp}") as server:

            def choices(tokens: list[int], server: Server = server) -> tuple[list[int], Any]:
                [choice] = server.complete(tokens, **fields)["choices"]
                return choice["token_ids"], choice["logprobs"]

            with ThreadPoolExecutor(len(prompts)) as pool:
                found[tp] = list(pool.map(choices, prompts))
            assert [choices(tokens) for tokens in prompts] == found[tp]
    assert found["1"] == found["2"]
