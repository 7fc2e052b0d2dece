"""What threads spend for a call: CPU time is the caller's, waits are of the thread that waits."""

from __future__ import annotations

import os
import threading
import time

from benchmarks.support import thread_times
from benchmarks.support.thread_times import Spent, measure, own_names


def busy(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_each_thread_has_its_own_cpu_time_and_waits() -> None:
    wanted, done = threading.Semaphore(0), threading.Semaphore(0)

    def serve() -> None:
        while wanted.acquire() and not ended:
            busy(0.01)
            done.release()

    def call() -> None:
        busy(0.002)
        wanted.release()
        done.acquire()

    ended: list[bool] = []
    server = threading.Thread(target=serve, name="server")
    server.start()
    try:
        took = measure(call, 20, {"us": os.getpid()})
    finally:
        ended.append(True)
        wanted.release()
        server.join()
    own, served = took["us", threading.get_native_id()], took["us", server.native_id or 0]
    assert 0.002 <= own.cpu_s < served.cpu_s
    assert served.cpu_s >= 0.01
    assert own.num_waits >= 0.5
    assert served.num_waits >= 0.5
    assert next(iter(took)) == ("us", server.native_id), "the most costly comes first"


def test_names_are_those_of_this_process() -> None:
    assert own_names()[threading.get_native_id()] == threading.current_thread().name


def test_what_was_spent_before_does_not_count() -> None:
    assert Spent(3.0, 1.0, 9).since(Spent(1.0, 0.5, 5), 2) == Spent(1.0, 0.25, 2.0)
    assert all(spent.cpu_s >= 0 for spent in thread_times.read(os.getpid()).values())
