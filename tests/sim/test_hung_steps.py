"""An engine whose step never ends is heard all the time: it ends itself, and others take over."""

from __future__ import annotations

import pytest

from mooncake.base import Role
from mooncake.sim.faults.plan import Fault
from mooncake.sim.faults.random_faults import Trial


@pytest.mark.parametrize("seed", range(10))
def test_another_worker_finishes_the_requests_of_a_hung_one(seed: int) -> None:
    workers = Trial(seed).world.workers.values()
    engines = [one.spec.worker_id for one in workers if one.spec.role is not Role.KVSTORE]
    target = engines[seed % len(engines)]
    report = Trial(seed, [Fault(at_s=0.2, kind="hang_step", target=target)]).run()
    assert report.failure is None, report
    assert report.endings.get("length", 0) > 0
