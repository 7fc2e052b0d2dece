"""The program that asks a cluster's gateways (`load.py`), on one of the hosts, and what it says."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from tests.support.hosts.hosts import HOME, Host
from tests.support.hosts.soak import load

API_PORT = 8000


class Asker:
    """The program, which only looks at the gateways until it is told to begin."""

    def __init__(
        self, host: Host, gateways: Sequence[Host], authority: Path, plan: dict[str, Any]
    ) -> None:
        """Start it on a host. `authority`: the certificate that signed those of the gateways.
        `plan`: prompts, lengths, seed and rate.
        """
        own = {
            "ca": f"{HOME}/ca.pem", "port": API_PORT, "hosts": [each.address for each in gateways],
        }  # fmt: skip
        shutil.copy(authority, host.path(f"{HOME}/ca.pem"))
        host.path(f"{HOME}/plan.json").write_text(json.dumps(plan | own))
        shutil.copy(load.__file__, host.path(f"{HOME}/load.py"))  # it sees no /tmp of ours
        self.seen: list[dict[str, Any]] = []
        """All that it has said so far, as of the last `read`."""
        self._num_read = 0
        self._program = host.run(sys.executable, "load.py", "plan.json")

    def begin(self) -> None:
        """Have it ask from now on."""
        self._program.send(signal.SIGUSR1)

    def end(self) -> None:
        """Have it ask no more, and the second time end."""
        self._program.send(signal.SIGTERM)

    def wait(self, seconds: float) -> None:
        """Wait until it has ended, and take in the rest."""
        self._program.process.wait(seconds)
        self.read()

    def read(self) -> None:
        """Take in what it has said by now."""
        with self._program.log.open("rb") as file:
            file.seek(self._num_read)
            for line in file:
                if line.endswith(b"\n"):
                    self._num_read += len(line)
                    assert line.startswith(b"{"), self._program.output[-2000:]
                    self.seen.append(json.loads(line))

    def answers(self) -> list[dict[str, Any]]:
        """Return what has become of the requests that have ended."""
        return [each for each in self.seen if "answer" in each]

    def status(self) -> dict[str, Any]:
        """Return what gateways knew when they were asked last, and when that was."""
        found = (each for each in reversed(self.seen) if "status" in each)
        return next(found, {"at_s": 0.0, "running": 0, "status": {}})

    def is_whole(self, workers: Collection[str], num_gateways: int, since_s: float) -> bool:
        """Whether all gateways knew of all processes, some time after `since_s`. `workers`: such as
        "decode@a".
        """
        told = self.status()
        known = list(told["status"].values())
        return told["at_s"] > since_s + load.UNHEARD_S and all(
            each is not None and each["up"] == sorted(workers) and each["gateways"] == num_gateways
            for each in known
        )

    def is_idle(self) -> bool:
        """Whether the gateways know of no request, and no worker holds anything for one."""
        return all(
            each is not None and each["held"] == 0 for each in self.status()["status"].values()
        )
