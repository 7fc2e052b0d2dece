"""The loop of a server does not wait for long until a thread lets it have Python's lock."""

from __future__ import annotations

import sys

from mooncake.api.http.event_loop import SWITCH_S, run_in_loop


async def switch_interval_s() -> float:
    return sys.getswitchinterval()


def test_threads_let_the_loop_run_while_it_does_and_as_before_afterwards() -> None:
    before_s = sys.getswitchinterval()
    assert run_in_loop(switch_interval_s()) == SWITCH_S < before_s
    assert sys.getswitchinterval() == before_s
