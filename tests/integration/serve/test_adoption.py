"""The process that looks after workers and runs the gateway is killed: workers stay."""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.ports import free_port
from tests.support.serve.server_process import STOP_S, ServerProcess, nano_checkpoint

NUM_KILLS = int(os.environ.get("MOONCAKE_NUM_KILLS", "1"))
"""Of each kind of process that looks after workers: `make soak-nodes` sets more."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900 * NUM_KILLS)]

WORKERS = {"prefill-0", "decode-0", "kvstore-0"}
PROMPT = "The quick brown fox jumps over the lazy dog. " * 20
NUM_TOKENS = 40
END_S = 400.0
LONGER_THAN_A_START_S = 600


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nano_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
def port() -> int:
    return free_port()


def serving(
    checkpoint: Path, port: int, *words: str, orphan_s: int = LONGER_THAN_A_START_S
) -> ServerProcess:
    """Start a server at a port, which names its workers for the next start."""
    return ServerProcess(
        str(checkpoint), "--port", str(port), "--dtype", "float32",
        "--kv-cache-memory-bytes", "32MiB", "--kvstore-dram-bytes", "32MiB",
        "--orphan-timeout", str(orphan_s), *words,
    )  # fmt: skip


def ask(server: ServerProcess, max_tokens: int = NUM_TOKENS) -> tuple[list[int], int]:
    """Return the tokens of an answer, and how many of its prompt were cached."""
    body: dict[str, Any] = {
        "prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True,
    }  # fmt: skip
    reply = server.post("/v1/completions", body)
    cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
    return list(reply["choices"][0]["token_ids"]), int(cached)


def kill(server: ServerProcess) -> None:
    """End the process at once, without a word to those that it started."""
    os.kill(server.process.pid, signal.SIGKILL)
    server.process.wait(STOP_S)


def have_ended(pidfds: list[int]) -> bool:
    """Wait until all these processes have ended."""
    ready = [select.select([each], [], [], END_S)[0] for each in pidfds]
    for each in pidfds:
        os.close(each)
    return all(ready)


def test_the_next_start_adopts_the_workers_of_one_that_was_killed(
    checkpoint: Path, port: int
) -> None:
    """The engines are the same processes, the pool is warm. Workers that do not fit the next start
    make way, and those that nobody adopts end.
    """
    with serving(checkpoint, port) as server:
        server.wait_until_serving()
        expected, _ = ask(server)
        pids = server.wait_for_workers(WORKERS)
        kill(server)
    for _ in range(NUM_KILLS - 1):
        with serving(checkpoint, port) as server:
            server.wait_until_serving()
            assert server.wait_for_workers(WORKERS) == pids
            kill(server)
    with serving(checkpoint, port) as server:
        server.wait_until_serving()
        assert server.wait_for_workers(WORKERS) == pids
        tokens, cached = ask(server)
        assert (tokens, cached > 0) == (expected, True)
        os.kill(pids["decode-0"], signal.SIGKILL)
        others = server.wait_for_workers(WORKERS, without=[pids["decode-0"]])
        assert {**pids, "decode-0": others["decode-0"]} == others, "it is watched as before"
        assert ask(server)[0] == expected
        kept = {name: os.pidfd_open(pid) for name, pid in others.items()}
        kill(server)
    with serving(checkpoint, port, "--max-num-seqs", "3", orphan_s=1) as server:
        server.wait_until_serving()
        new = server.wait_for_workers(WORKERS)
        assert not set(new.values()) & set(others.values())
        assert have_ended(list(kept.values()))
        assert ask(server)[0] == expected
        orphans = [os.pidfd_open(pid) for pid in new.values()]
        kill(server)
    assert have_ended(orphans)


def test_workers_that_share_their_experts_are_adopted_together(checkpoint: Path, port: int) -> None:
    """Then one of them is killed, and the other ends with it."""
    words = ("--decode-set", "data-parallel-size=2", "-ep")
    both = ["decode-0", "decode-1"]
    with serving(checkpoint, port, *words) as server:
        server.wait_until_serving()
        expected, _ = ask(server)
        pids = server.wait_for_workers({*WORKERS, *both})
        kill(server)
    with serving(checkpoint, port, *words) as server:
        server.wait_until_serving()
        assert server.wait_for_workers({*WORKERS, *both}) == pids
        for number in range(4):  # both get some
            assert ask(server, 20 + number)[0] == expected[: 20 + number]
        os.kill(pids["decode-1"], signal.SIGKILL)
        others = server.wait_for_workers({*WORKERS, *both}, without=[pids[each] for each in both])
        assert {**pids, **{each: others[each] for each in both}} == others
        assert ask(server)[0] == expected
        code, left = server.stop()
        assert (code, left) == (0, []), server.output
