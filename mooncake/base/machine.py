"""The machine port: the form of everything that decides. A state machine is moved by events and
time, and gets the world as ports.

A loop drives it in production (`launch.driver`), a heap of events in tests and the simulator. A
machine never waits, never reads a clock, never starts a thread.
"""

from __future__ import annotations

from typing import Protocol

import msgspec


class Machine(Protocol):
    """A role: gateway, prefill, decode or kvstore."""

    def handle(self, event: msgspec.Struct, now: float) -> None:
        """Take one message, transfer completion or runner event. Unknown events are ignored."""

    def tick(self, now: float) -> float | None:
        """Do the work that is due. Return the latest time of the next call (None: no timer)."""

    def check_integrity(self) -> None:
        """Raise AssertionError when a resource was lost or freed twice (free + held = total)."""
