"""Workers as threads of the test's process, which looks into them and ends single ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mooncake.launch.cluster.colocated import LocalCluster
from tests.support.waiting import LONG_S


class WatchedWorkers(LocalCluster):
    """A local cluster that a test asks and harms."""

    def call(self, worker_id: str, work: Callable[[Any, float], Any]) -> Any:
        """Run `work(machine, now)` in a worker's thread and return what it returns."""
        return self._workers[worker_id].driver.call(work).result(LONG_S)

    def check_integrity(self) -> None:
        """Raise AssertionError when any worker lost or double-counts a resource."""
        for worker_id in self.worker_ids:
            self.call(worker_id, lambda machine, _: machine.check_integrity())

    def kill(self, worker_id: str) -> None:
        """End a worker without goodbye messages, as a crash would, then call `lost`."""
        self._end([worker_id])
        self._lost(worker_id)

    def remove(self, worker_id: str) -> None:
        """End a worker, or free what a failed one holds, so that it can be started again."""
        self._end([worker_id])
