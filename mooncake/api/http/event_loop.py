"""The event loop of API servers and their clients: uvloop if it is installed."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")

SWITCH_S = 0.5e-3
"""A thread that computes gives Python's lock to the loop after this time. With Python's own 5 ms a
turn of the loop, in which it writes one token, would take that much longer while a long prompt is
rendered or tokenized in a thread; and one turn asks for the lock several times.
"""


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
