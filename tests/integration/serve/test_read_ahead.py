"""A prefill worker of real processes that joins, or wakes, reads the busiest prefix from the pool
before anybody asks it for anything.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.integration.serve.test_handover import BLOCK_TOKENS, NUM_PROMPT, SMALL, ask, load
from tests.support.serve.server_process import ServerProcess, nano_checkpoint
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

WAIT_S = 400.0
NUM_BLOCKS = NUM_PROMPT // BLOCK_TOKENS


def wait_for(server: ServerProcess, worker_id: str, figure: str, least: int) -> None:
    """Wait until a worker reports so much of a figure, or of a counter."""

    def told() -> bool:
        report = load(server, worker_id)
        return bool({**report["counters"], **report}.get(figure, 0) >= least)

    wait_until(told, f"{worker_id} reports {least} of {figure}", WAIT_S)


class Asking:
    """Has a server answer one prompt, again and again."""

    def __init__(self, server: ServerProcess, pool: ThreadPoolExecutor) -> None:
        self._server = server
        self._pool = pool

    def answer(self) -> list[int]:
        streams, reading = ask(self._server.url, self._pool, "busy", [1], 8)
        reading[0].result(WAIT_S)
        return streams[0].ids

    def make_busy(self) -> list[list[int]]:
        """Return two answers, whose prompt the pool has then."""
        answers = [self.answer(), self.answer()]
        wait_for(self._server, "kvstore-0", "num_cached_blocks", NUM_BLOCKS)
        return answers

    def check_read_ahead(self, name: str) -> None:
        """Wait until a worker that has computed nothing has read the prompt's blocks."""
        wait_for(self._server, name, "blocks_prefetched", NUM_BLOCKS)
        assert load(self._server, name)["counters"].get("prompt_tokens", 0) == 0


def test_a_worker_that_wakes_has_the_busiest_prefix_before_its_first_request(
    tmp_path: Path,
) -> None:
    words = (*SMALL, "--port", "0", "--kvstore-dram-bytes", "64MiB", "--enable-sleep-mode")
    shape = ("--prefill", "1", "--decode", "1", "--kvstore", "1")
    with (
        ThreadPoolExecutor(1) as pool,
        ServerProcess(str(nano_checkpoint(tmp_path)), *words, *shape) as server,
    ):
        server.wait_until_serving()
        asking = Asking(server, pool)
        answers = asking.make_busy()
        for path in ("/sleep?level=1&mode=wait", "/wake_up"):
            assert httpx.post(server.url + path, timeout=WAIT_S).status_code == 200
        asking.check_read_ahead("prefill-0")
        answers.append(asking.answer())
        wait_for(server, "prefill-0", "prompt_tokens", NUM_PROMPT)
        counters = load(server, "prefill-0")["counters"]
    assert answers == answers[:1] * 3
    assert counters["prompt_tokens_cached"] == NUM_BLOCKS * BLOCK_TOKENS
    assert counters["blocks_fetched"] == NUM_BLOCKS, "its request had to fetch none"


def test_a_worker_that_joins_has_the_busiest_prefix_before_its_first_request(
    tmp_path: Path,
) -> None:
    words = (*SMALL, "--port", "0", "--kvstore-dram-bytes", "64MiB", "--policy", "round-robin")
    with (
        ThreadPoolExecutor(1) as pool,
        ServerProcess(str(nano_checkpoint(tmp_path)), *words) as server,
    ):
        server.wait_until_serving()
        address = server.wait_for(r"--join (\S+)").group(1)
        asking = Asking(server, pool)
        answers = asking.make_busy()
        with ServerProcess("--role", "prefill", "--join", address, *SMALL[2:4]) as joiner:
            name = joiner.wait_for(r"(prefill-\S+) \(pid \d+\) serves").group(1)
            server.wait_for_workers({"prefill-0", "decode-0", "kvstore-0", name})
            asking.check_read_ahead(name)
            answers += [asking.answer(), asking.answer()]  # one of each prefill worker
            wait_for(server, name, "prompt_tokens", NUM_PROMPT)
            counters = load(server, name)["counters"]
    assert answers == answers[:1] * 4
    assert counters["prompt_tokens_cached"] == NUM_BLOCKS * BLOCK_TOKENS
    assert counters["blocks_fetched"] == NUM_BLOCKS, "its request had to fetch none"
