"""The shape of everything that decides: a state machine moved by events and time, the world passed
in as ports.

Real life drives it with a loop (`launch.driver`), tests and the simulator with a heap of events. A
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
        """Do what is due, start what can start; return when to be called again at the latest
        (None: no timer).
        """

    def check_integrity(self) -> None:
        """Raise AssertionError when a resource was lost or freed twice (free + held = total)."""
