"""The event loop of API servers and their clients: uvloop if it is installed, and a measure of how
long something blocks it, during which no stream moves.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from mooncake.base import Clock
from mooncake.telemetry.events import LoopHeld, Recorder

Result = TypeVar("Result")

SWITCH_S = 0.5e-3
"""A thread that computes gives Python's lock to the loop after this time. With Python's own 5 ms a
turn of the loop, in which it writes one token, would take that much longer while a long prompt is
rendered or tokenized in a thread; and one turn asks for the lock several times.
"""
LOOK_S = 0.02
IDLE_LOOK_S = 0.2
"""While no call runs, no stream waits for the loop, and looking would be most of what it does."""
IDLE_AFTER = 50
"""Looks at no call, one after another, until that counts: between two calls of a client is less."""
LEAST_S = 0.01
"""Shorter times are not recorded: every request causes some."""


def run_in_loop(work: Coroutine[Any, Any, Result]) -> Result:
    """Run `work` in a fresh event loop and return what it returns.

    uvloop saves a third of the CPU time of a streamed token (`benchmarks/overhead.py`). Meanwhile
    other threads of the process let the loop run within `SWITCH_S`.
    """
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        with asyncio.Runner(loop_factory=_fast_loop()) as runner:
            return runner.run(work)
    finally:
        sys.setswitchinterval(before_s)


def _fast_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:  # an extra: not every installation has it
        uvloop = importlib.import_module("uvloop")
    except ModuleNotFoundError:
        return None
    make: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return make


async def watch_loop(clock: Clock, recorder: Recorder, num_calls: Callable[[], int]) -> None:
    """Record each time that something blocks the running loop, until cancelled. `num_calls` returns
    how many calls run.

    A wait counts only as far as this process computed meanwhile. Time that other processes of a
    busy machine took does not count.
    """
    num_idle = 0
    while True:
        num_idle = 0 if num_calls() else num_idle + 1
        look_s = LOOK_S if num_idle < IDLE_AFTER else IDLE_LOOK_S
        began_s, computed_s = clock.now(), time.process_time()
        await asyncio.sleep(look_s)
        now = clock.now()
        held_s = min(now - began_s - look_s, time.process_time() - computed_s)
        if held_s >= LEAST_S:
            recorder.record(LoopHeld(at_s=now, held_s=held_s))
