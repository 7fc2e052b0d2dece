"""A worker speaks to each gateway by itself: its own hello, its own numbers, its own samples."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mooncake.base import (
    BlockEvents,
    CostSample,
    LoadReport,
    Role,
    Tier,
    Welcome,
    WorkerHello,
    WorkerLoad,
    WorkerRef,
)
from mooncake.base.messages import OWN_RELEASE, DoubtPeers, PeerLost, Refused, WhoAreYou
from mooncake.rpc import membership
from mooncake.rpc.membership import (
    ANSWER_S,
    HELLO_RETRY_S,
    MAX_FETCHED,
    MAX_GATEWAYS,
    SEED_S,
    Membership,
)
from mooncake.rpc.seed_addresses import SeedAddresses
from tests.support.scheduler.scheduling import Inbox, hello, ref

FIRST, SECOND = ref("gateway"), ref("gateway-1")
POOL = ref("kv0")
KEYS = [b"a" * 16, b"b" * 16]
REPORT_S = 1.0


class Member:
    """A worker that was told of one address."""

    def __init__(self, seeds: Sequence[str] = ()) -> None:
        self.inbox = Inbox()
        self.membership = Membership(
            hello("p0", Role.PREFILL),
            self.inbox,
            FIRST.address,
            Tier.HBM,
            lambda: KEYS,
            REPORT_S,
            seeds,
        )

    def welcome(
        self,
        gateway: WorkerRef,
        *others: WorkerRef,
        pool: WorkerRef | None = None,
        snapshot: bool = True,
    ) -> None:
        said = Welcome(gateway=gateway, kvstore=pool, send_snapshot=snapshot, gateways=list(others))
        self.membership.handle(said)

    def tick(self, now: float) -> float:
        return self.membership.tick(now, WorkerLoad)

    def numbers(self, gateway: WorkerRef) -> list[tuple[int, bool]]:
        """Return (number, snapshot) of the block events a gateway got."""
        events = self.inbox.of(BlockEvents, gateway.address)
        return [(event.sequence_no, event.snapshot) for event in events]

    def count(self, kind: type, gateway: WorkerRef) -> int:
        return len(self.inbox.of(kind, gateway.address))


def both() -> Member:
    member = Member()
    member.welcome(FIRST, SECOND)
    member.welcome(SECOND, FIRST)
    return member


def test_a_gateway_that_nobody_names_is_found_at_a_seed() -> None:
    """A known gateway that is found there again takes a report; another one asks for the hello."""
    member = Member(seeds=[FIRST.address, SECOND.address])
    member.tick(0.0)
    assert member.count(WorkerHello, FIRST) == member.count(WorkerHello, SECOND) == 1
    member.welcome(FIRST)
    for now in (1.0, 2.0, 3.0):
        member.tick(now)
    assert member.count(WorkerHello, SECOND) == 1
    assert member.count(LoadReport, SECOND) == 1, "not so often once there is a gateway"
    member.tick(1.0 + SEED_S)
    assert member.count(LoadReport, SECOND) == 2
    member.membership.handle(WhoAreYou(gateway=SECOND))
    member.tick(1.0 + SEED_S)
    member.welcome(SECOND)
    assert set(member.membership.welcoming) == {FIRST.address, SECOND.address}


def test_hello_is_repeated_until_it_is_answered() -> None:
    member = Member()
    assert member.tick(0.0) == HELLO_RETRY_S
    member.tick(HELLO_RETRY_S)
    assert member.count(WorkerHello, FIRST) == 2
    assert not member.membership.welcomed
    member.welcome(FIRST)
    member.tick(2 * HELLO_RETRY_S)
    assert member.count(WorkerHello, FIRST) == 2
    assert member.count(LoadReport, FIRST) == 1


def test_a_hello_names_the_release_and_its_refusal_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    member = Member()
    member.tick(0.0)
    [said] = member.inbox.of(WorkerHello, FIRST.address)
    assert said.release == OWN_RELEASE
    reason = "it is of another release"
    for message in ("WorkerHello", "WorkerHello", "PinBlocks"):
        member.membership.handle(
            Refused(asker=said.worker, ticket=0, message=message, reason=reason)
        )
    assert [record.getMessage() for record in caplog.records] == [
        f"a gateway does not use this worker: {reason}"
    ]
    assert member.tick(HELLO_RETRY_S), "it asks on: the others may be updated"


def test_a_gateway_that_another_names_is_greeted_too() -> None:
    member = Member()
    member.welcome(FIRST, SECOND)
    member.tick(0.0)
    assert member.count(LoadReport, FIRST) == member.count(WorkerHello, SECOND) == 1
    assert member.numbers(SECOND) == [], "it does not know us yet"
    member.welcome(SECOND, FIRST)
    member.tick(5.0)
    assert member.count(LoadReport, SECOND) == 1
    assert member.count(WorkerHello, FIRST) == 0


def test_each_gateway_has_its_own_numbers() -> None:
    member = Member()
    member.welcome(FIRST)
    member.membership.send_blocks(KEYS, [])
    member.welcome(SECOND)
    member.membership.send_blocks([], KEYS)
    assert member.numbers(FIRST) == [(1, True), (2, False), (3, False)]
    assert member.numbers(SECOND) == [(1, True), (2, False)]
    member.welcome(FIRST)
    assert member.numbers(FIRST)[3:] == [(4, True)]
    assert len(member.numbers(SECOND)) == 2, "only who asks gets a snapshot"


def test_each_gateway_gets_every_sample_and_every_ended_fetch_once() -> None:
    member = both()
    member.membership.add_sample(CostSample(1, 2, 1, 0.5))
    for number in range(MAX_FETCHED + 1):
        member.membership.add_fetched(f"r{number}")
    member.tick(0.0)
    member.tick(5.0)
    for gateway in (FIRST, SECOND):
        reports = member.inbox.of(LoadReport, gateway.address)
        assert [len(report.samples) for report in reports] == [1, 0]
        assert [len(report.fetched) for report in reports] == [MAX_FETCHED, 0]
        assert reports[0].fetched[-1] == f"r{MAX_FETCHED}", "the newest"


def test_a_gateway_that_starts_again_is_greeted_again_and_the_other_is_not() -> None:
    member = both()
    member.tick(0.0)
    again = WorkerRef(SECOND.worker_id, "e9", "elsewhere")
    member.membership.handle(WhoAreYou(gateway=again))
    member.membership.send_blocks(KEYS, [])
    member.tick(0.1)
    assert member.count(WorkerHello, again) == 1, "under its new address"
    assert member.count(WorkerHello, FIRST) == 0
    assert member.numbers(again) == [], "nothing before its welcome"
    assert member.membership.welcomed
    assert len(member.numbers(FIRST)) == 2


def test_the_pool_is_known_while_one_gateway_knows_it() -> None:
    member = Member()
    member.welcome(FIRST, SECOND, pool=POOL)
    member.welcome(SECOND, FIRST, pool=None)
    assert member.membership.kvstore == POOL
    member.welcome(SECOND, FIRST, pool=POOL)
    member.welcome(FIRST, SECOND, pool=None)
    assert member.membership.kvstore == POOL
    member.membership.handle(PeerLost(worker=POOL))
    assert member.membership.kvstore is None


def test_doubts_are_told_to_all_that_know_us() -> None:
    member = both()
    member.welcome(FIRST, ref("gateway-2"))
    member.membership.ask_about([ref("d0")])
    assert member.count(DoubtPeers, FIRST) == member.count(DoubtPeers, SECOND) == 1
    assert member.count(DoubtPeers, ref("gateway-2")) == 0


def test_a_worker_that_withdraws_reports_no_blocks() -> None:
    member = both()
    member.membership.withdraw()
    member.membership.send_blocks(KEYS, [])
    member.welcome(ref("gateway-2"))
    for gateway in (FIRST, SECOND, ref("gateway-2")):
        assert member.inbox.of(BlockEvents, gateway.address)[-1].stored == []
        assert member.numbers(gateway)[-1][1]


def test_the_gateways_kept_are_bounded() -> None:
    member = Member()
    for number in range(MAX_GATEWAYS + 5):
        member.welcome(ref(f"gateway-{number}"), snapshot=False)
    member.tick(0.0)
    assert len(member.inbox.of(LoadReport)) == membership.MAX_GATEWAYS
    assert member.count(LoadReport, ref("gateway-0")) == 0


def test_a_gateway_called_lost_is_asked_itself_and_stays_if_it_answers() -> None:
    member = both()
    member.tick(0.0)
    member.membership.handle(PeerLost(worker=SECOND))
    member.tick(0.1)
    assert member.count(WorkerHello, SECOND) == 1
    assert member.count(WorkerHello, FIRST) == 0
    member.welcome(SECOND, FIRST)
    member.tick(0.1 + 2 * ANSWER_S)
    assert member.membership.lost_gateways() == []
    assert member.count(LoadReport, SECOND) == 2


def test_a_gateway_that_does_not_answer_is_given_up_once() -> None:
    member = both()
    member.tick(0.0)
    member.membership.handle(PeerLost(worker=WorkerRef(SECOND.worker_id, "other", SECOND.address)))
    member.membership.handle(PeerLost(worker=SECOND))
    member.tick(0.1)
    member.membership.handle(PeerLost(worker=SECOND))  # two gateways have noticed
    member.tick(0.1 + ANSWER_S - 0.01)
    assert member.membership.lost_gateways() == []
    member.tick(0.1 + ANSWER_S)
    assert member.membership.lost_gateways() == [SECOND]
    assert member.membership.lost_gateways() == []
    said = len(member.inbox.of(WorkerHello, SECOND.address))
    reported = member.count(LoadReport, FIRST)
    member.tick(60.0)
    assert member.count(WorkerHello, SECOND) == said
    assert member.count(LoadReport, FIRST) == reported + 1


def test_a_doubted_gateway_may_be_back_elsewhere() -> None:
    member = both()
    member.tick(0.0)
    member.membership.handle(PeerLost(worker=SECOND))
    again = WorkerRef(SECOND.worker_id, "e9", "elsewhere")
    member.welcome(FIRST, again)
    member.tick(0.1)
    assert member.count(WorkerHello, again) == 1
    member.welcome(again, FIRST)
    member.tick(0.1 + 2 * ANSWER_S)
    assert member.count(LoadReport, again) == 1
    assert member.membership.lost_gateways() == [SECOND], "what it asked for before has no reader"


def test_a_gateway_that_has_moved_is_found_where_the_supervisor_says() -> None:
    """The only one was killed; the one in its place has its name and another address."""
    seeds = SeedAddresses([])
    member = Member(seeds)
    member.welcome(FIRST)
    member.tick(0.0)
    again = WorkerRef(FIRST.worker_id, "e9", "elsewhere")
    seeds.move("elsewhere")
    member.tick(5.0)
    assert member.count(LoadReport, again) == 1
    member.membership.handle(WhoAreYou(gateway=again))
    member.tick(5.1)
    assert member.count(WorkerHello, again) == 1
    member.welcome(again)
    assert member.membership.lost_gateways() == [FIRST]
    assert member.membership.gateway_addresses == ["elsewhere"]


def test_the_only_gateway_is_greeted_for_ever() -> None:
    member = Member()
    member.welcome(FIRST)
    member.tick(0.0)
    member.membership.handle(PeerLost(worker=FIRST))
    member.tick(0.1)
    member.tick(0.1 + ANSWER_S)
    assert member.membership.lost_gateways() == [FIRST]
    member.tick(100.0)
    assert member.count(WorkerHello, FIRST) == 3
    member.welcome(WorkerRef(FIRST.worker_id, "e9", FIRST.address))
    member.tick(200.0)
    assert member.count(LoadReport, FIRST) == 2
