"""What is known of a loop that answers, is slow, stops answering, was stopped, or has ended."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

import pytest

from mooncake.launch.host import health as health_module
from mooncake.launch.host.health import LOOK_S, Facts, Health
from mooncake.telemetry.health import Status
from tests.support.clock import ManualClock

LIMIT_S = 5.0


class Loop:
    """Answers when it is told to."""

    def __init__(self) -> None:
        self.answers = True
        self.ended = False
        self.facts = Facts(joined=True, draining=False)
        self.asked: list[Future[Facts]] = []

    def ask(self) -> Future[Facts]:
        future: Future[Facts] = Future()
        self.asked.append(future)
        if self.ended:
            future.cancel()
        elif self.answers:
            future.set_result(self.facts)
        return future


@pytest.fixture
def loop() -> Loop:
    return Loop()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def health(loop: Loop, clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> Health:
    monkeypatch.setattr(health_module, "ANSWER_S", 0.0)
    made = Health(LIMIT_S, clock)
    made.watch(loop.ask)
    return made


def look(health: Health, clock: ManualClock, seconds: float, step_s: float = LOOK_S) -> Status:
    """Let time pass in steps, with a look after each; return the last status."""
    status = health.vitals().status
    for _ in range(round(seconds / step_s)):
        clock.advance_to(clock.now() + step_s)
        status = health.vitals().status
    return status


def test_a_start_says_what_it_does(clock: ManualClock) -> None:
    health = Health(LIMIT_S, clock)
    assert (health.vitals().status, health.vitals().reason) == (Status.STARTING, "starting")
    health.starting("loading weights", 3, 10)
    clock.advance_to(1000.0)
    assert health.vitals().reason == "loading weights, 3 of 10"


def test_it_is_what_the_loop_says(health: Health, loop: Loop) -> None:
    assert health.vitals().status is Status.OK
    loop.facts = Facts(joined=False, draining=False)
    assert health.vitals().status is Status.JOINING
    loop.facts = Facts(joined=True, draining=True)
    assert health.vitals().status is Status.DRAINING


def test_a_loop_that_no_longer_turns_is_found_out(
    health: Health, loop: Loop, clock: ManualClock
) -> None:
    loop.answers = False
    assert look(health, clock, LIMIT_S) is Status.JOINING, "what it last said"
    assert look(health, clock, LOOK_S) is Status.STUCK
    assert len(loop.asked) == 1, "one question is open at a time"
    loop.asked[-1].set_result(loop.facts)
    loop.answers = True
    assert health.vitals().status is Status.OK


def test_a_process_that_was_stopped_is_not_stuck(
    health: Health, loop: Loop, clock: ManualClock
) -> None:
    loop.answers = False
    health.vitals()
    clock.advance_to(10 * LIMIT_S)
    assert health.vitals().status is not Status.STUCK


def test_slow_answers_are_answers(health: Health, loop: Loop, clock: ManualClock) -> None:
    loop.answers = False
    for _ in range(20):
        assert look(health, clock, LIMIT_S - LOOK_S) is not Status.STUCK
        loop.asked[-1].set_result(loop.facts)
        assert health.vitals().status is Status.OK


def test_a_loop_that_ended_in_good_order_takes_nothing_new(health: Health, loop: Loop) -> None:
    loop.ended = True
    assert health.vitals().status is Status.DRAINING


def test_a_fault_stays(health: Health, loop: Loop) -> None:
    health.fail("step 3 made no progress for 5 s")
    assert health.failed
    assert health.vitals().status is Status.FAILED
    assert loop.asked == [], "nobody is asked any more"


def test_another_life_starts_anew(health: Health, loop: Loop, clock: ManualClock) -> None:
    loop.answers = False
    look(health, clock, LIMIT_S)
    health.starting("timing a few steps")
    assert health.vitals().status is Status.STARTING
    other = Loop()
    health.watch(other.ask)
    assert health.vitals().status is Status.OK


def test_only_a_watchdog_that_sees_it_stuck_ends_it() -> None:
    told: list[str] = []
    rounds = iter([[], [_stuck(6)], [_stuck(7)], [], [_stuck(6)]])
    dog = health_module.Watchdog.__new__(health_module.Watchdog)
    waits = iter([False] * 5 + [True])
    dog._closed = _Waits(lambda: next(waits))  # type: ignore[assignment]
    dog._parts = lambda: next(rounds)
    dog._stuck = told.append
    dog._run()
    assert told == ["its loop has not turned for 6 s"] * 2


class _Waits:
    def __init__(self, wait: Callable[[], bool]) -> None:
        self._wait = wait

    def wait(self, seconds: float) -> bool:
        assert seconds == LOOK_S
        return self._wait()


def _stuck(seconds: float) -> health_module.Vitals:
    return health_module.Vitals(stuck_s=seconds, limit_s=LIMIT_S)
