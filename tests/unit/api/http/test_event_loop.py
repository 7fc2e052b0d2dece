"""The loop of a server does not wait for long until a thread lets it have Python's lock."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from mooncake.api.http.event_loop import SWITCH_S, run_in_loop


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
