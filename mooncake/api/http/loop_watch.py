"""Measures how long something blocks the event loop, during which no stream moves. Owns nothing."""

from __future__ import annotations

import asyncio
import time

from mooncake.base import Clock
from mooncake.telemetry.events import LoopHeld, Recorder

LOOK_S = 0.02
LEAST_S = 0.01
"""Shorter times are not recorded: every request causes some."""


async def watch_loop(clock: Clock, recorder: Recorder) -> None:
    """Record each time that something blocks the running loop, until cancelled.

    A wait counts only as far as this process computed meanwhile. Time that other processes of a
    busy machine took does not count.
    """
    while True:
        began_s, computed_s = clock.now(), time.process_time()
        await asyncio.sleep(LOOK_S)
        now = clock.now()
        held_s = min(now - began_s - LOOK_S, time.process_time() - computed_s)
        if held_s >= LEAST_S:
            recorder.record(LoopHeld(at_s=now, held_s=held_s))
