"""The loop: events and timers reach the machine, faults end it, other threads get in between."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError

import msgspec
import pytest

from mooncake.base import AbortTask, Drain, PeerLost, WorkerRef
from mooncake.engine.plan import StepResult
from mooncake.launch.host.driver import Driver, FencedOff
from mooncake.rpc.inproc import InprocChannel, InprocNetwork
from mooncake.transfer.engine import TransferDone


class Recorder:
    """A machine that writes down what it is given; a `Drain` is a fault."""

    def __init__(self) -> None:
        self.events: list[msgspec.Struct] = []
        self.ticks = 0
        self.wake_after_s: float | None = None
        self.enough = threading.Event()
        self.wanted = 1

    def handle(self, event: msgspec.Struct, now: float) -> None:
        if isinstance(event, Drain):
            raise RuntimeError("the machine broke")
        self.events.append(event)
        if len(self.events) >= self.wanted:
            self.enough.set()

    def tick(self, now: float) -> float | None:
        self.ticks += 1
        if self.wake_after_s is not None and self.ticks >= self.wanted:
            self.enough.set()
        return None if self.wake_after_s is None else now + self.wake_after_s

    def check_integrity(self) -> None:
        assert self.ticks >= 0


class Port:
    """A runner or transfer whose events a test puts in."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK)
        self.queue: list[msgspec.Struct] = []
        self.lock = threading.Lock()

    def put(self, event: msgspec.Struct) -> None:
        with self.lock:
            self.queue.append(event)
            os.eventfd_write(self.fd, 1)

    def fileno(self) -> int:
        return self.fd

    def events(self) -> list[msgspec.Struct]:
        return self.poll()

    def poll(self) -> list[msgspec.Struct]:
        with self.lock:
            taken, self.queue = self.queue, []
            if taken:
                os.eventfd_read(self.fd)
        return taken


class Rig:
    """A driver in a thread over real in-process channels."""

    def __init__(self) -> None:
        network = InprocNetwork()
        self.channel = InprocChannel(network, "machine")
        self.peer = InprocChannel(network, "peer")
        self.transfer, self.runner = Port(), Port()
        self.machine = Recorder()
        self.driver = Driver(
            self.machine, self.channel, transfer=self.transfer, polled=[self.runner]
        )
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            self.driver.run()
        except BaseException as error:
            self.error = error

    def join(self) -> None:
        self.thread.join(timeout=20)
        assert not self.thread.is_alive()


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.driver.stop()
    if rig.thread.ident is not None:
        rig.join()
    rig.channel.close()
    rig.peer.close()
    os.close(rig.transfer.fd)
    os.close(rig.runner.fd)


def abort(number: int) -> AbortTask:
    return AbortTask(request_id=f"r{number}", attempt=0)


def test_messages_completions_and_steps_reach_the_machine(rig: Rig) -> None:
    rig.machine.wanted = 3
    rig.thread.start()
    rig.peer.send("machine", abort(1))
    rig.transfer.put(TransferDone(batch_id=7))
    rig.runner.put(StepResult(step_id=9, seconds=0.0))
    assert rig.machine.enough.wait(20)
    kinds = {type(event).__name__ for event in rig.machine.events}
    assert kinds == {"AbortTask", "TransferDone", "StepResult"}


def test_events_of_one_source_keep_their_order(rig: Rig) -> None:
    rig.machine.wanted = 200
    rig.thread.start()
    for number in range(200):
        rig.peer.send("machine", abort(number))
    assert rig.machine.enough.wait(20)
    assert rig.machine.events == [abort(number) for number in range(200)]


def test_what_was_there_before_the_start_is_not_lost(rig: Rig) -> None:
    rig.peer.send("machine", abort(1))
    rig.thread.start()
    assert rig.machine.enough.wait(20)


def test_a_timer_wakes_without_events(rig: Rig) -> None:
    rig.machine.wake_after_s = 0.0
    rig.machine.wanted = 5
    rig.thread.start()
    assert rig.machine.enough.wait(20)
    assert rig.machine.events == []


def test_the_machine_ticks_after_each_batch_of_events(rig: Rig) -> None:
    rig.thread.start()
    rig.peer.send("machine", abort(1))
    assert rig.machine.enough.wait(20)
    rig.driver.stop()
    rig.join()
    assert rig.machine.ticks >= 2


def test_a_fault_in_the_machine_ends_the_loop_and_is_raised(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.thread.start()
    rig.peer.send("machine", Drain())
    rig.join()
    assert isinstance(rig.error, RuntimeError)
    assert "the machine broke" in caplog.text
    assert rig.driver.call(lambda machine, now: None).cancelled()


def test_stop_works_before_the_start_and_twice(rig: Rig) -> None:
    rig.driver.stop()
    rig.driver.stop()
    rig.thread.start()
    rig.join()
    assert rig.error is None
    rig.driver.stop()


def test_it_stops_once_the_machine_is_done(rig: Rig) -> None:
    rig.machine.wanted = 2
    rig.thread.start()
    rig.driver.stop_when(lambda machine: machine.enough.is_set(), 3600)
    rig.peer.send("machine", abort(1))
    assert rig.driver.call(lambda *_: True).result(20)
    rig.peer.send("machine", abort(2))
    rig.join()
    assert rig.error is None


def test_it_stops_at_the_limit_if_the_machine_is_never_done(rig: Rig) -> None:
    rig.thread.start()
    rig.driver.stop_when(lambda _: False, 0.05)
    rig.join()
    assert rig.error is None


def test_calls_run_in_the_loops_thread_with_its_time(rig: Rig) -> None:
    rig.thread.start()
    name, now = rig.driver.call(lambda machine, now: (threading.current_thread(), now)).result(
        timeout=20
    )
    assert name is rig.thread
    assert now > 0


def test_a_fault_in_a_call_is_the_callers(rig: Rig) -> None:
    rig.thread.start()

    def broken(machine: Recorder, now: float) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        rig.driver.call(broken).result(timeout=20)
    assert rig.driver.call(lambda machine, now: machine.ticks).result(timeout=20) > 0


def test_calls_that_came_too_late_are_cancelled(rig: Rig) -> None:
    rig.driver.stop()
    waiting = rig.driver.call(lambda machine, now: None)
    rig.thread.start()
    rig.join()
    with pytest.raises(CancelledError):
        waiting.result(timeout=20)


def test_a_worker_that_was_given_up_ends(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """It paused too long: peers took back what it held, so it must not go on as it was."""
    mine = WorkerRef("decode-0", "e1", "machine")
    driver = Driver(rig.machine, rig.channel, own=mine)
    rig.peer.send("machine", PeerLost(worker=WorkerRef("decode-0", "e0", "machine")))
    rig.peer.send("machine", PeerLost(worker=mine))
    rig.peer.send("machine", abort(1))
    with pytest.raises(FencedOff, match="decode-0 was given up"), caplog.at_level(logging.ERROR):
        driver.run()
    [record] = caplog.records
    assert (record.exc_info, "decode-0" in record.getMessage()) == (None, True), "no stack trace"
    assert [type(event) for event in rig.machine.events] == [PeerLost]
