"""A cluster by one file: its folders made on the first host, copied to all, and `mooncake up`
typed on each.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.support.hosts.hosts import HOME, Host, Program
from tests.support.waiting import LONG_S

MOONCAKE = str(Path(sys.executable).parent / "mooncake")
FOLDER = "here"
"""The folder of a machine, in its home."""
INIT = ["cluster", "init", "k2.yaml"]
UP = ["up", "k2.yaml"]


class DescribedCluster:
    """Machines, each with its folder of the cluster."""

    def __init__(
        self,
        machines: Sequence[Host],
        told: dict[str, Any],
        init: Sequence[str] = INIT,
        up: Sequence[str] = UP,
    ) -> None:
        """Make the folders. `told` describes the cluster, but for the addresses of its machines.
        `init` and `up` are the words of the two commands.
        """
        assert [*told["machines"]] == [each.name for each in machines]
        for each in machines:
            told["machines"][each.name]["address"] = each.address
        first, name = machines[0], Path(init[-1])
        first.path(f"{HOME}/{name}").write_text(yaml.safe_dump(told, sort_keys=False))
        made = self.typed(first, init, folder=".")
        assert made.process.wait(LONG_S) == 0, made.output
        self.said = made.output
        self._up = up
        self._made = first.path(f"{HOME}/{name.stem}")
        for each in machines:
            self.install(each)

    def install(self, host: Host) -> None:
        """Copy the folder of a machine there, as scp does."""
        shutil.copytree(self._made / host.name, host.path(f"{HOME}/{FOLDER}"), dirs_exist_ok=True)

    def keep(self, folder: Path) -> None:
        """Have the folders of all machines elsewhere, where no host can take them along."""
        shutil.copytree(self._made, folder)
        self._made = folder

    def up(self, host: Host, environment: Mapping[str, str] | None = None) -> Program:
        """Type `mooncake up` on a machine."""
        return self.typed(host, self._up, environment)

    def typed(
        self,
        host: Host,
        words: Sequence[str],
        environment: Mapping[str, str] | None = None,
        *,
        folder: str = FOLDER,
    ) -> Program:
        """Type `mooncake WORDS` in a folder of a machine."""
        command = f"cd {folder} && exec {MOONCAKE} {' '.join(words)}"
        return host.run("sh", "-c", command, environment=environment)
