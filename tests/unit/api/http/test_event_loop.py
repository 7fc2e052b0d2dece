"""The loop of a server does not wait for long until a thread lets it have Python's lock, and what
holds it while calls run is recorded.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator

import pytest

from mooncake.api.http import event_loop
from mooncake.api.http.event_loop import (
    IDLE_AFTER,
    IDLE_LOOK_S,
    LOOK_S,
    SWITCH_S,
    run_in_loop,
    watch_loop,
)
from mooncake.telemetry.events import EventList, LoopHeld
from tests.support.clock import ManualClock


async def switch_interval_s() -> float:
    return sys.getswitchinterval()


@pytest.fixture
def before_s() -> Iterator[float]:
    """Python's own interval, whatever another test has left."""
    found_s = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    yield sys.getswitchinterval()
    sys.setswitchinterval(found_s)


def test_threads_let_the_loop_run_while_it_does_and_as_before_afterwards(before_s: float) -> None:
    assert run_in_loop(switch_interval_s()) == pytest.approx(SWITCH_S)
    assert pytest.approx(SWITCH_S) != before_s
    assert sys.getswitchinterval() == before_s


def test_a_hold_is_recorded_and_an_idle_loop_is_looked_at_rarely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, events, slept = ManualClock(), EventList(), list[float]()
    calls = [*[0] * (IDLE_AFTER + 1), 2, 0]

    async def sleep(seconds: float) -> None:
        """Sleep, and hold the loop for a moment the last time."""
        slept.append(seconds)
        held_s = 0.0 if calls else 0.03
        clock.advance_to(clock.now() + seconds + held_s)
        end_s = time.process_time() + held_s
        while time.process_time() < end_s:
            pass

    monkeypatch.setattr(event_loop.asyncio, "sleep", sleep)
    with pytest.raises(IndexError):  # no more looks
        asyncio.run(watch_loop(clock, events, lambda: calls.pop(0)))
    assert slept == [*[LOOK_S] * (IDLE_AFTER - 1), IDLE_LOOK_S, IDLE_LOOK_S, LOOK_S, LOOK_S]
    [held] = events.events
    assert isinstance(held, LoopHeld)
    assert held.held_s == pytest.approx(0.03)
