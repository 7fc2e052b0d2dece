"""A real `mooncake serve` in a process of its own, on a port the system hands out, and its end
without leftovers.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.support.serve import forked_program
from tests.support.waiting import LONG_S

START_S = 300.0
STOP_S = 240.0
_SERVING = re.compile(r"serving \S+ on (http://\S+)/v1")


class Server:
    """`mooncake serve ARGS`; `url` once it serves with all its workers."""

    def __init__(self, *args: str, log: Path) -> None:
        self._log = log
        environment = {
            **os.environ,
            "OMP_WAIT_POLICY": "PASSIVE",
            "HF_HUB_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
        }
        with log.open("wb") as out:
            words = ("serve", "--port", "0", *args)
            self.process = forked_program.start(words, environment, out.fileno())
        self.url = self._wait_until_serving()
        self.client = httpx.Client(base_url=self.url, timeout=LONG_S)

    @property
    def output(self) -> str:
        """What it has printed."""
        return self._log.read_text(errors="replace")

    def _wait_until_serving(self) -> str:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            found = _SERVING.search(self.output)
            if found:
                return found.group(1)
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended at its start:\n{self.output}")
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(0.1)
        self.kill()
        raise AssertionError(f"not serving after {START_S} s:\n{self.output}")

    def complete(self, prompt: list[int] | str, **fields: Any) -> dict[str, Any]:
        """POST /v1/completions and return the body of a 200."""
        body = {"model": self.model, "prompt": prompt, "return_token_ids": True, **fields}
        reply = self.client.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        answer: dict[str, Any] = reply.json()
        return answer

    @property
    def model(self) -> str:
        """The name it serves under."""
        return str(self.client.get("/v1/models").json()["data"][0]["id"])

    def status(self) -> dict[str, Any]:
        """What `mooncake status --json` shows."""
        answer: dict[str, Any] = self.client.get("/v1/cluster/status").json()
        return answer

    def pid_of(self, worker_id: str) -> int:
        """Return the process id of a worker."""
        workers = {worker["id"]: worker for worker in self.status()["workers"]}
        return int(workers[worker_id]["pid"])

    def descendants(self) -> list[psutil.Process]:
        """Return every process the server has started and that still runs."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []

    def stop(self) -> list[int]:
        """Ctrl-C; return the process ids that are still there afterwards."""
        self.client.close()
        children = self.descendants()
        self.process.send_signal(signal.SIGINT)
        self.process.wait(STOP_S)
        _, alive = psutil.wait_procs(children, timeout=60)
        return [process.pid for process in alive]

    def kill(self) -> None:
        """End it and all it has started, whatever state it is in."""
        for process in [*self.descendants(), self.process]:
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                process.kill()
        self.process.wait(STOP_S)


@contextlib.contextmanager
def serving(*args: str, log: Path) -> Iterator[Server]:
    """Serve for the body; afterwards no process may be left."""
    server = Server(*args, log=log)
    try:
        yield server
        leftovers = server.stop()
        assert not leftovers, f"processes {leftovers} outlived Ctrl-C"
    finally:
        server.client.close()
        server.kill()
