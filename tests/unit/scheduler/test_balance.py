"""A worker changes its role when one pool has been pressed for long and the other can spare one."""

from mooncake.base import Role, WorkerLoad
from mooncake.scheduler.balance import Refused, RoleBalance, RoleChange
from mooncake.scheduler.config import SchedulerConfig
from mooncake.scheduler.views import InstanceView
from tests.support.scheduling import hello

NOBODY = Refused(0, 0)
BUSY = WorkerLoad(num_queued_tokens=20_000, num_free_blocks=1000, num_total_blocks=1000)
IDLE = WorkerLoad(num_free_blocks=1000, num_total_blocks=1000)
FULL = WorkerLoad(num_running=60, num_context_tokens=3900, num_total_blocks=1000)


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
        self.refused = NOBODY

    def look(self, prefill: WorkerLoad, decode: WorkerLoad, seconds: int) -> RoleChange | None:
        """Return the first change within so many seconds of these loads."""
        for _ in range(seconds):
            self.now += 1.0
            for view in self.views:
                view.observe(prefill if view.role is Role.PREFILL else decode, self.now)
            change = self.balance.look(self.views, self.refused, self.now)
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


def test_who_could_not_spare_one_gives_none() -> None:
    half = WorkerLoad(num_running=32, num_total_blocks=1000)
    assert Cluster(2, 2).look(BUSY, half, 300) is None, "half of two is all of one"
    assert Cluster(2, 4).look(BUSY, half, 300) is not None


def test_refusals_press_a_pool_whose_load_they_keep_down() -> None:
    cluster = Cluster(2, 2)
    change = None
    for number in range(1, 120):
        cluster.refused = Refused(0, number)
        change = change or cluster.look(IDLE, IDLE, 1)
    assert change is not None
    assert change.role is Role.DECODE


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


def test_after_a_change_the_wait_begins_anew() -> None:
    cluster = Cluster(4, 4)
    assert cluster.look(BUSY, IDLE, 100) is not None
    cluster.balance.rest()
    assert cluster.look(BUSY, IDLE, 30) is None
    assert cluster.look(BUSY, IDLE, 30) is not None
