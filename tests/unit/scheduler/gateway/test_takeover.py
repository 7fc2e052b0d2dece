"""A gateway that starts among workers of another: who lives, and who is lost with what it held."""

from __future__ import annotations

from mooncake.base import LoadReport, PeerLost, Role, SeededIds, WorkerLoad
from mooncake.base.messages import DoubtPeers, WhoAreYou
from mooncake.scheduler.config import SchedulerConfig
from mooncake.scheduler.gateway.gateway import Gateway
from mooncake.scheduler.placement.conductor import Conductor
from mooncake.telemetry.events import EventList
from tests.support.scheduler.scheduling import GATEWAY, Inbox, hello, ref

POOL = hello("kv0", Role.KVSTORE)
ENGINE = hello("d0", Role.DECODE)


def gateway(channel: Inbox) -> Gateway:
    config = SchedulerConfig(heartbeat_timeout_s=10.0)
    conductor = Conductor(config, SeededIds(0))
    return Gateway(config, GATEWAY, conductor, channel, SeededIds(1), EventList())


def test_an_unknown_worker_with_a_heartbeat_is_asked_to_join() -> None:
    channel = Inbox()
    machine = gateway(channel)
    machine.handle(LoadReport(worker=POOL.worker, load=WorkerLoad()), 0.0)
    assert channel.sent == [(POOL.worker.address, WhoAreYou(gateway=GATEWAY))]
    machine.handle(POOL, 0.1)
    machine.handle(LoadReport(worker=POOL.worker, load=WorkerLoad()), 0.2)
    assert len(channel.of(WhoAreYou)) == 1


def test_the_doubted_are_lost_when_they_had_time_to_come_and_did_not() -> None:
    channel = Inbox()
    machine = gateway(channel)
    machine.handle(POOL, 0.0)
    machine.handle(ENGINE, 1.0)
    gone = ref("p0", "e7")
    doubt = DoubtPeers(worker=POOL.worker, peers=[ENGINE.worker, gone, ref("d0", "older")])
    machine.handle(doubt, 9.9)
    assert channel.of(PeerLost) == []
    machine.handle(doubt, 10.0)
    lost = channel.of(PeerLost, POOL.worker.address)
    assert lost == [PeerLost(worker=gone), PeerLost(worker=ref("d0", "older"))]
    assert channel.of(PeerLost, ENGINE.worker.address) == lost, "all are told, not the asker only"
    machine.handle(hello("p0", Role.PREFILL, epoch="e7"), 11.0)
    assert channel.of(PeerLost, gone.address) == [PeerLost(worker=gone)], "it must start afresh"


def test_the_doubts_of_a_stranger_are_not_heard() -> None:
    channel = Inbox()
    machine = gateway(channel)
    machine.handle(ENGINE, 0.0)
    machine.handle(DoubtPeers(worker=POOL.worker, peers=[ref("p0")]), 50.0)
    assert channel.of(PeerLost) == []
