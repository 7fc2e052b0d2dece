"""A worker changes its role when one pool has been pressed for long and the other can spare one."""

import msgspec

from mooncake.base import Role, WorkerLoad
from mooncake.scheduler.config import SchedulerConfig
from mooncake.scheduler.gateway.role_switching import RoleBalance, RoleChange, Traffic
from mooncake.scheduler.placement.views import InstanceView
from tests.support.scheduler.scheduling import hello

NOBODY = Traffic(0, 0, 0)
BUSY = WorkerLoad(num_queued_tokens=20_000, num_free_blocks=1000, num_total_blocks=1000)
IDLE = WorkerLoad(num_free_blocks=1000, num_total_blocks=1000)
FULL = WorkerLoad(num_running=64, num_context_tokens=3900, num_total_blocks=1000)
OFFERED = 10
"""Requests that come in every second."""


class Cluster:
    """Views whose loads the test sets, and a balance that looks at them every second."""

    def __init__(self, num_prefills: int, num_decodes: int, **config: object) -> None:
        self.balance = RoleBalance(SchedulerConfig(role_switching=True, **config))  # type: ignore[arg-type]
        counts = {Role.PREFILL: num_prefills, Role.DECODE: num_decodes}
        self.views = [
            InstanceView.of(hello(f"{role.value}{index}", role, max_num_seqs=64))
            for role, count in counts.items()
            for index in range(count)
        ]
        self.now = 0.0
        self.traffic = NOBODY

    def look(
        self,
        prefill: WorkerLoad,
        decode: WorkerLoad,
        seconds: int,
        refused: tuple[int, int] = (0, 0),
    ) -> RoleChange | None:
        """Return the first change within so many seconds of these loads, when every second so many
        are refused for want of prefill and of decode.
        """
        for _ in range(seconds):
            self.now += 1.0
            self.traffic = Traffic(
                self.traffic.offered + OFFERED,
                self.traffic.refused_prefill + refused[0],
                self.traffic.refused_decode + refused[1],
            )
            for view in self.views:
                view.observe(prefill if view.role is Role.PREFILL else decode, self.now)
            change = self.balance.observe(self.views, self.traffic, self.now)
            if change is not None:
                return change
        return None


def test_nothing_changes_where_all_is_well_or_all_is_busy() -> None:
    for prefill, decode in ((IDLE, IDLE), (BUSY, FULL)):
        assert Cluster(4, 4).look(prefill, decode, 300) is None


def test_pressed_prefill_gets_a_decode_worker_after_a_while() -> None:
    cluster = Cluster(4, 4)
    assert cluster.look(BUSY, IDLE, 30) is None
    assert cluster.look(BUSY, IDLE, 30) == RoleChange("decode0", Role.PREFILL)


def test_pressed_decode_gets_a_prefill_worker() -> None:
    change = Cluster(4, 4).look(IDLE, FULL, 120)
    assert change == RoleChange("prefill0", Role.DECODE)


def test_a_short_burst_is_no_reason() -> None:
    cluster = Cluster(4, 4)
    for _ in range(10):
        assert cluster.look(BUSY, IDLE, 15) is None
        assert cluster.look(IDLE, IDLE, 60) is None


def test_the_last_of_a_role_stays() -> None:
    assert Cluster(4, 1).look(BUSY, IDLE, 300) is None
    assert Cluster(1, 4).look(IDLE, FULL, 300) is None


def test_a_pool_that_cannot_spare_a_worker_gives_none() -> None:
    half = WorkerLoad(num_running=32, num_total_blocks=1000)
    assert Cluster(2, 2).look(BUSY, half, 300) is None, "half of two is all of one"
    assert Cluster(2, 4).look(BUSY, half, 300) is not None


def test_refusals_tell_how_many_a_pool_is_short_of() -> None:
    """They keep its load down, so that tells nothing."""
    assert Cluster(2, 2).look(IDLE, IDLE, 120, refused=(0, 3)) == RoleChange(
        "prefill0", Role.DECODE
    )
    assert Cluster(2, 2).look(IDLE, IDLE, 120, refused=(3, 0)) == RoleChange(
        "decode0", Role.PREFILL
    )
    assert Cluster(2, 2).look(IDLE, IDLE, 300, refused=(3, 3)) is None, "both are short"


def test_a_limit_on_the_first_token_speaks_by_refusals_not_by_queues() -> None:
    """Whoever was let in keeps it: a long queue alone is worth no worker."""
    cluster = Cluster(4, 4, ttft_slo_s=30.0)
    assert cluster.look(BUSY, IDLE, 300) is None
    assert cluster.look(BUSY, IDLE, 120, refused=(2, 0)) is not None


def test_a_few_refusals_are_not_worth_a_decode_worker_that_is_needed() -> None:
    """Half the gaps' margin is used; with a worker fewer, gaps would be over their limit."""
    half = WorkerLoad(num_running=20, num_total_blocks=1000)
    limits = {"ttft_slo_s": 30.0, "tbt_slo_s": 0.030}
    assert Cluster(4, 4, **limits).look(BUSY, half, 300, refused=(1, 0)) is None
    assert Cluster(4, 4, **limits).look(BUSY, IDLE, 300, refused=(2, 0)) is not None


def test_what_the_change_interrupts_is_weighed() -> None:
    """Few come, many would have to move."""
    some = WorkerLoad(num_running=30, num_total_blocks=1000)
    assert Cluster(4, 4).look(BUSY, some, 300) is not None
    quick = Cluster(4, 4, role_switch_after_s=0.2)
    assert quick.look(BUSY, some, 300) is None


def test_gaps_between_tokens_count_against_their_limit() -> None:
    slow = WorkerLoad(num_running=12, num_total_blocks=1000)
    assert Cluster(2, 2).look(IDLE, slow, 300) is None
    assert Cluster(2, 2, tbt_slo_s=0.012).look(IDLE, slow, 300) is not None


def test_the_least_used_worker_goes_and_draining_ones_do_not_count() -> None:
    cluster = Cluster(2, 3)
    cluster.views[2].draining = True
    change = cluster.look(BUSY, IDLE, 120)
    assert change == RoleChange("decode1", Role.PREFILL)
    cluster.views[3].draining = True
    assert cluster.look(BUSY, IDLE, 300) is None, "one is left"


def test_workers_that_share_their_experts_keep_their_role() -> None:
    """They end together. They may have joined a cluster whose other workers change theirs."""
    cluster = Cluster(2, 3)
    for index in (2, 3, 4):
        view = cluster.views[index]
        group = "" if index == 4 else "decode-0 of here"
        cluster.views[index] = InstanceView.of(
            msgspec.structs.replace(view.hello, expert_group=group)
        )
    assert cluster.look(BUSY, IDLE, 120) == RoleChange("decode2", Role.PREFILL)
    del cluster.views[4]
    cluster.balance.reset()
    assert cluster.look(BUSY, IDLE, 300) is None


def test_after_a_change_the_wait_begins_anew() -> None:
    cluster = Cluster(4, 4)
    assert cluster.look(BUSY, IDLE, 100) is not None
    cluster.balance.reset()
    assert cluster.look(BUSY, IDLE, 30) is None
    assert cluster.look(BUSY, IDLE, 30) is not None
