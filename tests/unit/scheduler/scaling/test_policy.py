"""How many replicas a load needs: by the limits, ahead of growth, inside the bounds, to none and
back.
"""

from __future__ import annotations

import math
from random import Random

import pytest

from mooncake.base import Role
from mooncake.engine.cost import StepCostModel
from mooncake.scheduler.scaling.config import ScalingConfig
from mooncake.scheduler.scaling.policy import (
    CHECK_S,
    LATE,
    DecodeRoom,
    Offered,
    ReplicaPolicy,
    Standing,
    erlang_c,
    least_servers,
)


class Cost(StepCostModel):
    """A gap of 10 ms, and 1 ms more for each sequence."""

    def tbt_s(self, num_sequences: int, num_context_tokens: int) -> float:
        return 0.01 + 1e-3 * num_sequences


ROOM = DecodeRoom(cost=Cost(), max_num_seqs=256, num_tokens=0)
PROMPT_S, ANSWER, CONTEXT = 2.0, 200.0, 4000.0


class Cluster:
    """Feeds a policy with a steady stream of requests; has the replicas that it is told."""

    def __init__(self, bounds: str = "prefill=1..50,decode=1..50", **limits: float | None) -> None:
        self.policy = ReplicaPolicy(
            ScalingConfig.parse(bounds),
            limits.get("ttft_s", 10.0),
            limits.get("tbt_s", 0.05),
        )
        self.now = 0.0
        self.counts = {Role.PREFILL: 1, Role.DECODE: 1}
        self.why: dict[Role, str] = {}
        self.queued_s = 0.0
        self.num_open = 0
        self.room: DecodeRoom | None = ROOM

    def run(self, seconds: float, rate: float, *, grows_to: float | None = None) -> None:
        """Offer `rate` requests a second, at the end `grows_to`, and follow the advice at once."""
        steps = round(seconds / CHECK_S)
        for step in range(steps):
            self.now += CHECK_S
            here = rate if grows_to is None else rate + (grows_to - rate) * (step + 1) / steps
            self.look(here * CHECK_S)

    def look(self, number: float) -> None:
        offered = Offered(
            number, number * PROMPT_S, number * PROMPT_S**2, number * ANSWER,
            number * ANSWER * CONTEXT,
        )  # fmt: skip
        standing = Standing(
            num_prefill=self.counts[Role.PREFILL],
            num_decode=self.counts[Role.DECODE],
            num_open=self.num_open,
            queued_s=self.queued_s,
            num_decoding=0,
            room=self.room,
        )
        for each in self.policy.observe(offered, standing, self.now):
            self.counts[each.role], self.why[each.role] = each.wanted, each.why

    @property
    def ratio(self) -> tuple[int, int]:
        return self.counts[Role.PREFILL], self.counts[Role.DECODE]


def test_both_roles_have_what_their_own_limit_needs() -> None:
    cluster = Cluster()
    cluster.run(300, 2.0)
    prefill, decode = cluster.ratio
    assert prefill in (6, 7), "four are busy all the time, and prompts come at random"
    # 400 tokens a second; in a gap of 47 ms a replica gives one to each of 37 sequences.
    assert decode == 1
    cluster.run(1200, 8.0)
    assert cluster.ratio[0] in range(18, 22)
    assert cluster.ratio[1] in (3, 4)


def test_a_stricter_limit_on_gaps_needs_more_decode_alone() -> None:
    loose, strict = Cluster(), Cluster(tbt_s=0.015)
    for cluster in (loose, strict):
        cluster.run(300, 8.0)
    assert strict.ratio[0] == loose.ratio[0]
    assert strict.ratio[1] > 2 * loose.ratio[1]


def test_a_stricter_limit_on_first_tokens_needs_more_prefill_alone() -> None:
    loose, strict = Cluster(ttft_s=30.0), Cluster(ttft_s=3.0)
    for cluster in (loose, strict):
        cluster.run(300, 4.0)
    assert strict.ratio[0] > loose.ratio[0]
    assert strict.ratio[1] == loose.ratio[1]


def test_more_come_at_once_and_fewer_after_a_quiet_time() -> None:
    cluster = Cluster("prefill=1..50,decode=1..50,quiet=300")
    cluster.run(900, 1.0)
    low = cluster.ratio
    cluster.run(60, 5.0)
    high = cluster.ratio
    assert high > low
    cluster.run(240, 1.0)
    assert cluster.ratio == high, "it may come back"
    assert "within the last 300 s: " in cluster.why[Role.PREFILL]
    cluster.run(200, 1.0)
    assert cluster.ratio == low


def test_growth_is_met_before_it_comes() -> None:
    """A replica that starts needs two minutes: what will be asked for by then counts."""
    steady, growing = (Cluster("prefill=1..50,decode=1..50,start=120") for _ in range(2))
    steady.run(600, 6.0)
    growing.run(600, 1.0, grows_to=6.0)
    assert growing.ratio[0] > steady.ratio[0]
    assert "grown to" in growing.why[Role.PREFILL]
    assert "grown to" not in steady.why[Role.PREFILL]


def test_what_came_at_random_is_no_growth() -> None:
    random, cluster, told = Random(3), Cluster(), []
    for _ in range(400):
        cluster.now += CHECK_S
        cluster.look(float(sum(random.random() < 0.05 for _ in range(400))))
        told.append("grown to" in cluster.why[Role.PREFILL])
    assert sum(told) < 0.1 * len(told)


def test_a_backlog_is_worked_off() -> None:
    cluster = Cluster("prefill=1..50,decode=1..50,start=60")
    cluster.run(300, 2.0)
    before = cluster.ratio[0]
    cluster.queued_s = 600.0
    cluster.run(CHECK_S, 2.0)
    assert cluster.ratio[0] >= before + 5


def test_a_new_gateway_gives_nothing_up_before_it_has_seen_enough() -> None:
    cluster = Cluster("prefill=1..50,decode=1..50,quiet=300")
    cluster.counts = {Role.PREFILL: 9, Role.DECODE: 7}
    cluster.run(290, 0.0)
    assert cluster.ratio == (9, 7)
    cluster.run(400, 0.0)
    assert cluster.ratio == (1, 1)


def test_to_none_and_back() -> None:
    cluster = Cluster("prefill=0..4,decode=0..4,quiet=60")
    cluster.run(120, 1.0)
    assert min(cluster.ratio) >= 1
    cluster.run(300, 0.0)
    assert cluster.ratio == (0, 0)
    cluster.num_open = 1
    cluster.run(CHECK_S, 0.0)
    assert cluster.ratio == (1, 1), "batch work waits for them"
    assert cluster.why[Role.DECODE] == "requests are open"
    cluster.run(600, 0.0)
    assert cluster.ratio == (1, 1), "as long as it is not done"
    cluster.num_open = 0
    cluster.run(120, 0.0)
    assert cluster.ratio == (0, 0)


def test_nothing_is_known_of_decode_before_the_first_replica() -> None:
    cluster = Cluster("prefill=0..4,decode=0..4")
    cluster.counts, cluster.room = {Role.PREFILL: 0, Role.DECODE: 0}, None
    cluster.run(CHECK_S, 0.0)
    assert cluster.ratio == (0, 0)
    cluster.run(CHECK_S, 1.0)
    assert cluster.ratio[1] == 1


def test_bounds_and_the_total_are_kept_and_the_role_that_lacks_most_comes_first() -> None:
    free = Cluster()
    free.run(300, 8.0)
    held = Cluster("prefill=1..5,decode=2..50")
    held.run(300, 8.0)
    assert held.ratio[0] == 5
    assert "the bounds allow 5" in held.why[Role.PREFILL]
    shared = Cluster("prefill=1..50,decode=1..50,total=12")
    shared.run(300, 8.0)
    assert sum(shared.ratio) == 12
    wanted = free.ratio[0] / free.ratio[1]
    assert shared.ratio[0] / shared.ratio[1] == pytest.approx(wanted, rel=0.35)


def test_without_prefill_replicas_decode_has_room_for_the_prompts() -> None:
    apart, together = Cluster(), Cluster("prefill=0..0,decode=1..50")
    for cluster in (apart, together):
        cluster.run(300, 4.0)
    assert together.ratio[0] == 0
    assert together.ratio[1] >= sum(apart.ratio) - 1


def test_the_same_demand_gives_the_same_advice() -> None:
    told = []
    for _ in range(2):
        cluster = Cluster()
        cluster.run(300, 3.0)
        told.append((cluster.ratio, dict(cluster.why)))
    assert told[0] == told[1]


@pytest.mark.parametrize(("busy", "wait_s"), [(0.4, 4.0), (3.0, 4.0), (12.0, 2.0)])
def test_few_prompts_are_late_at_the_least_number(busy: float, wait_s: float) -> None:
    """Played: prompts of equal length at random times, in one queue for all servers."""
    mean_s = 2.0
    count = least_servers(busy, mean_s, mean_s / 2, wait_s)

    def late(servers: int) -> float:
        random, free, now, missed = Random(5), [0.0] * servers, 0.0, 0
        for _ in range(20_000):
            now += random.expovariate(busy / mean_s)
            first = min(range(servers), key=free.__getitem__)
            begin = max(now, free[first])
            free[first] = begin + mean_s
            missed += begin - now > wait_s
        return missed / 20_000

    assert late(count) <= 1.5 * LATE
    if count - 2 > busy:
        assert late(count - 2) > LATE, "two fewer are too few"


def test_erlangs_formula() -> None:
    """Two servers at half their load: a third of all jobs wait."""
    assert erlang_c(2, 1.0) == pytest.approx(1 / 3)
    assert erlang_c(1, 0.5) == pytest.approx(0.5)
    assert least_servers(0.0, 1.0, 0.5, 1.0) == 0


def test_a_replica_holds_what_memory_seats_and_the_limit_allow() -> None:
    assert ROOM.most(1000.0, None) == 256
    assert ROOM.most(1000.0, 0.05) == math.floor(50 / 1.05 - 10)
    assert ROOM.most(1000.0, 1e-3) == 1
    small = DecodeRoom(cost=Cost(), max_num_seqs=256, num_tokens=10_000)
    assert small.most(1000.0, None) == 10
    assert small.most(1e9, 0.05) == 1
