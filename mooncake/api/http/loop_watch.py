"""Measures how long something holds the event loop, in which no stream moves. Owns nothing."""

from __future__ import annotations

import asyncio
import time

from mooncake.base import Clock
from mooncake.telemetry.events import LoopHeld, Recorder

LOOK_S = 0.02
LEAST_S = 0.01
"""Shorter holds are not recorded: every request makes some."""


async def watch_loop(clock: Clock, recorder: Recorder) -> None:
    """Record each hold of the running loop; until cancelled.

    A wait counts as far as this process computed meanwhile: what other processes of a busy machine
    took is no hold of ours.
    """
    while True:
        began_s, computed_s = clock.now(), time.process_time()
        await asyncio.sleep(LOOK_S)
        now = clock.now()
        held_s = min(now - began_s - LOOK_S, time.process_time() - computed_s)
        if held_s >= LEAST_S:
            recorder.record(LoopHeld(at_s=now, held_s=held_s))
