"""The simulator's twin of notices: the same outbox, so the same rules, on simulated wires."""

from __future__ import annotations

from random import Random

import msgspec
import pytest

from mooncake.sim.clock import EventHeap
from mooncake.sim.network import Endpoint, Network, NetworkConfig, SimTransfer
from mooncake.transfer.engine import Notice, Op, Region, TransferBatch, TransferDone, TransferOp

MIB = 2**20


class World:
    """Two processes on two nodes; what each was given, in order of time."""

    def __init__(self) -> None:
        self.heap = EventHeap()
        self.network = Network(self.heap, NetworkConfig(link_bytes_per_s=1e9), Random(1))
        self.events: dict[str, list[msgspec.Struct]] = {"us": [], "peer": []}
        self.ends = [self.end(name) for name in self.events]
        self.us, self.peer = (SimTransfer(self.network, end, with_bytes=True) for end in self.ends)
        self.ours: Region = self.us.allocate(8 * MIB, "ours")
        self.theirs: Region = self.peer.allocate(8 * MIB, "theirs")

    def end(self, name: str) -> Endpoint:
        endpoint = Endpoint(name, f"node of {name}", self.events[name].append)
        self.network.attach(endpoint)
        return endpoint

    def submit(
        self, payload: bytes, num_bytes: int, deadline_s: float | None = None, remote: int = 1
    ) -> int:
        op = TransferOp(self.ours.region_id, 0, remote, 0, num_bytes)
        batch = TransferBatch(
            op=Op.WRITE,
            peer=self.peer.segment,
            ops=[op] if num_bytes else [],
            deadline_s=deadline_s,
            notify=payload,
        )
        return self.us.submit(batch)

    def heard(self) -> list[bytes]:
        return [event.payload for event in self.events["peer"] if isinstance(event, Notice)]

    def errors(self) -> dict[int, str | None]:
        done = [event for event in self.events["us"] if isinstance(event, TransferDone)]
        assert len({event.batch_id for event in done}) == len(done), "a batch ended twice"
        return {event.batch_id: event.error for event in done}


@pytest.fixture
def world() -> World:
    return World()


def test_words_come_after_the_bytes_in_order(world: World) -> None:
    world.ours.buffer[:] = b"x" * world.ours.num_bytes
    ids = [world.submit(b"%d" % n, 8 * MIB if n == 0 else 0) for n in range(4)]
    while not world.heard():
        assert world.heap.step()
    assert world.theirs.buffer == world.ours.buffer
    assert not world.errors(), "a batch ended before its peer had answered"
    world.heap.run_until(60.0)
    assert world.heard() == [b"0", b"1", b"2", b"3"]
    assert world.errors() == dict.fromkeys(ids)


def test_failures_are_not_said_and_touch_nothing_after_their_end(world: World) -> None:
    refused = world.submit(b"refused", 8, remote=9)
    cancelled = world.submit(b"cancelled", 8 * MIB)
    late = world.submit(b"late", 8 * MIB, deadline_s=0.001)
    well = world.submit(b"well", 0)
    world.us.cancel(cancelled)
    world.ours.buffer[:] = b"x" * world.ours.num_bytes
    world.heap.run_until(60.0)
    assert world.heard() == [b"well"]
    assert {name for name, error in world.errors().items() if error is None} == {well}
    assert set(world.errors()) == {refused, cancelled, late, well}
    assert world.theirs.buffer == bytes(8 * MIB)


def test_a_lost_peer_leaves_it_unconfirmed(world: World) -> None:
    batch_id = world.submit(b"x", 0)
    world.heap.step()
    world.network.detach("peer")
    world.heap.run_until(60.0)
    assert "unconfirmed" in (world.errors()[batch_id] or "")
    assert world.heard() == []
