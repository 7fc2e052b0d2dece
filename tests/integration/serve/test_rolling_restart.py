"""Everything that joined a cluster is ended and started again in turn, under load: no request is
lost, and no token of one.
"""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.support.serve.server_process import ServerProcess, nano_checkpoint
from tests.support.waiting import LONG_S

pytestmark = pytest.mark.timeout(600)

SMALL = (
    "--dtype", "float32", "--kv-cache-memory-bytes", "32MiB", "--kvstore-dram-bytes", "32MiB",
)  # fmt: skip
PROMPT = "The quick brown fox jumps over the lazy dog. " * 20
NUM_TOKENS = 40
NUM_ASKING = 2
PAUSE_S = 0.2
"""Between two questions of a client: processes that start beside them need the cores, too."""
NUM_BETWEEN = 3
"""Answers between two restarts."""


class Load:
    """Clients that ask one API server after another, again and again; `count` answers were
    right.
    """

    def __init__(self, api_servers: list[str], expected: list[int]) -> None:
        self.api_servers = api_servers
        self.wrong: list[object] = []
        self._expected = expected
        self._answered = threading.Semaphore(0)
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(NUM_ASKING)
        self._asking = [self._pool.submit(self._ask, number) for number in range(NUM_ASKING)]

    def wait_for(self, count: int) -> None:
        """Wait for so many more answers."""
        for _ in range(count):
            assert self._answered.acquire(timeout=LONG_S), self.wrong

    def close(self) -> None:
        """Wait for those that are under way."""
        self._stop.set()
        with self._pool:
            for asking in self._asking:
                asking.result(LONG_S)

    def _ask(self, number: int) -> None:
        while not self._stop.wait(PAUSE_S):
            number += 1
            url = self.api_servers[number % len(self.api_servers)]
            answer = _complete(url)
            if answer is None:  # it goes, or has gone: what a load balancer passes over
                self._stop.wait(0.05)
                continue
            if answer != self._expected:
                self.wrong.append((url, answer))
            self._answered.release()


def _complete(url: str) -> list[int] | str | None:
    """Return the tokens of a streamed answer, what went wrong, or None: refused before any."""
    body = {
        "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True,
        "stream": True, "return_token_ids": True,
    }  # fmt: skip
    ids: list[int] = []
    is_accepted = False
    try:
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=LONG_S) as reply:
            if reply.status_code == 503:
                return None
            is_accepted = True
            for line in reply.iter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    return str(chunk)
                ids += [one for choice in chunk["choices"] for one in choice["token_ids"] or []]
    except httpx.TransportError as error:
        return repr(error) if is_accepted else None
    return ids


@pytest.fixture
def head(tmp_path: Path) -> Iterator[ServerProcess]:
    """The first process of a cluster that has one worker of each kind and no API server."""
    with ServerProcess(str(nano_checkpoint(tmp_path)), *SMALL, "--headless") as head:
        yield head


def test_a_rolling_restart_loses_no_request(head: ServerProcess) -> None:
    def join(role: str, *words: str) -> ServerProcess:
        address = head.wait_for(r"--role ROLE --join (\S+)").group(1)
        return running.enter_context(ServerProcess("--role", role, "--join", address, *words))

    def api_server() -> ServerProcess:
        gateway = join("gateway", "--port", "0")
        gateway.wait_until_serving()
        return gateway

    def worker(role: str) -> ServerProcess:
        one = join(role, *SMALL[2:])
        one.wait_for(r"\(pid \d+\) serves")
        return one

    with ExitStack() as running:
        first, second = api_server(), api_server()
        load = Load([first.url, second.url], first.complete(PROMPT, NUM_TOKENS))
        running.callback(load.close)
        for role in ("kvstore", "prefill", "decode"):
            one = worker(role)
            load.wait_for(NUM_BETWEEN)
            assert one.stop(signal.SIGTERM) == (0, []), one.output
        for at, gateway in enumerate((first, second)):
            load.wait_for(NUM_BETWEEN)
            assert gateway.stop(signal.SIGTERM) == (0, []), gateway.output
            load.api_servers[at] = api_server().url
        load.wait_for(NUM_BETWEEN)
        load.close()
        assert load.wrong == []
