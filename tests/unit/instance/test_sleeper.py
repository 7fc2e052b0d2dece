"""An engine that sleeps: who hears of it, what it answers, and what wakes it."""

from __future__ import annotations

from typing import Any

from mooncake.base import PeerLost, Role, WorkerRef
from mooncake.base.cluster_mode import ClusterMode
from mooncake.base.messages import (
    Asleep,
    BorrowWeights,
    CheckWeights,
    NextLife,
    Restart,
    WeightsChecked,
    Welcome,
)
from mooncake.instance.sleeper import Sleeper
from mooncake.rpc.membership import MAX_GATEWAYS
from tests.support.scheduler.scheduling import GATEWAY, Inbox, ref

OWN = ref("d0", "e1")
MODE = ClusterMode(2, "gateway", True, 1)
OTHER = WorkerRef("gateway-2", "g0", "other-address")


def question(ticket: int, model: str = "/new", asker: WorkerRef = GATEWAY) -> CheckWeights:
    return CheckWeights(asker=asker, ticket=ticket, model=model)


class Bed:
    """A sleeper whose checks end when the test says so."""

    def __init__(self, **fields: Any) -> None:
        self.channel = Inbox()
        self.begun: list[str] = []
        self.lent: list[BorrowWeights] = []
        asleep = Asleep(
            worker=OWN, role=Role.DECODE, node_id="n", host="h", pid=1, level=1, mode=MODE
        )
        self.sleeper = Sleeper(
            asleep, self.channel, [GATEWAY.address], fields.get("seeds", ()),
            lambda question: self.begun.append(question.model), 0.5, self.lent.append,
        )  # fmt: skip

    @property
    def answers(self) -> list[WeightsChecked]:
        return self.channel.of(WeightsChecked)


def test_it_says_that_it_sleeps_to_each_gateway_that_it_hears_of() -> None:
    bed = Bed(seeds=["seed"])
    assert bed.sleeper.tick(0.0) == 0.5
    assert [to for to, _ in bed.channel.sent] == [GATEWAY.address, "seed"]
    assert not bed.sleeper.joined
    welcome = Welcome(gateway=GATEWAY, kvstore=None, send_snapshot=False, gateways=[OTHER])
    bed.sleeper.handle(welcome, 0.1)
    assert bed.sleeper.joined
    assert bed.sleeper.gateways == [GATEWAY.address, OTHER.address]
    bed.channel.sent.clear()
    assert bed.sleeper.tick(0.2) == 0.5
    assert bed.channel.sent == [], "not yet"
    bed.sleeper.tick(0.5)
    assert [to for to, _ in bed.channel.sent] == [GATEWAY.address, OTHER.address, "seed"]
    bed.sleeper.handle(PeerLost(worker=OTHER), 0.6)
    assert bed.sleeper.gateways == [GATEWAY.address]


def test_gateways_that_come_and_go_do_not_fill_its_memory() -> None:
    bed = Bed()
    for number in range(2 * MAX_GATEWAYS):
        gateway = WorkerRef(f"g{number}", "e", f"address-{number}")
        welcome = Welcome(gateway=gateway, kvstore=None, send_snapshot=False)
        bed.sleeper.handle(welcome, 0.0)
    assert len(bed.sleeper.gateways) == MAX_GATEWAYS


def test_only_an_order_for_this_boot_wakes_it() -> None:
    bed = Bed()
    awake = ClusterMode(3, "gateway")
    bed.sleeper.handle(Restart(worker=ref("d0", "e0"), mode=awake), 0.0)
    assert bed.sleeper.next_life is None
    bed.sleeper.handle(Restart(worker=OWN, mode=awake), 0.0)
    assert bed.sleeper.next_life == NextLife(mode=awake)


def test_a_repeated_question_begins_no_second_check_and_is_answered_again() -> None:
    bed = Bed()
    bed.sleeper.handle(question(7), 0.0)
    bed.sleeper.handle(question(7), 0.1)
    assert bed.begun == ["/new"]
    assert bed.answers == []
    bed.sleeper.checked("r1", "f1", "")
    answer = WeightsChecked(asker=GATEWAY, ticket=7, worker=OWN, revision="r1", fingerprint="f1")
    assert bed.answers == [answer]
    bed.sleeper.handle(question(7), 0.2)
    assert bed.answers == [answer, answer]
    bed.sleeper.handle(question(8), 0.3)
    assert bed.begun == ["/new", "/new"], "the files may be others by now"
    bed.sleeper.checked("", "", "/new: no such directory")
    assert bed.answers[-1].error == "/new: no such directory"


def test_a_question_during_a_check_is_answered_by_a_check_of_its_own() -> None:
    bed = Bed()
    bed.sleeper.handle(question(1, "/old"), 0.0)
    bed.sleeper.handle(question(2, "/new", OTHER), 0.1)
    assert bed.begun == ["/old"], "one at a time"
    bed.sleeper.checked("r-old", "f-old", "")
    assert bed.answers == []
    assert bed.begun == ["/old", "/new"]
    bed.sleeper.checked("r-new", "f-new", "")
    [answer] = bed.answers
    assert (answer.asker, answer.ticket, answer.revision) == (OTHER, 2, "r-new")


def test_it_says_that_it_needs_a_lender_and_lends_itself() -> None:
    bed = Bed()
    bed.sleeper.handle(question(7), 0.0)
    bed.sleeper.checked("", "", "/new has no weights", borrows=True)
    assert bed.answers[-1].borrows
    asked = BorrowWeights(asker=ref("d1", "e0"), ticket=0, revision="r1")
    bed.sleeper.handle(asked, 0.1)
    assert bed.lent == [asked]
