"""The ports of an engine: something that runs a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from mooncake.base.grammar import Grammar
from mooncake.engine.plan import RunnerEvent, StepPlan


class Runner(Protocol):
    """Runs steps in order on the model. The driver passes its events to the role's `handle`."""

    def prepare(self, grammar: Grammar) -> None:
        """Start compiling a grammar that a sequence will need soon; never blocks."""

    def submit(self, plan: StepPlan) -> None:
        """Start a step; never blocks. Exactly one `StepResult` follows, after any `LayerDone`s."""


class PolledRunner(Runner, Protocol):
    """A runner that a driver's loop polls."""

    def fileno(self) -> int:
        """Return a descriptor that is readable when an event is there."""

    def poll(self) -> Sequence[RunnerEvent]:
        """Return the events since the last call, oldest first, without waiting."""

    def close(self) -> None:
        """Finish the running step and free the model."""
