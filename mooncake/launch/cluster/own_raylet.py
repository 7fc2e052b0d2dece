"""Starts the processes that make a machine a node of Ray, and ends them with this process. Imports
no ray.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable

from mooncake.base import ConfigError, MooncakeError
from mooncake.launch.host import machine_facts
from mooncake.launch.host.credentials import private_dir

START_S = 180.0
"""`ray start` may take this long to report that it runs."""
STOP_S = 10.0
POLL_S = 0.05
STARTED = "Ray runtime started"
OBJECT_STORE_BYTES = 100 * 2**20
"""Ray insists on an object store; we never put anything there."""
SHOWN_LINES = 3
_PROGRAM = (
    "import ctypes, signal; ctypes.CDLL(None).prctl(1, signal.SIGTERM); "  # PR_SET_PDEATHSIG
    "from ray.scripts.scripts import main; main()"
)
"""A program that ends Ray when its starter ends in any way. Ray alone would go on, and keep its
port.
"""

_log = logging.getLogger(__name__)


class OwnRaylet:
    """The raylet of this machine, which ends with the process that starts it."""

    def __init__(
        self, address: str, bind_host: str, stops: Callable[[], bool], *, head: bool = False
    ) -> None:
        """Start the raylet for the cluster at `address`. `bind_host` is this machine's address
        there. `stops`: whether to give up. `head`: the cluster begins here, at that address.

        Raises:
            ConfigError: Ray does not start.
            MooncakeError: `stops` has returned true.
        """
        log = private_dir() / f"raylet-{os.getpid()}.log"
        words = [
            "start", "--block", "--disable-usage-stats", "--num-cpus=0",
            f"--num-gpus={machine_facts.num_gpus()}",
            f"--node-ip-address={bind_host}", f"--object-store-memory={OBJECT_STORE_BYTES}",
            f"--temp-dir={private_dir()}",  # others could read its logs otherwise
        ]  # fmt: skip
        if head:
            port = address.rpartition(":")[2]
            words += ["--head", f"--port={port}", "--include-dashboard=false", "--no-monitor"]
        else:
            words.append(f"--address={address}")
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        self._log = log
        try:
            self._await_start(address, stops)
        except BaseException:
            self.close()
            raise
        _log.info("Ray runs on this machine, as part of the cluster at %s", address)

    def _await_start(self, address: str, stops: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + START_S
        while STARTED not in (said := self._log.read_text(errors="replace")):
            if stops():
                raise MooncakeError("stopped while Ray was starting on this machine")
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                lines = [line.strip() for line in said.splitlines() if line.strip()]
                raise ConfigError(
                    f"ray: Ray does not start on this machine for the cluster at {address}: "
                    f"{' / '.join(lines[-SHOWN_LINES:]) or 'it printed nothing'}. Both machines "
                    "need the same version of Ray and the same token in ~/.ray/auth_token"
                )
            time.sleep(POLL_S)

    def has_ended(self) -> bool:
        """Return whether the raylet, or another process of Ray here, has ended."""
        return self._process.poll() is not None

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.unlink(missing_ok=True)
