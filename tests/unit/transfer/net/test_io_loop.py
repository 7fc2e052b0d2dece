"""The I/O loop: events, posts, timers, and that one bad handler hurts no other."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from mooncake.transfer.net.io_loop import READABLE, IoLoop
from mooncake.transfer.regions import Gates
from tests.support.transfer.driving import WAIT_S


@pytest.fixture
def loop() -> Iterator[IoLoop]:
    made = IoLoop(Gates(), "test-loop")
    yield made
    made.close()


def run_in(loop: IoLoop, call: object) -> object:
    """Run `call` in the loop's thread and return its result."""
    done = threading.Event()
    results: list[object] = []

    def work() -> None:
        assert callable(call)
        results.append(call())
        done.set()

    loop.post(work)
    assert done.wait(WAIT_S)
    return results[0]


def test_posted_calls_run_in_order_in_one_thread(loop: IoLoop) -> None:
    names: list[tuple[int, str]] = []
    for index in range(100):
        loop.post(lambda index=index: names.append((index, threading.current_thread().name)))
    run_in(loop, lambda: None)
    assert names == [(index, "test-loop") for index in range(100)]


def test_what_its_own_thread_posts_runs_after_what_it_does_now(loop: IoLoop) -> None:
    ran: list[object] = []
    done = threading.Event()

    def outer() -> None:
        loop.post(lambda: ran.append("posted"))
        ran.append(loop.post_here(done.set))
        ran.append("outer")

    assert not loop.post_here(lambda: ran.append("never")), "this is another thread"
    loop.post(outer)
    assert done.wait(WAIT_S)
    assert ran == [True, "outer", "posted"]


def test_calls_that_post_themselves_again_leave_descriptors_their_turn(loop: IoLoop) -> None:
    reader, writer = os.pipe()
    handled = threading.Event()

    def again() -> None:
        if not handled.is_set():
            loop.post(again)

    run_in(loop, lambda: loop.add(reader, READABLE, lambda _events: handled.set()))
    loop.post(again)
    os.write(writer, b"x")
    assert handled.wait(WAIT_S)
    run_in(loop, lambda: loop.remove(reader))
    os.close(reader)
    os.close(writer)


def test_a_readable_descriptor_is_handled_until_it_is_removed(loop: IoLoop) -> None:
    reader, writer = os.pipe()
    got: list[bytes] = []
    arrived = threading.Event()

    def on_event(events: int) -> None:
        assert events & READABLE
        got.append(os.read(reader, 100))
        arrived.set()

    run_in(loop, lambda: loop.add(reader, READABLE, on_event))
    os.write(writer, b"one")
    assert arrived.wait(WAIT_S)
    assert run_in(loop, lambda: loop.num_handlers) == 1
    run_in(loop, lambda: loop.remove(reader))
    run_in(loop, lambda: loop.remove(reader))
    os.write(writer, b"two")
    run_in(loop, lambda: None)
    assert got == [b"one"]
    os.close(reader)
    os.close(writer)


def test_an_event_for_a_number_used_again_in_the_same_round_is_dropped(loop: IoLoop) -> None:
    """Two pipes are ready at once; the first handler replaces the other's descriptor."""
    pipes = [os.pipe(), os.pipe()]
    handled: list[str] = []
    done = threading.Event()

    def replace(mine: int, other: int) -> None:
        handled.append("first")
        for reader in (mine, other):
            loop.remove(reader)
        again = os.dup(mine)  # nothing closed yet: another number, then the same one again
        os.dup2(again, other)
        os.close(again)
        os.read(mine, 10)
        loop.add(other, READABLE, lambda _events: handled.append("stale"))
        loop.post(done.set)

    def start() -> None:
        (a, _), (b, _) = pipes
        loop.add(a, READABLE, lambda _events: replace(a, b))
        loop.add(b, READABLE, lambda _events: replace(b, a))
        for _, writer in pipes:
            os.write(writer, b"x")

    run_in(loop, start)
    assert done.wait(WAIT_S)
    run_in(loop, lambda: None)
    assert handled == ["first"]
    for reader, writer in pipes:
        run_in(loop, lambda reader=reader: loop.remove(reader))
        os.close(reader)
        os.close(writer)


def test_timers_fire_in_order_unless_cancelled(loop: IoLoop) -> None:
    fired: list[str] = []
    done = threading.Event()

    def start() -> None:
        loop.call_later(0.03, done.set)
        loop.call_later(0.02, lambda: fired.append("second"))
        loop.call_later(0.01, lambda: fired.append("first"))
        loop.call_later(0.015, lambda: fired.append("never")).cancel()

    run_in(loop, start)
    assert done.wait(WAIT_S)
    assert fired == ["first", "second"]


def test_a_handler_that_raises_is_logged_and_the_loop_goes_on(
    loop: IoLoop, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> None:
        raise RuntimeError("oh no")

    loop.post(broken)
    assert run_in(loop, lambda: 5) == 5
    assert "oh no" in caplog.text


def test_close_runs_what_was_posted_and_frees_everything() -> None:
    threads, fds = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    gates = Gates()
    loop = IoLoop(gates, "short-lived")
    ran: list[int] = []
    loop.post(lambda: ran.append(1))
    loop.close()
    loop.close()
    loop.post(lambda: ran.append(2))
    assert ran == [1]
    # What earlier tests left may end meanwhile.
    assert set(threading.enumerate()) <= threads
    assert len(os.listdir("/proc/self/fd")) <= fds
    gates.pass_all()
