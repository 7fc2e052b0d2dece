"""A worker takes only tasks that name its present boot: in the one before it may have had the other
role.
"""

from __future__ import annotations

import msgspec
import pytest

from mooncake.base import WorkerRef
from mooncake.base.messages import RequestTask
from mooncake.instance.role import RoleWorker
from tests.support.sim.cluster import Cluster, request, specs

OTHER = WorkerRef("other", "e1", "elsewhere")


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_task_for_another_boot_is_ignored(role: str) -> None:
    cluster = Cluster(specs(1, 1))
    worker = cluster.world.workers[f"{role}-0"]
    machine = worker.machine
    assert isinstance(machine, RoleWorker)
    assert worker.process is not None
    own = machine.instance.worker
    former = WorkerRef(own.worker_id, "former", own.address)
    task = RequestTask(
        request=request("r", [1] * 10), attempt=1, gateway=OTHER,
        decode=OTHER if role == "prefill" else former,
        prefill=former if role == "prefill" else OTHER,
    )  # fmt: skip
    worker.process.deliver(task)
    cluster.run(0.01)
    assert machine.quiet
    worker.process.deliver(msgspec.structs.replace(task, **{role: own}))
    cluster.run(0.01)
    assert not machine.quiet
