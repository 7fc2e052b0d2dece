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
from tests.integration.serve.test_real_processes import num_held, prompt, stream, wait_until
from tests.support.serve.server import Server, serving

NUM_PAGES = 180
LONG, SHORT = 7000, 100
MOVES_ON_S = 15.0
"""From the loss of a writer until others may have its pages, for which all requests wait here.
They rested for 30 s before writers were fenced.
"""
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


def busy_prefill(server: Server) -> str | None:
    """Return the prefill worker that computes something."""
    for worker in server.status()["workers"]:
        load = worker["load"] if worker["state"] == "up" else None
        if worker["id"].startswith("prefill") and load is not None and load.get("num_running"):
            return str(worker["id"])
    return None


def num_rested(server: Server) -> int:
    """Return how many pages of lost writers decode has taken back."""
    [decode] = [each for each in server.status()["workers"] if each["id"] == "decode-0"]
    return int(decode["load"]["counters"]["pages_rested"])


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_the_cluster_moves_on_and_a_late_writer_harms_nothing(
    tmp_path: Path, transport: str
) -> None:
    """`transfer/test_fences.py` asks RDMA, too, for what this relies on."""
    model = init_checkpoint("k2-tiny", seed=5, out=tmp_path / "nano", dtype="float32")
    args = ["--prefill", "2", "--decode", "1", "--kvstore", "0", "--max-model-len", "8192"]
    args += ["--num-gpu-blocks-override", str(NUM_PAGES), "--transport", transport]
    with (
        serving(str(model), *args, log=tmp_path / "log") as server,
        ThreadPoolExecutor(4) as pool,
    ):
        wait_until(lambda: is_whole(server), 60, "all workers up")
        long = pool.submit(stream, server, prompt(LONG, 1), 8)
        wait_until(lambda: busy_prefill(server) is not None, 60, "the long prompt is computed")
        victim = busy_prefill(server)
        assert victim is not None
        pid = server.pid_of(victim)
        time.sleep(0.7)  # some chunks have been pushed
        os.kill(pid, signal.SIGSTOP)
        assert not long.done(), "the stop came too late"
        wait_until(
            lambda: all(
                worker["id"] != victim or worker["state"] != "up"
                for worker in server.status()["workers"]
            ),
            60, "the worker was given up",
        )  # fmt: skip
        lost_s = time.monotonic()
        wait_until(lambda: num_rested(server) > NUM_PAGES / 2, 60, "the pages are back")
        assert time.monotonic() - lost_s < MOVES_ON_S
        short = [pool.submit(stream, server, prompt(SHORT, 10 + n), 8) for n in range(3)]
        answers = [each.result(300) for each in (*short, long)]  # while the writer is still stopped
        os.kill(pid, signal.SIGCONT)
        wait_until(lambda: is_whole(server), 120, "all workers up and holding nothing")
        prompts = [*(prompt(SHORT, 10 + n) for n in range(3)), prompt(LONG, 1)]
        for found, tokens in zip(answers, prompts, strict=True):
            assert found["ends"] == ["length"]
            assert found["ids"] == stream(server, tokens, 8)["ids"]
        wait_until(lambda: is_whole(server), 60, "pages are level")
