"""A pool node standing alone, as a person would start it, in a process of its own."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from mooncake.launch.pool_client.session import PoolSession, locate
from tests.support.waiting import LONG_S

SECRET = "a secret of these tests"
_READY = re.compile(r"pool node at (http://\S+) -")


def until(holds: Callable[[], bool], what: str, seconds: float = LONG_S) -> None:
    """Wait for a condition that other processes bring about."""
    pause, deadline = threading.Event(), time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        pause.wait(0.02)


def has_ipv6() -> bool:
    """Whether this machine has an IPv6 loopback address."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


class PoolProcess:
    """`mooncake serve MODEL --role kvstore WORDS`, ready. Leaving the context kills it."""

    def __init__(self, model: Path, log: Path, *words: str) -> None:
        self._log = log
        command = ["serve", str(model), "--role", "kvstore", "--admin-port", "0", *words]
        log.touch()
        self.process = self._start(command, log)
        try:
            until(self._is_up, "the node is up")
        except BaseException:
            self.process.kill()
            self.process.wait()
            raise
        self.url = self._found()

    def _start(self, command: Sequence[str], log: Path) -> Any:
        """Return the process, as `subprocess.Popen` would show it."""
        with log.open("wb") as out:
            return subprocess.Popen(
                [sys.executable, "-m", "mooncake.cli.main", *command],
                stdout=out, stderr=subprocess.STDOUT,
                env={**os.environ, "MOONCAKE_CLUSTER_SECRET": SECRET},
                start_new_session=True,
            )  # fmt: skip

    @property
    def output(self) -> str:
        """What it has printed."""
        return self._log.read_text(errors="replace")

    def _found(self) -> str:
        match = _READY.search(self.output)
        return match.group(1) if match else ""

    def _is_up(self) -> bool:
        assert self.process.poll() is None, f"it ended at its start:\n{self.output}"
        return bool(self._found())

    def session(self, **settings: Any) -> PoolSession:
        """Return a client of it."""
        config = locate(self.url, SECRET)
        settings = {"timeout_s": 30.0, **settings}
        return PoolSession(msgspec.structs.replace(config, **settings))

    def stop(self, number: int) -> int:
        """Send a signal, wait, return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(LONG_S)

    def __enter__(self) -> PoolProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait(LONG_S)
