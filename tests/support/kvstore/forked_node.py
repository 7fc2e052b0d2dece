"""Pool nodes forked from a process that has imported everything: up in a fraction of the time that
a fresh interpreter takes, for tests that need many of them. Real processes all the same.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from mooncake.cli import main as cli
from tests.support import forks
from tests.support.kvstore.pool_process import SECRET, PoolProcess

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["tests.support.kvstore.forked_node", "mooncake.launch.cluster.pool"])


def _serve(command: Sequence[str], log: str) -> None:
    os.setsid()
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for fd in (1, 2):
        os.dup2(out, fd)
    os.environ["MOONCAKE_CLUSTER_SECRET"] = SECRET
    cli.main(list(command))


class _Forked:
    """What tests use of `subprocess.Popen`."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self._process = _FORKS.Process(target=_serve, args=(command, str(log)))
        forks.start(self._process)
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("forked node", timeout)
        return self._process.exitcode


class ForkedNode(PoolProcess):
    """A `PoolProcess` that starts fast."""

    def _start(self, command: Sequence[str], log: Path) -> _Forked:
        return _Forked(command, log)
