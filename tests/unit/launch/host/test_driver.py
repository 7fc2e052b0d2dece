"""The loop: events and timers reach the machine, faults end it, other threads get in between."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError

import msgspec
import pytest

from mooncake.base import AbortTask, Drain, PeerLost, WorkerRef
from mooncake.engine.plan import StepResult
from mooncake.launch.host.driver import Driver, FencedOff
from mooncake.rpc.inproc import InprocChannel, InprocNetwork
from mooncake.transfer.engine import TransferDone
from tests.support.kvstore.pool_process import until
from tests.support.waiting import LONG_S


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
        self.take: Callable[[], bool] = lambda: False

    def offer_events(self, take: Callable[[], bool]) -> None:
        self.take = take

    def offer(self, event: msgspec.Struct) -> bool:
        """Have this thread hand over an event; return whether it did."""
        with self.lock:
            self.queue.append(event)
        return self.take()

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
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self.fd)
        return taken


class Rig:
    """A driver in a thread over real in-process channels."""

    def __init__(self, *, shares: bool = False) -> None:
        network = InprocNetwork()
        self.channel = InprocChannel(network, "machine")
        self.peer = InprocChannel(network, "peer")
        self.transfer, self.runner = Port(), Port()
        self.machine = Recorder()
        self.driver = Driver(
            self.machine, self.channel, transfer=self.transfer, polled=[self.runner],
            shares=shares,
        )  # fmt: skip
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            self.driver.run()
        except BaseException as error:
            self.error = error

    def join(self) -> None:
        self.thread.join(timeout=LONG_S)
        assert not self.thread.is_alive()


@pytest.fixture
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = Rig(shares=getattr(request, "param", False))
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
    assert rig.machine.enough.wait(LONG_S)
    kinds = {type(event).__name__ for event in rig.machine.events}
    assert kinds == {"AbortTask", "TransferDone", "StepResult"}


def test_events_of_one_source_keep_their_order(rig: Rig) -> None:
    rig.machine.wanted = 200
    rig.thread.start()
    for number in range(200):
        rig.peer.send("machine", abort(number))
    assert rig.machine.enough.wait(LONG_S)
    assert rig.machine.events == [abort(number) for number in range(200)]


def test_what_was_there_before_the_start_is_not_lost(rig: Rig) -> None:
    rig.peer.send("machine", abort(1))
    rig.thread.start()
    assert rig.machine.enough.wait(LONG_S)


def test_a_timer_wakes_without_events(rig: Rig) -> None:
    rig.machine.wake_after_s = 0.0
    rig.machine.wanted = 5
    rig.thread.start()
    assert rig.machine.enough.wait(LONG_S)
    assert rig.machine.events == []


def test_the_machine_ticks_after_each_batch_of_events(rig: Rig) -> None:
    rig.thread.start()
    rig.peer.send("machine", abort(1))
    assert rig.machine.enough.wait(LONG_S)
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
    assert rig.driver.call(lambda *_: True).result(LONG_S)
    rig.peer.send("machine", abort(2))
    rig.join()
    assert rig.error is None


def test_it_stops_at_the_limit_if_the_machine_is_never_done(rig: Rig) -> None:
    rig.thread.start()
    rig.driver.stop_when(lambda _: False, 0.05)
    rig.join()
    assert rig.error is None


def test_something_is_done_once_the_machine_is_so_far(rig: Rig) -> None:
    rig.machine.wanted = 2
    done: list[int] = []
    rig.driver.once(
        lambda machine: machine.enough.is_set(), lambda: done.append(len(rig.machine.events))
    )
    rig.thread.start()
    rig.peer.send("machine", abort(1))
    until(lambda: rig.machine.events, "the first has come")
    for _ in range(2):  # between two calls it looks
        rig.driver.call(lambda *_: None).result(LONG_S)
    assert not done
    rig.peer.send("machine", abort(2))
    until(lambda: done == [2], "it is done")
    rig.peer.send("machine", abort(3))
    until(lambda: len(rig.machine.events) == 3, "another has come")
    rig.driver.stop()
    rig.join()
    assert done == [2], "once is enough"


def test_calls_run_in_the_loops_thread_with_its_time(rig: Rig) -> None:
    rig.thread.start()
    name, now = rig.driver.call(lambda machine, now: (threading.current_thread(), now)).result(
        timeout=LONG_S
    )
    assert name is rig.thread
    assert now > 0


shared = pytest.mark.parametrize("rig", [True], indirect=True, ids=["shared"])


def share(rig: Rig) -> None:
    """Start the loop, and return when it waits and other threads may drive the machine."""
    rig.thread.start()
    until(lambda: here(rig) is threading.current_thread(), "this thread drives the machine")


def here(rig: Rig) -> threading.Thread:
    """Return the thread in which a call runs."""
    ran: threading.Thread = rig.driver.call(lambda *_: threading.current_thread()).result(LONG_S)
    return ran


@shared
def test_a_thread_that_has_an_event_drives_the_machine_itself(rig: Rig) -> None:
    assert not rig.transfer.offer(TransferDone(batch_id=1)), "the loop does not run yet"
    share(rig)
    until(lambda: rig.transfer.offer(TransferDone(batch_id=2)), "the machine is free")
    assert TransferDone(batch_id=2) in rig.machine.events
    before = rig.machine.ticks
    until(rig.transfer.take, "the machine is free")
    assert rig.machine.ticks > before, "it ticks once there are no more events"
    rig.driver.stop()
    rig.join()
    assert not rig.transfer.offer(TransferDone(batch_id=3)), "its ports may be closed"
    assert TransferDone(batch_id=3) not in rig.machine.events


@pytest.mark.parametrize("rig", [False, True], indirect=True)
def test_what_is_called_at_the_end_comes_after_what_is_due(rig: Rig) -> None:
    rig.thread.start()
    ticks: list[int] = []

    def work(machine: Recorder, _now: float) -> None:
        before = machine.ticks
        rig.driver.at_end(lambda: ticks.append(machine.ticks - before))

    for _ in range(20):  # some are done by this thread, if turns are shared
        rig.driver.call(work).result(LONG_S)
    until(lambda: len(ticks) == 20, "each is called")
    assert 0 not in ticks


@shared
def test_two_threads_never_drive_the_machine_at_once(rig: Rig) -> None:
    share(rig)
    inside, leave = threading.Event(), threading.Event()

    def slow(_machine: Recorder, _now: float) -> None:
        inside.set()
        assert leave.wait(LONG_S)

    holder = threading.Thread(target=lambda: rig.driver.call(slow))
    holder.start()
    assert inside.wait(LONG_S)
    assert not rig.transfer.offer(TransferDone(batch_id=1))
    late = rig.driver.call(lambda machine, _: list(machine.events))
    assert not late.done()
    leave.set()
    holder.join()
    late.result(LONG_S)
    rig.transfer.put(TransferDone(batch_id=2))  # as the engine rings when nobody took the event
    until(lambda: len(rig.machine.events) == 2, "both have come")


@shared
def test_the_loop_wakes_earlier_if_another_threads_turn_makes_something_due(rig: Rig) -> None:
    rig.machine.wanted = 10**9
    share(rig)

    def hurry(machine: Recorder, _now: float) -> None:
        machine.wake_after_s = 0.0
        machine.wanted = machine.ticks + 5

    rig.driver.call(hurry).result(LONG_S)
    assert rig.machine.enough.wait(LONG_S)


@shared
def test_the_loop_ends_if_another_threads_turn_was_what_it_waited_for(rig: Rig) -> None:
    share(rig)
    rig.driver.stop_when(lambda machine: machine.wanted == 7, None)
    rig.driver.call(lambda machine, _: setattr(machine, "wanted", 7)).result(LONG_S)
    rig.join()
    assert rig.error is None


@shared
def test_a_fault_in_another_threads_turn_ends_the_loop(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    share(rig)
    until(lambda: rig.transfer.offer(Drain()), "the machine is free")
    rig.join()
    assert isinstance(rig.error, RuntimeError)
    assert "the machine broke" in caplog.text
    assert rig.driver.call(lambda *_: None).cancelled()
    assert not rig.transfer.offer(TransferDone(batch_id=1))


@shared
def test_an_interrupt_waits_until_the_turn_is_over(rig: Rig) -> None:
    share(rig)
    ended: list[threading.Thread] = []

    def interrupted(_machine: Recorder, _now: float) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.raise_signal(signal.SIGINT)
        ended.append(threading.current_thread())

    def try_it() -> bool:
        with contextlib.suppress(KeyboardInterrupt):
            rig.driver.call(interrupted)
            return False  # the loop's thread had the machine, and does not raise
        return True

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        until(try_it, "this thread drives the machine and is interrupted")
    finally:
        signal.signal(signal.SIGINT, handler)
    assert threading.current_thread() in ended, "it ran to its end"
    assert rig.driver.call(lambda machine, _: machine.ticks).result(LONG_S) > 0


def test_a_fault_in_a_call_is_the_callers(rig: Rig) -> None:
    rig.thread.start()

    def broken(machine: Recorder, now: float) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        rig.driver.call(broken).result(timeout=LONG_S)
    assert rig.driver.call(lambda machine, now: machine.ticks).result(timeout=LONG_S) > 0


def test_calls_that_came_too_late_are_cancelled(rig: Rig) -> None:
    rig.driver.stop()
    waiting = rig.driver.call(lambda machine, now: None)
    rig.thread.start()
    rig.join()
    with pytest.raises(CancelledError):
        waiting.result(timeout=LONG_S)


def test_a_worker_that_was_given_up_ends(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """It paused too long: peers took back what it held, so it must not go on as it was."""
    mine = WorkerRef("decode-0", "e1", "machine")
    driver = Driver(rig.machine, rig.channel, own=mine)
    rig.peer.send("machine", PeerLost(worker=WorkerRef("decode-0", "e0", "machine")))
    rig.peer.send("machine", PeerLost(worker=mine))
    rig.peer.send("machine", abort(1))
    with (
        pytest.raises(FencedOff, match="the cluster has given decode-0 up"),
        caplog.at_level(logging.ERROR),
    ):
        driver.run()
    [record] = caplog.records
    assert (record.exc_info, "decode-0" in record.getMessage()) == (None, True), "no stack trace"
    assert [type(event) for event in rig.machine.events] == [PeerLost]


def test_an_engine_that_was_given_up_comes_back_unless_another_has_its_name(rig: Rig) -> None:
    mine = WorkerRef("decode-0", "e1", "machine")
    driver = Driver(rig.machine, rig.channel, own=mine, returns=True)
    told = [PeerLost(worker=mine), PeerLost(worker=mine, replaced=True)]
    for each in told:
        rig.peer.send("machine", each)
    with pytest.raises(FencedOff, match="another worker took its name"):
        driver.run()
    assert rig.machine.events == told[:1]
