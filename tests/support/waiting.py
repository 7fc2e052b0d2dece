"""Waiting for what other threads and processes bring about."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

LONG_S = 240.0
"""More than anything here takes on a busy machine. It only ends tests that would hang."""
_LOOK_S = 0.1
T = TypeVar("T")


def wait_until(holds: Callable[[], T], what: str, seconds: float = LONG_S) -> T:
    """Wait until `holds` returns something that is true; return it."""
    pause, end_s = threading.Event(), time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < end_s, f"not within {seconds} s: {what}"
        pause.wait(_LOOK_S)
    return found
