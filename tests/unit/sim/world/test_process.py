"""A process in simulated time: ticks when asked, hangs, dies, keeps its own clock; the wires lose
and reorder only when told to.
"""

from __future__ import annotations

from random import Random

import msgspec

from mooncake.base.messages import Drain, Unpin, WorkerRef
from mooncake.sim.world.clock import EventHeap
from mooncake.sim.world.network import Endpoint, Network, NetworkConfig, SimChannel
from mooncake.sim.world.process import SimProcess

REF = WorkerRef("w", "e1", "w/e1")


class Machine:
    """Writes down what reaches it; wants to tick every `every_s`."""

    def __init__(self, every_s: float | None = 1.0) -> None:
        self.every_s = every_s
        self.ticks: list[float] = []
        self.events: list[tuple[float, msgspec.Struct]] = []

    def handle(self, event: msgspec.Struct, now: float) -> None:
        self.events.append((now, event))

    def tick(self, now: float) -> float | None:
        self.ticks.append(now)
        return (
            None
            if self.every_s is None
            else self.ticks[0] + self.every_s * len([t for t in self.ticks if t >= self.ticks[0]])
        )

    def check_integrity(self) -> None:
        pass


def start(machine: Machine, skew_s: float = 0.0) -> tuple[EventHeap, SimProcess]:
    heap = EventHeap()
    process = SimProcess("p", heap, skew_s=skew_s)
    process.start(machine)
    return heap, process


def test_it_ticks_at_the_start_and_when_it_wanted_to() -> None:
    machine = Machine(every_s=1.0)
    heap, _ = start(machine)
    heap.run_until(3.5)
    assert machine.ticks == [0.0, 1.0, 2.0, 3.0]


def test_it_ticks_after_every_event() -> None:
    machine = Machine(every_s=None)
    heap, process = start(machine)
    heap.at(0.5, lambda: process.deliver(Drain()))
    heap.run_until(9.0)
    assert machine.ticks == [0.0, 0.5]


def test_a_later_wish_uses_the_timer_that_is_set() -> None:
    machine = Machine(every_s=100.0)
    heap, process = start(machine)
    for number in range(50):
        heap.at(number + 0.5, lambda: process.deliver(Drain()))
    heap.run_until(60.0)
    assert heap.num_run < 60


def test_a_clock_that_is_ahead_is_its_own() -> None:
    machine = Machine(every_s=1.0)
    heap, process = start(machine, skew_s=500.0)
    heap.at(0.25, lambda: process.deliver(Drain()))
    heap.run_until(1.0)
    assert machine.events[0][0] == 500.25
    assert machine.ticks[:2] == [500.0, 500.25]


def test_what_comes_while_it_hangs_is_handled_afterwards() -> None:
    machine = Machine(every_s=0.1)
    heap, process = start(machine)
    heap.at(0.15, lambda: process.hang(2.0))
    heap.at(1.0, lambda: process.deliver(Drain()))
    heap.run_until(2.1)
    assert not machine.events
    assert max(machine.ticks) < 0.16
    heap.run_until(3.0)
    assert [at for at, _ in machine.events] == [2.15]
    assert max(machine.ticks) > 2.5


def test_nothing_reaches_the_dead() -> None:
    machine = Machine(every_s=0.1)
    heap, process = start(machine)
    heap.run_until(0.5)
    process.kill()
    process.deliver(Drain())
    ticks = len(machine.ticks)
    heap.run_until(5.0)
    assert (len(machine.ticks), machine.events) == (ticks, [])


def sent(config: NetworkConfig, count: int = 200) -> list[int]:
    """Send numbered messages and return the numbers that arrive, in that order."""
    heap, got = EventHeap(), []
    network = Network(heap, config, Random(1))
    source = Endpoint("a", "node-a", lambda _: None)
    network.attach(source)
    network.attach(Endpoint("b", "node-b", lambda message: got.append(message.ticket)))  # type: ignore[attr-defined]
    channel = SimChannel(network, source)
    for number in range(count):
        heap.at(
            number * 0.001,
            lambda number=number: channel.send("b", Unpin(reader=REF, ticket=number)),
        )  # type: ignore[misc]
    heap.run_until(10.0)
    return got


def test_jitter_keeps_the_order_of_a_pair() -> None:
    assert sent(NetworkConfig(message_jitter_s=0.1)) == list(range(200))


def test_messages_are_lost_and_reordered_only_when_told_to() -> None:
    lossy = sent(NetworkConfig(loss=0.3))
    assert lossy == sorted(lossy)
    assert 100 < len(lossy) < 180
    mixed = sent(NetworkConfig(reordered=0.5, message_jitter_s=0.05))
    assert sorted(mixed) == list(range(200))
    assert mixed != sorted(mixed)
