"""A worker that holds routed experts alone: what gateways hear of it, and when it may end."""

from __future__ import annotations

from mooncake.base import Drain, Role, WorkerHello
from mooncake.base.messages import LoadReport, Welcome, WhoAreYou
from mooncake.engine.plan import Counted
from mooncake.instance.expert_worker import ExpertWorker
from tests.support.scheduler.scheduling import GATEWAY, Inbox, ref


class Bed:
    def __init__(self) -> None:
        self.channel = Inbox()
        self.is_released = False
        hello = WorkerHello(
            worker=ref("experts-0", "e1"), role=Role.EXPERTS, node_id="n", host="h", pid=1,
            layout_fingerprint="f", block_tokens=64, num_blocks=0, expert_group="group",
        )  # fmt: skip
        self.worker = ExpertWorker(
            hello, self.channel, GATEWAY.address, (), 0.5, lambda: self.is_released
        )

    def join(self) -> None:
        welcome = Welcome(gateway=GATEWAY, kvstore=None, send_snapshot=False)
        self.worker.handle(welcome, 0.0)


def test_it_says_hello_until_it_is_known_and_after_a_gateway_has_restarted() -> None:
    bed = Bed()
    bed.worker.tick(0.0)
    [hello] = bed.channel.of(WorkerHello)
    assert (hello.role, hello.num_blocks, hello.expert_group) == (Role.EXPERTS, 0, "group")
    assert not bed.worker.joined
    bed.join()
    assert bed.worker.joined
    assert bed.worker.gateways == [GATEWAY.address]
    bed.worker.handle(WhoAreYou(gateway=GATEWAY), 1.0)
    bed.worker.tick(1.0)
    assert len(bed.channel.of(WorkerHello)) == 2


def test_it_reports_what_its_runner_counts() -> None:
    bed = Bed()
    bed.join()
    bed.worker.handle(Counted(counters={"expert_rows": 8.0}, expert_rows=[3, 5]), 0.1)
    bed.worker.handle(Counted(counters={"expert_waited_s": 1.0}), 0.2)
    assert bed.worker.tick(1.0) == 1.5
    [report] = bed.channel.of(LoadReport)
    assert report.load.counters == {"expert_rows": 8.0, "expert_waited_s": 1.0}
    assert report.load.expert_rows == [3, 5]
    assert (report.load.num_total_blocks, report.load.num_running) == (0, 0)


def test_told_to_leave_it_waits_for_those_that_use_its_experts() -> None:
    bed = Bed()
    bed.join()
    bed.worker.handle(Drain(), 0.1)
    assert bed.worker.draining
    assert not bed.worker.quiet
    bed.worker.tick(1.0)
    assert bed.channel.of(LoadReport)[-1].load.draining
    bed.is_released = True
    assert bed.worker.quiet
    assert bed.worker.next_life is None
    bed.worker.check_integrity()
