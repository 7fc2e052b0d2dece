"""A gateway that has stopped hearing workers asks the others, seldom, before it declares a loss."""

from __future__ import annotations

import pytest

from mooncake.base import PeerLost, Role, WorkerRef
from mooncake.base.messages import OWN_RELEASE, DoubtPeers, GatewayNews, PeersHeard, WhoAreYou
from mooncake.rpc.channel import PeerEnded
from mooncake.scheduler.gateway.peer_gateways import FORGET_S
from tests.support.scheduler.scheduling import SchedulerHarness, ref

PEER = ref("gateway-2")
TIMEOUT_S = 10.0


class TwoGateways(SchedulerHarness):
    """One gateway, and a peer whose messages the test sends."""

    def __init__(self, num_workers: int) -> None:
        super().__init__(heartbeat_timeout_s=TIMEOUT_S)
        self.peer_speaks()
        self.workers = [self.join(f"d{number}", Role.DECODE) for number in range(num_workers)]

    def peer_speaks(self) -> None:
        news = GatewayNews(gateway=PEER, gateways=[], release=OWN_RELEASE)
        self.gateway.handle(news, self.now)

    def run(self, seconds: int) -> float | None:
        """Let time pass in which the peer is heard."""
        for _ in range(seconds):
            self.peer_speaks()
            wake = self.tick(1.0)
        return wake

    def questions(self) -> list[list[WorkerRef]]:
        return [message.peers for message in self.channel.of(DoubtPeers, PEER.address)]


def test_workers_that_fall_silent_together_are_asked_about_together() -> None:
    world = TwoGateways(50)
    world.run(11)
    assert world.questions() == [world.workers]
    world.run(3)
    assert world.questions() == [world.workers] * 4, "once a second until there is an answer"
    assert not world.channel.of(PeerLost)
    answer = PeersHeard(gateway=PEER, heard=world.workers[:20], unheard=world.workers[20:])
    world.gateway.handle(answer, world.now)
    world.run(5)
    assert len(world.questions()) == 4
    for worker in world.workers:
        world.report(worker)
    lost = [message.worker for message in world.channel.of(PeerLost)]
    assert lost == world.workers[20:], "only these are told to end when they are back"


def test_a_member_that_doubts_often_costs_one_question_a_second() -> None:
    world = TwoGateways(1)
    for _ in range(11):
        world.report(world.workers[0])
        world.run(1)
    for number in range(100):
        world.gateway.handle(
            DoubtPeers(worker=world.workers[0], peers=[ref(f"{number}")]), world.now
        )
    assert len(world.questions()) == 1
    world.run(1)
    assert [len(peers) for peers in world.questions()] == [1, 100]


def test_a_gateway_that_hears_neither_workers_nor_gateways_waits_and_does_not_spin() -> None:
    world = TwoGateways(1)
    world.tick(5.0)
    world.report(world.workers[0])
    for _ in range(20):
        wake = world.tick(1.0)
        assert wake is not None
        assert wake > world.now
    world.tick(FORGET_S)
    assert world.questions() == []
    assert world.gateway.status(world.now).workers == []
    world.report(world.workers[0])
    lost = [message.worker for message in world.channel.of(PeerLost)]
    assert lost == [PEER], "the worker may have lived all the time"
    assert len(world.channel.of(WhoAreYou)) == 1


@pytest.mark.parametrize(("num_heard", "ends"), [(2, False), (3, True)])
def test_a_gateway_without_a_network_ends_no_worker_of_other_machines(
    num_heard: int, ends: bool
) -> None:
    """It hears those of its own machine. A gateway that hears half of the workers has a network."""
    world = TwoGateways(6)
    here, elsewhere = world.workers[:num_heard], world.workers[num_heard:]
    for _ in range(30):
        world.tick(1.0)
        for worker in here:
            world.report(worker)
    status = world.gateway.status(world.now)
    assert [each.id for each in status.workers] == [each.worker_id for each in here]
    for worker in elsewhere:
        world.report(worker)
    lost = {message.worker for message in world.channel.of(PeerLost)}
    assert lost & set(world.workers) == (set(elsewhere) if ends else set())
    assert bool(world.channel.of(WhoAreYou)) is not ends, "they may come back as they are"


def test_a_worker_whose_port_refuses_us_alone_is_not_ended() -> None:
    """As a firewall between the two does, too: another gateway may hear the worker."""
    world = TwoGateways(2)
    for worker in world.workers:
        world.gateway.handle(PeerEnded(worker.address), world.now)
    assert world.gateway.status(world.now).workers == [], "none is given requests from here"
    world.run(1)
    heard, ended = world.workers
    world.gateway.handle(PeersHeard(gateway=PEER, heard=[heard], unheard=[ended]), world.now)
    world.run(1)
    for worker in world.workers:
        world.report(worker)
    assert [message.worker for message in world.channel.of(PeerLost)] == [ended]
    assert len(world.channel.of(WhoAreYou)) == 1, "the other one may come back"


def test_an_answer_names_each_worker_once() -> None:
    world = TwoGateways(3)
    for _ in range(11):
        world.report(world.workers[0])
        world.report(world.workers[1])
        world.run(1)
    strangers = [ref(f"x{number}") for number in range(3)]
    world.gateway.handle(DoubtPeers(worker=PEER, peers=[*world.workers, *strangers]), world.now)
    (answer,) = world.channel.of(PeersHeard, PEER.address)
    assert answer.heard == world.workers[:2]
    assert answer.unheard == [world.workers[2], *strangers]
