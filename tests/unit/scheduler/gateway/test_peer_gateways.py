"""Gateways that tell each other what they placed: met through one, repaired by the next beat,
forgotten with silence.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from mooncake.base import AnyMessage, PeerLost, Role, WorkerRef
from mooncake.base.messages import OWN_RELEASE, BookingOver, GatewayNews, Release
from mooncake.scheduler.gateway.peer_gateways import FORGET_S, HEARTBEAT_S, PeerGateways
from mooncake.scheduler.placement.admission import Placement
from mooncake.scheduler.placement.conductor import Conductor
from tests.support.scheduler.scheduling import conductor, hello, keys_of, ref, request

TIMEOUT_S = 4.0
WORKERS = [
    hello("p0", Role.PREFILL),
    hello("p1", Role.PREFILL),
    hello("d0", Role.DECODE),
]


class Wire:
    """Brings what one gateway says to another at once; can be told to lose it."""

    def __init__(self) -> None:
        self.gateways: dict[str, Gateway] = {}
        self.cut: set[str] = set()
        self.passed: list[AnyMessage] = []
        self.now = 0.0

    def start(self, name: str, *addresses: str, epoch: str = "e0") -> Gateway:
        gateway = self.gateways[name] = Gateway(self, ref(name, epoch), name, addresses)
        return gateway

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now = min(self.now + HEARTBEAT_S / 4, end)
            for gateway in list(self.gateways.values()):
                gateway.tick()


class Gateway:
    """A Conductor that knows the workers, and its peers. Its address is its name."""

    def __init__(
        self, wire: Wire, own: WorkerRef, address: str, addresses: tuple[str, ...]
    ) -> None:
        self.wire = wire
        self.address = address
        self.ref = WorkerRef(own.worker_id, own.epoch, address)
        self.conductor: Conductor = conductor(WORKERS)
        self.came: list[str] = []
        self.heard: list[AnyMessage] = []
        self.told: list[str] = []
        self.peers = PeerGateways(self.ref, self, self.conductor.bookings, addresses, TIMEOUT_S)

    def send(self, address: str, message: AnyMessage) -> None:
        self.wire.passed.append(message)
        self.told.append(address)
        gateway = self.wire.gateways.get(address)
        if gateway is not None and not {address, self.address} & self.wire.cut:
            gateway.hear(message)

    def hear(self, message: AnyMessage) -> None:
        self.heard.append(message)
        if isinstance(message, GatewayNews) and self.peers.on_news(message, self.wire.now):
            self.came.append(message.gateway.worker_id)

    def tick(self) -> None:
        self.peers.tick(self.wire.now)
        self.peers.check_integrity()

    def place(self, name: str, **fields: Any) -> Placement:
        asked = request(name, **fields)
        placed = self.conductor.place(asked, keys_of(asked), 0, self.wire.now)
        assert isinstance(placed, Placement)
        self.tick()
        return placed

    def foreign(self) -> set[str]:
        return self.conductor.bookings.owners

    def names(self) -> set[str]:
        """Return the bookings seen from a worker: those with a share of it."""
        return {name for view in self.conductor.views for name in view.assigned_ids}

    def check(self, *placed: str) -> None:
        self.conductor.check_integrity(set(placed))


def pair() -> tuple[Wire, Gateway, Gateway]:
    wire = Wire()
    first, second = wire.start("a"), wire.start("b", "a")
    wire.run(2 * HEARTBEAT_S)
    return wire, first, second


def test_alone_there_is_nothing_to_say() -> None:
    wire = Wire()
    only = wire.start("a", "a")
    only.place("r")
    assert only.peers.tick(1.0) is None
    assert only.conductor.bookings.updates is None
    assert wire.passed == []


def test_one_address_is_enough_to_meet_all() -> None:
    wire = Wire()
    gateways = [wire.start("a"), wire.start("b", "a"), wire.start("c", "a")]
    wire.run(3 * HEARTBEAT_S)
    for gateway in gateways:
        others = {other.ref for other in gateways if other is not gateway}
        assert set(gateway.peers.live) == others
        assert sorted(gateway.came) == sorted(other.worker_id for other in others)


def test_a_namesake_is_no_peer() -> None:
    wire = Wire()
    wire.gateways["elsewhere"] = Gateway(wire, ref("a", "e5"), "elsewhere", ())
    first = wire.start("a", "elsewhere")
    wire.run(3 * HEARTBEAT_S)
    assert first.peers.live == []


def test_a_gateway_of_a_release_that_speaks_no_common_version_is_no_peer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    wire = Wire()
    first = wire.start("gateway-0")
    later = Release("9.0", OWN_RELEASE.version + 2, OWN_RELEASE.version + 1)
    news = GatewayNews(gateway=ref("gateway-1"), gateways=[], release=later)
    first.hear(news)
    assert first.peers.live == []
    assert str(later) in caplog.text
    assert str(OWN_RELEASE) in caplog.text
    first.hear(msgspec.structs.replace(news, release=Release("next", later.version, 1)))
    assert first.came == ["gateway-1"]


def test_siblings_follow_what_another_gateway_placed() -> None:
    wire, first, second = pair()
    prompt = list(range(2000))
    placed = first.place("r", prompt_tokens=prompt)
    sibling = second.place("s", prompt_tokens=[*prompt, 7])
    assert sibling.prefill == placed.prefill
    assert sibling.num_cached_tokens == 2000
    assert second.place("t", num_prompt=64).prefill != placed.prefill, "its queue counts"
    second.check("s", "t")
    wire.run(HEARTBEAT_S)
    first.check("r")


def test_what_is_computed_or_over_is_so_everywhere() -> None:
    _, first, second = pair()
    first.place("r", num_prompt=400)
    view = second.conductor.view("p0")
    assert view is not None
    assert view.num_assigned == 1
    first.conductor.on_prefilled(request("r", 400), 1.0)
    first.tick()
    assert view.num_assigned == 0
    assert second.foreign() == {"a"}
    second.check()
    first.conductor.release("r")
    first.tick()
    assert second.foreign() == set()
    second.check()


def test_the_end_that_was_not_heard_is_known_with_the_next_beat() -> None:
    wire, first, second = pair()
    first.place("r")
    first.place("s")
    wire.cut = {"b"}
    first.conductor.release("r")
    first.tick()
    wire.cut = set()
    assert len(second.names()) == 2
    wire.run(HEARTBEAT_S)
    assert len(second.names()) == 1
    second.check()


def test_one_that_comes_later_is_told_of_all() -> None:
    wire, first, _ = pair()
    first.place("r", num_prompt=400)
    first.place("s")
    first.conductor.on_prefilled(request("s"), 1.0)
    third = wire.start("c", "b")
    wire.run(3 * HEARTBEAT_S)
    assert third.foreign() == {"a"}
    assert len(third.names()) == 2
    assert sorted(view.num_assigned for view in third.conductor.views) == [0, 1, 2]
    third.check()


def test_a_new_life_knows_what_others_placed_and_they_forget_the_former_one() -> None:
    wire, first, second = pair()
    first.place("mine")
    second.place("theirs")
    late = [m for m in second.heard if isinstance(m, GatewayNews)][-1]
    again = wire.start("a", "b", epoch="e1")
    wire.run(2 * HEARTBEAT_S)
    assert second.foreign() == set()
    assert second.came == ["a", "a"]
    assert again.foreign() == {"b"}
    second.hear(late)
    assert second.peers.live == [again.ref], "a late word of the former life"


def test_silence_is_forgetting_and_a_return_is_told_all() -> None:
    wire, first, second = pair()
    first.place("r")
    wire.cut = {"a"}
    wire.run(2 * TIMEOUT_S)
    assert second.foreign() == set()
    assert second.peers.live == []
    second.check()
    first.place("s")
    wire.cut = set()
    wire.run(2 * HEARTBEAT_S)
    assert second.peers.live == [first.ref]
    assert second.came == ["a", "a"]
    assert len(second.names()) == 2


def test_the_dead_are_spoken_to_no_more() -> None:
    wire, first, _ = pair()
    del wire.gateways["b"]
    wire.run(TIMEOUT_S + 2 * HEARTBEAT_S)
    first.place("r")
    assert not [m for m in wire.passed[-3:] if isinstance(m, GatewayNews) and m.news]
    wire.now += FORGET_S
    first.tick()
    wire.passed.clear()
    wire.run(3 * HEARTBEAT_S)
    assert wire.passed == []
    assert first.conductor.bookings.updates is None


def test_goodbyes_are_passed_on() -> None:
    _, first, second = pair()
    lost = PeerLost(worker=ref("p0"))
    first.peers.broadcast(lost)
    assert lost in second.heard


def test_a_lost_worker_takes_the_bookings_of_others_along() -> None:
    _, first, second = pair()
    placed = first.place("r", num_prompt=400)
    second.place("s", num_prompt=40)
    assert placed.prefill is not None
    second.conductor.on_lost(placed.prefill.worker_id)
    assert second.foreign() == set()
    second.check("s")
    second.conductor.on_hello(hello(placed.prefill.worker_id, Role.PREFILL, epoch="e1"))
    first.conductor.release("r")
    first.tick()
    second.check("s")


def test_bookings_on_unknown_workers_are_left_out() -> None:
    _, first, second = pair()
    first.conductor.on_hello(hello("p2", Role.PREFILL))
    for name in ("p0", "p1"):
        first.conductor.on_draining(name)
    assert first.place("r").prefill == ref("p2")
    assert second.foreign() == set()
    second.check()


def test_a_booking_heard_twice_counts_once() -> None:
    _, first, second = pair()
    first.place("r", num_prompt=400)
    booked = [m for m in second.heard if isinstance(m, GatewayNews) and m.news][-1]
    second.hear(booked)
    second.check()
    assert [v.num_assigned for v in second.conductor.views] == [1, 0, 1]
    over = BookingOver(request_id="unknown")
    news = GatewayNews(gateway=first.ref, gateways=[], news=[over, over], release=OWN_RELEASE)
    second.hear(news)
    second.check()


def test_gateways_that_leave_are_forgotten_and_silent_ones_are_shown_so() -> None:
    wire, first, second = pair()
    third = wire.start("c", "a")
    wire.run(2 * HEARTBEAT_S)
    second.place("r")
    [state] = [one for one in first.peers.status(wire.now) if one.id == "b"]
    assert (state.state, state.num_inflight) == ("up", 1)
    assert first.peers.take_lost() == []
    del wire.gateways["b"]
    assert not first.peers.on_goodbye(ref("b", "e7")), "a former life"
    assert first.peers.on_goodbye(second.ref)
    assert not first.peers.on_goodbye(second.ref)
    assert first.peers.take_lost() == [second.ref]
    assert first.foreign() == set()
    wire.run(TIMEOUT_S + 2 * HEARTBEAT_S)
    assert {one.id: one.state for one in third.peers.status(wire.now)} == {
        "a": "up", "b": "silent",
    }  # fmt: skip
    assert third.peers.take_lost() == [second.ref]
    assert third.peers.take_lost() == []


def test_an_address_named_by_others_is_not_tried_for_ever() -> None:
    wire, first, second = pair()
    news = GatewayNews(gateway=second.ref, gateways=[ref("gone")], release=OWN_RELEASE)
    first.hear(news)
    wire.run(2 * HEARTBEAT_S)
    told = len(wire.passed)
    assert any(address == ref("gone").address for address in first.told)
    wire.now += FORGET_S
    wire.run(2 * HEARTBEAT_S)
    first.told.clear()
    wire.run(2 * HEARTBEAT_S)
    assert len(wire.passed) > told
    assert ref("gone").address not in first.told


@pytest.mark.parametrize("was_met", [True, False])
def test_an_address_of_one_process_is_not_tried_for_ever(was_met: bool) -> None:
    """Unlike one without a key, where a gateway may come back."""
    wire = Wire()
    process, place = "tcp://h:1#5e", "tcp://h:2"
    own = wire.start("b", process, place)
    if was_met:
        wire.start(process)
        wire.run(2 * HEARTBEAT_S)
        assert own.came == [process]
        del wire.gateways[process]
    wire.run(2 * HEARTBEAT_S)
    assert process in own.told
    for _ in range(2):  # until it is silent, and as long afterwards
        wire.now += FORGET_S
        wire.run(2 * HEARTBEAT_S)
    own.told.clear()
    wire.run(2 * HEARTBEAT_S)
    assert {*own.told} == {place}
    wire.start(place)
    wire.run(2 * HEARTBEAT_S)
    assert own.came[-1] == place


def test_a_new_life_ends_the_old_one_at_once() -> None:
    wire, first, second = pair()
    again = wire.start("b", "a", epoch="e1")
    wire.run(2 * HEARTBEAT_S)
    assert first.peers.take_lost() == [second.ref]
    assert first.peers.live == [again.ref]
