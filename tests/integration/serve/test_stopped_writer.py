"""A prefill worker that stops in the middle of a long push, on a cluster with little KV memory, and
goes on after it was given up: the cluster does not wait for it, and no token is wrong.
"""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mooncake.model.checkpoint.making.presets import init_checkpoint
from tests.integration.serve.test_real_processes import num_held, prompt, stream
from tests.support.serve.server import Server, serving
from tests.support.waiting import wait_until

NUM_PAGES = 180
LONG, SHORT = 7000, 100
NUDGE_S = 10.0
"""How long the pages may rest until the writer is taken to have stopped in the middle of a copy."""
WORKERS = {"prefill-0", "prefill-1", "decode-0"}


def is_whole(server: Server) -> bool:
    """Whether all workers are up again and hold nothing."""
    status = server.status()
    loads = [worker["load"] for worker in status["workers"] if worker["load"] is not None]
    return (
        {worker["id"] for worker in status["workers"] if worker["state"] == "up"} == WORKERS
        and len(loads) == len(WORKERS)
        and status["load"]["num_inflight"] == 0
        and all(num_held(worker) == 0 for worker in status["workers"])
    )


def pushing_prefill(server: Server, transport: str) -> str | None:
    """Return the prefill worker that computes something and has pushed a part of it."""
    for worker in server.status()["workers"]:
        load = worker["load"] if worker["state"] == "up" else None
        if not worker["id"].startswith("prefill") or load is None or not load.get("num_running"):
            continue
        if load["counters"].get(f"transfer_{transport}_bytes", 0) > 0:
            return str(worker["id"])
    return None


def num_rested(server: Server) -> int:
    """Return how many pages of lost writers decode has taken back."""
    [decode] = [each for each in server.status()["workers"] if each["id"] == "decode-0"]
    return int(decode["load"]["counters"]["pages_rested"])


def wait_for_pages(server: Server, writer_pid: int) -> None:
    """Wait until decode may give the lost writer's pages to others. A writer that was stopped in
    the middle of a copy into shared memory goes on for a moment, so that this copy ends.
    """
    nudge_s = time.monotonic() + NUDGE_S

    def are_back() -> bool:
        nonlocal nudge_s
        if time.monotonic() > nudge_s:
            nudge_s = time.monotonic() + NUDGE_S
            os.kill(writer_pid, signal.SIGCONT)
            os.kill(writer_pid, signal.SIGSTOP)
        return num_rested(server) > NUM_PAGES / 2

    wait_until(are_back, "the pages are back")


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_the_cluster_moves_on_and_a_late_writer_harms_nothing(
    tmp_path: Path, transport: str
) -> None:
    """`transfer/test_fences.py` asks RDMA, too, for what this relies on."""
    model = init_checkpoint("k2-tiny", seed=5, out=tmp_path / "nano", dtype="float32")
    args = ["--prefill", "2", "--decode", "1", "--kvstore", "0", "--max-model-len", "8192"]
    args += ["--num-gpu-blocks-override", str(NUM_PAGES), "--transport", transport]
    args += ["--max-num-batched-tokens", "256"]  # many small pushes: the stop meets the middle
    with (
        serving(str(model), *args, log=tmp_path / "log") as server,
        ThreadPoolExecutor(4) as pool,
    ):
        wait_until(lambda: is_whole(server), "all workers up")
        long = pool.submit(stream, server, prompt(LONG, 1), 8)
        victim = wait_until(lambda: pushing_prefill(server, transport), "a push has begun")
        assert victim is not None
        pid = server.pid_of(victim)
        os.kill(pid, signal.SIGSTOP)
        assert not long.done(), "the stop came too late"
        wait_until(
            lambda: all(
                worker["id"] != victim or worker["state"] != "up"
                for worker in server.status()["workers"]
            ),
            "the worker was given up",
        )
        wait_for_pages(server, pid)
        short = [pool.submit(stream, server, prompt(SHORT, 10 + n), 8) for n in range(3)]
        answers = [each.result(300) for each in (*short, long)]  # while the writer is still stopped
        os.kill(pid, signal.SIGCONT)
        wait_until(lambda: is_whole(server), "all workers up and holding nothing")
        prompts = [*(prompt(SHORT, 10 + n) for n in range(3)), prompt(LONG, 1)]
        for found, tokens in zip(answers, prompts, strict=True):
            assert found["ends"] == ["length"]
            assert found["ids"] == stream(server, tokens, 8)["ids"]
        wait_until(lambda: is_whole(server), "pages are level")
