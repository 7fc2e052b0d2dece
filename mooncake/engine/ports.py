"""What the engine needs of the world: something that runs a step, and pages to run it on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from mooncake.base.grammar import Grammar
from mooncake.engine.plan import RunnerEvent, StepPlan


class Runner(Protocol):
    """Runs steps in order on the model. Events are brought to the role's `handle` by the driver."""

    def prepare(self, grammar: Grammar) -> None:
        """A sequence with this grammar comes soon: begin what takes long; never blocks."""

    def submit(self, plan: StepPlan) -> None:
        """Start a step; never blocks. Exactly one `StepResult` follows, after any `LayerDone`s."""


class PolledRunner(Runner, Protocol):
    """A runner that a driver's loop reads."""

    def fileno(self) -> int:
        """A descriptor that becomes readable when an event is there."""

    def poll(self) -> Sequence[RunnerEvent]:
        """Return the events since the last call, oldest first, without waiting."""

    def close(self) -> None:
        """Finish the running step and free the model."""
