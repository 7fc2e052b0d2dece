"""The event loop of API servers and their clients: uvloop if it is installed."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


def run_in_loop(work: Coroutine[Any, Any, Result]) -> Result:
    """Run `work` in a fresh event loop and return what it returns.

    uvloop saves a third of the CPU time of a streamed token (`benchmarks/overhead.py`).
    """
    with asyncio.Runner(loop_factory=_fast_loop()) as runner:
        return runner.run(work)


def _fast_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:  # an extra: not every installation has it
        uvloop = importlib.import_module("uvloop")
    except ModuleNotFoundError:
        return None
    make: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return make
